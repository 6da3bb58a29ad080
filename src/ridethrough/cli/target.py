"""From what the user typed to a run or a checkpoint, or to an error that says where to look instead.

RUN is a run directory. CKPT is the directory of a step, `RUN@STEP`, or a run: then its newest
restorable checkpoint is meant. A path inside a step directory stands for that checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace

from ridethrough.cli.overview import Overview
from ridethrough.cli.text import listed, nearest, quote
from ridethrough.errors import Damaged, NothingRestorable, StorageDenied, StorageError, StorageUnreachable, StoreMissing, UsageError
from ridethrough.format import layout
from ridethrough.redact import redact_text
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import Catalog, Checkpoint, progress_evidence, read_catalog

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
_MOST_SUGGESTED = 200
"""Directories looked into for a suggestion: a hint may not take longer than the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the user meant."""

    verb: str
    shown: str
    """The run, the way the user wrote it."""
    run_dir: str
    """The run, absolute."""
    dir_name: str | None = None
    """The step directory that was named."""
    step: int | None = None
    """The step that was named by RUN@STEP."""

    @property
    def is_run(self) -> bool:
        """The whole run was named, no particular checkpoint."""
        return self.dir_name is None and self.step is None


def find(fs: FileSystem, path: str, *, verb: str) -> Target:
    """The run that `path` names or lies in, and the checkpoint if it names one.

    Raises:
        StoreMissing: There is nothing, or something else; the hint says where to look.
    """
    if not path:
        raise UsageError(detail=f"{verb} got an empty path (an unset variable?)", hint=f"ridethrough {verb} --help")
    full = os.path.abspath(path)
    if _URL.match(path) and not _exists(fs, full):
        raise UsageError(
            detail=f"{verb} reads a directory of this machine, not {redact_text(path)}",
            hint=f"ridethrough restore RUN --from {quote(redact_text(path))}   (brings a copy here)",
        )
    if not _exists(fs, full):
        base, at, step = path.rpartition("@")
        if at and base and step.isascii() and step.isdecimal():
            target = find(fs, base, verb=verb)
            if target.is_run:
                return replace(target, step=int(step))
        raise _absent(fs, full, path, verb)
    # A link such as `last` is followed only where its own place says nothing.
    for candidate in dict.fromkeys((full, os.path.realpath(full))):
        found = _climb(fs, candidate, path, verb)
        if found is not None:
            return found
    raise _no_run(fs, full, path, verb)


def _climb(fs: FileSystem, full: str, path: str, verb: str) -> Target | None:
    below: list[str] = []
    probe = full
    for _ in range(3):
        if _exists(fs, os.path.join(probe, layout.RUN)) or _has_lost_marker(fs, probe, below):
            if not below or below == [layout.RUN]:
                shown = path if not below else _shown(probe, path)
                return Target(verb=verb, shown=shown, run_dir=probe)
            if layout.parse_step_dir(below[0]):
                return Target(verb=verb, shown=_shown(probe, path), run_dir=probe, dir_name=below[0])
            return None
        below.insert(0, os.path.basename(probe))
        probe = os.path.dirname(probe)
    return None


def _has_lost_marker(fs: FileSystem, directory: str, below: list[str]) -> bool:
    """`run.json` is gone, but there are records of a run; the seals then say which."""
    if below:
        return layout.parse_step_dir(below[0]) is not None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if any(layout.parse_step_dir(name) for name in fs.list_dir(directory)):
            return True
        return any(layout.parse_attempt_dir(name) for name in fs.list_dir(os.path.join(directory, layout.ATTEMPTS)))
    return False


def _shown(run_dir: str, path: str) -> str:
    return run_dir if os.path.isabs(path) else os.path.relpath(run_dir)


def _exists(fs: FileSystem, path: str) -> bool:
    try:
        fs.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (StorageDenied, StorageUnreachable):
        raise
    except StorageError:
        return False  # a name too long for any file, a link to itself
    return True


def _absent(fs: FileSystem, full: str, path: str, verb: str) -> StoreMissing:
    parent = os.path.dirname(full)
    while not _exists(fs, parent) and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)
    inside = _climb(fs, parent, path, verb)
    if inside is not None:
        shown = _shown(inside.run_dir, path)
        return StoreMissing(detail="there is no such checkpoint", path=path, hint=f"ridethrough ls {quote(shown)}")
    near = nearest(os.path.basename(full), _runs_in(fs, parent)) if parent == os.path.dirname(full) else None
    if near:
        return StoreMissing(detail="there is no such directory", path=path, hint=f"ridethrough {verb} {quote(_sibling(path, near))}")
    return StoreMissing(detail="there is no such directory", path=path, hint=f"ls {quote(_shown(parent, path))}")


def _sibling(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(os.path.normpath(path)), name)


def _no_run(fs: FileSystem, full: str, path: str, verb: str) -> StoreMissing:
    try:
        fs.list_dir(full)
    except NotADirectoryError:
        return StoreMissing(detail="not a run, but a file", path=path, hint=f"ridethrough {verb} {quote(os.path.dirname(path) or '.')}")
    looked = f"not a run (looked for {layout.RUN}, {layout.ATTEMPTS}/ and step-*/"
    above = _climb(fs, os.path.dirname(full), path, verb)
    if above is not None:
        return StoreMissing(detail=f"{looked})", path=path, hint=f"ridethrough {verb} {quote(_shown(above.run_dir, path))}")
    runs = _runs_in(fs, full)
    if runs:
        return StoreMissing(detail=f"{looked}; it holds {listed(runs)})", path=path, hint=f"ridethrough {verb} {quote(os.path.join(path, runs[0]))}")
    return StoreMissing(detail=f"{looked})", path=path, hint=f"find {quote(path)} -maxdepth 4 -name {layout.RUN}")


def _runs_in(fs: FileSystem, directory: str) -> list[str]:
    try:
        names = fs.list_dir(directory)[:_MOST_SUGGESTED]
        return [name for name in names if _exists(fs, os.path.join(directory, name, layout.RUN))]
    except (StorageError, FileNotFoundError, NotADirectoryError):
        return []  # only a suggestion is lost


def load(fs: FileSystem, target: Target) -> Catalog:
    """Everything in the run.

    Raises:
        Damaged: `run.json` cannot be used and no seal says which run this is.
    """
    try:
        return read_catalog(fs, target.run_dir)
    except IsADirectoryError as error:
        raise Damaged(path=os.path.join(target.shown, layout.RUN), detail="it is a directory") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreMissing(detail="the run vanished while it was read", path=target.shown) from error


def pick(fs: FileSystem, target: Target, catalog: Catalog, overview: Overview) -> Checkpoint:
    """The checkpoint that was named, or the newest restorable one of the run.

    Raises:
        StoreMissing: There is no such checkpoint, or none at all yet.
        NothingRestorable: There are some and none can be restored.
    """
    hint = f"ridethrough ls {quote(target.shown)}"
    if not target.is_run:
        found = [row for row in overview.rows if target.dir_name == row.checkpoint.dir_name or target.step == row.checkpoint.step]
        if not found:
            what = f"step {target.step}" if target.dir_name is None else target.dir_name
            raise StoreMissing(detail=f"there is no checkpoint {what}", path=target.shown, hint=hint)
        # Attempts that branched may share a step: what a restart would come to first is meant.
        return max(found, key=lambda row: (row.is_on_lineage, row.is_complete, row.order)).checkpoint
    if overview.restart is not None:
        return overview.restart.checkpoint
    if overview.restart_error is not None:
        raise overview.restart_error
    evidence = evidence_of_progress(fs, target, catalog)
    if evidence is None:
        raise no_checkpoint(target)
    raise NothingRestorable(path=target.shown, detail=evidence)


def no_checkpoint(target: Target) -> StoreMissing:
    """The run is there and has not saved anything yet."""
    return StoreMissing(detail="the run has no checkpoint yet", path=target.shown, hint=f"ridethrough status {quote(target.shown)}")


def evidence_of_progress(fs: FileSystem, target: Target, catalog: Catalog) -> str | None:
    """Why nothing restorable is a loss here and not a beginning; None if it is a beginning."""
    try:
        return progress_evidence(fs, target.run_dir, catalog)
    except (StorageError, OSError, ValueError, TypeError) as error:
        return f"its journal cannot be read ({error})"

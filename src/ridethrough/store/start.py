"""Starting an attempt on a tier: the run's marker, the attempt's records, and their fence."""

from __future__ import annotations

import os
import uuid

from ridethrough.errors import Damaged, Fenced, StoreMissing, TierMissing, TwoHeads
from ridethrough.format import layout, record
from ridethrough.format.attempt import Attempt, Roster, Run
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import read_run
from ridethrough.store.commit import ensure_dir, publish
from ridethrough.types import AttemptRef


def open_run(fs: FileSystem, clock: Clock, run_dir: str, *, known_uid: str | None, is_fresh: bool) -> Run:
    """The run directory exists with its marker, durably.

    Args:
        fs: The tier.
        clock: For the creation date.
        run_dir: Where.
        known_uid: The run that this node remembers to have been here.
        is_fresh: The user wants to start anew where a run is remembered.

    Raises:
        TierMissing: A run is remembered here and its marker is gone: an unmounted disk is never a new run.
    """
    try:
        return read_run(fs, run_dir)
    except StoreMissing:
        if known_uid is not None and not is_fresh:
            raise TierMissing(path=run_dir, run_uid=known_uid) from None
    run = Run(run_uid=uuid.uuid4().hex, name=os.path.basename(run_dir) or "run", created_at=clock.now_at().isoformat(timespec="seconds"))
    # The marker comes last: a run that has it has its directories, whenever the power went.
    for name in (layout.ATTEMPTS, layout.JOURNAL):
        ensure_dir(fs, os.path.join(run_dir, name))
    publish(fs, os.path.join(run_dir, layout.RUN), run.encode())
    return run


def remembered_run(fs: FileSystem, state_dir: str, run_dir: str) -> str | None:
    """The run uid that this node has seen at `run_dir`; None if none, empty if there was one and the note of it is damaged."""
    try:
        fields = record.decode("node-run", fs.read(_memory_path(state_dir, run_dir), max_bytes=record.MAX_BYTES), path=state_dir)
    except FileNotFoundError:
        return None
    except Damaged:
        return ""  # that there was a run is still known: an empty directory must not become a new one
    return str(fields["run_uid"])


def remember_run(fs: FileSystem, state_dir: str, run_dir: str, run_uid: str) -> None:
    """This node knows, across power cuts, that the run lives at `run_dir`."""
    if remembered_run(fs, state_dir, run_dir) == run_uid:
        return
    path = _memory_path(state_dir, run_dir)
    ensure_dir(fs, os.path.dirname(path))
    publish(fs, path, record.encode("node-run", {"run_uid": run_uid, "run_dir": run_dir}))


def _memory_path(state_dir: str, run_dir: str) -> str:
    return os.path.join(state_dir, "runs", f"{run_key(run_dir)}.json")


def run_key(run_dir: str) -> str:
    """A file name for a run directory, for what this node keeps about it."""
    return record.digest(os.path.abspath(run_dir))[:24]


def write_attempt(fs: FileSystem, run_dir: str, attempt: Attempt, roster: Roster) -> None:
    """The attempt's records survive power loss on this tier, before its first step.

    The roster goes first: an attempt record is the promise that its roster can be found.

    Raises:
        TwoHeads: Somebody else started an attempt with the same number meanwhile.
    """
    directory = layout.attempt_dir(run_dir, attempt.attempt)
    ensure_dir(fs, directory)
    publish(fs, os.path.join(directory, layout.ROSTER), roster.encode())
    publish(fs, os.path.join(directory, layout.ATTEMPT), attempt.encode())
    newest = newest_attempts(fs, run_dir)
    rival = [label for seq, label in newest if seq == attempt.attempt.seq and label != attempt.attempt.label]
    if rival:
        raise TwoHeads(path=run_dir, seq=attempt.attempt.seq, first=attempt.attempt.label, second=rival[0])


def newest_attempts(fs: FileSystem, run_dir: str) -> list[tuple[int, str]]:
    """Sequence number and label of every attempt directory, newest last."""
    found = []
    for name in fs.list_dir(os.path.join(run_dir, layout.ATTEMPTS)):
        parsed = layout.parse_attempt_dir(name)
        if parsed:
            found.append((parsed[0], name))
    return sorted(found)


def require_newest(fs: FileSystem, run_dir: str, attempt: AttemptRef) -> None:
    """No later attempt owns the run.

    Called before anything is deleted or published: a frozen process that wakes up after its run
    was restarted must not touch what its successor relies on.

    Raises:
        Fenced: A later attempt does.
    """
    newest = newest_attempts(fs, run_dir)
    if newest and newest[-1][0] > attempt.seq:
        raise Fenced(path=run_dir, attempt=attempt.label, newer=newest[-1][1])

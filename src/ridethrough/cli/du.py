"""`ridethrough du`: where the bytes of a run are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from ridethrough import journal
from ridethrough.cli import output, target
from ridethrough.cli.output import Column, Styled
from ridethrough.errors import FormatTooNew, StorageError
from ridethrough.format import layout
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store import forecast as future
from ridethrough.store.forecast import Forecast

_DAY_S = 86400
_MAX_DEPTH = 16
"""Nothing of ours is deeper than three; what is, somebody else put there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What some files add up to."""

    files_count: int = 0
    size_bytes: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(files_count=self.files_count + other.files_count, size_bytes=self.size_bytes + other.size_bytes)

    def as_json(self) -> dict[str, int]:
        """As JSON has it."""
        return {"files_count": self.files_count, "size_bytes": self.size_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The run, divided up."""

    checkpoints: tuple[tuple[str, Bytes], ...]
    """Sealed parts and their records, by step directory."""
    leftovers: Bytes
    """In step directories, not sealed: cut saves, or one that is being written."""
    quarantine: Bytes
    journal: Bytes
    records: Bytes
    """`run.json` and the attempts."""
    other: Bytes
    """Not ours."""
    is_partial: bool
    """Something could not be read, so that all sums are too small."""

    @property
    def total(self) -> Bytes:
        """Everything."""
        return sum((size for _, size in self.checkpoints), self.leftovers + self.quarantine + self.journal + self.records + self.other)


@click.command(
    epilog=output.help_end(
        ("ridethrough du runs/exp001", "ridethrough du --json runs/exp001 | jq .total.size_bytes"),
        {0: "counted", 2: "usage", 10: "no run there", 13: "storage unreachable"},
    )
)
@click.argument("run")
@output.json_option
@output.verbosity_option
def command(run: str, is_json: bool) -> None:
    """Say where the bytes of a run are.

    And whether they will fill the file system: from the saves of the newest
    attempt and the retention in force, as far as the journals tell.

    Leftovers are unsealed files in step directories: of saves that were cut,
    or of one being written now. Retention removes them with their directory;
    do not do it by hand while the run is going on.
    """
    fs, now_at = PosixFileSystem(), SystemClock().now_at()
    wanted = target.find(fs, run, verb="du")
    shares = divide(fs, wanted.run_dir)
    space = fs.usage(wanted.run_dir)
    sizes = [size.size_bytes for _, size in shares.checkpoints]
    held = sum(sizes) + shares.leftovers.size_bytes + shares.quarantine.size_bytes
    coming = future.forecast(_durable(fs, wanted.run_dir), held_bytes=held, largest_bytes=max(sizes, default=0), free_bytes=space.free_bytes)
    if is_json:
        payload = {**_payload(shares, wanted.run_dir, space.total_bytes, space.free_bytes), "forecast": coming.as_json()}
        output.emit("ridethrough.du", payload, now_at=now_at)
        return
    rows: list[tuple[output.Cell, ...]] = [_row(name, size) for name, size in shares.checkpoints]
    for name, size in (
        ("leftovers", shares.leftovers),
        (layout.QUARANTINE, shares.quarantine),
        (layout.JOURNAL, shares.journal),
        ("records", shares.records),
        ("other", shares.other),
    ):
        rows.append(_row(name, size))
    rows.append(("total", Styled(text=output.human_bytes(shares.total.size_bytes), style="bold"), str(shares.total.files_count)))
    output.table((Column("WHAT"), Column("SIZE", is_right=True), Column("FILES", is_right=True)), rows)
    output.line()
    free = f"{output.human_bytes(space.free_bytes)} of {output.human_bytes(space.total_bytes)}"
    output.line(f"free on this file system: {free}")
    _print_forecast(coming)
    if shares.is_partial:
        output.note("some files could not be read: the sums are too small")


def _durable(fs: FileSystem, run_dir: str) -> Sequence[journal.Event]:
    """What the journals of all nodes call durable; nothing where they cannot be read, and then nothing is foretold."""
    directory = os.path.join(run_dir, layout.JOURNAL)
    try:
        history = journal.read(fs, [os.path.join(directory, name) for name in fs.list_dir(directory) if name.endswith(".jsonl")])
    except (FormatTooNew, StorageError, OSError):
        return ()
    return history.of("checkpoint.durable")


def _print_forecast(coming: Forecast) -> None:
    grown = coming.growth
    rate = output.UNKNOWN
    if grown.interval_s is not None and grown.written_bytes_per_s is not None:
        every = f"{grown.interval_s:.1f} s" if grown.interval_s < 60 else output.human_age(grown.interval_s)
        rate = f"a save every {every}, {output.human_bytes(round(grown.written_bytes_per_s * _DAY_S))} a day before retention"
    if grown.save_bytes is not None:
        rate += f"; the largest {output.human_bytes(grown.save_bytes)}, of {output.count(grown.saves_count, 'save')} of the newest attempt"
    kept = output.UNKNOWN
    if coming.kept_at_most_bytes is not None:
        policy = f"keep_last={coming.keep_last}, save_top_k={coming.keep_top}, a save in progress, quarantine"
        kept = f"at most {output.human_bytes(coming.kept_at_most_bytes)} ({policy})"
    when = {future.NEVER: "never", future.UNKNOWN: output.UNKNOWN}.get(coming.verdict)
    if when is None:
        when = f"in {output.human_age(coming.full_in_s)} at the earliest" if coming.full_in_s is not None else f"at a time that is {output.UNKNOWN}"
    alone = "" if coming.verdict == future.UNKNOWN else "; if nobody else writes here"
    output.fields([("growth", rate), ("kept", kept), ("full", f"{when} ({coming.detail}{alone})")])


def _row(name: str, size: Bytes) -> tuple[output.Cell, ...]:
    return name, output.human_bytes(size.size_bytes), str(size.files_count)


def _payload(shares: Shares, run_dir: str, disk_bytes: int, free_bytes: int) -> dict[str, Any]:
    return {
        "run": {"path": run_dir},
        "checkpoints": [{"dir_name": name, "step": _step_of(name), **size.as_json()} for name, size in shares.checkpoints],
        "leftovers": shares.leftovers.as_json(),
        "quarantine": shares.quarantine.as_json(),
        "journal": shares.journal.as_json(),
        "records": shares.records.as_json(),
        "other": shares.other.as_json(),
        "total": shares.total.as_json(),
        "is_partial": shares.is_partial,
        "disk_bytes": disk_bytes,
        "free_bytes": free_bytes,
    }


def _step_of(dir_name: str) -> int | None:
    parsed = layout.parse_step_dir(dir_name)
    return parsed[0] if parsed else None


class _Walk:
    """Adds up directories, remembering whether all of it could be read."""

    def __init__(self, fs: FileSystem) -> None:
        self.fs = fs
        self.is_partial = False

    def names(self, path: str) -> list[str]:
        """Names in the directory; none if it cannot be read."""
        try:
            return self.fs.list_dir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except StorageError:
            self.is_partial = True
            return []

    def tree(self, path: str, depth: int = 0) -> Bytes:
        """Everything at and below the path. Links count as nothing: what they lead to is not in the run."""
        if os.path.islink(path):
            return Bytes(files_count=1)
        try:
            found = self.fs.stat(path)
        except FileNotFoundError:
            return Bytes()  # removed by retention while we were counting
        except StorageError:
            self.is_partial = True
            return Bytes()
        if not found.is_dir:
            return Bytes(files_count=1, size_bytes=found.size_bytes)
        if depth >= _MAX_DEPTH:
            self.is_partial = True
            return Bytes()
        return sum((self.tree(os.path.join(path, name), depth + 1) for name in self.names(path)), Bytes())


def divide(fs: FileSystem, run_dir: str) -> Shares:
    """Every file of the run, counted once."""
    walk = _Walk(fs)
    checkpoints: list[tuple[str, Bytes]] = []
    leftovers = quarantine = journal = records = other = Bytes()
    for name in fs.list_dir(run_dir):
        path = os.path.join(run_dir, name)
        if layout.parse_step_dir(name):
            sealed, unsealed = _divide_step(walk, path)
            checkpoints.append((name, sealed))
            leftovers += unsealed
        elif name == layout.QUARANTINE:
            quarantine = walk.tree(path)
        elif name == layout.JOURNAL:
            journal = walk.tree(path)
        elif name in (layout.RUN, layout.ATTEMPTS):
            records += walk.tree(path)
        elif name.endswith(layout.TEMPORARY):
            leftovers += walk.tree(path)
        else:
            other += walk.tree(path)
    return Shares(
        checkpoints=tuple(checkpoints),
        leftovers=leftovers,
        quarantine=quarantine,
        journal=journal,
        records=records,
        other=other,
        is_partial=walk.is_partial,
    )


def _divide_step(walk: _Walk, path: str) -> tuple[Bytes, Bytes]:
    names = walk.names(path)
    stems = {parsed.stem for parsed in map(layout.parse_part_file, names) if parsed and parsed.is_seal}
    sealed = unsealed = Bytes()
    for name in names:
        parsed = layout.parse_part_file(name)
        size = walk.tree(os.path.join(path, name), depth=1)
        if name in (layout.META, layout.MANIFEST) or (parsed and parsed.stem in stems):
            sealed += size
        else:
            unsealed += size
    return sealed, unsealed

"""`ridethrough copy`: a checkpoint in another place."""

from __future__ import annotations

import os

import click

from ridethrough.cli import output, overview, target
from ridethrough.cli.output import Column
from ridethrough.cli.text import quote
from ridethrough.config_rules import bandwidth_bytes_per_s
from ridethrough.errors import UsageError
from ridethrough.seam.clock import Clock, SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import Checkpoint, candidates
from ridethrough.store.copy import Copied, copy_checkpoint, paced
from ridethrough.store.place import Place, open_place

_COLUMNS = (Column("STEP", is_right=True), Column("PARTS", is_right=True), Column("COPIED", is_right=True), Column("REMARKS", folds=True))


def bandwidth(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Bytes per second from `50MB/s`."""
    if value is None:
        return None
    found = bandwidth_bytes_per_s(value)
    if found is None:
        raise UsageError(detail=f"{value!r} is not a bandwidth", hint="write 500kB/s, 50MB/s or 1GB/s")
    return found


@click.command(
    epilog=output.help_end(
        (
            "ridethrough copy runs/exp001 /mnt/mirror/exp001",
            "ridethrough copy runs/exp001@24000 s3://bucket/exp001 --bandwidth 50MB/s",
        ),
        {0: "copied, or already there", 2: "usage", 10: "no run, or no checkpoint to copy", 12: "no intact copy of some part",
         13: "a place does not answer", 14: "no space left there"},
    )
)  # fmt: skip
@click.argument("path", metavar="RUN|CKPT")
@click.argument("to", metavar="PLACE")
@click.option("--all", "is_all", is_flag=True, help="Every complete checkpoint, oldest first.")
@click.option("--bandwidth", "bytes_per_s", callback=bandwidth, metavar="RATE", help="At most so much, such as 50MB/s.")
@output.json_option
@output.verbosity_option
def command(path: str, to: str, is_all: bool, bytes_per_s: float | None, is_json: bool) -> None:
    """Put a checkpoint into another place as well.

    PLACE becomes a run directory like RUN: a path, file:///PATH, or
    s3://BUCKET/PREFIX (credentials from the usual AWS_ variables). Every byte
    is checked while it is read and read back there before it counts. What is
    there already is not copied again, so an interrupted copy goes on.
    """
    clock = SystemClock()
    now_at = clock.now_at()
    fs = PosixFileSystem()
    wanted = target.find(fs, path, verb="copy")
    source = Place(fs=fs, run_dir=wanted.run_dir, shown=wanted.shown, is_mounted=True)
    there = open_place(to, bytes_per_s=bytes_per_s)
    if there.is_mounted and os.path.realpath(there.run_dir) == os.path.realpath(source.run_dir):
        raise UsageError(detail=f"{to} is the run itself", hint="name another place")
    catalog = target.load(fs, wanted)
    if is_all and wanted.is_run:
        chosen = tuple(reversed(candidates(catalog)))
        if not chosen:
            raise target.no_checkpoint(wanted)
    else:
        view = overview.survey(catalog, overview.read_proofs(fs, wanted.run_dir), run_dir=wanted.shown, now_at=now_at)
        chosen = (target.pick(fs, wanted, catalog, view),)
    done = copy_all(source, there, chosen, clock=clock, bytes_per_s=bytes_per_s)
    if is_json:
        output.emit(
            "ridethrough.copy", {"run": {"path": wanted.run_dir}, "place": there.shown, "checkpoints": [_row(c) for c in done]}, now_at=now_at
        )
        return
    output.table(_COLUMNS, [cells(copied) for copied in done])
    output.note(f"in {there.shown}: a restart there goes on from step {done[-1].step}; ridethrough restore --from {quote(to)} RUN brings it back")


def copy_all(source: Place, there: Place, chosen: tuple[Checkpoint, ...], *, clock: Clock, bytes_per_s: float | None) -> list[Copied]:
    """These checkpoints are there, with a bar while it lasts."""
    total_bytes = sum(sum({seal.part: seal.payload_bytes for seal in c.seals}.values()) for c in chosen)
    with output.progress(f"copying {output.count(len(chosen), 'checkpoint')}", total_bytes) as advance:
        return [copy_checkpoint(source, there, c, advance=paced(clock, advance, bytes_per_s)) for c in chosen]


def cells(copied: Copied) -> tuple[output.Cell, ...]:
    """A row for people."""
    remarks = [] if copied.copied_bytes else ["was there already"]
    remarks += [f"a damaged copy was passed over: {error}" for error in copied.damaged]
    return str(copied.step), str(copied.parts_count), output.human_bytes(copied.copied_bytes), "; ".join(remarks)


def _row(copied: Copied) -> dict[str, object]:
    return {
        "step": copied.step,
        "dir_name": copied.dir_name,
        "parts_count": copied.parts_count,
        "copied_bytes": copied.copied_bytes,
        "damaged": [str(error) for error in copied.damaged],
    }

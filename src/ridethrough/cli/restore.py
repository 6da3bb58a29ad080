"""`ridethrough restore`: a checkpoint back from another place."""

from __future__ import annotations

import os

import click

from ridethrough.cli import output
from ridethrough.cli.copy import bandwidth, copy_all
from ridethrough.cli.text import count, quote
from ridethrough.errors import NothingRestorable, StoreMissing
from ridethrough.seam.clock import SystemClock
from ridethrough.store.catalog import Checkpoint, candidates, read_catalog
from ridethrough.store.place import Place, open_place


@click.command(
    epilog=output.help_end(
        ("ridethrough restore runs/exp001 --from s3://bucket/exp001", "ridethrough restore runs/exp001 --from /mnt/mirror/exp001 --step 24000"),
        {0: "it is there, durably", 2: "usage", 10: "no run or no such checkpoint in that place", 11: "a job is running on RUN",
         12: "nothing intact in that place", 13: "a place does not answer", 14: "no space left"},
    )
)  # fmt: skip
@click.argument("run", metavar="RUN")
@click.option("--from", "where", required=True, metavar="PLACE", help="Where the copy is: a path, file:///PATH or s3://BUCKET/PREFIX.")
@click.option("--step", type=int, metavar="STEP", help="This step and not the newest.")
@click.option("--bandwidth", "bytes_per_s", callback=bandwidth, metavar="RATE", help="At most so much, such as 50MB/s.")
@output.json_option
@output.verbosity_option
def command(run: str, where: str, step: int | None, bytes_per_s: float | None, is_json: bool) -> None:
    """Bring a checkpoint back into RUN from another place.

    RUN may be empty or absent: a new disk. Every byte is checked and read
    back. Then give the training command again: it resumes from there.
    """
    from ridethrough.seam import process  # noqa: PLC0415  locks are Linux only; --help works everywhere

    process.require_linux("ridethrough restore")
    from ridethrough.cli import owner  # noqa: PLC0415

    clock = SystemClock()
    now_at = clock.now_at()
    there, here = open_place(where, bytes_per_s=bytes_per_s), open_place(run)
    here = Place(fs=here.fs, run_dir=os.path.realpath(here.run_dir), shown=here.shown, is_mounted=True)
    # A job that writes here would not expect what comes in.
    with owner.owning(here.run_dir, shown=here.shown):
        chosen = _choose(there, step)
        have = _newest(here)
        is_newer = have is not None and step is None and (have.attempt.seq, have.step) >= (chosen.attempt.seq, chosen.step)
        done = [] if is_newer else copy_all(there, here, (chosen,), clock=clock, bytes_per_s=bytes_per_s)
    restart = _newest(here)
    assert restart is not None
    if is_json:
        found = {"step": chosen.step, "dir_name": chosen.dir_name, "copied_bytes": done[0].copied_bytes if done else 0}
        output.emit(
            "ridethrough.restore",
            {"run": {"path": here.run_dir}, "place": there.shown, "checkpoint": found, "restart": {"step": restart.step}},
            now_at=now_at,
        )
        return
    if done:
        output.line(f"step {chosen.step} is in {here.shown}: {count(done[0].parts_count, 'part')}, {output.human_bytes(done[0].copied_bytes)} copied")
    else:
        output.line(f"nothing to do: {here.shown} has step {restart.step}, {there.shown} nothing newer than step {chosen.step}")
    output.note(f"a restart goes on from step {restart.step}: ridethrough run --run {quote(run)} -- CMD")


def _choose(there: Place, step: int | None) -> Checkpoint:
    """The checkpoint that is asked for.

    Raises:
        StoreMissing: There is no run in that place, or no such step.
        NothingRestorable: None is complete there.
    """
    found = candidates(read_catalog(there.fs, there.run_dir))
    if not found:
        raise NothingRestorable(path=there.shown, detail="no checkpoint there is complete")
    if step is None:
        return found[0]
    named = [c for c in found if c.step == step]
    if not named:
        steps = ", ".join(str(c.step) for c in found[:8])
        raise StoreMissing(detail=f"there is no complete checkpoint of step {step}; there are {steps}", path=there.shown)
    return named[0]


def _newest(place: Place) -> Checkpoint | None:
    try:
        return next(iter(candidates(read_catalog(place.fs, place.run_dir))), None)
    except (StoreMissing, FileNotFoundError):
        return None

"""`ridethrough scrub`: all copies of a run verified, and repaired from each other."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import click

from ridethrough.cli import output, target
from ridethrough.cli.output import Column, Styled
from ridethrough.cli.text import count
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_catalog
from ridethrough.store.place import Place, open_place
from ridethrough.store.scrub import DAMAGED, DIVERGED, MISSING, OK, REPAIRED, UNREADABLE, Finding, scrub

_STYLES = {OK: "green", REPAIRED: "yellow", DAMAGED: "red", MISSING: "red", DIVERGED: "red", UNREADABLE: "yellow"}
_COLUMNS = (
    Column("STEP", is_right=True),
    Column("PART"),
    Column("PLACE"),
    Column("RESULT"),
    Column("DETAIL", folds=True),
)


@click.command(
    epilog=output.help_end(
        ("ridethrough scrub runs/exp001 s3://bucket/exp001", "ridethrough scrub runs/exp001 /mnt/mirror/exp001 --dry-run"),
        {0: "every copy is intact, or was repaired", 1: "damage that could not be repaired", 2: "usage", 10: "no run there",
         11: "a job is running on RUN: --dry-run only looks", 13: "a place or a part cannot be read now"},
    )
)  # fmt: skip
@click.argument("run", metavar="RUN")
@click.argument("places", nargs=-1, metavar="[PLACE]...")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only read and compare.")
@output.json_option
@output.verbosity_option
def command(run: str, places: tuple[str, ...], is_dry: bool, is_json: bool) -> None:
    """Read every copy of a run back, and repair what is damaged.

    Reads RUN and its copies in other places past the cache, compares them,
    and replaces what is damaged or missing in one place by an intact copy of
    another. Damaged files of a directory go to its quarantine.
    """
    from ridethrough.seam import process  # noqa: PLC0415  locks are Linux only; --help works everywhere

    process.require_linux("ridethrough scrub")
    from ridethrough.cli import owner  # noqa: PLC0415

    now_at = SystemClock().now_at()
    fs = PosixFileSystem()
    wanted = target.find(fs, run, verb="scrub")
    every = (Place(fs=fs, run_dir=wanted.run_dir, shown=wanted.shown, is_mounted=True), *(open_place(place) for place in places))
    # Only whoever owns the run sets files aside in it.
    with contextlib.nullcontext() if is_dry else owner.owning(wanted.run_dir, shown=wanted.shown):
        total_bytes = sum(seal.payload_bytes for place in every for c in read_catalog(place.fs, place.run_dir).checkpoints for seal in c.seals)
        with output.progress(f"reading {count(len(every), 'place')}", total_bytes) as advance:
            findings = scrub(every, is_repairing=not is_dry, advance=advance)
    code = exit_code(findings)
    if is_json:
        rows = [{**asdict(found), "detail": found.detail or None} for found in findings]
        output.emit("ridethrough.scrub", {"run": {"path": wanted.run_dir}, "exit_code": code, "parts": rows}, now_at=now_at)
    else:
        _print(findings, every, is_dry=is_dry)
    output.end(code)


def exit_code(findings: tuple[Finding, ...]) -> int:
    """Damage is certain and comes first."""
    results = {finding.result for finding in findings}
    return 1 if results & {DAMAGED, MISSING, DIVERGED} else 13 if UNREADABLE in results else 0


def _print(findings: tuple[Finding, ...], every: tuple[Place, ...], *, is_dry: bool) -> None:
    notable = [f for f in findings if f.result != OK]
    if notable:
        output.table(_COLUMNS, [(str(f.step), f.part, f.place, Styled(text=f.result, style=_STYLES[f.result]), f.detail) for f in notable])
    steps = len({f.dir_name for f in findings})
    tally = {result: sum(f.result == result for f in findings) for result in _STYLES}
    said = ", ".join(f"{number} {result}" for result, number in tally.items() if number)
    output.note(f"{count(steps, 'checkpoint')} in {count(len(every), 'place')}: {said or 'nothing to read'}")
    if is_dry and any(f.result in (DAMAGED, MISSING) for f in findings):
        output.note("hint: without --dry-run what has an intact copy elsewhere is repaired")

"""`ridethrough ls`: the checkpoints of a run."""

from __future__ import annotations

import click

from ridethrough.cli import output, overview, target
from ridethrough.cli.output import Column, Styled
from ridethrough.cli.overview import Overview, Row
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import Catalog

_STYLES = {"verified": "green", "durable": "green", "complete": "", "incomplete": "yellow"}
_COLUMNS = (
    Column(""),
    Column("STEP", is_right=True),
    Column("ATTEMPT", is_right=True),
    Column("STATE"),
    Column("SIZE", is_right=True),
    Column("AGE", is_right=True),
    Column("WHY", folds=True),
)


@click.command(
    epilog=output.help_end(
        ("ridethrough ls runs/exp001", "ridethrough ls --json runs/exp001 | jq .restart.step"),
        {0: "listed (also when there is nothing to list)", 1: "run.json is damaged", 2: "usage", 10: "no run there", 13: "storage unreachable"},
    )
)
@click.argument("run")
@output.json_option
@output.verbosity_option
def command(run: str, is_json: bool) -> None:
    """List the checkpoints of a run, and which one a restart restores.

    STATE is how far a checkpoint has come: incomplete, complete (every part
    is sealed), durable (confirmed while training), verified (read back from
    the disk). A * marks the one that a restart restores.
    """
    fs, now_at = PosixFileSystem(), SystemClock().now_at()
    wanted = target.find(fs, run, verb="ls")
    catalog = target.load(fs, wanted)
    view = overview.survey(catalog, overview.read_proofs(fs, wanted.run_dir), run_dir=wanted.shown, now_at=now_at)
    if is_json:
        output.emit("ridethrough.ls", _payload(catalog, view, wanted.run_dir), now_at=now_at)
        return
    if view.rows:
        output.table(_COLUMNS, [_cells(row, catalog) for row in view.rows])
    _notes(catalog, view, wanted)


def _cells(row: Row, catalog: Catalog) -> tuple[output.Cell, ...]:
    bold = "bold" if row.is_restart else ""
    return (
        "*" if row.is_restart else "",
        Styled(text=str(row.checkpoint.step), style=bold),
        _attempt(row, catalog),
        Styled(text=row.word, style=_STYLES[row.word]),
        output.human_bytes(row.checkpoint.size_bytes),
        output.human_age(row.age_s),
        row.why,
    )


def _attempt(row: Row, catalog: Catalog) -> str:
    """The number alone, as long as it names one attempt."""
    if row.made_by is None:
        return "?"
    seq = row.made_by.seq
    return str(seq) if sum(ref.seq == seq for ref, _ in catalog.attempts) < 2 else row.made_by.label


def _payload(catalog: Catalog, view: Overview, run_dir: str) -> dict[str, object]:
    return {
        "run": overview.run_as_json(catalog, run_dir),
        "attempts_count": len(catalog.attempts),
        "restart": view.restart.as_json() if view.restart else None,
        "restart_error": output.as_dict(view.restart_error) if view.restart_error else None,
        "checkpoints": [row.as_json() for row in view.rows],
        "skipped": [_skipped(row) for row in view.rows if row.is_skipped],
        "problems": [overview.problem_as_json(problem) for problem in catalog.problems],
        "journal_doubt": view.doubt,
    }


def _skipped(row: Row) -> dict[str, object]:
    return {"step": row.checkpoint.step, "attempt": row.attempt, "dir_name": row.checkpoint.dir_name, "why": row.why or None}


def _notes(catalog: Catalog, view: Overview, wanted: target.Target) -> None:
    shown = output.quote(wanted.shown)
    if not view.rows:
        output.note(f"{output.safe(wanted.shown)} has no checkpoint yet")
    elif view.restart is not None:
        skipped = [row for row in view.rows if row.is_skipped]
        passed = f", passing over {output.count(len(skipped), 'other')}: see WHY" if skipped else ""
        output.note(f"* a restart restores step {view.restart.checkpoint.step}{passed}")
    elif view.restart_error is None:
        output.note(f"a restart can restore none of these; next: ridethrough verify {shown}")
    if view.restart_error is not None:
        output.fail(view.restart_error)
    elsewhere = [p for p in catalog.problems if not any(p in c.problems for c in catalog.checkpoints)]
    for problem in elsewhere:
        output.note(f"record {problem.path}: {overview.detail_of(problem)}")
    if view.doubt and any(row.is_complete and not row.is_verified for row in view.rows):
        output.note(f"some checkpoints may be durable or verified without it being known: {view.doubt}")

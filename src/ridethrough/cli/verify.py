"""`ridethrough verify`: every copy read back from the disk and checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from ridethrough.cli import output, overview, target
from ridethrough.cli.output import Column, Styled
from ridethrough.cli.overview import Row
from ridethrough.errors import Damaged, ForeignRecord, FormatTooNew, RideThroughError, StorageError
from ridethrough.format import layout, record
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store.catalog import Catalog, Checkpoint, Problem
from ridethrough.store.verify import check_part

OK, DAMAGED, UNREADABLE, TOO_NEW, MISSING = "ok", "damaged", "unreadable", "too-new", "missing"
_STYLES = {OK: "green", DAMAGED: "red", UNREADABLE: "yellow", TOO_NEW: "yellow", MISSING: "yellow"}
_EXIT_CODES = {"intact": 0, "damaged": 1, "unreadable": 13, "too-new": 2, "incomplete": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one file turned out to be."""

    path: str
    part: str | None
    node: str | None
    size_bytes: int | None
    result: str
    detail: str | None

    def as_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "path": self.path, "part": self.part, "node": self.node, "size_bytes": self.size_bytes, "result": self.result, "detail": self.detail,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One checkpoint after reading it."""

    row: Row
    parts: tuple[Finding, ...]
    records: tuple[Finding, ...]

    @property
    def is_intact(self) -> bool:
        """It can be restored: every part of the roster has a copy that was read back right."""
        roster = self.row.checkpoint.roster
        return roster is not None and roster.part_names <= {found.part for found in self.parts if found.result == OK}


@click.command(
    epilog=output.help_end(
        ("ridethrough verify runs/exp001", "ridethrough verify runs/exp001@24000 --json"),
        {0: "every copy is intact", 1: "damage found", 2: "usage, or written by a newer version", 10: "no run, or no checkpoint to verify",
         13: "something cannot be read now: try again"},
    )
)  # fmt: skip
@click.argument("path", metavar="RUN|CKPT")
@output.json_option
@output.verbosity_option
def command(path: str, is_json: bool) -> None:
    """Read every copy back from the disk and check it.

    Reads past the page cache, so what is checked is what a power cut would
    leave. CKPT is a step directory or RUN@STEP. Nothing is changed: damaged
    files are set aside only by the persister of the job that owns the run.
    """
    fs, now_at = PosixFileSystem(), SystemClock().now_at()
    wanted = target.find(fs, path, verb="verify")
    catalog: Catalog | None = None
    checked: list[Checked] = []
    try:
        catalog = target.load(fs, wanted)
    except (Damaged, ForeignRecord) as error:
        # Not even the run's identity is left: that is the answer, and not a reason to have none.
        records = [_of_problem(Problem(path=layout.RUN, error=error))]
    else:
        view = overview.survey(catalog, overview.read_proofs(fs, wanted.run_dir), run_dir=wanted.shown, now_at=now_at)
        rows = view.rows
        if not wanted.is_run:
            chosen = target.pick(fs, wanted, catalog, view)
            rows = tuple(row for row in rows if row.checkpoint is chosen)
        if not rows and not catalog.problems:
            raise target.no_checkpoint(wanted)
        total = sum(seal.payload_bytes for row in rows for seal in row.checkpoint.seals)
        with output.progress(f"reading {output.count(len(rows), 'checkpoint')}", total) as advance:
            checked = [check(fs, wanted.run_dir, row, advance) for row in rows]
        records = _other_records(catalog, checked, is_run=wanted.is_run)
    verdict = judge(checked, records)
    if is_json:
        output.emit("ridethrough.verify", _payload(catalog, wanted, checked, records, verdict), now_at=now_at)
    else:
        _print(checked, records)
        _summarise(checked, records, verdict)
    output.end(_EXIT_CODES[verdict])


def check(fs: FileSystem, run_dir: str, row: Row, advance: Callable[[int], None]) -> Checked:
    """Every copy of every part of the checkpoint has been read, and its records."""
    c = row.checkpoint
    parts = []
    for seal in c.seals:
        result, detail = OK, None
        try:
            check_part(fs, run_dir, c.dir_name, seal, progress=advance)
        except Damaged as error:
            result, detail = DAMAGED, str(error.fields["detail"])
        except (StorageError, OSError) as error:
            result, detail = UNREADABLE, str(getattr(error, "fields", {}).get("detail") or error)
        where = f"{c.dir_name}/{seal.payload_name}"
        parts.append(Finding(path=where, part=seal.part, node=seal.node, size_bytes=seal.payload_bytes, result=result, detail=detail))
    parts.extend(_of_problem(problem) for problem in c.problems)
    named = {found.part for found in parts}
    if c.roster is not None:
        absent = sorted(c.roster.part_names - named)
        # A save that was cut lacks parts and lost nothing; one that was confirmed did.
        result, detail = (DAMAGED, "was durable and is gone") if row.is_lost else (MISSING, "no seal: cut during the save, or still being written")
        parts.extend(Finding(path=c.dir_name, part=name, node=None, size_bytes=None, result=result, detail=detail) for name in absent)
    elif row.is_lost and not parts:
        parts.append(Finding(path=c.dir_name, part=None, node=None, size_bytes=None, result=DAMAGED, detail="was durable and its seals are gone"))
    return Checked(row=row, parts=tuple(parts), records=tuple(_check_records(fs, run_dir, c)))


def _of_problem(problem: Problem) -> Finding:
    parsed = layout.parse_part_file(os.path.basename(problem.path))
    return Finding(
        path=problem.path,
        part=parsed.part if parsed else None,
        node=parsed.node if parsed else None,
        size_bytes=None,
        result=TOO_NEW if isinstance(problem.error, FormatTooNew) else DAMAGED,
        detail=overview.detail_of(problem),
    )


def _check_records(fs: FileSystem, run_dir: str, c: Checkpoint) -> list[Finding]:
    """What stands beside the seals and repeats them: not needed to restore, but people read it."""
    found = []
    for name in (layout.META, layout.MANIFEST):
        path = f"{c.dir_name}/{name}"
        result, detail = DAMAGED, None
        try:
            data = fs.read(os.path.join(run_dir, c.dir_name, name), max_bytes=record.MAX_BYTES)
            if name == layout.MANIFEST:
                record.decode("manifest", data, path=path)
            elif c.seals and all(data != record.canonical(seal.meta) + b"\n" for seal in c.seals):
                # Any of them: nodes differ in the instant of their snapshot.
                raise Damaged(path=path, detail="it does not say what the seals say")
            continue
        except (FileNotFoundError, NotADirectoryError):
            continue  # both are written after the seals, and a cut may have come before
        except FormatTooNew as error:
            result, detail = TOO_NEW, overview.detail_of(Problem(path=path, error=error))
        except IsADirectoryError:
            detail = "it is a directory"
        except StorageError as error:
            result, detail = UNREADABLE, str(error.fields.get("detail") or error)
        except RideThroughError as error:
            detail = str(error.fields.get("detail") or error)
        found.append(Finding(path=path, part=None, node=None, size_bytes=None, result=result, detail=f"{detail} (the seals hold the same)"))
    return found


def _other_records(catalog: Catalog, checked: list[Checked], *, is_run: bool) -> list[Finding]:
    """Damaged records that belong to no part: of the run, of attempts, of checkpoints."""
    of_parts = {problem.path for c in catalog.checkpoints for problem in c.problems}
    known = {found.path for one in checked for found in one.records}
    wanted = {one.row.checkpoint.dir_name for one in checked}
    records = [found for one in checked for found in one.records]
    for problem in catalog.problems:
        ours = is_run or problem.path.split(os.sep)[0] in {*wanted, layout.RUN, layout.ATTEMPTS}
        if ours and problem.path not in of_parts and problem.path not in known:
            records.append(_of_problem(problem))
    return records


def judge(checked: list[Checked], records: list[Finding]) -> str:
    """The verdict: damage is certain and comes first, then what may look different tomorrow."""
    results = {found.result for one in checked for found in one.parts} | {found.result for found in records}
    for result, verdict in ((DAMAGED, "damaged"), (UNREADABLE, "unreadable"), (TOO_NEW, "too-new")):
        if result in results:
            return verdict
    return "intact" if any(one.is_intact for one in checked) else "incomplete"


def _counts(checked: list[Checked]) -> dict[str, int]:
    found = [part.result for one in checked for part in one.parts]
    return {result: found.count(result) for result in (OK, DAMAGED, UNREADABLE, TOO_NEW, MISSING)}


def _payload(catalog: Catalog | None, wanted: target.Target, checked: list[Checked], records: list[Finding], verdict: str) -> dict[str, Any]:
    counts = _counts(checked)
    run = overview.run_as_json(catalog, wanted.run_dir) if catalog else {"path": wanted.run_dir, "name": None, "run_uid": None, "created_at": None}
    return {
        "run": run,
        "verdict": verdict,
        "exit_code": _EXIT_CODES[verdict],
        "checkpoints": [{**one.row.as_json(), "is_intact": one.is_intact, "parts": [part.as_json() for part in one.parts]} for one in checked],
        "records": [found.as_json() for found in records],
        "ok_count": counts[OK],
        "damaged_count": counts[DAMAGED],
        "unreadable_count": counts[UNREADABLE],
        "too_new_count": counts[TOO_NEW],
        "missing_count": counts[MISSING],
        "read_bytes": sum(part.size_bytes or 0 for one in checked for part in one.parts if part.result == OK),
    }


def _print(checked: list[Checked], records: list[Finding]) -> None:
    columns = (
        Column("STEP", is_right=True),
        Column("ATTEMPT", is_right=True),
        Column("PART"),
        Column("NODE"),
        Column("SIZE", is_right=True),
        Column("RESULT"),
    )
    rows: list[tuple[output.Cell, ...]] = []
    for one in checked:
        c = one.row.checkpoint
        name = (str(c.step), str(one.row.made_by.seq) if one.row.made_by else "?")
        rows.extend((*name, *_cells(found, found.part or found.path)) for found in one.parts)
        if not one.parts:
            rows.append((*name, "-", "-", "-", Styled(text=MISSING, style=_STYLES[MISSING]), one.row.why))
    rows.extend(("-", "-", *_cells(found, found.path)) for found in records)
    if rows:
        output.table((*columns, Column("DETAIL", folds=True)), rows)


def _cells(found: Finding, name: str) -> tuple[output.Cell, ...]:
    size = "-" if found.size_bytes is None else output.human_bytes(found.size_bytes)
    return name, found.node or "-", size, Styled(text=found.result, style=_STYLES[found.result]), found.detail or ""


def _summarise(checked: list[Checked], records: list[Finding], verdict: str) -> None:
    counts = _counts(checked)
    intact = [one for one in checked if one.is_intact]
    bad = [output.count(counts[kind], f"{kind} copy", f"{kind} copies") for kind in (DAMAGED, UNREADABLE, TOO_NEW) if counts[kind]]
    if records:
        bad.append(output.count(len(records), "unusable record"))
    output.note(f"{verdict}: {len(intact)} of {output.count(len(checked), 'checkpoint')} restorable{''.join(f', {text}' for text in bad)}")
    if verdict == "damaged" and intact:
        best = max(intact, key=lambda one: (one.row.is_on_lineage, one.row.order))
        output.note(f"a restart falls back to what is intact: newest is step {best.row.checkpoint.step}")
    if verdict == "unreadable":
        output.note("hint: check the mount or server behind the run, then verify again")
    if verdict == "too-new":
        output.note("hint: pip install -U ridethrough")

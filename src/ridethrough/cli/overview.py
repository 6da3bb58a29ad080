"""What is to be said about the checkpoints of a run: state, proof, reason, and which one a restart restores."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ridethrough import journal
from ridethrough.cli.text import age_s, count, listed, parse_at, rfc3339
from ridethrough.errors import FormatTooNew, StorageError, TwoHeads
from ridethrough.format import layout
from ridethrough.format.seal import save_id
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import Catalog, Checkpoint, Problem, candidates, lineage
from ridethrough.types import AttemptRef

Lineage = tuple[tuple[AttemptRef, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """Which saves the journals call durable and verified, by step and first digits of the save id."""

    durable: frozenset[tuple[int, str]]
    verified: frozenset[tuple[int, str]]
    doubt: str | None
    """Why a save that is not named may still have been durable; None if the journals are whole."""

    def of(self, checkpoint: Checkpoint) -> tuple[bool | None, bool | None]:
        """Durable and verified; None where the journals cannot tell."""
        key = layout.parse_step_dir(checkpoint.dir_name) or (checkpoint.step, "")
        absent = None if self.doubt else False
        is_verified = True if key in self.verified else absent
        return (True if key in self.durable or is_verified else absent), is_verified


def read_proofs(fs: FileSystem, run_dir: str) -> Proofs:
    """What the journals of all nodes say; one that cannot be read leaves doubt and not an error."""
    directory = os.path.join(run_dir, layout.JOURNAL)
    try:
        paths = [os.path.join(directory, name) for name in fs.list_dir(directory) if name.endswith(".jsonl")]
        history = journal.read(fs, paths)
    except (FormatTooNew, StorageError) as error:
        return Proofs(durable=frozenset(), verified=frozenset(), doubt=str(error))
    except OSError as error:  # no such directory, or a directory where a journal should be
        return Proofs(durable=frozenset(), verified=frozenset(), doubt=f"there is no journal ({type(error).__name__})")
    doubt = None
    if not paths:
        doubt = "there is no journal"
    elif history.damaged_lines or history.is_tail_torn:
        doubt = "a record of the journal was cut or damaged"
    return Proofs(
        durable=frozenset(_saves(history.of("checkpoint.durable"))), verified=frozenset(_saves(history.of("checkpoint.verified"))), doubt=doubt
    )


def _saves(events: Iterable[journal.Event]) -> Iterable[tuple[int, str]]:
    for event in events:
        step, save_id = event.data.get("step"), event.data.get("save_id")
        if isinstance(step, int) and isinstance(save_id, str):
            yield step, save_id[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint and everything to be said about it."""

    checkpoint: Checkpoint
    made_by: AttemptRef | None
    """The attempt that made it, told by its seals or else by its save id; None if neither can."""
    is_durable: bool | None
    is_verified: bool | None
    is_restart: bool
    is_skipped: bool
    """Newer than what a restart restores, and passed over for the reason in `why`."""
    is_on_lineage: bool
    is_lost: bool
    """It was durable, nothing newer can have replaced it, and now it is not whole."""
    why: str
    age_s: float | None

    @property
    def is_complete(self) -> bool:
        """Every part is sealed."""
        return self.checkpoint.is_complete

    @property
    def state(self) -> str:
        """As JSON has it."""
        return "complete" if self.is_complete else "incomplete"

    @property
    def word(self) -> str:
        """The one word for people: the furthest state that is proven."""
        if not self.is_complete:
            return "incomplete"
        return "verified" if self.is_verified else "durable" if self.is_durable else "complete"

    @property
    def attempt(self) -> str | None:
        """Label of the attempt that made it."""
        return self.made_by.label if self.made_by else None

    @property
    def order(self) -> tuple[bool, int, int]:
        """Oldest first. What nobody can tell the attempt of comes last: mostly a save that was just cut."""
        return (self.made_by is None, self.made_by.seq if self.made_by else 0, self.checkpoint.step)

    def as_json(self) -> dict[str, Any]:
        """The object that `ls`, `show` and `verify` share."""
        c = self.checkpoint
        at = parse_at(c.meta.get("saved_at"))
        return {
            "step": c.step,
            "attempt": self.attempt,
            "dir_name": c.dir_name,
            "save_id": c.save_id or None,
            "state": self.state,
            "is_durable": self.is_durable,
            "is_verified": self.is_verified,
            "is_restart": self.is_restart,
            "is_on_lineage": self.is_on_lineage,
            "size_bytes": c.size_bytes,
            "saved_at": rfc3339(at) if at else None,
            "age_s": self.age_s,
            "why": self.why or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All checkpoints of a run, oldest first."""

    rows: tuple[Row, ...]
    restart: Row | None
    restart_error: TwoHeads | None
    doubt: str | None


def survey(catalog: Catalog, proofs: Proofs, *, run_dir: str, now_at: datetime.datetime) -> Overview:
    """What is to be said about every checkpoint of the catalog."""
    error: TwoHeads | None = None
    chain: Lineage = ()
    best: Checkpoint | None = None
    try:
        chain = lineage(catalog.attempts)
        best = next(iter(candidates(catalog)), None)
    except TwoHeads as found:
        error = TwoHeads(**{**found.fields, "path": run_dir})
    made = [_row(c, _made_by(c, catalog), best, chain, proofs, now_at, has_heads=error is None) for c in catalog.checkpoints]
    rows = tuple(sorted(made, key=lambda row: row.order))
    return Overview(rows=rows, restart=next((row for row in rows if row.is_restart), None), restart_error=error, doubt=proofs.doubt)


def _made_by(c: Checkpoint, catalog: Catalog) -> AttemptRef | None:
    if c.attempt.nonce:
        return c.attempt
    # No seal is left, but the save id in the name of the directory is a hash of run, attempt and step.
    refs = (ref for ref, _ in catalog.attempts)
    return next((ref for ref in refs if layout.step_dir(c.step, save_id(catalog.run.run_uid, ref.nonce, c.step)) == c.dir_name), None)


def _row(
    c: Checkpoint, made_by: AttemptRef | None, best: Checkpoint | None, chain: Lineage, proofs: Proofs, now_at: datetime.datetime, *, has_heads: bool
) -> Row:
    is_durable, is_verified = proofs.of(c)
    is_restart = c is best
    left_at = [last for ref, last in chain if ref == made_by]
    is_on_lineage = bool(left_at) and (left_at[0] is None or c.step <= left_at[0])
    is_later = best is None or (made_by is not None and (made_by.seq, c.step) > (best.attempt.seq, best.step))
    # Retention removes what is older, and branches that were left: half of such a checkpoint is no loss.
    is_lost = bool(is_durable) and not c.is_complete and is_on_lineage and is_later
    return Row(
        checkpoint=c,
        made_by=made_by,
        is_durable=is_durable,
        is_verified=is_verified,
        is_restart=is_restart,
        is_skipped=has_heads and not is_restart and (is_later or (best is not None and c.step > best.step)),
        is_on_lineage=is_on_lineage,
        is_lost=is_lost,
        why=_why(c, made_by, chain, is_on_lineage=is_on_lineage, was_durable=is_lost),
        age_s=age_s(c.meta.get("saved_at"), now_at),
    )


def _why(c: Checkpoint, made_by: AttemptRef | None, chain: Lineage, *, is_on_lineage: bool, was_durable: bool) -> str:
    if c.is_complete:
        reasons = []
        if chain and not is_on_lineage:
            left_at = next((last for ref, last in chain if ref == made_by), None)
            ours = f"attempt {chain[0][0].seq}"
            reasons.append(f"abandoned: {ours} does not come from it" if left_at is None else f"abandoned: {ours} went on from step {left_at}")
        if c.problems:
            reasons.append(f"{count(len(c.problems), 'copy', 'copies')} unusable: {listed([_reason(p) for p in c.problems], at_most=1)}")
        return "; ".join(reasons)
    reasons = ["was durable"] if was_durable else []
    if not c.seals and not c.problems:
        return "; ".join([*reasons, "no seal: cut during the save, or still being written"])
    if c.roster is None and c.seals:
        reasons.append("its roster is lost")
    explained = {_part_of(p) for p in c.problems}
    absent = [] if c.roster is None else [part for part in c.missing_parts if part not in explained]
    if absent:
        reasons.append(f"missing {listed(absent)}")
    if c.problems:
        reasons.append(listed([_reason(p) for p in c.problems], at_most=2))
    return "; ".join(reasons)


def _part_of(problem: Problem) -> str:
    parsed = layout.parse_part_file(os.path.basename(problem.path))
    return parsed.part if parsed else os.path.basename(problem.path)


def _reason(problem: Problem) -> str:
    return f"{_part_of(problem)}: {detail_of(problem)}"


def detail_of(problem: Problem) -> str:
    """What is wrong with the file, without its path."""
    if isinstance(problem.error, FormatTooNew):
        return f"format {problem.error.fields['found']} is newer than this version reads"
    return str(problem.error.fields.get("detail") or problem.error)


def problem_as_json(problem: Problem) -> dict[str, Any]:
    """The object that all verbs share."""
    return {"path": problem.path, "code": problem.error.code, "message": str(problem.error)}


def run_as_json(catalog: Catalog, run_dir: str) -> dict[str, Any]:
    """The object that all verbs share; absolute path, null where `run.json` is damaged."""
    is_known = catalog.run.created_at != "unknown"
    return {
        "path": run_dir,
        "name": catalog.run.name if is_known else None,
        "run_uid": catalog.run.run_uid,
        "created_at": catalog.run.created_at if is_known else None,
    }

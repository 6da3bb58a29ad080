"""What is on a tier, and which of it could be restored, newest first.

1. Read `run.json`, every attempt's records, every seal. What is damaged becomes a problem with a
   name and is otherwise ignored; what is unreachable raises, because a decision made on half a
   listing could resume from the wrong step.
2. The attempt with the highest sequence number is the head. Its lineage is itself, then the
   attempt it came from up to the step it came from, and so on.
3. Candidates are the complete checkpoints on the lineage, newest attempt first, then newest step.
   Steps of abandoned branches never win by number.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ridethrough import journal
from ridethrough.errors import Damaged, ForeignRecord, FormatTooNew, RideThroughError, StorageError, StorageUnreachable, StoreMissing, TwoHeads
from ridethrough.format import layout, record
from ridethrough.format import seal as seal_format
from ridethrough.format.attempt import Attempt, Roster, Run
from ridethrough.format.seal import Seal
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.types import AttemptRef, Parent

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A file that is there and cannot be used."""

    path: str
    error: RideThroughError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One save as found on the tier."""

    step: int
    save_id: str
    attempt: AttemptRef
    parent: Parent | None
    dir_name: str
    roster: Roster | None
    seals: tuple[Seal, ...]
    """Every intact seal whose payload is there at full length, in file-name order."""
    problems: tuple[Problem, ...]
    size_bytes: int
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def missing_parts(self) -> tuple[str, ...]:
        """Parts of the roster without a usable seal; all of them if the roster is lost."""
        if self.roster is None:
            return ("(roster lost)",)
        return tuple(sorted(self.roster.part_names - {seal.part for seal in self.seals}))

    @property
    def is_complete(self) -> bool:
        """Every part of its attempt's roster is sealed: the checkpoint exists."""
        return not self.missing_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Everything found in a run directory."""

    run: Run
    attempts: tuple[tuple[AttemptRef, Parent | None], ...]
    """By sequence number, oldest first."""
    checkpoints: tuple[Checkpoint, ...]
    """By attempt, then step, oldest first."""
    problems: tuple[Problem, ...]
    next_seq: int
    """One more than any sequence number ever seen here, also in damaged records and in claims."""
    rosters: dict[str, Roster] = field(default_factory=dict)
    """Of attempts and of checkpoints, by their digests."""

    def roster_of(self, attempt: AttemptRef) -> Roster | None:
        """Who trained in that attempt; None if its roster is lost."""
        return next((roster for roster in self.rosters.values() if roster.attempt == attempt), None)


def read_run(fs: FileSystem, run_dir: str) -> Run:
    """What `run.json` says.

    Raises:
        StoreMissing: No such run.
        Damaged: It is torn, or missing although there are checkpoints or attempts.
    """
    path = os.path.join(run_dir, layout.RUN)
    try:
        return Run.decode(_read(fs, path), path=path)
    except (FileNotFoundError, NotADirectoryError):
        if _has_records(fs, run_dir):
            raise Damaged(path=path, detail="it is missing beside the records of a run") from None
        raise StoreMissing(path=run_dir, detail="there is no run") from None


def _has_records(fs: FileSystem, run_dir: str) -> bool:
    """Checkpoints or attempts are there: taking the directory for a new run would orphan them."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if any(layout.parse_step_dir(name) for name in fs.list_dir(run_dir)):
            return True
        return any(layout.parse_attempt_dir(name) for name in fs.list_dir(os.path.join(run_dir, layout.ATTEMPTS)))
    return False


def read_catalog(fs: FileSystem, run_dir: str) -> Catalog:
    """Everything in the run directory, proven by its own checksums but not yet against the payloads.

    Raises:
        StoreMissing: No such run.
        StorageUnreachable: Something could not be read now; try again later.
    """
    problems: list[Problem] = []
    try:
        run = read_run(fs, run_dir)
    except (Damaged, ForeignRecord) as error:
        run = _run_from_seals(fs, run_dir, error)
        problems.append(Problem(path=layout.RUN, error=error))
    records, rosters, next_seq = _read_attempts(fs, run_dir, run, problems)
    checkpoints = []
    for name in fs.list_dir(run_dir):
        if layout.parse_step_dir(name):
            found = _read_checkpoint(fs, run_dir, name, run, rosters, problems)
            if found is not None:
                checkpoints.append(found)
    attempts: dict[AttemptRef, Parent | None] = {c.attempt: c.parent for c in checkpoints if c.seals}
    attempts.update({a.attempt: a.parent for a in records})
    ordered = sorted(attempts.items(), key=lambda item: (item[0].seq, item[0].nonce))
    return Catalog(
        run=run,
        attempts=tuple(ordered),
        checkpoints=tuple(sorted(checkpoints, key=lambda c: (c.attempt.seq, c.step))),
        problems=tuple(problems),
        next_seq=max([next_seq, *(ref.seq + 1 for ref, _ in ordered)]),
        rosters=rosters,
    )


def _run_from_seals(fs: FileSystem, run_dir: str, error: RideThroughError) -> Run:
    """The run's identity from its seals when `run.json` is damaged: they all carry it."""
    uids = set()
    for name in fs.list_dir(run_dir):
        if layout.parse_step_dir(name):
            uids |= {found.run_uid for found in _read_seals(fs, os.path.join(run_dir, name), [])}
    if len(uids) != 1:
        raise error
    return Run(run_uid=uids.pop(), name=os.path.basename(run_dir), created_at="unknown")


def _read_attempts(fs: FileSystem, run_dir: str, run: Run, problems: list[Problem]) -> tuple[list[Attempt], dict[str, Roster], int]:
    attempts: list[Attempt] = []
    rosters: dict[str, Roster] = {}
    next_seq = 1
    parent_dir = os.path.join(run_dir, layout.ATTEMPTS)
    try:
        names = fs.list_dir(parent_dir)
    except FileNotFoundError:
        names = []
    except NotADirectoryError:
        names = []
        problems.append(Problem(path=layout.ATTEMPTS, error=Damaged(path=layout.ATTEMPTS, detail="it is not a directory")))
    for name in names:
        claimed = layout.parse_claim(name)
        if claimed is not None:
            # Also one that was left by an agreement that was cut: its number is never given again.
            next_seq = max(next_seq, claimed + 1)
        parsed = layout.parse_attempt_dir(name)
        if parsed is None:
            continue
        next_seq = max(next_seq, parsed[0] + 1)
        path = os.path.join(parent_dir, name)
        try:
            attempt = Attempt.decode(_read(fs, os.path.join(path, layout.ATTEMPT)), path=os.path.join(layout.ATTEMPTS, name, layout.ATTEMPT))
            _require_run(attempt.run_uid, run, os.path.join(layout.ATTEMPTS, name))
            attempts.append(attempt)
        except (FileNotFoundError, NotADirectoryError):
            pass  # usually cut during the start agreement: no step was ever made under it
        except (Damaged, ForeignRecord) as error:
            problems.append(Problem(path=os.path.join(layout.ATTEMPTS, name, layout.ATTEMPT), error=error))
        try:
            roster = Roster.decode(_read(fs, os.path.join(path, layout.ROSTER)), path=os.path.join(layout.ATTEMPTS, name, layout.ROSTER))
            _require_run(roster.run_uid, run, os.path.join(layout.ATTEMPTS, name))
            rosters[roster.digest] = roster
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (Damaged, ForeignRecord) as error:
            problems.append(Problem(path=os.path.join(layout.ATTEMPTS, name, layout.ROSTER), error=error))
    return attempts, rosters, next_seq


def _read(fs: FileSystem, path: str) -> bytes:
    try:
        return fs.read(path, max_bytes=record.MAX_BYTES)
    except IsADirectoryError:
        raise Damaged(path=path, detail="it is a directory") from None
    except StorageUnreachable:
        raise
    except StorageError as error:
        if error.__cause__ is None:  # longer than any record: not a refusal of the storage
            raise Damaged(path=path, detail=str(error)) from error
        raise


def _require_run(uid: str, run: Run, path: str) -> None:
    if uid != run.run_uid:
        raise ForeignRecord(path=path, detail=f"run {uid[:8]}, not {run.run_uid[:8]}")


def _read_seals(fs: FileSystem, directory: str, problems: list[Problem]) -> list[Seal]:
    name8 = os.path.basename(directory)
    seals = []
    for name in fs.list_dir(directory):
        parsed = layout.parse_part_file(name)
        if parsed is None or not parsed.is_seal:
            continue
        path = os.path.join(name8, name)
        try:
            seal = seal_format.decode(_read(fs, os.path.join(directory, name)), path=path)
            if seal.part != parsed.part or seal.payload_name != f"{parsed.stem}.safetensors" or layout.step_dir(seal.step, seal.save_id) != name8:
                raise ForeignRecord(path=path, detail=f"it seals {seal.part!r} of step {seal.step}, save {seal.save_id[:8]}")
            seals.append(seal)
        except FileNotFoundError:
            continue  # removed by retention while we were reading
        except (Damaged, ForeignRecord, FormatTooNew) as error:
            problems.append(Problem(path=path, error=error))
    return seals


def read_seals(fs: FileSystem, run_dir: str, dir_name: str) -> tuple[Seal, ...]:
    """Every intact seal in a checkpoint's directory, in file-name order."""
    return tuple(_read_seals(fs, os.path.join(run_dir, dir_name), []))


def read_seal(fs: FileSystem, run_dir: str, dir_name: str, outline: Seal) -> Seal:
    """The seal whose outline is known from an earlier reading.

    Raises:
        Damaged: It is not what it was.
        StorageUnreachable: It cannot be read now.
    """
    path = os.path.join(dir_name, layout.seal_name(outline.payload_name))
    try:
        seal = seal_format.decode(_read(fs, os.path.join(run_dir, path)), path=path)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(path=path, detail="the seal is missing") from None
    except (ForeignRecord, FormatTooNew) as error:
        raise Damaged(path=path, detail=f"it was a seal of ours before: {error}") from error
    if any(getattr(seal, name) != getattr(outline, name) for name in ("save_id", "roster_digest", "part", "payload_name", "payload_bytes")):
        raise Damaged(path=path, detail=f"it seals {seal.part!r} of step {seal.step} now, save {seal.save_id[:8]}")
    return seal


def _read_checkpoint(fs: FileSystem, run_dir: str, name: str, run: Run, rosters: dict[str, Roster], run_problems: list[Problem]) -> Checkpoint | None:
    directory = os.path.join(run_dir, name)
    problems: list[Problem] = []
    try:
        seals = _read_seals(fs, directory, problems)
        sizes = _sizes(fs, directory)
    except (FileNotFoundError, NotADirectoryError):
        return None  # removed by retention while we were reading, or a file with our kind of name
    usable = []
    for seal in seals:
        path = os.path.join(name, seal.payload_name)
        try:
            _require_run(seal.run_uid, run, path)
            if seal.payload_name not in sizes:
                raise Damaged(path=path, detail="the payload is missing")
            if sizes[seal.payload_name] != seal.payload_bytes:
                raise Damaged(path=path, detail=f"{sizes[seal.payload_name]} bytes instead of {seal.payload_bytes}")
            usable.append(seal)
        except (Damaged, ForeignRecord) as error:
            problems.append(Problem(path=path, error=error))
    run_problems.extend(problems)
    step, _ = layout.parse_step_dir(name) or (0, "")
    first = usable[0] if usable else None
    roster = _roster_of(fs, directory, first, rosters, run_problems) if first else None
    return Checkpoint(
        step=step,
        save_id=first.save_id if first else "",
        attempt=first.attempt if first else AttemptRef(seq=0, nonce=""),
        parent=first.parent if first else None,
        dir_name=name,
        roster=roster,
        # Mixed rosters cannot make a checkpoint: one save id has one attempt, one attempt one roster.
        seals=tuple(s for s in usable if first and s.roster_digest == first.roster_digest),
        problems=tuple(problems),
        size_bytes=sum(sizes.values()),
        meta=first.meta if first else {},
    )


def _sizes(fs: FileSystem, directory: str) -> dict[str, int]:
    sizes = {}
    for entry in fs.list_dir(directory):
        # A temporary file may be renamed while we look, and a dangling link is nobody's part.
        with contextlib.suppress(FileNotFoundError):
            sizes[entry] = fs.stat(os.path.join(directory, entry)).size_bytes
    return sizes


def _roster_of(fs: FileSystem, directory: str, seal: Seal, rosters: dict[str, Roster], problems: list[Problem]) -> Roster | None:
    """The roster a seal names: from the attempt, else the copy in the manifest. The digest decides, not the place."""
    if seal.roster_digest in rosters:
        return rosters[seal.roster_digest]
    path = os.path.join(os.path.basename(directory), layout.MANIFEST)
    try:
        fields = record.decode("manifest", _read(fs, os.path.join(directory, layout.MANIFEST)), path=path)
        roster = Roster.from_fields(record.field(fields, "roster", dict, path=path), path=path)
    except FileNotFoundError:
        return None
    except (Damaged, ForeignRecord, FormatTooNew) as error:
        problems.append(Problem(path=path, error=error))
        return None
    if roster.digest != seal.roster_digest:
        return None
    rosters[roster.digest] = roster
    return roster


def lineage(attempts: Iterable[tuple[AttemptRef, Parent | None]]) -> tuple[tuple[AttemptRef, int | None], ...]:
    """The head attempt and its ancestors, each with the last step that counts (None = all).

    Raises:
        TwoHeads: Two attempts share the highest sequence number.
    """
    known = dict(attempts)
    if not known:
        return ()
    top = max(ref.seq for ref in known)
    heads = sorted((ref for ref in known if ref.seq == top), key=lambda ref: ref.nonce)
    if len(heads) > 1:
        raise TwoHeads(path=layout.ATTEMPTS, seq=top, first=heads[0].label, second=heads[1].label)
    chain: list[tuple[AttemptRef, int | None]] = [(heads[0], None)]
    seen = {heads[0]}
    parent = known[heads[0]]
    while parent is not None and parent.attempt not in seen:
        chain.append((parent.attempt, parent.step))
        seen.add(parent.attempt)
        # An ancestor whose records are lost ends the chain: what came before it cannot be proven ours.
        parent = known.get(parent.attempt)
    return tuple(chain)


def on_lineage(checkpoint: Checkpoint, chain: tuple[tuple[AttemptRef, int | None], ...]) -> bool:
    """The checkpoint is a state that the head attempt came through or made."""
    return any(ref == checkpoint.attempt and (last is None or checkpoint.step <= last) for ref, last in chain)


def candidates(catalog: Catalog) -> tuple[Checkpoint, ...]:
    """Complete checkpoints that may be restored, the best first.

    Raises:
        TwoHeads: It cannot be said which attempt is the newest.
    """
    chain = lineage(catalog.attempts)
    found = []
    for ref, last in chain:
        mine = [c for c in catalog.checkpoints if c.attempt == ref and c.is_complete and (last is None or c.step <= last)]
        found.extend(sorted(mine, key=lambda c: c.step, reverse=True))
    return tuple(found)


def progress_evidence(fs: FileSystem, run_dir: str, catalog: Catalog) -> str | None:
    """Why it would be a loss to start at step 0, or None if nothing was ever acknowledged here."""
    since = owed_since(catalog)
    return journal_evidence(fs, run_dir, since) or catalog_evidence(catalog, since)


def owed_since(catalog: Catalog) -> int:
    """The attempt from which on progress counts: one that was started afresh on purpose owes nothing to those before it."""
    chain = lineage(catalog.attempts)
    parents = dict(catalog.attempts)
    return chain[-1][0].seq if chain and parents.get(chain[-1][0]) is None else 0


def journal_evidence(fs: FileSystem, run_dir: str, since: int) -> str | None:
    """What the journals on this tier say was durable in an attempt from `since` on."""
    try:
        names = fs.list_dir(os.path.join(run_dir, layout.JOURNAL))
        journals = [os.path.join(run_dir, layout.JOURNAL, name) for name in names if name.endswith(".jsonl")]
    except (FileNotFoundError, NotADirectoryError):
        return None
    durable = [event for event in journal.read(fs, journals).of("checkpoint.durable") if _number_of(event, "attempt_seq", default=since) >= since]
    return f"step {max(_number_of(event, 'step', default=0) for event in durable)} was once durable" if durable else None


def catalog_evidence(catalog: Catalog, since: int) -> str | None:
    """What the records say was there in an attempt from `since` on."""
    if any(parent is not None and ref.seq >= since for ref, parent in catalog.attempts):
        return "an earlier attempt resumed from a checkpoint that is gone"
    for checkpoint in catalog.checkpoints:
        if (checkpoint.problems or checkpoint.is_complete) and (not checkpoint.attempt.seq or checkpoint.attempt.seq >= since):
            return f"{checkpoint.dir_name} is sealed but cannot be used"
    return None


def _number_of(event: journal.Event, name: str, *, default: int) -> int:
    value = event.data.get(name)
    return value if isinstance(value, int) else default


def patiently(clock: Clock, wait_s: float, read: Callable[[], T]) -> T:
    """What `read` returns; storage that does not answer now is asked again.

    Raises:
        StorageUnreachable: It still did not after `wait_s`.
    """
    deadline_s = clock.monotonic_s() + wait_s
    pause_s = 0.25
    while True:
        try:
            return read()
        except StorageUnreachable:
            if clock.monotonic_s() + pause_s > deadline_s:
                raise
            clock.sleep(pause_s)
            pause_s = min(pause_s * 2, 10.0)


def read_patiently(fs: FileSystem, clock: Clock, run_dir: str, *, storage_wait_s: float) -> Catalog:
    """The catalog, after waiting for storage that does not answer yet.

    Raises:
        StorageUnreachable: It still did not after `storage_wait_s`.
    """
    return patiently(clock, storage_wait_s, lambda: read_catalog(fs, run_dir))

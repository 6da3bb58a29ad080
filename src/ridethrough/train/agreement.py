"""The start agreement: the only collective communication of ours, once an attempt.

1. The first rank reads the tier and proposes the newest complete checkpoint of the lineage.
2. Every rank loads and proves its own parts; if one fails, all go to the next candidate together.
3. Everybody applies the state; the first rank issues the attempt (nonce, sequence number, parent,
   snapshot interval) and makes it durable.
4. All go on. No step has been made before.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ridethrough.errors import (
    Damaged,
    ForeignRecord,
    NothingRestorable,
    RideThroughError,
    StateMismatch,
    StorageError,
    StorageUnreachable,
    TierMissing,
    TwoHeads,
    UsageError,
)
from ridethrough.format import layout
from ridethrough.format.attempt import Attempt, Roster, RosterPart, Run
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot.sizing import SlotPlan, plan_slots
from ridethrough.store import catalog as catalogs
from ridethrough.store.catalog import Catalog, Checkpoint
from ridethrough.store.start import open_run, write_attempt
from ridethrough.store.verify import load_part
from ridethrough.train.state import LoadedPart
from ridethrough.types import AttemptRef, Parent

T = TypeVar("T")


class Group:
    """All ranks of the job; one rank alone if torch.distributed is not in use."""

    def __init__(self) -> None:
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.world_size = dist.get_world_size() if self.is_distributed else 1
        if not self.is_distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(detail="call torch.distributed.init_process_group() before ckpt.restore()")
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def first_decides(self, decide: Callable[[], T]) -> T:
        """What the first rank's call returned, on every rank; its error is raised on every rank."""
        outcome: list[Any] = [None]
        if self.rank == 0:
            outcome = [_attempt(decide)]
        if self.is_distributed:
            dist.broadcast_object_list(outcome, src=0)
        value, error = outcome[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def everyone(self, act: Callable[[], T]) -> list[tuple[T | None, RideThroughError | None]]:
        """What every rank's call returned or raised, in rank order, on every rank."""
        mine = _attempt(act)
        if not self.is_distributed:
            return [mine]
        outcomes: list[Any] = [None] * self.world_size
        dist.all_gather_object(outcomes, mine)
        return outcomes

    def together(self, act: Callable[[], T]) -> T:
        """This rank's result; if any rank failed, the first failure is raised on all."""
        kept: list[T] = []

        def run() -> None:
            kept.append(act())

        for _, error in self.everyone(run):
            if error is not None:
                raise error
        return kept[0]


def _attempt(act: Callable[[], T]) -> tuple[T | None, RideThroughError | None]:
    """A failure as a value: raised on one rank alone it would leave the others waiting for ever."""
    try:
        return act(), None
    except RideThroughError as error:
        return None, error
    except OSError as error:
        # Not-found and the like keep their own type on the way here: a run directory that is a file, say.
        return None, StorageError(path=str(error.filename), detail=str(error.strerror))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the first rank found on the tier."""

    run: Run
    candidates: tuple[Checkpoint, ...]
    next_seq: int
    catalog: Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint all ranks have loaded, None for a start at step 0."""

    opening: Opening
    checkpoint: Checkpoint | None
    parts: tuple[LoadedPart, ...]
    damaged: tuple[dict[str, str], ...]
    """Copies that failed on some rank; the persister looks at them again and quarantines."""


def choose(group: Group, fs: FileSystem, clock: Clock, run_dir: str, *, known_uid: str | None, is_fresh: bool, storage_wait_s: float) -> Choice:
    """The newest checkpoint whose parts every rank has in memory, proven.

    Raises:
        NothingRestorable: Progress was made here and nothing of it can be restored.
        StorageUnreachable: The tier does not answer, or its marker is missing.
    """

    def look() -> Opening:
        with contextlib.suppress(Damaged, ForeignRecord):  # the catalog then knows the run by its seals, or raises the same
            # A disk that is mounted a little later than we are started (after a power cut, say) is waited for.
            _patiently(clock, storage_wait_s, lambda: open_run(fs, clock, run_dir, known_uid=known_uid, is_fresh=is_fresh))
        found = catalogs.read_patiently(fs, clock, run_dir, storage_wait_s=storage_wait_s)
        if known_uid and found.run.run_uid != known_uid and not is_fresh:
            raise TierMissing(path=run_dir, run_uid=known_uid)
        try:
            chosen = () if is_fresh else catalogs.candidates(found)
        except TwoHeads as error:
            raise TwoHeads(**{**error.fields, "path": run_dir}) from error
        return Opening(
            run=found.run,
            candidates=chosen,
            next_seq=found.next_seq,
            catalog=found,
        )

    opening = group.first_decides(look)
    damaged: list[dict[str, str]] = []
    for checkpoint in opening.candidates:
        mine: list[LoadedPart] = []

        def load(checkpoint: Checkpoint = checkpoint, mine: list[LoadedPart] = mine) -> list[dict[str, str]]:
            loaded, broken = _load_parts(fs, clock, run_dir, checkpoint, rank=group.rank, world_size=group.world_size, storage_wait_s=storage_wait_s)
            mine.extend(loaded)
            return broken

        outcomes = group.everyone(load)
        for broken, error in outcomes:
            if error is not None and not isinstance(error, Damaged):
                raise error
            damaged.extend(broken or ())
            if isinstance(error, Damaged):
                damaged.extend({"dir_name": checkpoint.dir_name, "part": name} for name in error.fields.get("parts", ()))
        if all(error is None for _, error in outcomes):
            return Choice(opening=opening, checkpoint=checkpoint, parts=tuple(mine), damaged=tuple(damaged))
    evidence = None if is_fresh else group.first_decides(lambda: catalogs.progress_evidence(fs, run_dir, opening.catalog))
    if evidence is not None:
        tried = f"{len(opening.candidates)} complete checkpoints failed their checksums" if opening.candidates else "none is complete"
        raise NothingRestorable(path=run_dir, detail=f"{evidence}; {tried}")
    return Choice(opening=opening, checkpoint=None, parts=(), damaged=tuple(damaged))


def _load_parts(
    fs: FileSystem, clock: Clock, run_dir: str, checkpoint: Checkpoint, *, rank: int, world_size: int, storage_wait_s: float
) -> tuple[list[LoadedPart], list[dict[str, str]]]:
    """This rank's parts, each from the first holder whose copy is intact, and the copies that were not."""
    assert checkpoint.roster is not None
    if checkpoint.roster.world_size != world_size:
        raise StateMismatch(
            name="the job", detail=f"{checkpoint.dir_name} was saved by {checkpoint.roster.world_size} ranks, this start has {world_size}"
        )
    wanted = [p.name for p in checkpoint.roster.parts if rank in p.holders]
    loaded: list[LoadedPart] = []
    broken: list[dict[str, str]] = []
    for name in wanted:
        for seal in (s for s in checkpoint.seals if s.part == name):
            try:
                payload = _patiently(clock, storage_wait_s, lambda seal=seal: load_part(fs, run_dir, checkpoint.dir_name, seal))  # type: ignore[misc]
                loaded.append(LoadedPart(seal=seal, payload=payload))
                break
            except Damaged:
                broken.append({"dir_name": checkpoint.dir_name, "part": name})
        else:
            raise Damaged(path=checkpoint.dir_name, detail=f"no intact copy of part {name}", parts=tuple({b["part"] for b in broken}))
    return loaded, broken


def _patiently(clock: Clock, wait_s: float, read: Callable[[], T]) -> T:
    """Storage that does not answer now is asked again: it is not a reason to go back further."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What each rank brings into the agreement."""

    node: str
    holds_replicated: bool
    state_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What every rank goes on with."""

    run_uid: str
    attempt: AttemptRef
    parent: Parent | None
    roster: Roster
    slots: SlotPlan
    launch: int


def agree(
    group: Group,
    fs: FileSystem,
    clock: Clock,
    run_dir: str,
    choice: Choice,
    facts: RankFacts,
    *,
    save_interval_steps: int,
    wanted_interval_steps: int | None,
    new_launch: Callable[[], int],
) -> Agreement:
    """A new attempt exists, durably, with everybody's consent.

    Raises:
        MemoryTooSmall: The snapshots do not fit on some node.
        TwoHeads: Somebody else started an attempt at the same time.
    """
    gathered = [found for found, _ in group.everyone(lambda: facts)]
    everyone = [found for found in gathered if found is not None]

    def issue() -> Agreement:
        nodes = tuple(f.node for f in everyone)
        if len(set(nodes)) > 1:
            # Nobody yet confirms a save across nodes: "durable" would be said of one node's parts only.
            raise UsageError(detail=f"ranks on {len(set(nodes))} nodes ({', '.join(sorted(set(nodes))[:4])}): this version protects jobs of one node")
        per_node = {node: [f for f in everyone if f.node == node] for node in nodes}
        plans = [
            plan_slots(
                state_bytes_per_rank=max(f.state_bytes for f in found),
                ranks_on_node=len(found),
                available_bytes=min(f.available_bytes for f in found),
                save_interval_steps=save_interval_steps,
                wanted_interval_steps=wanted_interval_steps,
            )
            for found in per_node.values()
        ]
        slots = max(plans, key=lambda plan: plan.interval_steps)
        ref = AttemptRef(seq=choice.opening.next_seq, nonce=uuid.uuid4().hex)
        ranks = tuple(range(group.world_size))
        parts = [RosterPart(name=layout.rank_part(rank), holders=(rank,)) for rank in ranks]
        if all(f.holds_replicated for f in everyone):
            parts.insert(0, RosterPart(name=layout.REPLICATED, holders=ranks))
        run_uid = choice.opening.run.run_uid
        roster = Roster(run_uid=run_uid, attempt=ref, nodes=nodes, parts=tuple(parts))
        found = choice.checkpoint
        parent = Parent(attempt=found.attempt, step=found.step) if found else None
        attempt = Attempt(
            run_uid=run_uid,
            attempt=ref,
            parent=parent,
            snapshot_interval_steps=slots.interval_steps,
            world_size=group.world_size,
            roster_digest=roster.digest,
            started_at=clock.now_at().isoformat(timespec="seconds"),
        )
        # Before the attempt exists: one that is refused here must not fence the job that is training.
        launch = new_launch()
        # Durable before step 1: a checkpoint whose attempt is unknown could not be placed on the lineage.
        write_attempt(fs, run_dir, attempt, roster)
        return Agreement(run_uid=run_uid, attempt=ref, parent=parent, roster=roster, slots=slots, launch=launch)

    return group.first_decides(issue)

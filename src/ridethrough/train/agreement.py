"""The start agreement: the only collective communication of ours, once an attempt.

1. The nodes say which run they have and whether they see the same directory (`tier`).
2. The first rank proposes the newest complete checkpoint of the lineage, over all tiers; every rank
   gets and proves its parts (`loading`). If one cannot, all go to the next candidate together. The
   first rank compares what made it with what is here (`guard`): all go on, or none does.
3. Everybody applies the state. The first rank issues the attempt: nonce, parent, snapshot interval,
   roster; its number is claimed and its records are made durable on every tier.
4. All go on. No step has been made before.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridethrough.config import ResumeConfig
from ridethrough.errors import NothingRestorable, UsageError
from ridethrough.format import layout
from ridethrough.format.attempt import Attempt, Roster, RosterPart
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot.sizing import SlotPlan, plan_slots
from ridethrough.store.catalog import Checkpoint
from ridethrough.store.start import claim_attempt, write_attempt
from ridethrough.train import guard, loading, tier
from ridethrough.train.group import Group
from ridethrough.train.loading import Candidate, DamagedCopy, Reader
from ridethrough.train.state import LoadedPart
from ridethrough.train.tier import Memory, Opening
from ridethrough.types import AttemptRef, Parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint all ranks have loaded, None for a start at step 0."""

    opening: Opening
    checkpoint: Checkpoint | None
    parts: tuple[LoadedPart, ...]
    damaged: tuple[DamagedCopy, ...]
    """Copies that failed on some node."""

    def suspects(self, group: Group) -> tuple[dict[str, str], ...]:
        """The copies that this node's persister is to look at again and set aside."""
        if self.opening.is_shared and group.node != group.node_order[0]:
            return ()  # one looks for all
        mine = [d for d in self.damaged if self.opening.is_shared or d.node == group.node]
        return tuple({"dir_name": dir_name, "part": part} for dir_name, part in dict.fromkeys((d.dir_name, d.part) for d in mine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Where a rank was asked to start."""

    is_fresh: bool = False
    """At step 0, whatever there is."""
    is_restart: bool = False
    """The command it belongs to has got through a start agreement before: what was wished for that one is fulfilled."""


def settle_wishes(wishes: Mapping[str, Wish]) -> bool:
    """Whether all start at step 0. A node that has lost its power and was given its command again does not make the others begin anew.

    Raises:
        UsageError: Some want to and others do not; names them.
    """
    fresh = [node for node, wish in wishes.items() if wish.is_fresh]
    if not fresh or any(wish.is_restart for wish in wishes.values()):
        return False
    if len(fresh) < len(wishes):
        raise UsageError(detail=f"{tier.listed(fresh)} want to start at step 0 (--fresh) and the other nodes do not: give all the same command")
    return True


def choose(group: Group, fs: FileSystem, clock: Clock, run_dir: str, *, memory: Memory, wish: Wish, storage_wait_s: float) -> Choice:
    """The newest checkpoint whose parts every rank has in memory, proven.

    Raises:
        UsageError: Some nodes want to start at step 0 and others do not.
        NothingRestorable: Progress was made here and nothing of it can be restored.
        StorageUnreachable: A tier does not answer, or its marker is missing.
        StateMismatch: Another number of ranks made it, and they held nothing in common.
        RideThroughError: See `tier.open_tier`.
    """
    wishes = group.each_node(lambda: wish)
    is_fresh = group.first_decides(lambda: settle_wishes(wishes))
    opening = tier.open_tier(group, fs, clock, run_dir, memory, is_fresh=is_fresh, storage_wait_s=storage_wait_s)
    reader = Reader(fs=fs, clock=clock, run_dir=run_dir, wait_s=storage_wait_s)
    damaged: list[DamagedCopy] = []
    tried = 0
    while (candidate := group.first_decides(functools.partial(_candidate, opening, tried))) is not None:
        outcome = loading.load(group, reader, candidate)
        damaged.extend(outcome.damaged)
        if outcome.is_whole:
            return Choice(opening=opening, checkpoint=candidate.checkpoint, parts=outcome.parts, damaged=tuple(damaged))
        tried += 1
    evidence = None if is_fresh else tier.progress_evidence(group, fs, run_dir, opening)
    if evidence is not None:
        what = f"{tried} complete checkpoints failed their checksums" if tried else "none is complete"
        raise NothingRestorable(path=run_dir, detail=f"{evidence}; {what}")
    return Choice(opening=opening, checkpoint=None, parts=(), damaged=tuple(damaged))


def _candidate(opening: Opening, number: int) -> Candidate | None:
    found = opening.found
    assert found is not None
    if number >= len(found.candidates):
        return None
    # Everybody is told, so without what only a person wants to read.
    checkpoint = dataclasses.replace(found.candidates[number], problems=())
    return Candidate(checkpoint=checkpoint, holders=None if opening.is_shared else found.holders(checkpoint))


def guard_resume(group: Group, choice: Choice, meta: Mapping[str, Any], policies: ResumeConfig, *, run_dir: str) -> tuple[guard.Finding, ...]:
    """What is different from what made the checkpoint and worth a warning, as the first rank found it.

    Before the attempt exists: a start that is refused here must not fence the job that is training.

    Args:
        group: All ranks.
        choice: What they would go on from.
        meta: The provenance of this process.
        policies: Those of the first rank's node count.
        run_dir: Of the run.

    Raises:
        ResumeRefused: On every rank, if the first one finds a difference that is to be refused.
    """
    found = choice.checkpoint
    if found is None:
        return ()
    roster = found.roster
    assert roster is not None

    def decide() -> tuple[guard.Finding, ...]:
        # Of a seal that was read again with its part: what the nodes tell each other of seals is without provenance.
        saved = guard.facts(choice.parts[0].seal.meta, world_size=roster.world_size)
        here = guard.facts(meta, world_size=group.world_size)
        return guard.admit(guard.compare(saved, here, policies), path=run_dir, step=found.step)

    return group.first_decides(decide)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What each rank brings into the agreement."""

    holds_replicated: bool
    state_bytes: int
    available_bytes: int
    save_interval_steps: int
    wanted_interval_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What every rank goes on with."""

    run_uid: str
    attempt: AttemptRef
    parent: Parent | None
    roster: Roster
    slots: SlotPlan
    launch: int
    """Of this rank's node: each keeper counts its own."""


def agree(group: Group, fs: FileSystem, clock: Clock, run_dir: str, choice: Choice, facts: RankFacts, *, new_launch: Callable[[], int]) -> Agreement:
    """A new attempt exists, durably, with everybody's consent.

    Raises:
        UsageError: The ranks were given different intervals.
        MemoryTooSmall: The snapshots do not fit on some node.
        TwoHeads: Somebody else started an attempt at the same time.
        Fenced: Somebody else has started a later one meanwhile.
    """
    gathered = [found for found, _ in group.everyone(lambda: facts)]
    everyone = [found for found in gathered if found is not None]
    slots = group.first_decides(lambda: size_slots(group.nodes, everyone))
    # Before the attempt exists: one that is refused here must not fence the job that is training.
    launches = group.each_node(new_launch)
    nonce = group.first_decides(lambda: uuid.uuid4().hex)
    ref = _claim(group, fs, run_dir, choice.opening, nonce)
    found = choice.checkpoint
    parent = Parent(attempt=found.attempt, step=found.step) if found else None
    run_uid = choice.opening.run.run_uid
    roster = new_roster(run_uid, ref, group.nodes, has_replicated=all(f.holds_replicated for f in everyone))
    attempt = Attempt(
        run_uid=run_uid,
        attempt=ref,
        parent=parent,
        snapshot_interval_steps=slots.interval_steps,
        world_size=group.world_size,
        roster_digest=roster.digest,
        started_at=group.first_decides(lambda: clock.now_at().isoformat(timespec="seconds")),
    )
    # Durable before step 1: a checkpoint whose attempt is unknown could not be placed on the lineage.
    group.each_node(lambda: write_attempt(fs, run_dir, attempt, roster), nodes=choice.opening.tier_nodes(group))
    return Agreement(run_uid=run_uid, attempt=ref, parent=parent, roster=roster, slots=slots, launch=launches[group.node])


def size_slots(nodes: tuple[str, ...], facts: list[RankFacts]) -> SlotPlan:
    """The snapshot interval and slots that fit on every node.

    Raises:
        UsageError: The ranks were given different intervals.
        MemoryTooSmall: They fit nowhere.
    """
    for rank, found in enumerate(facts):
        if (found.save_interval_steps, found.wanted_interval_steps) != (facts[0].save_interval_steps, facts[0].wanted_interval_steps):
            raise UsageError(detail=f"Checkpointer of rank {rank} has other intervals than that of rank 0: give every rank the same")
    by_node: dict[str, list[RankFacts]] = {}
    for found, node in zip(facts, nodes, strict=True):
        by_node.setdefault(node, []).append(found)
    plans = [
        plan_slots(
            state_bytes_per_rank=max(f.state_bytes for f in here),
            ranks_on_node=len(here),
            available_bytes=min(f.available_bytes for f in here),
            save_interval_steps=here[0].save_interval_steps,
            wanted_interval_steps=here[0].wanted_interval_steps,
        )
        for here in by_node.values()
    ]
    return max(plans, key=lambda plan: plan.interval_steps)


def new_roster(run_uid: str, attempt: AttemptRef, nodes: tuple[str, ...], *, has_replicated: bool) -> Roster:
    """A private part for each rank, and one that all hold if there is one."""
    ranks = tuple(range(len(nodes)))
    parts = [RosterPart(name=layout.rank_part(rank), holders=(rank,)) for rank in ranks]
    if has_replicated:
        parts.insert(0, RosterPart(name=layout.REPLICATED, holders=ranks))
    return Roster(run_uid=run_uid, attempt=attempt, nodes=nodes, parts=tuple(parts))


def _claim(group: Group, fs: FileSystem, run_dir: str, opening: Opening, nonce: str) -> AttemptRef:
    """A sequence number that is ours on every tier.

    Raises:
        TwoHeads: Fewer nodes than before want the number of another start, which may be the other half of the job.
    """
    ref = AttemptRef(seq=opening.next_seq, nonce=nonce)
    while True:
        rivals = group.each_node(lambda ref=ref: claim_attempt(fs, run_dir, ref, group.node_order), nodes=opening.tier_nodes(group))  # type: ignore[misc]
        claims = [claim for claim in rivals.values() if claim is not None]
        if not claims:
            return ref
        for claim in claims:
            if opening.is_shrunk and not claim.is_over(group.node_order):
                tier.refuse_rival(run_dir, group.node_order, claim)
        # All nodes are here: whoever had claimed the number is cut, or will find itself fenced by ours.
        ref = dataclasses.replace(ref, seq=ref.seq + 1)

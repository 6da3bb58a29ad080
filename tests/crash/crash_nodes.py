"""Two nodes, each with a disk of its own and its part of every checkpoint; their recovery sees both disks as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from crash_book import Book, Seen
from crash_lab import RUN, truth_of
from crash_traces import Turns

from ridethrough.errors import Damaged, RideThroughError, StoreMissing
from ridethrough.format import layout
from ridethrough.format.attempt import Attempt, Roster, RosterPart
from ridethrough.store import union
from ridethrough.store.catalog import Catalog, read_catalog
from ridethrough.store.retain import Retention
from ridethrough.store.start import adopt_run, new_run, unfinished_claims, write_attempt
from ridethrough.store.verify import load_part
from ridethrough.store.writer import RunWriter
from ridethrough.testing import CrashFS, FakeClock, RecordingFileSystem, SimpleStore, State, Timeline
from ridethrough.testing.crash_model import Profile
from ridethrough.types import AttemptRef, Parent

NODES = ("node-0", "node-1")
PARTS = {"node-0": (layout.REPLICATED, layout.rank_part(0)), "node-1": (layout.rank_part(1),)}
PART_BYTES = 5000
Disks = dict[str, CrashFS]


class Nodes:
    """A job of two nodes.

    Args:
        disks: By node; all on one timeline.
        hit: The nodes whose power goes.
        seed: Decides whose call comes next.
    """

    def __init__(self, disks: Disks, *, hit: tuple[str, ...] = NODES, seed: int = 0) -> None:
        self.disks = disks
        self.hit = hit
        self.seed = seed
        self.timeline = disks[NODES[0]].timeline
        self.truths: dict[str, int] = {}
        self.starts = 0
        self.now = 0
        self.stores: dict[str, SimpleStore] = {}
        self.writers: dict[str, RunWriter] = {}

    def _catalogs(self, disks: Disks) -> dict[str, Catalog]:
        found = {}
        for node, disk in disks.items():
            try:
                found[node] = read_catalog(disk, RUN)
            except StoreMissing:
                continue
        return found

    def start(self) -> None:
        """A new attempt of both nodes goes on from the newest checkpoint that their disks hold together."""
        catalogs = self._catalogs(self.disks)
        merged = union.merge(catalogs) if catalogs else None
        run = merged.catalog.run if merged is not None else new_run(FakeClock(), RUN)
        for node, disk in self.disks.items():
            if node not in catalogs:
                adopt_run(disk, RUN, run)
        newest = self._newest(self.disks, merged)[0] if merged is not None else None
        parent = Parent(attempt=newest[0], step=newest[1]) if newest is not None else None
        self.now = newest[1] if newest is not None else 0
        self.starts += 1
        seed = self.seed * 1000 + self.starts
        attempt = AttemptRef(seq=merged.catalog.next_seq if merged is not None else 1, nonce=f"{seed:032x}"[::-1])
        roster = Roster(
            run_uid=run.run_uid,
            attempt=attempt,
            nodes=NODES,
            parts=tuple(
                RosterPart(name=name, holders=(0, 1) if name == layout.REPLICATED else (rank,))
                for rank, node in enumerate(NODES)
                for name in PARTS[node]
            ),
        )
        record = Attempt(
            run_uid=run.run_uid,
            attempt=attempt,
            parent=parent,
            snapshot_interval_steps=1,
            world_size=2,
            roster_digest=roster.digest,
            started_at="2026-01-01T00:00:00+00:00",
        )
        for node, disk in self.disks.items():
            write_attempt(disk, RUN, record, roster)
            store = SimpleStore(fs=disk, run_dir=RUN, seed=seed, part_bytes=PART_BYTES, node=node)
            self.stores[node] = dataclasses.replace(store, run_uid=run.run_uid, attempt=attempt, parent=parent, roster=roster)
            self.writers[node] = RunWriter(
                disk,
                RUN,
                attempt=attempt,
                roster=roster,
                retention=Retention(keep_last=1),
                monitor=None,
                resumed_dir=newest[2] if newest is not None else None,
                node=node,
                has_own_disk=True,
                note=self._note,
            )
        self.truths[attempt.nonce] = seed
        self.timeline.mark(("started", run.run_uid, attempt.seq, attempt.nonce))

    def _note(self, kind: str, **data: str) -> None:
        if kind == "checkpoint.removed":
            self.timeline.mark(("removing", data["dir_name"]))

    def save(self) -> None:
        """Both nodes write their parts at once; durable is said when both are done, verified when both have read back."""
        self.now += 10
        step = self.now
        first = self.stores[NODES[0]]
        name, place = first.dir_name(step), (first.attempt.seq, step)

        def write(node: str) -> Callable[[Callable[[str, str], None]], None]:
            store, writer = self.stores[node], self.writers[node]

            def action(hook: Callable[[str, str], None]) -> None:
                writer._fs = RecordingFileSystem(self.disks[node], before=hook)
                try:
                    seals[node] = writer.commit(store.part_save(step, part) for part in PARTS[node])
                finally:
                    writer._fs = self.disks[node]

            return action

        seals: dict[str, tuple[object, ...]] = {}
        Turns(self.seed + step).run(*(write(node) for node in NODES))
        self.timeline.mark(("durable", name, *place))
        save_id = self.stores[NODES[0]].part_save(step, layout.REPLICATED).save_id
        for node in NODES:
            self.writers[node].describe(step, save_id)
            self.writers[node].prove(seals[node])  # type: ignore[arg-type]
        self.timeline.mark(("verified", name, *place))
        for node in NODES:
            self.writers[node].verified.add(save_id)
            self.writers[node].prune(name)

    # -- what a reader finds -------------------------------------------------------------------------------------------

    def states(self, *, limit: int, only: set[int] | None) -> Iterator[State]:
        return self.timeline.states(hit=self.hit, limit=limit, only=only)

    def observe(self, state: State) -> Seen:
        """What the nodes find together on their disks."""
        seen = Seen()
        disks = state.disks()
        try:
            catalogs = self._catalogs(disks)
            if not catalogs:
                seen.is_missing = True
                return seen
            merged = union.merge(catalogs)
            newest, steps, wrong = self._newest(disks, merged)
            for node in catalogs:
                for claim in unfinished_claims(disks[node], RUN, above=0):
                    known = seen.claims.setdefault(claim.seq, claim.nonce)
                    # A cut node may have a torn claim of a start that the other had finished with; a whole one is the same.
                    if claim.nonce and known and claim.nonce != known:
                        seen.wrong.append(f"number {claim.seq} belongs to {known[:8]} and to {claim.nonce[:8]}")
                    seen.claims[claim.seq] = known or claim.nonce
        except (RideThroughError, OSError) as error:
            seen.wrong.append(f"cannot be read: {error!r}")
            return seen
        seen.wrong.extend(wrong)
        seen.wrong.extend(f"{problem.path}: {problem.error}" for problem in merged.catalog.problems)
        seen.run_uid = merged.catalog.run.run_uid
        seen.attempts = frozenset((ref.seq, ref.nonce) for ref, _ in merged.catalog.attempts)
        seen.next_seq = merged.catalog.next_seq
        seen.steps = steps
        seen.loaded = (newest[0].seq, newest[1]) if newest is not None else None
        return seen

    def _newest(self, disks: Disks, merged: union.Union) -> tuple[tuple[AttemptRef, int, str] | None, dict[int, str | None], list[str]]:
        newest, steps, wrong = None, {}, []
        for checkpoint in union.candidates(merged):
            payloads = {}
            error = None
            for seal in checkpoint.seals:
                for node in merged.holders[checkpoint.dir_name][seal.payload_name]:
                    try:
                        payloads[seal.part] = bytes(load_part(disks[node], RUN, checkpoint.dir_name, seal))
                    except Damaged as damaged:
                        error = str(damaged)
            steps[checkpoint.step] = error
            if error is None and newest is None:
                newest = (checkpoint.attempt, checkpoint.step, checkpoint.dir_name)
            seed = self.truths.get(checkpoint.attempt.nonce, -1)
            names = [name for node in NODES for name in PARTS[node]]
            if error is None and payloads != {name: truth_of(seed, PART_BYTES, checkpoint.step, name)[0] for name in names}:
                wrong.append(f"step {checkpoint.step} is not what was saved")
        return newest, steps, wrong

    def after(self, state: State) -> Nodes:
        """Power is back on both, and what was said before still holds."""
        again = Nodes(state.disks(), hit=self.hit, seed=self.seed)
        again.truths, again.starts = dict(self.truths), self.starts + 1
        for mark in state.marks:
            again.timeline.mark(mark)
        return again

    def goes_on(self, state: State, book: Book) -> list[str]:
        """What hinders the next start and save of both nodes."""
        again = self.after(state)
        try:
            again.start()
            again.save()
            newest, _, wrong = again._newest(again.disks, union.merge(again._catalogs(again.disks)))
        except (RideThroughError, OSError) as error:
            return [f"the next start or save fails: {error!r}"]
        attempt = again.stores[NODES[0]].attempt
        if attempt.seq in book.claims:
            return [f"number {attempt.seq} was given a second time"]
        return wrong or ([] if newest is not None and newest[:2] == (attempt, again.now) else [f"the next save loads as {newest}"])


def new_nodes(*, profile: Profile = "posix", page_bytes: int = 4096, hit: tuple[str, ...] = NODES, seed: int = 0, names_first: bool = False) -> Nodes:
    timeline = Timeline(seed=seed)
    return Nodes({node: CrashFS(profile=profile, page_bytes=page_bytes, name=node, timeline=timeline) for node in NODES}, hit=hit, seed=seed)

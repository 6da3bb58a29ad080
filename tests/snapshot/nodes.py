"""Several nodes of one attempt, each with memory, a persister and a tier of its own or a shared one, and somebody who leads."""

from __future__ import annotations

import itertools
import uuid
from pathlib import Path
from typing import Any

from fake_link import FakeLink
from ridethrough.format import layout, tree
from ridethrough.format.attempt import Attempt, Roster, RosterPart
from ridethrough.format.layout import REPLICATED, rank_part
from ridethrough.format.seal import save_id
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.snapshot.persist import Persister
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.slots import PAGE, Slot, aligned
from ridethrough.store import union
from ridethrough.store.catalog import Catalog, Checkpoint, read_catalog
from ridethrough.store.retain import Retention
from ridethrough.store.start import adopt_run, new_run, write_attempt
from ridethrough.store.verify import load_part
from ridethrough.supervisor import saving
from ridethrough.supervisor.directive import Directive
from ridethrough.supervisor.view import NodeView, Sealed
from ridethrough.testing import FakeClock
from ridethrough.testing.store import simple_payload, simple_state
from ridethrough.types import AttemptRef

FS = PosixFileSystem()
LAUNCH = 1
SLOTS = 3


def truth(step: int, part: str) -> bytes:
    """What the payload of this part and step must be."""
    return simple_payload(0, step, part, size_bytes=2000)


class Node:
    """A node's memory, its persister, and its tier."""

    def __init__(self, cluster: Cluster, name: str, run_dir: str) -> None:
        self.cluster, self.name, self.run_dir = cluster, name, run_dir
        self.link = FakeLink()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._control = self.link.board(links.CONTROL)
        self._answer = self.link.board(links.PERSIST)
        self._turn = itertools.count()
        self._slots: dict[str, Slot] = {}
        self._said: dict[str, Any] = {}
        self.plan = cluster.plan_of(name, run_dir)
        board = self.link.board(links.plan_board(LAUNCH), links.PLAN_BYTES)
        board.write(self.plan.as_board())
        board.close()
        self.say(launch=LAUNCH)
        self.persister = self.make_persister()

    def make_persister(self, fs: FileSystem = FS) -> Persister:
        """A persister that takes over from whoever served before."""
        self.persister = Persister(fs, self.cluster.clock, self.link, echo=lambda kind, data: self.events.append((kind, data)))  # type: ignore[arg-type]
        return self.persister

    def say(self, **news: Any) -> None:
        """The control board, as a supervisor writes it."""
        self._said.update(news)
        self._control.write(self._said)

    @property
    def answer(self) -> dict[str, Any]:
        """What the persister says of itself."""
        return self._answer.read()

    def sealed(self) -> dict[int, tuple[str, ...]]:
        """Steps that are sealed here, and without which dark nodes."""
        return {s["step"]: tuple(s["dark"]) for s in self.answer["sealed"]}

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [data for found, data in self.events if found == kind]

    def post(self, step: int, *, replicated: bytes | None = None) -> None:
        """Every rank here has posted its snapshot of the step."""
        for rank in self.plan.local_ranks:
            parts = {REPLICATED: replicated or truth(step, REPLICATED), rank_part(rank): truth(step, rank_part(rank))}
            self._fill(links.slot_name(LAUNCH, rank, step % SLOTS), step, parts)

    def hold(self, step: int, rank: int) -> None:
        """A replica of that rank's private part is here."""
        self._fill(links.replica_slot(LAUNCH, rank, next(self._turn) % 4), step, {rank_part(rank): truth(step, rank_part(rank))})

    def _fill(self, name: str, step: int, payloads: dict[str, bytes]) -> None:
        if name not in self._slots:
            self._slots[name] = self.link.slot(name, 16 * PAGE)
        slot = self._slots[name]
        assert slot.begin(), "the slot is pinned"
        at, parts = PAGE, []
        for part, payload in payloads.items():
            slot.memory[at : at + len(payload)] = payload
            state = tree.encode(simple_state(0, step, part), part, lambda path, value: NotImplemented)
            parts.append({"name": part, "at": at, "size_bytes": len(payload), "tree": state})
            at += aligned(len(payload))
        slot.post(step, {"step": step, "parts": parts, "captured_at": "then", "captured_s": 1.0, "metrics": {"loss": 1.0 / step}}, at)

    def files(self, step: int) -> list[str]:
        """Parts whose seals of this step this node has written."""
        directory = Path(self.run_dir, self.cluster.dir_name(step))
        names = [path.name for path in directory.glob("*.seal")] if directory.is_dir() else []
        return sorted(name.split("~")[0] for name in names if name.split("~")[1].startswith(self.name + "-"))

    def kept(self) -> list[int]:
        """Steps whose directories are on this node's tier."""
        return sorted(int(path.name.split("-")[1]) for path in Path(self.run_dir).glob("step-*"))

    def close(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._control.close()
        self._answer.close()
        self.link.close()


class Cluster:
    """Nodes n0, n1, … with one rank each unless told otherwise, which save every 10 steps."""

    def __init__(self, root: Path, count: int = 3, *, is_shared: bool, ranks: int = 1, keep_last: int = 3) -> None:
        self.clock = FakeClock()
        self.names = tuple(f"n{number}" for number in range(count))
        self.is_shared, self._keep_last = is_shared, keep_last
        self.run_dirs = {name: str(root / ("shared" if is_shared else name) / "run") for name in self.names}
        run = new_run(self.clock, "run")
        self.ref = AttemptRef(seq=1, nonce=uuid.UUID(int=7).hex)
        where = tuple(name for name in self.names for _ in range(ranks))
        parts = [
            RosterPart(name=REPLICATED, holders=tuple(range(len(where)))),
            *(RosterPart(name=rank_part(r), holders=(r,)) for r in range(len(where))),
        ]
        self.roster = Roster(run_uid=run.run_uid, attempt=self.ref, nodes=where, parts=tuple(parts))
        attempt = Attempt(
            run_uid=run.run_uid, attempt=self.ref, parent=None, snapshot_interval_steps=1, world_size=len(where),
            roster_digest=self.roster.digest, started_at="then",
        )  # fmt: skip
        for run_dir in dict.fromkeys(self.run_dirs.values()):
            Path(run_dir).mkdir(parents=True)
            adopt_run(FS, run_dir, run)
            write_attempt(FS, run_dir, attempt, self.roster)
        self.nodes = {name: Node(self, name, self.run_dirs[name]) for name in self.names}
        self.word = Directive(attempt=self.ref.label, members=self.names)
        self.nodes["n0"].say(is_lead=True)

    def plan_of(self, name: str, run_dir: str) -> Plan:
        return Plan(
            run_dir=run_dir, run_uid=self.roster.run_uid, attempt=self.ref, parent=None, resumed_dir=None, roster=self.roster, node=name,
            meta={"experiment": "fake"}, retention=Retention(keep_last=self._keep_last), monitor=None, save_interval_steps=10,
            snapshot_interval_steps=1, restored_step=0, damaged=(), is_shared=self.is_shared,
        )  # fmt: skip

    def dir_name(self, step: int) -> str:
        return layout.step_dir(step, save_id(self.roster.run_uid, self.ref.nonce, step))

    def post(self, step: int, *, only: tuple[str, ...] | None = None) -> None:
        """The step is in the memory of these nodes (all unless given): their own parts, and what they hold of all others."""
        for name in only or self.names:
            self.nodes[name].post(step)
        for rank, owner in enumerate(self.roster.nodes):
            for holder in self.nodes[owner].plan.replica_nodes(owner):
                if holder in (only or self.names):
                    self.nodes[holder].hold(step, rank)

    def announce(self, step: int, number: int, *dark: str) -> None:
        for node in self.nodes.values():
            node.say(announced=step, announcement=number, dark=list(dark))

    def tick(self, *names: str, times: int = 1) -> None:
        """Those persisters (all unless given) have a round."""
        for _ in range(times):
            for name in names or self.names:
                self.nodes[name].persister.tick()

    def lead(self, *, without: tuple[str, ...] = ()) -> None:
        """The lead hears what the persisters have sealed, and says to the others what is durable."""
        views = {}
        for name in self.names:
            if name not in without:
                seals = [
                    Sealed(step=s["step"], dark=tuple(s["dark"]), is_verified=s["is_verified"], digests=s["digests"])
                    for s in self.nodes[name].answer["sealed"]
                ]
                views[name] = NodeView(node=name, sealed=tuple(seals))
        self.word = saving.confirm(self.word, self.names, views, self.nodes["n0"].plan.is_covered)
        for name in views:
            self.nodes[name].say(confirmed=self.word.confirmed)

    def save(self, step: int, number: int, *dark: str) -> None:
        """One save from end to end, made by the nodes that are not dark."""
        living = tuple(name for name in self.names if name not in dark)
        self.announce(step, number, *dark)
        self.post(step, only=living)
        self.tick(*living)
        self.lead(without=dark)
        self.tick(*living)

    def found(self, *, lost: tuple[str, ...] = ()) -> tuple[dict[str, Catalog], tuple[Checkpoint, ...]]:
        """What can be restored from the tiers, the best first, when those nodes' are gone."""
        catalogs = {name: read_catalog(FS, run_dir) for name, run_dir in self.run_dirs.items() if name not in lost}
        return catalogs, union.candidates(union.merge(catalogs))

    def loaded(self, step: int, *, lost: tuple[str, ...] = ()) -> dict[str, bytes]:
        """Every part of a step, proven, from whichever tier has it."""
        _, candidates = self.found(lost=lost)
        checkpoint = next(c for c in candidates if c.step == step)
        parts = {}
        for seal in checkpoint.seals:
            for name, run_dir in self.run_dirs.items():
                if name not in lost and Path(run_dir, checkpoint.dir_name, seal.payload_name).exists():
                    parts[seal.part] = bytes(load_part(FS, run_dir, checkpoint.dir_name, seal))
        return parts

    def truths(self, step: int) -> dict[str, bytes]:
        return {name: truth(step, name) for name in self.roster.part_names}

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

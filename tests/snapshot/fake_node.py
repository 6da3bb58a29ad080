"""A node without a keeper: memory by name, ranks that post known bytes, and the persister's two boards."""

from __future__ import annotations

import itertools
from typing import Any

from fake_link import FakeLink
from ridethrough.format import tree
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot import link as links
from ridethrough.snapshot.persist import Persister
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.slots import PAGE, Slot, aligned
from ridethrough.store.retain import Retention
from ridethrough.testing import FakeClock, SimpleStore

SLOTS = 3
LAUNCH = 1


class FakeNode:
    """Ranks that post `SimpleStore`'s bytes, and a persister on the file system given to `persister`."""

    def __init__(self, store: SimpleStore, *, every: int = 10, keep_last: int = 3, monitor: str | None = None) -> None:
        self.store = store
        self.link = FakeLink()
        self.clock = FakeClock()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._control = self.link.board(links.CONTROL)
        self._answer = self.link.board(links.PERSIST)
        self._every, self._keep_last, self._monitor = every, keep_last, monitor
        self._turn = {rank: itertools.cycle(range(SLOTS)) for rank in range(store.world_size)}
        self._slots: dict[str, Slot] = {}
        self._said: dict[str, Any] = {}
        self.launch = 0
        self.start(LAUNCH)

    def start(self, launch: int, *, restored_step: int = 0, **changes: Any) -> None:
        """A launch of the store's present attempt; the slots of the last one are gone."""
        self.close_slots()
        self.launch = launch
        assert self.store.roster is not None
        board = self.link.board(links.plan_board(launch), links.PLAN_BYTES)
        plan = Plan(
            run_dir=self.store.run_dir,
            run_uid=self.store.run_uid,
            attempt=self.store.attempt,
            parent=None,
            roster=self.store.roster,
            node=self.store.node,
            meta={"experiment": "fake"},
            retention=Retention(keep_last=self._keep_last),
            monitor=self._monitor,
            save_interval_steps=self._every,
            snapshot_interval_steps=1,
            restored_step=restored_step,
            **{"resumed_dir": None, "damaged": (), **changes},
        )
        board.write(plan.as_board())
        board.close()
        self._said = {}
        self.say(launch=launch)

    def say(self, **news: Any) -> None:
        """The control board, as a supervisor writes it."""
        if "announced" in news:
            news["announcement"] = int(self._said.get("announcement", 0)) + 1
        self._said.update(news)
        self._control.write(self._said)

    def persister(self, fs: FileSystem) -> Persister:
        """A persister that takes over from whoever served before."""
        return Persister(fs, self.clock, self.link, echo=lambda kind, data: self.events.append((kind, data)))  # type: ignore[arg-type]

    @property
    def answer(self) -> dict[str, Any]:
        """What the persister says of itself."""
        return self._answer.read()

    def rewrite_answer(self, **news: Any) -> None:
        """The persister's board, as a dying one would leave it."""
        self._answer.write({**self._answer.read(), **news})

    def noted(self, kind: str) -> list[dict[str, Any]]:
        """Data of the events of a kind."""
        return [data for found, data in self.events if found == kind]

    def post(self, step: int, *, ranks: tuple[int, ...] | None = None, replicated: dict[int, bytes] | None = None) -> None:
        """Every rank has posted its snapshot of the step; `replicated` gives a rank other bytes for the shared part."""
        for rank in range(self.store.world_size) if ranks is None else ranks:
            payloads = {"replicated": self.store.truth(step, "replicated"), f"rank-{rank:05d}": self.store.truth(step, f"rank-{rank:05d}")}
            if replicated and rank in replicated:
                payloads["replicated"] = replicated[rank]
            self._post_one(step, rank, payloads)

    def _post_one(self, step: int, rank: int, payloads: dict[str, bytes]) -> None:
        slot = self.slot(rank, next(self._turn[rank]))
        assert slot.begin(), "the slot is pinned"
        at, parts = PAGE, []
        for name, payload in payloads.items():
            slot.memory[at : at + len(payload)] = payload
            state = tree.encode(self.store.state(step, name), name, lambda path, value: NotImplemented)
            parts.append({"name": name, "at": at, "size_bytes": len(payload), "tree": state})
            at += aligned(len(payload))
        index = {"step": step, "parts": parts, "captured_at": self.clock.now_at().isoformat(), "metrics": {"loss": 1.0 / step}}
        slot.post(step, index, at)

    def slot(self, rank: int, index: int) -> Slot:
        """A rank's slot, open in this process."""
        name = links.slot_name(self.launch, rank, index)
        if name not in self._slots:
            self._slots[name] = self.link.slot(name, 64 * PAGE)
        return self._slots[name]

    def close_slots(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def close(self) -> None:
        self.close_slots()
        self._control.close()
        self._answer.close()
        self.link.close()

"""Several nodes in one process: each has memory, a plan, ranks that post known bytes, and a courier with real sockets."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

from fake_link import FakeLink
from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.format.layout import REPLICATED, rank_part
from ridethrough.seam.clock import SystemClock
from ridethrough.snapshot import link as links
from ridethrough.snapshot.courier import Courier
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.slots import PAGE, Slot, aligned
from ridethrough.store.retain import Retention
from ridethrough.testing.store import random_bytes
from ridethrough.types import AttemptRef

SLOTS = 4
PART_BYTES = 5000
KEY = "17" * 32
NONCE = "ab" * 16


SLOT_BYTES = 3 << 19
"""Unlike any board."""


def truth(rank: int, step: int, size_bytes: int = PART_BYTES) -> bytes:
    """The private part of a rank at a step."""
    return random_bytes(rank, f"private/{step}", size_bytes)


def state(rank: int, step: int) -> dict[str, Any]:
    """The small state beside it."""
    return {"rank": rank, "step": step, "position": [step, {"epoch": 1}]}


def make_plan(node: str, nodes: tuple[str, ...], addresses: dict[str, list[Any]], **changes: Any) -> Plan:
    """The plan of one node; `nodes` gives the node of each rank."""
    attempt = changes.pop("attempt", AttemptRef(seq=1, nonce=NONCE))
    run_uid = changes.pop("run_uid", "run-1")
    ranks = tuple(range(len(nodes)))
    parts = (RosterPart(name=REPLICATED, holders=ranks), *(RosterPart(name=rank_part(rank), holders=(rank,)) for rank in ranks))
    fields: dict[str, Any] = {
        "run_dir": "/nowhere",
        "run_uid": run_uid,
        "attempt": attempt,
        "parent": None,
        "resumed_dir": None,
        "roster": Roster(run_uid=run_uid, attempt=attempt, nodes=nodes, parts=parts),
        "node": node,
        "meta": {},
        "retention": Retention(),
        "monitor": None,
        "save_interval_steps": 10,
        "snapshot_interval_steps": 1,
        "restored_step": 0,
        "damaged": (),
        "addresses": addresses,
        "key": KEY,
    }
    return Plan(**{**fields, **changes})


class Memory:
    """The boards and slots of a node, written as supervisor and trainers do."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self._control = link.board(links.CONTROL)
        self._control.write({"launch": 0, "peer_port": 1})
        self._answer = link.board(links.COURIER)
        self._slots: dict[str, Slot] = {}
        self._turn: dict[int, Any] = {}
        self.launch = 0
        self.plan: Plan | None = None

    def begin(self, launch: int, plan: Plan | None) -> None:
        """A launch, and what its start agreement has decided if it is over."""
        self.close_slots()
        self.launch = launch
        self._control.write({"launch": launch, "peer_port": 1})
        self.plan = plan
        if plan is not None:
            board = self.link.board(links.plan_board(launch), links.PLAN_BYTES)
            board.write(plan.as_board())
            board.close()

    @property
    def answer(self) -> dict[str, Any]:
        """What the courier says of itself."""
        return self._answer.read()

    def held(self, rank: int) -> list[int]:
        return self.answer["held"].get(str(rank), [])

    def post(self, step: int, *, rank: int, size_bytes: int = PART_BYTES, slot_bytes: int = SLOT_BYTES) -> bool:
        """The rank has posted its snapshot of the step; False if its slot was locked."""
        index = next(self._turn.setdefault(rank, itertools.cycle(range(SLOTS))))
        name = links.slot_name(self.launch, rank, index)
        if name not in self._slots or self._slots[name].size_bytes != slot_bytes:
            self._slots[name] = self.link.slot(name, slot_bytes)
        slot = self._slots[name]
        if not slot.begin():
            return False
        at, parts = PAGE, []
        for part, payload, tree in ((REPLICATED, b"r" * 3000, {"big": "tree"}), (rank_part(rank), truth(rank, step, size_bytes), state(rank, step))):
            slot.memory[at : at + len(payload)] = payload
            parts.append({"name": part, "at": at, "size_bytes": len(payload), "tree": tree})
            at += aligned(len(payload))
        facts = {"captured_at": f"then {step}", "captured_s": 1234.5, "metrics": {"loss": 1.0 / step}}
        slot.post(step, {"step": step, "parts": parts, **facts}, at)
        return True

    def post_all(self, *steps: int, size_bytes: int = PART_BYTES) -> None:
        """Every rank of the node has posted these steps."""
        assert self.plan is not None
        for step, rank in itertools.product(steps, self.plan.local_ranks):
            assert self.post(step, rank=rank, size_bytes=size_bytes), "the slot is locked"

    def replicas(self, rank: int) -> dict[int, tuple[bytes, Any, dict[str, Any]]]:
        """By step: payload, tree and index of what is held of a rank, as somebody else on the node reads it."""
        found = {}
        for name in self.link.names():
            if name.startswith(f"{self.launch}/replica/{rank}/"):
                slot = self.link.slot(name)
                step = slot.posted_step()
                if step is not None and slot.pin(step):
                    (part,), index = slot.read()
                    assert part.name == rank_part(rank)
                    found[step] = (bytes(part.payload), part.tree, index)
                    part.payload.release()
                slot.close()
        return found

    def close_slots(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def close(self) -> None:
        self.close_slots()
        self._control.close()
        self._answer.close()
        self.link.close()


class Node(Memory):
    """With a courier in this process, which works only while it is ticked."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(FakeLink())
        self.config = config or {}
        self.courier = self.start_courier()
        self.is_frozen = False

    def start_courier(self) -> Courier:
        self.courier = Courier(SystemClock(), self.link, self.config)
        return self.courier

    def close(self) -> None:
        self.courier.close()
        super().close()


class Room:
    """Nodes n0, n1, … that train together.

    Args:
        count: Nodes.
        ranks: Of each node.
    """

    def __init__(self, count: int, *, ranks: int = 1, host: str = "127.0.0.1", config: dict[str, Any] | None = None) -> None:
        self.nodes = [Node(config) for _ in range(count)]
        self.host = host
        self.rank_nodes = tuple(f"n{at}" for at in range(count) for _ in range(ranks))

    def addresses(self, ports: dict[int, int] | None = None) -> dict[str, list[Any]]:
        """Where each courier listens; `ports` puts something in between."""
        return {f"n{at}": [self.host, 0, (ports or {}).get(at, node.answer["port"])] for at, node in enumerate(self.nodes)}

    def plan(self, at: int, *, ports: dict[int, int] | None = None, **changes: Any) -> Plan:
        """The plan that node is told."""
        return make_plan(f"n{at}", self.rank_nodes, self.addresses(ports), **changes)

    def begin(self, launch: int = 1, *, ports: dict[int, int] | None = None, **changes: Any) -> None:
        """The launch has begun on every node."""
        for at, node in enumerate(self.nodes):
            node.begin(launch, self.plan(at, ports=ports, **changes))

    def lag(self, of: int, at: int) -> int:
        """The newest step of a node of which another one has said that it holds it, -1 if there is none."""
        return int(self.nodes[of].answer["lag"].get(f"n{at}", -1))

    def settle(self) -> None:
        """Every courier has read its plan, if there is one."""
        self.until(lambda: all(node.courier._plan is not None for node in self.nodes if node.plan is not None and not node.is_frozen))

    def tick(self) -> None:
        """Every node's courier gets its turn."""
        for node in self.nodes:
            if not node.is_frozen:
                node.courier.tick(0.0)

    def until(self, condition: Callable[[], object], *, within_s: float = 10.0) -> None:
        """The couriers have worked until this is so."""
        end_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end_s, [node.answer for node in self.nodes]
            self.tick()
            time.sleep(0.0005)

    def work(self, duration_s: float) -> None:
        """The couriers have worked for so long."""
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.tick()
            time.sleep(0.0005)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def changed(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, **changes)

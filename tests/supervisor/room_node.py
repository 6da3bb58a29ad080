"""What stands on a node of a simulated room beside the real supervisor: keeper, command, ranks, persister, courier.

All are models that keep the promises of the real ones where a supervisor can tell: names and values on boards, answers
of the keeper, the order in which things happen.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridethrough.errors import KeeperGone, SaveFailed
from ridethrough.format.layout import rank_part
from ridethrough.seam.process import start_time
from ridethrough.snapshot import link as links
from ridethrough.snapshot.plan import Plan, first_save
from ridethrough.snapshot.ranks import RankPhase
from ridethrough.snapshot.replicas import SLOTS_PER_RANK

if TYPE_CHECKING:
    from room_of import Room

SLOTS = 4
PIPE_BROKE = """Traceback (most recent call last):
  File "/job/train.py", line 30, in main
RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:1234
"""
CRASHED = """Traceback (most recent call last):
  File "/job/train.py", line 12, in main
ValueError: bad batch
"""
_ME = {"pid": os.getpid(), "process_started": start_time(os.getpid())}
DEAD_PID = 1 << 30


class Page:
    """Keeps the promise of `Board`, size included, without memory that processes share."""

    def __init__(self, size_bytes: int) -> None:
        self._half = size_bytes // 2
        self._value: dict[str, Any] = {}
        self.generation = 0

    def write(self, value: dict[str, Any]) -> None:
        text = json.dumps(value, separators=(",", ":"), default=str)
        if len(text) + 20 > self._half:
            raise ValueError(f"{len(text)} bytes do not fit on a board of {self._half}")
        self._value = json.loads(text)
        self.generation += 1

    def read(self) -> dict[str, Any]:
        return self._value

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class Job:
    """Ranks that have met in a rendezvous: one attempt."""

    workers: dict[str, Worker]
    plans: dict[str, Plan]
    restored_step: int
    sent: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By node: the newest step whose gradient it has sent, and when."""


@dataclass(slots=True, eq=False)
class Worker:
    """The command on a node, with all its ranks, which behave alike."""

    node: Node
    launch: int
    generation: int
    members: tuple[str, ...]
    meeting: str
    """Whoever was given the same meets."""
    began_s: float
    job: Job | None = None
    joins_s: float = 0.0
    phase: RankPhase = RankPhase.STARTING
    step: int = -1
    ready_s: float = 0.0
    """When its part of the next step is done."""
    waits_since_s: float | None = None
    """In a collective, for the others."""
    says: dict[str, Any] = field(default_factory=dict)
    posted: list[int] = field(default_factory=list)
    stop: tuple[int, float] | None = None
    """Waits for the decision about this proposal, since then."""
    stops: bool = False
    """The step that it waits to be durable is its last one because it was asked to."""
    is_terminating_s: float | None = None
    dead_rank: int | None = None
    status: int | None = None
    ended_s: float | None = None
    left: int = 0
    output: str = ""

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def end(self, status: int, now_s: float, output: str = "") -> None:
        if self.status is None:
            self.status, self.ended_s, self.output, self.left = status, now_s, output, self.node.unkillable

    def tell(self, **news: Any) -> None:
        self.says.update(news)
        assert self.job is not None
        plan = self.job.plans[self.node.name]
        common = {"world_size": plan.roster.world_size, "run_dir": plan.run_dir, "phase": self.phase, "step": self.step}
        for rank in plan.local_ranks:
            who = {"pid": DEAD_PID, "process_started": 1} if rank == self.dead_rank else _ME
            board = self.node.keeper.board(links.rank_board(self.launch, rank))
            board.write({**common, **who, "rank": rank, "restored_step": self.job.restored_step, "posted_steps": sorted(self.posted), **self._here()})

    def _here(self) -> dict[str, Any]:
        """What it says, with times of the node's own clock."""
        clock, found = self.node.clock, dict(self.says)
        for name in ("step_at_s", "wanted_at_s"):
            if name in found:
                found[name] = clock.here_s(found[name])
        if "times_s" in found:
            found["times_s"] = {phase: clock.here_s(at_s) for phase, at_s in found["times_s"].items()}
        return found


class NodeClock:
    """The clocks of one life of a node: the monotonic one began somewhere else, the wall is off by hours."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._ahead_s = room.skew.uniform(-1e6, 1e6)
        self._wall_ahead = datetime.timedelta(hours=room.skew.uniform(-12, 12))

    def now_at(self) -> datetime.datetime:
        return self._room.clock.now_at() + self._wall_ahead

    def monotonic_s(self) -> float:
        return self.here_s(self._room.now_s)

    def sleep(self, duration_s: float) -> None:
        self._room.clock.sleep(duration_s)

    def here_s(self, now_s: float) -> float:
        """What it shows at that instant of the room's clock."""
        return now_s + self._ahead_s


class Keeper:
    """Holds the memory and the command of one life of a node."""

    def __init__(self, node: Node, room: Room) -> None:
        self._node, self._room = node, room
        self.born_s = room.now_s
        self.pages: dict[str, Page] = {}
        self.sizes: dict[str, int] = {}
        self.launches = 0
        self.worker: Worker | None = None
        self.signals: list[int] = []
        self.wants_peers = False
        self.path = "simulated"

    def names(self) -> dict[str, int]:
        return self.sizes

    def board(self, name: str, size_bytes: int = links.BOARD_BYTES) -> Page:
        if name not in self.pages:
            self.pages[name] = Page(size_bytes)
            self.sizes[name] = size_bytes
        return self.pages[name]

    def descriptor(self, op: str, **_fields: Any) -> int:
        raise KeeperGone(detail=f"no {op} here")

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        return getattr(self, f"_{op}")(**fields)  # type: ignore[no-any-return]

    def _look(self) -> dict[str, Any]:
        worker = self.worker
        return {
            "keeper_pid": 1,
            "run_dir": None,
            "launch": self.launches,
            "pid": 1 if worker else 0,
            "status": worker.status if worker else None,
            "ended_s": self._node.clock.here_s(worker.ended_s) if worker and worker.ended_s is not None else None,
            "trainers": 0,
            "workers": None if worker is None or worker.status is None else worker.left,
            "signals": list(self.signals),
            "wants_peers": self.wants_peers,
            "up_s": self._room.now_s - self.born_s,
            "helpers": {},
        }

    def _spawn(self, *, argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
        assert argv
        assert self.worker is None or not self.worker.is_alive, "the command is still running"
        self.launches += 1
        self.worker = self._room.spawned(self._node, self.launches, environment)
        return {"launch": self.launches, "pid": 1}

    def _free(self, *, prefix: str) -> dict[str, Any]:
        for name in [n for n in self.pages if n.startswith(prefix)]:
            del self.pages[name], self.sizes[name]
        return {}

    def _signal(self, *, number: int, whom: str) -> dict[str, Any]:
        worker = self.worker
        if worker is not None and worker.is_alive and number == signal.SIGKILL:
            worker.end(-number, self._room.now_s)
        elif worker is not None and worker.is_alive and whom == "command" and worker.is_terminating_s is None:
            worker.is_terminating_s = self._room.now_s
        return {"signalled": 1}

    def _finish(self, *, code: int, message: str = "") -> dict[str, Any]:
        self._room.finished(self._node, code, message)
        return {}


@dataclass(slots=True)
class _Save:
    plan: Plan
    step: int
    dark: frozenset[str]
    flush: int
    written_s: float
    verified_s: float
    parts: set[str] | None = None
    is_written: bool = False


class SimPersister:
    """Serves one keeper as `Persister` does, but takes its time."""

    def __init__(self, node: Node, room: Room) -> None:
        self._node, self._room = node, room
        self._board = node.keeper.board(links.PERSIST)
        self._control = node.keeper.board(links.CONTROL)
        self._done: tuple[int, int, frozenset[str]] | None = None
        self._ready_s: float | None = None
        self._save: _Save | None = None
        self._refusal: dict[str, Any] | None = None
        self.says: dict[str, Any] = {
            "launch": 0, "busy": None, "taken": -1, "sealed": [], "durable": None, "verified": None, "failed": None, "flushed": 0,
        }  # fmt: skip

    @property
    def pinned(self) -> int | None:
        return self._save.step if self._save is not None and not self._save.is_written else None

    def _publish(self) -> None:
        self._board.write(self.says)

    def tick(self) -> None:
        now_s = self._room.now_s
        if self._save is not None:
            if self._node.name not in self._room.hanging:
                self._go_on(self._save, now_s)
            return
        control = self._control.read()
        if control.get("is_over"):
            return
        launch = int(control.get("launch", 0))
        if launch != self.says["launch"]:
            self._done, self._ready_s = None, None
            self.says |= {"launch": launch, "taken": -1}
            self._publish()
        plan = self._node.plan
        worker = self._node.keeper.worker
        if not launch or plan is None or worker is None or worker.launch != launch:
            return
        self._hear(control, plan)
        flush = control.get("flush")
        if flush and int(flush["id"]) > self.says["flushed"]:
            self._flush(flush, plan, worker)
            return
        announced = control.get("announced")
        if announced is None:
            announced = first_save(plan.restored_step, plan.save_interval_steps)
        announced, number, dark = int(announced), int(control.get("announcement", 0)), frozenset(control.get("dark", ()))
        durable = self.says["durable"]
        if (number, announced, dark) == self._done or (durable and durable["launch"] == launch and durable["step"] >= announced):
            return
        if announced in worker.posted:
            self._ready_s = self._ready_s or now_s
            if self._parts(plan, announced, dark) is None and now_s - self._ready_s < 2.0:
                return
            self._done, self._ready_s = (number, announced, dark), None
            self._begin(announced, dark, flush=0)
        elif max(worker.posted, default=-1) > announced:
            self._done = (number, announced, dark)
            self._fail(announced, "a rank had already passed this step when the save was announced")

    def _hear(self, control: dict[str, Any], plan: Plan) -> None:
        if len(plan.nodes) == 1:
            return
        refused = control.get("refused")
        if refused and refused != self._refusal:
            self._refusal = refused
            failed = self.says["failed"] or {}
            if failed.get("launch") != self.says["launch"] or failed.get("step") != refused["step"]:
                self._fail(int(refused["step"]), str(refused["message"]), code=str(refused["code"]))
        durable = self.says["durable"]
        here = durable["step"] if durable and durable["launch"] == self.says["launch"] else None
        confirmed = control.get("confirmed") or {}
        said = confirmed.get("step")
        if said != here:
            self.says["durable"] = None if said is None else {"launch": self.says["launch"], "step": said}
            self._publish()

    def _fail(self, step: int, message: str, *, code: str = SaveFailed.code) -> None:
        self.says |= {
            "busy": None,
            "taken": max(self.says["taken"], step),
            "failed": {
                "launch": self.says["launch"],
                "number": self._done[0] if self._done else 0,
                "step": step,
                "code": code,
                "message": message,
                "at_s": self._node.clock.here_s(self._room.now_s),
            },
        }
        self._publish()

    def _flush(self, flush: dict[str, Any], plan: Plan, worker: Worker) -> None:
        step = flush.get("step")
        if step is None:
            step = max(worker.posted, default=-1)
        durable = self.says["durable"]
        have = durable["step"] if durable and durable["launch"] == self.says["launch"] else -1
        if step > have and step in worker.posted:
            self._begin(step, frozenset(flush.get("dark", ())), flush=int(flush["id"]))
            return
        if step > have:
            self._fail(step, "a snapshot was overwritten before it could be pinned")
        self.says["flushed"] = int(flush["id"])
        self._publish()

    def _begin(self, step: int, dark: frozenset[str], *, flush: int) -> None:
        now_s = self._room.now_s
        written_s = now_s + self._room.write_s * self._room.random.uniform(0.5, 1.5)
        plan = self._node.plan
        assert plan is not None
        self._save = _Save(plan, step, dark, flush, written_s, written_s + self._room.verify_s)
        self.says |= {"busy": {"step": step, "phase": "writing", "since_s": self._node.clock.here_s(now_s)}, "taken": max(self.says["taken"], step)}
        self._save.parts = self._parts(plan, step, dark)
        self._publish()

    def _parts(self, plan: Plan, step: int, dark: frozenset[str]) -> set[str] | None:
        """The parts that this node writes, None if it is to write one that it does not have."""
        found = set()
        mine = {part.name for part in plan.roster.parts if any(plan.roster.nodes[rank] == self._node.name for rank in part.holders)}
        owners = {part.name: {plan.roster.nodes[rank] for rank in part.holders} for part in plan.roster.parts}
        for name in plan.parts_to_write(dark):
            if name in mine or any(name == rank_part(rank) and step in steps for rank, steps in self._node.held.items()):
                found.add(name)
            elif owners[name] <= dark:
                return None
        return found

    def _go_on(self, save: _Save, now_s: float) -> None:
        if not save.is_written:
            if now_s < save.written_s:
                return
            if save.parts is None or self._room.takes_failure(self._node.name):
                why = "nobody here holds a part of the dark node" if save.parts is None else "no space left on device"
                self._fail(save.step, why)
                self._end(save)
                return
            save.is_written = True
            label = save.plan.attempt.label
            self._room.disk(self._node.name).update((label, save.step, part) for part in save.parts)
            digests = {"replicated": self._room.digest(self._node.name, save.step)}
            mine = {"launch": self.says["launch"], "step": save.step, "dark": sorted(save.dark), "digests": digests, "is_verified": False}
            self.says["sealed"] = [*[s for s in self.says["sealed"] if s["step"] != save.step][-3:], mine]
            if len(save.plan.nodes) == 1:
                self.says["durable"] = {"launch": self.says["launch"], "step": save.step}
            self._publish()
        if now_s >= save.verified_s:
            self.says["sealed"][-1]["is_verified"] = True
            self._end(save)

    def _end(self, save: _Save) -> None:
        self._save = None
        self.says["busy"] = None
        self.says["flushed"] = max(self.says["flushed"], save.flush)
        self._publish()


class Node:
    """A machine; what is on its disk outlives its power."""

    def __init__(self, name: str, room: Room) -> None:
        self.name, self._room = name, room
        self.is_on = False
        self.exit: tuple[int, str] | None = None
        self.unkillable = 0
        """Processes that survive SIGKILL, stuck in a driver."""
        self.missing: tuple[str, ...] = ()
        """Gates that are shut."""
        self.lives = 0

    def boot(self) -> None:
        self.is_on, self.exit = True, None
        self.lives += 1
        self.clock = NodeClock(self._room)
        self.keeper = Keeper(self, self._room)
        self.held: dict[int, list[int]] = {}
        """By rank of another node: steps of its private part that are in memory here."""
        self._held_of = 0
        self.persister = SimPersister(self, self._room)

    @property
    def plan(self) -> Plan | None:
        """Of the present launch."""
        worker = self.keeper.worker
        return worker.job.plans[self.name] if worker is not None and worker.job is not None else None

    def hold(self, launch: int, rank: int, step: int) -> None:
        """A replica has arrived."""
        self.forget_replicas(launch)
        steps = self.held.setdefault(rank, [])
        if step not in steps:
            steps.append(step)
            steps.sort()
            del steps[:-SLOTS_PER_RANK]
        self.keeper.board(links.COURIER).write({"launch": launch, "port": 1, "held": {str(r): s for r, s in self.held.items()}})

    def forget_replicas(self, launch: int) -> None:
        """Those of an earlier launch are gone."""
        if self._held_of != launch:
            self._held_of = launch
            self.held.clear()

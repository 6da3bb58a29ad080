"""A room of simulated nodes, each under a real `Supervisor`, over a network that does as it is told; all from one seed.

The job is coupled like real training: nobody finishes a step before everybody has sent its gradient. What must never
happen is checked after every round, whatever a test does:

* what is called durable has every part on some disk;
* no node launches what was called before its keeper was there;
* nodes that hear each other do not run different launches for longer than it takes to hear and kill.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from room_job import KEY, Habits, Training
from room_node import CRASHED, DEAD_PID, PIPE_BROKE, Node, Worker

from ridethrough.config import Config, NodeConfig, PeersConfig, RecoveryConfig
from ridethrough.format.attempt import Roster
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.supervisor.directive import Directive
from ridethrough.supervisor.loop import Supervisor
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.talk import Talk
from ridethrough.testing import FakeClock
from ridethrough.testing.network import FakeNetwork, Weather

PORT = 29577
BEAT_S = 0.4
SUSPECT_S = 1.5
DEAD_S = 15.0
_CONFLICT_S = 6.0
"""Longer than hearing of another launch and killing ours takes when one packet in five is lost."""
_LIE_SLACK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of all the nodes' journals."""

    at_s: float
    node: str
    kind: str
    data: dict[str, Any]


class _Pen:
    """Keeps the promise of `Pen`."""

    is_open = True

    def __init__(self, room: Room, node: str) -> None:
        self._room, self._node = room, node
        kinds = [e.kind for e in room.events if e.node == node and e.kind in ("launch.stepped", "run.ended")]
        self.is_unfinished = bool(kinds) and kinds[-1] != "run.ended"

    def note(self, kind: str, **data: Any) -> bool:
        self._room.events.append(Event(at_s=self._room.now_s, node=self._node, kind=kind, data=data))
        return True


class Room:
    """See the module.

    Args:
        count: Nodes; they are called n0, n1, … and all are switched on.
        seed: All that is random follows from it, but for the secrets of `Peers`.
        is_configured: The nodes stand in the configuration; else their ranks find each other.
        is_shared: They see one run directory.
        recovery: What the configuration says of recovery.
        weather: Of the management network.
        round_s: Of the supervisors' loops.
        settings: More of `Settings`.
        habits: See `Habits`.
    """

    def __init__(
        self,
        count: int = 4,
        *,
        seed: int = 0,
        is_configured: bool = True,
        is_shared: bool = True,
        recovery: RecoveryConfig | None = None,
        weather: Weather | None = None,
        round_s: float = 0.05,
        settings: dict[str, Any] | None = None,
        is_on: bool = True,
        **habits: Any,
    ) -> None:
        self.clock = FakeClock()
        self.random = random.Random(seed)
        self.skew = random.Random(seed)
        """How far the nodes' clocks are apart."""
        self.network = FakeNetwork(self.clock, seed=seed, weather=weather or Weather(delay_s=(0.001, 0.004)))
        self.names = tuple(f"n{number}" for number in range(count))
        self.habits = Habits(**habits)
        self.events: list[Event] = []
        self.hanging: set[str] = set()
        """Nodes whose storage does not answer."""
        self.diverged: set[str] = set()
        self.rosters: dict[str, Roster] = {}
        self.nodes = {name: Node(name, self) for name in self.names}
        self.supervisors: dict[str, Supervisor] = {}
        self.is_shared, self._round_s = is_shared, round_s
        self.training = Training(self)
        self._failing: set[str] = set()
        self._disks: dict[str, set[tuple[str, int, str]]] = {}
        self._cut_data: set[frozenset[str]] = set()
        self._parted: set[frozenset[str]] = set()
        self._deaf: set[str] = set()
        self._due: dict[str, float] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._calls: dict[tuple[int, tuple[str, ...]], float] = {}
        self._conflicts: dict[frozenset[str], float] = {}
        config = Config(
            run="/run",
            storage="shared" if is_shared else "node-local",
            nodes=tuple(NodeConfig(name=n, address=n, domain=n) for n in self.names) if is_configured else (),
            peers=PeersConfig(port=PORT if is_configured else 0, suspect_s=SUSPECT_S, dead_s=DEAD_S),
            recovery=recovery or RecoveryConfig(),
        )
        self.settings = Settings(argv=("train",), config=config, **(settings or {}))
        if is_on:
            self.power_on(*self.names)

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.clock.monotonic_s()

    @property
    def write_s(self) -> float:
        return self.habits.write_s

    @property
    def verify_s(self) -> float:
        return self.habits.verify_s

    def run_for(self, duration_s: float) -> None:
        self.run_until(lambda: False, limit_s=duration_s, must=False)

    def run_until(self, holds: Callable[[], bool], *, limit_s: float, must: bool = True) -> float:
        """Until that is so; how long it took."""
        began_s = self.now_s
        while not holds():
            name = min(self._due, key=lambda n: self._due[n]) if self._due else None
            due_s = self._due[name] if name is not None else self.now_s + self._round_s
            if due_s - began_s > limit_s:
                self.clock.advance(max(began_s + limit_s - self.now_s, 0.0))
                if must:
                    raise AssertionError(f"not within {limit_s} s; {self.summary()}")
                break
            self.clock.advance(max(due_s - self.now_s, 0.0))
            self._tick()
            if name in self.supervisors:
                self._round(name)
        return self.now_s - began_s

    def summary(self) -> str:
        """For a failed assertion."""
        words = {n: (s.directive.number, s.directive.lead, s.directive.stage.value, s.directive.generation) for n, s in self.supervisors.items()}
        last = [f"{e.at_s - 1000:.2f} {e.node} {e.kind} {e.data.get('detail') or e.data.get('reason') or ''}" for e in self.events[-12:]]
        return f"at {self.now_s - 1000:.2f}: steps {self.steps}, words {words}\n" + "\n".join(last)

    def later(self, after_s: float, what: Callable[[], None]) -> None:
        self._later.append((self.now_s + after_s, len(self._later), what))

    def _round(self, name: str) -> None:
        supervisor = self.supervisors[name]
        supervisor.round()
        if name in self.supervisors:
            self._due[name] = self.now_s + self._round_s
        self._check_confirmed(name, supervisor.directive)

    # -- power and faults ------------------------------------------------------------------------------------------

    def power_on(self, *names: str) -> None:
        """With empty memory, and whatever is on the disk."""
        for name in names:
            assert not self.nodes[name].is_on
            self.nodes[name].boot()
            self._start_supervisor(name)

    def cut(self, *names: str) -> None:
        """Their power is gone."""
        for name in names:
            node = self.nodes[name]
            node.is_on = False
            if node.keeper.worker is not None:
                node.keeper.worker.end(-9, self.now_s)
            self._stop_supervisor(name)

    def restart(self, *names: str) -> None:
        """Power is gone and comes back at once."""
        self.cut(*names)
        self.power_on(*names)

    def freeze(self, name: str, duration_s: float) -> None:
        """Its supervisor is stopped (SIGSTOP) for so long."""
        self._due[name] = self.now_s + duration_s

    def kill_supervisor(self, name: str) -> None:
        """The keeper starts another, which finds the boards."""
        self._stop_supervisor(name)
        self._start_supervisor(name)

    def part(self, some: Iterable[str], others: Iterable[str], *, data: bool = True) -> None:
        """They do not hear each other; nor do their ranks, unless only the management network is cut."""
        some, others = tuple(some), tuple(others)
        self.network.part(some, others)
        pairs = {frozenset((a, b)) for a in some for b in others}
        self._parted |= pairs
        if data:
            self._cut_data |= pairs

    def heal(self) -> None:
        """All networks work again."""
        self.network.heal()
        self._cut_data.clear()
        self._parted.clear()
        self._deaf.clear()

    def silence(self, *names: str) -> None:
        """The management network of those nodes is down; their ranks still reach the others."""
        self.network.darken(*names)
        self._deaf.update(names)

    def crash(self, name: str, output: str = CRASHED, status: int = 1, *, others_after_s: float | None = 1.0) -> None:
        """The command of that node fails; the others see it as broken connections."""
        worker = self.worker(name)
        worker.end(status, self.now_s, output)
        if others_after_s is None or worker.job is None:
            return
        for other in worker.job.workers.values():
            if other is not worker:
                self.later(others_after_s, lambda other=other: other.end(1, self.now_s, PIPE_BROKE))  # type: ignore[misc]

    def stall(self, name: str, duration_s: float) -> None:
        """Its loader has nothing for so long."""
        self.training.stalls[name] = self.now_s + duration_s

    def fail_save(self, name: str) -> None:
        """The next save there is refused by the disk."""
        self._failing.add(name)

    def takes_failure(self, name: str) -> bool:
        found = name in self._failing
        self._failing.discard(name)
        return found

    def ask_to_stop(self, name: str, number: int) -> None:
        """That signal is sent to the keeper."""
        self.nodes[name].keeper.signals.append(int(number))

    # -- what can be seen ------------------------------------------------------------------------------------------

    def worker(self, name: str) -> Worker:
        found = self.nodes[name].keeper.worker
        assert found is not None
        return found

    @property
    def steps(self) -> dict[str, int]:
        """The newest step of the ranks that live."""
        return {n.name: n.keeper.worker.step for n in self.nodes.values() if n.is_on and n.keeper.worker is not None and n.keeper.worker.is_alive}

    @property
    def step(self) -> int:
        """The newest that all nodes have made; -1 unless all train."""
        found = self.steps
        return min(found.values()) if len(found) == len(self.names) else -1

    @property
    def leads(self) -> list[str]:
        """Nodes that think that they lead."""
        return [n for n in self.supervisors if self.nodes[n].keeper.board(links.CONTROL).read().get("is_lead")]

    def word(self, name: str) -> Directive:
        return self.supervisors[name].directive

    def said(self, name: str) -> dict[str, Any]:
        """The word that a node goes by, without the time, which it knows only roughly."""
        return {key: value for key, value in self.word(name).encode().items() if key != "called_s"}

    def all_events(self, kind: str, *, since_s: float = 0.0) -> list[Event]:
        return [e for e in self.events if e.kind == kind and e.at_s >= since_s]

    def disk(self, name: str) -> set[tuple[str, int, str]]:
        """Parts on the tier that the node sees: attempt, step, part."""
        return self._disks.setdefault("shared" if self.is_shared else name, set())

    def digest(self, name: str, step: int) -> str:
        return f"{step}{' of ' + name if name in self.diverged else ''}"

    def confirmed_step(self) -> int:
        """The newest step that any living node has heard to be durable in this attempt."""
        return max((int((s.directive.confirmed or {}).get("step", -1)) for s in self.supervisors.values()), default=-1)

    # -- supervisors -----------------------------------------------------------------------------------------------

    def _start_supervisor(self, name: str) -> None:
        settings = self.settings
        with mock.patch.dict(os.environ, RIDETHROUGH_NODE=name):
            clock = self.nodes[name].clock
            talk = Talk(clock, settings, name, open_socket=lambda port, interface: self.network.socket(name, port))
            made = Supervisor(PosixFileSystem(), clock, self.nodes[name].keeper, settings, pen=_Pen(self, name), talk=talk)  # type: ignore[arg-type]
        made._rooms._finder = SimpleNamespace(key=KEY, refusal=None, reason="")  # type: ignore[assignment]
        node = self.nodes[name]
        made._gates = SimpleNamespace(look=lambda host: SimpleNamespace(is_ready=not node.missing, missing=node.missing))  # type: ignore[assignment]
        made._observer._relay = SimpleNamespace(follow=lambda launch: None, tail=lambda: self.worker(name).output)  # type: ignore[assignment]
        made._lead.decide = self._recording(made._lead.decide)  # type: ignore[method-assign]
        # Asking the system whether a process lives would be a third of the time that a simulation takes.
        observer = made._observer
        observer.dead_ranks = lambda: [r.rank for r in observer.ranks if r.pid == DEAD_PID]  # type: ignore[method-assign]
        self.supervisors[name] = made
        self._due[name] = self.now_s + self.random.uniform(0.0, self._round_s)

    def _recording(self, decide: Callable[..., Directive]) -> Callable[..., Directive]:
        def recorded(before: Directive, *rest: Any) -> Directive:
            after = decide(before, *rest)
            if after.generation > before.generation:
                self._calls[after.generation, after.members] = self.now_s
            return after

        return recorded

    def _stop_supervisor(self, name: str) -> None:
        supervisor = self.supervisors.pop(name, None)
        self._due.pop(name, None)
        if supervisor is not None and supervisor._talk._socket is not None:
            supervisor._talk._socket.close()

    def finished(self, node: Node, code: int, message: str) -> None:
        """Its keeper ends, and everything that it had started."""
        node.exit = (code, message)
        self.cut(node.name)

    def spawned(self, node: Node, launch: int, environment: dict[str, str]) -> Worker:
        """A keeper starts the command."""
        word = self.supervisors[node.name].directive
        members = self.names
        if self.settings.config.nodes:
            members = tuple(environment["RIDETHROUGH_MEMBERS"].split(","))
            called_s = self._calls[word.generation, word.members]
            assert node.keeper.born_s <= called_s + _LIE_SLACK_S, f"{node.name} launches {word.generation}, which was called before it was there"
            earlier = node.keeper.worker
            assert earlier is None or earlier.generation < word.generation, f"{node.name} launches {word.generation} after {earlier.generation}"
        meeting = f"{members} {environment.get('PET_MASTER_PORT', '')}"
        return Worker(node, launch, word.generation, members, meeting, self.now_s)

    # -- one round -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        due = sorted(entry for entry in self._later if entry[0] <= self.now_s)
        self._later = [entry for entry in self._later if entry[0] > self.now_s]
        for _, _, what in due:
            what()
        workers = [n.keeper.worker for n in self.nodes.values() if n.is_on and n.keeper.worker is not None and n.keeper.worker.is_alive]
        for worker in workers:
            if worker.is_terminating_s is not None and self.now_s - worker.is_terminating_s > 0.3:
                worker.end(-15, self.now_s)
            elif worker.job is None:
                self.training.meet(worker, workers)
            else:
                self.training.train(worker, worker.job)
        for node in self.nodes.values():
            if node.is_on:
                node.persister.tick()
        self._check_generations(workers)

    def can_reach(self, one: str, other: str) -> bool:
        """Their ranks reach each other."""
        return frozenset((one, other)) not in self._cut_data

    # -- what must never happen ------------------------------------------------------------------------------------

    def _check_confirmed(self, name: str, word: Directive) -> None:
        if word.confirmed is None:
            return
        assert word.attempt is not None
        there = set().union(*self._disks.values())
        missing = {part for part in self.rosters[word.attempt].part_names if (word.attempt, word.confirmed["step"], part) not in there}
        assert not missing, f"{name} says that step {word.confirmed['step']} is durable, and no disk has {missing}"

    def _hear_each_other(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self._parted and not {one, other} & self._deaf

    def _check_generations(self, workers: list[Worker]) -> None:
        seen = set()
        for at, one in enumerate(workers):
            for other in workers[at + 1 :]:
                pair = frozenset((one.node.name, other.node.name))
                awake = all(self._due.get(n, 0.0) <= self.now_s + self._round_s for n in pair)
                if self.settings.config.nodes:
                    is_conflict = one.generation != other.generation
                else:
                    is_conflict = one.job is not None and other.job is not None and one.job is not other.job
                if is_conflict and one.is_alive and other.is_alive and awake and self._hear_each_other(*sorted(pair)):
                    seen.add(pair)
                    since_s = self._conflicts.setdefault(pair, self.now_s)
                    said = f"{sorted(pair)} run launches {one.generation} and {other.generation}"
                    assert self.now_s - since_s < _CONFLICT_S, f"{said} for {self.now_s - since_s:.1f} s; {self.summary()}"
        self._conflicts = {pair: since_s for pair, since_s in self._conflicts.items() if pair in seen}


def training(count: int = 4, *, for_s: float = 5.0, **how: Any) -> Room:
    """A room whose job has trained for some time."""
    room = Room(count, **how)
    room.run_until(lambda: room.step >= 1, limit_s=60 + room.habits.warm_up_s)
    room.run_for(for_s)
    return room

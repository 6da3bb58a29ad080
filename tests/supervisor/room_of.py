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
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from room_node import CRASHED, DEAD_PID, PIPE_BROKE, Job, Node, Worker

from ridethrough.config import Config, NodeConfig, PeersConfig, RecoveryConfig
from ridethrough.errors import TwoHeads
from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.format.layout import REPLICATED, rank_part
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.ranks import RankPhase
from ridethrough.store.retain import Retention
from ridethrough.supervisor.directive import Directive
from ridethrough.supervisor.loop import Supervisor
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.talk import Talk
from ridethrough.testing import FakeClock
from ridethrough.testing.network import FakeNetwork, Weather
from ridethrough.types import AttemptRef, Parent

PORT = 29577
KEY = "5a" * 32
BEAT_S = 0.4
SUSPECT_S = 1.5
DEAD_S = 15.0
_STEPPING = (RankPhase.TRAINING, RankPhase.OUTSIDE)
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


@dataclass(slots=True, kw_only=True)
class Habits:
    """How the job and its machines behave; may be changed at any time."""

    step_s: float = 0.2
    save_every: int = 25
    total_steps: int | None = None
    epoch_steps: int | None = None
    outside_s: float = 0.0
    """Between two epochs."""
    warm_up_s: float = 0.0
    """Before the first step: compiling."""
    agree_s: float = 0.5
    rendezvous_s: float = 60.0
    collective_s: float = 600.0
    """Timeouts of the job itself."""
    ranks: int = 1
    """On each node."""
    write_s: float = 0.2
    verify_s: float = 0.1
    boot_s: float = 0.0


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
        self._is_shared, self._round_s = is_shared, round_s
        self._failing: set[str] = set()
        self._disks: dict[str, set[tuple[str, int, str]]] = {}
        self._attempts: list[Plan] = []
        self._jobs: list[Job] = []
        self._stalls: dict[str, float] = {}
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
        self._stalls[name] = self.now_s + duration_s

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

    def all_events(self, kind: str, *, since_s: float = 0.0) -> list[Event]:
        return [e for e in self.events if e.kind == kind and e.at_s >= since_s]

    def disk(self, name: str) -> set[tuple[str, int, str]]:
        """Parts on the tier that the node sees: attempt, step, part."""
        return self._disks.setdefault("shared" if self._is_shared else name, set())

    def digest(self, name: str, step: int) -> str:
        return f"{step}{' of ' + name if name in self.diverged else ''}"

    def confirmed_step(self) -> int:
        """The newest step that any living node has heard to be durable in this attempt."""
        return max((int((s.directive.confirmed or {}).get("step", -1)) for s in self.supervisors.values()), default=-1)

    # -- supervisors -----------------------------------------------------------------------------------------------

    def _start_supervisor(self, name: str) -> None:
        settings = self.settings
        with mock.patch.dict(os.environ, RIDETHROUGH_NODE=name):
            talk = Talk(self.clock, settings, name, open_socket=lambda port, interface: self.network.socket(name, port))
            made = Supervisor(PosixFileSystem(), self.clock, self.nodes[name].keeper, settings, pen=_Pen(self, name), talk=talk)  # type: ignore[arg-type]
        made._finder = SimpleNamespace(key=KEY, refusal=None, reason="")  # type: ignore[assignment]
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

    # -- the job ---------------------------------------------------------------------------------------------------

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
                self._meet(worker, workers)
            else:
                self._train(worker, worker.job)
        for node in self.nodes.values():
            if node.is_on:
                node.persister.tick()
        self._check_generations(workers)

    def can_reach(self, one: str, other: str) -> bool:
        """Their ranks reach each other."""
        return frozenset((one, other)) not in self._cut_data

    def _meet(self, worker: Worker, workers: list[Worker]) -> None:
        here = {w.node.name: w for w in workers if w.meeting == worker.meeting and w.job is None}
        is_whole = all(n in here and self.can_reach(n, m) for n in worker.members for m in worker.members)
        if not is_whole:
            for other in here.values():
                other.joins_s = 0.0
            if self.now_s - worker.began_s > self.habits.rendezvous_s:
                worker.end(1, self.now_s, PIPE_BROKE.replace("Connection closed by peer", "Timed out waiting for clients"))
            return
        for name in worker.members:
            self.nodes[name].keeper.wants_peers = True
        ports = {n: self.nodes[n].keeper.board(links.CONTROL).read().get("peer_port") for n in worker.members}
        if worker.joins_s == 0.0:
            worker.joins_s = self.now_s + self.habits.agree_s
        if all(ports.values()) and all(0 < here[n].joins_s <= self.now_s for n in worker.members):
            self._agree({n: here[n] for n in worker.members}, ports)

    def _agree(self, workers: dict[str, Worker], ports: dict[str, Any]) -> None:
        nodes = tuple(workers)
        newest = self._attempts[-1] if self._attempts else None
        rivals = [j for j in self._jobs if any(w.is_alive for w in j.workers.values())]
        if self._is_shared and rivals and len(nodes) < len(self.names):
            error = TwoHeads(seq=newest.attempt.seq if newest else 1, first="ours", second="theirs", path="/run")
            for worker in workers.values():
                worker.says["failure"] = error.as_dict()
                worker.end(1, self.now_s, "")
            return
        ref = AttemptRef(seq=newest.attempt.seq + 1 if newest else 1, nonce=f"{self.random.getrandbits(128):032x}")
        ranks = tuple(node for node in nodes for _ in range(self.habits.ranks))
        parts = [RosterPart(name=REPLICATED, holders=tuple(range(len(ranks))))]
        parts += [RosterPart(name=rank_part(rank), holders=(rank,)) for rank in range(len(ranks))]
        roster = Roster(run_uid="run", attempt=ref, nodes=ranks, parts=tuple(parts))
        found = self._newest_restorable(nodes)
        restored_step = found[1] if found else 0
        plan = Plan(
            run_dir="/run",
            run_uid="run",
            attempt=ref,
            parent=Parent(attempt=found[0], step=restored_step) if found else None,
            resumed_dir=None,
            roster=roster,
            node=nodes[0],
            meta={},
            retention=Retention(),
            monitor=None,
            save_interval_steps=self.habits.save_every,
            snapshot_interval_steps=1,
            restored_step=restored_step,
            damaged=(),
            is_shared=self._is_shared,
            addresses={n: [n, ports[n], 1] for n in nodes},
            key=KEY,
            domains={n: n for n in nodes},
        )
        self._attempts.append(plan)
        self.rosters[ref.label] = roster
        job = Job(workers, {n: replace(plan, node=n) for n in nodes}, restored_step)
        self._jobs = [*rivals, job]
        for name, worker in workers.items():
            worker.job, worker.phase, worker.step = job, RankPhase.TRAINING, restored_step
            worker.ready_s = self.now_s + max(self.habits.warm_up_s, self._step_s())
            worker.says = {"step_at_s": self.now_s, "times_s": {"training": self.now_s}}
            self.nodes[name].keeper.board(links.plan_board(worker.launch), links.PLAN_BYTES).write(job.plans[name].as_board())
            worker.tell()

    def _newest_restorable(self, nodes: tuple[str, ...]) -> tuple[AttemptRef, int] | None:
        there = set().union(*(self.disk(n) for n in nodes))
        limit = None
        for plan in reversed(self._attempts):
            steps = {step for label, step, _ in there if label == plan.attempt.label and (limit is None or step <= limit)}
            whole = [s for s in steps if all((plan.attempt.label, s, part) in there for part in plan.roster.part_names)]
            if whole:
                return plan.attempt, max(whole)
            limit = plan.restored_step if limit is None else min(limit, plan.restored_step)
        return None

    def _step_s(self) -> float:
        return self.habits.step_s * self.random.uniform(0.9, 1.1)

    def _train(self, worker: Worker, job: Job) -> None:
        name, now_s = worker.node.name, self.now_s
        if worker.phase is RankPhase.SAVING:
            self._await_durable(worker)
            return
        if worker.stop is not None:
            if not self._is_decided(worker):
                return
        elif worker.phase not in _STEPPING:
            return
        else:
            if now_s < worker.ready_s or now_s < self._stalls.get(name, 0.0):
                return
            wanted = worker.step + 1
            if job.sent.get(name, (-1, 0.0))[0] < wanted:
                job.sent[name] = (wanted, now_s + self.random.uniform(0.0, 0.2) * self.habits.step_s)
                worker.waits_since_s = now_s
            sent = [job.sent.get(n, (-1, 0.0)) for n in job.workers]
            if not all(s >= wanted and (s > wanted or at_s <= now_s) for s, at_s in sent) or not all(self.can_reach(name, n) for n in job.workers):
                assert worker.waits_since_s is not None
                if now_s - worker.waits_since_s > self.habits.collective_s:
                    worker.end(1, now_s, PIPE_BROKE)
                return
            worker.step = wanted
            worker.says["step_at_s"] = now_s
            if self._must_wait_to_stop(worker):
                return
        self._finish_step(worker, job)

    def _finish_step(self, worker: Worker, job: Job) -> None:
        now_s, habits = self.now_s, self.habits
        worker.says["times_s"].setdefault("first_step", now_s)
        worker.says["step_s_p99"] = habits.step_s * 1.3
        self._post(worker, job)
        is_last = worker.step == habits.total_steps
        if is_last or worker.stops:
            worker.phase = RankPhase.SAVING
            worker.tell(wanted_save=worker.step, wanted_at_s=now_s)
            return
        worker.phase = RankPhase.TRAINING
        worker.ready_s = now_s + self._step_s()
        if habits.epoch_steps and worker.step % habits.epoch_steps == 0:
            worker.phase = RankPhase.OUTSIDE
            worker.ready_s += habits.outside_s
        worker.tell()

    def _post(self, worker: Worker, job: Job) -> None:
        """As `Poster` does, and the courier after it."""
        node, plan = worker.node, job.plans[worker.node.name]
        control, answer = node.keeper.board(links.CONTROL).read(), node.keeper.board(links.PERSIST).read()
        announced = control.get("announced") if control.get("launch") == worker.launch else None
        reserved = int(announced) if announced is not None else (plan.restored_step // plan.save_interval_steps + 1) * plan.save_interval_steps
        if answer.get("launch") == worker.launch and int(answer.get("taken", -1)) >= reserved:
            reserved = -1
        if len(worker.posted) >= 4:
            free = [s for s in worker.posted if s not in (reserved, node.persister.pinned)]
            worker.posted.remove(min(free))
        worker.posted.append(worker.step)
        for holder in plan.replica_nodes(node.name):
            other = self.nodes[holder]
            there = other.keeper.worker if other.is_on else None
            if there is not None and there.job is job and self.can_reach(node.name, holder):
                for rank in plan.local_ranks:
                    self.later(0.02, lambda o=other, t=there, r=rank, s=worker.step: o.is_on and o.keeper.worker is t and o.hold(t.launch, r, s))  # type: ignore[misc]

    def _must_wait_to_stop(self, worker: Worker) -> bool:
        """As `Session.is_asked_to_stop`."""
        stop = worker.node.keeper.board(links.CONTROL).read().get("stop")
        if not stop or stop["step"] < 0:
            return False
        if int(stop["id"]) > int(worker.says.get("stop_seen", 0)):
            worker.tell(stop_seen=int(stop["id"]), stop_was_late=worker.step > int(stop["step"]))
        if worker.step != int(stop["step"]):
            return False
        worker.stop = (int(stop["id"]), self.now_s)
        return True

    def _is_decided(self, worker: Worker) -> bool:
        assert worker.stop is not None
        number, since_s = worker.stop
        now = worker.node.keeper.board(links.CONTROL).read().get("stop") or {}
        if now.get("id") == number and now.get("state") == "committed":
            worker.stops = True
        elif now.get("id") == number and now.get("state") != "signalled" and self.now_s - since_s < 15.0:
            if self.now_s - since_s > 10.0 and not worker.says.get("stop_was_late"):
                worker.tell(stop_was_late=True)
            return False
        worker.stop = None
        return True

    def _await_durable(self, worker: Worker) -> None:
        answer = worker.node.keeper.board(links.PERSIST).read()
        durable, failed = answer.get("durable") or {}, answer.get("failed") or {}
        if durable.get("launch") == worker.launch and durable["step"] >= worker.step:
            worker.phase = RankPhase.STOPPED if worker.stops else RankPhase.DONE
            worker.tell(wanted_save=None)
            self.later(0.2, lambda: worker.end(0, self.now_s))
        elif failed.get("launch") == worker.launch and failed["step"] == worker.step and failed["at_s"] >= worker.says["wanted_at_s"]:
            worker.phase = RankPhase.FAILED
            worker.tell(wanted_save=None, failure={"code": "RT-054", "message": failed["message"], "exit_code": 14, "retryable": True})
            worker.end(1, self.now_s)

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

"""The job of a simulated room: ranks that meet, agree, train in step, post snapshots and stop when they are asked to.

Coupled like real training: nobody finishes a step before everybody has sent its gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from room_node import PIPE_BROKE, Job, Node, Worker

from ridethrough.errors import TwoHeads
from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.format.layout import REPLICATED, rank_part
from ridethrough.snapshot import link as links
from ridethrough.snapshot.plan import Plan, first_save
from ridethrough.snapshot.ranks import RankPhase
from ridethrough.store.retain import Retention
from ridethrough.types import AttemptRef, Parent

if TYPE_CHECKING:
    from room_of import Room

KEY = "5a" * 32
_STEPPING = (RankPhase.TRAINING, RankPhase.OUTSIDE)


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


class Training:
    """Every attempt that was made in a room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.attempts: list[Plan] = []
        self.stalls: dict[str, float] = {}
        """Nodes whose loader has nothing until then."""
        self._jobs: list[Job] = []

    def meet(self, worker: Worker, workers: list[Worker]) -> None:
        here = {w.node.name: w for w in workers if w.meeting == worker.meeting and w.job is None}
        is_whole = all(n in here and self._room.can_reach(n, m) for n in worker.members for m in worker.members)
        if not is_whole:
            for other in here.values():
                other.joins_s = 0.0
            if self._room.now_s - worker.began_s > self._room.habits.rendezvous_s:
                worker.end(1, self._room.now_s, PIPE_BROKE.replace("Connection closed by peer", "Timed out waiting for clients"))
            return
        for name in worker.members:
            self._room.nodes[name].keeper.wants_peers = True
        ports = {n: self._room.nodes[n].keeper.board(links.CONTROL).read().get("peer_port") for n in worker.members}
        if worker.joins_s == 0.0:
            worker.joins_s = self._room.now_s + self._room.habits.agree_s
        if all(ports.values()) and all(0 < here[n].joins_s <= self._room.now_s for n in worker.members):
            self._agree({n: here[n] for n in worker.members}, ports)

    def _agree(self, workers: dict[str, Worker], ports: dict[str, Any]) -> None:
        nodes = tuple(workers)
        newest = self.attempts[-1] if self.attempts else None
        rivals = [j for j in self._jobs if any(w.is_alive for w in j.workers.values())]
        if self._room.is_shared and rivals and len(nodes) < len(self._room.names):
            error = TwoHeads(seq=newest.attempt.seq if newest else 1, first="ours", second="theirs", path="/run")
            for worker in workers.values():
                worker.says["failure"] = error.as_dict()
                worker.end(1, self._room.now_s, "")
            return
        ref = AttemptRef(seq=newest.attempt.seq + 1 if newest else 1, nonce=f"{self._room.random.getrandbits(128):032x}")
        ranks = tuple(node for node in nodes for _ in range(self._room.habits.ranks))
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
            save_interval_steps=self._room.habits.save_every,
            snapshot_interval_steps=1,
            restored_step=restored_step,
            damaged=(),
            is_shared=self._room.is_shared,
            addresses={n: [n, ports[n], 1] for n in nodes},
            key=KEY,
            domains={n: n for n in nodes},
        )
        self.attempts.append(plan)
        self._room.rosters[ref.label] = roster
        job = Job(workers, {n: replace(plan, node=n) for n in nodes}, restored_step)
        self._jobs = [*rivals, job]
        for name, worker in workers.items():
            worker.job, worker.phase, worker.step = job, RankPhase.TRAINING, restored_step
            worker.ready_s = self._room.now_s + max(self._room.habits.warm_up_s, self._step_s())
            worker.says = {"step_at_s": self._room.now_s, "times_s": {"training": self._room.now_s}}
            self._room.nodes[name].keeper.board(links.plan_board(worker.launch), links.PLAN_BYTES).write(job.plans[name].as_board())
            worker.tell()

    def _newest_restorable(self, nodes: tuple[str, ...]) -> tuple[AttemptRef, int] | None:
        there = set().union(*(self._room.disk(n) for n in nodes))
        limit = None
        for plan in reversed(self.attempts):
            steps = {step for label, step, _ in there if label == plan.attempt.label and (limit is None or step <= limit)}
            whole = [s for s in steps if all((plan.attempt.label, s, part) in there for part in plan.roster.part_names)]
            if whole:
                return plan.attempt, max(whole)
            limit = plan.restored_step if limit is None else min(limit, plan.restored_step)
        return None

    def _step_s(self) -> float:
        return self._room.habits.step_s * self._room.random.uniform(0.9, 1.1)

    def train(self, worker: Worker, job: Job) -> None:
        name, now_s = worker.node.name, self._room.now_s
        if worker.phase is RankPhase.SAVING:
            self._await_durable(worker)
            return
        if worker.stop is not None:
            if not self._is_decided(worker):
                return
        elif worker.phase not in _STEPPING:
            return
        else:
            if now_s < worker.ready_s or now_s < self.stalls.get(name, 0.0):
                return
            wanted = worker.step + 1
            if job.sent.get(name, (-1, 0.0))[0] < wanted:
                job.sent[name] = (wanted, now_s + self._room.random.uniform(0.0, 0.2) * self._room.habits.step_s)
                worker.waits_since_s = now_s
            sent = [job.sent.get(n, (-1, 0.0)) for n in job.workers]
            if not all(s >= wanted and (s > wanted or at_s <= now_s) for s, at_s in sent) or not all(
                self._room.can_reach(name, n) for n in job.workers
            ):
                assert worker.waits_since_s is not None
                if now_s - worker.waits_since_s > self._room.habits.collective_s:
                    worker.end(1, now_s, PIPE_BROKE)
                return
            worker.step = wanted
            worker.says["step_at_s"] = now_s
            if self._must_wait_to_stop(worker):
                return
        self._finish_step(worker, job)

    def _has_gathered(self, job: Job, name: str, step: int) -> bool:
        """The gradients of all are here."""
        sent = [job.sent.get(n, (-1, 0.0)) for n in job.workers]
        is_sent = all(at > step or (at == step and at_s <= self._room.now_s) for at, at_s in sent)
        return is_sent and all(self._room.can_reach(name, n) for n in job.workers)

    def _finish_step(self, worker: Worker, job: Job) -> None:
        now_s, habits = self._room.now_s, self._room.habits
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
        reserved = int(announced) if announced is not None else first_save(plan.restored_step, plan.save_interval_steps)
        if answer.get("launch") == worker.launch and int(answer.get("taken", -1)) >= reserved:
            reserved = -1
        if len(worker.posted) >= 4:
            free = [s for s in worker.posted if s not in (reserved, node.persister.pinned)]
            worker.posted.remove(min(free))
        worker.posted.append(worker.step)
        for holder in plan.replica_nodes(node.name):
            other = self._room.nodes[holder]
            if other.is_on and self._room.can_reach(node.name, holder):
                self._room.later(0.02, functools.partial(_deliver, other, job, plan.local_ranks, worker.step))

    def _must_wait_to_stop(self, worker: Worker) -> bool:
        """As `Session.is_asked_to_stop`."""
        stop = worker.node.keeper.board(links.CONTROL).read().get("stop")
        if not stop or stop["step"] < 0:
            return False
        if int(stop["id"]) > int(worker.says.get("stop_seen", 0)):
            worker.tell(stop_seen=int(stop["id"]), stop_was_late=worker.step > int(stop["step"]))
        if worker.step != int(stop["step"]):
            return False
        worker.stop = (int(stop["id"]), self._room.now_s)
        return True

    def _is_decided(self, worker: Worker) -> bool:
        assert worker.stop is not None
        number, since_s = worker.stop
        now = worker.node.keeper.board(links.CONTROL).read().get("stop") or {}
        if now.get("id") == number and now.get("state") == "committed":
            worker.stops = True
        elif now.get("id") == number and now.get("state") != "signalled" and self._room.now_s - since_s < 15.0:
            if self._room.now_s - since_s > 10.0 and not worker.says.get("stop_was_late"):
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
            self._room.later(0.2, lambda: worker.end(0, self._room.now_s))
        elif failed.get("launch") == worker.launch and failed["step"] == worker.step and failed["at_s"] >= worker.says["wanted_at_s"]:
            worker.phase = RankPhase.FAILED
            worker.tell(wanted_save=None, failure={"code": "RT-054", "message": failed["message"], "exit_code": 14, "retryable": True})
            worker.end(1, self._room.now_s)


def _deliver(holder: Node, job: Job, ranks: tuple[int, ...], step: int) -> None:
    there = holder.keeper.worker if holder.is_on else None
    if there is not None and there.job is job:
        for rank in ranks:
            holder.hold(there.launch, rank, step)

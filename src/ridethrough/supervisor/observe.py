"""This node as its supervisor sees it: boards in memory and the keeper's answers, made into a view."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.snapshot import link as names
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.ranks import RankPhase, RankState, decode_rank
from ridethrough.supervisor import policy, view
from ridethrough.supervisor.relay import Relay
from ridethrough.supervisor.view import End, NodePhase, NodeView, Refused, Sealed

_UNKILLABLE_S = 60.0
_DEAD_LOOK_S = 0.2
_OVER = (RankPhase.DONE, RankPhase.STOPPED, RankPhase.FAILED)


class OverdueSave(NamedTuple):
    """A save at which storage does not answer, or is slow."""

    step: int
    phase: str
    waited_s: float


class Observer:
    """Reads what is in memory; owns nothing that a successor would miss.

    Args:
        clock: The clock.
        link: To the keeper.
        node: This node.
        is_library: There is no command of ours: the trainers are the launch.
    """

    def __init__(self, clock: Clock, link: KeeperLink, node: str, *, is_library: bool) -> None:
        self._clock = clock
        self._link = link
        self._node = node
        self._is_library = is_library
        self._persist = link.board(names.PERSIST)
        self._relay = Relay(link)
        self._boards: dict[str, Board] = {}
        self._states: dict[str, tuple[int, RankState | None]] = {}
        """By board: its generation when it was read, and what stood on it."""
        self._dead: tuple[int, ...] = ()
        self._looked_s = float("-inf")
        self._courier: Board | None = None
        self._end: End | None = None
        self._ranks_of: Counter[str] = Counter()
        self._followed_s = clock.monotonic_s()
        self.launch = 0
        self.plan: Plan | None = None
        self.ranks: tuple[RankState, ...] = ()

    def follow(self, launch: int) -> None:
        """This launch is watched from now on."""
        for board in self._boards.values():
            board.close()
        self._boards.clear()
        self._states.clear()
        self._dead, self._looked_s = (), float("-inf")
        self.plan, self.ranks, self._end = None, (), None
        self.launch = launch
        self._followed_s = self._clock.monotonic_s()
        self._relay.follow(launch)

    def look(self) -> None:
        """`ranks` and `plan` are as they stand on the boards."""
        for name, size in self._link.names().items():
            if name.startswith(f"{self.launch}/rank/") and name not in self._boards:
                self._boards[name] = self._link.board(name, size)
            elif name == names.plan_board(self.launch) and self.plan is None:
                board = self._link.board(name, size)
                value = board.read()
                board.close()
                self.plan = Plan.from_board(value) if value else None
                # Counted once: with thousands of ranks it takes longer than all the rest of a round.
                self._ranks_of = Counter(self.plan.roster.nodes) if self.plan is not None else Counter()
            elif name == names.COURIER and self._courier is None:
                self._courier = self._link.board(name, size)
        for name, board in self._boards.items():
            generation = board.generation
            if self._states.get(name, (None, None))[0] != generation:
                self._states[name] = (generation, decode_rank(board.read()))
        states = (state for _, state in self._states.values() if state is not None)
        self.ranks = tuple(sorted(states, key=lambda s: s.rank))

    def saved_step(self) -> int:
        """The newest durable step of this keeper's life, -1 if none."""
        return int((self._persist.read().get("durable") or {}).get("step", -1))

    def overdue_save(self) -> OverdueSave | None:
        """The save that has been in one phase for longer than its deadline."""
        answer = self._persist.read()
        busy = answer.get("busy")
        if not busy:
            return None
        waited_s = self._clock.monotonic_s() - float(busy["since_s"])
        if waited_s <= policy.save_deadline_s(answer.get("save_s")):
            return None
        return OverdueSave(step=int(busy["step"]), phase=str(busy["phase"]), waited_s=waited_s)

    def dead_ranks(self) -> list[int]:
        """Ranks whose process is gone although they were not done."""
        return [r.rank for r in self.ranks if r.phase not in _OVER and not process.is_alive(r.pid, r.process_started)]

    def _look_for_dead(self, now_s: float) -> tuple[int, ...]:
        """Asked of the system several times a second: for eight ranks it takes longer than all the rest."""
        if now_s - self._looked_s >= _DEAD_LOOK_S or self._dead:
            self._looked_s, self._dead = now_s, tuple(self.dead_ranks())
        return self._dead

    def view(
        self, look: dict[str, Any], *, generation: int, is_stopping: bool, readiness: tuple[bool, tuple[str, ...]], confirmed_step: int = -1
    ) -> NodeView:
        """What this node says of itself now; of its saves those that are not older than the confirmed one."""
        now_s = self._clock.monotonic_s()
        phase, stuck = self._phase(look, now_s)
        fields = view.of_ranks(self.ranks, local_world=self._ranks_of[self._node] if self.plan else None, now_s=now_s)
        if not fields and phase is NodePhase.RUNNING:
            fields["since_step_s"] = now_s - self._followed_s  # a rendezvous that nobody comes to is no progress
        if self._is_library and any(r.phase not in (RankPhase.DONE, RankPhase.STOPPED) for r in self.ranks):
            fields["is_unsaved"] = True  # nobody tells us how a trainer ended; it was not done
        return NodeView(
            node=self._node,
            up_s=float(look["up_s"]),
            phase=phase,
            generation=generation,
            attempt=self.plan.attempt.label if self.plan else None,
            is_ready=readiness[0],
            missing=readiness[1],
            signal=int(look["signals"][0]) if look["signals"] else 0,
            stuck=stuck,
            end=self._judge(look, is_stopping=is_stopping) if phase is NodePhase.ENDED else None,
            dead_ranks=self._look_for_dead(now_s),
            replicas=self._replicas(),
            **fields,
            **self._saves(now_s, confirmed_step),
        )

    def _phase(self, look: dict[str, Any], now_s: float) -> tuple[NodePhase, str]:
        if self._is_library:
            is_over = bool(self.ranks) and all(not process.is_alive(r.pid, r.process_started) for r in self.ranks)
            return (NodePhase.ENDED if is_over else NodePhase.RUNNING), ""
        if not self.launch:
            return NodePhase.WAITING, ""
        if look["status"] is None:
            return NodePhase.RUNNING, ""
        if not look["workers"]:
            return NodePhase.ENDED, ""
        is_stuck = now_s - float(look["ended_s"]) > _UNKILLABLE_S
        why = f"{look['workers']} processes of launch {self.launch} cannot be killed (stuck in a driver or a dead mount)"
        return NodePhase.RUNNING, why if is_stuck else ""

    def _judge(self, look: dict[str, Any], *, is_stopping: bool) -> End:
        """How the command has ended here; judged once, for waiting for the rest of its output takes time."""
        if self._end is None:
            output = "" if self._is_library else self._relay.tail()
            facts = policy.LaunchEnd(
                status=0 if self._is_library else int(look["status"]),
                output=output,
                start_step=max((r.restored_step for r in self.ranks), default=-1),
                last_step=max((r.step for r in self.ranks), default=-1),
                failures=tuple(r.failure for r in self.ranks if r.failure is not None),
                is_stopped=bool(self.ranks) and is_stopping and all(r.phase is RankPhase.STOPPED for r in self.ranks),
            )
            verdict = policy.classify(facts)
            self._end = End(
                status=facts.status,
                cause=verdict.cause.value,
                fingerprint=verdict.fingerprint[:200],
                detail=verdict.detail[:300],
                exit_code=verdict.exit_code,
                is_retryable=verdict.is_retryable,
                output=output[-1500:] if verdict.cause not in (policy.Cause.FINISHED, policy.Cause.STOPPED) else "",
            )
        return self._end

    def _saves(self, now_s: float, confirmed_step: int) -> dict[str, Any]:
        answer = self._persist.read()
        durable, failed = answer.get("durable") or {}, answer.get("failed") or {}
        is_ours = failed.get("launch") == self.launch
        return {
            "sealed": tuple(
                Sealed(step=int(s["step"]), dark=tuple(s["dark"]), is_verified=bool(s["is_verified"]), digests=s["digests"])
                for s in answer.get("sealed", ())
                if s["launch"] == self.launch and s["step"] >= confirmed_step
            ),
            "refused": Refused(
                number=int(failed.get("number", 0)),
                step=int(failed["step"]),
                code=str(failed.get("code", "")),
                message=str(failed.get("message", ""))[:300],
                age_s=now_s - float(failed["at_s"]),
            )
            if is_ours
            else None,
            "durable_step": int(durable["step"]) if durable.get("launch") == self.launch else -1,
            "saved_step": int(durable.get("step", -1)),
            "is_saving": bool(answer.get("busy")),
            "flushed": int(answer.get("flushed", 0)),
        }

    def _replicas(self) -> dict[str, tuple[int, ...]]:
        """By node: steps of which every private part is here."""
        if self._courier is None or self.plan is None or len(self._ranks_of) == 1:
            return {}
        said = self._courier.read()
        if said.get("launch") != self.launch:
            return {}  # a moment after a launch the courier still speaks of the one before
        held: dict[str, list[set[int]]] = {}
        for rank, steps in (said.get("held") or {}).items():
            held.setdefault(self.plan.roster.nodes[int(rank)], []).append(set(steps))
        return {
            node: tuple(sorted(set.intersection(*steps))) for node, steps in held.items() if node != self._node and len(steps) == self._ranks_of[node]
        }

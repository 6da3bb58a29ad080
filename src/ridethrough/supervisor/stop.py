"""Agreeing with all ranks on the step at which to save and stop. Pure.

1. *Proposed*: a step a little ahead. Each rank acknowledges when it sees the proposal, and says
   so if it had already passed the step.
2. All have seen it in time: *committed*. A rank that reaches the step while the proposal is open
   waits there for the decision; so either all stop at that step or none does.
3. One was late: *aborted*; a later step is proposed.
4. No rank is training, or the grace time is over: the command gets SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Any

from ridethrough.snapshot.ranks import RankPhase, RankState
from ridethrough.supervisor.view import NodeView

_AHEAD_S = 0.5
_TERM_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to publish, record and send."""

    state: dict[str, Any] | None
    record: dict[str, Any] | None = None
    send: int | None = None


class Stopper:
    """Moves the agreement forward; all its state is in the value it returns.

    Args:
        grace_s: From the request to the first signal to the command.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s

    def advance(self, state: dict[str, Any] | None, ranks: tuple[RankState, ...], *, number: int, now_s: float) -> Wish:
        """The next state of the agreement."""
        name = signal.Signals(number).name
        is_training = bool(ranks) and all(r.phase in (RankPhase.TRAINING, RankPhase.OUTSIDE, RankPhase.SAVING) for r in ranks)
        if state is None:
            if not is_training:
                started: dict[str, Any] = {"id": 0, "state": "signalled", "step": -1, "since_s": now_s, "term_s": now_s}
                return Wish(state=started, record={"signal": name, "action": "end the command: no rank is training"}, send=signal.SIGTERM)
            return self._propose(0, ranks, since_s=now_s, record={"signal": name})
        waited_s = now_s - float(state["since_s"])
        if state["state"] == "signalled":
            if now_s - float(state["term_s"]) <= _TERM_WAIT_S:
                return Wish(state=state)
            record = None if state.get("killed") else {"action": "kill: the command did not end"}
            # Each round: whoever wrote "killed" down may have died before doing it.
            return Wish(state={**state, "killed": True}, record=record, send=signal.SIGKILL)
        if waited_s > self._grace_s:
            return Wish(
                state={**state, "state": "signalled", "term_s": now_s},
                record={"action": f"end the command: not saved within {self._grace_s:.0f} s"},
                send=signal.SIGTERM,
            )
        if state["state"] == "proposed" and is_training and all(r.stop_seen >= int(state["id"]) for r in ranks):
            if any(r.stop_was_late for r in ranks):
                return self._propose(int(state["id"]), ranks, since_s=float(state["since_s"]), record={"action": "a rank was past the step"})
            return Wish(state={**state, "state": "committed"}, record={"action": f"save and stop at step {state['step']}"})
        return Wish(state=state)

    @staticmethod
    def _propose(previous: int, ranks: tuple[RankState, ...], *, since_s: float, record: dict[str, Any]) -> Wish:
        # Another lead, which this one did not hear, may have proposed before: a number seen twice would be taken for acknowledged.
        number = max([previous, *(r.stop_seen for r in ranks)]) + 1
        newest = max(r.step for r in ranks)
        step_s = max((r.step_s_p99 for r in ranks), default=0.0)
        ahead = max(2, math.ceil(_AHEAD_S / step_s) if step_s > 0 else 2) * (previous + 1)
        step = newest + ahead
        state = {"id": number, "state": "proposed", "step": step, "since_s": since_s}
        return Wish(state=state, record={**record, "proposed_step": step})


def as_rank(view: NodeView, *, is_heard: bool) -> RankState:
    """A node's ranks as one, for the agreement to stop."""
    return RankState(
        rank=0,
        pid=0,
        process_started=0,
        world_size=0,
        run_dir="",
        phase=RankPhase.TRAINING if view.is_at_work else RankPhase.STARTING,
        step=view.step,
        step_s_p99=view.step_s_p99,
        stop_seen=view.stop_seen if is_heard else 0,
        stop_was_late=view.stop_was_late,
    )

"""The agreement to stop, played with ranks that see everything late."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.snapshot.ranks import RankPhase, RankState
from ridethrough.supervisor.stop import Stopper

GRACE_S = 30.0


def rank(number: int = 0, **says: Any) -> RankState:
    start = RankState(rank=number, pid=100 + number, process_started=1, world_size=2, run_dir="/r", phase=RankPhase.TRAINING, step=5, step_s_p99=1.0)
    return replace(start, **says)


def advance(state: dict[str, Any] | None, *ranks: RankState, now_s: float = 0.0) -> Any:
    return Stopper(GRACE_S).advance(state, ranks, number=signal.SIGTERM, now_s=now_s)


PROPOSED = {"id": 1, "state": "proposed", "step": 7, "since_s": 0.0}


def test_request_becomes_a_proposal_ahead_of_every_rank() -> None:
    wish = advance(None, rank(0, step=5), rank(1, step=6))
    assert (wish.state["state"], wish.state["step"]) == ("proposed", 8)


def test_proposal_of_fast_steps_is_half_a_second_ahead() -> None:
    assert advance(None, rank(step=100, step_s_p99=0.01)).state["step"] == 150


def test_proposal_sends_no_signal() -> None:
    assert advance(None, rank()).send is None


def test_proposal_stays_open_until_every_rank_has_seen_it() -> None:
    assert advance(PROPOSED, rank(0, stop_seen=1), rank(1)).state == PROPOSED


def test_proposal_seen_by_all_in_time_is_committed() -> None:
    assert advance(PROPOSED, rank(0, stop_seen=1), rank(1, stop_seen=1)).state["state"] == "committed"


def test_proposal_seen_too_late_by_one_becomes_a_later_one() -> None:
    wish = advance(PROPOSED, rank(0, stop_seen=1, step=8), rank(1, stop_seen=1, stop_was_late=True, step=8))
    assert (wish.state["id"], wish.state["state"]) == (2, "proposed")
    assert wish.state["step"] > 8


def test_later_proposal_leaves_more_time() -> None:
    late = rank(0, stop_seen=1, stop_was_late=True, step=8)
    first, second = advance(None, rank(0, step=8)).state["step"] - 8, advance(PROPOSED, late).state["step"] - 8
    assert second > first


def test_later_proposal_keeps_the_time_of_the_request() -> None:
    assert advance(PROPOSED, rank(0, stop_seen=1, stop_was_late=True), now_s=9.0).state["since_s"] == 0.0


@pytest.mark.parametrize("ranks", [(), (rank(phase=RankPhase.LOADING),), (rank(0), rank(1, phase=RankPhase.STARTING))])
def test_command_whose_ranks_do_not_train_yet_gets_sigterm_at_once(ranks: tuple[RankState, ...]) -> None:
    assert advance(None, *ranks).send == signal.SIGTERM


def test_ranks_between_epochs_are_asked_like_all_others() -> None:
    assert advance(None, rank(0), rank(1, phase=RankPhase.OUTSIDE)).state["state"] == "proposed"


def test_grace_time_that_is_over_ends_in_sigterm() -> None:
    assert advance(PROPOSED, rank(), now_s=GRACE_S + 0.1).send == signal.SIGTERM


def test_grace_time_also_ends_a_committed_stop() -> None:
    assert advance({**PROPOSED, "state": "committed"}, rank(), now_s=GRACE_S + 0.1).send == signal.SIGTERM


def test_command_that_ignores_sigterm_gets_sigkill() -> None:
    signalled = {"id": 0, "state": "signalled", "step": -1, "since_s": 0.0, "term_s": 0.0}
    assert [advance(signalled, rank(), now_s=s).send for s in (5.0, 10.1)] == [None, signal.SIGKILL]


def test_sigkill_is_repeated_until_it_works_and_is_on_record_once() -> None:
    signalled = {"id": 0, "state": "signalled", "step": -1, "since_s": 0.0, "term_s": 0.0}
    after = advance(signalled, rank(), now_s=10.1).state
    again = advance(after, rank(), now_s=99.0)
    assert again.send == signal.SIGKILL
    assert again.record is None


def test_every_decision_is_on_record() -> None:
    committed = advance(PROPOSED, rank(stop_seen=1))
    assert committed.record == {"action": "save and stop at step 7"}


def test_waiting_is_not_on_record() -> None:
    assert advance(PROPOSED, rank()).record is None


# -- the play ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Rank:
    """A trainer as `Checkpointer` plays it. Reading the proposal and answering it are two moves: anything may happen between."""

    step: int = 0
    board_step: int = 0
    seen: int = 0
    was_late: bool = False
    at: str = "train"
    read: dict[str, Any] | None = None
    stopped_at: int | None = None
    gave_up_in_round: int = -1


@dataclass(slots=True)
class Play:
    """Ranks coupled by their gradients, and a supervisor whose looking and publishing are two moves."""

    ranks: list[Rank]
    control: dict[str, Any] | None = None
    looked: tuple[RankState, ...] | None = None
    rounds: int = 0
    published_round: int = 0
    history: list[str] = field(default_factory=list)

    def can_train(self, r: Rank) -> bool:
        """The gradients of a step need every rank: nobody finishes it before all have finished the one before it."""
        return all(o.step > r.step or (o.step == r.step and o.at == "train") for o in self.ranks)

    def enabled(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = [("publish", 0)] if self.looked is not None else [("look", 0)]
        for number, r in enumerate(self.ranks):
            if r.stopped_at is not None:
                continue
            if r.at == "train":
                if self.can_train(r):
                    found.append(("train", number))
            else:
                found.append((r.at, number))
                if r.at == "wait" and not r.was_late:
                    found.append(("withdraw", number))
                # Having withdrawn it waits for longer than a round of the supervisor takes.
                if r.at == "wait" and r.was_late and self.published_round > r.gave_up_in_round:
                    found.append(("leave", number))
        return found

    def play(self, move: str, number: int) -> None:
        self.history.append(f"{move} {number}")
        r = self.ranks[number] if self.ranks else Rank()
        if move == "look":
            self.rounds += 1
            self.looked = tuple(rank(n, step=o.board_step, stop_seen=o.seen, stop_was_late=o.was_late) for n, o in enumerate(self.ranks))
        elif move == "publish":
            assert self.looked is not None
            if all(o.stopped_at is None for o in self.ranks):
                self.control = Stopper(1e9).advance(self.control, self.looked, number=signal.SIGTERM, now_s=0.0).state
            self.looked = None
            self.published_round = self.rounds
        elif move == "train":
            r.step += 1
            r.at = "read"
        elif move == "read":
            r.read = self.control
            r.at = "answer"
        elif move == "answer":
            stop = r.read
            if stop and stop["id"] > r.seen:
                r.seen, r.was_late, r.board_step = stop["id"], r.step > stop["step"], r.step
            if stop and r.step == stop["step"]:
                r.at = "wait"
            else:
                r.board_step = r.step
                r.at = "train"
        elif move == "wait":
            now, stop = self.control, r.read
            assert stop is not None
            if now is None or now["id"] != stop["id"]:
                self._go_on(r)
            elif now["state"] == "committed":
                r.stopped_at = r.step
        elif move == "withdraw":
            r.was_late = True
            r.gave_up_in_round = self.rounds
        elif move == "leave":
            self.play("wait", number)
            if r.stopped_at is None and r.at == "wait":
                self._go_on(r)

    @staticmethod
    def _go_on(r: Rank) -> None:
        r.board_step = r.step
        r.at = "train"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), count=st.integers(1, 4))
def test_all_ranks_stop_at_one_step_whatever_they_see_late(data: st.DataObject, count: int) -> None:
    play = Play([Rank() for _ in range(count)])
    for _ in range(data.draw(st.integers(0, 150))):
        moves = play.enabled()
        play.play(*moves[data.draw(st.integers(0, len(moves) - 1))])
    # From here on everybody is quick, and gives up waiting only where nobody can go on: the agreement must come to its end.
    for _ in range(300):
        moves = play.enabled()
        is_blocked = all(move in ("look", "publish", "wait", "withdraw", "leave") for move, _ in moves)
        for move in moves:
            if move in play.enabled() and (is_blocked or move[0] not in ("withdraw", "leave")):
                play.play(*move)
        if all(r.stopped_at is not None for r in play.ranks):
            break
    assert len({r.stopped_at for r in play.ranks}) == 1, f"{[r.stopped_at for r in play.ranks]}: {play.history[:200]}"
    assert play.ranks[0].stopped_at is not None, f"nobody has stopped: {play.history[-50:]}"

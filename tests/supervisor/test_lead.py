"""What a room of nodes does when something goes dark, hangs, crashes or is asked to stop; simulated, with real supervisors."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from room_node import CRASHED
from room_of import BEAT_S, DEAD_S, SUSPECT_S, Room, training

from ridethrough.config import RecoveryConfig
from ridethrough.supervisor.directive import Directive, Outcome, Stage
from ridethrough.supervisor.lead import Lead
from ridethrough.supervisor.scene import Sight, Surroundings
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.view import End, NodePhase, NodeView, Refused, Sealed
from ridethrough.testing.network import Weather

CONVICTIONS = ("peer.convicted", "hang.convicted", "launch.ended")
SHRINK = RecoveryConfig(then="shrink", min_nodes=2, wait_for_nodes_s=30.0)


def convictions(room: Room) -> list[str]:
    return [f"{e.node} {e.kind} {e.data}" for e in room.events if e.kind in CONVICTIONS]


def causes(room: Room) -> list[str]:
    return [e.data["cause"] for e in room.all_events("launch.ended")]


def until_over(room: Room, lead: str = "n0", limit_s: float = 60.0) -> float:
    return room.run_until(lambda: room.word(lead).stage is not Stage.RUNNING, limit_s=limit_s)


def until_training_again(room: Room, generation: int = 2, limit_s: float = 90.0) -> float:
    def is_so() -> bool:
        return bool(room.steps) and all(s.directive.generation == generation and s.memory.recovered for s in room.supervisors.values())

    return room.run_until(is_so, limit_s=limit_s)


def until_ended(room: Room, limit_s: float = 90.0) -> dict[str, int]:
    room.run_until(lambda: all(node.exit for node in room.nodes.values()), limit_s=limit_s)
    return {node.name: node.exit[0] for node in room.nodes.values() if node.exit}


# -- a node goes dark ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["n0", "n2"])
def test_silent_node_is_suspected_within_two_seconds(name: str, seed: int) -> None:
    room = training(seed=seed)
    room.cut(name)
    assert room.run_until(lambda: bool(room.all_events("peer.suspected")), limit_s=10) <= 2.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["n0", "n2"])
def test_silent_node_is_given_up_after_15_s_and_a_beat_when_no_rank_progresses(name: str, seed: int) -> None:
    room = training(seed=seed)
    room.cut(name)
    took_s = until_over(room, lead="n1")
    assert SUSPECT_S < took_s <= DEAD_S + BEAT_S
    assert [e.data["nodes"] for e in room.all_events("peer.convicted")] == [[name]]


def test_node_cut_in_the_very_first_step_is_given_up_as_soon() -> None:
    """It had not yet said that it steps; but the others could not have made theirs without it."""
    room = Room()
    room.run_until(lambda: room.step >= 1, limit_s=30)
    room.cut("n2")
    room.run_for(0.5)
    assert until_over(room) <= DEAD_S + BEAT_S


def test_three_of_four_nodes_dark_at_once_are_one_incident() -> None:
    room = training(for_s=8.0)
    room.cut("n0", "n1", "n3")
    assert until_over(room, lead="n2") <= DEAD_S + 2 * SUSPECT_S
    room.power_on("n0", "n1", "n3")
    until_training_again(room)
    room.run_for(1.0)
    assert [e.data["nodes"] for e in room.all_events("peer.convicted")] == [["n0", "n1", "n3"]]
    assert [e.data["nodes"] for e in room.all_events("incident")] == [["n0", "n1", "n3"]]


def test_node_that_came_back_is_given_up_as_soon_as_steps_are_overdue() -> None:
    room = training()
    room.cut("n2")
    room.run_for(2.5)
    room.power_on("n2")
    assert until_over(room) <= 2 * BEAT_S
    assert room.all_events("peer.convicted")[0].data["has_restarted"] == ["n2"]


def test_node_that_was_away_for_less_than_a_beat_is_found_to_have_restarted() -> None:
    room = training()
    room.restart("n2")
    assert until_over(room) <= 3.0
    assert room.all_events("peer.convicted")[0].data["has_restarted"] == ["n2"]


def test_restarted_lead_is_given_up_too() -> None:
    room = training()
    room.restart("n0")
    until_training_again(room, limit_s=10)
    assert causes(room) == ["dark"]


def test_node_that_came_back_before_anybody_missed_it_launches_nothing_alone() -> None:
    room = training()
    room.restart("n2")
    room.run_for(1.0)
    assert room.nodes["n2"].keeper.launches == 0


def test_node_cut_in_the_rendezvous_is_given_up_after_two_minutes_and_not_with_the_launchers_timeout() -> None:
    room = Room(rendezvous_s=900.0, agree_s=5.0)
    room.run_until(lambda: len(room.steps) == 4, limit_s=10)
    room.cut("n2")
    assert 120.0 < until_over(room, limit_s=1000) < 122.0


def test_member_that_a_new_lead_has_never_heard_is_given_up_too() -> None:
    """It went dark while another led; its view went only to that one and its deputies."""
    room = training(6)
    room.part(("n0", "n1", "n2"), ("n3", "n4", "n5"), data=False)
    room.run_until(lambda: "n3" in room.leads, limit_s=10)
    room.supervisors["n3"]._talk._views.pop("n1", None)
    room.cut("n0", "n1", "n2")
    until_over(room, lead="n3")
    assert sorted(room.all_events("peer.convicted")[-1].data["nodes"]) == ["n0", "n1", "n2"]


def test_commands_that_broke_because_a_node_restarted_wait_for_nothing_more() -> None:
    room = training()
    room.cut("n2")
    for name in ("n0", "n1", "n3"):
        room.later(0.5, lambda name=name: room.crash(name, PIPE, others_after_s=None))  # type: ignore[misc]
    room.run_for(1.0)
    room.power_on("n2")
    assert until_over(room) <= 5.0
    assert causes(room) == ["dark"]


PIPE = CRASHED.replace("ValueError: bad batch", "RuntimeError: Connection closed by peer")


def test_commands_that_broke_while_a_node_is_silent_wait_until_it_is_surely_dark() -> None:
    room = training()
    room.cut("n2")
    for name in ("n0", "n1", "n3"):
        room.later(1.0, lambda name=name: room.crash(name, PIPE, others_after_s=None))  # type: ignore[misc]
    assert DEAD_S - 1.0 < until_over(room) <= DEAD_S + BEAT_S
    assert causes(room) == ["dark"]


# -- healthy jobs are never stopped ----------------------------------------------------------------------------------------


def test_management_network_that_is_down_for_a_minute_stops_nothing_and_saves_go_on_when_it_is_back() -> None:
    room = training(for_s=8.0)
    room.silence(*room.names)
    before = room.step
    room.run_for(60.0)
    assert room.step > before + 200, "the job itself goes on"
    room.heal()
    room.run_for(3.0)
    there = room.step
    room.run_until(lambda: room.confirmed_step() >= there, limit_s=20)
    assert convictions(room) == []


@pytest.mark.parametrize("name", ["n0", "n3"])
def test_one_node_that_is_not_heard_for_a_minute_stops_nothing_and_saves_go_on_without_it(name: str) -> None:
    room = training(for_s=8.0)
    room.silence(name)
    room.run_for(60.0)
    assert room.confirmed_step() > room.step - 60
    room.heal()
    room.run_for(10.0)
    assert len(room.leads) == 1
    assert convictions(room) == []


def test_management_network_that_is_down_before_the_first_step_stops_nothing() -> None:
    room = Room(warm_up_s=100.0)
    room.run_for(5.0)
    room.silence(*room.names)
    room.run_for(60.0)
    room.heal()
    room.run_for(50.0)
    assert room.step > 1
    assert convictions(room) == []


def test_loader_that_has_nothing_for_30_s_stops_nothing() -> None:
    room = training()
    room.stall("n1", 30.0)
    room.run_for(45.0)
    assert [e.kind for e in room.events if e.kind.startswith("hang")] == ["hang.suspected", "hang.cleared"]
    assert convictions(room) == []


def test_warm_up_of_ten_minutes_before_the_first_step_stops_nothing() -> None:
    room = Room(2, warm_up_s=600.0, round_s=0.25)
    room.run_until(lambda: room.step > 1, limit_s=620)
    assert convictions(room) == []


@pytest.mark.parametrize("name", ["n0", "n3"])
def test_supervisor_that_is_stopped_for_20_s_stops_nothing(name: str) -> None:
    room = training()
    room.freeze(name, 20.0)
    before = room.step
    room.run_for(40.0)
    assert room.step > before + 150
    assert len(room.leads) == 1
    assert convictions(room) == []


def test_all_supervisors_that_are_stopped_for_20_s_stop_nothing() -> None:
    room = training()
    for name in room.names:
        room.freeze(name, 20.0)
    room.run_for(30.0)
    assert convictions(room) == []


def test_slow_storage_stops_nothing() -> None:
    room = training(2, write_s=45.0)
    room.run_for(120.0)
    assert room.confirmed_step() > 0
    assert convictions(room) == []


def test_validation_between_epochs_stops_nothing_not_even_with_a_node_unheard() -> None:
    room = training(epoch_steps=20, outside_s=40.0, for_s=0.0)
    room.run_until(lambda: room.step == 20, limit_s=30)
    room.silence("n3")
    room.run_for(39.0)
    room.heal()
    room.run_for(10.0)
    assert room.step > 20
    assert convictions(room) == []


# -- a command hangs or fails ----------------------------------------------------------------------------------------------


def test_hang_is_given_up_after_a_minute_and_not_with_the_collective_timeout() -> None:
    room = training()
    room.stall("n1", 1e6)
    took_s = until_over(room, limit_s=100)
    assert 58.0 < took_s < 65.0
    room.training.stalls.clear()
    until_training_again(room)
    assert causes(room) == ["hang"]


@pytest.mark.parametrize("seed", range(3))
def test_root_cause_is_chosen_over_the_symptoms_of_the_others(seed: int) -> None:
    room = training(seed=seed)
    for number, name in enumerate(("n0", "n1", "n3")):
        room.later(0.1 * number, lambda name=name: room.crash(name, PIPE, others_after_s=None))  # type: ignore[misc]
    room.later(1.5, lambda: room.crash("n2", CRASHED, others_after_s=None))
    until_over(room)
    ended = room.all_events("launch.ended")[0].data
    assert (ended["cause"], ended["detail"]) == ("application", "n2: ValueError: bad batch (/job/train.py:12, in main)")


def test_symptoms_alone_restart_the_job() -> None:
    room = training()
    for name in room.names:
        room.crash(name, PIPE, others_after_s=None)
    until_training_again(room)
    assert causes(room) == ["cascade"]


def test_crash_of_one_node_restarts_all_of_them_together_and_the_launch_counts_up_once() -> None:
    room = training()
    room.crash("n2")
    until_training_again(room)
    assert {n: node.keeper.launches for n, node in room.nodes.items()} == dict.fromkeys(room.names, 2)
    decided = room.all_events("launch.decided", since_s=room.all_events("launch.ended")[0].at_s)
    assert len(decided) == 4
    assert max(e.at_s for e in decided) - min(e.at_s for e in decided) < 0.5


def test_same_crash_at_the_same_step_twice_ends_the_run_on_every_node() -> None:
    room = training(2)
    for generation in (2, 3):
        room.run_until(lambda: room.step == 30, limit_s=60)
        room.crash("n1")
        room.run_until(lambda generation=generation: bool(room.nodes["n1"].exit) or room.word("n0").generation == generation, limit_s=30)  # type: ignore[misc]
    assert until_ended(room) == {"n0": 21, "n1": 21}


def test_processes_that_cannot_be_killed_on_one_node_call_a_person_on_all() -> None:
    room = training(2)
    room.nodes["n1"].unkillable = 1
    room.crash("n0")
    assert until_ended(room, limit_s=120) == {"n0": 21, "n1": 21}


# -- stopping --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_sigterm_on_one_node_stops_all_at_one_step_and_all_end_with_20(seed: int) -> None:
    room = training(seed=seed)
    steps: dict[str, int] = {}
    room.ask_to_stop("n2", signal.SIGTERM)

    def note() -> bool:
        steps.update(room.steps)
        return all(node.exit for node in room.nodes.values())

    room.run_until(note, limit_s=60)
    assert len(set(steps.values())) == 1
    assert until_ended(room) == dict.fromkeys(room.names, 20)
    assert all(f"step {steps['n0']} is durable" in node.exit[1] for node in room.nodes.values() if node.exit)


def test_stop_is_not_agreed_without_a_node_that_is_not_heard() -> None:
    """It would stop at a step that the others pass: they would wait for it in a collective."""
    room = training()
    room.silence("n3")
    room.run_for(3.0)
    room.ask_to_stop("n3", signal.SIGTERM)
    room.run_for(5.0)
    assert room.word("n3").stop is not None
    assert room.word("n3").stop["state"] == "proposed"
    assert len(room.steps) == 4
    room.heal()
    assert until_ended(room, limit_s=20) == dict.fromkeys(room.names, 20)


def test_agreement_to_stop_that_a_lead_leaves_behind_is_carried_on_by_its_successor() -> None:
    """How long it has been wanted is told as an age: the successor's clock shows something else."""
    room = training(settings={"grace_s": 60.0})
    room.silence("n3")  # else it would be over at once
    room.run_for(3.0)
    room.ask_to_stop("n1", signal.SIGTERM)
    room.run_for(1.0)
    before = room.word("n1").stop
    room.freeze("n0", 20.0)
    room.run_until(lambda: "n1" in room.leads, limit_s=10)
    room.run_for(1.0)
    after = room.word("n1").stop
    assert before is not None
    assert after is not None
    assert after["state"] == "proposed"
    waited_s = room.nodes["n1"].clock.monotonic_s() - after["since_s"]
    assert 2.0 < waited_s < 15.0
    room.heal()
    assert until_ended(room, limit_s=60) == dict.fromkeys(room.names, 20)


def decide_stop(views: dict[str, NodeView], stop: dict[str, Any] | None, **silent_s: float) -> dict[str, Any]:
    """What a lead makes of an agreement to stop."""
    word = Directive(stage=Stage.RUNNING, generation=1, members=tuple(views), stop=stop, lead="a")
    sights = {n: Sight(view=v, silent_s=silent_s.get(n, 0.0)) for n, v in views.items()}
    around = Surroundings(me="a", order=tuple(views), attempt=None, now_s=1.0)
    decided = Lead(Settings(argv=("train",))).decide(word, sights, around).stop
    assert decided is not None
    return decided


def stepping(node: str, **says: Any) -> NodeView:
    common = {"phase": NodePhase.RUNNING, "generation": 1, "ranks": 1, "is_at_work": True, "step": 5, "step_s_p99": 1.0}
    return NodeView(node=node, **{**common, **says})


def decided(word: Directive, views: dict[str, NodeView]) -> Directive:
    around = Surroundings(me="a", order=tuple(views), attempt=None, now_s=1000.0)
    lead = Lead(Settings(argv=("train",)))
    sights = {n: Sight(view=v, silent_s=0.0) for n, v in views.items()}
    for _ in range(20):
        word = lead.decide(word, sights, around)
        around = replace(around, now_s=around.now_s + 1.0)
    return word


OVER = Outcome(cause="killed", fingerprint="x", detail="x", action="restart", reason="again")


def test_node_that_never_heard_of_a_launch_does_not_keep_its_end_waiting() -> None:
    """Its link was out when the launch was called, and it was over when it was back."""
    word = Directive(stage=Stage.OVER, generation=5, members=("a", "b"), lead="a", outcome=OVER)
    ended = End(status=1, cause="killed", fingerprint="x", detail="x")
    views = {n: NodeView(node=n, phase=NodePhase.ENDED, generation=g, end=ended, up_s=1e4) for n, g in (("a", 5), ("b", 4))}
    assert decided(word, views).generation == 6


def test_what_a_node_has_sealed_of_an_earlier_launch_is_no_part_of_a_save_of_this_one() -> None:
    word = Directive(stage=Stage.OVER, generation=5, members=("a", "b"), lead="a", outcome=OVER)
    sealed = (Sealed(step=10, is_verified=True),)
    views = {n: NodeView(node=n, phase=NodePhase.ENDED, generation=g, sealed=sealed, up_s=1e4) for n, g in (("a", 5), ("b", 4))}
    assert decided(word, views).confirmed is None


def test_job_whose_run_belongs_to_a_later_attempt_is_handed_to_a_person() -> None:
    """It could train for ever and never save again."""
    word = Directive(stage=Stage.RUNNING, generation=1, members=("a", "b"), lead="a")
    fenced = Refused(number=3, step=30, code="RT-061", message="attempt 000002-x owns the run", age_s=1.0)
    end = decided(word, {"a": stepping("a"), "b": stepping("b", refused=fenced)})
    assert (end.stage, end.code) == (Stage.FINISHED, 21)
    assert "b: attempt 000002-x owns the run" in end.text


PROPOSED = {"id": 1, "state": "proposed", "step": 9, "since_s": 0.0}


def test_stop_is_committed_when_every_node_has_seen_it() -> None:
    views = {"a": stepping("a", signal=15, stop_seen=1), "b": stepping("b", stop_seen=1)}
    assert decide_stop(views, PROPOSED)["state"] == "committed"


def test_stop_is_not_committed_with_a_node_that_had_seen_it_and_fell_silent() -> None:
    """It waits at the step for a decision that it cannot hear, and will go on."""
    views = {"a": stepping("a", signal=15, stop_seen=1), "b": stepping("b", stop_seen=1)}
    assert decide_stop(views, PROPOSED, b=2.0)["state"] == "proposed"


def test_proposal_has_a_number_that_no_node_has_seen_from_another_lead() -> None:
    views = {"a": stepping("a", signal=15), "b": stepping("b", stop_seen=3)}
    assert decide_stop(views, None)["id"] == 4


def test_finish_reaches_all_nodes_also_when_one_packet_in_five_is_lost() -> None:
    room = training(6, seed=1, for_s=0.0, total_steps=15, weather=Weather(loss_ratio=0.2, delay_s=(0.001, 0.02)))
    assert until_ended(room) == dict.fromkeys(room.names, 0)
    ended = [e.at_s for e in room.all_events("run.ended")]
    assert max(ended) - min(ended) < 3.0


def test_signal_before_the_command_was_started_ends_the_run_everywhere() -> None:
    room = Room(is_on=False)
    room.power_on("n0", "n1")
    room.run_for(5.0)
    room.ask_to_stop("n1", signal.SIGTERM)
    room.run_until(lambda: bool(room.nodes["n0"].exit and room.nodes["n1"].exit), limit_s=10)
    assert {room.nodes[n].exit[0] for n in ("n0", "n1")} == {128 + signal.SIGTERM}


# -- calling ---------------------------------------------------------------------------------------------------------------


def test_whole_room_restarts_together_and_the_launch_counts_up_once() -> None:
    room = training(for_s=10.0)
    made = max(room.steps.values())
    room.cut(*room.names)
    room.run_for(30.0)
    room.power_on(*room.names)
    until_training_again(room, generation=1)
    assert {node.keeper.launches for node in room.nodes.values()} == {1}
    assert made - room.worker("n0").job.restored_step <= room.habits.save_every + 5  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_return_in_shuffled_order_over_90_s_start_together_with_the_last(seed: int) -> None:
    room = training(seed=seed, for_s=12.0)
    room.cut(*room.names)
    room.run_for(20.0)
    order = room.random.sample(room.names, len(room.names))
    for number, name in enumerate(order):
        room.later(30.0 * number, lambda name=name: room.power_on(name))  # type: ignore[misc]
    room.run_for(89.0)
    assert room.steps == {}, "nobody starts without the last"
    until_training_again(room, generation=1, limit_s=10)
    assert {node.keeper.launches for node in room.nodes.values()} == {1}
    assert len(room.leads) == 1


def test_job_goes_on_without_a_node_that_never_returns_where_the_site_says_shrink() -> None:
    room = training(recovery=SHRINK)
    room.cut("n1")
    until_over(room)
    took_s = until_training_again(room)
    assert 30.0 < took_s < 35.0
    assert room.word("n0").members == ("n0", "n2", "n3")
    assert set(room.steps) == {"n0", "n2", "n3"}


def test_node_that_returns_after_the_job_has_shrunk_starts_nothing() -> None:
    room = training(recovery=SHRINK)
    room.cut("n1")
    until_over(room)
    until_training_again(room)
    room.power_on("n1")
    room.run_for(10.0)
    assert room.nodes["n1"].keeper.launches == 0
    assert set(room.steps) == {"n0", "n2", "n3"}


def test_job_stops_and_names_the_missing_node_where_the_site_does_not_say_shrink() -> None:
    room = training(2, recovery=RecoveryConfig(wait_for_nodes_s=30.0))
    room.cut("n1")
    room.run_until(lambda: room.nodes["n0"].exit is not None, limit_s=60)
    code, text = room.nodes["n0"].exit or (0, "")
    assert code == 21
    assert "n1 is not heard from" in text


def test_node_whose_gates_are_shut_is_waited_for() -> None:
    room = Room(is_on=False)
    room.nodes["n2"].missing = ("storage: /data does not answer",)
    room.power_on(*room.names)
    room.run_for(20.0)
    assert room.steps == {}
    assert "n2 waits (storage: /data does not answer)" in room.all_events("muster.waiting")[-1].data["reason"]
    room.nodes["n2"].missing = ()
    room.run_until(lambda: len(room.steps) == 4, limit_s=5)


def test_supervisor_that_was_stopped_while_its_launch_was_given_up_ends_it_when_it_wakes() -> None:
    """Its ranks still wait in the old collective; until they are gone it would never be ready for the next launch."""
    room = training()
    room.freeze("n3", 25.0)
    room.stall("n3", 1e6)
    room.run_until(lambda: room.word("n0").stage is Stage.CALLING, limit_s=40)
    room.training.stalls.clear()
    until_training_again(room, limit_s=30)
    assert causes(room) == ["dark"]


# -- another leads meanwhile -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [Stage.OVER, Stage.CALLING])
def test_lead_that_goes_dark_while_a_launch_is_wound_up_is_succeeded_and_all_start_again(stage: Stage) -> None:
    room = training(for_s=10.0, write_s=1.0)
    room.cut("n3")
    room.run_until(lambda: room.word("n0").stage is stage, limit_s=30)
    room.run_for(0.2)
    room.cut("n0")
    room.run_until(lambda: room.leads == ["n1"], limit_s=10)
    room.run_until(lambda: room.word("n1").stage is Stage.CALLING, limit_s=30)
    room.power_on("n3", "n0")
    until_training_again(room)
    assert room.leads == ["n1"]
    assert causes(room) == ["dark"]


def test_node_that_died_while_all_were_waiting_is_not_called_by_a_new_lead_that_has_not_heard_it() -> None:
    """The new lead gives it time to speak; that is not yet a word."""
    room = Room(is_on=False)
    room.nodes["n2"].missing = ("storage: not yet",)
    room.power_on(*room.names)
    room.run_for(6.0)
    room.cut("n3")
    room.freeze("n0", 1.75)
    room.run_until(lambda: "n1" in room.leads, limit_s=3)
    room.nodes["n2"].missing = ()
    room.run_for(10.0)
    assert {node.keeper.launches for node in room.nodes.values()} == {0}


# -- incidents -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "crash", "hang", "lead"])
def test_incident_is_on_record_exactly_once(fault: str) -> None:
    room = training(for_s=8.0)
    if fault in ("cut", "lead"):
        name = "n2" if fault == "cut" else "n0"
        room.cut(name)
        until_over(room, lead="n1")
        room.power_on(name)
    elif fault == "crash":
        room.crash("n2")
    else:
        room.stall("n1", 65.0)
    until_training_again(room)
    room.run_for(5.0)
    (incident,) = room.all_events("incident")
    assert incident.data["outcome"] == "recovered"
    assert incident.data["restored_step"] <= incident.data["last_step"]
    assert incident.data["lost_steps"] == incident.data["last_step"] - incident.data["restored_step"]


def test_incident_that_lasts_over_two_launches_is_one() -> None:
    room = training(for_s=8.0)
    room.crash("n2")
    room.run_until(lambda: room.word("n0").generation == 2, limit_s=20)
    room.run_for(0.3)
    room.crash("n1", PIPE)
    until_training_again(room, generation=3)
    room.run_for(2.0)
    assert [e.data["cause"] for e in room.all_events("incident")] == ["application"]


def test_incident_of_a_run_that_is_handed_to_a_person_is_on_record() -> None:
    room = training(2, recovery=RecoveryConfig(wait_for_nodes_s=10.0))
    room.cut("n1")
    room.run_until(lambda: room.nodes["n0"].exit is not None, limit_s=60)
    assert [e.data["outcome"] for e in room.all_events("incident")] == ["handed to a person"]


# -- nodes that the configuration does not name ----------------------------------------------------------------------------


def test_nodes_that_find_each_other_by_their_ranks_are_one_room() -> None:
    room = training(is_configured=False)
    assert room.leads == ["n0"]
    assert len({room.word(n).room for n in room.names}) == 1


def test_nodes_that_found_each_other_notice_a_dark_one_and_go_on_when_it_is_back() -> None:
    room = training(is_configured=False, rendezvous_s=900.0, for_s=8.0)
    room.cut("n1")
    assert until_over(room) <= DEAD_S + BEAT_S
    room.power_on("n1")
    room.run_until(lambda: len(room.training.attempts) == 2 and room.step > 1, limit_s=30)
    room.run_for(5.0)
    assert room.leads == ["n0"]
    assert len({room.word(n).room for n in room.names}) == 1
    assert [e.data["nodes"] for e in room.all_events("incident")] == [["n1"]]


@pytest.mark.parametrize("seed", range(5))
def test_nodes_that_found_each_other_all_hear_that_a_launch_is_over_though_packets_are_lost(seed: int) -> None:
    """Whoever missed it would take the others, who are alone again, for dead, and they would wait for it in the rendezvous."""
    room = training(is_configured=False, seed=seed, weather=Weather(loss_ratio=0.3, delay_s=(0.001, 0.004)))
    began_s, generation = room.now_s, room.word("n0").generation
    room.crash("n1")
    room.run_until(lambda: len(room.steps) == 4 and room.word("n0").generation > generation and room.step > 0, limit_s=60)
    assert room.now_s - began_s < 14.0


def test_nodes_that_found_each_other_stop_together() -> None:
    room = training(is_configured=False)
    room.ask_to_stop("n1", signal.SIGTERM)
    assert until_ended(room) == dict.fromkeys(room.names, 20)


# -- many nodes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four are many: beats are further apart, and the lead looks at all of them less often."""
    monkeypatch.setattr("ridethrough.supervisor.talk.MANY", 3)
    monkeypatch.setattr("ridethrough.supervisor.loop.MANY", 3)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["n0", "n2"])
def test_of_many_nodes_a_silent_one_is_suspected_and_given_up_hardly_later(name: str, seed: int) -> None:
    room = training(seed=seed, for_s=8.0)
    room.cut(name)
    assert room.run_until(lambda: bool(room.all_events("peer.suspected")), limit_s=10) <= 2.0
    until_over(room, lead="n1")
    assert room.now_s - room.all_events("peer.suspected")[0].at_s <= DEAD_S
    room.power_on(name)
    until_training_again(room)


@pytest.mark.usefixtures("many")
def test_many_nodes_save_and_finish_though_one_packet_in_ten_is_lost() -> None:
    room = training(seed=3, for_s=0.0, total_steps=60, weather=Weather(loss_ratio=0.1, delay_s=(0.001, 0.02)))
    assert until_ended(room) == dict.fromkeys(room.names, 0)
    assert convictions(room)[0].split()[1] == "launch.ended"
    assert not room.all_events("peer.suspected")

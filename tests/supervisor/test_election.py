"""Whom nodes follow: each decides for itself, and all of them soon decide the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from room_of import BEAT_S, SUSPECT_S, Room, training

from ridethrough.supervisor.directive import Stage
from ridethrough.supervisor.election import Election
from ridethrough.testing.network import Weather

ORDER = ("a", "b", "c", "d")
LISTEN_S = SUSPECT_S + 0.5


def election(me: str, *, following: str | None = "a") -> Election:
    made = Election(me, suspect_s=SUSPECT_S, listen_s=LISTEN_S)
    made.enter(following, now_s=0.0)
    return made


def ages(**known: float) -> Callable[[str], float | None]:
    return known.get


# -- one node's view -----------------------------------------------------------------------------------------------------


def test_node_alone_leads() -> None:
    assert election("a", following=None).lead(("a",), ages(), now_s=0.0) == "a"


def test_first_of_the_order_leads_where_all_are_heard() -> None:
    assert election("c", following=None).lead(ORDER, ages(a=0.1, b=0.1, d=0.1), now_s=0.1) == "a"


def test_fresh_node_listens_before_it_leads_for_others_may_know_more() -> None:
    fresh = election("a", following=None)
    assert fresh.lead(ORDER, ages(), now_s=LISTEN_S - 0.1) is None
    assert fresh.lead(ORDER, ages(), now_s=LISTEN_S + 0.1) == "a"


def test_fresh_node_that_hears_a_lead_follows_it() -> None:
    fresh = election("a", following=None)
    assert fresh.lead(ORDER, ages(), now_s=0.1) is None
    fresh.follow("b", now_s=0.2)
    assert fresh.lead(ORDER, ages(b=0.1), now_s=LISTEN_S + 1) == "b"


def test_lead_is_kept_while_it_is_heard() -> None:
    assert election("b").lead(ORDER, ages(a=SUSPECT_S - 0.1), now_s=100.0) == "a"


def test_next_node_leads_when_the_lead_is_silent() -> None:
    assert election("b").lead(ORDER, ages(a=SUSPECT_S + 0.1), now_s=SUSPECT_S + 0.1) == "b"


def test_each_node_in_between_is_given_time_to_speak_up() -> None:
    third = election("c")
    assert third.lead(ORDER, ages(a=2.0, b=2.0), now_s=2.0) == "b"
    assert third.lead(ORDER, ages(a=3.4, b=3.4), now_s=2.0 + SUSPECT_S - 0.1) == "b"
    assert third.lead(ORDER, ages(a=3.6, b=3.6), now_s=2.0 + SUSPECT_S + 0.1) == "c"


def test_lead_that_was_never_heard_is_given_time_from_when_the_room_was_entered() -> None:
    one = election("b")
    assert one.lead(ORDER, ages(), now_s=SUSPECT_S - 0.1) == "a"
    assert one.lead(ORDER, ages(), now_s=SUSPECT_S + 0.1) == "b"


def test_a_lead_that_left_the_order_is_replaced_by_the_first_living_node() -> None:
    assert election("c", following="gone").lead(ORDER, ages(a=9.0, b=0.1, d=0.1), now_s=0.1) == "b"


def test_of_the_nodes_looked_at_together_the_first_that_is_heard_is_followed() -> None:
    fourth = election("d")
    assert fourth.lead(ORDER, ages(a=2.0, c=0.1), now_s=2.0) == "b"
    assert fourth.watched == ("b", "c")
    assert fourth.lead(ORDER, ages(a=3.4, c=0.1), now_s=2.0 + SUSPECT_S - 0.1) == "b", "b still has time"
    assert fourth.lead(ORDER, ages(a=3.4, b=0.0, c=0.1), now_s=2.0 + SUSPECT_S - 0.05) == "b"
    assert fourth.watched == ("b",)


def test_node_passes_over_those_looked_at_together_that_stay_silent() -> None:
    fourth = election("d")
    fourth.lead(ORDER, ages(a=2.0, c=0.1), now_s=2.0)
    now_s = 2.0 + SUSPECT_S + 0.1
    assert fourth.lead(ORDER, ages(a=3.6, c=0.1), now_s=now_s) == "c"
    assert fourth.watched == ("c",)
    assert fourth.lead(ORDER, ages(a=5.0, c=SUSPECT_S), now_s=now_s + SUSPECT_S) == "c"


def test_what_a_node_said_before_it_was_looked_at_makes_it_no_lead() -> None:
    """It may have gone dark together with the lead."""
    fourth = election("d")
    fourth.lead(ORDER, ages(a=1.6, b=1.0), now_s=2.0)
    fourth.lead(ORDER, ages(a=1.8, b=1.2), now_s=2.2)
    assert fourth.watched == ("b", "c")


def test_more_nodes_are_looked_at_in_each_turn_but_none_behind_this_one() -> None:
    order = tuple(f"n{number}" for number in range(64))
    one = Election("n40", suspect_s=SUSPECT_S, listen_s=LISTEN_S)
    one.enter("n0", now_s=0.0)
    looked_at = []
    for number in range(1, 6):
        one.lead(order, ages(), now_s=number * (SUSPECT_S + 0.1))
        looked_at.append(one.watched)
    assert [len(nodes) for nodes in looked_at] == [2, 4, 8, 16, 10]
    assert [node for nodes in looked_at for node in nodes] == list(order[1:41])
    assert one.lead(order, ages(), now_s=6 * (SUSPECT_S + 0.1)) == "n40"


def test_word_of_a_lead_ends_the_look_around() -> None:
    fourth = election("d")
    fourth.lead(ORDER, ages(a=2.0), now_s=2.0)
    assert fourth.watched == ("b", "c")
    fourth.follow("b", now_s=2.1)
    assert fourth.watched == ("b",)
    fourth.lead(ORDER, ages(b=SUSPECT_S + 0.1), now_s=2.2 + SUSPECT_S)
    fourth.follow("a", now_s=4.0)
    assert fourth.watched == ("a",)


@settings(max_examples=300, deadline=None)
@given(count=st.integers(1, 40), data=st.data())
def test_all_living_nodes_follow_the_first_of_them_whoever_is_dark(count: int, data: st.DataObject) -> None:
    order = tuple(f"n{number}" for number in range(count))
    living = data.draw(st.sets(st.sampled_from(order), min_size=1))
    made = {node: Election(node, suspect_s=SUSPECT_S, listen_s=LISTEN_S) for node in living}
    following = data.draw(st.sampled_from(order))
    for one in made.values():
        one.enter(following, now_s=0.0)
    turns = count.bit_length()  # of the silent one, the next 2, 4, 8, ...
    for step in range(int(turns * (SUSPECT_S + 0.1) / 0.1) + 2):
        now_s = step * 0.1
        for one in made.values():
            one.lead(order, lambda n, now_s=now_s: 0.0 if n in living else now_s, now_s=now_s)  # type: ignore[misc]
    at = order.index(following)
    first = next(node for node in (*order[at:], *order[:at]) if node in living)
    assert {one.following for one in made.values()} == {first}


# -- a room ----------------------------------------------------------------------------------------------------------------


def test_one_node_leads_once_settled_and_all_others_follow_it() -> None:
    assert training(for_s=1.0).leads == ["n0"]


@pytest.mark.parametrize("seed", range(3))
def test_dark_lead_is_followed_by_the_next_within_two_suspicions_and_a_beat(seed: int) -> None:
    room = training(seed=seed)
    room.cut("n0")
    assert room.run_until(lambda: room.leads == ["n1"], limit_s=60) <= 2 * SUSPECT_S + BEAT_S


def test_lead_and_its_successor_go_dark_together_and_the_third_leads() -> None:
    """What the second had said of the first, while both lived, must not send the third back to it for ever."""
    room = training(5)
    room.cut("n0", "n1")
    room.run_until(lambda: room.leads == ["n2"], limit_s=3 * SUSPECT_S + BEAT_S)
    room.run_for(2.0)
    assert room.leads == ["n2"]


def test_half_of_64_nodes_go_dark_at_once_and_the_first_of_the_others_alone_leads_within_ten_seconds() -> None:
    room = Room(64)
    for node in room.nodes.values():
        node.missing = ("storage: /data: does not answer",)  # nobody trains: that would only cost time
    room.run_until(lambda: room.leads == ["n0"] and all(room.word(n).lead == "n0" for n in room.names), limit_s=10)
    dark, living = room.names[:32], room.names[32:]
    room.cut(*dark)
    led = set()

    def is_settled() -> bool:
        led.update(room.leads)
        return all(room.supervisors[n].directive.lead == "n32" for n in living)

    assert room.run_until(is_settled, limit_s=60) <= 6 * SUSPECT_S + 1.0
    room.run_for(2.0)
    assert led | set(room.leads) == {"n32"}


def test_node_that_comes_back_does_not_take_the_lead_from_a_running_one() -> None:
    room = training()
    room.cut("n0")
    room.run_until(lambda: room.word("n1").stage is Stage.CALLING, limit_s=30)
    room.power_on("n0")
    room.run_until(lambda: room.step > 1, limit_s=30)
    room.run_for(10.0)
    assert room.leads == ["n1"]


def test_lead_whose_supervisor_is_restarted_goes_on_leading() -> None:
    room = training()
    room.kill_supervisor("n0")
    room.run_for(5.0)
    assert room.leads == ["n0"]


def test_lead_is_not_changed_by_one_packet_in_five_that_is_lost() -> None:
    room = training(seed=5, for_s=30.0, weather=Weather(loss_ratio=0.2, duplicate_ratio=0.1, delay_s=(0.001, 0.05)))
    assert room.leads == ["n0"]
    assert {room.word(n).lead for n in room.names} == {"n0"}


@pytest.mark.parametrize("seed", range(4))
def test_of_two_leads_after_a_partition_one_word_wins_everywhere(seed: int) -> None:
    room = training(seed=seed)
    room.part(("n0", "n1"), ("n2", "n3"), data=False)
    room.run_for(12.0)
    assert room.leads == ["n0", "n2"]
    room.heal()
    room.run_for(3.0)
    assert len(room.leads) == 1
    assert all(room.said(n) == room.said("n0") for n in room.names)


def test_word_of_a_later_launch_wins_however_much_was_said_elsewhere() -> None:
    """Whoever was cut off and said much of a launch that is over must not stop the one that runs."""
    room = training(for_s=2.0)
    room.part(("n3",), ("n0", "n1", "n2"), data=False)
    room.run_for(2.0)
    loud = room.supervisors["n3"]
    loud.directive = replace(loud.directive, number=10_000)
    room.crash("n0")
    room.run_until(lambda: room.word("n0").stage is Stage.CALLING, limit_s=30)
    room.heal()
    room.run_until(lambda: room.step > 1 and room.word("n0").generation == 2, limit_s=30)
    assert {room.word(n).generation for n in room.names} == {2}

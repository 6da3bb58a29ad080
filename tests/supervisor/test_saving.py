"""When a save is durable, who makes it without whom, and which step is next."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from room_of import DEAD_S, SUSPECT_S, Room, training

from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.format.layout import REPLICATED, rank_part
from ridethrough.snapshot import placement
from ridethrough.supervisor import saving
from ridethrough.supervisor.directive import Directive, Stage
from ridethrough.supervisor.view import NodeView, Refused, Sealed
from ridethrough.types import AttemptRef

NODES = ("a", "b", "c")
HOLDERS = {"a": ("b", "c"), "b": ("c", "a"), "c": ("a", "b")}


def view(node: str, **says: Any) -> NodeView:
    return NodeView(node=node, **{"ranks": 1, "is_whole": True, "step": 100, "step_s_p99": 1.0, **says})


def sealed(step: int, *dark: str, is_verified: bool = False, digest: str = "") -> Sealed:
    return Sealed(step=step, dark=dark, is_verified=is_verified, digests={REPLICATED: digest} if digest else {})


def roster(nodes: tuple[str, ...], ranks_a_node: int = 1) -> Roster:
    where = tuple(node for node in nodes for _ in range(ranks_a_node))
    parts = (RosterPart(name=REPLICATED, holders=tuple(range(len(where)))), *(RosterPart(name=rank_part(r), holders=(r,)) for r in range(len(where))))
    return Roster(run_uid="u", attempt=AttemptRef(seq=1, nonce="a" * 32), nodes=where, parts=parts)


def covers(nodes: tuple[str, ...], dark: Any, ranks_a_node: int = 1, domains: Mapping[str, str] | None = None) -> bool:
    return placement.is_covered(roster(nodes, ranks_a_node), dark, placement.all_replicas(nodes, domains or {}))


def is_covered(dark: Any) -> bool:
    return covers(NODES, dark)


# -- durable is said only where every part is sealed -----------------------------------------------------------------------


def all_sealed(views: Mapping[str, NodeView]) -> tuple[int, bool] | None:
    found = saving.sealed_by_all(NODES, views, is_covered)
    return (found.step, found.is_verified) if found is not None else None


def test_save_is_whole_when_every_node_has_sealed_it() -> None:
    assert all_sealed({n: view(n, sealed=(sealed(10),)) for n in NODES}) == (10, False)


def test_save_is_not_whole_while_one_node_has_not_sealed_it() -> None:
    views = {n: view(n, sealed=(sealed(10),)) for n in NODES}
    assert all_sealed({**views, "b": view("b")}) is None
    assert all_sealed({n: v for n, v in views.items() if n != "b"}) is None


def test_seals_made_for_different_sets_of_dark_nodes_do_not_add_up() -> None:
    assert all_sealed({"a": view("a", sealed=(sealed(10, "c"),)), "b": view("b", sealed=(sealed(10),)), "c": view("c", sealed=(sealed(10),))}) is None


def test_save_without_a_dark_node_is_whole_when_the_others_have_sealed_it() -> None:
    assert all_sealed({n: view(n, sealed=(sealed(10, "c"),)) for n in ("a", "b")}) == (10, False)


def test_save_of_which_a_part_was_nobodys_to_write_is_never_whole() -> None:
    """a and b hold what c has; but of four nodes, one alone does not hold what all three others have."""

    def covered(dark: Any) -> bool:
        return covers(("a", "b", "c", "d"), dark)

    views = {"a": view("a", sealed=(sealed(10, "b", "c", "d"),))}
    assert saving.sealed_by_all(("a", "b", "c", "d"), views, covered) is None


def test_save_without_anybody_is_not_whole() -> None:
    assert saving.sealed_by_all(NODES, {}, lambda dark: True) is None


def test_newest_whole_save_counts() -> None:
    views = {n: view(n, sealed=(sealed(10), sealed(20), sealed(30)) if n != "b" else (sealed(10), sealed(20))) for n in NODES}
    assert all_sealed(views) == (20, False)


def test_save_is_verified_when_every_node_has_read_its_parts_back() -> None:
    views = {n: view(n, sealed=(sealed(10, is_verified=True),)) for n in NODES}
    assert all_sealed(views) == (10, True)
    assert all_sealed({**views, "b": view("b", sealed=(sealed(10),))}) == (10, False)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), count=st.integers(2, 6), ranks=st.integers(1, 2), is_shared=st.booleans())
def test_what_is_called_whole_has_every_part_written_by_somebody(data: st.DataObject, count: int, ranks: int, is_shared: bool) -> None:
    nodes = tuple(f"n{number}" for number in range(count))
    listed = roster(nodes, ranks)
    domains = {node: data.draw(st.sampled_from("xyz")) for node in nodes}
    meant = [(10, frozenset()), *((20, data.draw(st.frozensets(st.sampled_from(nodes), min_size=1))) for _ in range(2))]
    made = {node: [entry for entry in meant if node not in entry[1] or data.draw(st.booleans())] for node in nodes}
    careless = data.draw(st.sampled_from(nodes))
    made[careless] = [entry for entry in made[careless] if data.draw(st.booleans())]
    views = {n: view(n, sealed=tuple(sealed(step, *sorted(dark)) for step, dark in found)) for n, found in made.items()}
    best = saving.sealed_by_all(nodes, views, lambda dark: covers(nodes, dark, ranks, domains))
    if best is None:
        return
    written = {
        part
        for node, found in made.items()
        for step, dark in found
        if step == best[0]
        for part in placement.parts_to_write(listed, node, dark=dark, is_shared=is_shared, domains=domains)
    }
    assert written == listed.part_names


def test_confirmed_never_goes_back_while_the_newer_one_holds() -> None:
    said = Directive(confirmed={"step": 20, "is_verified": True, "dark": []})
    assert saving.confirm(said, NODES, {n: view(n, sealed=(sealed(10),)) for n in NODES}, is_covered) is said


def test_confirmed_save_is_said_to_be_verified_once_it_is() -> None:
    said = Directive(confirmed={"step": 10, "is_verified": False, "dark": []})
    views = {n: view(n, sealed=(sealed(10, is_verified=True),)) for n in NODES}
    assert saving.confirm(said, NODES, views, is_covered).confirmed == {"step": 10, "is_verified": True, "dark": []}


# -- refusals --------------------------------------------------------------------------------------------------------------


def refusal(step: int = 10, number: int = 1, age_s: float = 0.0) -> Refused:
    return Refused(number=number, step=step, code="RT-014", message="disk full", age_s=age_s)


def test_refusal_of_one_node_is_a_refusal_for_all_and_names_it() -> None:
    said = saving.hear_refusal(Directive(announcement=1), {"a": view("a"), "b": view("b", refused=refusal())})
    assert said.refused == {"number": 1, "step": 10, "code": "RT-014", "message": "b: disk full"}


def test_refusal_of_an_earlier_announcement_is_over() -> None:
    said = Directive(announcement=2)
    assert saving.hear_refusal(said, {"a": view("a", refused=refusal())}) is said


def test_refusal_that_others_repeat_is_said_once() -> None:
    views = {"b": view("b", refused=refusal())}
    said = saving.hear_refusal(Directive(announcement=1), views)
    assert saving.hear_refusal(said, {**views, "a": view("a", refused=refusal())}) is said


@pytest.mark.parametrize("announcement", [1, 2, 9])
def test_save_that_reads_back_wrong_is_confirmed_no_more_whatever_was_announced_since(announcement: int) -> None:
    said = Directive(announcement=announcement, confirmed={"step": 10, "is_verified": False, "dark": []})
    heard = saving.hear_refusal(said, {"a": view("a", sealed=(sealed(10),)), "b": view("b", refused=refusal())})
    assert heard.confirmed is None
    assert heard.refused is not None
    assert heard.refused["message"] == "b: disk full"


def test_save_before_the_one_that_read_back_wrong_is_the_confirmed_one_again() -> None:
    said = Directive(announcement=3, confirmed={"step": 20, "is_verified": False, "dark": []})
    views = {n: view(n, sealed=(sealed(10, is_verified=True), sealed(20))) for n in NODES}
    views["b"] = view("b", sealed=(sealed(10, is_verified=True),), refused=refusal(20))
    heard = saving.confirm(saving.hear_refusal(said, views), NODES, views, is_covered)
    assert heard.confirmed == {"step": 10, "is_verified": True, "dark": []}


def test_refusal_before_the_node_has_sealed_its_parts_after_all_takes_nothing_back() -> None:
    said = Directive(announcement=2, confirmed={"step": 10, "is_verified": False, "dark": []})
    assert saving.hear_refusal(said, {"b": view("b", sealed=(sealed(10),), refused=refusal())}) is said


def test_refusal_of_a_node_without_whom_the_save_was_made_takes_nothing_back() -> None:
    said = Directive(announcement=2, confirmed={"step": 10, "is_verified": False, "dark": ["b"]})
    assert saving.hear_refusal(said, {"b": view("b", refused=refusal())}) is said


# -- what is announced -----------------------------------------------------------------------------------------------------


def announce(said: Directive, views: Mapping[str, NodeView], **changes: Any) -> Directive:
    facts: dict[str, Any] = {"durable_step": -1, "save_interval_steps": 10, "restored_step": 0, "lead_s": 1.0, "is_whole": True}
    return saving.announce(said, views, **{**facts, **changes})


def test_nothing_is_announced_while_a_save_is_under_way() -> None:
    said = Directive(announced=10, announcement=1)
    assert announce(said, {"a": view("a")}) is said


def test_next_save_is_announced_when_the_last_one_is_durable_far_enough_ahead() -> None:
    said = announce(Directive(announced=10, announcement=1), {"a": view("a", step=19)}, durable_step=10)
    assert (said.announced, said.announcement) == (30, 2), "step 20 could not be heard in time"


def test_next_save_is_announced_when_the_last_one_was_refused() -> None:
    said = announce(Directive(announced=10, announcement=1), {"a": view("a", step=12, refused=refusal())})
    assert (said.announced, said.announcement) == (20, 2)


def test_next_save_is_announced_when_the_lead_has_given_the_last_one_up() -> None:
    said = saving.refuse(Directive(announced=10, announcement=1), 10, "b did not seal")
    assert announce(said, {"a": view("a", step=12)}).announced == 20


def test_next_save_is_announced_without_the_nodes_that_are_dark() -> None:
    said = announce(Directive(announced=10, announcement=1, dark=("b",)), {"a": view("a", step=12)}, durable_step=10, dark=("c",))
    assert said.dark == ("c",)


def test_step_that_every_node_waits_for_is_announced_at_once() -> None:
    said = announce(Directive(announced=10, announcement=1), {n: view(n, wanted=7) for n in NODES})
    assert (said.announced, said.announcement) == (7, 2)


def test_step_that_one_node_does_not_wait_for_is_not_announced() -> None:
    said = Directive(announced=10, announcement=1)
    assert announce(said, {"a": view("a", wanted=7), "b": view("b")}) is said


def test_step_that_was_refused_and_is_asked_for_again_is_announced_anew() -> None:
    said = Directive(announced=7, announcement=1)
    asked = {n: view(n, wanted=7, wanted_age_s=1.0, refused=refusal(7, age_s=2.0)) for n in NODES}
    assert announce(said, asked).announcement == 2
    still = {n: view(n, wanted=7, wanted_age_s=3.0, refused=refusal(7, age_s=2.0)) for n in NODES}
    assert announce(said, still) is said


# -- what memory has -------------------------------------------------------------------------------------------------------


def test_step_is_whole_in_memory_where_the_dark_nodes_parts_are_held_by_a_living_node() -> None:
    living = {"a": view("a", posted=(8, 9), replicas={"c": (7, 8)}), "b": view("b", posted=(8, 9), replicas={"c": (8, 9)})}
    assert saving.complete_steps(living, ("c",), HOLDERS.__getitem__, is_shared=True) == {8}


def test_step_is_whole_in_memory_only_if_whoever_is_to_write_the_dark_nodes_parts_has_them() -> None:
    """On a shared tier that is the first living holder, on tiers of their own every one: what another has is never written."""
    living = {"a": view("a", posted=(8, 9), replicas={"c": (8,)}), "b": view("b", posted=(8, 9), replicas={"c": (8, 9)})}
    first, second = HOLDERS["c"]
    assert (first, second) == ("a", "b")
    assert saving.complete_steps(living, ("c",), HOLDERS.__getitem__, is_shared=True) == {8}
    assert saving.complete_steps(living, ("c",), HOLDERS.__getitem__, is_shared=False) == {8}
    turned = {"a": view("a", posted=(8, 9), replicas={"c": (8, 9)}), "b": view("b", posted=(8, 9), replicas={"c": (8,)})}
    assert saving.complete_steps(turned, ("c",), HOLDERS.__getitem__, is_shared=True) == {8, 9}
    assert saving.complete_steps(turned, ("c",), HOLDERS.__getitem__, is_shared=False) == {8}


def test_step_whose_dark_part_nobody_holds_is_not_whole_in_memory() -> None:
    living = {"a": view("a", posted=(8, 9), replicas={"c": (7,)}), "b": view("b", posted=(8, 9))}
    assert saving.complete_steps(living, ("c",), HOLDERS.__getitem__, is_shared=True) == set()


def test_what_a_dark_node_holds_of_another_dark_node_does_not_count() -> None:
    living = {"a": view("a", posted=(8,), replicas={"b": (8,)})}
    assert saving.complete_steps(living, ("b", "c"), HOLDERS.__getitem__, is_shared=True) == set()


def test_memory_of_nobody_has_nothing() -> None:
    assert saving.complete_steps({}, (), HOLDERS.__getitem__, is_shared=True) == set()


def test_step_that_survives_any_one_loss_is_the_worst_of_them() -> None:
    living = {
        "a": view("a", posted=(8, 9), replicas={"b": (8, 9), "c": (8,)}),
        "b": view("b", posted=(8, 9), replicas={"a": (8, 9), "c": (8,)}),
        "c": view("c", posted=(8, 9), replicas={"a": (8, 9), "b": (8, 9)}),
    }
    assert saving.surviving_step(living, [["a"]], HOLDERS.__getitem__, is_shared=True) == 9
    assert saving.surviving_step(living, [[n] for n in NODES], HOLDERS.__getitem__, is_shared=True) == 8
    assert saving.surviving_step(living, [["a", "b"]], HOLDERS.__getitem__, is_shared=True) == -1 + 10, "c holds both"
    assert saving.surviving_step(living, [NODES], HOLDERS.__getitem__, is_shared=True) == -1


# -- silent divergence -----------------------------------------------------------------------------------------------------


def test_node_that_holds_a_part_differently_is_named() -> None:
    views = {n: view(n, sealed=(sealed(10, digest="bad" if n == "b" else "good"),)) for n in NODES}
    assert saving.divergence(NODES, views, 10) == (REPLICATED, ("b",))


def test_nodes_of_which_nobody_can_say_who_is_right_are_all_named() -> None:
    views = {n: view(n, sealed=(sealed(10, digest=n),)) for n in ("a", "b")}
    assert saving.divergence(NODES, views, 10) == (REPLICATED, ("a", "b"))


def test_nodes_that_hold_the_same_have_not_diverged() -> None:
    assert saving.divergence(NODES, {n: view(n, sealed=(sealed(10, digest="good"),)) for n in NODES}, 10) is None


# -- a room ----------------------------------------------------------------------------------------------------------------


def until_durable(room: Room, step: int, limit_s: float = 60.0) -> float:
    return room.run_until(lambda: room.confirmed_step() >= step, limit_s=limit_s)


@pytest.mark.parametrize("is_shared", [True, False])
def test_saves_of_a_room_become_durable_one_after_the_other(is_shared: bool) -> None:
    room = training(is_shared=is_shared, for_s=25.0)
    assert room.confirmed_step() >= 75
    assert {room.nodes[n].persister.says["durable"]["step"] for n in room.names} == {room.confirmed_step()}


def test_everybody_knows_within_two_seconds_that_a_save_is_durable() -> None:
    room = training(write_s=0.5)
    until_sealed = room.run_until(lambda: all(any(s["step"] == 50 for s in n.persister.says["sealed"]) for n in room.nodes.values()), limit_s=60)
    assert until_sealed > 0
    took_s = room.run_until(lambda: all((n.persister.says["durable"] or {}).get("step") == 50 for n in room.nodes.values()), limit_s=10)
    assert took_s <= 2.0


def test_disk_that_refuses_on_one_node_fails_the_save_everywhere_and_the_next_one_is_made() -> None:
    room = training(for_s=2.0)
    room.fail_save("n2")
    room.run_until(lambda: all(n.persister.says["failed"] for n in room.nodes.values()), limit_s=20)
    assert {n.persister.says["failed"]["step"] for n in room.nodes.values()} == {25}
    assert "n2: no space left" in room.nodes["n0"].persister.says["failed"]["message"]
    until_durable(room, 50, limit_s=20)


def test_node_that_falls_silent_in_mid_save_has_its_parts_written_by_others() -> None:
    room = training(write_s=3.0, for_s=0.0)
    room.run_until(lambda: room.step >= 25, limit_s=20)
    room.run_for(0.3)
    room.silence("n2")
    room.part(("n2",), ("n0", "n1", "n3"))  # its ranks are gone with it: memory still has the step
    room.run_until(lambda: bool(room.all_events("save.taken_over")), limit_s=5)
    until_durable(room, 25, limit_s=15)


def test_save_that_memory_no_longer_has_is_given_up_and_the_next_is_made_without_the_silent_node() -> None:
    """Only its management network is down: the job goes on and soon overwrites the snapshot."""
    room = training(for_s=0.0, write_s=0.5)
    room.run_until(lambda: room.step >= 25, limit_s=20)
    room.hanging.add("n2")
    room.silence("n2")
    until_durable(room, 50, limit_s=20)
    assert "n2 did not seal" in room.nodes["n0"].persister.says["failed"]["message"]
    assert room.step < 90


def test_saves_go_on_without_a_silent_node_also_where_memory_has_a_step_for_less_than_a_beat() -> None:
    room = training(for_s=1.0, round_s=0.04, step_s=0.04, save_every=50)
    room.silence("n2")
    room.run_for(3.0)
    for _ in range(2):
        until_durable(room, room.step, limit_s=12.0)


def test_first_save_of_all_is_taken_over_too() -> None:
    room = training(for_s=0.0)
    room.run_until(lambda: room.step >= 20, limit_s=20)
    room.silence("n2")
    until_durable(room, 25, limit_s=10)


@pytest.mark.parametrize("step_s", [0.05, 0.2])
def test_saves_go_on_without_a_node_that_hangs_in_a_dead_mount_once_it_was_too_slow_for_one(step_s: float) -> None:
    room = training(for_s=0.0, round_s=0.1, step_s=step_s, save_every=100)
    room.hanging.add("n2")
    interval_s = 100 * (step_s + 0.06)
    until_durable(room, 1, limit_s=120 + 4 * interval_s)
    until_durable(room, room.step, limit_s=2 * interval_s)
    room.hanging.clear()
    room.run_for(2 * interval_s)
    until_durable(room, room.step, limit_s=2 * interval_s)
    assert room.word("n0").dark == (), "it takes part again"


def test_divergence_of_one_node_is_on_record_once_for_each_save() -> None:
    room = training(for_s=0.0)
    room.diverged.add("n2")
    until_durable(room, 50)
    room.run_for(1.0)
    assert [(e.data["step"], e.data["nodes"]) for e in room.all_events("replicas.diverged")] == [(25, ["n2"]), (50, ["n2"])]


def test_saves_go_on_after_two_leads_have_announced_apart_from_each_other() -> None:
    """Of two words one wins, with announcements numbered as the other half had not counted."""
    room = training(for_s=3.0)
    room.part(("n0", "n1"), ("n2", "n3"), data=False)
    room.run_for(3.0)
    behind = room.supervisors["n2"]
    behind.directive = replace(behind.directive, number=behind.directive.number + 100)
    for number in range(3):
        ahead = room.supervisors["n0"]
        ahead.directive = replace(ahead.directive, announcement=ahead.directive.announcement + 10 + number)
        room.run_for(8.0)
    room.heal()
    room.run_for(2.0)
    assert room.word("n0").announcement < 20
    until_durable(room, room.step, limit_s=20)


# -- flush -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_shared", [True, False])
def test_flush_makes_the_newest_step_durable_that_the_survivors_have_with_replicas(seed: int, is_shared: bool) -> None:
    room = training(seed=seed, is_shared=is_shared, ranks=2, for_s=8.0)
    room.cut("n2")
    made = max(room.steps.values())
    room.run_until(lambda: room.word("n0").stage is Stage.CALLING, limit_s=30)
    assert made - 2 <= room.confirmed_step() <= made + 1


def test_flush_is_made_when_a_node_is_suspected_and_not_only_when_it_is_given_up() -> None:
    room = training(for_s=3.0)
    room.cut("n2")
    made = max(room.steps.values())
    assert until_durable(room, made - 1, limit_s=30) <= SUSPECT_S + 3.0


def test_dark_nodes_of_which_nobody_holds_all_parts_leave_the_last_save() -> None:
    room = training(4, for_s=8.0)
    room.run_until(lambda: room.confirmed_step() == 50, limit_s=20)
    room.run_for(2.0)
    room.cut("n1", "n2", "n3")
    room.run_for(DEAD_S + 10)
    assert room.confirmed_step() == 50


def test_lead_that_goes_dark_in_the_flush_is_succeeded_by_one_that_completes_it() -> None:
    room = training(5, seed=2, for_s=8.0, write_s=2.0)
    room.cut("n4")
    room.run_until(lambda: room.word("n0").flush is not None, limit_s=5)
    room.run_for(0.5)
    room.cut("n0")
    made = max(room.steps.values())
    until_durable(room, made - 1, limit_s=40)


def test_flush_is_omitted_where_the_site_rolls_back() -> None:
    from ridethrough.config import RecoveryConfig

    room = training(for_s=8.0, recovery=RecoveryConfig(resume="roll-back"))
    room.cut("n2")
    room.run_until(lambda: room.word("n0").stage is Stage.CALLING, limit_s=30)
    assert room.word("n0").flush is None
    assert room.confirmed_step() == 25


def test_placement_covers_one_dark_node_of_any_three_and_never_all_nodes() -> None:
    for count in range(3, 7):
        nodes = tuple("abcdef"[:count])
        for dark in itertools.combinations(nodes, 1):
            assert covers(nodes, dark)
        assert not covers(nodes, nodes)

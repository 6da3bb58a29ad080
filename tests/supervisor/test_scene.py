"""What a lead concludes from what it sees: who lives, who is silent, who is given up, whose end is the root."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.config import Config, PeersConfig
from ridethrough.supervisor.directive import Directive, Stage
from ridethrough.supervisor.scene import Scene, Sight, Surroundings
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.view import End, NodePhase, NodeView

NODES = ("a", "b", "c")
DEAD_S = 15.0
SETTINGS = Settings(argv=("train",), config=Config(peers=PeersConfig(suspect_s=1.5, dead_s=DEAD_S)))


def view(node: str, **says: Any) -> NodeView:
    """Of a node that trains, in launch 1."""
    stepping = {"is_stepping": True, "is_inside": True, "is_at_work": True, "has_stepped": True, "step_s_p99": 0.2, "step": 50, "ranks": 1}
    return NodeView(node=node, **{"phase": NodePhase.RUNNING, "generation": 1, **stepping, **says})


def scene(**sights: Sight | None) -> Scene:
    directive = Directive(stage=Stage.RUNNING, generation=1, members=NODES)
    seen = {n: Sight(view=view(n), silent_s=0.1) for n in NODES} | {n: s for n, s in sights.items() if s is not None}
    for name in [n for n, s in sights.items() if s is None]:
        del seen[name]
    return Scene(directive=directive, sights=seen, around=Surroundings(me="a", order=NODES, attempt="x"), settings=SETTINGS)


def sight(node: str, silent_s: float = 0.1, *, has_restarted: bool = False, **says: Any) -> Sight:
    return Sight(view=view(node, **says), silent_s=silent_s, has_restarted=has_restarted)


def stalled(silent_s: float, **of_c: Any) -> Scene:
    """No step for 20 s, and nothing heard of c."""
    return scene(a=sight("a", since_step_s=20.0), b=sight("b", since_step_s=20.0), c=sight("c", silent_s, **of_c))


# -- who is there ----------------------------------------------------------------------------------------------------------


def test_node_that_is_heard_lives() -> None:
    assert set(scene().living) == set(NODES)


def test_node_that_is_silent_for_longer_than_suspicion_takes_is_silent_and_dark() -> None:
    found = scene(c=sight("c", 1.6))
    assert (set(found.living), found.silent, found.dark) == ({"a", "b"}, ("c",), ("c",))


def test_node_that_has_restarted_is_dark_although_it_is_heard() -> None:
    assert scene(c=sight("c", has_restarted=True)).silent == ("c",)


def test_member_that_was_never_heard_is_dark_but_not_silent_before_it_should_have_been() -> None:
    found = scene(c=Sight(view=None, silent_s=1.0))
    assert (found.silent, found.dark) == ((), ("c",))
    assert scene(c=None).silent == ()


def test_member_that_was_never_heard_is_silent_when_it_should_have_been() -> None:
    assert scene(c=Sight(view=None, silent_s=1.6)).silent == ("c",)


# -- who is given up -------------------------------------------------------------------------------------------------------


def test_silent_node_is_given_up_when_steps_are_overdue_and_it_is_silent_for_long() -> None:
    assert stalled(DEAD_S + 0.1).lost() == ("c",)


def test_silent_node_is_not_given_up_before_that() -> None:
    assert stalled(DEAD_S - 0.1).lost() == ()


def test_silent_node_is_never_given_up_while_steps_are_made() -> None:
    assert scene(c=sight("c", 3600.0)).lost() == ()


@pytest.mark.parametrize("phase", [{"is_stepping": False}, {"is_inside": False}])
def test_silent_node_that_was_not_expected_to_step_is_given_up_after_two_minutes_of_silence_only(phase: dict[str, bool]) -> None:
    for silent_s, lost in ((60.0, ()), (125.0, ("c",))):
        found = scene(a=sight("a", since_step_s=130.0), b=sight("b", since_step_s=130.0), c=sight("c", silent_s, **phase))
        assert found.lost() == lost


def test_nodes_that_wait_for_their_first_step_are_given_two_minutes() -> None:
    waiting = {"is_stepping": False, "is_inside": False, "has_stepped": False, "since_step_s": 60.0}
    found = scene(a=sight("a", **waiting), b=sight("b", **waiting), c=sight("c", 60.0, **waiting))
    assert found.lost() == ()


def test_node_silent_since_before_its_first_step_is_given_up_soon_if_the_others_have_made_theirs() -> None:
    assert stalled(DEAD_S + 0.1, is_stepping=False, is_inside=False, has_stepped=False).lost() == ("c",)


def test_node_that_has_restarted_is_given_up_at_once_when_steps_are_overdue() -> None:
    assert stalled(0.0, has_restarted=True).lost() == ("c",)


def test_launch_of_which_nobody_has_anything_any_more_is_given_up() -> None:
    """All its nodes have restarted, or are silent for long; somebody who has no part in it still holds the word of it."""
    gone = {n: sight(n, has_restarted=True) for n in NODES}
    assert scene(**gone).lost() == NODES
    assert scene(**{**gone, "c": sight("c", DEAD_S + 0.1)}).lost() == NODES


def test_launch_of_which_only_silence_is_known_is_not_given_up_by_whoever_has_no_part_in_it() -> None:
    assert scene(**{n: sight(n, DEAD_S + 0.1) for n in NODES}).lost() == ()
    assert scene(a=sight("a", has_restarted=True), b=sight("b", has_restarted=True), c=sight("c", 2.0)).lost() == ()


def test_node_that_has_restarted_is_not_given_up_while_steps_are_made() -> None:
    """One step more may be on its way; it is overdue in seconds."""
    assert scene(c=sight("c", has_restarted=True)).lost() == ()


def test_whoever_is_silent_too_goes_with_the_one_that_is_given_up() -> None:
    found = scene(a=sight("a", since_step_s=20.0), b=sight("b", 2.0), c=sight("c", DEAD_S + 0.1))
    assert found.lost() == ("b", "c")


def test_nobody_is_given_up_by_a_lead_whose_own_launch_has_ended() -> None:
    ended = {"phase": NodePhase.ENDED, "end": End(status=1, cause="cascade", fingerprint="", detail="")}
    found = scene(a=sight("a", **ended, since_step_s=20.0), b=sight("b", DEAD_S + 1), c=sight("c", DEAD_S + 1))
    assert found.lost() == ()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_nobody_is_given_up_while_a_living_node_steps(data: st.DataObject) -> None:
    sights = {}
    for node in NODES:
        says = {name: data.draw(st.booleans()) for name in ("is_stepping", "is_inside", "has_stepped")}
        silent_s = data.draw(st.floats(0, 10_000)) if node != "a" else 0.0
        since_s = data.draw(st.floats(0, 1.5)) if node == "a" else data.draw(st.floats(0, 10_000))
        restarted = node != "a" and data.draw(st.booleans()) and data.draw(st.booleans())
        sights[node] = sight(node, silent_s, has_restarted=restarted, since_step_s=since_s, **says)
    found = scene(**sights)
    if found.pace.is_stepping:
        assert found.lost() == ()


# -- pace ------------------------------------------------------------------------------------------------------------------


def test_job_is_as_late_as_the_node_that_stepped_last() -> None:
    assert scene(a=sight("a", since_step_s=5.0), b=sight("b", since_step_s=1.0), c=sight("c", since_step_s=9.0)).pace.overdue_s == 1.0


def test_job_steps_only_if_every_node_does() -> None:
    assert not scene(b=sight("b", is_stepping=False)).pace.is_stepping


def test_silent_node_that_was_between_epochs_may_still_be() -> None:
    assert not scene(c=sight("c", 60.0, is_inside=False)).pace.is_inside


# -- ends ------------------------------------------------------------------------------------------------------------------


def ended(node: str, cause: str, **more: Any) -> Sight:
    return sight(node, phase=NodePhase.ENDED, end=End(status=1, cause=cause, fingerprint=cause, detail=cause), **more)


@pytest.mark.parametrize(
    ("causes", "root"),
    [
        (("cascade", "application", "cascade"), "b"),
        (("unknown", "cascade", "killed"), "c"),
        (("finished", "finished", "application"), "c"),
        (("application", "ridethrough", "killed"), "b"),
        (("finished", "stopped", "finished"), "b"),
    ],
)
def test_root_is_the_end_that_explains_the_others(causes: tuple[str, ...], root: str) -> None:
    found = scene(**{node: ended(node, cause) for node, cause in zip(NODES, causes, strict=True)})
    assert found.root().node == root


def test_end_of_an_earlier_launch_is_no_end_of_this_one() -> None:
    found = scene(b=ended("b", "application", generation=0))
    assert (set(found.ends), found.at_work) == (set(), ["a", "b", "c"])


def test_symptoms_alone_are_told_from_a_cause() -> None:
    assert scene(a=ended("a", "cascade"), b=ended("b", "unknown")).has_only_symptoms
    assert not scene(a=ended("a", "cascade"), b=ended("b", "application")).has_only_symptoms


def test_last_step_counts_what_silent_nodes_had_said() -> None:
    assert scene(c=sight("c", 60.0, step=51)).last_step == 51


def test_last_step_of_a_launch_in_which_nobody_got_to_its_ranks_is_its_start() -> None:
    assert scene(**{n: sight(n, ranks=0) for n in NODES}).last_step == -1


def test_signal_to_any_node_counts_also_if_it_is_no_member() -> None:
    found = scene()
    outside = replace(found, sights={**found.sights, "d": sight("d", signal=15)})
    assert outside.signal == 15


def test_durable_step_of_several_nodes_is_what_was_confirmed_and_not_what_one_says() -> None:
    found = scene(a=sight("a", durable_step=40))
    assert found.durable_step == -1
    assert replace(found, directive=replace(found.directive, confirmed={"step": 30, "is_verified": False})).durable_step == 30

"""What a node says of itself: on its way nothing is lost, and nothing that was not said comes out."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.snapshot.ranks import RankPhase, RankState
from ridethrough.supervisor.view import End, NodePhase, NodeView, Refused, Sealed, of_ranks

NAME = st.text("abcdefghij-0123456789.", min_size=1, max_size=12)
STEP = st.integers(-1, 10**7)
AGE_S = st.floats(0, 1e6).map(lambda value: round(value, 3))
STEPS = st.lists(STEP, max_size=4).map(tuple)
SEALED = st.builds(
    Sealed, step=STEP, dark=st.lists(NAME, max_size=3).map(tuple), is_verified=st.booleans(), digests=st.dictionaries(NAME, NAME, max_size=2)
)
REFUSED = st.builds(Refused, number=STEP, step=STEP, code=NAME, message=st.text(max_size=20), age_s=st.floats(0, 1e6))
END = st.builds(
    End, status=st.integers(-64, 255), cause=NAME, fingerprint=NAME, detail=st.text(max_size=20), exit_code=st.integers(0, 255),
    is_retryable=st.booleans(), output=st.text(max_size=30),
)  # fmt: skip
FIELDS: dict[str, Any] = dict( node=NAME, up_s=AGE_S, phase=st.sampled_from(NodePhase), generation=st.integers(0, 1000), attempt=st.none() | NAME,
    is_ready=st.booleans(), missing=st.lists(st.text(max_size=20), max_size=2).map(tuple), signal=st.integers(0, 64), ranks=st.integers(0, 8),
    is_whole=st.booleans(), is_at_work=st.booleans(), is_stepping=st.booleans(), is_inside=st.booleans(), is_stopped=st.booleans(),
    is_unsaved=st.booleans(), step=STEP, restored_step=STEP, since_step_s=AGE_S, step_s_p99=AGE_S, posted=STEPS,
    replicas=st.dictionaries(NAME, STEPS, max_size=2), wanted=st.none() | STEP, wanted_age_s=AGE_S, stop_seen=st.integers(0, 9),
    stop_was_late=st.booleans(), sealed=st.lists(SEALED, max_size=4).map(tuple), refused=st.none() | REFUSED, durable_step=STEP, saved_step=STEP,
    is_saving=st.booleans(), flushed=st.integers(0, 99), dead_ranks=STEPS, has_stepped=st.booleans(), stuck=st.text(max_size=9), end=st.none() | END,
)  # fmt: skip
VIEWS = st.builds(NodeView, **FIELDS)


def carried(said: dict[str, Any]) -> Any:
    return json.loads(json.dumps(said))


@settings(max_examples=300, deadline=None)
@given(VIEWS)
def test_view_comes_out_as_it_went_in(view: NodeView) -> None:
    assert NodeView.decode(carried(view.encode())) == view


def test_every_field_is_drawn_above() -> None:
    """A field that is added and gets lost on its way would not be noticed."""
    assert set(FIELDS) == set(NodeView._fields)


def test_save_without_digests_is_carried_too() -> None:
    view = NodeView(node="n0", sealed=(Sealed(step=3),))
    assert NodeView.decode(carried(view.encode())) == view


def test_what_has_its_default_is_not_said() -> None:
    assert NodeView(node="n0").encode() == {"node": "n0"}


def test_default_is_said_where_it_is_not_the_default_any_more() -> None:
    assert NodeView(node="n0", step=0).encode() == {"node": "n0", "step": 0}


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert NodeView.decode({"node": "n0", "step": 3, "mood": "fine"}) == NodeView(node="n0", step=3)


def test_view_without_a_node_is_none() -> None:
    with pytest.raises(TypeError):
        NodeView.decode({"step": 3})


LEAVES = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NodeView._fields), JSON, max_size=6))
def test_nonsense_is_refused_with_one_of_the_errors_that_are_expected(value: dict[str, Any]) -> None:
    with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
        NodeView.decode({"node": "n0", **value})


# -- from ranks ------------------------------------------------------------------------------------------------------------


def rank(number: int = 0, **says: Any) -> RankState:
    start = RankState(
        rank=number, pid=1, process_started=1, world_size=2, run_dir="/r", phase=RankPhase.TRAINING, step=5, step_at_s=90.0,
        times_s={"first_step": 50.0}, posted_steps=(4, 5),
    )  # fmt: skip
    return replace(start, **says)


def seen(*ranks: RankState, local_world: int | None = None) -> dict[str, Any]:
    return of_ranks(ranks, local_world=len(ranks) if local_world is None else local_world, now_s=100.0)


def test_node_has_posted_what_all_its_ranks_have_posted() -> None:
    assert seen(rank(0, posted_steps=(3, 4, 5)), rank(1, posted_steps=(4, 5, 6)))["posted"] == (4, 5)


def test_node_of_which_a_rank_is_missing_has_posted_nothing() -> None:
    found = seen(rank(0), local_world=2)
    assert (found["is_whole"], found["posted"], found["has_stepped"]) == (False, (), False)


def test_node_waits_for_a_step_if_all_its_ranks_do() -> None:
    assert seen(rank(0, wanted_save=5), rank(1, wanted_save=5))["wanted"] == 5
    assert seen(rank(0, wanted_save=5), rank(1))["wanted"] is None
    assert seen(rank(0, wanted_save=5), local_world=2)["wanted"] is None


def test_node_steps_when_every_rank_has_made_its_first_one_and_another_is_expected() -> None:
    assert seen(rank(0), rank(1))["is_stepping"]
    assert not seen(rank(0), rank(1, times_s={}))["is_stepping"]
    assert not seen(rank(0), rank(1, phase=RankPhase.SAVING))["is_stepping"]


def test_node_between_epochs_is_not_inside() -> None:
    assert not seen(rank(0), rank(1, phase=RankPhase.OUTSIDE))["is_inside"]
    assert seen(rank(0), rank(1, phase=RankPhase.OUTSIDE))["is_stepping"]


def test_node_is_as_late_as_its_rank_that_stepped_last() -> None:
    assert seen(rank(0, step_at_s=60.0), rank(1, step_at_s=97.0))["since_step_s"] == 3.0


def test_node_has_seen_a_proposal_when_its_last_rank_has() -> None:
    assert seen(rank(0, stop_seen=2), rank(1, stop_seen=1))["stop_seen"] == 1
    assert seen(rank(0, stop_was_late=True), rank(1))["stop_was_late"]


def test_node_without_ranks_says_nothing_of_them() -> None:
    assert seen(local_world=2) == {}


@pytest.mark.parametrize("said", [{"step": 10**400}, {"posted": [1, 10**400]}, {"wanted": 1 << 63}, {"replicas": {"b": [-(10**400)]}}])
def test_number_that_no_time_can_be_compared_with_is_refused(said: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        NodeView.decode({"node": "n0", **said})

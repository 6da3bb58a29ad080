"""The comparison itself: every verdict under every policy, whatever a seal says."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.config import ResumeConfig
from ridethrough.errors import ResumeRefused
from ridethrough.train import guard
from ridethrough.train.guard import FIELDS, Action, Finding, Verdict

META: dict[str, Any] = {
    "git_commit": "3f2a9c1d0b7e4f5a6c8d9e0f1a2b3c4d5e6f7a8b",
    "git_dirty": False,
    "start_command": "python train.py --lr 0.1",
    "data_version": "v1",
    "dependencies": {"torch": "2.13.0+cpu", "numpy": "2.4.6", "python": "3.11.9"},
    "config_hash": "9b" * 32,
    "batch_size": {"data": 4},
}
POLICIES = ("ignore", "warn", "refuse")
values = st.none() | st.sampled_from(["a", "b"]) | st.text(min_size=1)
findings = st.builds(Finding, field=st.sampled_from(FIELDS), item=st.just(""), saved=values, here=values, policy=st.sampled_from(POLICIES))
anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))


def compared(world_size: int = 2, policies: ResumeConfig | None = None, **changes: Any) -> tuple[Finding, ...]:
    """META as the checkpoint's, with these changes here."""
    saved, here = guard.facts(META, world_size=2), guard.facts({**META, **changes}, world_size=world_size)
    return guard.compare(saved, here, policies or ResumeConfig())


def news(found: tuple[Finding, ...]) -> list[str]:
    return [str(finding) for finding in found if finding.action is not Action.NOTHING]


@pytest.mark.parametrize(
    ("saved", "here", "verdict", "actions"),
    [
        ("a", "a", "same", ("nothing", "nothing", "nothing")),
        ("a", "b", "differs", ("nothing", "warn", "refuse")),
        ("a", None, "unknown", ("nothing", "warn", "warn")),
        (None, "a", "unknown", ("nothing", "warn", "warn")),
        (None, None, "unknown", ("nothing", "nothing", "nothing")),
    ],
)
def test_every_verdict_under_every_policy(saved: str | None, here: str | None, verdict: str, actions: tuple[str, ...]) -> None:
    found = [Finding(field="data", item="", saved=saved, here=here, policy=policy) for policy in POLICIES]
    assert {finding.verdict for finding in found} == {verdict}
    assert tuple(finding.action for finding in found) == actions


@given(st.lists(findings))
def test_a_start_is_refused_exactly_where_a_known_difference_meets_refuse_and_then_all_of_them_are_named(found: list[Finding]) -> None:
    refused = [f for f in found if f.policy == "refuse" and None not in (f.saved, f.here) and f.saved != f.here]
    if refused:
        with pytest.raises(ResumeRefused) as caught:
            guard.admit(found, path="runs/x", step=7)
        assert all(f"RIDETHROUGH_RESUME_{f.field.upper()}=warn" in str(caught.value) for f in refused)
        assert all(str(f) in str(caught.value) for f in refused)
        return
    warned = guard.admit(found, path="runs/x", step=7)
    assert all(f.policy != "ignore" and f.saved != f.here for f in warned)
    assert [f for f in found if f.policy == "warn" and f.saved != f.here] == [f for f in warned if f.policy == "warn"]


@given(st.dictionaries(st.sampled_from([*META, "git_diff"]), anything))
def test_whatever_a_seal_says_is_compared_and_what_makes_no_sense_is_unknown(meta: dict[str, Any]) -> None:
    found = guard.compare(guard.facts(meta, world_size=None), guard.facts(META, world_size=1), ResumeConfig())
    assert {finding.field for finding in found} == set(FIELDS)
    assert json.loads(json.dumps([finding.as_json() for finding in found])) == [finding.as_json() for finding in found]
    assert all(finding.saved is None or isinstance(finding.saved, str) for finding in found)
    assert all(len(str(finding)) < 400 for finding in found if len(finding.item) < 200)


@given(st.dictionaries(st.sampled_from([*META, "git_diff"]), anything))
def test_a_process_that_is_what_made_the_checkpoint_is_no_news(meta: dict[str, Any]) -> None:
    side = guard.facts(meta, world_size=2)
    assert news(guard.compare(side, side, ResumeConfig(**dict.fromkeys(FIELDS, "refuse")))) == []


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_values_that_differ_are_never_shown_alike(saved: str, here: str) -> None:
    shown = Finding(field="command", item="", saved=saved, here=here, policy="warn").shown
    assert (shown[0] == shown[1]) == (saved == here)


def test_values_that_differ_far_behind_are_cut_to_where_they_do() -> None:
    saved, here = (f"python train.py {'--flag ' * 40}--lr {rate} {'--more ' * 40}" for rate in ("0.1", "0.25"))
    shown = Finding(field="command", item="", saved=saved, here=here, policy="warn").shown
    assert all(text is not None and text.startswith("...") and text.endswith("...") and len(text) <= 46 for text in shown)
    assert ("0.1 " in str(shown[0]), "0.25 " in str(shown[1])) == (True, True)


@pytest.mark.parametrize("count", [13, 31, 32, 40, 64])
def test_hashes_that_begin_alike_are_still_told_apart(count: int) -> None:
    shown = Finding(field="config", item="", saved="a" * count + "b", here="a" * count + "c", policy="warn").shown
    assert shown[0] != shown[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"git_commit": "ab" * 20}, "commit 3f2a9c1d0b7e -> abababababab"),
        ({"git_dirty": True, "git_diff": "cd" * 16}, "work tree clean -> changed cdcdcdcdcdcd"),
        ({"git_dirty": True}, "work tree clean -> unknown"),
        ({"config_hash": None}, "config hash 9b9b9b9b9b9b -> unknown"),
        ({"data_version": "v2"}, "data version v1 -> v2"),
        ({"dependencies": {**META["dependencies"], "torch": "2.14.0"}}, "torch 2.13.0+cpu -> 2.14.0"),
        ({"dependencies": {**META["dependencies"], "numpy": "2.5.0"}}, "numpy 2.4.6 -> 2.5.0"),
        ({"dependencies": {"torch": "2.13.0+cpu", "python": "3.11.9"}}, "numpy 2.4.6 -> unknown"),
        ({"start_command": "python train.py --lr 0.2"}, "start command python train.py --lr 0.1 -> python train.py --lr 0.2"),
        ({"world_size": 3}, "world size 2 -> 3"),
        ({"batch_size": {"data": 8}}, "batch size of data 4 -> 8"),
    ],
)
def test_each_change_is_said_by_its_name_with_both_values_and_nothing_else_is(changes: dict[str, Any], said: str) -> None:
    assert news(compared(**changes)) == [said]


def test_the_same_uncommitted_changes_are_known_to_be_the_same_and_others_are_not() -> None:
    dirty = {**META, "git_dirty": True, "git_diff": "cd" * 16}
    tree = {digest: guard.facts({**dirty, "git_diff": digest}, world_size=2) for digest in ("cd" * 16, "ef" * 16)}
    assert news(guard.compare(tree["cd" * 16], tree["cd" * 16], ResumeConfig())) == []
    assert news(guard.compare(tree["cd" * 16], tree["ef" * 16], ResumeConfig())) == ["work tree changed cdcdcdcdcdcd -> changed efefefefefef"]


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_has_a_policy_of_its_own(field: str) -> None:
    changed = {
        "git_commit": "ab" * 20, "config_hash": "cd" * 32, "data_version": "v2", "start_command": "other", "batch_size": {"data": 8},
        "dependencies": {"torch": "0", "numpy": "0", "python": "0"},
    }  # fmt: skip
    only = ResumeConfig(**{**dict.fromkeys(FIELDS, "ignore"), field: "refuse"})
    assert {f.field for f in compared(world_size=3, policies=only, **changed) if f.action is Action.REFUSE} == {field}


def test_by_default_only_other_data_is_refused() -> None:
    assert {name for name, policy in dataclasses.asdict(ResumeConfig()).items() if policy == "refuse"} == {"data"}
    assert set(dataclasses.asdict(ResumeConfig()).values()) == {"warn", "refuse"}


def test_an_unknown_value_is_not_equal_even_to_an_unknown_one() -> None:
    assert Finding(field="data", item="", saved=None, here=None, policy="warn").verdict is Verdict.UNKNOWN

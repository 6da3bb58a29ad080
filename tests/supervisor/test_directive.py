"""The lead's word: on its way nothing is lost, and of what a newer version says the rest is understood."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.supervisor.directive import Directive, Incident, Outcome, Stage

NAME = st.text("abcdefghij-0123456789.", min_size=1, max_size=12)
NAMES = st.lists(NAME, max_size=3).map(tuple)
STEP = st.integers(-1, 10**7)
TEXT = st.text(max_size=20)
FACTS = st.none() | st.dictionaries(NAME, STEP, max_size=3)
OUTCOME = st.builds(
    Outcome, cause=NAME, fingerprint=NAME, detail=TEXT, action=NAME, reason=TEXT, exit_code=st.integers(0, 255),
    pause_s=st.floats(0, 60), last_step=STEP, lost=NAMES,
)  # fmt: skip
INCIDENT = st.builds(Incident, cause=NAME, detail=TEXT, nodes=NAMES, last_step=STEP, opened_at=NAME)
FIELDS: dict[str, Any] = dict( room=NAME, number=st.integers(0, 10**6), lead=NAME, stage=st.sampled_from(Stage), generation=st.integers(0, 99),
    called_s=st.floats(0, 1e6), members=NAMES, reason=TEXT, attempt=st.none() | NAME, announced=st.none() | STEP, announcement=st.integers(0, 999),
    dark=NAMES, flush=FACTS, confirmed=FACTS, refused=FACTS, stop=FACTS, is_suspect=st.booleans(), outcome=st.none() | OUTCOME,
    incident=st.none() | INCIDENT, code=st.integers(0, 255), text=TEXT,
)  # fmt: skip
DIRECTIVES = st.builds(Directive, **FIELDS)


@settings(max_examples=300, deadline=None)
@given(DIRECTIVES)
def test_word_comes_out_as_it_went_in(word: Directive) -> None:
    assert Directive.decode(json.loads(json.dumps(word.encode()))) == word


def test_every_field_is_drawn_above() -> None:
    assert set(FIELDS) == {spec.name for spec in fields(Directive)}


def test_what_has_its_default_is_not_said() -> None:
    assert Directive().encode() == {}
    assert Directive(announced=0).encode() == {"announced": 0}


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert Directive.decode({"number": 3, "mood": "fine"}) == Directive(number=3)


def test_stage_of_a_newer_version_is_not_understood() -> None:
    with pytest.raises(ValueError, match="dancing"):
        Directive.decode({"stage": "dancing"})


@pytest.mark.parametrize("value", [{"outcome": {}}, {"incident": {"cause": "x"}}, {"members": 3}, {"outcome": {"mood": 1}}])
def test_nonsense_is_refused_with_one_of_the_errors_that_are_expected(value: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        Directive.decode(value)


def test_what_was_said_is_not_changed_by_who_packs_it() -> None:
    word = Directive(flush={"id": 1, "dark": ["a"]}, outcome=Outcome(cause="", fingerprint="", detail="", action="", reason="", lost=("a",)))
    said = word.encode()
    said["flush"]["dark"] = "packed"
    said["outcome"]["lost"] = "packed"
    assert word.flush == {"id": 1, "dark": ["a"]}
    assert word.outcome is not None
    assert word.outcome.lost == ("a",)


@pytest.mark.parametrize("name", ["number", "generation", "announcement", "announced", "code"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 1 << 63])
def test_number_that_no_time_can_be_compared_with_is_refused(name: str, value: int) -> None:
    with pytest.raises(TypeError, match=name):
        Directive.decode({name: value})

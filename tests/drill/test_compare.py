"""Two traces are compared line by line, and the first difference has a name."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ridethrough.drill.compare import CLASSES, TraceLine, compare, parse_trace


def line(step: int, rank: int = 0, *, at_s: float | None = None, is_resume: bool = False, **changed: str) -> TraceLine:
    digests = {name: f"{name}-{step}" for name in (*CLASSES, "batch", "loss")} | changed
    return TraceLine(rank=rank, step=step, launch="1", at_s=float(step) if at_s is None else at_s, is_resume=is_resume, digests=digests)


REFERENCE = [line(step, rank) for step in range(1, 6) for rank in (0, 1)]


def test_equal_runs_have_no_difference_and_no_gap() -> None:
    assert compare(REFERENCE, REFERENCE, steps=5, ranks=2) == (None, [])


def test_a_step_made_twice_must_be_equal_both_times() -> None:
    again = line(3, at_s=9.0, model="other")
    difference, _ = compare(REFERENCE, [*REFERENCE, again], steps=5, ranks=2)
    assert difference is not None
    assert (difference.step, difference.rank, difference.state_class) == (3, 0, "model")


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_named(name: str) -> None:
    broken = [dataclasses.replace(found, digests={**found.digests, name: "other"}) if found.step >= 4 else found for found in REFERENCE]
    difference, _ = compare(REFERENCE, broken, steps=5, ranks=2)
    assert difference is not None
    assert (difference.step, difference.state_class) == (4, name)


def test_the_state_right_after_a_resume_is_blamed_before_what_follows_from_it() -> None:
    resumed = line(2, at_s=2.5, is_resume=True, optimizer="other")
    after = line(3, at_s=3.0, model="other", optimizer="other")
    difference, _ = compare(REFERENCE, [*REFERENCE[:4], after, resumed], steps=5, ranks=2)
    assert difference is not None
    assert (difference.state_class, difference.at_resume) == ("optimizer", True)


def test_a_batch_is_blamed_only_if_all_six_classes_agree() -> None:
    difference, _ = compare(REFERENCE, [line(1, batch="other", data="other")], steps=5, ranks=2)
    assert difference is not None
    assert difference.state_class == "data"
    difference, _ = compare(REFERENCE, [line(1, batch="other")], steps=5, ranks=2)
    assert difference is not None
    assert difference.state_class == "batch"


def test_missing_steps_are_a_failure_and_not_agreement() -> None:
    difference, gaps = compare(REFERENCE, REFERENCE[:-1], steps=5, ranks=2)
    assert difference is None
    assert gaps == ["the drilled run has no trace of 1 steps"]


def test_a_line_cut_short_by_a_kill_is_left_out() -> None:
    text = json.dumps(dataclasses.asdict(line(1))) + "\n" + json.dumps(dataclasses.asdict(line(2)))[:40]
    assert [found.step for found in parse_trace(text)] == [1]

"""Two traces are compared line by line, and the first difference has a name."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ridethrough.drill.compare import CLASSES, TraceLine, compare, final_lineage, parse_trace, sample_faults


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


# -- another number of ranks -------------------------------------------------------------------------------------------

PER_EPOCH = 12


def deal(ranks: int, steps: range, start: int, at_s: float) -> list[TraceLine]:
    """Two samples a step and rank, from `start` on."""
    return [
        dataclasses.replace(line(step, rank, at_s=at_s + number), samples=(first, first + 1))
        for number, step in enumerate(steps)
        for rank in range(ranks)
        for first in [start + 2 * (number * ranks + rank)]
    ]


def resumed(step: int, rank: int, at_s: float) -> TraceLine:
    return line(step, rank, at_s=at_s, is_resume=True)


SHRUNK = [
    # Three ranks make step 1 and 2 of epoch 0; step 2 is lost with a node, and two ranks go on from step 1.
    *deal(3, range(1, 3), 0, 1.0),
    resumed(1, 0, 50.0),
    resumed(1, 1, 50.1),
    *deal(2, range(2, 3), 6, 60.0),
    *[dataclasses.replace(line(3, 0, at_s=61.0), samples=(10, 11)), dataclasses.replace(line(3, 1, at_s=61.0), samples=())],
    *deal(2, range(4, 7), 0, 62.0),
]


def test_steps_that_were_lost_do_not_count_and_those_made_again_do() -> None:
    lineage = final_lineage(SHRUNK, [])
    assert [(found.step, found.rank) for found in lineage if found.step <= 2] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert sample_faults(lineage, per_epoch=PER_EPOCH, epochs=2) == []


def test_a_restart_from_nothing_has_no_line_of_a_resume_and_is_told_by_its_event() -> None:
    again = [*deal(2, range(1, 3), 0, 1.0), *deal(2, range(1, 4), 0, 20.0)]
    assert sample_faults(final_lineage(again, [(10.0, 0)]), per_epoch=PER_EPOCH, epochs=1) == []
    assert sample_faults(final_lineage(again, []), per_epoch=PER_EPOCH, epochs=1) != []


def test_a_lost_and_a_repeated_sample_are_told_with_their_epoch() -> None:
    wrong = [dataclasses.replace(found, samples=(7, 7)) if found.samples == (6, 7) else found for found in SHRUNK]
    faults = sample_faults(final_lineage(wrong, []), per_epoch=PER_EPOCH, epochs=2)
    assert "epoch 0: 1 samples lost, the first is 6" in faults
    assert "epoch 0: 1 samples repeated, the first is 7" in faults
    assert sample_faults(final_lineage(SHRUNK[:-1], []), per_epoch=PER_EPOCH, epochs=2)[-1] == "22 samples instead of 24"


def test_a_trace_without_samples_is_still_a_trace() -> None:
    old = {name: value for name, value in dataclasses.asdict(line(1)).items() if name != "samples"}
    assert parse_trace(json.dumps(old) + "\n")[0].samples == ()
    assert parse_trace(json.dumps({**old, "samples": [3, 4]}) + "\n")[0].samples == (3, 4)


def test_a_line_cut_short_by_a_kill_is_left_out() -> None:
    text = json.dumps(dataclasses.asdict(line(1))) + "\n" + json.dumps(dataclasses.asdict(line(2)))[:40]
    assert [found.step for found in parse_trace(text)] == [1]

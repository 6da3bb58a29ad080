"""RTO and RPO of a cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.drill.measure import PHASES, phases, standstill

MOMENTS = st.lists(st.floats(0, 1000), min_size=9, max_size=9)


def of(times: list[float]) -> tuple[float, dict[str, float]]:
    last_step, power, detected, classified, launched, attached, chosen, loaded, first = times
    return phases(
        last_step_s=last_step,
        power_s=power,
        detected_s=detected,
        classified_s=classified,
        launched_s=launched,
        times_s={"attached": attached, "chosen": chosen, "loaded": loaded, "first_step": first},
    )


@given(MOMENTS.map(sorted))
def test_the_phases_of_moments_in_order_are_the_times_between_them(times: list[float]) -> None:
    rto_s, found = of(times)
    assert tuple(found) == PHASES
    assert list(found.values()) == pytest.approx([after - before for before, after in itertools.pairwise(times[1:])])
    assert rto_s == pytest.approx(times[-1] - times[1])


@given(MOMENTS)
def test_the_phases_sum_to_the_rto_in_whatever_order_the_nodes_said_so(times: list[float]) -> None:
    times[-1] = max(times)
    rto_s, found = of(times)
    assert min(found.values()) >= 0.0
    assert sum(found.values()) == pytest.approx(rto_s)


def test_what_was_noticed_while_the_power_was_still_gone_costs_nothing() -> None:
    rto_s, found = of([10.0, 30.0, 12.0, 12.5, 31.0, 35.0, 36.0, 37.0, 40.0])
    assert rto_s == 10.0
    assert found["detect"] == found["classify"] == 0.0
    assert found["node_ready"] == 1.0


def test_a_standstill_is_the_longest_gap_that_overlaps_the_fault() -> None:
    steps = [1.0, 2.0, 5.0, 5.1, 9.5, 9.6, 20.0]
    assert standstill(steps, from_s=5.05, to_s=9.0) == pytest.approx(4.4)
    assert standstill([], from_s=0.0, to_s=1.0) == 0.0

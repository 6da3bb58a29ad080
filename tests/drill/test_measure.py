"""RTO and RPO of a cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.drill.measure import PHASES, measure

ORDERED = st.lists(st.floats(0, 1000), min_size=8, max_size=8).map(sorted)


@given(ORDERED)
def test_the_phases_sum_to_the_rto(times: list[float]) -> None:
    last_step, power, command, launched, attached, chosen, loaded, first = times
    result = measure(
        kind="mid-step",
        phase="train",
        at_step=23,
        last_step_s=last_step,
        power_s=power,
        command_s=command,
        launched_s=launched,
        times_s={"attached": attached, "chosen": chosen, "loaded": loaded, "first_step": first},
        restored_step=20,
    )
    assert set(result.rto_phases_s) == set(PHASES)
    assert sum(result.rto_phases_s.values()) == pytest.approx(result.rto_s)
    assert result.rto_s == pytest.approx(first - power)
    assert result.rpo_steps == 3

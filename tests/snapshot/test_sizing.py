from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ridethrough.errors import MemoryTooSmall
from ridethrough.snapshot.sizing import USABLE_RATIO, SlotPlan, plan_slots

# Memory in slots of one rank, so that the border where they stop fitting is met often.
states = st.integers(1, 1 << 40)
ranks = st.integers(1, 16)
rooms = st.floats(3.8, 6.0)
saves = st.integers(1, 500)
wishes = st.none() | st.integers(1, 600)


def memory_of(state: int, rank_count: int, room: float) -> int:
    return int(state * rank_count * room)


def fits(slots: int, state: int, rank_count: int, memory: int) -> bool:
    return slots * state * rank_count <= int(memory * USABLE_RATIO)


def plan(state: int, rank_count: int, memory: int, save: int, wish: int | None) -> SlotPlan:
    return plan_slots(
        state_bytes_per_rank=state, ranks_on_node=rank_count, available_bytes=memory, save_interval_steps=save, wanted_interval_steps=wish
    )


def plan_that_fits(state: int, rank_count: int, room: float, save: int, wish: int | None) -> tuple[SlotPlan, int]:
    memory = memory_of(state, rank_count, room)
    assume(fits(4 if save == 1 else 3, state, rank_count, memory))
    return plan(state, rank_count, memory, save, wish), memory


@given(states, ranks, rooms, saves, wishes)
def test_snapshot_interval_divides_the_save_interval(state: int, rank_count: int, room: float, save: int, wish: int | None) -> None:
    found, _ = plan_that_fits(state, rank_count, room, save, wish)
    assert save % found.interval_steps == 0


@given(states, ranks, rooms, saves, wishes)
def test_slots_fit_in_the_usable_memory(state: int, rank_count: int, room: float, save: int, wish: int | None) -> None:
    found, memory = plan_that_fits(state, rank_count, room, save, wish)
    assert fits(found.slots_per_rank, state, rank_count, memory)


@given(states, ranks, rooms, saves, wishes)
def test_slots_leave_a_newest_common_step_and_one_for_the_save(state: int, rank_count: int, room: float, save: int, wish: int | None) -> None:
    found, _ = plan_that_fits(state, rank_count, room, save, wish)
    assert found.slots_per_rank == (4 if found.interval_steps == 1 else 3)


@given(states, ranks, rooms, saves, wishes)
def test_interval_is_the_smallest_that_fits_and_was_wished(state: int, rank_count: int, room: float, save: int, wish: int | None) -> None:
    found, memory = plan_that_fits(state, rank_count, room, save, wish)
    smaller = [n for n in range(min(wish or 1, save), found.interval_steps) if save % n == 0]
    assert not any(fits(4 if n == 1 else 3, state, rank_count, memory) for n in smaller)


@given(states, ranks, rooms, saves, st.integers(1, 600))
def test_interval_is_never_smaller_than_the_users_wish(state: int, rank_count: int, room: float, save: int, wish: int) -> None:
    found, _ = plan_that_fits(state, rank_count, room, save, wish)
    assert found.interval_steps >= min(wish, save)


@given(states, ranks, st.floats(0.0, 3.7), saves, wishes)
def test_memory_for_fewer_than_three_slots_is_an_error(state: int, rank_count: int, room: float, save: int, wish: int | None) -> None:
    with pytest.raises(MemoryTooSmall):
        plan(state, rank_count, memory_of(state, rank_count, room), save, wish)


def test_error_says_how_much_memory_is_needed() -> None:
    with pytest.raises(MemoryTooSmall, match="need 3750 bytes of memory on this node, 3749 are available"):
        plan(500, 2, 3749, 10, None)


def test_plenty_of_memory_snapshots_every_step() -> None:
    assert plan(1000, 2, 1 << 30, 100, None) == SlotPlan(interval_steps=1, slots_per_rank=4)


def test_wish_above_the_save_interval_becomes_the_save_interval() -> None:
    assert plan(1000, 2, 1 << 30, 10, 50) == SlotPlan(interval_steps=10, slots_per_rank=3)

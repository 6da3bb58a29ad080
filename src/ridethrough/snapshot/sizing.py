"""How often to snapshot and in how many slots, from the memory there is."""

from __future__ import annotations

from dataclasses import dataclass

from ridethrough.errors import MemoryTooSmall

USABLE_RATIO = 0.8
"""Share of the available memory that snapshots may take; the rest is for data loaders and spikes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Agreed at the start of an attempt, never changed by one rank alone."""

    interval_steps: int
    slots_per_rank: int


def plan_slots(
    *, state_bytes_per_rank: int, ranks_on_node: int, available_bytes: int, save_interval_steps: int, wanted_interval_steps: int | None
) -> SlotPlan:
    """The smallest snapshot interval whose slots fit.

    Gradient coupling keeps ranks within one step of each other, so two slots (interval of 2 or
    more) or three (every step) always leave a newest step that every rank has; one more is for
    the save in progress.

    Args:
        state_bytes_per_rank: Size of one snapshot.
        ranks_on_node: Ranks that share the node's memory.
        available_bytes: Memory that may be used, of the machine or the cgroup.
        save_interval_steps: Steps between durable saves; the interval divides it, so that saves fall on snapshots.
        wanted_interval_steps: The user's own choice (the next larger interval that divides), None for ours.

    Raises:
        MemoryTooSmall: Not even three slots a rank fit.
    """
    budget = int(available_bytes * USABLE_RATIO)
    # Every save needs a snapshot: a wish for fewer snapshots than saves ends at one a save.
    smallest = min(wanted_interval_steps or 1, save_interval_steps)

    def fits(slots: int) -> bool:
        return state_bytes_per_rank * ranks_on_node * slots <= budget

    divisors = [n for n in range(1, save_interval_steps + 1) if save_interval_steps % n == 0]
    for interval in divisors:
        slots = 4 if interval == 1 else 3
        if interval >= smallest and fits(slots):
            return SlotPlan(interval_steps=interval, slots_per_rank=slots)
    raise MemoryTooSmall(needed_bytes=int(state_bytes_per_rank * ranks_on_node * 3 / USABLE_RATIO), available_bytes=available_bytes)

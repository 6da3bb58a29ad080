"""Lives of a run under power cuts: a cut, a restart and another cut, and lives that nobody thought of."""

from __future__ import annotations

import errno
from typing import Any

from crash_lab import Report, World, check, new_world, seeded_names
from hypothesis import strategies as st

from ridethrough.errors import RideThroughError


def second_cuts(world: World, *, every: int, **ledger: Any) -> Report:
    """After one of so many cuts the run is started again, saves, and is cut again at any call."""
    total, states = Report(), []
    total.add(check(world, visit=states.append, **ledger))
    for state in states[::every]:
        again = world.after(state)
        again.start()
        again.save()
        again.save()
        total.add(check(again, go_on_every=100, **ledger))
    return total


CALLS = st.sampled_from(["create", "write", "sync", "rename", "sync_dir", "remove", "make_dir", "close"])
ERRORS = st.sampled_from([errno.EIO, errno.ENOSPC])
EVENTS = st.one_of(
    st.tuples(st.just("save")),
    st.tuples(st.just("save")),
    st.tuples(st.just("spoil"), st.sampled_from(["replicated", "rank-00000"])),
    st.tuples(st.just("fail"), CALLS, ERRORS, st.integers(1, 12), st.booleans(), st.booleans()),
    st.tuples(st.just("restart")),
    st.tuples(st.just("failed restart"), CALLS, ERRORS, st.integers(1, 8), st.booleans()),
    st.tuples(st.just("keep"), st.integers(1, 3)),
)


def live(world: World, events: list[tuple[Any, ...]]) -> None:
    """These things happen, after a start."""
    world.start()
    for kind, *details in events:
        if kind == "save":
            world.save()
        elif kind == "spoil":
            world.save(spoil=details[0])
        elif kind == "restart":
            world.start()
        elif kind == "keep":
            world.keep_last = details[0]
            world.store.retention = type(world.store.retention)(keep_last=details[0])
        elif kind == "fail":
            call, error, nth, is_late, is_lasting = details
            with world.failing(call, error, nth=nth, is_late=is_late, is_lasting=is_lasting):
                world.save()
        else:
            call, error, nth, is_late = details
            try:
                with world.failing(call, error, nth=nth, is_late=is_late):
                    world.start()
            except RideThroughError:
                world.start()


def random_story(
    first: list[tuple[Any, ...]], second: list[tuple[Any, ...]], profile: Any, cuts: tuple[float, float], *, window: int = 15, **ledger: Any
) -> Report:
    """A life, a cut at some call of it, another life on one of the states that it left, and a second cut."""
    total = Report()
    with seeded_names(7):
        world = new_world(profile=profile, seed=7, part_bytes=3000)
        live(world, first)
        states = []
        at = int(cuts[0] * len(world.disk.timeline.calls))
        total.add(check(world, only=set(range(at, at + window)), limit=64, go_on_every=40, **ledger, visit=states.append))
        if not total.wrong and states:
            again = world.after(states[int(cuts[1] * len(states))])
            live(again, second)
            first_call = again.said_before
            at = first_call + int(cuts[1] * (len(again.disk.timeline.calls) - first_call))
            total.add(check(again, only=set(range(at, at + window)), limit=64, go_on_every=40, **ledger))
    return total


LIVES = st.lists(EVENTS, min_size=1, max_size=8)
CUT = st.floats(0, 1, exclude_max=True)

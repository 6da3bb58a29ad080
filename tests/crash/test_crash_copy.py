"""A copy between two disks, of which one or both are cut at any instant: the other has what it had, and nothing damaged counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
from crash_lab import seeded_names

from ridethrough.errors import RideThroughError
from ridethrough.seam.fs import FileSystem
from ridethrough.store import copy
from ridethrough.store.catalog import candidates, read_catalog
from ridethrough.store.place import Place
from ridethrough.store.retain import delete_checkpoint
from ridethrough.testing import CrashFS, DropDirSyncs, RecordingFileSystem, SimpleStore, State, Timeline, load_newest, restorable_steps

RUN = "/disk/run"
Wrap = Callable[[FileSystem], FileSystem]


def place(fs: FileSystem) -> Place:
    return Place(fs=fs, run_dir=RUN, shown=RUN, is_mounted=True)


def copy_newest(source: FileSystem, target: FileSystem) -> None:
    copy.copy_checkpoint(place(source), place(target), next(iter(candidates(read_catalog(source, RUN)))))


def story(wrap: Wrap = lambda fs: fs, **shape: Any) -> tuple[SimpleStore, Timeline]:
    """Two saves, each copied to the other room; then the first goes here, which the copy makes no less durable there."""
    timeline = Timeline(seed=1)
    here, there = (CrashFS(name=name, timeline=timeline, **shape) for name in ("here", "there"))
    store = SimpleStore(fs=here, run_dir=RUN, part_bytes=6000, world_size=1)
    store.start()
    for step in (10, 20):
        store.commit(step)
        timeline.mark(("here", step))
        copy_newest(here, wrap(there))
        timeline.mark(("there", step))
    delete_checkpoint(here, RUN, store.dir_name(10))
    return store, timeline


def harm(state: State, store: SimpleStore, *, goes_on: bool) -> str | None:
    disks = state.disks()
    for name, fs in disks.items():
        promised = max((step for where, step in state.marks if where == name), default=0)
        try:
            wrong = {step: error for step, error in restorable_steps(fs, RUN).items() if error is not None}
            loaded = load_newest(fs, RUN)
            problems = read_catalog(fs, RUN).problems
        except RideThroughError as error:
            if promised:
                return f"{name} cannot be read: {error}"
            continue
        if wrong:
            return f"{name} shows what is damaged: {wrong}"
        if problems:
            return f"{name} has what vouches for nothing: {problems[0]}"
        if loaded is not None and not store.is_true(loaded):
            return f"{name}: step {loaded.step} is not what was saved"
        if (loaded.step if loaded is not None else 0) < promised:
            return f"{name}: step {promised} was promised, loaded is {loaded.step if loaded else None}"
    if goes_on and any(where == "here" for where, _ in state.marks):
        try:
            copy_newest(disks["here"], disks["there"])
        except RideThroughError as error:
            return f"the copy does not go on: {error}"
        again = load_newest(disks["there"], RUN)
        if again is None or not store.is_true(again):
            return "the copy went on to something else"
    return None


def first_harm(store: SimpleStore, timeline: Timeline, hit: tuple[str, ...], *, limit: int = 256) -> tuple[str | None, int]:
    count = 0
    for count, state in enumerate(timeline.states(hit=hit, limit=limit, random_count=16), start=1):
        with seeded_names(1000 + count):
            found = harm(state, store, goes_on=count % 10 == 0)
        if found is not None:
            return f"{found}\n{state.describe()}", count
    return None, count


@pytest.mark.parametrize("profile", ["posix", "journal"])
@pytest.mark.parametrize("hit", [("here",), ("there",), ("here", "there")], ids="+".join)
def test_a_cut_of_either_room_or_both_at_any_instant_of_a_copy_costs_nothing_that_was_promised(hit: tuple[str, ...], profile: Any) -> None:
    with seeded_names(1):
        store, timeline = story(profile=profile, page_bytes=512)
    found, count = first_harm(store, timeline, hit)
    assert found is None
    assert count > 250


def _seal_first(source: Place, target: Place, dir_name: str, seal: Any, **_: Any) -> None:
    directory = target.path(dir_name)
    copy.publish(target.fs, os.path.join(directory, seal.payload_name.replace(".safetensors", ".seal")), seal.encode())
    pieces = copy._proven_pieces(source, dir_name, seal, lambda _: None)
    copy.publish_stream(target.fs, os.path.join(directory, seal.payload_name), seal.payload_bytes, pieces)


class _NoFileSync(RecordingFileSystem):
    def create(self, path: str, size_bytes: int) -> Any:
        writer = self.inner.create(path, size_bytes)

        class Unsynced:
            write, close = writer.write, writer.close

            def sync(self) -> None:
                return

        return Unsynced()


MUTANTS: dict[str, tuple[Wrap, Callable[[], AbstractContextManager[Any]]]] = {
    "the seal before its payload": (lambda fs: fs, lambda: patch.object(copy, "copy_part", _seal_first)),
    "no sync of any file": (_NoFileSync, nullcontext),
    "no sync of any directory": (DropDirSyncs, nullcontext),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_copy_that_lacks_it_is_found_out(name: str) -> None:
    wrap, patched = MUTANTS[name]
    with seeded_names(1), patched():
        store, timeline = story(wrap)
    found, _ = first_harm(store, timeline, ("there",))
    assert found is not None
    print(f"{name}\n{found}")

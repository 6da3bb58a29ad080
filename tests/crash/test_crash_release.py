"""A cut at any call of a release from quarantine: no seal without its payload, and no byte lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from crash_lab import RUN, World, new_world, seeded_names

from ridethrough.format import layout
from ridethrough.seam.fs import FileSystem
from ridethrough.store import quarantine
from ridethrough.store.catalog import read_catalog
from ridethrough.testing import State


def _told(profile: Any) -> tuple[World, str, str]:
    """A checkpoint whose part was in quarantine and was released; the names of its directory and its part's files."""
    world = new_world(profile=profile, seed=9)
    world.start()
    world.save()
    world.save(spoil=layout.REPLICATED)
    [held] = quarantine.holdings(world.fs, RUN)
    world.disk.mark("held")
    world.release()
    return world, held.dir_name, held.file.stem


def _states(world: World) -> list[State]:
    return [state for state in world.states(limit=1 << 10, only=None) if "held" in state.marks]


def _contents(fs: FileSystem, dir_name: str, name: str) -> set[bytes]:
    """The file's content under each of its two places."""
    found = set()
    for place in (f"{RUN}/{dir_name}", f"{RUN}/{layout.QUARANTINE}/{dir_name}"):
        with contextlib.suppress(FileNotFoundError):
            found.add(fs.read(f"{place}/{name}", max_bytes=1 << 20))
    return found


@pytest.mark.parametrize("profile", ["posix", "journal"])
def test_a_cut_at_any_call_of_a_release_leaves_no_seal_without_its_payload_and_loses_no_byte(profile: Any) -> None:
    with seeded_names(9):
        world, dir_name, stem = _told(profile)
        truth = {name: _contents(world.disk, dir_name, name) for name in (f"{stem}.safetensors", f"{stem}.seal")}
        states = _states(world)
    places = set()
    for state in states:
        names = set(state.fs.list_dir(f"{RUN}/{dir_name}"))
        assert f"{stem}.seal" not in names or f"{stem}.safetensors" in names, state.describe()
        # Before the bytes were mended they were others, and both are what the medium had.
        assert all(_contents(state.fs, dir_name, name) for name in truth), state.describe()
        assert _contents(state.fs, dir_name, f"{stem}.seal") == truth[f"{stem}.seal"], state.describe()
        assert read_catalog(state.fs, RUN).problems == (), state.describe()
        places.add((f"{stem}.seal" in names, f"{stem}.safetensors" in names))
    assert places == {(False, False), (False, True), (True, True)}, "not every stage was cut"
    assert all(len(found) == 1 for found in truth.values())


@pytest.mark.parametrize("profile", ["posix", "journal"])
def test_a_release_that_was_cut_anywhere_can_be_made_again(profile: Any) -> None:
    with seeded_names(9):
        world, dir_name, stem = _told(profile)
        truth = _contents(world.disk, dir_name, f"{stem}.safetensors")
        mended = [state for state in _states(world) if _contents(state.fs, dir_name, f"{stem}.safetensors") == truth]
    stages = set()
    for state in mended:
        fs = state.fs
        for held in quarantine.holdings(fs, RUN):
            stages.add((held.seal is not None, held.payload_dir == held.place))
            if held.seal is not None:
                quarantine.release_part(fs, RUN, held, quarantine.prove(fs, RUN, held, run_uid=world.store.run_uid))
        [checkpoint] = [c for c in read_catalog(fs, RUN).checkpoints if c.dir_name == dir_name]
        assert checkpoint.is_complete, state.describe()
        assert not [held for held in quarantine.holdings(fs, RUN) if held.seal is not None]
    assert stages >= {(True, True), (True, False), (False, False)}, "not every stage was cut"

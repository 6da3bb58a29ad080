"""What is damaged in one place is made good from another, and nothing that is whole is touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ridethrough.errors import ForeignRecord
from ridethrough.format import layout
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store.catalog import candidates, read_catalog
from ridethrough.store.copy import copy_checkpoint
from ridethrough.store.place import Place
from ridethrough.store.scrub import DAMAGED, DIVERGED, MISSING, OK, REPAIRED, UNREADABLE, Finding, scrub
from ridethrough.testing import ErrorOn, FlipBit, SimpleStore, flip_bit, load_newest, restorable_steps


def place(path: Path | str, fs: FileSystem | None = None) -> Place:
    return Place(fs=fs or PosixFileSystem(), run_dir=str(path), shown=str(path), is_mounted=True)


@pytest.fixture
def here(store: SimpleStore) -> Place:
    store.commit(10, 20)
    return place(store.run_dir)


@pytest.fixture
def there(here: Place, tmp_path: Path) -> Place:
    made = place(tmp_path / "mirror" / "exp001")
    for checkpoint in reversed(candidates(read_catalog(here.fs, here.run_dir))):
        copy_checkpoint(here, made, checkpoint)
    return made


def files(of: Place) -> dict[str, bytes]:
    return {str(path.relative_to(of.run_dir)): path.read_bytes() for path in Path(of.run_dir).rglob("*") if path.is_file()}


def file_of(of: Place, step: int, part: str, suffix: str = ".safetensors") -> str:
    [found] = Path(of.run_dir).glob(f"step-{step:09d}-*/{part}~*{suffix}")
    return str(found)


def results(found: tuple[Finding, ...]) -> dict[str, int]:
    return {result: sum(f.result == result for f in found) for result in {f.result for f in found}}


def is_whole(of: Place, store: SimpleStore) -> bool:
    loaded = load_newest(PosixFileSystem(), of.run_dir)
    assert loaded is not None
    return loaded.step == 20 and store.is_true(loaded) and set(restorable_steps(PosixFileSystem(), of.run_dir).values()) == {None}


def test_intact_copies_are_left_as_they_are(here: Place, there: Place) -> None:
    before = files(here), files(there)
    assert results(scrub((here, there), is_repairing=True)) == {OK: 12}
    assert (files(here), files(there)) == before


@pytest.mark.parametrize("part", ["replicated", "rank-00000", "rank-00001"])
@pytest.mark.parametrize("at_byte", [3, -3])
def test_a_flipped_bit_is_repaired_from_the_other_place(here: Place, there: Place, store: SimpleStore, part: str, at_byte: int) -> None:
    flip_bit(file_of(here, 20, part), at_byte)
    found = scrub((here, there), is_repairing=True)
    assert results(found) == {OK: 11, REPAIRED: 1}
    [repaired] = [f for f in found if f.result == REPAIRED]
    assert (repaired.place, repaired.step, repaired.part, repaired.detail) == (here.shown, 20, part, f"copied from {there.shown}")
    assert is_whole(here, store)
    assert len(list(Path(here.run_dir).glob(f"quarantine/step-000000020-*/{part}~*.safetensors"))) == 1, "the damaged bytes are kept for a person"
    assert results(scrub((here, there), is_repairing=True)) == {OK: 12}


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("suffix", [".seal", ".safetensors"])
def test_a_file_that_is_lost_or_torn_in_either_place_is_put_back(here: Place, there: Place, store: SimpleStore, suffix: str, is_lost: bool) -> None:
    for damaged in (here, there):
        path = file_of(damaged, 20, "rank-00001", suffix)
        if is_lost:
            os.unlink(path)
        else:
            os.truncate(path, 100)
        found = scrub((here, there), is_repairing=True)
        assert [f.place for f in found if f.result == REPAIRED] == [damaged.shown]
        assert is_whole(damaged, store)


def test_damage_in_different_parts_of_both_places_is_repaired_crosswise(here: Place, there: Place, store: SimpleStore) -> None:
    flip_bit(file_of(here, 20, "replicated"), 1000)
    flip_bit(file_of(there, 20, "rank-00000"), 1000)
    assert results(scrub((here, there), is_repairing=True)) == {OK: 10, REPAIRED: 2}
    assert is_whole(here, store)
    assert is_whole(there, store)


def test_what_is_damaged_everywhere_is_said_and_left(here: Place, there: Place) -> None:
    for of in (here, there):
        flip_bit(file_of(of, 20, "replicated"), 1000)
    before = files(here), files(there)
    assert results(scrub((here, there), is_repairing=True)) == {OK: 10, DAMAGED: 2}
    assert (files(here), files(there)) == before


def test_looking_alone_changes_nothing(here: Place, there: Place) -> None:
    flip_bit(file_of(here, 20, "replicated"), 1000)
    os.unlink(file_of(there, 10, "rank-00000", ".seal"))
    os.unlink(file_of(there, 10, "rank-00000"))
    before = files(here), files(there)
    assert results(scrub((here, there), is_repairing=False)) == {OK: 10, DAMAGED: 1, MISSING: 1}
    assert (files(here), files(there)) == before


@pytest.mark.parametrize("suffix", [".safetensors", ".seal"])
def test_a_read_that_differs_from_the_next_is_no_damage(here: Place, there: Place, suffix: str) -> None:
    within = os.path.basename(file_of(here, 20, "rank-00000", suffix))
    shaky = place(here.run_dir, FlipBit(PosixFileSystem(), within=within, at_byte=50, is_moving=True))
    before = files(here)
    found = scrub((shaky, there), is_repairing=True)
    assert {f.result for f in found if f.place == here.shown and f.part == "rank-00000" and f.step == 20} == {UNREADABLE}
    assert files(here) == before


def test_a_place_that_cannot_be_read_now_is_not_repaired(here: Place, there: Place) -> None:
    away = place(here.run_dir, ErrorOn(PosixFileSystem(), "read_into", errno.EIO, within="rank-00000", is_lasting=True))
    before = files(here)
    assert {f.result for f in scrub((away, there), is_repairing=True) if f.part == "rank-00000" and f.place == here.shown} == {UNREADABLE}
    assert files(here) == before


def test_replicas_with_different_contents_are_an_alarm_and_neither_is_replaced(here: Place, store: SimpleStore) -> None:
    other = SimpleStore(fs=store.fs, run_dir=store.run_dir, seed=store.seed + 1, node="node-1")
    other.run_uid, other.attempt, other.roster = store.run_uid, store.attempt, store.roster
    other.commit_parts(20, parts=(layout.REPLICATED,))
    before = files(here)
    found = scrub((here,), is_repairing=True)
    assert [(f.step, f.part) for f in found if f.result == DIVERGED] == [(20, layout.REPLICATED)]
    assert files(here) == before


def test_places_of_different_runs_are_refused(here: Place, tmp_path: Path) -> None:
    other = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "other"), seed=3)
    other.start()
    with pytest.raises(ForeignRecord, match="holds run"):
        scrub((here, place(other.run_dir)), is_repairing=True)


def test_a_checkpoint_that_one_place_does_not_have_is_not_put_there(here: Place, tmp_path: Path) -> None:
    there = place(tmp_path / "mirror")
    copy_checkpoint(here, there, candidates(read_catalog(here.fs, here.run_dir))[0])
    assert results(scrub((here, there), is_repairing=True)) == {OK: 9}
    assert set(restorable_steps(PosixFileSystem(), there.run_dir)) == {20}


def test_another_intact_copy_in_the_same_place_is_enough(here: Place, store: SimpleStore) -> None:
    damaged = file_of(here, 20, "replicated")
    store.commit_parts(20, parts=(layout.REPLICATED,))
    flip_bit(damaged, 500)
    found = scrub((here,), is_repairing=True)
    assert [f.detail for f in found if f.result == REPAIRED] == [f"another copy of it in {here.shown} is intact"]
    assert not os.path.exists(damaged)
    assert is_whole(here, store)

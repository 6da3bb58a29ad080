"""A copy in another place is whole or does not count, whatever is cut, damaged or in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ridethrough.errors import ForeignRecord, NothingRestorable, StorageError, StorageUnreachable, StoreFull
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store.catalog import Checkpoint, candidates, read_catalog
from ridethrough.store.copy import copy_checkpoint
from ridethrough.store.place import Place
from ridethrough.testing import ErrorOn, FlipBit, RecordingFileSystem, SimpleStore, TruncateOnce, flip_bit, load_newest, restorable_steps


class PowerCut(Exception):
    """Nothing after this call happens."""


def place(path: Path | str, fs: FileSystem | None = None) -> Place:
    return Place(fs=fs or PosixFileSystem(), run_dir=str(path), shown=str(path), is_mounted=True)


def newest(source: Place) -> Checkpoint:
    return next(iter(candidates(read_catalog(source.fs, source.run_dir))))


@pytest.fixture
def source(store: SimpleStore) -> Place:
    store.commit(10, 20)
    return place(store.run_dir)


@pytest.fixture
def target(tmp_path: Path) -> Place:
    return place(tmp_path / "elsewhere" / "exp001")


def loads_from(target: Place, store: SimpleStore) -> int | None:
    loaded = load_newest(PosixFileSystem(), target.run_dir)
    if loaded is None:
        return None
    assert store.is_true(loaded)
    return loaded.step


def test_a_run_goes_on_from_a_copy_alone(source: Place, target: Place, store: SimpleStore) -> None:
    done = copy_checkpoint(source, target, newest(source))
    assert (done.step, done.parts_count, done.damaged) == (20, 3, ())
    assert done.copied_bytes == sum(len(store.truth(20, name)) for name in store.part_names)
    there = SimpleStore(fs=PosixFileSystem(), run_dir=target.run_dir, seed=store.seed)
    assert there.resume() == 20
    assert there.run_uid == store.run_uid
    assert there.attempt.seq == store.attempt.seq + 1


def test_files_of_a_copy_are_those_of_the_source_byte_for_byte(source: Place, target: Place) -> None:
    checkpoint = newest(source)
    copy_checkpoint(source, target, checkpoint)
    names = os.listdir(source.path(checkpoint.dir_name))
    assert sorted(os.listdir(target.path(checkpoint.dir_name))) == sorted(names)
    for name in names:
        assert Path(target.path(checkpoint.dir_name, name)).read_bytes() == Path(source.path(checkpoint.dir_name, name)).read_bytes()


def test_a_copy_that_is_there_is_not_written_again(source: Place, target: Place) -> None:
    checkpoint = newest(source)
    copy_checkpoint(source, target, checkpoint)
    recorder = RecordingFileSystem(PosixFileSystem())
    again = copy_checkpoint(source, place(target.run_dir, recorder), checkpoint)
    assert again.copied_bytes == 0
    assert not [name for call, name in recorder.changes() if call == "create" and ".safetensors" in name]


def test_a_cut_at_any_call_leaves_a_place_from_which_the_same_copy_goes_on(source: Place, tmp_path: Path, store: SimpleStore) -> None:
    nth, sealed_before_the_cut = 0, 0
    while True:
        nth += 1
        left = [nth]

        def cut(call: str, path: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise PowerCut

        target = place(tmp_path / f"cut-{nth}", RecordingFileSystem(PosixFileSystem(), before=cut))
        try:
            copy_checkpoint(source, target, newest(source))
        except PowerCut:
            # A copy that was cut is whole or does not count.
            steps = restorable_steps(PosixFileSystem(), target.run_dir) if os.path.exists(target.path("run.json")) else {}
            assert set(steps.values()) <= {None}, f"call {nth}"
            done = copy_checkpoint(source, place(target.run_dir), newest(source))
            sealed_before_the_cut += done.copied_bytes < 3 * store.part_bytes
            assert loads_from(target, store) == 20, f"call {nth}"
        else:
            break
    assert nth > 60
    assert sealed_before_the_cut > 10, "nothing was kept of what had been copied"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_target_that_refuses_any_call_shows_nothing_damaged_and_the_copy_goes_on_later(
    source: Place, tmp_path: Path, store: SimpleStore, error: int
) -> None:
    nth = 0
    while True:
        nth += 1
        fault = ErrorOn(PosixFileSystem(), "*", error, nth=nth)
        target = place(tmp_path / f"{error}-{nth}", fault)
        try:
            copy_checkpoint(source, target, newest(source))
        except StorageError:
            copy_checkpoint(source, place(target.run_dir), newest(source))
        assert loads_from(target, store) == 20, fault.failed
        if not fault.failed:
            break
    assert nth > 60


@pytest.mark.parametrize("part", ["replicated", "rank-00001"])
def test_a_damaged_source_is_never_copied(source: Place, target: Place, store: SimpleStore, part: str) -> None:
    [payload] = Path(source.path(newest(source).dir_name)).glob(f"{part}~*.safetensors")
    flip_bit(str(payload), -7)
    with pytest.raises(NothingRestorable, match=f"no copy of {part}"):
        copy_checkpoint(source, target, newest(source))
    assert loads_from(target, store) is None


def test_of_two_copies_at_the_source_the_intact_one_is_taken(source: Place, target: Place, store: SimpleStore) -> None:
    [first] = store.commit_parts(20, parts=("replicated",))
    checkpoint = newest(source)
    damaged = checkpoint.seals[[seal.part for seal in checkpoint.seals].index("replicated")]
    flip_bit(source.path(checkpoint.dir_name, damaged.payload_name), 9)
    done = copy_checkpoint(source, target, checkpoint)
    assert first.part == "replicated"
    assert len(done.damaged) == 1
    assert loads_from(target, store) == 20


def test_what_does_not_read_back_at_the_target_is_not_sealed_there(source: Place, target: Place, store: SimpleStore) -> None:
    lying = place(target.run_dir, TruncateOnce(PosixFileSystem(), within="rank-00000"))
    with pytest.raises(StorageError, match="does not read back"):
        copy_checkpoint(source, lying, newest(source))
    assert loads_from(target, store) is None
    flipped = place(target.run_dir, FlipBit(PosixFileSystem(), within="replicated", at_byte=100))
    with pytest.raises(StorageError, match="does not read back"):
        copy_checkpoint(source, flipped, newest(source))
    copy_checkpoint(source, target, newest(source))
    assert loads_from(target, store) == 20


def test_a_source_that_cannot_be_read_now_is_not_called_damaged(source: Place, target: Place) -> None:
    away = place(source.run_dir, ErrorOn(PosixFileSystem(), "read_into", errno.EIO, within=".safetensors"))
    with pytest.raises(StorageUnreachable):
        copy_checkpoint(away, target, newest(source))


def test_a_place_that_holds_another_run_is_refused_and_left_alone(source: Place, tmp_path: Path) -> None:
    other = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "other"), seed=9)
    other.start()
    other.commit(5)
    before = sorted(str(path) for path in Path(other.run_dir).rglob("*"))
    with pytest.raises(ForeignRecord, match="it holds run"):
        copy_checkpoint(source, place(other.run_dir), newest(source))
    assert sorted(str(path) for path in Path(other.run_dir).rglob("*")) == before


def test_progress_adds_up_to_what_is_copied(source: Place, target: Place) -> None:
    seen: list[int] = []
    done = copy_checkpoint(source, target, newest(source), advance=seen.append)
    assert sum(seen) == done.copied_bytes > 0


def test_a_full_disk_far_away_keeps_what_it_had(source: Place, target: Place, store: SimpleStore) -> None:
    older = candidates(read_catalog(source.fs, source.run_dir))[1]
    copy_checkpoint(source, target, older)
    full = place(target.run_dir, ErrorOn(PosixFileSystem(), "create", errno.ENOSPC, within="rank-00001", is_lasting=True))
    with pytest.raises(StoreFull):
        copy_checkpoint(source, full, newest(source))
    assert loads_from(target, store) == 10


def test_later_attempts_and_their_parents_are_known_to_the_copy(source: Place, target: Place, store: SimpleStore) -> None:
    copy_checkpoint(source, target, newest(source))
    store.resume()
    store.commit(30)
    copy_checkpoint(source, target, newest(source))
    assert loads_from(target, store) == 30
    found: Any = read_catalog(PosixFileSystem(), target.run_dir)
    assert len(found.attempts) == 2

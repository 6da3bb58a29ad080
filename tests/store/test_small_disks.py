"""Real small disks that are full, read-only or without power: the error is the right one and nothing good is lost."""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridethrough.errors import StorageError, StorageUnreachable, StoreFull, StoreReadOnly
from ridethrough.format import layout
from ridethrough.journal import Journal, read
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing import CUT, CUT_JOURNAL_FLUSHED, LoopDisk, SimpleStore, load_newest, save_once

pytestmark = pytest.mark.root

MIB = 1 << 20


@pytest.fixture
def disk() -> Iterator[LoopDisk]:
    with LoopDisk(24 * MIB) as made:
        yield made


@pytest.fixture
def on_disk(disk: LoopDisk) -> SimpleStore:
    store = SimpleStore(fs=PosixFileSystem(), run_dir=os.path.join(disk.path, "run"), part_bytes=MIB)
    store.start()
    return store


def newest_step(store: SimpleStore) -> int:
    loaded = load_newest(store.fs, store.run_dir)
    assert loaded is not None
    assert store.is_true(loaded)
    return loaded.step


def test_a_full_disk_refuses_the_save_and_the_older_checkpoints_stay(on_disk: SimpleStore) -> None:
    with pytest.raises(StoreFull) as caught:
        on_disk.commit(*range(1, 100))
    step = max(int(name.split("-")[1]) for name in os.listdir(on_disk.run_dir) if name.startswith("step-"))
    assert caught.value.exit_code == 14
    assert step > 3
    assert newest_step(on_disk) == step - 1
    leftovers = [n for n in os.listdir(os.path.join(on_disk.run_dir, on_disk.dir_name(step))) if not layout.parse_part_file(n)]
    assert [n for n in leftovers if n not in (layout.META,)] == []


def test_a_full_disk_refuses_before_the_payload_is_written(on_disk: SimpleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk.commit(1)
    on_disk.part_bytes = 40 * MIB
    written: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (written.append(len(data)), real(fd, data))[1])
    with pytest.raises(StoreFull, match="reserve space"):
        on_disk.commit_parts(2, parts=("replicated",))
    assert written == []
    on_disk.part_bytes = MIB
    assert newest_step(on_disk) == 1


def test_after_room_is_made_the_same_save_succeeds(disk: LoopDisk, on_disk: SimpleStore) -> None:
    on_disk.commit(1)
    filler = os.open(os.path.join(disk.path, "filler"), os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(filler, 0, on_disk.fs.usage(disk.path).free_bytes - MIB // 2)
    os.close(filler)
    with pytest.raises(StoreFull):
        on_disk.commit(2)
    assert newest_step(on_disk) == 1
    os.remove(os.path.join(disk.path, "filler"))
    on_disk.commit(2)
    assert newest_step(on_disk) == 2


def test_saving_with_retention_never_fills_a_disk_that_holds_what_is_kept(on_disk: SimpleStore) -> None:
    for step in range(1, 30):
        assert save_once(on_disk, step).is_verified
    assert newest_step(on_disk) == 29


def test_a_journal_on_a_full_disk_refuses_and_goes_on_when_there_is_room(disk: LoopDisk, on_disk: SimpleStore) -> None:
    mine = Journal(on_disk.fs, SystemClock(), layout.journal_path(on_disk.run_dir, "n"), role="t")
    mine.append("before")
    filler = Path(disk.path, "filler")
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(disk.size_bytes))
    written = itertools.count()
    with pytest.raises(StoreFull):
        collections.deque((mine.append("full", text="x" * 1000) for _ in written), maxlen=0)
    assert next(written) < 100
    filler.unlink()
    mine.append("after")
    history = read(on_disk.fs, [mine.path])
    assert (history.events[0].kind, history.events[-1].kind) == ("before", "after")
    assert len(history.damaged_lines) <= 1


def test_a_read_only_disk_refuses_the_save_and_still_restores(disk: LoopDisk, on_disk: SimpleStore) -> None:
    on_disk.commit(1)
    disk.remount(options="ro")
    with pytest.raises(StoreReadOnly) as caught:
        on_disk.commit(2)
    assert caught.value.exit_code == 14
    assert newest_step(on_disk) == 1
    with pytest.raises(StoreReadOnly):
        Journal(on_disk.fs, SystemClock(), layout.journal_path(on_disk.run_dir, "n"), role="t").append("x")
    disk.remount(options="rw")
    on_disk.commit(2)
    assert newest_step(on_disk) == 2


@pytest.mark.parametrize("flag", [CUT, CUT_JOURNAL_FLUSHED])
def test_a_dead_disk_is_unreachable_and_after_power_returns_all_durable_is_there(disk: LoopDisk, on_disk: SimpleStore, flag: int) -> None:
    on_disk.commit(1, 2)
    disk.cut(flag)
    with pytest.raises(StorageError) as caught:
        on_disk.commit(3)
    assert caught.value.exit_code in (13, 14)
    with pytest.raises(StorageUnreachable):
        load_newest(on_disk.fs, on_disk.run_dir)
    disk.remount()
    assert newest_step(on_disk) == 2


def test_a_cut_right_after_the_first_start_keeps_the_run(disk: LoopDisk, on_disk: SimpleStore) -> None:
    disk.cut()
    disk.remount()
    again = SimpleStore(fs=PosixFileSystem(), run_dir=on_disk.run_dir)
    again.resume()
    assert (again.run_uid, again.attempt.seq) == (on_disk.run_uid, 2)


def test_a_disk_leaves_nothing_behind() -> None:
    from ridethrough.seam.process import run_captured

    made = LoopDisk(16 * MIB)

    def fail() -> None:
        with made:
            assert os.path.ismount(made.path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    image, path = made.image, made.path
    assert not os.path.exists(image)
    assert path not in Path("/proc/self/mounts").read_text()
    assert image not in run_captured(["losetup", "--list"], timeout_s=10)[1]

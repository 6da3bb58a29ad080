"""Starting a run or an attempt is durable, and a cut in the middle of it is no obstacle to the next start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from ridethrough.errors import Damaged, TierMissing, TwoHeads
from ridethrough.format import layout
from ridethrough.journal import Journal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import state_dir
from ridethrough.store.catalog import read_run
from ridethrough.store.start import open_run, remember_run, remembered_run
from ridethrough.testing import FakeClock, RecordingFileSystem, SimpleStore, flip_bit, load_newest


class PowerCut(Exception):
    """Nothing after this call happens."""


def cut_after(nth: int) -> tuple[RecordingFileSystem, list[int]]:
    left = [nth]

    def cut(call: str, path: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise PowerCut

    return RecordingFileSystem(PosixFileSystem(), before=cut), left


def opened(fs: object, path: Path) -> str:
    return open_run(fs, FakeClock(), str(path), known_uid=None, is_fresh=False).run_uid  # type: ignore[arg-type]


def test_a_run_opened_twice_is_the_same_run(tmp_path: Path) -> None:
    assert opened(PosixFileSystem(), tmp_path / "a" / "b" / "run") == opened(PosixFileSystem(), tmp_path / "a" / "b" / "run")


def test_the_marker_is_the_last_thing_a_new_run_gets(tmp_path: Path) -> None:
    recorder = RecordingFileSystem(PosixFileSystem())
    opened(recorder, tmp_path / "run")
    assert recorder.changes()[-2:] == [("rename", "run.json"), ("sync_dir", "run")]


def test_a_cut_at_any_call_of_a_first_start_leaves_a_place_that_starts_whole(tmp_path: Path) -> None:
    nth = 0
    while True:
        nth += 1
        path = tmp_path / str(nth) / "run"
        fs, left = cut_after(nth)
        with contextlib.suppress(PowerCut):
            opened(fs, path)
        uid = opened(PosixFileSystem(), path)
        assert read_run(PosixFileSystem(), str(path)).run_uid == uid
        # What the first minute of a run needs is there, whenever the power went.
        Journal(PosixFileSystem(), FakeClock(), layout.journal_path(str(path), "n"), role="t").append("run.started")
        assert (path / layout.ATTEMPTS).is_dir()
        if left[0] > 0:
            break
    assert nth > 15


def test_a_cut_at_any_call_of_a_new_attempt_never_hides_the_checkpoints_before_it(tmp_path: Path) -> None:
    nth = 0
    while True:
        nth += 1
        store = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / f"run-{nth}"), world_size=1, part_bytes=300)
        store.start()
        store.commit(1)
        store.fs, left = cut_after(nth)
        with contextlib.suppress(PowerCut):
            store.resume()
        store.fs = PosixFileSystem()
        loaded = load_newest(store.fs, store.run_dir)
        assert loaded is not None
        assert store.is_true(loaded)
        assert store.resume() == 1
        store.commit(2)
        newest = load_newest(store.fs, store.run_dir)
        assert newest is not None
        assert newest.step == 2
        if left[0] > 0:
            break
    assert nth > 20


def test_the_roster_is_durable_before_the_attempt_that_needs_it(store: SimpleStore) -> None:
    store.fs = recorder = RecordingFileSystem(PosixFileSystem())
    store.start()
    changes = recorder.changes()
    renames = [name for call, name in changes if call == "rename"]
    assert renames == ["roster.json", "attempt.json"]
    assert changes[changes.index(("rename", "roster.json")) + 1][0] == "sync_dir"
    assert changes[-1][0] == "sync_dir"


def test_a_rival_with_the_same_number_is_named(store: SimpleStore) -> None:
    with pytest.raises(TwoHeads) as caught:
        store.start(seq=1, nonce="f0" * 16)
    assert caught.value.fields["second"] != caught.value.fields["first"]


def test_what_a_node_remembers_survives_and_is_per_directory(tmp_path: Path) -> None:
    fs = PosixFileSystem()
    assert remembered_run(fs, state_dir(), str(tmp_path / "a")) is None
    remember_run(fs, state_dir(), str(tmp_path / "a"), "1" * 32)
    remember_run(fs, state_dir(), str(tmp_path / "b"), "2" * 32)
    assert remembered_run(fs, state_dir(), str(tmp_path / "a")) == "1" * 32
    assert remembered_run(fs, state_dir(), str(tmp_path / "b")) == "2" * 32


def test_damaged_memory_of_a_node_still_knows_that_there_was_a_run(tmp_path: Path) -> None:
    fs = PosixFileSystem()
    remember_run(fs, state_dir(), str(tmp_path / "a"), "1" * 32)
    [path] = Path(state_dir(), "runs").iterdir()
    flip_bit(str(path), 40)
    known = remembered_run(fs, state_dir(), str(tmp_path / "a"))
    assert known == ""
    with pytest.raises(TierMissing):
        open_run(fs, FakeClock(), str(tmp_path / "a"), known_uid=known, is_fresh=False)


def test_a_damaged_marker_is_never_overwritten_by_a_start(store: SimpleStore) -> None:
    path = os.path.join(store.run_dir, layout.RUN)
    flip_bit(path, 30)
    before = Path(path).read_bytes()
    with pytest.raises(Damaged):
        opened(PosixFileSystem(), Path(store.run_dir))
    assert Path(path).read_bytes() == before


def test_a_run_starts_in_a_hostile_directory(hostile_dir: Path) -> None:
    path = hostile_dir / "sub 'dir"
    assert opened(PosixFileSystem(), path) == opened(PosixFileSystem(), path)
    remember_run(PosixFileSystem(), state_dir(), str(path), "1" * 32)
    assert remembered_run(PosixFileSystem(), state_dir(), str(path)) == "1" * 32

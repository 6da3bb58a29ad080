"""A part is sealed and durable, or nothing refers to it: in this order, whatever call fails."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from ridethrough.errors import StorageError, StorageUnreachable, StoreFull, StoreReadOnly
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.commit import ensure_dir, publish
from ridethrough.testing import ErrorOn, RecordingFileSystem, SimpleStore, TruncateOnce, load_newest

ERRORS = {errno.ENOSPC: (StoreFull, 14), errno.EDQUOT: (StoreFull, 14), errno.EIO: (StorageUnreachable, 13), errno.EROFS: (StoreReadOnly, 14)}


def roles(store: SimpleStore, step: int, calls: list[tuple[str, str]]) -> list[str]:
    """The calls in the words of the design."""
    step_dir = os.path.join(store.run_dir, store.dir_name(step))
    words = []
    for call, path in calls:
        name = "payload" if path.endswith(".safetensors") else "temporary seal" if path.endswith(".tmp") else "seal"
        if path in (step_dir, store.run_dir, os.path.dirname(store.run_dir)):
            name = {step_dir: "checkpoint dir", store.run_dir: "run dir"}.get(path, "parent of run dir")
        words.append(f"{call} {name}")
    return words


def recorded(store: SimpleStore) -> RecordingFileSystem:
    store.fs = recorder = RecordingFileSystem(store.fs)
    return recorder


def changing(recorder: RecordingFileSystem) -> list[tuple[str, str]]:
    return [(call, path) for call, path in recorder.calls if call not in ("stat", "close", "list_dir", "read", "read_into")]


FILE_ORDER = [
    "create payload", "write payload", "sync payload", "sync_dir checkpoint dir",
    "create temporary seal", "write temporary seal", "sync temporary seal",
    "rename seal", "sync_dir checkpoint dir",
]  # fmt: skip


def test_the_first_part_is_committed_in_the_order_of_the_design(store: SimpleStore) -> None:
    recorder = recorded(store)
    store.commit_parts(1, parts=("replicated",))
    order = roles(store, 1, changing(recorder))
    assert order == ["sync_dir parent of run dir", "make_dir checkpoint dir", "sync_dir run dir", *FILE_ORDER]


def test_a_further_part_makes_sure_that_the_directory_made_by_another_is_durable(store: SimpleStore) -> None:
    # Whoever made it may have been killed before it synced the parent.
    os.mkdir(os.path.join(store.run_dir, store.dir_name(1)))
    recorder = recorded(store)
    store.commit_parts(1, parts=("replicated",))
    assert roles(store, 1, changing(recorder)) == ["sync_dir run dir", *FILE_ORDER]


def test_the_space_is_reserved_before_a_byte_is_written(store: SimpleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real_reserve, real_write = os.posix_fallocate, os.write
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: (done.append(f"reserve {size}"), real_reserve(fd, at, size))[1])
    monkeypatch.setattr(os, "write", lambda fd, data: (done.append(f"write {len(data)}"), real_write(fd, data))[1])
    store.commit_parts(1, parts=("replicated",))
    size = len(store.truth(1, "replicated"))
    assert done[:2] == [f"reserve {size}", f"write {size}"]


def test_every_file_gets_a_name_never_used_before(store: SimpleStore) -> None:
    names = {seal.payload_name for _ in range(5) for seal in store.commit_parts(1)}
    assert len(names) == 15


def calls_of_a_commit(tmp_path: Path) -> int:
    store = SimpleStore(fs=RecordingFileSystem(PosixFileSystem()), run_dir=str(tmp_path / "count"))
    store.start()
    recorder = recorded(store)
    store.commit_parts(1, parts=("replicated",))
    return len(recorder.calls)


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("is_late", [False, True], ids=["refused", "done but reported as failed"])
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
def test_a_failure_at_any_call_leaves_no_seal_and_the_next_commit_succeeds(tmp_path: Path, error: int, is_late: bool, is_lasting: bool) -> None:
    kind, exit_code = ERRORS[error]
    for nth in range(1, calls_of_a_commit(tmp_path) + 1):
        real = PosixFileSystem()
        store = SimpleStore(fs=real, run_dir=str(tmp_path / f"run-{nth}"), world_size=1)
        store.start()
        store.fs = fault = ErrorOn(real, "*", error, nth=nth, is_late=is_late, is_lasting=is_lasting)
        try:
            store.commit_parts(1, parts=("replicated",))
            caught = None
        except StorageError as raised:
            caught = raised
        if is_late and not fault.failed:
            continue  # the call itself had answered "not found": it cannot fail late
        where = f"call {nth}: {fault.failed[0][0]} {os.path.basename(fault.failed[0][1])}"
        assert type(caught) is kind, where
        assert caught.exit_code == exit_code

        directory = os.path.join(store.run_dir, store.dir_name(1))
        names = set(os.listdir(directory)) if os.path.isdir(directory) else set()
        seals = {name for name in names if name.endswith(".seal")}
        if is_lasting:  # what cannot be removed may stay, but then as a whole
            assert all(name.replace(".seal", ".safetensors") in names for name in seals), where
        else:
            assert not seals, where
        assert all(name.endswith(layout.TEMPORARY) or layout.parse_part_file(name) for name in names), where

        store.fs = real
        again = store.commit_parts(1)
        assert not {seal.payload_name for seal in again} & names, where
        loaded = load_newest(real, store.run_dir)
        assert loaded is not None, where
        assert store.is_true(loaded), where


def test_a_failure_at_any_call_of_a_save_never_costs_the_checkpoint_before(tmp_path: Path) -> None:
    store = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "run"), part_bytes=500)
    store.start()
    store.commit(1)
    nth, step = 0, 1
    while True:
        nth, step = nth + 1, step + 1
        store.fs = fault = ErrorOn(PosixFileSystem(), "*", errno.EIO, nth=nth)
        with contextlib.suppress(StorageUnreachable):
            store.commit(step)
        loaded = load_newest(PosixFileSystem(), store.run_dir)
        assert loaded is not None, fault.failed
        assert store.is_true(loaded), fault.failed
        if not fault.failed:
            break
    assert nth > 40
    assert loaded.step == step


@pytest.mark.parametrize("call", ["sync", "write", "close"])
def test_a_file_whose_sync_or_write_failed_is_never_touched_again(store: SimpleStore, call: str) -> None:
    recorder = RecordingFileSystem(PosixFileSystem())
    store.fs = fault = ErrorOn(recorder, call, errno.EIO, within=".safetensors")
    with pytest.raises(StorageUnreachable):
        store.commit_parts(1, parts=("replicated",))
    [(_, path)] = fault.failed
    before = len(recorder.calls)
    store.commit_parts(1, parts=("replicated",))
    assert path not in [touched for _, touched in recorder.calls[before:]]


def test_a_payload_that_the_disk_silently_truncates_never_passes_for_the_state(store: SimpleStore) -> None:
    store.commit(1)
    store.fs = TruncateOnce(PosixFileSystem(), within="rank-00000")
    store.commit(2)
    loaded = load_newest(PosixFileSystem(), store.run_dir)
    assert loaded is not None
    assert loaded.step == 1
    assert store.is_true(loaded)


def test_publishing_replaces_old_content_or_keeps_it_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "meta.json")
    publish(PosixFileSystem(), path, b"old")
    for nth in range(1, 20):
        fault = ErrorOn(PosixFileSystem(), "*", errno.EIO, nth=nth)
        try:
            publish(fault, path, b"new content")
        except StorageUnreachable:
            assert Path(path).read_bytes() in (b"old", b"new content")
            assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] or fault.failed[0][0] == "close"
    assert Path(path).read_bytes() == b"new content"


def test_missing_directories_are_made_from_the_top_each_durable_before_the_next(tmp_path: Path) -> None:
    recorder = RecordingFileSystem(PosixFileSystem())
    ensure_dir(recorder, str(tmp_path / "a" / "b"))
    a = str(tmp_path / "a")
    assert changing(recorder) == [
        ("sync_dir", str(tmp_path.parent)),
        ("make_dir", a),
        ("sync_dir", str(tmp_path)),
        ("make_dir", os.path.join(a, "b")),
        ("sync_dir", a),
    ]


def test_a_parent_that_may_not_be_read_is_no_reason_to_fail(tmp_path: Path) -> None:
    fault = ErrorOn(PosixFileSystem(), "sync_dir", errno.EACCES)
    ensure_dir(fault, str(tmp_path / "a"))
    assert (tmp_path / "a").is_dir()


def test_a_whole_run_lives_in_a_hostile_directory(hostile_dir: Path) -> None:
    store = SimpleStore(fs=PosixFileSystem(), run_dir=str(hostile_dir))
    store.start()
    store.commit(1, 2)
    loaded = load_newest(PosixFileSystem(), str(hostile_dir))
    assert loaded is not None
    assert loaded.step == 2
    assert store.is_true(loaded)


def test_a_checkpoint_is_two_files_a_part_and_two_more(store: SimpleStore) -> None:
    store.commit(1)
    directory = Path(store.run_dir, store.dir_name(1))
    assert len(list(directory.iterdir())) == 8

"""The key is looked for beside the loop, which never waits for storage."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ridethrough.format import layout
from ridethrough.seam import process
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store.key import ensure_key
from ridethrough.store.start import remember_run
from ridethrough.supervisor import secret
from ridethrough.supervisor.secret import KeyFinder
from ridethrough.testing import RecordingFileSystem, SimpleStore

KEY = "5a" * 32


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_RETRY_S", 0.02)


def find(run_dir: Path | str, *, fs: FileSystem | None = None, key_file: Path | None = None) -> KeyFinder:
    return KeyFinder(fs or PosixFileSystem(), SystemClock(), str(run_dir), str(key_file) if key_file else None)


def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def key_file(path: Path, mode: int = 0o600) -> Path:
    path.write_text(KEY + "\n")
    path.chmod(mode)
    return path


def test_key_that_lies_in_the_run_directory_is_found(store: SimpleStore) -> None:
    key = ensure_key(PosixFileSystem(), store.run_dir)
    found = find(store.run_dir)
    until(lambda: found.key == key)


def test_key_is_made_where_there_is_none_for_its_owner_only(store: SimpleStore) -> None:
    found = find(store.run_dir)
    until(lambda: found.key is not None)
    path = Path(store.run_dir, layout.KEY)
    assert path.read_text().strip() == found.key
    assert path.stat().st_mode & 0o777 == 0o600


def test_key_is_made_with_the_run_directory_of_a_new_run(tmp_path: Path) -> None:
    found = find(tmp_path / "new" / "run")
    until(lambda: found.key is not None)


def test_nodes_that_look_at_once_find_one_key(store: SimpleStore) -> None:
    finders = [find(store.run_dir) for _ in range(8)]
    until(lambda: all(f.key for f in finders))
    assert len({f.key for f in finders}) == 1


def test_key_file_of_the_site_is_taken(tmp_path: Path) -> None:
    found = find(tmp_path / "run", key_file=key_file(tmp_path / "key"))
    until(lambda: found.key == KEY)
    assert not (tmp_path / "run").exists()


def test_key_file_that_others_can_read_is_refused_for_good(tmp_path: Path) -> None:
    found = find(tmp_path / "run", key_file=key_file(tmp_path / "key", 0o644))
    until(lambda: found.refusal is not None)
    assert "open to other users" in str(found.refusal)
    assert found.key is None


def test_key_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    found = find(tmp_path / "run", key_file=tmp_path / "key")
    until(lambda: "has not been read yet" not in found.reason)
    assert found.reason.startswith("storage: ")
    key_file(tmp_path / "key")
    until(lambda: found.key == KEY)


def test_unmounted_disk_gets_no_key_of_its_own(store: SimpleStore) -> None:
    """It would not be that of the others: the node would be deaf to them for ever."""
    remember_run(PosixFileSystem(), process.state_dir(), store.run_dir, store.run_uid, "shared")
    away = store.run_dir + ".away"
    os.rename(store.run_dir, away)
    os.mkdir(store.run_dir)
    found = find(store.run_dir)
    until(lambda: "not mounted" in found.reason)
    assert os.listdir(store.run_dir) == []
    os.rmdir(store.run_dir)
    os.rename(away, store.run_dir)
    until(lambda: found.key is not None)


def test_dead_mount_blocks_nobody_and_the_key_is_found_when_it_answers(store: SimpleStore) -> None:
    ensure_key(PosixFileSystem(), store.run_dir)
    release = threading.Event()

    def hang(call: str, path: str) -> None:
        if path.endswith(layout.KEY):
            release.wait(20)

    began_s = time.monotonic()
    found = find(store.run_dir, fs=RecordingFileSystem(PosixFileSystem(), before=hang))
    assert time.monotonic() - began_s < 1.0
    assert found.key is None
    assert found.reason.startswith("storage: ")
    release.set()
    until(lambda: found.key is not None)


def test_error_that_passes_is_not_the_end_of_looking(store: SimpleStore) -> None:
    hidden = store.run_dir + ".hidden"
    shutil.move(store.run_dir, hidden)
    Path(store.run_dir).write_text("a file where the directory should be")
    found = find(store.run_dir)
    until(lambda: "has not been read yet" not in found.reason)
    os.unlink(store.run_dir)
    shutil.move(hidden, store.run_dir)
    until(lambda: found.key is not None)

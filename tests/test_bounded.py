"""Storage that hangs is given up: a FUSE directory whose server stands still."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faulty_disk import FaultyDisk
from ridethrough.errors import StorageUnreachable
from ridethrough.seam.bounded import BoundedFileSystem
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot.address import real_path, remember_alias
from ridethrough.testing import ErrorOn, SimpleStore, load_newest

LIMIT_S = 0.5
CALLS: dict[str, Callable[[BoundedFileSystem, str], Any]] = {
    "create": lambda fs, path: fs.create(path + ".new", 10),
    "append": lambda fs, path: fs.append(path, b"x"),
    "read": lambda fs, path: fs.read(path, max_bytes=100),
    "read_into": lambda fs, path: fs.read_into(path, memoryview(bytearray(4)), past_cache=True),
    "stat": lambda fs, path: fs.stat(path),
    "list_dir": lambda fs, path: fs.list_dir(os.path.dirname(path)),
    "make_dir": lambda fs, path: fs.make_dir(path + ".dir"),
    "rename": lambda fs, path: fs.rename(path, path + ".to"),
    "remove": lambda fs, path: fs.remove(path),
    "sync_dir": lambda fs, path: fs.sync_dir(os.path.dirname(path)),
    "usage": lambda fs, path: fs.usage(path),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    with FaultyDisk(tmp_path / "faulty") as made:
        yield made


@pytest.mark.root
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_hangs_is_given_up_and_works_when_the_disk_answers(disk: FaultyDisk, name: str) -> None:
    fs, path = BoundedFileSystem(PosixFileSystem(), limit_s=LIMIT_S), str(disk.path / "file")
    fs.append(path, b"text")
    disk.hang()
    began_s = time.monotonic()
    with pytest.raises(StorageUnreachable, match=r"no answer within 0 s on .*: " + str(disk.path)):
        CALLS[name](fs, path)
    assert time.monotonic() - began_s < LIMIT_S + 2
    disk.heal()
    fs.close()
    fs.stat(str(disk.path))


@pytest.mark.root
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_writer_that_hangs_is_given_up(disk: FaultyDisk, call: str) -> None:
    fs = BoundedFileSystem(PosixFileSystem(), limit_s=LIMIT_S)
    writer = fs.create(str(disk.path / "file"), 10)
    writer.write(b"text")
    disk.hang()
    with pytest.raises(StorageUnreachable):
        {"write": lambda: writer.write(b"text"), "sync": writer.sync}[call]()
    disk.heal()
    writer.close()


@pytest.mark.root
def test_a_process_ends_although_a_call_of_it_hangs(disk: FaultyDisk) -> None:
    script = """
import sys
from ridethrough.errors import StorageUnreachable
from ridethrough.seam.bounded import BoundedFileSystem
from ridethrough.seam.fs import PosixFileSystem
try:
    BoundedFileSystem(PosixFileSystem(), limit_s=0.5).read(sys.argv[1], max_bytes=10)
except StorageUnreachable as error:
    sys.exit(error.exit_code)
"""
    disk.hang()
    done = subprocess.run([sys.executable, "-c", script, str(disk.path / "file")], timeout=60, check=False)
    assert done.returncode == 13


@pytest.mark.root
@pytest.mark.timeout(60)
def test_a_path_on_a_disk_that_hangs_is_where_it_was_last(disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.snapshot.address._LOOK_UP_S", LIMIT_S)
    (disk.path / "there").mkdir()
    link = tmp_path / "run"
    link.symlink_to(disk.path / "there")
    remember_alias(str(link), real_path(str(link)))
    disk.hang()
    assert real_path(str(link)) == str(disk.path / "there")
    unknown = str(disk.path / "elsewhere")
    assert real_path(unknown) == unknown
    disk.heal()


def test_answers_and_errors_are_those_of_the_storage(tmp_path: Path) -> None:
    store = SimpleStore(fs=BoundedFileSystem(PosixFileSystem(), limit_s=30), run_dir=str(tmp_path / "run"))
    store.start()
    store.commit(1)
    fs = BoundedFileSystem(ErrorOn(PosixFileSystem(), "list_dir", errno.ESTALE), limit_s=30)
    with pytest.raises(StorageUnreachable, match="ESTALE"):
        load_newest(fs, store.run_dir)
    loaded = load_newest(fs, store.run_dir)
    assert loaded is not None
    assert store.is_true(loaded)
    with pytest.raises(FileNotFoundError):
        fs.stat(str(tmp_path / "absent"))


def test_nothing_runs_beside_us_once_it_is_closed(tmp_path: Path) -> None:
    before = threading.active_count()
    fs = BoundedFileSystem(PosixFileSystem(), limit_s=30)
    fs.stat(str(tmp_path))
    assert threading.active_count() == before + 1
    fs.close()
    assert threading.active_count() == before
    fs.stat(str(tmp_path))
    fs.close()

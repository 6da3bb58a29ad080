"""Storage that hangs is given up: a FUSE directory whose server stands still."""

from __future__ import annotations

import contextlib
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
from ridethrough.snapshot.address import real_path
from ridethrough.store.commit import publish
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


def until(answer: Callable[[], Any]) -> Any:
    """What comes back once an earlier call has."""
    deadline_s = time.monotonic() + 20
    while True:
        try:
            return answer()
        except StorageUnreachable:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


Workers = Callable[[], list[threading.Thread]]


@pytest.fixture
def workers() -> Workers:
    """Threads for storage that this test has begun and that still run."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread.name == "ridethrough-storage" and thread not in before]


def descriptors() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return found


@pytest.mark.root
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_hangs_is_given_up_and_works_when_the_disk_answers(disk: FaultyDisk, workers: Workers, name: str) -> None:
    fs, path = BoundedFileSystem(PosixFileSystem(), limit_s=LIMIT_S), str(disk.path / "file")
    fs.append(path, b"text")
    disk.hang()
    began_s = time.monotonic()
    with pytest.raises(StorageUnreachable, match=r"no answer within 0.5 s on .*: " + str(disk.path)):
        CALLS[name](fs, path)
    assert time.monotonic() - began_s < LIMIT_S + 2
    disk.heal()
    until(lambda: fs.stat(str(disk.path)))
    fs.close()
    assert workers() == []


@pytest.mark.root
@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_writer_that_hangs_is_given_up(disk: FaultyDisk, workers: Workers, call: str) -> None:
    fs = BoundedFileSystem(PosixFileSystem(), limit_s=LIMIT_S)
    writer = fs.create(str(disk.path / "file"), 10)
    writer.write(b"text")
    disk.hang()
    with pytest.raises(StorageUnreachable):
        {"write": lambda: writer.write(b"text"), "sync": writer.sync}[call]()
    disk.heal()
    until(lambda: writer.close() or True)
    fs.close()
    assert workers() == []


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
def test_a_path_on_a_disk_that_hangs_is_not_guessed(disk: FaultyDisk, tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(disk.path / "there")
    disk.hang()
    with pytest.raises(StorageUnreachable, match=r"no answer within 0\.5 s on look up"):
        real_path(str(tmp_path / "run"), limit_s=LIMIT_S)


def test_a_path_is_resolved_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "volume" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "volume" / "deep")
    assert real_path(str(tmp_path / "link" / ".." / "run"), limit_s=30) == str(tmp_path / "volume" / "run")


@pytest.mark.root
def test_what_follows_a_call_that_hangs_is_refused_at_once_and_never_overtakes_it(disk: FaultyDisk, workers: Workers) -> None:
    fs, path = BoundedFileSystem(PosixFileSystem(), limit_s=LIMIT_S), str(disk.path / "file")
    disk.hang()
    began_s = time.monotonic()
    with pytest.raises(StorageUnreachable, match=r"no answer within 0\.5 s on create"):
        publish(fs, path, b"text")  # which would also remove what it had begun
    with pytest.raises(StorageUnreachable, match="create has not come back"):
        fs.remove(path)
    assert time.monotonic() - began_s < 3 * LIMIT_S
    disk.heal()
    until(lambda: fs.list_dir(str(disk.path)))  # made after all, and closed
    fs.remove(path + ".anything")
    fs.close()
    assert workers() == []
    assert [name for name in descriptors() if name.startswith(str(disk.path))] == []


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


def test_nothing_runs_beside_us_once_it_is_closed(tmp_path: Path, workers: Workers) -> None:
    fs = BoundedFileSystem(PosixFileSystem(), limit_s=30)
    fs.stat(str(tmp_path))
    assert len(workers()) == 1
    fs.close()
    assert workers() == []
    fs.stat(str(tmp_path))
    fs.close()

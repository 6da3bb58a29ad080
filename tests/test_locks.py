"""Locks of dead, foreign and living processes: only a living one keeps anybody out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridethrough.errors import StoreLocked
from ridethrough.seam.process import FileLock, start_time
from ridethrough.snapshot.address import find_socket, lock_path

HOLD = """
import sys, time
from ridethrough.seam.process import FileLock
FileLock(sys.argv[1]).acquire(run="/r", note="/somewhere/keeper.sock")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that lives and has the lock of a run."""
    found = subprocess.Popen([sys.executable, "-c", HOLD, lock_path(str(tmp_path / "run"))], stdout=subprocess.PIPE, text=True)
    try:
        assert found.stdout is not None
        assert found.stdout.readline() == "held\n"
        yield found
    finally:
        found.kill()
        found.communicate()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return lock_path(str(tmp_path / "run"))


def test_a_lock_that_is_held_names_who_holds_it(holder: subprocess.Popen[str], path: str, tmp_path: Path) -> None:
    with pytest.raises(StoreLocked, match=rf"/runs/exp001 is locked on this node by process {holder.pid}$") as caught:
        FileLock(path).acquire(run="/runs/exp001", note="")
    assert caught.value.exit_code == 11
    assert find_socket(str(tmp_path / "run")) == "/somewhere/keeper.sock"


def test_a_lock_is_free_as_soon_as_its_holder_was_killed(holder: subprocess.Popen[str], path: str, tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    assert find_socket(str(tmp_path / "run")) is None
    lock = FileLock(path)
    assert lock.acquire(run="/r", note="").startswith(f"{holder.pid}\n/somewhere/keeper.sock\n")
    lock.release()


def test_a_lock_is_held_by_a_process_that_stands_still(holder: subprocess.Popen[str], path: str) -> None:
    """It may wake up and write: only its death, or a newer attempt, keeps it from that."""
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreLocked):
        FileLock(path).acquire(run="/r", note="")
    holder.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n\n",
        "no number\n/s\n1 boot\n",
        f"{os.getpid()}\n/s\n{start_time(os.getpid())} of-an-earlier-boot\n",
        f"{os.getpid()}\n/s\n",
        "\0" * 4096,
        "9" * 5000,
        "\udcff\n",
    ],
    ids=["empty", "blank", "no number", "number of another boot", "half", "zeroes", "long", "not utf-8"],
)
def test_what_a_power_cut_or_somebody_else_left_in_a_lock_keeps_nobody_out(path: str, tmp_path: Path, text: str) -> None:
    Path(path).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert find_socket(str(tmp_path / "run")) is None
    lock = FileLock(path)
    lock.acquire(run="/r", note="")
    lock.release()


def test_a_lock_is_taken_by_exactly_one_of_many_that_ask_at_once(path: str) -> None:
    asked = [subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(6)]
    try:
        answers = [process.stdout.readline() for process in asked if process.stdout is not None]
    finally:
        for process in asked:
            process.kill()
            process.communicate()
    assert sorted(answers) == ["", "", "", "", "", "held\n"]


def test_who_only_borrows_a_lock_leaves_what_the_last_keeper_had_left_to_its_successor(holder: subprocess.Popen[str], path: str) -> None:
    holder.kill()
    holder.wait()
    borrowed = FileLock(path)
    borrowed.acquire(run="/r", note=None)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        FileLock(path).acquire(run="/r", note="")
    borrowed.release()
    assert FileLock(path).acquire(run="/r", note="/somewhere/next.sock").split("\n")[1] == "/somewhere/keeper.sock"

"""The process whose disk loses its power: saves in a loop and tells, outside the disk, what it is doing.

Run by `cut_harness`. Acknowledged (durable) steps go down a pipe, one a line; the phase goes into a
shared memory file before each call to the disk.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from ridethrough.errors import RideThroughError
from ridethrough.format import layout
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.seam.process import die_with_parent
from ridethrough.store.catalog import read_catalog
from ridethrough.store.copy import copy_checkpoint
from ridethrough.store.place import Place
from ridethrough.store.retain import delete_checkpoint
from ridethrough.testing.faults import DropSyncs, RecordingFileSystem
from ridethrough.testing.store import SimpleStore, save_once

PHASES = (
    "start", "restore", "idle", "mkdir", "payload-create", "payload-write", "payload-fsync", "seal-write", "seal-fsync", "seal-rename", "dir-fsync",
    "manifest", "verify", "retention", "copy",
)  # fmt: skip
BOARD_BYTES = 4096
CURRENT, COUNTS = 1, 8
"""Places on the board, in 8-byte words: the phase now, and how often each phase was entered."""

PART_BYTES = 300_000
_IDLE_S = 0.002
_BESIDE_S = 0.0005
_CALLS = {
    ("make_dir", False): "mkdir", ("create", False): "payload-create", ("write", False): "payload-write", ("sync", False): "payload-fsync",
    ("create", True): "seal-write", ("write", True): "seal-write", ("sync", True): "seal-fsync", ("rename", False): "seal-rename",
    ("sync_dir", False): "dir-fsync",
}  # fmt: skip


class Board:
    """What this process is doing, seen by its parent without asking."""

    def __init__(self, path: str, *, target: str, occurrence: int, hold_s: float) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), BOARD_BYTES)).cast("Q")
        self._target = PHASES.index(target)
        self._occurrence = occurrence
        self._hold_s = hold_s
        self.stage = "start"

    def enter(self, phase: str) -> None:
        """The phase is on the board; at the chosen moment, give the power some time to go before the call is made."""
        index = PHASES.index(phase)
        self._words[CURRENT] = index
        self._words[COUNTS + index] += 1
        if index == self._target and self._words[COUNTS + index] == self._occurrence:
            until_s = time.perf_counter() + self._hold_s
            while time.perf_counter() < until_s:
                pass

    def before(self, call: str, path: str) -> None:
        """Hook of the file system."""
        if self.stage in ("restore", "copy"):
            self.enter(self.stage)
        elif self.stage == "verify":
            self.enter("verify" if call == "read_into" else "manifest")
        elif self.stage == "retention":
            self.enter("retention")
        elif self.stage == "commit":
            phase = _CALLS.get((call, path.endswith(".tmp")))
            if phase is not None:
                self.enter(phase)


def save_until_cut(ack_fd: int, board_path: str, plan: dict[str, Any]) -> None:
    """Saves go on until the disk refuses."""
    board = Board(board_path, target=plan["phase"], occurrence=plan["occurrence"], hold_s=plan["hold_s"])
    real = DropSyncs(PosixFileSystem()) if plan["drop_syncs"] else PosixFileSystem()
    recorder = RecordingFileSystem(real, before=board.before)

    def restored() -> tuple[SimpleStore, int]:
        board.stage = "restore"
        store = SimpleStore(fs=recorder, run_dir=plan["run_dir"], seed=plan["seed"], part_bytes=PART_BYTES, clock=SystemClock())
        return store, store.resume()

    store, step = restored()

    def on_stage(stage: str) -> None:
        board.stage = stage
        if stage == "verify":  # every part is sealed: from here on the save is acknowledged
            os.write(ack_fd, f"{step}\n".encode())
        elif stage == "idle":
            board.enter("idle")
            time.sleep(_IDLE_S)

    while True:
        step += 1
        save_once(store, step, on_stage=on_stage)
        if plan["phase"] == "copy":
            board.stage = "copy"
            copy_on(recorder, plan["run_dir"], store.dir_name(step), lambda step=step: os.write(ack_fd, f"-{step}\n".encode()))
            board.stage = "idle"
        if plan["phase"] == "restore":  # a new run has nothing to restore at its first start
            store, step = restored()


def copy_on(fs: FileSystem, run_dir: str, dir_name: str, acknowledge: Callable[[], object]) -> None:
    """The checkpoint is in another directory, too, which keeps the last two."""
    here, there = (Place(fs=fs, run_dir=path, shown=path, is_mounted=True) for path in (run_dir, copy_of(run_dir)))
    copy_checkpoint(here, there, next(c for c in read_catalog(fs, run_dir).checkpoints if c.dir_name == dir_name))
    acknowledge()
    for old in sorted(name for name in fs.list_dir(there.run_dir) if layout.parse_step_dir(name))[:-2]:
        delete_checkpoint(fs, there.run_dir, old)


def copy_of(run_dir: str) -> str:
    """Where the copy of a run is."""
    return f"{run_dir}-copy"


def write_beside(run_dir: str) -> None:
    """Until the disk refuses, lines are appended and synced, as a logger does: the journal is committed between any two calls of the store."""
    log = os.open(os.path.join(os.path.dirname(run_dir), "neighbour.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    while True:
        os.write(log, b"what a logger writes all day\n")
        os.fsync(log)
        time.sleep(_BESIDE_S)


def forked(work: Callable[[], None]) -> int:
    """The pid of a process that does it until the power is gone."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            work()
        except (RideThroughError, OSError):
            os._exit(3)  # the power is gone
        except BaseException:  # noqa: BLE001  a forked process must never go on in the loop of its parent
            traceback.print_exc()
        os._exit(1)
    return pid


def main(ack_fd: str, board_path: str) -> None:
    """For each plan on stdin a forked process that saves; its pid is answered at once, "gone" when it is dead.

    Forked, because starting an interpreter costs more than saving, cutting and checking together.
    """
    die_with_parent()
    for line in sys.stdin:
        plan = json.loads(line)
        beside = forked(lambda plan=plan: write_beside(plan["run_dir"])) if plan["has_neighbour"] else 0
        saver = forked(lambda plan=plan: save_until_cut(int(ack_fd), board_path, plan))
        print(saver, flush=True)
        os.waitpid(saver, 0)
        if beside:
            os.kill(beside, signal.SIGKILL)
            os.waitpid(beside, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The process whose disk loses its power: saves in a loop and tells, outside the disk, what it is doing.

Run by `cut_harness`. Acknowledged (durable) steps go down a pipe, one a line; the phase goes into a
shared memory file before each call to the disk.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
import traceback
from typing import Any

from ridethrough.errors import RideThroughError
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing.faults import DropSyncs, RecordingFileSystem
from ridethrough.testing.store import SimpleStore, save_once

PHASES = (
    "start", "idle", "mkdir", "payload-create", "payload-write", "payload-fsync", "seal-write", "seal-fsync", "seal-rename", "dir-fsync",
    "manifest", "verify", "retention",
)  # fmt: skip
BOARD_BYTES = 4096
CURRENT, COUNTS = 1, 8
"""Places on the board, in 8-byte words: the phase now, and how often each phase was entered."""

PART_BYTES = 300_000
_IDLE_S = 0.002
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
        if self.stage == "verify":
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
    store = SimpleStore(fs=recorder, run_dir=plan["run_dir"], seed=plan["seed"], part_bytes=PART_BYTES, clock=SystemClock())
    step = store.resume()

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


def main(ack_fd: str, board_path: str) -> None:
    """For each plan on stdin a forked process that saves; its pid is answered at once, "gone" when it is dead.

    Forked, because starting an interpreter costs more than saving, cutting and checking together.
    """
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                save_until_cut(int(ack_fd), board_path, json.loads(line))
            except (RideThroughError, OSError):
                os._exit(3)  # the power is gone
            except BaseException:  # noqa: BLE001  a forked process must never go on in this loop
                traceback.print_exc()
            os._exit(1)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

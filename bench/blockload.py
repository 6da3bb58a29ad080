"""What the block layer's disk goes through, and what must be true of any image that a cut of it can leave.

The workload is the store itself: saves of several parts, retention, saves that fail and are repeated, a process that dies
between two parts, and a restart. What it was told is durable stands as marks in the disk's log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ridethrough.errors import RideThroughError
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store.catalog import read_catalog
from ridethrough.store.retain import Retention
from ridethrough.testing import DropDirSyncs, DropSyncs, ErrorOn, RecordingFileSystem, SimpleStore, load_newest, restorable_steps, save_once
from ridethrough.testing.faults import READS

KEEP_LAST = 2
PART_BYTES = 40_000
MUTANTS: dict[str, Callable[[FileSystem], FileSystem]] = {"no-fsync": DropSyncs, "no-dir-fsync": DropDirSyncs}
_NEIGHBOUR_RATIO = 0.2
# Longer than the file systems' own background commit, which is set to one second.
_PAUSE_S = 1.3

Mark = Callable[..., None]


def store_at(fs: FileSystem, run_dir: str, seed: int, attempt_seq: int) -> SimpleStore:
    """The bytes of each attempt are its own, so that a checkpoint mixed of two of them cannot pass for true."""
    return SimpleStore(fs=fs, run_dir=run_dir, seed=seed + attempt_seq, part_bytes=PART_BYTES, retention=Retention(keep_last=KEEP_LAST))


class Neighbour:
    """Another writer on the same file system: its fsyncs commit the journal between any two calls of the store."""

    def __init__(self, path: str, chance: random.Random) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._chance = chance

    def maybe(self) -> None:
        """It has appended and synced, or not."""
        if self._chance.random() < _NEIGHBOUR_RATIO:
            os.write(self._file, b"what a logger writes all day\n")
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def work(mount_point: str, mark: Mark, *, seed: int, mutant: str | None, pauses: int) -> None:
    """Two attempts have been through everything, and the marks tell what was acknowledged when.

    Args:
        mount_point: Where the disk is mounted.
        mark: Puts words into the disk's log.
        seed: Decides bytes and what the neighbour does.
        mutant: A key of `MUTANTS`, None for the store as it is.
        pauses: After how many of the saves to wait for the file system's background commit.
    """
    run_dir = os.path.join(mount_point, "run")
    neighbour = Neighbour(os.path.join(mount_point, "neighbour.log"), random.Random(seed))

    def before(call: str, path: str) -> None:
        if call not in READS:
            mark(call=call, name=os.path.basename(path))

    def after(call: str, path: str) -> None:
        if call not in READS:
            neighbour.maybe()

    real: FileSystem = PosixFileSystem()
    fs = RecordingFileSystem(MUTANTS[mutant](real) if mutant else real, before=before, after=after)

    def save(store: SimpleStore, step: int) -> None:
        def on_stage(stage: str) -> None:
            if stage == "verify":  # every part is sealed: from here on the save is acknowledged
                mark(acked=step)

        nonlocal pauses
        assert save_once(store, step, on_stage=on_stage).is_verified
        if pauses > 0:
            pauses -= 1
            time.sleep(_PAUSE_S)

    def save_after_failure(store: SimpleStore, step: int, fault: ErrorOn) -> None:
        store.fs = fault
        with contextlib.suppress(RideThroughError):
            save_once(store, step, on_stage=lambda stage: mark(failed=step))
        assert fault.failed, "the fault did not strike"
        store.fs = fs
        save(store, step)

    try:
        first = store_at(fs, run_dir, seed, 1)
        first.start()
        mark(attempt=first.attempt.seq)
        for step in (1, 2, 3):
            save(first, step)
        save_after_failure(first, 4, ErrorOn(fs, "create", errno.ENOSPC, nth=3, within="safetensors"))
        # The second seal's fsync is made and reported as failed: the first part is taken back.
        save_after_failure(first, 5, ErrorOn(fs, "sync", errno.EIO, nth=2, within=".seal.", is_late=True))
        first.commit_parts(6, parts=first.part_names[:2])  # and here its process dies
        second = store_at(fs, run_dir, seed, 2)
        assert second.resume() == 5
        mark(attempt=second.attempt.seq)
        for step in (6, 7, 8):
            save(second, step)
    finally:
        neighbour.close()


@dataclass(frozen=True, slots=True)
class Promise:
    """What had been acknowledged at one position of the log."""

    attempt_seq: int = 0
    acked: tuple[int, ...] = ()

    def after(self, mark: dict[str, Any]) -> Promise:
        """With what the mark adds."""
        if "attempt" in mark:
            return Promise(int(mark["attempt"]), self.acked)
        return Promise(self.attempt_seq, (*self.acked, int(mark["acked"]))) if "acked" in mark else self

    @property
    def kept(self) -> tuple[int, ...]:
        """Steps that must be restorable."""
        return tuple(sorted(set(self.acked))[-KEEP_LAST:])


@dataclass(slots=True)
class Findings:
    """What is wrong with one image, by kind."""

    damaged: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[str]:
        return [*self.damaged, *self.lost, *self.stuck]


def judge(mount_point: str, seed: int, promises: set[Promise], *, goes_on: bool) -> Findings:
    """Everything that a mounted image must hold and does not.

    Args:
        mount_point: Where the image is mounted.
        seed: That of the workload.
        promises: What had been acknowledged, at every position of the log at which a cut can leave this image.
        goes_on: Whether also a new attempt must be able to resume on it and save.
    """
    fs = PosixFileSystem()
    run_dir = os.path.join(mount_point, "run")
    found = Findings()
    try:
        loaded = load_newest(fs, run_dir)
        steps = restorable_steps(fs, run_dir)
        catalog = read_catalog(fs, run_dir)
    except (RideThroughError, OSError) as error:
        if any(promise.attempt_seq for promise in promises):
            found.lost.append(f"the run cannot be read: {error}")
    else:
        if loaded is not None and not store_at(fs, run_dir, seed, loaded.attempt.seq).is_true(loaded):
            found.damaged.append(f"step {loaded.step} was loaded and is not what was saved")
        found.damaged += [f"step {step} counts as complete: {error}" for step, error in steps.items() if error is not None]
        found.damaged += [f"{problem.path}: {problem.error}" for problem in catalog.problems]
        newest = loaded.step if loaded is not None else 0
        for promise in promises:
            if promise.kept and newest < promise.kept[-1]:
                found.lost.append(f"step {promise.kept[-1]} was acknowledged, restorable is {newest}")
            found.lost += [f"acknowledged and kept step {step} is gone" for step in promise.kept if step not in steps]
            if catalog.next_seq <= promise.attempt_seq:
                found.lost.append(f"attempt {promise.attempt_seq} had started, its number would be given again")
    if goes_on and not found.all:
        found.stuck += _go_on(fs, run_dir, seed)
    return found


def _go_on(fs: FileSystem, run_dir: str, seed: int) -> list[str]:
    """A new attempt resumes, saves and finds its save; what prevents it."""
    try:
        store = store_at(fs, run_dir, seed, 0)
        step = store.resume() + 1
        store.seed = seed + store.attempt.seq
        save_once(store, step)
        loaded = load_newest(fs, run_dir)
    except (RideThroughError, OSError) as error:
        return [f"a new attempt cannot go on: {error}"]
    is_right = loaded is not None and loaded.step == step and store.is_true(loaded)
    return [] if is_right else [f"a new attempt saved step {step} and does not find it"]

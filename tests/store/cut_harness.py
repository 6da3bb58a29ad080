"""Cuts the power of a real ext4 or XFS disk in chosen phases of a save, and checks what is left."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cut_child import BOARD_BYTES, COUNTS, CURRENT, PART_BYTES, PHASES, copy_of

from ridethrough.errors import RideThroughError
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_catalog
from ridethrough.testing import CUT, CUT_JOURNAL_FLUSHED, LoopDisk, SimpleStore, load_newest, restorable_steps

KEEP_LAST = 3
CUTS_A_RUN = 10
OUTSIDE_A_SAVE = ("start", "restore", "idle", "copy")
# How often the phase happens in one save of three parts; a restore makes about sixty calls, a copy some hundred and fifty.
PER_SAVE = {
    "restore": 12, "idle": 1, "mkdir": 1, "payload-create": 3, "payload-write": 3, "payload-fsync": 3, "seal-write": 6, "seal-fsync": 3,
    "seal-rename": 3, "dir-fsync": 6, "manifest": 12, "verify": 30, "retention": 15, "copy": 100,
}  # fmt: skip
_CHILD = str(Path(__file__).with_name("cut_child.py"))
_DEADLINE_S = 120.0


@dataclass(slots=True)
class Report:
    """What the cuts did."""

    seed: int
    cuts: int = 0
    phases: collections.Counter[str] = field(default_factory=collections.Counter)
    acknowledged: int = 0
    damaged: list[str] = field(default_factory=list)
    """What was accepted and is not what was saved."""
    lost: list[str] = field(default_factory=list)
    """What had been acknowledged and is gone."""
    used_s: float = 0.0

    @property
    def failures(self) -> list[str]:
        """Both."""
        return [*self.damaged, *self.lost]

    @property
    def inside_a_save(self) -> int:
        """Cuts between the begin of a save and the end of its retention."""
        return sum(count for phase, count in self.phases.items() if phase not in OUTSIDE_A_SAVE)

    def table(self) -> str:
        """For people."""
        rows = [f"  {phase:<15} {self.phases[phase]:>4}" for phase in PHASES]
        head = f"{self.cuts} cuts, seed {self.seed}, {self.inside_a_save} inside a save, {self.acknowledged} saves acknowledged, {self.used_s:.0f} s"
        return "\n".join([head, *rows, *(f"  FAILED {text}" for text in self.failures)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One cut, decided by the seed."""

    phase: str
    occurrence: int
    flag: int
    hold_s: float


def plan_cuts(seed: int, count: int, flag: int | None, saves: int) -> list[Plan]:
    """Every phase in turn, at a random place in the first saves, with this kind of cut, or with both."""
    chance = random.Random(seed)
    order = [phase for phase in PHASES if phase != "start"]
    plans = []
    for n in range(count):
        phase = order[n % len(order)]
        # Half of the cuts come before the call is made, half while it is being made.
        hold_s = 0.02 if n // len(order) % 2 else 0.0
        mixed = CUT_JOURNAL_FLUSHED if chance.random() < 0.25 else CUT
        kind = mixed if flag is None else flag
        plans.append(Plan(phase=phase, occurrence=chance.randint(1, saves * PER_SAVE[phase]), flag=kind, hold_s=hold_s))
    chance.shuffle(plans)
    return plans


class Trainee:
    """The other process: one that forks a fresh saver for each cut, a board that it writes, a pipe of acknowledgements."""

    def __init__(self, work: Path) -> None:
        board = work / "board"
        board.write_bytes(bytes(BOARD_BYTES))
        with open(board, "r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), BOARD_BYTES)).cast("Q")
        self._acks, writing = os.pipe()
        os.set_blocking(self._acks, False)
        argv = [sys.executable, _CHILD, str(writing), str(board)]
        self._nursery = subprocess.Popen(argv, pass_fds=[writing], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        os.close(writing)
        self._saver = 0

    def __enter__(self) -> Trainee:
        return self

    def __exit__(self, *_: object) -> None:
        if self._saver:
            self.kill()
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.close()
        self._nursery.wait(timeout=_DEADLINE_S)
        self._nursery.stdout.close()
        os.close(self._acks)

    def start(self, plan: dict[str, object]) -> None:
        """A fresh process saves, with nothing on the board yet."""
        for place in range(len(self.words)):
            self.words[place] = 0
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps(plan) + "\n")
        self._nursery.stdin.flush()
        self._saver = int(self._answer())

    def kill(self) -> list[int]:
        """It is dead; the steps that it had acknowledged, those that it had copied as negative numbers."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._saver, signal.SIGKILL)
        assert self._answer() == "gone"
        self._saver = 0
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._acks, 1 << 16):
                data += chunk
        return [int(line) for line in data.split()]

    def _answer(self) -> str:
        assert self._nursery.stdout is not None
        return self._nursery.stdout.readline().strip()


def run_cuts(
    disk: LoopDisk,
    work: Path,
    *,
    seed: int,
    count: int,
    drop_syncs: bool = False,
    flag: int | None = None,
    has_neighbour: bool = False,
    saves: int = 5,
) -> Report:
    """`count` cuts, each followed by power's return and a check of everything on the disk.

    Args:
        disk: Whose power is cut.
        work: Directory for what must survive the cuts.
        seed: Decides phases, places and bytes.
        count: How many cuts.
        drop_syncs: No fsync of the store reaches the disk.
        flag: Kind of every cut; unless given, one in four has the journal flushed.
        has_neighbour: Another process appends to a log on the same disk and syncs it all the time.
        saves: A cut falls into one of this many first saves of its process.
    """
    report = Report(seed=seed)
    began_s = time.monotonic()
    expected: set[int] = set()
    copied: set[int] = set()
    cuts_a_run = 1 if drop_syncs else CUTS_A_RUN
    with Trainee(work) as trainee:
        for n, plan in enumerate(plan_cuts(seed, count, flag, saves)):
            run_dir = os.path.join(disk.path, f"run-{n // cuts_a_run:03d}")
            if n % cuts_a_run == 0:
                expected, copied = set(), set()
            how = {"run_dir": run_dir, "seed": seed, "drop_syncs": drop_syncs, "has_neighbour": has_neighbour}
            trainee.start({**dataclasses.asdict(plan), **how})
            acked = _cut(disk, trainee, plan, report)
            report.acknowledged += sum(step > 0 for step in acked)
            expected |= {step for step in acked if step > 0}
            copied |= {-step for step in acked if step < 0}
            where = f"cut {n} (seed {seed}) in {plan.phase} no. {plan.occurrence}, flag {plan.flag}, hold {plan.hold_s}"
            expected |= _check(run_dir, seed, expected, where, report)
            if os.path.exists(copy_of(run_dir)):
                copied = _check(copy_of(run_dir), seed, set(sorted(copied)[-1:]), f"the copy after {where}", report)
    report.used_s = time.monotonic() - began_s
    return report


def _cut(disk: LoopDisk, trainee: Trainee, plan: Plan, report: Report) -> list[int]:
    words = trainee.words
    target = COUNTS + PHASES.index(plan.phase)
    deadline_s = time.monotonic() + _DEADLINE_S
    spins = 0
    try:
        while words[target] < plan.occurrence:
            spins += 1
            if spins % 20_000 == 0 and time.monotonic() > deadline_s:
                raise AssertionError(f"{plan} was never reached")
        phase = PHASES[words[CURRENT]]
        disk.cut(plan.flag)
    finally:
        acked = trainee.kill()
    disk.remount()
    report.cuts += 1
    report.phases[phase] += 1
    return acked


def _check(run_dir: str, seed: int, expected: set[int], where: str, report: Report) -> set[int]:
    """Adds to the report whatever was lost or is damaged; returns the steps that can be restored."""
    fs = PosixFileSystem()
    store = SimpleStore(fs=fs, run_dir=run_dir, seed=seed, part_bytes=PART_BYTES)
    wanted = sorted(expected)[-KEEP_LAST:]
    try:
        loaded = load_newest(fs, run_dir)
        found = restorable_steps(fs, run_dir)
        problems = read_catalog(fs, run_dir).problems
    except RideThroughError as error:
        if expected:
            report.lost.append(f"{where}: {error}; acknowledged were {wanted}")
        return set()
    if loaded is not None and not store.is_true(loaded):
        report.damaged.append(f"{where}: step {loaded.step} was loaded and is not what was saved")
    if wanted and (loaded is None or loaded.step < wanted[-1]):
        report.lost.append(f"{where}: step {wanted[-1]} was acknowledged, restorable is {loaded and loaded.step}")
    report.damaged.extend(f"{where}: step {step} counts as complete: {error}" for step, error in found.items() if error is not None)
    report.lost.extend(f"{where}: acknowledged and kept step {step} is gone" for step in wanted if step not in found)
    report.damaged.extend(f"{where}: {problem.path}: {problem.error}" for problem in problems)
    return {step for step, error in found.items() if error is None}

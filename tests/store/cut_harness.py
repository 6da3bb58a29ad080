"""Cuts the power of a real ext4 disk in chosen phases of a save, and checks what is left."""

from __future__ import annotations

import collections
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cut_child import BOARD_BYTES, COUNTS, CURRENT, PART_BYTES, PHASES

from ridethrough.errors import RideThroughError
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_catalog
from ridethrough.testing import CUT, CUT_JOURNAL_FLUSHED, LoopDisk, SimpleStore, load_newest, restorable_steps

KEEP_LAST = 3
CUTS_A_RUN = 10
OUTSIDE_A_SAVE = ("start", "idle")
# How often the phase happens in one save of three parts.
PER_SAVE = {
    "idle": 1, "mkdir": 1, "payload-create": 3, "payload-write": 3, "payload-fsync": 3, "seal-write": 6, "seal-fsync": 3, "seal-rename": 3,
    "dir-fsync": 6, "manifest": 12, "verify": 30, "retention": 15,
}  # fmt: skip
_CHILD = str(Path(__file__).with_name("cut_child.py"))
_DEADLINE_S = 20.0


@dataclass(slots=True)
class Report:
    """What the cuts did."""

    seed: int
    cuts: int = 0
    phases: collections.Counter[str] = field(default_factory=collections.Counter)
    acknowledged: int = 0
    failures: list[str] = field(default_factory=list)
    used_s: float = 0.0

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


def plan_cuts(seed: int, count: int) -> list[Plan]:
    """Every phase in turn, at a random place in the first saves, with both kinds of cut."""
    chance = random.Random(seed)
    order = [phase for phase in PHASES if phase != "start"]
    plans = []
    for n in range(count):
        phase = order[n % len(order)]
        # Half of the cuts come before the call is made, half while it is being made.
        hold_s = 0.02 if n // len(order) % 2 else 0.0
        flag = CUT_JOURNAL_FLUSHED if chance.random() < 0.25 else CUT
        plans.append(Plan(phase=phase, occurrence=chance.randint(1, 5 * PER_SAVE[phase]), flag=flag, hold_s=hold_s))
    chance.shuffle(plans)
    return plans


def run_cuts(disk: LoopDisk, work: Path, *, seed: int, count: int, drop_syncs: bool = False) -> Report:
    """`count` cuts, each followed by power's return and a check of everything on the disk."""
    report = Report(seed=seed)
    began_s = time.monotonic()
    board_path = work / "board"
    board_path.write_bytes(bytes(BOARD_BYTES))
    with open(board_path, "r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), BOARD_BYTES)).cast("Q")
    expected: set[int] = set()
    cuts_a_run = 1 if drop_syncs else CUTS_A_RUN
    for n, plan in enumerate(plan_cuts(seed, count)):
        run_dir = os.path.join(disk.path, f"run-{n // cuts_a_run:03d}")
        if n % cuts_a_run == 0:
            expected = set()
        acked = _cut_once(disk, run_dir, words, board_path, report, plan, drop_syncs=drop_syncs)
        report.acknowledged += len(acked)
        expected |= set(acked)
        where = f"cut {n} (seed {seed}) in {plan.phase} no. {plan.occurrence}, flag {plan.flag}, hold {plan.hold_s}"
        found = _check(run_dir, seed, expected, where, report)
        expected |= found
    report.used_s = time.monotonic() - began_s
    return report


def _cut_once(disk: LoopDisk, run_dir: str, words: memoryview, board_path: Path, report: Report, plan: Plan, *, drop_syncs: bool) -> list[int]:
    for place in range(BOARD_BYTES // 8):
        words[place] = 0
    reading, writing = os.pipe()
    argv = [
        sys.executable, _CHILD, "--run-dir", run_dir, "--board", str(board_path), "--ack-fd", str(writing), "--seed", str(report.seed),
        "--target", plan.phase, "--occurrence", str(plan.occurrence), "--hold-s", str(plan.hold_s), *(["--drop-syncs"] if drop_syncs else []),
    ]  # fmt: skip
    target = COUNTS + PHASES.index(plan.phase)
    with subprocess.Popen(argv, pass_fds=[writing], stdin=subprocess.DEVNULL) as child:
        os.close(writing)
        try:
            deadline_s = time.monotonic() + _DEADLINE_S
            # The first look at the board would otherwise take a core from the child for its whole start.
            while not words[CURRENT] and child.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.002)
            spins = 0
            while words[target] < plan.occurrence:
                spins += 1
                if spins % 20_000 == 0 and (child.poll() is not None or time.monotonic() > deadline_s):
                    raise AssertionError(f"{plan} was never reached (child: {child.poll()})")
            phase = PHASES[words[CURRENT]]
            disk.cut(plan.flag)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(timeout=_DEADLINE_S)
    with open(reading, "rb") as pipe:
        acked = [int(line) for line in pipe.read().split()]
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
            report.failures.append(f"{where}: {error}; acknowledged were {wanted}")
        return set()
    if loaded is not None and not store.is_true(loaded):
        report.failures.append(f"{where}: step {loaded.step} was loaded and is not what was saved")
    if wanted and (loaded is None or loaded.step < wanted[-1]):
        report.failures.append(f"{where}: step {wanted[-1]} was acknowledged, restorable is {loaded and loaded.step}")
    report.failures.extend(f"{where}: step {step} counts as complete: {error}" for step, error in found.items() if error is not None)
    report.failures.extend(f"{where}: acknowledged and kept step {step} is gone" for step in wanted if step not in found)
    report.failures.extend(f"{where}: {problem.path}: {problem.error}" for problem in problems)
    return {step for step, error in found.items() if error is None}

"""All cuts of one engine of `survival.py`, in a process of its own: `python bench/survival_run.py ENGINE WORK SEED CUTS`.

The engine is imported once; a writer, and each attempt to load, is a fork of this process. Prints one JSON object a line:
`{"variant", "cut", "outcome", …}` for a cut, `{"flip": …}` at the end, `{"version": …}` first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from survival_course import Course, Found, Record
from survival_engines import ENGINES, Engine

from ridethrough.seam.process import descendants, die_with_parent, is_alive, processes_with_environment, run_captured, send_signal
from ridethrough.testing.disk import CUT, CUT_JOURNAL_FLUSHED, LoopDisk, missing_for_disks

VARIANTS = {"ext4": ("ext4", ""), "ext4 noauto_da_alloc": ("ext4", "noauto_da_alloc"), "xfs": ("xfs", "")}
FLAGS = {"nothing flushed": CUT, "journal flushed": CUT_JOURNAL_FLUSHED}
"""Every other cut of a variant."""
DISK_BYTES = 640 << 20
"""Below 512 MiB mkfs.ext4 makes blocks of 1 KiB, and Python buffers of that size: no disk of today looks like that."""
SAVES = (2, 4)
SPAN_S = 0.12
"""The cut falls within so long after one of these acknowledgements: half of the time before the next save is due."""
LOG_S = 0.02
START_S = 120.0
LOAD_S = 60.0
UMOUNT_TRIES = 250
FLIP_AFTER_SAVES = 4
TOKEN = "RIDETHROUGH_SURVIVAL"


@dataclass
class Machine:
    """What runs on a disk and ends with its power."""

    root: Path
    work: Path

    def __post_init__(self) -> None:
        self.token = uuid.uuid4().hex
        self.pids: list[int] = []
        # What an engine keeps beside its checkpoints lies on the same disk, as on a machine with one.
        for name in ("tmp", "home", "state"):
            (self.root / name).mkdir(exist_ok=True)

    def start(self, what: Callable[[], None]) -> int:
        """A fork that does this, with its output in a file."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.pids.append(pid)
            return pid
        try:
            die_with_parent(parent)
            os.setsid()
            log = os.open(self.work / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(
                {TOKEN: self.token, "TMPDIR": f"{self.root}/tmp", "HOME": f"{self.root}/home", "RIDETHROUGH_STATE_DIR": f"{self.root}/state"}
            )
            what()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the output is all that a child can leave
            traceback.print_exc()
        finally:
            os._exit(1)

    def stop(self) -> None:
        """Nothing of it runs any more."""
        for pid in self.pids:
            send_signal([*descendants(pid), pid], signal.SIGKILL)
        while left := processes_with_environment(TOKEN, self.token):
            send_signal(left, signal.SIGKILL)
            time.sleep(0.01)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.pids = []

    def log(self) -> str:
        path = self.work / "log"
        return path.read_text(encoding="utf-8", errors="replace")[-2000:] if path.exists() else ""


def keep_log(root: Path) -> None:
    """Something else on the machine that fsyncs a log: it commits the journal with whatever else stands in it."""
    file = os.open(root / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        os.write(file, b"step done\n")
        os.fsync(file)
        time.sleep(LOG_S)


def wait_for(machine: Machine, pid: int, is_ready: Callable[[], bool]) -> None:
    """It is so, or the writer has failed."""
    end_s = time.monotonic() + START_S
    while not is_ready():
        if not is_alive(pid) or time.monotonic() > end_s:
            raise RuntimeError(f"the engine did not save: {machine.log()}")
        time.sleep(0.002)


def load(engine: Engine, machine: Machine, path: Path | None) -> Found | str | None:
    """What the engine loads in a new process, None if it finds nothing, or its error."""
    answer = machine.work / "answer"
    answer.unlink(missing_ok=True)

    def child() -> None:
        try:
            found = engine.load(machine.root, path)
            said: Any = None if found is None else [found.step, found.digest]
        except BaseException as error:  # noqa: BLE001  DCP's own is not an Exception, and each is an answer
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"[:300]
        (machine.work / "answer.tmp").write_text(json.dumps(said), encoding="utf-8")
        os.replace(machine.work / "answer.tmp", answer)
        # A keeper of ours would wait for the next launch; threads of others might never end.
        os._exit(0)

    pid = machine.start(child)
    end_s = time.monotonic() + LOAD_S
    while is_alive(pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    machine.stop()
    if not answer.exists():
        return "the process ended or hung while it loaded"
    said = json.loads(answer.read_text(encoding="utf-8"))
    return Found(*said) if isinstance(said, list) else said


def judge(engine: Engine, machine: Machine, record: Record) -> dict[str, Any]:
    """The outcome of a cut."""

    def is_right(found: Any) -> bool:
        return isinstance(found, Found) and record.digests.get(found.step) == found.digest

    acknowledged = max(record.acknowledged)
    candidates = engine.candidates(machine.root)
    found = load(engine, machine, None)
    said: dict[str, Any] = {"acknowledged": acknowledged, "in_save": record.is_saving}
    if isinstance(found, Found):
        outcome = ("kept" if found.step >= acknowledged else "older") if is_right(found) else "wrong"
        return {**said, "outcome": outcome, "loaded": found.step}
    said["error"] = found
    # An engine that found none has not tried the first one either.
    left = (candidates if found is None else candidates[1:]) if engine.can_choose else []
    by_hand = any(is_right(load(engine, machine, path)) for path in left)
    return {**said, "outcome": "refused" if by_hand else "nothing"}


@cache
def possible_variants() -> list[str]:
    """Those whose file system this machine can make."""
    return [name for name, (file_system, _) in VARIANTS.items() if missing_for_disks(file_system) is None]


def cut_once(engine: Engine, work: Path, variant: str, flag: int, chance: random.Random) -> dict[str, Any]:
    file_system, options = VARIANTS[variant]
    saves, delay_s = chance.randint(*SAVES), chance.uniform(0.0, SPAN_S)
    with LoopDisk(DISK_BYTES, options=options, directory=str(work), file_system=file_system) as disk:
        scratch = Path(disk.image).parent
        root, record = Path(disk.path), scratch / "record"
        machine = Machine(root, scratch)
        try:
            writer = machine.start(lambda: engine.work(Course(root, record)))
            machine.start(lambda: keep_log(root))
            wait_for(machine, writer, lambda: len(Record.read(record).acknowledged) >= saves)
            time.sleep(delay_s)
            is_running = is_alive(writer)
            disk.cut(flag)
        finally:
            machine.stop()
        if not is_running:
            raise RuntimeError(f"the engine ended by itself: {machine.log()}")
        power_back(disk)
        return judge(engine, machine, Record.read(record))


def power_back(disk: LoopDisk) -> None:
    """The disk is mounted again, and it is not the file system that was shut down.

    Another mount namespace may hold a copy of the mount: while it does, mounting shows the old file system, in which
    everything is an input/output error, and no engine is to blame for that.
    """
    # A process that was killed may hold a file for a moment more, and an XFS that was shut down cannot be asked whether
    # it is mounted.
    for _ in range(UMOUNT_TRIES):
        if f" {disk.path} " not in Path("/proc/self/mounts").read_text(encoding="utf-8"):
            break
        run_captured(["umount", disk.path], timeout_s=START_S)
        time.sleep(0.02)
    disk.remount()
    os.mkdir(os.path.join(disk.path, "probe"))
    os.rmdir(os.path.join(disk.path, "probe"))


def flip_once(engine: Engine, work: Path) -> str:
    """What the engine makes of one flipped bit in its newest checkpoint's largest file."""
    with LoopDisk(DISK_BYTES, directory=str(work)) as disk:
        scratch = Path(disk.image).parent
        root, path = Path(disk.path), scratch / "record"
        machine = Machine(root, scratch)
        try:
            writer = machine.start(lambda: engine.work(Course(root, path, stop_after=FLIP_AFTER_SAVES)))
            wait_for(machine, writer, lambda: len(Record.read(path).acknowledged) >= FLIP_AFTER_SAVES)
        finally:
            machine.stop()
        disk.remount()  # what is read afterwards comes from the disk
        newest = engine.candidates(root)[0]
        files = [newest] if newest.is_file() else [entry for entry in newest.rglob("*") if entry.is_file()]
        largest = max(files, key=lambda entry: entry.stat().st_size)
        with open(largest, "r+b") as file:
            # A third from the start: the half is where two tensors of the same size meet, which may be padding.
            file.seek(largest.stat().st_size // 3)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        record = Record.read(path)
        found = load(engine, machine, None)
        if not isinstance(found, Found):
            return "refused"
        if record.digests.get(found.step) != found.digest:
            return "accepted"
        return "an older one loaded" if found.step < max(record.acknowledged) else "no effect"


def main() -> None:
    name, work, seed, cuts = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)  # a pool of threads would not outlive the fork
    import_module("torch._dynamo")  # the first optimizer imports it, for seconds: not in each fork
    engine = ENGINES[name]()
    said = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps({"version": engine.version}), file=said)
    for variant in possible_variants():
        chance = random.Random(f"{seed} {name} {variant}")
        for number in range(cuts):
            flag = list(FLAGS)[number % len(FLAGS)]
            found = cut_once(engine, work, variant, FLAGS[flag], chance)
            print(json.dumps({"variant": variant, "flag": flag, "cut": number, **found}), file=said)
    print(json.dumps({"flip": flip_once(engine, work)}), file=said)


if __name__ == "__main__":
    main()

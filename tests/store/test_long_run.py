"""Thousands of saves, one in a hundred damaged: the disk is never full and the newest verified is always there."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing import LoopDisk, SimpleStore, flip_bit, load_newest, save_once
from rows import record

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

SAVES = int(os.environ.get("RIDETHROUGH_LONG_RUN_SAVES", "1200"))
"""`make crash` makes 10,000."""
SEED = int(os.environ.get("RIDETHROUGH_LONG_RUN_SEED", "20260729"))
DISK_BYTES = 1 << 30
SMALL_BYTES, LARGE_BYTES = 20_000, 16_000_000
LARGE_EVERY, LARGE_IN_A_ROW = SAVES // 40, 3
DAMAGED_RATIO = 0.01
CHECK_EVERY = 100
# Three kept, one being written, two checkpoints' worth in quarantine; all might be large.
BOUND_BYTES = 6 * (LARGE_BYTES + (1 << 20))


def fast_medium(tmp_path: Path) -> str:
    """Memory for the image of the disk if there is enough: what is tested is the file system on it, not the speed below it."""
    shm = "/dev/shm"
    is_roomy = os.path.isdir(shm) and shutil.disk_usage(shm).free > 2 * DISK_BYTES
    return shm if is_roomy else str(tmp_path)


def size_of(step: int) -> int:
    """Mostly small, but twice the disk all together."""
    return LARGE_BYTES if step % LARGE_EVERY < LARGE_IN_A_ROW else SMALL_BYTES


def used_bytes(run_dir: str) -> int:
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(run_dir) for name in names)


def test_saves_some_of_them_damaged_never_fill_the_disk_nor_lose_the_newest_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(SEED)
    began_s = time.monotonic()
    damaged_count, most_bytes, newest_verified = 0, 0, 0
    with LoopDisk(DISK_BYTES, directory=fast_medium(tmp_path)) as disk:
        fs = PosixFileSystem()
        store = SimpleStore(fs=fs, run_dir=os.path.join(disk.path, "run"), seed=SEED, world_size=1, has_private_parts=False)
        store.start()
        for step in range(1, SAVES + 1):
            store.part_bytes = size_of(step)
            is_damaged = chance.random() < DAMAGED_RATIO
            if is_damaged:
                damaged_count += 1

            def damage(stage: str, step: int = step, is_damaged: bool = is_damaged) -> None:
                if stage == "verify" and is_damaged:
                    directory = os.path.join(store.run_dir, store.dir_name(step))
                    name = chance.choice(sorted(os.listdir(directory)))
                    flip_bit(os.path.join(directory, name), chance.randrange(1 << 30), chance.randrange(8))

            saved = save_once(store, step, on_stage=damage)
            assert saved.is_verified is not is_damaged, f"step {step}, seed {SEED}"
            newest_verified = step if saved.is_verified else newest_verified
            if is_damaged or step % CHECK_EVERY == 0 or step % LARGE_EVERY <= LARGE_IN_A_ROW:
                loaded = load_newest(fs, store.run_dir)
                assert loaded is not None, f"step {step}, seed {SEED}"
                assert loaded.step == newest_verified, f"step {step}, seed {SEED}"
                store.part_bytes = size_of(loaded.step)
                assert store.is_true(loaded), f"step {step}, seed {SEED}"
                most_bytes = max(most_bytes, used_bytes(store.run_dir))
                assert most_bytes <= BOUND_BYTES, f"step {step}, seed {SEED}: {most_bytes} bytes"
        kept = [name for name in os.listdir(store.run_dir) if layout.parse_step_dir(name)]
    with capsys.disabled():
        used_s = time.monotonic() - began_s
        print(f"\n{SAVES} saves, {damaged_count} damaged, at most {most_bytes >> 20} MiB of {DISK_BYTES >> 20}, seed {SEED}, {used_s:.0f} s")
    record(
        {"name": f"most bytes used by {SAVES:,} saves", "value": most_bytes, "unit": "bytes", "target": BOUND_BYTES, "met": most_bytes <= BOUND_BYTES}
    )
    assert sum(size_of(step) for step in range(1, SAVES + 1)) > 1.8 * DISK_BYTES
    assert damaged_count > SAVES * DAMAGED_RATIO / 2
    assert len(kept) <= 4

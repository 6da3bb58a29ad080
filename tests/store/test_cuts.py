"""Power cuts of the save path on a real ext4 disk: nothing damaged is accepted, nothing durable is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cut_child import PHASES
from cut_harness import run_cuts

from ridethrough.testing import LoopDisk
from rows import record

pytestmark = pytest.mark.root

CUTS = int(os.environ.get("RIDETHROUGH_CUTS", "60"))
"""`make crash` makes 200."""
LEAST_INSIDE, LEAST_IN_A_PHASE = CUTS * 2 // 3, CUTS // 40
SEED = int(os.environ.get("RIDETHROUGH_CUT_SEED", "20260728"))
DISK_BYTES = 96 << 20


def test_no_cut_of_a_save_loses_a_durable_checkpoint_or_shows_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LoopDisk(DISK_BYTES) as disk:
        report = run_cuts(disk, tmp_path, seed=SEED, count=CUTS)
    with capsys.disabled():
        print(f"\n{report.table()}")
    fewest = min(report.phases[phase] for phase in PHASES if phase != "start")
    record(
        {"name": "cuts of the save path, ext4", "value": report.cuts, "unit": "cuts", "target": CUTS, "met": report.cuts == CUTS},
        {"name": "inside a save", "value": report.inside_a_save, "unit": "cuts", "target": LEAST_INSIDE, "met": report.inside_a_save >= LEAST_INSIDE},
        {"name": "fewest in a phase", "value": fewest, "unit": "cuts", "target": LEAST_IN_A_PHASE, "met": fewest >= LEAST_IN_A_PHASE},
        {"name": "damaged accepted or durable lost", "value": len(report.failures), "unit": "cuts", "target": 0, "met": not report.failures},
    )
    assert report.failures == []
    assert report.cuts == CUTS
    assert report.acknowledged > CUTS
    assert report.inside_a_save >= LEAST_INSIDE, report.table()
    assert fewest >= LEAST_IN_A_PHASE, report.table()


def test_the_same_cuts_find_a_store_that_forgets_to_sync(tmp_path: Path) -> None:
    with LoopDisk(DISK_BYTES) as disk:
        report = run_cuts(disk, tmp_path, seed=SEED, count=15, drop_syncs=True)
    found = len(report.failures)
    record({"name": "failures found with every fsync dropped, of 15 cuts", "value": found, "unit": "cuts", "target": 10, "met": found >= 10})
    assert report.cuts == 15
    assert len(report.failures) >= 10, report.table()

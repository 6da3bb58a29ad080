"""Two hundred power cuts of the save path on a real ext4 disk: nothing damaged is accepted, nothing durable is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cut_child import PHASES
from cut_harness import run_cuts

from ridethrough.testing import LoopDisk

pytestmark = pytest.mark.root

CUTS = 200
SEED = int(os.environ.get("RIDETHROUGH_CUT_SEED", "20260728"))
DISK_BYTES = 96 << 20


def test_no_cut_of_a_save_loses_a_durable_checkpoint_or_shows_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LoopDisk(DISK_BYTES) as disk:
        report = run_cuts(disk, tmp_path, seed=SEED, count=CUTS)
    with capsys.disabled():
        print(f"\n{report.table()}")
    assert report.failures == []
    assert report.cuts == CUTS
    assert report.acknowledged > CUTS
    assert report.inside_a_save >= 150, report.table()
    assert min(report.phases[phase] for phase in PHASES if phase != "start") >= 5, report.table()


def test_the_same_cuts_find_a_store_that_forgets_to_sync(tmp_path: Path) -> None:
    with LoopDisk(DISK_BYTES) as disk:
        report = run_cuts(disk, tmp_path, seed=SEED, count=15, drop_syncs=True)
    assert report.cuts == 15
    assert len(report.failures) >= 10, report.table()

"""Power cuts of living file systems, while another process syncs a log on the same disk all the time; `make crash` makes a thousand."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from cut_harness import Report, run_cuts
from test_long_run import fast_medium

from lacking import lacking
from ridethrough.errors import StorageError
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing import CUT, CUT_JOURNAL_FLUSHED, LoopDisk, missing_for_disks
from rows import crash_rows, record

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

CUTS = int(os.environ.get("RIDETHROUGH_LIVE_CUTS", "8"))
"""For each file system and kind of cut."""
SEED = int(os.environ.get("RIDETHROUGH_CUT_SEED", "20260730"))
MUTANT_CUTS = 12
SAVES = 3
"""Short lives: with five saves a cut a thousand of them take too long."""
MIB = 1 << 20
DISKS = {"ext4": ("ext4", "", 96 * MIB), "ext4 noauto_da_alloc": ("ext4", "noauto_da_alloc", 96 * MIB), "xfs": ("xfs", "", 320 * MIB)}
FLAGS = {"nothing flushed": CUT, "journal flushed": CUT_JOURNAL_FLUSHED}
IS_WHOLE = "RIDETHROUGH_LIVE_CUTS" in os.environ
CELLS = list(itertools.product(DISKS, FLAGS)) if IS_WHOLE else [("xfs", "nothing flushed"), ("ext4 noauto_da_alloc", "journal flushed")]
"""`make crash` tries all; plain ext4 is cut by `test_cuts`."""


def cuts_of(medium: str, flag: int, work: Path, *, count: int, drop_syncs: bool = False) -> Report:
    file_system, options, size_bytes = DISKS[medium]
    lacking(missing_for_disks(file_system))
    with LoopDisk(size_bytes, options=options, file_system=file_system, directory=fast_medium(work)) as disk:
        return run_cuts(disk, work, seed=SEED, count=count, flag=flag, has_neighbour=True, drop_syncs=drop_syncs, saves=SAVES)


@pytest.mark.parametrize(("medium", "kind"), CELLS)
def test_no_cut_beside_a_busy_neighbour_loses_a_durable_checkpoint_or_shows_a_damaged_one(
    medium: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = cuts_of(medium, FLAGS[kind], tmp_path, count=CUTS)
    mutant = cuts_of(medium, FLAGS[kind], tmp_path, count=MUTANT_CUTS, drop_syncs=True)
    is_found = len(mutant.failures) >= MUTANT_CUTS // 2
    name = f"{medium}, {kind}"
    with capsys.disabled():
        print(f"\n{name}: {report.table()}\n  with every fsync dropped: {len(mutant.failures)} findings in {mutant.cuts} cuts, {mutant.used_s:.0f} s")
    crash_rows(
        "live",
        name,
        instants=report.cuts,
        target=CUTS,
        unit="cuts",
        damaged=len(report.damaged),
        lost=len(report.lost),
        killed=int(is_found),
        mutants=1,
    )
    fewest = CUTS // 2
    record(
        {
            "name": f"live, {name}: inside a save",
            "value": report.inside_a_save,
            "unit": "cuts",
            "target": fewest,
            "met": report.inside_a_save >= fewest,
        }
    )
    assert report.failures == []
    assert report.cuts == CUTS
    assert report.inside_a_save >= fewest, report.table()
    assert is_found, mutant.table()


def test_directory_of_a_disk_that_fails_in_the_call_is_not_said_to_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XFS answers an fsync of a directory that was opened before it shut itself down with success."""
    lacking(missing_for_disks("xfs"))
    real = os.fsync
    with LoopDisk(320 * MIB, file_system="xfs", directory=fast_medium(tmp_path)) as disk:
        Path(disk.path, "a.tmp").write_bytes(b"x")
        os.rename(os.path.join(disk.path, "a.tmp"), os.path.join(disk.path, "a"))

        def cut_first(descriptor: int) -> None:
            disk.cut(CUT)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", cut_first)
        with pytest.raises(StorageError):
            PosixFileSystem().sync_dir(disk.path)

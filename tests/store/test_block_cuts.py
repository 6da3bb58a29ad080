"""Images of what a cut leaves of a real file system, from everything it told its disk; `make crash` tries all three with all mutants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lacking import lacking
from rows import crash_rows, record

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

IS_WHOLE = "RIDETHROUGH_BLOCK_IMAGES" in os.environ
IMAGES = int(os.environ.get("RIDETHROUGH_BLOCK_IMAGES", "60"))
"""At most this many of each file system. `make crash` says 0, which is all, and then mutants and every background commit are asked for too."""
LEAST_IMAGES = 350
MEDIA = ("ext4", "xfs", "btrfs") if IS_WHOLE else ("ext4",)
EXPLORER = Path(__file__).parents[2] / "bench" / "crash_blocks.py"
MISSING = 2


def explored(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    output = tmp_path / "reports.json"
    argv = [sys.executable, str(EXPLORER), "--images", str(IMAGES), "--output", str(output), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    with capsys.disabled():
        print(f"\n{done.stdout}", end="")
    if done.returncode == MISSING:
        lacking(done.stderr.strip())
    assert output.exists(), done.stderr
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.parametrize("medium", MEDIA)
def test_every_image_that_a_cut_can_leave_of_a_real_disk_holds_what_was_acknowledged_and_nothing_damaged(
    medium: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ("--mutants",) if IS_WHOLE else ("--pauses", "2")
    report, *mutants = explored(tmp_path, capsys, "--fs", medium, *whole)
    found = [mutant["mutant"] for mutant in mutants if mutant["damaged"] or mutant["lost"]]
    if IS_WHOLE:
        crash_rows(
            "blocks",
            medium,
            instants=report["images"],
            target=LEAST_IMAGES,
            unit="images",
            damaged=report["damaged"],
            lost=report["lost"] + report["unmountable"],
            killed=len(found),
            mutants=len(mutants),
        )
        name = f"blocks, {medium}: flush boundaries tried"
        flushes = report["flushes"]
        record({"name": name, "value": report["flushes_tried"], "unit": "flushes", "target": flushes, "met": report["flushes_tried"] == flushes})
        assert sorted(found) == ["no-dir-fsync", "no-fsync"]
    assert report["failures"] == []
    assert report["images"] == (IMAGES or report["possible"])
    assert report["images"] >= (LEAST_IMAGES if IS_WHOLE else IMAGES)
    assert report["acked"] == 8

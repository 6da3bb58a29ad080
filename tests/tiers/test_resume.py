"""A real job goes on from a copy alone when all its disks are gone, bit for bit as if nothing had happened."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))  # the job is that of the tests there
from job import Job

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def ridethrough(job: Job, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ridethrough", *arguments], capture_output=True, text=True, check=False, env=job.all_environment, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_job_whose_disks_are_gone_goes_on_identically_from_an_object_store_and_from_a_mirror(bucket: str, tmp_path: Path) -> None:
    places = (f"{bucket}/exp001", str(tmp_path / "mirror" / "exp001"))
    straight = Job(tmp_path / "straight", environment={"TRAINEE_STEPS": "60"})
    job = Job(tmp_path / "job", environment={"TRAINEE_STEPS": "60", "TRAINEE_STEP_S": "0.02"})
    try:
        assert straight.run() == 0, straight.shown
        job.start()
        job.wait_for_step(35)
        job.commands[-1].terminate()
        assert job.finish() == 20, job.shown
        saved = max(job.durable())
        for place in places:
            ridethrough(job, "copy", job.run_dir, place)
        for place in places:
            shutil.rmtree(job.run_dir)
            shutil.rmtree(job.root / "state")
            ridethrough(job, "restore", job.run_dir, "--from", place)
            assert job.run() == 0, job.shown
        assert job.restored() == [0, saved, saved]
        assert job.digests() == straight.digests(), "which also compares the steps that were made twice"
        assert max(job.digests()) == 60
    finally:
        straight.close()
        job.close()

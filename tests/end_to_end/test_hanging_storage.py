"""Storage that hangs stops saves, and nothing else: a real ext4, frozen while the job trains."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from job import Job, wait_for

from ridethrough.testing import LoopDisk

pytestmark = [pytest.mark.root, pytest.mark.torch]


def status(job: Job) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ridethrough", "status", "--json", job.run_dir], capture_output=True, text=True, check=False, env=job.all_environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), time.monotonic() - began


def freeze(path: Path, how: str) -> None:
    subprocess.run(["fsfreeze", how, str(path)], check=True)


def test_training_goes_on_and_status_answers_while_storage_hangs_and_saves_go_on_afterwards(tmp_path: Path) -> None:
    with LoopDisk(128 << 20) as disk:
        job = Job(tmp_path / "job", environment={"TRAINEE_STEPS": "200", "TRAINEE_STEP_S": "0.03"})
        Path(job.run_dir).symlink_to(Path(disk.path) / "run")
        job.start()
        try:
            job.wait_for_step(30)
            freeze(Path(disk.path), "-f")
            try:
                frozen_at = job.steps()[-1]
                job.wait_for_step(frozen_at + 40)
                found, took_s = status(job)
                again, _ = status(job)
            finally:
                freeze(Path(disk.path), "-u")
            assert took_s < 2
            assert found["is_running"]
            assert found["step"] > frozen_at
            assert found["save"]["in_progress"] is not None
            assert again["exposure"]["steps"] > found["exposure"]["steps"] - 1
            assert found["exposure"]["steps"] > 20
            wait_for("a save after the thaw", lambda: (status(job)[0]["durable"] or {"step": 0})["step"] > frozen_at)
            assert job.finish() == 0, job.shown
        finally:
            job.close()

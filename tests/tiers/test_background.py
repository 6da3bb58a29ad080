"""A real job whose checkpoints go on into another place while it trains, and at its end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))  # the job is that of the tests there
from job import Job, wait_for

from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.place import open_place
from ridethrough.testing import load_newest, restorable_steps

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def steps_in(place: Path) -> list[int]:
    if not (place / "run.json").exists():
        return []
    return sorted(step for step, error in restorable_steps(PosixFileSystem(), str(place)).items() if error is None)


def status(job: Job) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "ridethrough", "status", "--json", job.run_dir], capture_output=True, text=True, check=True, env=job.all_environment
    )
    return dict(json.loads(done.stdout))


def test_checkpoints_go_on_while_a_job_trains_and_the_last_one_at_its_end(tmp_path: Path, bucket: str) -> None:
    mirror, cloud = tmp_path / "room-b" / "exp001", open_place(f"{bucket}/exp001")
    job = Job(tmp_path / "job", environment={"TRAINEE_STEPS": "100000", "TRAINEE_STEP_S": "0.02"})
    config = tmp_path / "ridethrough.toml"
    config.write_text(
        f'run = "{job.run_dir}"\n[tiers.mirror]\nplace = "{mirror}"\ndomain = "room-b"\nkeep_last = 2\n[tiers.cloud]\nplace = "{cloud.shown}"\n',
        encoding="utf-8",
    )
    try:
        job.start("--config", str(config))
        wait_for("copies", lambda: Path(job.run_dir, "journal").exists() and len({(e["tier"], e["step"]) for e in job.events("copy.done")}) >= 4)
        cloudy, copy = status(job)["copies"]
        assert (cloudy["tier"], cloudy["place"]) == ("cloud", cloud.shown)
        assert (copy["tier"], copy["domain"], copy["failures_in_a_row"]) == ("mirror", "room-b", 0)
        assert copy["step"] >= 30 - 10
        # A copier that is killed costs nothing but time.
        before = copy["step"]
        subprocess.run(["kill", "-9", str(job.look()["helpers"]["copier-mirror"]["pid"])], check=True)
        wait_for("a copy by its successor", lambda: status(job)["copies"][1]["step"] > before)
        job.commands[-1].terminate()
        assert job.finish() == 20, job.shown
        last = max(job.durable())
        assert max(steps_in(mirror)) == last, "the last one was left behind"
        assert len(steps_in(mirror)) <= 3
        loaded = load_newest(cloud.fs, cloud.run_dir)
        assert loaded is not None
        assert loaded.step == last
        # The disk is gone, and the node's memory of it.
        shutil.rmtree(job.run_dir)
        shutil.rmtree(job.root / "state")
        subprocess.run(
            [sys.executable, "-m", "ridethrough", "restore", job.run_dir, "--from", str(mirror)], check=True, env=job.all_environment, timeout=60
        )
        job.start("--config", str(config))
        job.wait_for_step(last + 5, starts=2)
        assert job.restored()[-1] == last
    finally:
        job.close()

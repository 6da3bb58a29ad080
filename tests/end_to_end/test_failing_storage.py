"""Storage that fails in every way costs the saves it refuses, and nothing else: a real job on a FUSE directory that fails on request."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job import Job, wait_for

from faulty_disk import CHANGES, EVERYTHING, FaultyDisk
from ridethrough.snapshot.link import PERSIST, KeeperLink

pytestmark = [pytest.mark.root, pytest.mark.torch, pytest.mark.timeout(180)]

FAULTS: dict[str, tuple[str | Iterable[str], int]] = {
    "ENOSPC on write": ("write", errno.ENOSPC),
    "EDQUOT on write": ("write", errno.EDQUOT),
    "EDQUOT on create": ("create", errno.EDQUOT),
    "EIO on write": ("write", errno.EIO),
    "EIO on fsync": ("fsync", errno.EIO),
    "EIO on fsync of directory": ("fsyncdir", errno.EIO),
    "EIO on rename": ("rename", errno.EIO),
    "ESTALE on everything": (EVERYTHING, errno.ESTALE),
    "EROFS on every change": (CHANGES, errno.EROFS),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    with FaultyDisk(tmp_path / "faulty") as made:
        yield made


def job_on(disk: FaultyDisk, tmp_path: Path, **environment: str) -> Job:
    job = Job(tmp_path / "job", environment=environment)
    Path(job.run_dir).symlink_to(disk.path / "run")
    return job


def status(job: Job) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "ridethrough", "status", "--json", job.run_dir], capture_output=True, text=True, check=False, env=job.all_environment
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def answer_of(job: Job) -> dict[str, Any]:
    """What the persister says of its saves."""
    path = job.socket()
    assert path is not None
    link = KeeperLink(path, role="test")
    try:
        return link.board(PERSIST).read()
    finally:
        link.close()


def test_every_fault_of_the_storage_costs_its_saves_and_nothing_else(disk: FaultyDisk, tmp_path: Path) -> None:
    job = job_on(disk, tmp_path, TRAINEE_STEPS="100000", TRAINEE_STEP_S="0.01", TRAINEE_EVERY="5")
    job.start()
    try:
        job.wait_for_step(20)
        for name, (calls, error) in FAULTS.items():
            disk.fail(calls, error)
            failed = wait_for(f"{name}: a save fails", lambda: answer_of(job)["failures_in_a_row"] and answer_of(job)["failed"])
            assert errno.errorcode[error] in failed["message"], name
            at, durable = job.steps()[-1], answer_of(job)["durable"]
            job.wait_for_step(at + 20)
            assert answer_of(job)["durable"] == durable, f"{name}: said to be durable"
            if error == errno.ESTALE:
                found = status(job)
                assert found["exposure"]["steps"] >= 20
                assert [alarm for alarm in found["alarms"] if "in a row failed" in alarm and "ESTALE" in alarm]
            disk.heal()
            wait_for(f"{name}: a save when it is over", lambda at=at: answer_of(job)["durable"]["step"] > at)
            assert answer_of(job)["failures_in_a_row"] == 0, name
        assert len(job.restored()) == 1, "the trainer was started again"
        job.commands[-1].terminate()
        assert job.finish() == 20, job.shown
        assert max(job.durable()) == job.steps()[-1]
    finally:
        disk.heal()
        job.close()


def test_a_start_waits_for_storage_that_hangs_and_goes_on_when_it_answers(disk: FaultyDisk, tmp_path: Path) -> None:
    """It hangs after the script has named its run, and before it restores."""
    job = job_on(disk, tmp_path, TRAINEE_STEPS="60", TRAINEE_WAIT_S="60", TRAINEE_PAUSE_S="1")
    try:
        assert job.run() == 0, job.shown
        job.environment["TRAINEE_STEPS"] = "80"
        job.start()
        wait_for("the second start is built", lambda: len(list(job.tells.glob("built-*"))) == 2)
        disk.hang()
        with pytest.raises(AssertionError, match="not within"):
            wait_for("a step", lambda: len(job.restored()) == 2, deadline_s=4)
        disk.heal()
        assert job.finish() == 0, job.shown
        assert job.restored() == [0, 60]
    finally:
        disk.heal()
        job.close()


def test_a_start_gives_up_storage_that_hangs_for_ever_and_names_it(disk: FaultyDisk, tmp_path: Path) -> None:
    job = job_on(disk, tmp_path, TRAINEE_STEPS="20", TRAINEE_WAIT_S="10")
    try:
        disk.hang()
        assert job.run() == 13, job.shown
        assert f"no answer within 10 s on look up): {job.run_dir}" in job.shown
    finally:
        disk.heal()
        job.close()

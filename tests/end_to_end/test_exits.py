"""How `ridethrough run` ends, and what it refuses to do."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job import Job, is_gone, wait_for

from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_run
from ridethrough.store.start import remember_run
from ridethrough.testing import flip_bit

Maker = Callable[..., Job]
Digests = dict[int, dict[int, str]]
PYTHON = sys.executable


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 30 steps."""
    job = Job(tmp_path_factory.mktemp("trained"), environment={"TRAINEE_STEPS": "30"})
    try:
        assert job.run() == 0, job.shown
    finally:
        job.close()
    return Path(job.run_dir)


@pytest.fixture
def copied(make_job: Maker, trained: Path) -> Job:
    """A job whose run directory is a copy of the finished one, that would go on to step 40."""
    job = make_job(environment={"TRAINEE_STEPS": "40"})
    shutil.copytree(trained, job.run_dir)
    return job


def test_finished_run_that_is_started_again_goes_on(copied: Job) -> None:
    assert copied.run() == 0, copied.shown
    assert copied.restored() == [30]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Iterator[tuple[Job, int]]:
    """A run of which every seal is damaged, and the exit code of a start on it."""
    job = Job(tmp_path_factory.mktemp("refused"))
    shutil.copytree(trained, job.run_dir)
    for seal in Path(job.run_dir).glob("step-*/*.seal"):
        flip_bit(str(seal), 100)
    try:
        yield job, job.run()
    finally:
        job.close()


def test_run_without_any_intact_seal_ends_with_12(refused: tuple[Job, int]) -> None:
    assert refused[1] == 12, refused[0].shown


def test_refused_start_makes_no_step(refused: tuple[Job, int]) -> None:
    assert refused[0].steps() == []


def test_refused_start_removes_nothing(refused: tuple[Job, int], trained: Path) -> None:
    def names(root: Path) -> set[str]:
        return {str(p.relative_to(root)) for p in root.glob("step-*/*")}

    assert names(Path(refused[0].run_dir)) == names(trained)


def test_fresh_starts_at_step_0_where_checkpoints_exist(copied: Job) -> None:
    assert copied.run("--fresh") == 0, copied.shown
    assert copied.restored() == [0]


def test_run_directory_that_is_not_mounted_ends_with_13(copied: Job) -> None:
    state_dir = copied.all_environment["RIDETHROUGH_STATE_DIR"]
    fs = PosixFileSystem()
    remember_run(fs, state_dir, os.path.realpath(copied.run_dir), read_run(fs, copied.run_dir).run_uid)
    shutil.rmtree(copied.run_dir)
    os.mkdir(copied.run_dir)  # the empty mount point
    copied.environment["TRAINEE_WAIT_S"] = "0.5"
    assert copied.run() == 13, copied.shown
    assert os.listdir(copied.run_dir) == [], "nothing was written into the mount point"


def test_error_in_user_code_before_the_first_step_ends_with_22(make_job: Maker) -> None:
    job = make_job()
    assert job.run(command=[PYTHON, "-c", "raise ValueError('no such data set')"]) == 22, job.shown


def test_error_in_user_code_is_shown_to_the_user(make_job: Maker) -> None:
    job = make_job()
    job.run(command=[PYTHON, "-c", "raise ValueError('no such data set')"])
    assert "ridethrough: error in the training code before its first step: ValueError: no such data set" in job.shown


def test_command_that_does_not_exist_ends_with_22(make_job: Maker) -> None:
    job = make_job()
    assert job.run(command=["no-such-program"]) == 22, job.shown


def test_command_without_a_checkpointer_ends_with_0_and_says_so(make_job: Maker) -> None:
    job = make_job()
    assert job.run(command=[PYTHON, "-c", "pass"]) == 0
    assert "nothing of it was protected" in job.shown


def test_same_failure_at_the_same_step_twice_ends_with_21(make_job: Maker) -> None:
    job = make_job(environment={"TRAINEE_FAIL_AT": "15"})
    assert job.run() == 21, job.shown
    assert job.restored() == [0, 14]


def test_second_command_on_a_run_ends_with_11(make_job: Maker) -> None:
    job = make_job()
    job.start("--run", job.run_dir, command=["sleep", "60"])
    wait_for("the first command owns the run", job.socket)
    assert job.finish(job.start("--run", job.run_dir, command=["sleep", "60"])) == 11, job.shown
    assert job.commands[0].poll() is None, "the first one goes on"


def test_second_command_whose_script_names_the_run_ends_with_11(make_job: Maker) -> None:
    job = make_job()
    job.start("--run", job.run_dir, command=["sleep", "60"])
    wait_for("the first command owns the run", job.socket)
    assert job.finish(job.start()) == 11, job.shown


def test_secret_reaches_no_file_of_run_or_node(make_job: Maker) -> None:
    canary = "canary-4711-hunter2"
    job = make_job(environment={"HF_TOKEN": canary})
    code = f"raise ValueError('cannot read https://user:{canary}@host/data?token={canary}')"
    assert job.run("--run", job.run_dir, command=[PYTHON, "-c", code, "--api-key", canary]) == 22
    os.makedirs(job.run_dir, exist_ok=True)
    files = [path for path in job.root.rglob("*") if path.is_file() and not path.name.startswith("output-")]
    assert [str(path) for path in files if canary.encode() in path.read_bytes()] == []


def test_secret_is_not_repeated_by_our_own_messages(make_job: Maker) -> None:
    job = make_job()
    code = "raise ValueError('cannot read https://user:canary-4711-hunter2@host/data')"
    job.run(command=[PYTHON, "-c", code])
    ours = [line for line in job.shown.splitlines() if "ridethrough" in line]
    assert len(ours) >= 3
    assert not any("hunter2" in line for line in ours)


def test_process_that_a_dead_keeper_left_behind_is_ended_by_the_next_start(make_job: Maker) -> None:
    """A process of ours that never met the checkpointer does not die with the keeper: it is fenced by its environment."""
    job = make_job()
    tells = job.tells / "orphan"
    code = (
        "import subprocess, pathlib, time; p = subprocess.Popen(['sleep', '300']);"
        f"pathlib.Path({str(tells)!r}).write_text(str(p.pid)); time.sleep(300)"
    )
    first = job.start("--run", job.run_dir, command=[PYTHON, "-c", code])
    orphan = int(wait_for("the orphan's pid", lambda: tells.exists() and tells.read_text()))
    job.socket()
    first.kill()
    job.finish(first)
    assert not is_gone(orphan)
    job.run("--run", job.run_dir, command=["true"])
    wait_for("the orphan is gone", lambda: is_gone(orphan), deadline_s=5)


def test_sigint_saves_and_exits_with_130(make_job: Maker) -> None:
    job = make_job()
    command = job.start()
    job.wait_for_step(15)
    command.send_signal(signal.SIGINT)
    assert job.finish(command) == 130, job.shown
    assert job.durable()[-1] >= job.steps()[-1] - 1


def test_saves_go_on_when_the_package_has_vanished_and_its_helpers_were_killed(make_job: Maker, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    source = Path(__file__).parents[2] / "src" / "ridethrough"
    shutil.copytree(source, installed / "ridethrough", ignore=shutil.ignore_patterns("__pycache__"))
    job = make_job(environment={"PYTHONPATH": str(installed), "TRAINEE_STEP_S": "0.02", "PYTHONDONTWRITEBYTECODE": "1"})
    command = job.start()
    job.wait_for_step(11)
    shutil.rmtree(installed)
    for role in ("supervisor", "persister"):
        os.kill(job.helper_pid(role), signal.SIGKILL)
    assert job.finish(command) == 0, job.shown
    assert job.durable()[-1] == 120


def test_script_alone_is_saved_by_the_librarys_own_keeper_when_it_is_killed(make_job: Maker, straight: Digests) -> None:
    job = make_job()
    script = job.start_alone()
    job.wait_for_step(25)
    assert job.socket(), "the library has started a keeper"
    script.kill()
    job.finish(script)
    newest = job.steps()[-1] - 1  # it tells of a step just before the step is counted
    wait_for("the keeper has flushed and ended", lambda: job.socket() is None)
    assert job.durable()[-1] >= newest
    assert job.finish(job.start_alone()) == 0, job.shown
    assert job.restored()[1] >= newest
    assert job.digests() == straight[0]

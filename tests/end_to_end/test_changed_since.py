"""A real script in a git repository: what changes between two starts of the command, and what the second one does about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job import TRAINEE, Job

from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_catalog

STEPS = 20
ENVIRONMENT = {"TRAINEE_STEPS": str(STEPS), "TRAINEE_EVERY": "10", "TRAINEE_DATA_VERSION": "v1"}


def git(root: Path, *argv: str) -> None:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = {f"GIT_{role}_{what}": "nobody@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *argv], cwd=root, check=True, env={**os.environ, **own, **who})


class Versioned:
    """A job whose script is in a repository, trained and saved once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.code = job.root / "code"
        self.code.mkdir()
        shutil.copy(TRAINEE, self.code / "trainee.py")
        for argv in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            git(self.code, *argv)
        assert self.run() == 0, job.shown

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(self.code / "trainee.py"), self.job.run_dir, str(self.job.tells)]

    def run(self) -> int:
        return self.job.run(command=self.command)

    def run_alone(self) -> int:
        return self.job.finish(self.job._popen(self.command))

    def edit(self) -> None:
        """The script has another line."""
        with open(self.code / "trainee.py", "a") as file:
            file.write("# mended\n")

    def commit(self) -> None:
        self.edit()
        git(self.code, "commit", "-qam", "second")

    def told(self) -> list[str]:
        return [data["detail"] for data in self.job.events("resume.differs")]

    def written(self) -> dict[str, bytes]:
        """Every file of the run but the journal, which also tells of starts that came to nothing."""
        root = Path(self.job.run_dir)
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.parent.name != "journal"}

    def rewind(self, kept: Path) -> None:
        """Everything is as it was after the first start, at the same paths: they are in the command line."""
        shutil.rmtree(self.job.root)
        shutil.copytree(kept, self.job.root, symlinks=True)
        self.job.environment = dict(ENVIRONMENT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Versioned, Path]]:
    """A job that was started once, and a copy of all that it left."""
    job = Job(tmp_path_factory.mktemp("changed") / "job", environment=dict(ENVIRONMENT))
    try:
        made = Versioned(job)
        kept = shutil.copytree(job.root, job.root.parent / "kept", symlinks=True)
        yield made, kept
    finally:
        job.close()


@pytest.fixture
def versioned(trained: tuple[Versioned, Path]) -> Iterator[Versioned]:
    made, kept = trained
    made.rewind(kept)
    yield made
    made.job.close()


def test_a_start_that_changed_nothing_resumes_and_says_nothing(versioned: Versioned) -> None:
    assert versioned.run() == 0, versioned.job.shown
    assert versioned.job.restored() == [0, STEPS]
    assert versioned.told() == []
    assert "resume.differs" not in versioned.job.shown


def test_a_changed_commit_is_warned_of_and_resumed(versioned: Versioned) -> None:
    versioned.commit()
    versioned.job.environment["TRAINEE_STEPS"] = "30"
    assert versioned.run() == 0, versioned.job.shown
    assert versioned.job.restored() == [0, STEPS]
    [detail] = versioned.told()
    assert detail.startswith("commit ")
    assert '"ridethrough": "resume.differs"' in versioned.job.shown
    assert versioned.job.steps() == list(range(1, 31))


@pytest.mark.slow
def test_changes_that_are_not_committed_are_warned_of_as_well_and_once(versioned: Versioned) -> None:
    versioned.edit()
    versioned.job.environment["TRAINEE_STEPS"] = "30"
    for _ in range(2):
        assert versioned.run() == 0, versioned.job.shown
    [detail] = versioned.told()
    assert detail.startswith("work tree clean -> changed ")


def test_other_data_ends_with_21_and_leaves_everything_as_it_was_until_it_is_allowed(versioned: Versioned) -> None:
    before = versioned.written()
    versioned.job.environment["TRAINEE_DATA_VERSION"] = "v2"
    assert versioned.run() == 21, versioned.job.shown
    assert versioned.written() == before
    assert len(read_catalog(PosixFileSystem(), versioned.job.run_dir).attempts) == 1
    assert f"step {STEPS} of {os.path.realpath(versioned.job.run_dir)} is not resumed" in versioned.job.shown
    assert "data version v1 -> v2" in versioned.job.shown
    assert "RIDETHROUGH_RESUME_DATA=warn" in versioned.job.shown
    versioned.job.environment["RIDETHROUGH_RESUME_DATA"] = "warn"
    assert versioned.run() == 0, versioned.job.shown
    assert versioned.job.restored() == [0, STEPS]
    assert versioned.told() == ["data version v1 -> v2"]


@pytest.mark.slow
def test_what_the_site_ignores_is_resumed_in_silence(versioned: Versioned) -> None:
    versioned.commit()
    versioned.job.environment["TRAINEE_DATA_VERSION"] = "v2"
    config = versioned.job.root / "site.toml"
    config.write_text('[resume]\ncode = "ignore"\ndata = "ignore"\n')
    versioned.job.environment["RIDETHROUGH_CONFIG"] = str(config)
    assert versioned.run() == 0, versioned.job.shown
    assert versioned.job.restored() == [0, STEPS]
    assert versioned.told() == []


@pytest.mark.slow
def test_a_script_without_ridethrough_run_is_guarded_the_same_way(versioned: Versioned) -> None:
    versioned.job.environment["TRAINEE_DATA_VERSION"] = "v2"
    assert versioned.run_alone() == 1, versioned.job.shown
    assert "ResumeRefused: step 20" in versioned.job.shown
    versioned.job.environment["TRAINEE_DATA_VERSION"] = "v1"
    versioned.commit()
    assert versioned.run_alone() == 0, versioned.job.shown
    assert "ridethrough: went on from step 20; changed since then: commit " in versioned.job.shown
    assert versioned.job.restored() == [0, STEPS]

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ridethrough.errors import UsageError
from ridethrough.train.provenance import data_fingerprint, dependencies, describe, git_diff, git_state, installed

MIB = 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    (root / "train").mkdir(parents=True)
    (root / "train" / "a.bin").write_bytes(b"a" * 1000)
    (root / "train" / "b.bin").write_bytes(b"b" * (3 * MIB))
    (root / "labels.txt").write_text("0\n1\n")
    return root


def flip(path: Path, at: int) -> None:
    found = bytearray(path.read_bytes())
    found[at] ^= 1
    path.write_bytes(found)


def test_fingerprint_of_unchanged_data_is_the_same(data: Path) -> None:
    assert data_fingerprint(data) == data_fingerprint(data)


def test_fingerprint_does_not_depend_on_times(data: Path) -> None:
    before = data_fingerprint(data)
    os.utime(data / "labels.txt", (1, 1))
    assert data_fingerprint(data) == before


def test_fingerprint_does_not_depend_on_where_the_data_lies(data: Path, tmp_path: Path) -> None:
    before = data_fingerprint(data)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    data.rename(moved / "data")
    assert data_fingerprint(moved / "data") == before


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: flip(d / "train" / "a.bin", 500),
        lambda d: flip(d / "train" / "b.bin", 0),
        lambda d: flip(d / "train" / "b.bin", -1),
        lambda d: (d / "labels.txt").write_text("0\n1\n2\n"),
        lambda d: (d / "train" / "a.bin").rename(d / "train" / "c.bin"),
        lambda d: (d / "train" / "new").write_text(""),
        lambda d: (d / "labels.txt").unlink(),
    ],
    ids=["small file", "head of a large file", "tail of a large file", "longer file", "renamed file", "new empty file", "missing file"],
)
def test_fingerprint_changes_with(data: Path, edit: Callable[[Path], object]) -> None:
    before = data_fingerprint(data)
    edit(data)
    assert data_fingerprint(data) != before


def test_fingerprint_of_several_paths_does_not_depend_on_their_order(data: Path) -> None:
    assert data_fingerprint([data / "train", data / "labels.txt"]) == data_fingerprint([data / "labels.txt", data / "train"])


def test_fingerprint_of_a_path_that_does_not_exist_is_refused(data: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        data_fingerprint(data / "absent")


def test_directory_without_a_repository_has_no_commit(tmp_path: Path) -> None:
    assert git_state(str(tmp_path)) == (None, None)


def test_machine_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(str(tmp_path)) == (None, None)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    root.mkdir()
    (root / "train.py").write_text("lr = 1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def git(root: Path, *argv: str) -> None:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = {f"GIT_{role}_{what}": "nobody@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *argv], cwd=root, check=True, env={**os.environ, **own, **who})


def test_uncommitted_changes_are_named_by_what_they_change(repository: Path) -> None:
    seen = [git_diff(str(repository))]
    for text in ("lr = 2\n", "lr = 3\n", "lr = 2\n", "lr = 1\n"):
        (repository / "train.py").write_text(text)
        seen.append(git_diff(str(repository)))
    clean, two, three, again, back = seen
    assert (again, back) == (two, clean)
    assert len({clean, two, three}) == 3


def test_a_users_settings_for_git_diff_change_no_name_of_a_change(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "train.py").write_text("lr = 2\n")
    before = git_diff(str(repository))
    for setting in ("diff.noprefix", "diff.mnemonicPrefix", "color.ui"):
        git(repository, "config", setting, "always" if setting == "color.ui" else "true")
    (repository / ".git" / "info" / "attributes").write_text("*.py diff=converted\n")
    git(repository, "config", "diff.converted.textconv", "wc -c")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "true")
    assert git_diff(str(repository)) == before


def test_uncommitted_changes_are_in_the_record_only_where_there_are_some(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py")])
    described = describe(experiment="x", config=None, data_version=None)
    assert (described["git_dirty"], "git_diff" in described) == (False, False)
    (repository / "train.py").write_text("lr = 2\n")
    described = describe(experiment="x", config=None, data_version=None)
    assert (described["git_dirty"], described["git_diff"]) == (True, git_diff(str(repository)))


def test_changes_where_there_is_no_repository_have_no_name(tmp_path: Path) -> None:
    assert git_diff(str(tmp_path)) is None


def test_versions_read_without_importing_are_those_that_the_loaded_packages_say() -> None:
    loaded = dependencies()
    assert {"torch", "numpy"} <= loaded.keys()
    assert installed(loaded) == loaded


def test_a_package_that_is_not_installed_or_that_nobody_watches_has_no_version() -> None:
    assert installed(["deepspeed", "../../etc", "click", ""]) == {}


def test_dependencies_name_what_can_change_numbers() -> None:
    assert {"python", "torch", "numpy", "ridethrough"} <= describe(experiment="x", config=None, data_version=None)["dependencies"].keys()


def test_no_secret_of_command_environment_or_remote_gets_into_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-4711-hunter2"
    for argv in (["init", "-q"], ["remote", "add", "origin", f"https://user:{canary}@host/repo.git"]):
        subprocess.run(["git", *argv], cwd=tmp_path, check=True)
    monkeypatch.setenv("WANDB_API_KEY", canary)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "--api-key", canary, f"--data=s3://key:{canary}@bucket/x", f"--token={canary}"])
    described = describe(experiment=f"run {canary}", config={"password": canary}, data_version=f"https://u:{canary}@host/v1")
    assert canary not in json.dumps(described)
    assert "train.py" in described["start_command"]

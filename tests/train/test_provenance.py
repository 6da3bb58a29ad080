from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ridethrough.errors import UsageError
from ridethrough.train.provenance import data_fingerprint, describe, git_state

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

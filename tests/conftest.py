"""Shared fixtures: a hostile directory, a state directory of its own for each test, and the rule for root-only tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lacking import lacking
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing import SimpleStore, missing_for_disks

# Blanks, quotes, a newline, a leading dash, a glob, a brace, non-ASCII, and as long as a file system allows.
HOSTILE_NAME = "- a b'c\"d\ne*{f}$(g)-é-日本-"
NAME_LIMIT_BYTES = 255

_missing_for_root = missing_for_disks()


@pytest.fixture(autouse=True)
def own_state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a node remembers of its runs never leaks between tests or into the user's home."""
    state_dir = tmp_path / "node-state"
    monkeypatch.setenv("RIDETHROUGH_STATE_DIR", str(state_dir))
    return state_dir


@pytest.fixture
def hostile_dir(tmp_path: Path) -> Path:
    """A directory whose name breaks every program that quotes badly."""
    name = HOSTILE_NAME + "x" * (NAME_LIMIT_BYTES - len(HOSTILE_NAME.encode()))
    assert len(os.fsencode(name)) == NAME_LIMIT_BYTES
    path = tmp_path / name
    path.mkdir()
    return path


@pytest.fixture
def fs() -> PosixFileSystem:
    return PosixFileSystem()


@pytest.fixture
def store(fs: PosixFileSystem, tmp_path: Path) -> SimpleStore:
    """A run with a started first attempt and no checkpoint."""
    made = SimpleStore(fs=fs, run_dir=str(tmp_path / "runs" / "exp001"))
    made.start()
    return made


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") is not None:
        lacking(_missing_for_root)

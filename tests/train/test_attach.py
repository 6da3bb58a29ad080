from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridethrough.errors import KeeperGone, StoreLocked
from ridethrough.seam import process
from ridethrough.snapshot.address import lock_path
from ridethrough.snapshot.link import SOCKET_VARIABLE
from ridethrough.testing import FakeClock
from ridethrough.train import attach as module
from ridethrough.train.attach import attach


class World:
    """Keepers that answer or not; what the library starts is counted instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = 0
        self.answers_after = 0
        self.asked = 0
        self.is_library = True
        monkeypatch.setattr(module, "KeeperLink", self._link)
        monkeypatch.setattr(process, "start_detached", self._start)

    def _start(self, *_: Any, **__: Any) -> None:
        self.started += 1

    def _link(self, _path: str, **_: Any) -> Any:
        self.asked += 1
        if self.asked <= self.answers_after:
            raise KeeperGone(detail="ENOENT")
        world = self

        class Link:
            hello: dict[str, Any] = {"is_library": world.is_library, "keeper_pid": 42}  # noqa: RUF012

        return Link()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    return World(monkeypatch)


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def kept(run_dir: str) -> Iterator[None]:
    """A process that lives owns the run and says where it answers."""
    lock = process.FileLock(lock_path(run_dir))
    lock.acquire(run=run_dir, note="/somewhere/keeper.sock")
    yield
    lock.release()


@pytest.mark.usefixtures("kept")
def test_keeper_that_owns_the_run_is_used(world: World, run_dir: str) -> None:
    attach(FakeClock(), run_dir, rank=0)
    assert world.started == 0


@pytest.mark.usefixtures("kept")
def test_keeper_that_does_not_listen_yet_is_waited_for(world: World, run_dir: str) -> None:
    """It says where it answers before it does."""
    world.answers_after = 3
    attach(FakeClock(), run_dir, rank=0)
    assert (world.asked, world.started) == (4, 0)


def test_keeper_is_started_where_none_owns_the_run(world: World, run_dir: str) -> None:
    with pytest.raises(KeeperGone, match="none answered within 30 s"):
        attach(FakeClock(), run_dir, rank=0)
    assert world.started == 1


@pytest.mark.usefixtures("kept")
def test_run_of_a_command_is_refused_to_a_script_alone(world: World, run_dir: str) -> None:
    world.is_library = False
    with pytest.raises(StoreLocked, match=r"process 42 \(ridethrough run\)"):
        attach(FakeClock(), run_dir, rank=0)


def test_other_rank_waits_for_the_keeper_that_the_first_one_starts(world: World, run_dir: str) -> None:
    first = process.FileLock(lock_path(run_dir) + ".start")
    first.acquire(run=run_dir, note="")
    with pytest.raises(KeeperGone):
        attach(FakeClock(), run_dir, rank=1)
    first.release()
    assert world.started == 0


def test_lock_that_a_dead_keeper_left_is_nobodys(world: World, run_dir: str) -> None:
    Path(lock_path(run_dir)).write_text(f"{2**22 + os.getpid()}\n/somewhere/keeper.sock\n")
    with pytest.raises(KeeperGone):
        attach(FakeClock(), run_dir, rank=0)
    assert world.started == 1

"""The supervisor's loop against a keeper that is only its answers: what it does after dying at a bad moment."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_link import FakeLink
from ridethrough.config import Config, NodeConfig, PeersConfig
from ridethrough.errors import KeeperGone
from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import node_name
from ridethrough.seam.udp import UdpSocket
from ridethrough.snapshot import link as links
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.plan import Plan
from ridethrough.store.retain import Retention
from ridethrough.supervisor.directive import Directive, Stage
from ridethrough.supervisor.loop import Supervisor
from ridethrough.supervisor.record import Pen
from ridethrough.supervisor.settings import Settings
from ridethrough.testing import FakeClock
from ridethrough.types import AttemptRef


class FakeKeeper(FakeLink):
    """Answers as a keeper would; starts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.look: dict[str, Any] = {
            "keeper_pid": 1, "run_dir": None, "launch": 0, "pid": 0, "status": None, "ended_s": None, "trainers": 0, "workers": None,
            "signals": [], "wants_peers": False, "up_s": 1.0, "helpers": {},
        }  # fmt: skip
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def descriptor(self, op: str, **fields: Any) -> int:
        if op != "memory":
            raise KeeperGone(detail="no command")
        return super().descriptor(op, **fields)

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        if op == "look":
            return dict(self.look)
        self.asked.append((op, fields))
        if op == "spawn":
            self.look.update(launch=self.look["launch"] + 1, status=None)
            return {"launch": self.look["launch"], "pid": 1}
        return {}

    def count(self, op: str) -> int:
        return sum(asked == op for asked, _ in self.asked)


class Notes(Pen):
    """What was noted."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, dict[str, Any]]] = []

    def note(self, kind: str, **data: Any) -> bool:
        self.noted.append((kind, data))
        return True

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [data for noted, data in self.noted if noted == kind]


@pytest.fixture
def keeper() -> Iterator[FakeKeeper]:
    found = FakeKeeper()
    yield found
    found.close()


def supervisor(keeper: FakeKeeper, clock: FakeClock) -> Supervisor:
    return Supervisor(PosixFileSystem(), clock, keeper, Settings(argv=("train",)))  # type: ignore[arg-type]


def plan(keeper: FakeKeeper, launch: int) -> None:
    ref = AttemptRef(seq=1, nonce="a" * 32)
    me = node_name()
    roster = Roster(run_uid="u", attempt=ref, nodes=(me, me), parts=(RosterPart(name="replicated", holders=(0, 1)),))
    found = Plan(
        run_dir="/r", run_uid="u", attempt=ref, parent=None, resumed_dir=None, roster=roster, node=me, meta={}, retention=Retention(),
        monitor=None, save_interval_steps=100, snapshot_interval_steps=1, restored_step=0, damaged=(),
    )  # fmt: skip
    keeper.board(links.plan_board(launch)).write(found.as_board())


def rank(keeper: FakeKeeper, launch: int, number: int, **says: Any) -> None:
    import os

    from ridethrough.seam.process import start_time

    board = keeper.board(links.rank_board(launch, number))
    pid = os.getpid()
    common = {"rank": number, "pid": pid, "process_started": start_time(pid), "world_size": 2, "run_dir": "/r", "phase": "training"}
    board.write({**common, "step": 99, **says})


def end(keeper: FakeKeeper, status: int, at_s: float) -> None:
    keeper.look.update(status=status, ended_s=at_s, workers=0)


def test_launch_that_a_dead_supervisor_had_started_is_adopted_and_not_started_again(keeper: FakeKeeper) -> None:
    clock = FakeClock()
    keeper.look["launch"] = 1  # spawned, and nothing written down
    found = supervisor(keeper, clock)
    found.round()
    assert keeper.count("spawn") == 0
    assert found.memory.launch == 1


def test_fresh_start_is_wished_for_until_a_launch_has_agreed(keeper: FakeKeeper) -> None:
    clock = FakeClock()
    found = Supervisor(PosixFileSystem(), clock, keeper, Settings(argv=("train",), is_fresh=True))  # type: ignore[arg-type]
    found.round()
    end(keeper, -9, clock.monotonic_s())
    for _ in range(4):
        found.round()
    plan(keeper, 2)
    found.round()
    end(keeper, -11, clock.monotonic_s())
    keeper.board(links.PERSIST).write({"flushed": 99})
    for _ in range(40):
        found.round()
        clock.sleep(1.0)
    wished = (links.FRESH_VARIABLE, links.RESTART_VARIABLE)
    wishes = [{k: v for k, v in fields["environment"].items() if k in wished} for op, fields in keeper.asked if op == "spawn"]
    assert wishes == [{links.FRESH_VARIABLE: "1"}, {links.FRESH_VARIABLE: "1"}, {links.RESTART_VARIABLE: "1"}]


def test_stop_in_a_pause_before_a_restart_ends_the_run(keeper: FakeKeeper) -> None:
    clock = FakeClock()
    found = supervisor(keeper, clock)
    found.round()
    found.memory.past = [{"fingerprint": "a", "last_step": 1, "durable_step": -1}, {"fingerprint": "b", "last_step": 2, "durable_step": -1}]
    end(keeper, -9, clock.monotonic_s())
    for _ in range(3):
        found.round()
    assert found.directive.stage is Stage.CALLING
    assert found.directive.outcome is not None
    assert found.directive.outcome.pause_s > 0
    keeper.look["signals"] = [signal.SIGTERM]
    found.round()
    assert keeper.count("finish") == 1
    assert keeper.count("spawn") == 1


def test_an_end_is_judged_and_remembered_in_one_breath(keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    found = supervisor(keeper, clock)
    found.round()
    plan(keeper, 1)
    rank(keeper, 1, 0)
    found.round()
    written: list[dict[str, Any]] = []
    write = Board.write
    monkeypatch.setattr(Board, "write", lambda self, value: (written.append(dict(value)), write(self, value))[1])
    end(keeper, -9, clock.monotonic_s())
    found.round()
    written = [value["memory"] for value in written if "memory" in value]
    assert any(memory["past"] for memory in written)
    for memory in written:
        is_judged = memory["directive"].get("outcome") is not None
        assert bool(memory["past"]) == is_judged, "killed here, a successor would judge the same end twice"


def test_final_save_is_announced_also_when_the_one_before_it_has_failed(keeper: FakeKeeper) -> None:
    clock = FakeClock()
    found = supervisor(keeper, clock)
    found.round()
    plan(keeper, 1)
    keeper.board(links.PERSIST).write({"failed": {"launch": 1, "step": 100, "at_s": clock.monotonic_s()}})
    for number in (0, 1):
        rank(keeper, 1, number, step=105, phase="saving", wanted_save=105, wanted_at_s=clock.monotonic_s())
    found.round()
    assert found.directive.announced == 105


def test_step_that_was_refused_and_is_asked_for_again_is_announced_again_once(keeper: FakeKeeper) -> None:
    clock = FakeClock()
    found = supervisor(keeper, clock)
    found.round()
    plan(keeper, 1)
    for number in (0, 1):
        rank(keeper, 1, number, step=105, phase="saving", wanted_save=105, wanted_at_s=clock.monotonic_s())
    found.round()
    clock.sleep(1.0)
    keeper.board(links.PERSIST).write({"failed": {"launch": 1, "number": 1, "step": 105, "at_s": clock.monotonic_s()}})
    found.round()
    assert found.directive.announcement == 1, "the ranks have not asked again"
    clock.sleep(1.0)
    for number in (0, 1):
        rank(keeper, 1, number, step=105, phase="saving", wanted_save=105, wanted_at_s=clock.monotonic_s())
    for _ in range(3):
        found.round()
    assert found.directive.announcement == 2


def test_processes_that_cannot_be_killed_end_the_run_and_call_a_person(keeper: FakeKeeper) -> None:
    clock = FakeClock()
    found = supervisor(keeper, clock)
    found.round()
    end(keeper, -9, clock.monotonic_s())
    keeper.look["workers"] = 2
    found.round()
    assert keeper.count("finish") == 0
    clock.sleep(61.0)
    found.round()
    assert [fields["code"] for op, fields in keeper.asked if op == "finish"] == [21]


# -- what keeps a node from talking to the others ----------------------------------------------------------------------------


def room_of_two(tmp_path: Path, **peers: Any) -> Settings:
    nodes = (NodeConfig(name=node_name(), address="127.0.0.1", domain="a"), NodeConfig(name="other", address="127.0.0.2", domain="b"))
    return Settings(argv=("train",), config=Config(run=str(tmp_path / "run"), storage="shared", nodes=nodes, peers=PeersConfig(**peers)))


def rounds(found: Supervisor, keeper: FakeKeeper, op: str) -> dict[str, Any]:
    """What the keeper is asked first; storage is looked at in a thread."""
    deadline = time.monotonic() + 10
    while not keeper.count(op):
        assert time.monotonic() < deadline
        found.round()
        time.sleep(0.01)
    return next(fields for asked, fields in keeper.asked if asked == op)


def test_save_at_which_storage_hangs_is_on_record_once_and_stops_nothing(keeper: FakeKeeper) -> None:
    clock, notes = FakeClock(), Notes()
    found = Supervisor(PosixFileSystem(), clock, keeper, Settings(argv=("train",)), pen=notes)  # type: ignore[arg-type]
    found.round()
    began_s = clock.monotonic_s()
    keeper.board(links.PERSIST).write({"busy": {"step": 30, "phase": "writing", "since_s": began_s}, "durable": {"launch": 1, "step": 20}})
    while clock.monotonic_s() < began_s + 59:
        found.round()
        clock.sleep(1.0)
    assert notes.of("save.overdue") == []
    while clock.monotonic_s() < began_s + 600:
        found.round()
        clock.sleep(1.0)
    [said] = notes.of("save.overdue")
    assert said["waited_s"] < 62
    assert (said["step"], said["phase"], said["durable_step"]) == (30, "writing", 20)
    assert keeper.count("signal") == 0
    assert found.directive.stage is Stage.RUNNING


def test_each_save_that_hangs_is_on_record(keeper: FakeKeeper) -> None:
    clock, notes = FakeClock(), Notes()
    found = Supervisor(PosixFileSystem(), clock, keeper, Settings(argv=("train",)), pen=notes)  # type: ignore[arg-type]
    found.round()
    for step in (30, 40):
        keeper.board(links.PERSIST).write({"busy": {"step": step, "phase": "verifying", "since_s": clock.monotonic_s()}})
        clock.sleep(70.0)
        found.round()
        keeper.board(links.PERSIST).write({"busy": None})
        found.round()
    assert [said["step"] for said in notes.of("save.overdue")] == [30, 40]


def test_key_that_others_can_read_ends_the_command_as_a_mistake(keeper: FakeKeeper, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    key.chmod(0o644)
    found = Supervisor(PosixFileSystem(), SystemClock(), keeper, room_of_two(tmp_path, port=0, key_file=str(key)))  # type: ignore[arg-type]
    ended = rounds(found, keeper, "finish")
    assert ended["code"] == 2
    assert "open to other users" in ended["message"]


def test_port_that_another_run_has_ends_the_command_as_a_mistake(keeper: FakeKeeper, tmp_path: Path) -> None:
    other = UdpSocket()
    found = Supervisor(PosixFileSystem(), SystemClock(), keeper, room_of_two(tmp_path, port=other.port))  # type: ignore[arg-type]
    ended = rounds(found, keeper, "finish")
    assert ended["code"] == 2
    assert str(other.port) in ended["message"]
    other.close()


def test_job_that_trains_is_not_ended_because_its_restarted_supervisor_cannot_talk(keeper: FakeKeeper, tmp_path: Path) -> None:
    other = UdpSocket()
    keeper.look["launch"] = 1
    keeper.board(links.CONTROL).write({"memory": {"launch": 1, "generation": 1, "directive": Directive(stage=Stage.RUNNING, generation=1).encode()}})
    found = Supervisor(PosixFileSystem(), SystemClock(), keeper, room_of_two(tmp_path, port=other.port))  # type: ignore[arg-type]
    for _ in range(20):
        found.round()
    other.close()
    assert keeper.asked == []

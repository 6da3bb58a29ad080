"""`status` answers from memory, within two seconds, whatever else is dead or stuck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ridethrough.cli.status import _alarms
from ridethrough.seam import process
from ridethrough.snapshot.address import find_socket, lock_path
from ridethrough.snapshot.link import KeeperLink

GOLDEN = Path(__file__).parent.parent / "data" / "format1" / "exp001"
SCHEMA = json.loads(resources.files("ridethrough.cli").joinpath("schemas", "status.json").read_text(encoding="utf-8"))


def status(run: Path | str) -> tuple[int, dict[str, Any], float]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "ridethrough", "status", "--json", str(run)], capture_output=True, text=True, check=False)
    took = time.monotonic() - began
    return done.returncode, json.loads(done.stdout or done.stderr), took


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A keeper that has a run and whose command just waits."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ridethrough", "run", "--run", str(run), "--", "sleep", "60"]
    keeper = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 20
        while find_socket(str(run)) is None or not os.path.exists(find_socket(str(run)) or ""):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield run
    finally:
        keeper.kill()
        keeper.wait()


def helpers(run: Path) -> dict[str, Any]:
    path = find_socket(str(run))
    assert path is not None
    link = KeeperLink(path, role="test")
    found = dict(link.request("look")["helpers"])
    link.close()
    return found


def test_a_run_that_is_not_running_is_described_from_disk() -> None:
    code, found, _ = status(GOLDEN)
    assert code == 0
    jsonschema.validate(found, SCHEMA)
    assert found["is_running"] is False
    assert found["storage"]["newest_restorable"]["step"] == 200


def test_no_run_is_exit_10(tmp_path: Path) -> None:
    code, found, _ = status(tmp_path / "nothing")
    assert code == 10
    assert found["exit_code"] == 10


def test_a_run_that_has_not_written_anything_yet_is_described_from_memory(kept: Path) -> None:
    code, found, _ = status(kept)
    assert code == 0
    jsonschema.validate(found, SCHEMA)
    assert found["is_running"] is True
    assert found["keeper"]["answers"] is True


def test_status_answers_within_two_seconds_with_the_supervisor_stopped(kept: Path) -> None:
    pid = helpers(kept)["supervisor"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        code, found, took = status(kept)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 0
    assert found["is_running"] is True
    assert took < 2


def test_status_answers_within_two_seconds_with_the_keeper_stopped(kept: Path) -> None:
    pid = int(Path(lock_path(str(kept))).read_text(encoding="utf-8").split("\n")[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        _, _, took = status(kept)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert took < 2


def test_a_helper_that_hangs_is_given_up_and_not_waited_for() -> None:
    began = time.monotonic()
    assert process.run_abandoning(["sleep", "30"], timeout_s=0.2) is None
    assert time.monotonic() - began < 1


def test_a_save_that_takes_minutes_is_an_alarm_and_one_that_takes_seconds_is_none() -> None:
    answer = {"busy": {"step": 30, "phase": "writing", "since_s": 1000.0}}
    assert _alarms({}, answer, {}, {}, 1010.0) == []
    assert _alarms({}, answer, {}, {}, 1090.0) == ["the save of step 30 has been writing for 90 s: storage does not answer, or is slow"]


def test_a_save_where_the_last_one_took_minutes_is_given_as_many() -> None:
    answer = {"busy": {"step": 30, "phase": "writing", "since_s": 1000.0}, "save_s": 200.0}
    assert _alarms({}, answer, {}, {}, 1500.0) == []
    assert len(_alarms({}, answer, {}, {}, 1601.0)) == 1


def test_private_parts_that_no_other_node_can_hold_are_an_alarm() -> None:
    assert _alarms({}, {}, {"too_large": [3, 4]}, {}, 0.0) == [
        "private parts of rank 3, 4 are above 256 KiB: no other node holds them before they are saved"
    ]

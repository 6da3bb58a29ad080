"""Two nodes on one machine: two keepers with a state directory each, one run directory, real torchrun, real kills.

Silence (a node without power) needs namespaces: the drills do that.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job import TRAINEE, Job, wait_for

from ridethrough.seam import process

Digests = dict[int, dict[int, str]]
STEPS = 230


def _free_port(kind: int) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pair:
    """The job of two nodes with one rank each."""

    def __init__(self, root: Path, *, dead: str = "4s") -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        udp = _free_port(socket.SOCK_DGRAM)
        # The launches of a run use eight ports from this one on.
        rendezvous = 20000 + udp % 10000 // 8 * 8
        (root / "ridethrough.toml").write_text(
            f"run = '{root / 'run'}'\nstorage = 'shared'\n"
            "[nodes.n0]\naddress = '127.0.0.1'\n[nodes.n1]\naddress = '127.0.0.2'\n"
            f"[peers]\nport = {udp}\ndead = '{dead}'\n[recovery]\nrendezvous_port = {rendezvous}\n"
        )
        self.nodes = [self._node(number) for number in (0, 1)]

    def _node(self, number: int) -> Job:
        own = {
            "RIDETHROUGH_NODE": f"n{number}",
            "RIDETHROUGH_PEERS_INTERFACE": f"127.0.0.{number + 1}",
            "GLOO_SOCKET_IFNAME": "lo",
            "TRAINEE_STEPS": str(STEPS),
            "TRAINEE_STEP_S": "0.08",
        }
        (self.root / f"node-{number}").mkdir(exist_ok=True)
        return _OnePathJob(self.root / f"node-{number}", environment=own, shared=self.root)

    def start(self, number: int) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
        command = [*torchrun, TRAINEE, str(self.root / "run"), str(self.root / "tells")]
        self.nodes[number].start("--config", str(self.root / "ridethrough.toml"), command=command)

    def steps(self, rank: int) -> list[int]:
        return self.nodes[0].steps(rank)

    def wait_for_step(self, step: int, *, starts: int) -> None:
        def is_there() -> bool:
            for node in self.nodes:
                assert node.commands[-1].poll() is None, node.shown[-4000:]
            return all(len(self.nodes[0].restored(r)) >= starts and max(self.steps(r)[-1:], default=-1) >= step for r in (0, 1))

        wait_for(f"step {step} in start {starts}", is_there)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.nodes[0].journal() if event["kind"] == kind]

    def darken(self, number: int) -> None:
        """Everything of the node is gone at once, as far as its processes go."""
        keeper = self.nodes[number].commands[-1]
        pids = [keeper.pid, *process.descendants(keeper.pid)]
        process.send_signal(pids, signal.SIGSTOP)  # nobody may react to the others' end
        process.send_signal(pids, signal.SIGKILL)
        keeper.wait(10)

    def close(self) -> None:
        for node in self.nodes:
            for command in node.commands:
                if command.poll() is None:
                    process.send_signal([command.pid, *process.descendants(command.pid)], signal.SIGKILL)
                    command.wait(10)


class _OnePathJob(Job):
    """A node's end of the job: logs and state of its own, run directory and tells in common."""

    def __init__(self, root: Path, *, environment: dict[str, str], shared: Path) -> None:
        self._shared = shared
        super().__init__(root, environment=environment)

    @property
    def run_dir(self) -> str:
        return str(self._shared / "run")

    @property
    def tells(self) -> Path:
        return self._shared / "tells"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path / "pair")
    yield made
    made.close()


def test_two_nodes_ride_through_a_still_supervisor_a_killed_trainer_and_a_lost_node(pair: Pair) -> None:
    for number in (0, 1):
        pair.start(number)
    pair.wait_for_step(12, starts=1)
    wait_for("a save of both nodes is confirmed", lambda: len(pair.events("checkpoint.durable")) >= 2)
    assert len({event["data"]["save_id"] for event in pair.events("checkpoint.durable")[:2]}) == 1
    assert pair.nodes[0].durable(), "called durable, it is there with the parts of both nodes"

    # 1. A supervisor that stands still is silent, but steps are made: nobody is stopped.
    supervisor = pair.nodes[1].helper_pid("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    before = pair.steps(0)[-1]
    time.sleep(6.0)
    os.kill(supervisor, signal.SIGCONT)
    assert pair.steps(0)[-1] > before + 20, "the job went on meanwhile"
    assert [e["data"]["nodes"] for e in pair.events("peer.suspected")] == [["n1"]]
    assert pair.events("peer.convicted") == []
    wait_for("it is heard again", lambda: pair.events("peer.heard_again"))

    # 2. A trainer is killed: noticed within a second, both nodes start once more, one step is lost at most.
    victim = [line["pid"] for line in pair.nodes[0]._lines(1) if "pid" in line][-1]
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    noticed = wait_for("the death is noticed", lambda: pair.events("trainer.died"))
    assert noticed[0]["mono_s"] - killed_s < 1.0
    last = max(pair.steps(0)[-1], pair.steps(1)[-1])
    pair.wait_for_step(last + 5, starts=2)
    assert pair.nodes[0].restored(0)[1] == pair.nodes[0].restored(1)[1] >= last - 1
    assert [e["data"]["cause"] for e in pair.events("launch.ended")] == ["killed"]

    # 3. A node is lost and comes back: it is not in the launch any more, so the others need not wait to know.
    pair.darken(1)
    last = max(pair.steps(0)[-1], pair.steps(1)[-1])
    pair.start(1)
    pair.wait_for_step(last + 5, starts=3)
    assert pair.nodes[0].restored(0)[2] == pair.nodes[0].restored(1)[2] >= last - 1
    codes = [node.finish() for node in pair.nodes]
    assert codes == [0, 0], "\n".join(node.shown[-3000:] for node in pair.nodes)
    incidents = pair.events("incident")
    assert [e["data"]["outcome"] for e in incidents] == ["recovered", "recovered"]
    assert all(e["data"]["lost_steps"] <= 1 for e in incidents)
    for rank in (0, 1):
        assert sorted(pair.nodes[0].digests(rank)) == list(range(1, STEPS + 1)), "no step is missing, and each came out the same whenever it was made"

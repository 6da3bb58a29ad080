"""Who starts together: a room of nodes that return in any order, on a simulated clock."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from room_of import training

from ridethrough.config import RecoveryConfig
from ridethrough.supervisor import muster
from ridethrough.supervisor.directive import Stage
from ridethrough.supervisor.muster import GATES, Call, Presence, call, launch_environment, missing, spelled

READY = Presence(is_ready=True)
ROUND_S = 0.05
NODES = ("n0", "n1", "n2", "n3")
SHRINK = RecoveryConfig(then="shrink", min_nodes=2)


def shut(*sentences: str) -> Presence:
    return Presence(is_ready=False, missing=sentences)


def decide(recovery: RecoveryConfig, present: Mapping[str, Presence], waited_s: float, *, is_shared: bool = True) -> Call:
    return call(recovery, NODES, present, waited_s=waited_s, has_shared_tier=is_shared)


def simulate(
    recovery: RecoveryConfig,
    present_s: Mapping[str, float],
    ready_s: Mapping[str, float],
    *,
    is_shared: bool = True,
    limit_s: float = 2000.0,
) -> tuple[float, Call, list[Call]]:
    """When the lead decides, what, and every different word it has said before; a node not in `present_s` never comes."""
    said: list[Call] = []
    round_number = 0
    while round_number * ROUND_S < limit_s:
        now_s = round_number * ROUND_S
        present = {
            node: READY if now_s >= ready_s.get(node, at_s) else shut("storage: /data: does not answer")
            for node, at_s in present_s.items()
            if now_s >= at_s
        }
        called = decide(recovery, present, now_s, is_shared=is_shared)
        if called.action != "wait":
            return now_s, called, said
        if not said or said[-1] != called:
            said.append(called)
        round_number += 1
    raise AssertionError("never decided")


def test_nodes_that_return_in_any_order_over_90_seconds_start_exactly_when_the_last_is_ready() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        back_s = {node: rng.uniform(0.0, 90.0) for node in rng.sample(NODES, len(NODES))}
        ready_s = {node: at_s + rng.uniform(0.0, 30.0) for node, at_s in back_s.items()}
        at_s, called, _ = simulate(rng.choice([SHRINK, RecoveryConfig()]), back_s, ready_s)
        assert called == Call(action="go", members=NODES, is_shrunk=False, reason="all 4 nodes are ready"), seed
        last_s = max(ready_s.values())
        assert last_s <= at_s < last_s + 2 * ROUND_S, seed


@pytest.mark.parametrize("lost", NODES)
def test_a_node_that_never_returns_is_waited_for_and_then_the_rest_goes_on(lost: str) -> None:
    back_s = {node: float(number) for number, node in enumerate(NODES) if node != lost}
    at_s, called, said = simulate(SHRINK, back_s, {})
    rest = tuple(node for node in NODES if node != lost)
    assert (called.action, called.members, called.is_shrunk) == ("go", rest, True)
    assert called.reason == f"after 10 min: {lost} is not heard from; going on with {', '.join(rest)}"
    assert 600.0 <= at_s < 600.0 + 2 * ROUND_S
    assert said[-1].reason == f"{lost} is not heard from; waiting up to 10 min"
    assert said[-1].members == rest


def test_a_node_that_never_returns_stops_the_run_where_the_policy_says_stop() -> None:
    at_s, called, _ = simulate(RecoveryConfig(wait_for_nodes_s=120.0), dict.fromkeys(NODES[:3], 0.0), {})
    assert (called.action, called.members) == ("stop", ())
    assert called.reason == 'after 2 min: n3 is not heard from; recovery.then is "stop"'
    assert 120.0 <= at_s < 120.0 + 2 * ROUND_S


def test_storage_that_is_late_on_one_node_is_waited_for_and_named() -> None:
    at_s, called, said = simulate(RecoveryConfig(), dict.fromkeys(NODES, 0.0), {"n2": 60.0})
    assert (called.action, called.is_shrunk, called.members) == ("go", False, NODES)
    assert 60.0 <= at_s < 60.0 + 2 * ROUND_S
    assert [one.reason for one in said] == ["n2 waits (storage: /data: does not answer); waiting up to 10 min"]


def test_what_is_said_while_waiting_changes_only_when_the_room_changes() -> None:
    _, _, said = simulate(SHRINK, {"n0": 0.0, "n1": 10.0, "n2": 20.0}, {})
    assert len(said) == 3


def test_storage_that_stays_down_stops_the_run_with_the_node_and_its_gate() -> None:
    down = dict.fromkeys(NODES, shut("storage: /data: does not answer (for 10 min)"))
    called = decide(SHRINK, down, 600.0)
    assert called.action == "stop"
    assert called.reason.startswith("after 10 min: n0 waits (storage: /data: does not answer (for 10 min)); n1 waits (")
    assert called.reason.endswith("; 0 are ready, recovery.min_nodes is 2")


def test_a_node_whose_storage_is_down_is_left_out_of_a_shrunk_start() -> None:
    present = {"n0": shut("storage: /data: does not answer"), "n1": READY, "n2": READY, "n3": READY}
    called = decide(SHRINK, present, 600.0)
    assert (called.members, called.is_shrunk) == (("n1", "n2", "n3"), True)


def test_the_next_node_hosts_where_the_first_is_dark() -> None:
    called = decide(SHRINK, dict.fromkeys(("n3", "n1"), READY), 600.0)
    found = launch_environment(called.members, node="n3", addresses={n: f"addr-{n}" for n in NODES}, rendezvous_port=29500, generation=0)
    assert found["PET_MASTER_ADDR"] == "addr-n1"


def test_fewer_than_the_least_number_of_nodes_stop() -> None:
    called = decide(SHRINK, {"n2": READY}, 600.0)
    assert called.action == "stop"
    assert called.reason == "after 10 min: n0, n1, n3 are not heard from; 1 are ready, recovery.min_nodes is 2"


def test_nobody_goes_shrunk_without_a_shared_tier() -> None:
    called = decide(SHRINK, dict.fromkeys(NODES[:3], READY), 600.0, is_shared=False)
    assert called.action == "stop"
    assert "shrinking needs a run directory that all nodes share" in called.reason
    assert decide(SHRINK, dict.fromkeys(NODES, READY), 600.0, is_shared=False).action == "go"


def test_two_halves_with_a_shared_tier_may_both_be_called_for_their_claim_on_the_tier_decides() -> None:
    left = decide(SHRINK, dict.fromkeys(NODES[:2], READY), 600.0)
    right = decide(SHRINK, dict.fromkeys(NODES[2:], READY), 600.0)
    assert (left.action, right.action) == ("go", "go")
    assert left.is_shrunk
    assert right.is_shrunk
    assert not set(left.members) & set(right.members)


def test_a_node_that_is_not_configured_counts_for_nothing() -> None:
    assert decide(SHRINK, {**dict.fromkeys(NODES[:3], READY), "stranger": READY}, 1.0).action == "wait"
    assert decide(SHRINK, {"stranger": READY, **dict.fromkeys(NODES, READY)}, 1.0).members == NODES


def test_one_node_alone_goes_at_once_or_waits_for_its_storage() -> None:
    alone = ("n0",)
    assert call(RecoveryConfig(), alone, {"n0": READY}, waited_s=0.0, has_shared_tier=False) == Call(
        action="go", members=alone, is_shrunk=False, reason="the node is ready"
    )
    late = {"n0": shut("storage: /ckpt: not there")}
    assert call(RecoveryConfig(), alone, late, waited_s=599.0, has_shared_tier=False).action == "wait"
    stopped = call(RecoveryConfig(), alone, late, waited_s=600.0, has_shared_tier=False)
    assert (stopped.action, "storage: /ckpt: not there" in stopped.reason) == ("stop", True)


def test_a_thousand_missing_nodes_are_a_sentence_and_not_a_page() -> None:
    order = tuple(f"gpu{number:04d}" for number in range(1024))
    called = call(SHRINK, order, dict.fromkeys(order[:10], shut("network: no way")), waited_s=0.0, has_shared_tier=True)
    assert "gpu0010, gpu0011, gpu0012, gpu0013 and 1010 more are not heard from" in called.reason
    assert called.reason.count("waits (network: no way)") == 4
    assert "6 more wait" in called.reason


@pytest.mark.parametrize("late", [("n0",), ("n2",), ("n0", "n1", "n2", "n3")])
def test_storage_that_died_while_all_trained_is_waited_for_before_they_are_called_again(late: tuple[str, ...]) -> None:
    room = training(for_s=2.0)
    for name in late:
        room.nodes[name].missing = ("storage: /data: does not answer",)
    room.crash("n1")
    room.run_until(lambda: room.word("n0").stage is Stage.CALLING, limit_s=30)
    room.run_for(10.0)
    assert {room.word(n).stage for n in room.names} == {Stage.CALLING}
    assert "storage: /data: does not answer" in room.all_events("muster.waiting")[-1].data["reason"]
    for name in late:
        room.nodes[name].missing = ()
    room.run_until(lambda: room.step > 1 and {room.word(n).generation for n in room.names} == {2}, limit_s=30)


def test_healthy_nodes_are_called_again_within_a_second() -> None:
    room = training(for_s=2.0)
    room.crash("n1")
    room.run_until(lambda: room.word("n0").stage is Stage.CALLING, limit_s=30)
    pause_s = room.word("n0").outcome.pause_s  # type: ignore[union-attr]
    assert room.run_until(lambda: room.word("n0").generation == 2, limit_s=30) <= pause_s + 1.0


def test_a_node_that_is_not_at_its_gates_yet_is_named() -> None:
    called = decide(RecoveryConfig(), {**dict.fromkeys(NODES[:3], READY), "n3": shut()}, 1.0)
    assert called.reason == "n3 waits (not at its gates yet); waiting up to 10 min"


# -- gates -----------------------------------------------------------------------------------------------------------------


def test_gates_are_passed_in_order_and_the_first_one_that_is_shut_is_waited_for() -> None:
    assert missing(set(), GATES) == ("storage", "network", "rendezvous")
    assert missing({"storage"}, GATES) == ("network", "rendezvous")
    assert missing({"storage", "network", "rendezvous"}, GATES) == ()
    assert missing({"network", "rendezvous"}, GATES) == ("storage", "network", "rendezvous"), "behind a shut gate nothing counts"
    other = ("network", "storage", "rendezvous", "workers")
    assert missing({"network"}, other) == ("storage", "rendezvous")


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.0, "0 s"), (1.5, "1.5 s"), (90.0, "90 s"), (120.0, "2 min"), (600.0, "10 min"), (615.0, "10 min 15 s"), (7200.0, "2 h")],
)
def test_durations_are_spelled_for_people(duration_s: float, text: str) -> None:
    assert spelled(duration_s) == text


# -- what the command gets -------------------------------------------------------------------------------------------------

ADDRESSES = {"n0": "10.0.0.1", "n1": "10.0.0.2", "n2": "fd00::3"}


def test_every_member_gets_the_same_rendezvous_and_a_rank_of_its_own() -> None:
    found = [launch_environment(("n0", "n2"), node=node, addresses=ADDRESSES, rendezvous_port=29500, generation=3) for node in ("n0", "n2")]
    assert found[0] == {
        "RIDETHROUGH_MEMBERS": "n0,n2",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29503",
        "PET_RDZV_ENDPOINT": "10.0.0.1:29503",
    }
    assert found[1] == {**found[0], "PET_NODE_RANK": "1"}


def test_eight_launches_in_a_row_have_eight_ports() -> None:
    ports = [
        launch_environment(("n0", "n1"), node="n0", addresses=ADDRESSES, rendezvous_port=29500, generation=g)["PET_MASTER_PORT"] for g in range(9)
    ]
    assert ports == ["29500", "29501", "29502", "29503", "29504", "29505", "29506", "29507", "29500"]


def test_an_ipv6_host_stands_in_brackets() -> None:
    found = launch_environment(("n2",), node="n2", addresses=ADDRESSES, rendezvous_port=29500, generation=0)
    assert (found["PET_RDZV_ENDPOINT"], found["PET_MASTER_ADDR"], found["PET_NNODES"]) == ("[fd00::3]:29500", "[fd00::3]", "1")


def test_the_launcher_of_one_node_is_left_alone() -> None:
    for addresses in ({}, {"n0": "10.0.0.1"}):
        found = launch_environment(("n0",), node="n0", addresses=addresses, rendezvous_port=29500, generation=1)
        assert found == {muster.MEMBERS_VARIABLE: "n0"}


@pytest.mark.parametrize("flag", ["--master-addr=10.0.0.9", "--master_port", "--master-port=1"])
def test_a_command_with_a_master_of_its_own_gets_no_endpoint_that_would_beat_it(flag: str) -> None:
    argv = ("torchrun", flag, "train.py")
    found = launch_environment(("n0", "n1"), node="n0", addresses=ADDRESSES, rendezvous_port=29500, generation=1, argv=argv)
    assert "PET_RDZV_ENDPOINT" not in found
    assert found["PET_NNODES"] == "2"


SCRIPT = """\
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print("SEEN", dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    """A port of which the next seven are probably free too."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return min(int(trial.getsockname()[1]), 65535 - 8)


def hosts() -> list[str]:
    """The loopback addresses that this machine has."""
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return ["127.0.0.1"]
    return ["127.0.0.1", "::1"]


@pytest.mark.torch
@pytest.mark.parametrize("host", hosts())
def test_a_real_torchrun_on_two_nodes_needs_nothing_but_this_environment(host: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    port = free_port()
    agents = []
    for node in ("n0", "n1"):
        found = launch_environment(("n0", "n1"), node=node, addresses={"n0": host, "n1": "unused", "n2": "dark"}, rendezvous_port=port, generation=2)
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", str(script)],
                env={**os.environ, **found, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [agent.communicate(timeout=60) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], ended
    seen = sorted(line for out, _ in ended for line in re.findall(r"SEEN .*", out))
    assert seen == [f"SEEN 0 2 {host} {port + 2}", f"SEEN 1 2 {host} {port + 2}"]


@pytest.mark.torch
def test_torchruns_own_flags_beat_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--node-rank=0",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        str(script),
    ]
    found = launch_environment(
        ("n1", "n0"), node="n0", addresses={"n0": "192.0.2.1", "n1": "192.0.2.2"}, rendezvous_port=port, generation=5, argv=argv
    )
    done = subprocess.run(argv, env={**os.environ, **found, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"SEEN .*", done.stdout) == [f"SEEN 0 1 127.0.0.1 {port}"]

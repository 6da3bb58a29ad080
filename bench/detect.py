"""How long until somebody knows: plain torchrun beside ridethrough, on two virtual nodes.

Plain torchrun waits for its collective timeout (60 s here; 30 min by default) when a node goes silent. We notice a dead
process on its own node, suspect a silent node, and are sure of its death: each measured from the instant of the fault.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures

from ridethrough.drill import command, machine
from ridethrough.drill.cluster import Cluster
from ridethrough.drill.scenario import Cut, Instant, Scenario
from ridethrough.drill.watch import Watch
from ridethrough.errors import DrillFailed

TIMEOUT_S = 60.0
_JOB = Path(__file__).with_name("plain_job.py")


def wait(is_so: Callable[[], Any], what: str, *, within_s: float) -> float:
    """When it was so."""
    end_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end_s:
            raise DrillFailed(detail=f"not within {within_s:.0f} s: {what}")
        time.sleep(0.01)
    return time.monotonic()


def trainers(cluster: Cluster, node: str, program: str) -> list[int]:
    """Processes of the node whose command line names the program."""
    namespace = os.readlink(f"/proc/{cluster.pid(node)}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace and program.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return found


def plain(fault: str) -> dict[str, float]:
    """How long plain torchrun took to see that its peer is gone, and to end."""
    cluster = Cluster(["n0", "n1"])
    with tempfile.TemporaryDirectory(prefix="ridethrough-drill-") as outside:
        try:
            for rank, node in enumerate(cluster.names):
                place = [f"--node-rank={rank}", f"--master-addr={cluster.address('n0')}", "--master-port=29500"]
                argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *place, str(_JOB), outside, str(TIMEOUT_S)]
                with open(os.path.join(outside, f"{node}.log"), "wb") as log:
                    cluster.start(node, argv, environment={**os.environ, "GLOO_SOCKET_IFNAME": cluster.interface, "OMP_NUM_THREADS": "1"}, log=log)
            trace = Path(outside, "rank-0.jsonl")

            def lines() -> list[dict[str, Any]]:
                return [json.loads(line) for line in trace.read_text(encoding="utf-8").split("\n")[:-1]] if trace.exists() else []

            wait(lambda: len(lines()) >= 20, "20 steps of the plain job", within_s=120)
            at_s = time.monotonic()
            if fault == "cut":
                cluster.cut(["n1"])
            else:
                for pid in trainers(cluster, "n1", "plain_job.py")[-1:]:
                    os.kill(pid, signal.SIGKILL)
            wait(lambda: "error" in (lines() or [{}])[-1], "an error of the survivor", within_s=TIMEOUT_S + 60)
            ended_s = wait(lambda: cluster.has_ended("n0") is not None, "the end of the survivor's torchrun", within_s=60)
            return {"error": lines()[-1]["at_s"] - at_s, "ended": ended_s - at_s}
        finally:
            cluster.close()


def ours() -> dict[str, float]:
    """When the other node knew of a killed process, and of a node cut for good."""
    scenario = Scenario(
        name="detect", summary="", cuts=(Cut(kind=Instant.MID_STEP, after_step=0),), nodes=2, ranks_per_node=1, steps=600, pace_s=0.1
    )  # fmt: skip
    cluster = Cluster(scenario.names)
    with tempfile.TemporaryDirectory(prefix="ridethrough-drill-") as outside:
        watch = Watch(Path(outside), scenario.ranks, scenario.names)
        try:
            command.write_config(cluster, scenario, watch.directory)
            for node in scenario.names:
                with watch.log_path(node).open("ab") as log:
                    argv = command.command(cluster, scenario, watch.directory, sabotage=None)
                    cluster.start(node, argv, environment=command.environment(cluster, node), log=log)

            def has(step: int) -> bool:
                watch.look()
                return watch.last_step()[0] >= step

            def seen(since: int, *kinds: str, node: str) -> bool:
                watch.look()
                return any(event.node == node for event in watch.of(*kinds, since=since))

            found: dict[str, float] = {}
            wait(lambda: has(20), f"20 steps: {watch.last_words()}", within_s=120)
            since, at_s = len(watch.events), time.monotonic()
            # The rank itself, not torchrun, whose command line names it as well.
            os.kill(trainers(cluster, "n1", "ridethrough.drill.trainee")[-1], signal.SIGKILL)
            found["died"] = wait(lambda: seen(since, "trainer.died", node="n1"), "the dead process", within_s=30) - at_s
            wait(lambda: watch.of("launch.stepped", since=since) or watch.look(), "the restart", within_s=120)
            step = watch.last_step()[0]
            wait(lambda: has(step + 20), "steps after the restart", within_s=60)
            since, at_s = len(watch.events), time.monotonic()
            cluster.cut(["n1"])
            found["suspected"] = wait(lambda: seen(since, "peer.suspected", node="n0"), "a suspicion", within_s=30) - at_s
            found["convicted"] = wait(lambda: seen(since, "peer.convicted", node="n0"), "a conviction", within_s=60) - at_s
            return found
        finally:
            cluster.close()


def main() -> None:
    why = machine.missing()
    if why is not None:
        raise SystemExit(f"this cuts the power of virtual nodes: {why}")
    rows: list[dict[str, Any]] = []

    def measure(act: Callable[[], dict[str, float]], wanted: dict[str, tuple[str, float | None]]) -> None:
        try:
            found, reason = act(), None
        except DrillFailed as error:
            found, reason = {}, str(error)
        for name, (text, target) in wanted.items():
            value = found.get(name)
            # To a tenth: heartbeats and rounds have a grain of that order.
            met = value is not None and (target is None or round(value, 1) <= target)
            rows.append({"name": text, "value": value, "unit": "s", "target": target, "met": met, **({"reason": reason} if reason else {})})

    timeout = f"plain torchrun, collective timeout {TIMEOUT_S:.0f} s"
    measure(lambda: plain("cut"), {"error": (f"{timeout}: survivor hangs after a silent cut", None), "ended": (f"{timeout}: torchrun ends", None)})
    measure(lambda: plain("kill"), {"error": (f"{timeout}: survivor sees a killed process", None)})
    texts = {
        "died": ("ridethrough: dead process noticed", 1.0),
        "suspected": ("ridethrough: silent node suspected", 2.0),
        "convicted": ("ridethrough: silent node convicted", 15.0),
    }
    measure(ours, texts)
    for row in rows[-1:]:
        row["peer"] = rows[0]["value"]
        row["ratio"] = row["value"] / row["peer"] if row["value"] and row["peer"] else None
    print(f"{'':78}{'seconds':>9}{'target':>8}")
    for row in rows:
        value = "-" if row["value"] is None else f"{row['value']:.2f}"
        print(
            f"{row['name']:78}{value:>9}{row['target'] or '-':>8}{'' if row['met'] else '  missed'}{'  ' + row['reason'] if 'reason' in row else ''}"
        )
    print(f"figures: {figures.write('detect', rows)}")
    raise SystemExit(0 if all(row["met"] for row in rows) else 1)


if __name__ == "__main__":
    main()

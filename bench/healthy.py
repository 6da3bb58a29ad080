"""Whether a healthy job is left alone: what looks like a failure and is none, on two virtual nodes with two networks.

Supervisors talk over one network, collectives use another, as with a management network beside an InfiniBand. Each
disturbance is real: a link that is down, a process that is stopped, a file system that is frozen. Counted are the
launches that were ended and the nodes and ranks that were given up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
from detect import trainers, wait

from ridethrough.drill import command, machine
from ridethrough.drill.cluster import Cluster
from ridethrough.drill.machine import call
from ridethrough.drill.scenario import Cut, Instant, Scenario
from ridethrough.drill.watch import Watch
from ridethrough.errors import DrillFailed

KILLS = ("launch.ended", "peer.convicted", "hang.convicted")
DATA = "data0"
SUPERVISOR = "rt-supervisor"
_AFTER_S = 8.0
"""Whoever wanted to stop the job because of a disturbance has done so by then."""
SCENARIO = Scenario(
    name="healthy",
    summary="",
    cuts=(Cut(kind=Instant.MID_STEP, after_step=0),),
    nodes=2,
    ranks_per_node=1,
    steps=6000,
    save_interval_steps=20,
    pace_s=0.1,
)


def add_data_network(cluster: Cluster) -> None:
    """A cable between the two nodes that carries what the trainers say to each other."""
    # From outside: within the node the other's first process has no number.
    inside = ["nsenter", "--target", str(cluster.pid("n0")), "--net"]
    call(*inside, "ip", "link", "add", DATA, "type", "veth", "peer", "name", DATA, "netns", str(cluster.pid("n1")))
    for number, node in enumerate(cluster.names):
        lines = f"addr add 10.78.0.{10 + number}/24 dev {DATA}\nlink set {DATA} up\n"
        call(*cluster.entered(node, ["ip", "-batch", "-"]), stdin=lines)


@contextlib.contextmanager
def management_network_down(cluster: Cluster) -> Iterator[None]:
    """No supervisor hears the other."""
    cluster.set_links(["n1"], is_up=False)
    try:
        yield
    finally:
        cluster.set_links(["n1"], is_up=True)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """The processes stand still and live."""
    if not pids:
        raise DrillFailed(detail="there is no such process")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def storage_hangs(cluster: Cluster, node: str) -> Iterator[None]:
    """Nothing that the node writes to its disk returns."""
    place = cluster.seen(node, cluster.disk)
    subprocess.run(["fsfreeze", "--freeze", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], check=True)


def helpers(cluster: Cluster, node: str, name: str) -> list[int]:
    """A helper of the node's keeper, by the name of its process."""
    namespace = os.readlink(f"/proc/{cluster.pid(node)}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace and name in (entry / "comm").read_text():
                found.append(int(entry.name))
    return found


def measure() -> list[dict[str, Any]]:
    """One row for each disturbance: kills, and the steps made meanwhile."""
    cluster = Cluster(SCENARIO.names)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ridethrough-drill-") as outside:
        watch = Watch(Path(outside), SCENARIO.ranks, SCENARIO.names)
        try:
            add_data_network(cluster)
            command.write_config(cluster, SCENARIO, watch.directory)
            for node in SCENARIO.names:
                with watch.log_path(node).open("ab") as log:
                    argv = command.command(cluster, SCENARIO, watch.directory, sabotage=None)
                    environment = {**command.environment(cluster, node), "GLOO_SOCKET_IFNAME": DATA}
                    cluster.start(node, argv, environment=environment, log=log)

            def has(step: int) -> bool:
                watch.look()
                return watch.last_step()[0] >= step

            def disturb(name: str, disturbance: Callable[[], contextlib.AbstractContextManager[None]], *, for_s: float, goes_on: bool) -> None:
                since, before = len(watch.events), watch.last_step()[0]
                with disturbance():
                    time.sleep(for_s)
                    watch.look()
                    made = watch.last_step()[0] - before
                if not goes_on:
                    wait(lambda: has(before + made + 10), f"steps after: {name}", within_s=60)
                time.sleep(_AFTER_S)
                watch.look()
                kills = len(watch.of(*KILLS, since=since))
                is_met = kills == 0 and (made > for_s or not goes_on)
                rows.append({"name": f"{name}, {for_s:.0f} s", "value": kills, "unit": "kills", "target": 0, "met": is_met, "steps": made})

            wait(lambda: has(20), f"20 steps: {watch.last_words()}", within_s=120)
            supervisor = helpers(cluster, "n1", SUPERVISOR)
            trainer = trainers(cluster, "n1", "ridethrough.drill.trainee")[-1:]
            disturb("management network down", lambda: management_network_down(cluster), for_s=60.0, goes_on=True)
            disturb("a supervisor stopped", lambda: stopped(supervisor), for_s=20.0, goes_on=True)
            disturb("the lead's supervisor stopped", lambda: stopped(helpers(cluster, "n0", SUPERVISOR)), for_s=20.0, goes_on=True)
            disturb("storage of a node hangs (fsfreeze)", lambda: storage_hangs(cluster, "n1"), for_s=30.0, goes_on=True)
            disturb("a trainer stopped", lambda: stopped(trainer), for_s=20.0, goes_on=False)
            disturb("a trainer that has nothing to train on (stopped)", lambda: stopped(trainer), for_s=30.0, goes_on=False)
            return rows
        finally:
            cluster.close()


def main() -> None:
    """Prints the table; exit 1 if anything was stopped."""
    why = machine.missing()
    if why is not None:
        raise SystemExit(f"this needs virtual nodes: {why}")
    rows = measure()
    print(f"{'':58}{'kills':>6}{'steps meanwhile':>17}")
    for row in rows:
        print(f"{row['name']:58}{row['value']:>6}{row['steps']:>17}{'' if row['met'] else '  missed'}")
    print(f"figures: {figures.write('healthy', rows)}")
    raise SystemExit(0 if all(row["met"] for row in rows) else 1)


if __name__ == "__main__":
    main()

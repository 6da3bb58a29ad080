"""The command that every node is given, its environment and its configuration."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

from ridethrough.drill.scenario import Scenario
from ridethrough.drill.site import Site, free_port

SNAPSHOT_INTERVAL_STEPS = 1
"""The trainee is so small that every step is kept in memory."""
CONFIG = "ridethrough.toml"
_KEY = "key"


def state_dir(site: Site) -> str:
    """Where a node keeps what it knows of its runs: on its own disk."""
    return os.path.join(site.disk, "state")


def run_dir(site: Site) -> str:
    """The run's directory, the same path on every node."""
    return os.path.join(site.shared or site.disk, "run")


def environment(site: Site, node: str) -> dict[str, str]:
    """The command's environment: nothing of ours leaks in from the drill's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RIDETHROUGH_", "TORCHELASTIC", "PET_"))}
    temporary = os.path.join(site.disk, "tmp")
    os.makedirs(site.seen(node, temporary), exist_ok=True)
    return {
        **kept,
        "TMPDIR": temporary,
        "RIDETHROUGH_STATE_DIR": state_dir(site),
        "RIDETHROUGH_NODE": node,
        "GLOO_SOCKET_IFNAME": site.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def write_config(site: Site, scenario: Scenario, directory: Path) -> None:
    """The nodes' ridethrough.toml is in the directory; one node needs none."""
    text = [f"run = {json.dumps(run_dir(site))}", f"storage = {json.dumps(scenario.storage.value)}"]
    for name in scenario.names:
        text += [f"[nodes.{name}]", f"address = {json.dumps(site.address(name))}"]
    peers = {"port": "29577", **scenario.peers}
    if not scenario.has_server:
        # Without a shared directory the nodes cannot find out the same key by themselves.
        peers["key_file"] = str(directory / _KEY)
        (directory / _KEY).touch(mode=0o600)
        (directory / _KEY).write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    for table, settings in (("peers", peers), ("recovery", scenario.recovery)):
        text.append(f"[{table}]")
        # A number is written as one; everything else is a string.
        text += [f"{name} = {value if value.isdigit() else json.dumps(value)}" for name, value in settings.items()]
    (directory / CONFIG).write_text("\n".join(text) + "\n", encoding="utf-8")


def command(site: Site, scenario: Scenario, directory: Path, *, sabotage: str | None) -> list[str]:
    """The same on every node and at every start: what an init system would give again after a power cut."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={scenario.ranks_per_node}"]
    options: list[str] = []
    if scenario.nodes == 1:
        launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    else:
        options = ["--config", str(directory / CONFIG), "--run", run_dir(site)]
    trainee = ["-m", "ridethrough.drill.trainee", "--checkpoints", run_dir(site), "--trace", str(directory)]
    numbers = ["--steps", str(scenario.steps), "--every", str(scenario.save_interval_steps), "--pace-s", str(scenario.pace_s)]
    if scenario.shrinks:
        numbers += ["--full-world", str(scenario.ranks)]
    if sabotage:
        numbers += ["--sabotage", sabotage]
    return [sys.executable, "-m", "ridethrough", "run", *options, "--", *launcher, *trainee, *numbers]

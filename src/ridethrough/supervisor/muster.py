"""Who starts together, and who hosts the rendezvous. Pure.

Words: the *muster* is the time in which the nodes of a run gather before a launch. A node is *present* while it is
heard from, *ready* when all its gates are open. The lead calls; every node that is a member launches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ridethrough.config import RecoveryConfig
from ridethrough.config_rules import GATES, PORTS_COUNT

__all__ = ["GATES", "MEMBERS_VARIABLE", "Call", "Presence", "call", "launch_environment", "missing", "spelled"]

MEMBERS_VARIABLE = "RIDETHROUGH_MEMBERS"
_NAMED = 4
"""More sentences than that nobody reads; the count of the rest is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """How far a node that is heard from has come."""

    is_ready: bool
    missing: tuple[str, ...] = ()
    """What it still waits for, as sentences that begin with the gate: `storage: /data does not answer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What follows for every node."""

    action: Literal["wait", "go", "stop"]
    members: tuple[str, ...]
    """Who launches, the host of the rendezvous first; while waiting, who is ready. In the order of the configuration."""
    is_shrunk: bool
    reason: str


def call(recovery: RecoveryConfig, order: Sequence[str], present: Mapping[str, Presence], *, waited_s: float, has_shared_tier: bool) -> Call:
    """What the nodes do now: wait, go, or stop for a person.

    Two halves that do not see each other may both be told to go without the other. That is decided by the create-only
    claim of the next attempt on the shared tier, and not here; so without a shared tier nobody goes shrunk.

    Args:
        recovery: The site's policy.
        order: Every node that may take part; the first that can hosts the rendezvous.
        present: Every node that is heard from, this one included.
        waited_s: Time since this muster began.
        has_shared_tier: Every node sees the same run directory, and that has been proven or declared.
    """
    ready = tuple(node for node in order if node in present and present[node].is_ready)
    if len(ready) == len(order):
        return _go(ready, is_shrunk=False, reason=f"all {len(order)} nodes are ready" if len(order) > 1 else "the node is ready")
    absent = _absent(order, present)
    if waited_s < recovery.wait_for_nodes_s:
        # No countdown in the reason: it goes on record when it changes.
        return Call(action="wait", members=ready, is_shrunk=False, reason=f"{absent}; waiting up to {spelled(recovery.wait_for_nodes_s)}")
    waited = f"after {spelled(recovery.wait_for_nodes_s)}: {absent}"
    if recovery.then != "shrink":
        return _stop(f'{waited}; recovery.then is "stop"')
    if not has_shared_tier:
        return _stop(f"{waited}; shrinking needs a run directory that all nodes share: two halves could both go on")
    least = max(recovery.min_nodes, 1)
    if len(ready) < least:
        return _stop(f"{waited}; {len(ready)} are ready, recovery.min_nodes is {least}")
    return _go(ready, is_shrunk=True, reason=f"{waited}; going on with {', '.join(ready)}")


def _go(members: tuple[str, ...], *, is_shrunk: bool, reason: str) -> Call:
    return Call(action="go", members=members, is_shrunk=is_shrunk, reason=reason)


def _stop(reason: str) -> Call:
    return Call(action="stop", members=(), is_shrunk=False, reason=reason)


def _absent(order: Sequence[str], present: Mapping[str, Presence]) -> str:
    """Who is missing, and at which gate who is there waits."""
    said = []
    silent = [node for node in order if node not in present]
    if silent:
        more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
        said.append(f"{', '.join(silent[:_NAMED])}{more} {'is' if len(silent) == 1 else 'are'} not heard from")
    waiting = [node for node in order if node in present and not present[node].is_ready]
    said += [f"{node} waits ({', '.join(present[node].missing) or 'not at its gates yet'})" for node in waiting[:_NAMED]]
    if len(waiting) > _NAMED:
        said.append(f"{len(waiting) - _NAMED} more wait")
    return "; ".join(said)


def spelled(duration_s: float) -> str:
    """A duration for people: 1.5 s, 90 s, 10 min, 2 h, 10 min 15 s."""
    if duration_s < 120:
        return f"{duration_s:g} s"
    hours, rest_s = divmod(duration_s, 3600)
    minutes, seconds = divmod(rest_s, 60)
    parts = ((hours, "h"), (minutes, "min"), (seconds, "s"))
    return " ".join(f"{number:g} {unit}" for number, unit in parts if number)


def missing(gates_passed: Collection[str], start_order: Sequence[str]) -> tuple[str, ...]:
    """The gates that are still to be passed, the one that is waited for first; `workers`, the start itself, is not one of them.

    A gate counts only when those before it have been passed: a network file system may answer from a cache before there
    is a network.
    """
    gates = [gate for gate in start_order if gate != "workers"]
    for number, gate in enumerate(gates):
        if gate not in gates_passed:
            return tuple(gates[number:])
    return ()


def launch_environment(
    members: Sequence[str], *, node: str, addresses: Mapping[str, str], rendezvous_port: int, generation: int, argv: Sequence[str] = ()
) -> dict[str, str]:
    """What a member's command finds in its environment; torchrun's own flags beat the `PET_` variables.

    Args:
        members: Who was called; the first one hosts.
        node: One of them.
        addresses: Of every configured node. With at most one the launcher is left alone: torchrun then takes a free
            port, and two jobs on one machine do not meet on a fixed one.
        rendezvous_port: First of eight ports.
        generation: Counts the launches of the run, the same on all nodes. A port that a dying predecessor still holds
            must not stop its successor, so each launch takes the next.
        argv: The command. torchrun prefers an endpoint, wherever it comes from, to `--master-addr` and `--master-port`;
            a command that has one of these gets no endpoint from us.

    Source: `torch.distributed.run` (torch 2.13): every option has its default from `PET_<OPTION>`; static rendezvous needs
    endpoint, node rank and number of nodes.
    """
    environment = {MEMBERS_VARIABLE: ",".join(members)}
    if len(addresses) < 2:
        return environment
    host = addresses[members[0]]
    host = f"[{host}]" if ":" in host else host  # torchrun tells an IPv6 address from a port by the brackets
    port = rendezvous_port + generation % PORTS_COUNT
    environment |= {
        "PET_NNODES": str(len(members)),
        "PET_NODE_RANK": str(members.index(node)),
        "PET_MASTER_ADDR": host,
        "PET_MASTER_PORT": str(port),
    }
    if not any(word.replace("_", "-").startswith(("--master-addr", "--master-port")) for word in argv):
        environment["PET_RDZV_ENDPOINT"] = f"{host}:{port}"
    return environment

"""What the nodes of a job need to know of each other: addresses and ports, power domains, the key."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridethrough.config import Config
from ridethrough.errors import KeeperGone, UsageError
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.seam.udp import interface_address, reachable_address
from ridethrough.snapshot import link as names
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.link import KeeperLink
from ridethrough.store.key import keep_key, kept_key, new_key, read_key
from ridethrough.train.group import Group

_PORTS_S = 10.0
"""Supervisor and courier start with the keeper; a loaded machine may need seconds for it."""
_POLL_S = 0.02
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """All nodes, as each of them is told."""

    addresses: dict[str, list[Any]]
    """By node: address, UDP port of its supervisor, TCP port of its courier. Empty for one node."""
    domains: dict[str, str]
    """By node: what loses power together with it."""


def config_of(link: KeeperLink) -> Config:
    """The configuration of this node, as its keeper was given it."""
    facts = link.hello.get("config")
    return Config.from_facts(facts) if facts else Config()


def introduce(group: Group, clock: Clock, link: KeeperLink, config: Config) -> Neighbours:
    """Every node knows where each other one listens.

    Raises:
        UsageError: A node has no address that the others could use.
        KeeperGone: A supervisor or courier has not said where it listens.
    """
    domains = group.each_node(lambda: config.domains.get(group.node, group.node))
    if len(group.node_order) == 1:
        return Neighbours(addresses={}, domains=domains)
    first = group.each_node(lambda: own_address(config, group.node, os.environ.get("MASTER_ADDR", _LOOPBACK)))
    # The node that hosts the rendezvous may know it as "localhost": the route to another node tells more.
    other = next((address for address in first.values() if not is_loopback(address)), None)
    second = group.each_node(lambda: reachable_address(other) if other is not None and is_loopback(first[group.node]) else first[group.node])
    ports = group.each_node(lambda: own_ports(clock, link, group.node))
    return Neighbours(addresses={node: [second[node], *ports[node]] for node in group.node_order}, domains=domains)


def own_address(config: Config, node: str, towards: str) -> str:
    """Where the others reach this node: as configured, else the source of the route to `towards`."""
    configured = config.addresses.get(node)
    if configured is not None and (configured != node or config.peers.interface is None):
        return configured
    if config.peers.interface is not None:
        return interface_address(config.peers.interface)
    return reachable_address(towards)


def is_loopback(address: str) -> bool:
    """An address that means every node itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def own_ports(clock: Clock, link: KeeperLink, node: str) -> tuple[int, int]:
    """The ports of this node's supervisor and courier.

    Raises:
        KeeperGone: One of them has not said its port: without it this node would be taken for dead.
    """
    link.request("peers")
    boards = {names.CONTROL: "peer_port", names.COURIER: "port"}
    opened = {name: link.board(name) for name in boards}
    deadline_s = clock.monotonic_s() + _PORTS_S
    try:
        while True:
            found = {name: _port(board, boards[name]) for name, board in opened.items()}
            if all(found.values()):
                return found[names.CONTROL], found[names.COURIER]
            if clock.monotonic_s() > deadline_s:
                silent = ", ".join({names.CONTROL: "supervisor", names.COURIER: "courier"}[name] for name, port in found.items() if not port)
                raise KeeperGone(detail=f"{silent} of node {node} has told no port within {_PORTS_S:.0f} s")
            clock.sleep(_POLL_S)
    finally:
        for board in opened.values():
            board.close()


def _port(board: Board, name: str) -> int:
    return int(board.read().get(name) or 0)


def agree_on_key(group: Group, fs: FileSystem, run_dir: str, config: Config, *, tier_nodes: tuple[str, ...]) -> str:
    """Every node has the same key, and every tier keeps it if it is not the user's own; empty for one node.

    It goes once through the job's own collectives, which are as open as what is trained.

    Raises:
        UsageError: A key file is open to other users or holds no key, or the nodes were given different ones.
    """
    if len(group.node_order) == 1:
        return ""
    given = group.each_node(lambda: _given_key(fs, config))
    kept = group.each_node(lambda: None if any(given.values()) else kept_key(fs, run_dir), nodes=tier_nodes)
    key = group.first_decides(lambda: one_key(given, kept) or new_key())
    if not any(given.values()):
        group.each_node(lambda: keep_key(fs, run_dir, key), nodes=tier_nodes)
    return key


def _given_key(fs: FileSystem, config: Config) -> str | None:
    path = config.peers.key_file or os.environ.get("RIDETHROUGH_KEY_FILE")
    if not path:
        return None
    try:
        return read_key(fs, path)
    except FileNotFoundError:
        raise UsageError(detail=f"there is no key file {path}: openssl rand -hex 32, and the same file on every node") from None


def one_key(given: Mapping[str, str | None], kept: Mapping[str, str | None]) -> str | None:
    """The key that the nodes have; None if there is none yet.

    Raises:
        UsageError: They were given different ones, or only some were given one.
    """
    if any(given.values()):
        first = next(iter(given.values()))
        others = [node for node, key in given.items() if key != first]
        if others:
            raise UsageError(detail=f"{', '.join(others[:8])}: not the key file of {next(iter(given))}; every node needs the same one")
        return first
    return next((key for key in kept.values() if key), None)

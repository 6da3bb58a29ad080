"""What the keys of a configuration must be together: pure rules over frozen values."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ridethrough.errors import UsageError

if TYPE_CHECKING:
    from ridethrough.config import Config

GATES = ("storage", "network", "rendezvous", "workers")
"""What must be there before a node trains, in the default order."""
PORTS_COUNT = 8
"""Ports from `rendezvous_port` on that launches use in turn."""
_NODE = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
"""What `seam.process.node_name` makes of a host name."""
_RATES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_HOST = re.compile(r"[\w.-]+")


def bandwidth_bytes_per_s(text: str) -> float | None:
    """Of `500kB/s`, `50MB/s` or `1GB/s`, in the file and on the command line; None if it is none of these, or nothing."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)B/s", text)
    return (float(found.group(1)) * _RATES[found.group(2)] or None) if found else None


def check(config: Config, where: Callable[[str], str]) -> None:
    """What is right key by key also fits together.

    Args:
        config: Everything that was decided.
        where: The file or variable that a key stands in.

    Raises:
        UsageError: It does not; names the key and what to write.
    """

    def refuse(key: str, text: str, hint: str) -> NoReturn:
        raise UsageError(detail=f"{where(key)}: {key}: {text}", hint=hint)

    _check_nodes(config, refuse)
    _check_tiers(config, refuse)
    if len(config.nodes) > 1 and config.run is None:
        refuse(
            "run",
            "several nodes find each other by the run directory, so it must be known before the script names it",
            'write run = "/path", or give --run',
        )
    peers, recovery = config.peers, config.recovery
    if not 0 < peers.suspect_s < peers.dead_s:
        key = "peers.dead" if "peers.dead" in config.origins else "peers.suspect"
        refuse(
            key,
            f"a node is suspected after {peers.suspect_s:g} s of silence and given up after {peers.dead_s:g} s",
            "write a suspect above 0 and a longer dead",
        )
    wanted = sorted(GATES)
    order = recovery.start_order
    if sorted(order) != wanted or order[-1] != "workers" or order.index("network") > order.index("rendezvous"):
        refuse(
            "recovery.start_order",
            "each of the four gates once, workers last, rendezvous after network",
            f"write start_order = [{', '.join(f'{chr(34)}{gate}{chr(34)}' for gate in GATES)}]",
        )
    if recovery.min_nodes > max(len(config.nodes), 1):
        refuse(
            "recovery.min_nodes",
            f"{recovery.min_nodes} are more than the {len(config.nodes) or 1} that may take part",
            f"write min_nodes = {len(config.nodes) or 1} or less, or add [nodes.NAME]",
        )
    if recovery.then == "shrink" and config.storage == "node-local":
        refuse(
            "recovery.then",
            'with storage = "node-local" two halves that do not see each other could both go on',
            'write then = "stop"; or storage = "shared" if every node does see the same run directory',
        )
    if peers.port and recovery.rendezvous_port <= peers.port < recovery.rendezvous_port + PORTS_COUNT:
        refuse(
            "peers.port",
            f"{peers.port} is one of torchrun's ports, {recovery.rendezvous_port} to {recovery.rendezvous_port + PORTS_COUNT - 1}",
            f"write port = {recovery.rendezvous_port + PORTS_COUNT} or another port",
        )


def _check_nodes(config: Config, refuse: Callable[[str, str, str], NoReturn]) -> None:
    seen: dict[str, str] = {}
    for node in config.nodes:
        key = f"nodes.{node.name}"
        if not _NODE.fullmatch(node.name):
            usable = re.sub(r"[^a-z0-9.-]", "-", node.name.lower()).strip(".-")[:63] or "node"
            table = f'"{usable}"' if "." in usable else usable
            refuse(key, f"{node.name!r} is no name of a node: small letters, digits, dots and dashes", f"write [nodes.{table}]")
        address = _normal_address(node.address)
        if address is None:
            refuse(
                f"{key}.address",
                f"{node.address!r} is neither an address nor a host name (ports are set by peers.port; addresses with a zone do not reach all nodes)",
                'write address = "10.0.0.1", "fd00::1" or "host.name"',
            )
        if address in seen:
            refuse(f"{key}.address", f"{node.address} is the address of {seen[address]} too", f"give {node.name} or {seen[address]} another address")
        seen[address] = node.name


def _check_tiers(config: Config, refuse: Callable[[str, str, str], NoReturn]) -> None:
    seen: dict[str, str] = {}
    for tier in config.tiers:
        if not _NODE.fullmatch(tier.name):
            refuse(f"tiers.{tier.name}", f"{tier.name!r} is no name of a tier: small letters, digits, dots and dashes", "write [tiers.mirror]")
        place = tier.place.rstrip("/")
        if place in seen:
            refuse(f"tiers.{tier.name}.place", f"{tier.place} is the place of {seen[place]} too", "one copy is enough in one place")
        seen[place] = tier.name
        if config.run is not None and place == config.run.rstrip("/"):
            refuse(f"tiers.{tier.name}.place", f"{tier.place} is the run directory itself", "name another place")
    if config.tiers and config.run is None:
        refuse("run", "a tier holds copies of one run, so it must be known which", 'write run = "/path", or give --run')
    domains = {*config.domains.values(), *(tier.domain for tier in config.tiers)}
    if config.tiers and config.nodes and len(domains) < 2:
        refuse(
            f"tiers.{config.tiers[0].name}.domain",
            f"every node and every copy is in {config.tiers[0].domain}: one cut takes all of them",
            "copy to a place in another power domain, and write its domain",
        )


def _normal_address(text: str) -> str | None:
    """The same text for the same address; None if it is neither an address nor a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text.lower().rstrip(".") if _HOST.fullmatch(text) and not re.fullmatch(r"[\d.]+", text) else None
    return None if getattr(address, "scope_id", None) else str(address)


def listed(names: tuple[str, ...], at_most: int = 8) -> str:
    """Names for people; of a thousand nobody reads more than a few."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more

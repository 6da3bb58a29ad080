"""Which node holds and writes which part. Pure.

A part that several ranks hold identically survives on every other holder's node. A private part (random
generators, loader position, buffers) exists once, so its node sends it to two others at every snapshot: to
other power domains first, since nodes of one domain go dark together.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.format.layout import rank_part

REPLICAS = 2
REPLICA_LIMIT_BYTES = 256 << 10
"""Larger private parts survive only on tiers: sending them at every snapshot would compete with training."""
_SHARE_LIMIT = 8
"""Nodes of a large domain that one node elsewhere may be first holder of; beyond it neighbours have to do."""


def distinct_nodes(roster: Roster) -> tuple[str, ...]:
    """Every node once, in the order of its first rank."""
    return tuple(dict.fromkeys(roster.nodes))


def is_private(part: RosterPart) -> bool:
    """The part is one rank's own, of the kind that is sent to other nodes."""
    return len(part.holders) == 1 and part.name == rank_part(part.holders[0])


def all_replicas(nodes: Sequence[str], domains: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """By node the nodes that hold its private parts: up to two others, of other domains first."""
    return _replicas(tuple(nodes), tuple(domains.get(node, node) for node in nodes))


@functools.lru_cache(maxsize=4)
def _replicas(nodes: tuple[str, ...], domains: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The holders of every node.

    All nodes stand in a circle, domain by domain, and everybody's holders stand as many places further on as the
    largest domain is wide, and twice as many. So they are in two other domains as long as no domain has more than
    a third of the nodes, and everybody holds the parts of as many nodes as hold its own. (The next node of another
    domain would be simpler; but then a whole rack would send everything to the first node of the next rack.)
    """
    domain_of = dict(zip(nodes, domains, strict=True))
    groups: dict[str, list[str]] = {}
    for node, domain in domain_of.items():
        groups.setdefault(domain, []).append(node)
    circle = [node for group in groups.values() for node in group]
    widest = max(len(group) for group in groups.values())
    found = {}
    end = 0
    for group in groups.values():
        end += len(group)
        elsewhere = circle[end:] + circle[: end - len(group)]
        for at, node in enumerate(group):
            chosen: list[str] = []
            if at < _SHARE_LIMIT * len(elsewhere):
                first = elsewhere[(at + widest - len(group)) % len(elsewhere)]
                chosen = [first, _second(first, at, at + 2 * widest - len(group), elsewhere, domain_of, len(group))]
            chosen += [group[(at + places) % len(group)] for places in range(1, min(REPLICAS + 1, len(group)))]
            found[node] = tuple(dict.fromkeys(chosen))[:REPLICAS]
    return found


def _second(first: str, at: int, place: int, elsewhere: Sequence[str], domain_of: Mapping[str, str], width: int) -> str:
    """Another holder outside the domain; in a third one if that has nodes enough. `first` again if there is no other."""
    second = elsewhere[place % len(elsewhere)]
    if domain_of[second] != domain_of[first]:
        return second
    third = [node for node in elsewhere if domain_of[node] != domain_of[first]]
    if third and width <= 2 * len(third):
        return third[at % len(third)]
    return second if second != first else elsewhere[(place + 1) % len(elsewhere)]


def is_covered(roster: Roster, dark: Collection[str], replicas: Mapping[str, tuple[str, ...]]) -> bool:
    """Some living node is to write every part; what it is to write it may still not have.

    Args:
        roster: Of the attempt.
        dark: Nodes that write nothing.
        replicas: As `all_replicas` says.
    """
    for part in roster.parts:
        if all(roster.nodes[rank] in dark for rank in part.holders):
            owner = roster.nodes[part.holders[0]]
            if not is_private(part) or all(holder in dark for holder in replicas[owner]):
                return False
    return True


def parts_to_write(roster: Roster, node: str, *, dark: frozenset[str], is_shared: bool, domains: Mapping[str, str]) -> tuple[str, ...]:
    """The parts that `node` is to write of a save, given the nodes that are dark; never of a node that is dark itself.

    On a shared tier each part is written once, by its first living holder. On node-local tiers every node
    writes what it holds; it also writes the private parts that it holds for others, whose disk may never come back.
    """
    if node in dark:
        return ()
    replicas = all_replicas(distinct_nodes(roster), domains)
    found = []
    for part in roster.parts:
        holders = list(dict.fromkeys(roster.nodes[rank] for rank in part.holders))
        if is_private(part):
            holders += replicas[holders[0]]
        living = [holder for holder in holders if holder not in dark]
        if node in living and (not is_shared or node == living[0]):
            found.append(part.name)
    return tuple(found)

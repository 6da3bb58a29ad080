"""The plan of a launch: what the start agreement decided, told once to the persister and the supervisor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ridethrough.format.attempt import Roster
from ridethrough.format.seal import decode_parent, encode_parent
from ridethrough.snapshot import placement
from ridethrough.store.retain import Retention
from ridethrough.types import AttemptRef, Parent


@dataclass(frozen=True, kw_only=True)
class Plan:
    """As it stands on the plan board. What follows from it is found once: of thousands of ranks that takes milliseconds."""

    run_dir: str
    run_uid: str
    attempt: AttemptRef
    parent: Parent | None
    resumed_dir: str | None
    roster: Roster
    node: str
    meta: dict[str, Any]
    """The part of `meta.json` that does not change from save to save."""
    retention: Retention
    monitor: str | None
    save_interval_steps: int
    snapshot_interval_steps: int
    restored_step: int
    damaged: tuple[dict[str, str], ...]
    """Copies that failed their checksums while the agreement looked for one to restore."""
    is_shared: bool = True
    """Every node sees the same run directory; otherwise each has a tier of its own and the union counts."""
    addresses: dict[str, list[Any]] = field(default_factory=dict)
    """Of every node: address, UDP port of its supervisor, TCP port of its courier. Empty for one node."""
    key: str = ""
    """Secret of the run in hex, for what nodes say to each other."""
    domains: dict[str, str] = field(default_factory=dict)
    """Power domain of each node."""
    differs: dict[str, Any] = field(default_factory=dict)
    """What is different from what made the checkpoint resumed from, on the first node only; empty if nothing is."""

    def as_board(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "run_dir": self.run_dir,
            "run_uid": self.run_uid,
            "attempt": {"seq": self.attempt.seq, "nonce": self.attempt.nonce},
            "parent": encode_parent(self.parent),
            "resumed_dir": self.resumed_dir,
            "roster": self.roster.fields(),
            "node": self.node,
            "meta": self.meta,
            "retention": {"keep_last": self.retention.keep_last, "keep_top": self.retention.keep_top, "mode": self.retention.mode},
            "monitor": self.monitor,
            "save_interval_steps": self.save_interval_steps,
            "snapshot_interval_steps": self.snapshot_interval_steps,
            "restored_step": self.restored_step,
            "damaged": list(self.damaged),
            "is_shared": self.is_shared,
            "addresses": self.addresses,
            "key": self.key,
            "domains": self.domains,
            "differs": self.differs,
        }

    @staticmethod
    def from_board(value: dict[str, Any]) -> Plan:
        """From JSON."""
        return Plan(
            **{
                **value,
                "attempt": AttemptRef(seq=value["attempt"]["seq"], nonce=value["attempt"]["nonce"]),
                "parent": decode_parent(value["parent"], path="plan"),
                "roster": Roster.from_fields(value["roster"], path="plan"),
                "retention": Retention(**value["retention"]),
                "damaged": tuple(value["damaged"]),
            }
        )

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on this node."""
        return tuple(rank for rank, node in enumerate(self.roster.nodes) if node == self.node)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Every node once, in the order of its first rank: the order in which they lead."""
        return placement.distinct_nodes(self.roster)

    @cached_property
    def _replicas(self) -> dict[str, tuple[str, ...]]:
        return placement.all_replicas(self.nodes, self.domains)

    def replica_nodes(self, node: str) -> tuple[str, ...]:
        """The nodes that hold the private parts of `node`."""
        return self._replicas[node]

    @cached_property
    def _coverage(self) -> dict[frozenset[str], bool]:
        return {}

    def is_covered(self, dark: Collection[str]) -> bool:
        """Every part has a node to write it while those nodes are dark."""
        if not dark:
            return True
        asked = frozenset(dark)
        if asked not in self._coverage:
            # The lead asks each round, mostly about one set.
            self._coverage.clear()
            self._coverage[asked] = placement.is_covered(self.roster, asked, self._replicas)
        return self._coverage[asked]

    def parts_to_write(self, dark: frozenset[str]) -> tuple[str, ...]:
        """Parts that are this node's to write while those nodes are dark."""
        return placement.parts_to_write(self.roster, self.node, dark=dark, is_shared=self.is_shared, domains=self.domains)


def first_save(restored_step: int, interval_steps: int) -> int:
    """The first step after a start that is to become durable, before anything was announced."""
    return (restored_step // interval_steps + 1) * interval_steps

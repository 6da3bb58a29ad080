"""What is cut, and when. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ridethrough.errors import UsageError

SERVER = "server"
"""Name of the file server among the nodes of a scenario."""


class Instant(StrEnum):
    """When something happens, relative to what the job does."""

    MID_STEP = "mid-step"
    MID_SAVE = "mid-save"
    AGAIN = "before-first-save"
    """Again, after a resume and before anything new was durable."""
    RECOVERING = "recovering"
    """While the nodes recover from what happened before: the next start has been decided and no step made."""


class Fault(StrEnum):
    """What happens to the nodes."""

    POWER = "power"
    CABLE = "cable"
    """Their cables are out; they go on."""
    PARTED = "parted"
    """They do not hear the other nodes any more, nor are heard; all still reach the file server."""


class Storage(StrEnum):
    """Where checkpoints go."""

    LOCAL = "node-local"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One fault: at the first instant of its kind at or after a step."""

    kind: Instant
    after_step: int
    """For AGAIN: steps after the resume. Not used for RECOVERING."""
    nodes: tuple[str, ...] = ("n0",)
    back_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds after which a node has its power or link back; at once if not given."""
    never: frozenset[str] = frozenset()
    """Nodes that do not come back."""
    fault: Fault = Fault.POWER

    @property
    def is_felt(self) -> bool:
        """The job must start again; otherwise it must go on without a restart."""
        return self.fault is not Fault.CABLE and any(node != SERVER for node in self.nodes)

    def back_after_s(self, node: str) -> float:
        """When the node is back, counted from the fault."""
        return float(self.back_s.get(node, 0.0))

    def describe(self) -> str:
        """The nodes, and what they have lost if it is not their power."""
        return "+".join(self.nodes) + ("" if self.fault is Fault.POWER else f" {self.fault.value}")

    def describe_return(self) -> str:
        """The order in which the nodes come back, with the seconds."""
        back = sorted((node for node in self.nodes if node not in self.never), key=self.back_after_s)
        return " ".join([*(f"{node} {self.back_after_s(node):g}" for node in back), *(f"{node} never" for node in sorted(self.never))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A list of faults for one run of the trainee."""

    name: str
    summary: str
    cuts: tuple[Cut, ...]
    nodes: int = 1
    ranks_per_node: int = 2
    storage: Storage = Storage.LOCAL
    steps: int = 120
    """A multiple of the trainee's epochs (3)."""
    save_interval_steps: int = 10
    pace_s: float = 0.05
    peers: Mapping[str, str] = field(default_factory=dict)
    """Settings of [peers] in ridethrough.toml."""
    recovery: Mapping[str, str] = field(default_factory=dict)
    """Settings of [recovery]."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes, in start order."""
        return tuple(f"n{number}" for number in range(self.nodes))

    @property
    def ranks(self) -> int:
        """World size while all nodes are there."""
        return self.nodes * self.ranks_per_node

    @property
    def has_server(self) -> bool:
        """The nodes share a file server."""
        return self.storage is Storage.SHARED

    @property
    def shrinks(self) -> bool:
        """The run goes on without nodes that never come back."""
        return any(cut.never for cut in self.cuts)

    @property
    def course(self) -> tuple[int, int, int, float]:
        """What the uninterrupted run depends on: equal courses have equal reference traces."""
        return self.ranks, self.steps, self.save_interval_steps, self.pace_s


def _several(name: str, summary: str, nodes: int, *cuts: Cut, **settings: object) -> Scenario:
    made = Scenario(name=name, summary=summary, cuts=cuts, nodes=nodes, ranks_per_node=1, pace_s=0.1)
    return dataclasses.replace(made, **settings)  # type: ignore[arg-type]


_STEP = Cut(kind=Instant.MID_STEP, after_step=23)
_SAVE = Cut(kind=Instant.MID_SAVE, after_step=45)
_LATER = Cut(kind=Instant.MID_STEP, after_step=77)
_AGAIN = Cut(kind=Instant.AGAIN, after_step=3)

_ONE = (
    Scenario(
        name="power-cut",
        summary="in mid-step, in mid-save, and twice in a row (again before the first save after a resume)",
        cuts=(_STEP, _SAVE, _LATER, _AGAIN),
    ),
    Scenario(name="mid-step", summary="once, in the middle of a step", cuts=(_STEP,)),
    Scenario(name="mid-save", summary="once, in the middle of a save", cuts=(_SAVE,)),
    Scenario(name="twice", summary="in mid-step, and again before the first save after the resume", cuts=(_STEP, _AGAIN)),
)


def _cut(after_step: int, *nodes: str, kind: Instant = Instant.MID_STEP, fault: Fault = Fault.POWER, never: str = "", **back_s: float) -> Cut:
    gone = frozenset([never] if never else [])
    return Cut(kind=kind, after_step=after_step, nodes=nodes, fault=fault, never=gone, back_s=back_s)


_SHORT = {"dead": "5s"}
"""Drills of what follows a conviction need not wait 15 s for it."""

_SEVERAL = (
    _several("two-nodes", "one of two nodes, then both", 2, _cut(23, "n1", n1=3), _cut(55, "n0", "n1", n1=1)),
    _several("node", "one of three nodes", 3, _cut(23, "n1", n1=3), steps=60),
    _several("rendezvous", "the first of three nodes, which leads and hosts the rendezvous", 3, _cut(23, "n0", n0=3), steps=60),
    _several("room", "all of three nodes, which return one after the other", 3, _cut(27, "n0", "n1", "n2", n0=4, n1=7), steps=60),
    _several(
        "one-never",
        "one of three nodes, which never returns: the others go on without it",
        3,
        _cut(23, "n2", never="n2"),
        storage=Storage.SHARED,
        steps=60,
        peers=_SHORT,
        recovery={"wait_for_nodes": "8s", "then": "shrink", "min_nodes": "2"},
    ),
    _several(
        "storage-late",
        "both nodes and their file server, which returns later",
        2,
        _cut(27, "n0", "n1", SERVER, server=12),
        storage=Storage.SHARED,
        steps=60,
    ),
    _several(
        "storage-down",
        "the file server while the job trains on, then both nodes",
        2,
        _cut(15, SERVER, server=10),
        _cut(80, "n0", "n1"),
        storage=Storage.SHARED,
        steps=201,
    ),
    _several(
        "partition",
        "two nodes that still reach their file server do not hear each other",
        2,
        _cut(23, "n1", fault=Fault.PARTED, n1=12),
        storage=Storage.SHARED,
        steps=60,
        peers=_SHORT,
    ),
    _several("blip", "the cable of one of two nodes, out for 10 s", 2, _cut(23, "n1", fault=Fault.CABLE, n1=10), steps=60),
    _several(
        "survivors",
        "one of three nodes, and the other two while they recover from that",
        3,
        _cut(23, "n2", n2=2),
        _cut(0, "n0", "n1", kind=Instant.RECOVERING, n0=3, n1=1),
        steps=60,
    ),
    _several(
        "sag",
        "two of four nodes, 40 steps after the last save",
        4,
        _cut(540, "n1", "n3", n1=1, n3=1),
        steps=600,
        save_interval_steps=500,
        pace_s=0.03,
    ),
)

SCENARIOS = {s.name: s for s in (*_ONE, *_SEVERAL)}


def find(name: str) -> Scenario:
    """The scenario of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in SCENARIOS:
        raise UsageError(detail=f"there is no drill {name!r}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


MATRIX_STEPS = 120
_MATRIX_CUTS = 5
_PATTERNS = (("n0",), ("n1",), ("n2",), ("n0", "n2"), ("n1", "n2"), ("n0", "n1", "n2"))


def matrix(seed: int, runs: int) -> tuple[Scenario, ...]:
    """Seeded runs of five cuts each on three nodes: which nodes, in which phase, and in which order they return.

    Every second run has shared storage. Nodes return within 8 s: at once, or later than their peers are sure of their death.
    """
    rng = random.Random(seed)  # noqa: S311  a plan of drills
    made = []
    patterns = [p for _ in range(runs * _MATRIX_CUTS // len(_PATTERNS) + 1) for p in _PATTERNS]
    rng.shuffle(patterns)
    for run in range(runs):
        cuts: list[Cut] = []
        for number in range(_MATRIX_CUTS):
            nodes: tuple[str, ...] = patterns.pop()
            kind = rng.choice((Instant.MID_STEP, Instant.MID_SAVE, Instant.MID_STEP, Instant.MID_SAVE, Instant.AGAIN, Instant.RECOVERING))
            if number == 0 and kind in (Instant.AGAIN, Instant.RECOVERING):
                kind = Instant.MID_STEP
            if kind is Instant.RECOVERING:
                # Whom the cut before has taken cannot be cut while it is away.
                left = [n for n in ("n0", "n1", "n2") if n not in cuts[-1].nodes]
                nodes = tuple(left) or nodes
                if not left or cuts[-1].kind is Instant.RECOVERING:
                    kind = Instant.AGAIN
            after = rng.randint(1, 6) if kind is Instant.AGAIN else 14 + 20 * number + rng.randint(0, 6)
            back_s = {node: round(rng.choice((0.0, rng.uniform(0.5, 3.0), rng.uniform(5.5, 8.0))), 1) for node in nodes}
            cuts.append(Cut(kind=kind, after_step=after, nodes=nodes, back_s=back_s))
        storage = Storage.SHARED if run % 2 else Storage.LOCAL
        summary = f"cuts {run * _MATRIX_CUTS + 1} to {(run + 1) * _MATRIX_CUTS}"
        made.append(_several(f"matrix-{run}", summary, 3, *cuts, storage=storage, steps=MATRIX_STEPS, peers=_SHORT))
    return tuple(made)

"""What a supervisor says of its own node. Pure; ages instead of times, since clocks differ between nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from ridethrough.snapshot.ranks import RankPhase, RankState
from ridethrough.supervisor import shape

_STEPPING = (RankPhase.TRAINING, RankPhase.OUTSIDE)
_AT_WORK = (*_STEPPING, RankPhase.SAVING)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class NodePhase(StrEnum):
    """What the command does on a node."""

    WAITING = "waiting"
    """It was never started, or nobody of an earlier start is left."""
    RUNNING = "running"
    ENDED = "ended"
    """It is over and every process it had started is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the command ended on a node, judged there."""

    status: int
    cause: str
    fingerprint: str
    detail: str
    exit_code: int = 0
    is_retryable: bool = True
    output: str = ""


class Sealed(NamedTuple):
    """A save whose parts of this node are sealed. A tuple, as `NodeView` is."""

    step: int
    dark: tuple[str, ...] = ()
    is_verified: bool = False
    digests: Mapping[str, str] = _NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A save that this node could not make."""

    number: int
    """Of the announcement."""
    step: int
    code: str
    message: str
    age_s: float


class NodeView(NamedTuple):
    """One node, as its supervisor sees it.

    A tuple, since the lead of a thousand nodes makes thousands each second.
    """

    node: str
    up_s: float = 0.0
    """Age of its keeper: what is younger than a launch has no part in it."""
    phase: NodePhase = NodePhase.WAITING
    generation: int = 0
    """Of the call that its present or last launch answered."""
    attempt: str | None = None
    """Label of the attempt that its ranks have agreed on."""
    is_ready: bool = True
    missing: tuple[str, ...] = ()
    """Why it cannot start the command now."""
    signal: int = 0
    """A signal that asked this node to stop, 0 if none."""
    ranks: int = 0
    is_whole: bool = False
    """Every rank of this node has a board."""
    is_at_work: bool = False
    """Every rank trains, saves or is between epochs."""
    is_stepping: bool = False
    """Every rank has made its first step and is expected to make another."""
    is_inside: bool = False
    """Every rank is inside an epoch's loop."""
    is_stopped: bool = False
    """Every rank has saved and stopped because it was asked to."""
    is_unsaved: bool = False
    step: int = -1
    restored_step: int = -1
    since_step_s: float = 0.0
    """Age of the newest step or change of phase of any rank."""
    step_s_p99: float = 0.0
    posted: tuple[int, ...] = ()
    """Steps of which every rank here has a snapshot."""
    replicas: Mapping[str, tuple[int, ...]] = _NOTHING
    """By other node: steps of which all its private parts are here."""
    wanted: int | None = None
    """Every rank here waits for this step to be durable."""
    wanted_age_s: float = 0.0
    stop_seen: int = 0
    stop_was_late: bool = False
    sealed: tuple[Sealed, ...] = ()
    refused: Refused | None = None
    durable_step: int = -1
    """Of this launch."""
    saved_step: int = -1
    """Of any launch of this keeper's life."""
    is_saving: bool = False
    flushed: int = 0
    dead_ranks: tuple[int, ...] = ()
    has_stepped: bool = False
    """The first step of this launch is on record here."""
    stuck: str = ""
    """Why a person is needed here: processes that cannot be killed, say."""
    end: End | None = None

    def encode(self) -> dict[str, Any]:
        """As JSON, without what has its default."""
        found: dict[str, Any] = {"node": self.node}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                found[name] = round(value, 3) if type(value) is float else value
        if self.sealed:
            found["sealed"] = [{**s._asdict(), "digests": dict(s.digests)} for s in self.sealed]
        if self.refused is not None:
            found["refused"] = dataclasses.asdict(self.refused)
        if self.end is not None:
            found["end"] = dataclasses.asdict(self.end)
        return found

    @staticmethod
    def decode(value: dict[str, Any]) -> NodeView:
        """From JSON; fields of a newer version are ignored.

        Raises:
            TypeError, ValueError, KeyError: It is not a view.
        """
        known = {name: inner for name, inner in shape.require(value, _SHAPES).items() if name in _NAMES}
        for name in ("missing", "posted", "dead_ranks"):
            if name in known:
                known[name] = tuple(known[name])
        if "phase" in known:
            known["phase"] = NodePhase(known["phase"])
        if "replicas" in known:
            known["replicas"] = {node: tuple(steps) for node, steps in known["replicas"].items()}
        if "sealed" in known:
            known["sealed"] = tuple(_sealed(shape.require(said, _SEALED)) for said in known["sealed"])
        if known.get("refused") is not None:
            known["refused"] = Refused(**shape.require(known["refused"], _REFUSED))
        if known.get("end") is not None:
            known["end"] = End(**shape.require(known["end"], _END))
        return NodeView(**known)


def _sealed(said: dict[str, Any]) -> Sealed:
    return Sealed(**{**said, "dark": tuple(said["dark"])})


_DEFAULTS = NodeView._field_defaults
_NAMES = frozenset(NodeView._fields)
_SHAPES: dict[str, shape.Shape] = {
    **dict.fromkeys(("node", "stuck"), str),
    **dict.fromkeys(("up_s", "since_step_s", "step_s_p99", "wanted_age_s"), shape.is_number),
    **dict.fromkeys(("generation", "ranks", "step", "restored_step", "stop_seen", "durable_step", "saved_step", "flushed"), shape.is_whole),
    **{name: bool for name, default in _DEFAULTS.items() if type(default) is bool},
    **dict.fromkeys(("posted", "dead_ranks"), shape.is_counts),
    "phase": str,
    "attempt": shape.optional(str),
    "wanted": shape.optional(shape.is_whole),
    "signal": shape.is_signal,
    "missing": shape.is_texts,
    "replicas": shape.by_name(shape.is_counts),
    "sealed": lambda value: isinstance(value, list | tuple),
}
_SEALED: dict[str, shape.Shape] = {
    "step": shape.is_whole, "dark": shape.is_texts, "is_verified": bool, "digests": shape.by_name(str),
}  # fmt: skip
_REFUSED: dict[str, shape.Shape] = {
    "number": shape.is_whole, "step": shape.is_whole, "code": str, "message": str, "age_s": shape.is_number,
}  # fmt: skip
_END: dict[str, shape.Shape] = {
    **dict.fromkeys(("cause", "fingerprint", "detail", "output"), str),
    **dict.fromkeys(("status", "exit_code"), shape.is_whole),
    "is_retryable": bool,
}


def of_ranks(ranks: tuple[RankState, ...], *, local_world: int | None, now_s: float) -> dict[str, Any]:
    """The fields of a view that come from the boards of its ranks."""
    if not ranks:
        return {}
    wanted = {r.wanted_save for r in ranks}
    is_whole = local_world is not None and len(ranks) == local_world
    is_stepping = all(r.phase in _STEPPING and "first_step" in r.times_s for r in ranks)
    newest_s = max(max([r.step_at_s, *r.times_s.values()]) for r in ranks)
    return {
        "ranks": len(ranks),
        "is_whole": is_whole,
        "is_at_work": all(r.phase in _AT_WORK for r in ranks),
        "is_stepping": is_stepping,
        "is_inside": is_stepping and all(r.phase is RankPhase.TRAINING for r in ranks),
        "is_stopped": all(r.phase is RankPhase.STOPPED for r in ranks),
        "is_unsaved": any(r.is_unsaved for r in ranks),
        "step": max(r.step for r in ranks),
        "restored_step": max(r.restored_step for r in ranks),
        "since_step_s": max(now_s - newest_s, 0.0),
        "step_s_p99": max(r.step_s_p99 for r in ranks),
        "posted": tuple(sorted(set.intersection(*(set(r.posted_steps) for r in ranks)))) if is_whole else (),
        "wanted": wanted.pop() if is_whole and len(wanted) == 1 else None,
        "wanted_age_s": now_s - max(r.wanted_at_s for r in ranks),
        "stop_seen": min(r.stop_seen for r in ranks),
        "stop_was_late": any(r.stop_was_late for r in ranks),
        "has_stepped": is_whole and all("first_step" in r.times_s for r in ranks),
    }

"""What the lead has decided for all nodes. Pure: one value, replaced as a whole, the higher number wins.

It holds everything that a successor of the lead needs, so that taking over is going on from the
newest directive one has heard.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ridethrough.supervisor import shape


class Stage(StrEnum):
    """Where the job is."""

    CALLING = "calling"
    """Nobody runs; the next launch waits for its nodes."""
    RUNNING = "running"
    OVER = "over"
    """A launch has ended or is given up: trainers are stopped, memory is made durable."""
    FINISHED = "finished"
    """Every supervisor ends with the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a launch is over, and what follows."""

    cause: str
    fingerprint: str
    detail: str
    action: str
    reason: str
    exit_code: int = 0
    pause_s: float = 0.0
    last_step: int = -1
    lost: tuple[str, ...] = ()
    """Nodes given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """From a fault to the first new step."""

    cause: str
    detail: str
    nodes: tuple[str, ...]
    """Nodes that went dark, as far as known."""
    last_step: int
    opened_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The lead's word."""

    room: str = ""
    """Label of the attempt whose nodes are led; empty for the nodes of the configuration, or one node alone."""
    number: int = 0
    lead: str = ""
    stage: Stage = Stage.CALLING
    generation: int = 0
    """Counts launches; a node that has answered an earlier one starts its command for this one."""
    called_s: float = 0.0
    """When it was called, on the monotonic clock of whoever holds this value."""
    members: tuple[str, ...] = ()
    """Nodes of the launch, in the order in which they lead; the first one hosts the rendezvous."""
    reason: str = ""
    attempt: str | None = None
    """The attempt that saves, stop and outcome are about."""
    announced: int | None = None
    announcement: int = 0
    dark: tuple[str, ...] = ()
    """Nodes whose parts of the announced save others write."""
    flush: dict[str, Any] | None = None
    confirmed: dict[str, Any] | None = None
    """The newest step whose parts are all sealed, and whether all were read back."""
    refused: dict[str, Any] | None = None
    stop: dict[str, Any] | None = None
    is_suspect: bool = False
    outcome: Outcome | None = None
    incident: Incident | None = None
    code: int = 0
    text: str = ""

    def encode(self) -> dict[str, Any]:
        """As JSON, without what has its default."""
        found: dict[str, Any] = {}
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value != spec.default:
                found[spec.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else copy.copy(value)
        return found

    @staticmethod
    def decode(value: dict[str, Any]) -> Directive:
        """From JSON; fields of a newer version are ignored.

        Raises:
            TypeError, ValueError, KeyError: It is not a directive.
        """
        said = shape.require(value, _SHAPES)
        known = {spec.name: said[spec.name] for spec in dataclasses.fields(Directive) if spec.name in said}
        for name in ("members", "dark"):
            if name in known:
                known[name] = tuple(known[name])
        if "stage" in known:
            known["stage"] = Stage(known["stage"])
        if known.get("outcome") is not None:
            outcome = shape.require(known["outcome"], _OUTCOME)
            known["outcome"] = Outcome(**{**outcome, "lost": tuple(outcome.get("lost", ()))})
        if known.get("incident") is not None:
            incident = shape.require(known["incident"], _INCIDENT)
            known["incident"] = Incident(**{**incident, "nodes": tuple(incident.get("nodes", ()))})
        return Directive(**known)


_SHAPES: dict[str, shape.Shape] = {
    **dict.fromkeys(("room", "lead", "stage", "reason", "text"), str),
    **dict.fromkeys(("number", "generation", "announcement", "code"), shape.is_whole),
    **dict.fromkeys(("members", "dark"), shape.is_texts),
    **dict.fromkeys(("flush", "confirmed", "refused", "stop"), shape.optional(shape.is_facts)),
    "called_s": shape.is_number,
    "attempt": shape.optional(str),
    "announced": shape.optional(shape.is_whole),
    "is_suspect": bool,
}
_OUTCOME: dict[str, shape.Shape] = {
    **dict.fromkeys(("cause", "fingerprint", "detail", "action", "reason"), str),
    **dict.fromkeys(("exit_code", "last_step"), shape.is_whole),
    "pause_s": shape.is_number,
    "lost": shape.is_texts,
}
_INCIDENT: dict[str, shape.Shape] = {
    **dict.fromkeys(("cause", "detail", "opened_at"), str),
    "nodes": shape.is_texts,
    "last_step": shape.is_whole,
}

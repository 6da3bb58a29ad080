"""RTO and RPO of one fault, from times on one monotonic clock. Pure.

RTO_net is counted from the later of the last step and the return of power (of the nodes that went on),
to the end of the first step made after the resume; its phases sum to it. RPO is the steps between the
last one made by any rank and the one restored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("detect", "classify", "node_ready", "launch", "select_verify", "load", "first_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """One fault and what it cost."""

    kind: str
    phase: str
    nodes: str
    returns: str
    at_step: int
    restored_step: int | None
    """None if the job went on without a restart."""
    rpo_steps: int
    rpo_limit_steps: int | None
    """What it may be, None if the fault promises nothing."""
    rto_s: float
    rto_phases_s: Mapping[str, float]
    convicted_s: float | None = None
    """From the fault to the first verdict of a surviving node that its peer is dead."""
    standstill_s: float | None = None
    """Of a job that went on by itself: the longest time without a step."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.kind,
            "phase": self.phase,
            "nodes": self.nodes,
            "returns": self.returns,
            "at_step": self.at_step,
            "restored_step": self.restored_step,
            "rpo_steps": self.rpo_steps,
            "rpo_limit_steps": self.rpo_limit_steps,
            "rto_s": round(self.rto_s, 3),
            "rto_phases_s": {name: round(value, 3) for name, value in self.rto_phases_s.items()},
            "detect_s": round(self.rto_phases_s["detect"], 3),
            "convicted_s": None if self.convicted_s is None else round(self.convicted_s, 3),
            "standstill_s": None if self.standstill_s is None else round(self.standstill_s, 3),
        }


def phases(
    *, last_step_s: float, power_s: float, detected_s: float, classified_s: float, launched_s: float, times_s: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """RTO_net and its phases, which sum to it.

    A phase that was over before RTO_net begins (a death noticed while the power was still gone) is 0.

    Args:
        last_step_s: When the last step before the fault was finished.
        power_s: When every node that went on had power.
        detected_s: When a supervisor was sure of a fault, or the command was given again if none was alive.
        classified_s: When it had decided what follows.
        launched_s: When the trainers were started.
        times_s: Of the slowest rank: attached, chosen, loaded, first_step.
    """
    marks = [max(last_step_s, power_s)]
    end_s = times_s["first_step"]
    for mark in (detected_s, classified_s, launched_s, times_s["attached"], times_s["chosen"], times_s["loaded"], end_s):
        marks.append(min(max(mark, marks[-1]), end_s))
    return end_s - marks[0], {name: max(after - before, 0.0) for name, before, after in zip(PHASES, marks[:-1], marks[1:], strict=True)}


def standstill(step_times_s: list[float], *, from_s: float, to_s: float) -> float:
    """The longest time without a step that overlaps a fault, for a job that went on by itself."""
    ordered = sorted(step_times_s)
    gaps = [after - before for before, after in itertools.pairwise(ordered) if after > from_s and before < to_s]
    return max(gaps, default=0.0)

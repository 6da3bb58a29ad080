"""RTO and RPO of one cut, from times on one monotonic clock. Pure.

RTO_net is counted from the later of the last step and the return of power, to the end of the first
step made after the resume; its phases sum to it. RPO is the steps between the last one made and
the one restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("detect", "classify", "node_ready", "launch", "select_verify", "load", "first_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """One cut and what it cost."""

    kind: str
    phase: str
    at_step: int
    restored_step: int
    rpo_steps: int
    rto_s: float
    rto_phases_s: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.kind,
            "phase": self.phase,
            "at_step": self.at_step,
            "restored_step": self.restored_step,
            "rpo_steps": self.rpo_steps,
            "rto_s": round(self.rto_s, 3),
            "rto_phases_s": {name: round(value, 3) for name, value in self.rto_phases_s.items()},
            "detect_s": round(self.rto_phases_s["detect"], 3),
        }


def measure(
    *,
    kind: str,
    phase: str,
    at_step: int,
    last_step_s: float,
    power_s: float,
    command_s: float,
    launched_s: float,
    times_s: Mapping[str, float],
    restored_step: int,
) -> CutResult:
    """The cost of a cut.

    Args:
        kind: Of the cut.
        phase: What the persister was doing, or "train".
        at_step: Last step any rank finished before the cut.
        last_step_s: When it was finished.
        power_s: When the disk was usable again.
        command_s: When the same command was given again.
        launched_s: When the supervisor decided to start the trainers.
        times_s: Of the slowest rank: attached, chosen, loaded, first_step.
        restored_step: Step that was restored.
    """
    start_s = max(last_step_s, power_s)
    marks = (start_s, command_s, command_s, launched_s, times_s["attached"], times_s["chosen"], times_s["loaded"], times_s["first_step"])
    # A whole node without power leaves no fault to classify: the command that finds checkpoints resumes.
    phases = {name: max(after - before, 0.0) for name, before, after in zip(PHASES, marks[:-1], marks[1:], strict=True)}
    return CutResult(
        kind=kind,
        phase=phase,
        at_step=at_step,
        restored_step=restored_step,
        rpo_steps=at_step - restored_step,
        rto_s=times_s["first_step"] - start_s,
        rto_phases_s=phases,
    )

"""Whether the run that was cut is the run that was not. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridethrough.types import StateClass

CLASSES = tuple(c.value for c in StateClass)
DERIVED = ("batch", "loss")
"""What follows from the six classes: named only if all six agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """State after a step of one rank: a digest of each class."""

    rank: int
    step: int
    launch: str
    at_s: float
    is_resume: bool
    """Taken right after a resume, before the first step."""
    digests: Mapping[str, str]
    samples: tuple[int, ...] = ()
    """Which samples the step was trained on, if the trainee says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two runs part."""

    step: int
    rank: int
    state_class: str
    at_resume: bool

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"step": self.step, "rank": self.rank, "class": self.state_class, "at_resume": self.at_resume}


def parse_trace(text: str) -> list[TraceLine]:
    """The whole lines of a trace; one cut short by a kill is left out."""
    lines = []
    for raw in text.splitlines(keepends=True):
        if raw.endswith("\n"):
            value = json.loads(raw)
            lines.append(TraceLine(**{**value, "samples": tuple(value.get("samples", ()))}))
    return lines


def compare(reference: Iterable[TraceLine], drilled: Iterable[TraceLine], *, steps: int, ranks: int) -> tuple[Difference | None, list[str]]:
    """The first difference, and steps that one of the runs lacks.

    Every line of the drilled run counts, also of steps that were made twice.
    """
    expected = {(line.rank, line.step): line for line in reference if not line.is_resume}
    seen = set()
    found: list[tuple[float, int, Difference]] = []
    for line in drilled:
        seen.add((line.rank, line.step))
        truth = expected.get((line.rank, line.step))
        if truth is None:
            continue
        names = CLASSES if line.is_resume else (*CLASSES, *DERIVED)
        wrong = [name for name in names if name in line.digests and line.digests[name] != truth.digests.get(name)]
        if wrong:
            found.append((line.at_s, line.rank, Difference(step=line.step, rank=line.rank, state_class=wrong[0], at_resume=line.is_resume)))
    every = {(rank, step) for rank in range(ranks) for step in range(1, steps + 1)}
    gaps = [
        f"{name} has no trace of {len(every - have)} steps"
        for name, have in (("the reference run", set(expected)), ("the drilled run", seen))
        if every - have
    ]
    return (min(found, key=lambda item: (item[0], item[1]))[2] if found else None), gaps


def final_lineage(lines: Sequence[TraceLine], resumes: Iterable[tuple[float, int]]) -> list[TraceLine]:
    """The steps that the end state is made of, in their order.

    Args:
        lines: All that was traced.
        resumes: When each attempt began, and the step that it went on from: what came before and is later than that step was lost.
    """
    starts = sorted({*resumes, *((line.at_s, line.step) for line in lines if line.is_resume)})
    kept = [line for line in lines if not line.is_resume and not any(line.at_s < at_s and line.step > restored for at_s, restored in starts)]
    return sorted(kept, key=lambda line: (line.step, line.rank))


def sample_faults(lineage: Iterable[TraceLine], *, per_epoch: int, epochs: int) -> list[str]:
    """What is wrong with the samples of a run: nothing if each was trained on exactly once an epoch, whatever the number of ranks."""
    samples = [sample for line in lineage for sample in line.samples]
    faults = []
    for epoch in range(epochs):
        count = Counter(samples[epoch * per_epoch : (epoch + 1) * per_epoch])
        lost, again = [n for n in range(per_epoch) if n not in count], [n for n, times in sorted(count.items()) if times > 1]
        if lost:
            faults.append(f"epoch {epoch}: {len(lost)} samples lost, the first is {lost[0]}")
        if again:
            faults.append(f"epoch {epoch}: {len(again)} samples repeated, the first is {again[0]}")
    if len(samples) != per_epoch * epochs:
        faults.append(f"{len(samples)} samples instead of {per_epoch * epochs}")
    return faults

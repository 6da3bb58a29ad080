"""What is cut, and when. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ridethrough.errors import UsageError


class CutKind(StrEnum):
    """The instant of a cut, relative to what the job does."""

    MID_STEP = "mid-step"
    MID_SAVE = "mid-save"
    AGAIN = "before-first-save"
    """Again, after a resume and before anything new was durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One power cut: the first instant of its kind at or after a step."""

    kind: CutKind
    after_step: int
    """For AGAIN: steps after the resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A list of cuts for one run of the trainee."""

    name: str
    summary: str
    cuts: tuple[Cut, ...]


STEPS = 120
SAVE_INTERVAL_STEPS = 10

_STEP = Cut(kind=CutKind.MID_STEP, after_step=23)
_SAVE = Cut(kind=CutKind.MID_SAVE, after_step=45)
_LATER = Cut(kind=CutKind.MID_STEP, after_step=77)
_AGAIN = Cut(kind=CutKind.AGAIN, after_step=3)

SCENARIOS = {
    s.name: s
    for s in (
        Scenario(
            name="power-cut",
            summary="in mid-step, in mid-save, and twice in a row (again before the first save after a resume)",
            cuts=(_STEP, _SAVE, _LATER, _AGAIN),
        ),
        Scenario(name="mid-step", summary="once, in the middle of a step", cuts=(_STEP,)),
        Scenario(name="mid-save", summary="once, in the middle of a save", cuts=(_SAVE,)),
        Scenario(name="twice", summary="in mid-step, and again before the first save after the resume", cuts=(_STEP, _AGAIN)),
    )
}


def find(name: str) -> Scenario:
    """The scenario of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in SCENARIOS:
        raise UsageError(detail=f"there is no drill {name!r}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]

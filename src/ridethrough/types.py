"""Words shared by two or more packages, as closed sets and frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FORMAT = 1
"""Version of everything on disk. Readers accept 1..FORMAT and refuse newer ones."""


class StateClass(StrEnum):
    """The six classes of state that a complete checkpoint holds."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    DATA = "data"
    DISTRIBUTED = "distributed"
    METRICS = "metrics"


class Presence(StrEnum):
    """Whether a class of state is in a checkpoint."""

    PRESENT = "present"
    MISSING = "missing"
    UNPROTECTABLE = "unprotectable"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRef:
    """One attempt, named the way every record names it."""

    seq: int
    nonce: str

    @property
    def label(self) -> str:
        """Name of its directory: sequence number for people, nonce for uniqueness."""
        return f"{self.seq:06d}-{self.nonce[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """Where an attempt went on from: a step of an earlier attempt."""

    attempt: AttemptRef
    step: int

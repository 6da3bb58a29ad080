"""What a rank says of itself on its board, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RankPhase(StrEnum):
    """Where a rank is."""

    STARTING = "starting"
    AGREEING = "agreeing"
    LOADING = "loading"
    TRAINING = "training"
    """Inside an epoch: the next step is expected soon."""
    OUTSIDE = "outside"
    """Between epochs (validation, …): no step is expected."""
    SAVING = "saving"
    STOPPED = "stopped"
    """Saved and stopped because it was asked to."""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank's board."""

    rank: int
    pid: int
    process_started: int
    world_size: int
    run_dir: str
    phase: RankPhase = RankPhase.STARTING
    step: int = -1
    restored_step: int = -1
    step_at_s: float = 0.0
    """Monotonic time at the end of the last step."""
    step_s_p99: float = 0.0
    posted_step: int = -1
    posted_steps: tuple[int, ...] = ()
    """Every step of which this rank has a snapshot in a slot."""
    wanted_save: int | None = None
    """The rank waits for this step to be durable."""
    wanted_at_s: float = 0.0
    is_unsaved: bool = False
    """The process has left its loop with steps that only its snapshots have."""
    stop_seen: int = 0
    """Number of the last stop proposal this rank has seen."""
    stop_was_late: bool = False
    """It was seen only after the proposed step."""
    failure: dict[str, Any] | None = None
    times_s: dict[str, float] = field(default_factory=dict)
    """Monotonic times of the phases of this start, for the RTO."""
    snapshot_s: float | None = None
    state_bytes: int = 0


def decode_rank(value: dict[str, Any]) -> RankState | None:
    """The state on a board; None if nothing was written yet."""
    if not value:
        return None
    known = {name: value[name] for name in RankState.__slots__ if name in value}
    known["phase"] = RankPhase(known.get("phase", RankPhase.STARTING))
    known["posted_steps"] = tuple(known.get("posted_steps", ()))
    return RankState(**known)

"""What a restarted supervisor must still know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Memory:
    """Lives on the control board, in the keeper's memory."""

    launch: int = 0
    """Of this keeper."""
    generation: int = 0
    """Of the call that the launch answers."""
    has_agreed: bool = False
    """Some launch of this command got through its start agreement."""
    directive: dict[str, Any] = field(default_factory=dict)
    past: list[dict[str, Any]] = field(default_factory=list)
    judged: int = 0
    """Generation whose end is in `past`."""
    recovered: bool = False
    """The first step of this launch is on record."""
    dead_ranks: list[int] = field(default_factory=list)
    is_terminated: bool = False
    """The command of this launch was sent SIGTERM."""

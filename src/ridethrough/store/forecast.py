"""How fast a run grows, what retention keeps at most, and when its file system is full. Pure.

Only what is on record counts: saves that were called durable, and the retention that was in force
then. What is not known is None, and the verdict says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridethrough.journal import Event
from ridethrough.store.writer import QUARANTINE_CHECKPOINTS

NEVER, FULL, UNKNOWN = "never", "full", "unknown"

_BESIDE_KEPT = 2
"""The save in progress, and the checkpoint that the attempt resumed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What the newest attempt has written."""

    saves_count: int
    save_bytes: int | None
    """The largest save."""
    interval_s: float | None
    """Between two saves, on average."""
    written_bytes_per_s: float | None
    """Before retention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Whether the checkpoints of this run fill the file system, if nobody else writes to it and saves verify."""

    growth: Growth
    keep_last: int | None
    keep_top: int | None
    kept_at_most_bytes: int | None
    """Checkpoints and quarantine under the present retention, with a save in progress; None: unknown, or without limit."""
    verdict: str
    detail: str
    full_in_s: float | None
    """At the earliest; None: never, or unknown."""

    def as_json(self) -> dict[str, Any]:
        """As JSON has it."""
        grown = self.growth
        return {
            "verdict": self.verdict,
            "detail": self.detail,
            "save_bytes": grown.save_bytes,
            "interval_s": None if grown.interval_s is None else round(grown.interval_s, 3),
            "written_bytes_per_s": None if grown.written_bytes_per_s is None else round(grown.written_bytes_per_s, 3),
            "saves_count": grown.saves_count,
            "keep_last": self.keep_last,
            "keep_top": self.keep_top,
            "kept_at_most_bytes": self.kept_at_most_bytes,
            "full_in_s": None if self.full_in_s is None else round(self.full_in_s, 1),
        }


def growth(durable: Sequence[Event]) -> Growth:
    """From `checkpoint.durable` events of one or several nodes, those of the newest attempt.

    Earlier attempts would count the time in which nothing ran. Times of different boots do not
    compare, so they are taken from the one boot that knows the most saves; every node says how
    much of a save it has written.
    """
    newest = [event for event in durable if _int(event.data, "attempt_seq") == _newest(durable)]
    sizes: Counter[str] = Counter()
    times: dict[str, dict[str, float]] = {}
    for event in newest:
        identity = str(event.data.get("save_id"))
        if _is_count(event.data.get("size_bytes")):
            sizes[identity] += event.data["size_bytes"]
        times.setdefault(event.boot, {}).setdefault(identity, event.mono_s)
    at = max(times.values(), key=len, default={})
    order = sorted((mono_s, identity) for identity, mono_s in at.items() if identity in sizes)
    largest = max(sizes.values(), default=None)
    if len(order) < 2 or order[-1][0] <= order[0][0]:
        return Growth(saves_count=len(sizes), save_bytes=largest, interval_s=None, written_bytes_per_s=None)
    took_s = order[-1][0] - order[0][0]
    return Growth(
        saves_count=len(sizes),
        save_bytes=largest,
        interval_s=took_s / (len(order) - 1),
        # The first one was written before the time that is counted.
        written_bytes_per_s=sum(sizes[identity] for _, identity in order[1:]) / took_s,
    )


def _newest(durable: Sequence[Event]) -> int:
    return max((_int(event.data, "attempt_seq") for event in durable), default=0)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _int(data: dict[str, Any], name: str) -> int:
    return data[name] if _is_count(data.get(name)) else 0


def forecast(durable: Sequence[Event], *, held_bytes: int, largest_bytes: int, free_bytes: int) -> Forecast:
    """What will come of it.

    Args:
        durable: The `checkpoint.durable` events of all journals.
        held_bytes: What checkpoints and quarantine take now.
        largest_bytes: The largest checkpoint there is; with its records it takes more than was recorded.
        free_bytes: Left on the file system.
    """
    grown = growth(durable)
    said = [event.data["retention"] for event in durable if _int(event.data, "attempt_seq") == _newest(durable) and "retention" in event.data]
    retention = said[-1] if said and isinstance(said[-1], dict) else None
    keep_last = _int(retention, "keep_last") if retention is not None else None
    keep_top = _int(retention, "keep_top") if retention is not None else None

    def say(verdict: str, detail: str, *, at_most: int | None = None, full_in_s: float | None = None) -> Forecast:
        return Forecast(
            growth=grown, keep_last=keep_last, keep_top=keep_top, kept_at_most_bytes=at_most, verdict=verdict, detail=detail, full_in_s=full_in_s
        )

    if grown.save_bytes is None:
        return say(UNKNOWN, "no save with its size is on record")
    filling_s = free_bytes / grown.written_bytes_per_s if grown.written_bytes_per_s else None
    if retention is None or keep_last is None or keep_top is None:
        return say(UNKNOWN, "the retention in force is not on record")
    if _int(retention, "keep_every"):
        # One in so many stays for ever. How many steps lie between saves may change, so no rate is made up.
        return say(FULL, "retention keeps some for ever (keep_every)", full_in_s=filling_s)
    save_bytes = max(grown.save_bytes, largest_bytes)
    at_most = (max(keep_last, 1) + keep_top + _BESIDE_KEPT + QUARANTINE_CHECKPOINTS) * save_bytes
    if at_most - held_bytes <= free_bytes:
        return say(NEVER, "what retention keeps fits", at_most=at_most)
    return say(FULL, "what retention keeps does not fit", at_most=at_most, full_in_s=filling_s)

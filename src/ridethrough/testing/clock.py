"""A clock that only moves when it is told to."""

from __future__ import annotations

import datetime


class FakeClock:
    """Keeps the promise of `seam.clock.Clock` without waiting: sleeping moves the clock.

    Args:
        now_at: The wall clock at the start; a fixed date unless given.
        monotonic_s: The monotonic clock at the start.
    """

    def __init__(self, *, now_at: datetime.datetime | None = None, monotonic_s: float = 1000.0) -> None:
        self._now_at = now_at or datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        self._monotonic_s = monotonic_s
        self.sleeps_s: list[float] = []

    def now_at(self) -> datetime.datetime:
        return self._now_at

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps_s.append(duration_s)
        self.advance(duration_s)

    def advance(self, duration_s: float) -> None:
        """Both clocks went on by this much."""
        self._monotonic_s += duration_s
        self._now_at += datetime.timedelta(seconds=duration_s)

    def set_wall(self, now_at: datetime.datetime) -> None:
        """The wall clock jumped, as after a power cut with an empty clock battery; the monotonic one did not."""
        self._now_at = now_at

"""The only door to time. Durations come from the monotonic clock, dates from the wall clock."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """Time as this machine sees it."""

    def now_at(self) -> datetime.datetime:
        """The wall clock, aware, UTC. After a power cut it may be wrong by years: never order by it."""

    def monotonic_s(self) -> float:
        """Seconds since this boot, shared by all processes of the machine, never going back."""

    def sleep(self, duration_s: float) -> None:
        """At least this long has passed."""


class SystemClock:
    """The machine's own clocks."""

    def now_at(self) -> datetime.datetime:
        return datetime.datetime.now(tz=datetime.UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


def boot_id() -> str:
    """Names this boot of the machine; with it, monotonic times of different boots are told apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"  # not Linux: order of records then rests on their sequence numbers alone

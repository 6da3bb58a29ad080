"""Watching the trainee from outside its nodes: its trace, its acknowledgements, its persister."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.drill.compare import TraceLine, parse_trace
from ridethrough.errors import DrillFailed, KeeperGone
from ridethrough.seam import process
from ridethrough.snapshot import link as names
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.link import KeeperLink


@dataclass(slots=True)
class Tail:
    """New whole lines of a growing file."""

    path: Path
    _at: int = 0

    def read(self) -> str:
        """What was added since the last call, up to the last line end."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Event:
    """What a supervisor or persister has said, when it was read, and on which node."""

    node: str
    kind: str
    seen_s: float
    data: dict[str, Any]

    @property
    def at_s(self) -> float:
        """When it happened, if it says so; otherwise when it was read."""
        return float(self.data.get("at_s", self.seen_s))


@dataclass(slots=True)
class Watch:
    """What is known of one run of the trainee, from files that no cut touches."""

    directory: Path
    ranks: int
    nodes: tuple[str, ...]
    lines: list[TraceLine] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _tails: list[Tail] = field(default_factory=list)
    _logs: dict[str, Tail] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tails = [Tail(self.directory / f"rank-{rank}.jsonl") for rank in range(self.ranks)]
        self._logs = {node: Tail(self.log_path(node)) for node in self.nodes}

    def log_path(self, node: str) -> Path:
        """Standard error of the node's command: our events as JSON lines among the trainee's own output."""
        return self.directory / f"command-{node}.log"

    def look(self) -> None:
        """`lines` and `events` hold everything written so far."""
        for tail in self._tails:
            self.lines.extend(parse_trace(tail.read()))
        for node, log in self._logs.items():
            for line in log.read().splitlines():
                if line.startswith('{"ridethrough"'):
                    data = json.loads(line)
                    self.events.append(Event(node, data.pop("ridethrough"), time.monotonic(), data))

    def last_step(self, *, before_s: float = float("inf")) -> tuple[int, float]:
        """The last step that any rank had finished by then, and when."""
        done = (line for line in self.lines if not line.is_resume and line.at_s < before_s)
        newest = max(done, key=lambda line: line.at_s, default=None)
        return (newest.step, newest.at_s) if newest else (0, 0.0)

    def of(self, *kinds: str, since: int = 0) -> list[Event]:
        """Events of these kinds from the n-th event on."""
        return [event for event in self.events[since:] if event.kind in kinds]

    def acknowledged(self, *, before_s: float = float("inf")) -> int:
        """The newest step that was called durable by then, 0 if none."""
        return max((int(event.data["step"]) for event in self.of("checkpoint.durable") if event.seen_s < before_s), default=0)

    def newest_seq(self) -> int:
        """Of the attempts that have made a step, the newest; 0 if there is none."""
        return max((int(event.data["attempt"]["seq"]) for event in self.of("launch.stepped")), default=0)

    def last_words(self, nodes: tuple[str, ...] | None = None) -> str:
        """The end of what the nodes' commands have printed."""
        found = []
        for node in nodes or self.nodes:
            path = self.log_path(node)
            text = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
            found.append(f"{node}: {process.shown_tail(text[-8:])}" if len(self.nodes) > 1 else process.shown_tail(text[-12:]))
        return "; ".join(found)

    def wait(self, is_there: Callable[[], Any], what: str, *, within_s: float, act: Callable[[], None], pause_s: float) -> None:
        """Returns when it has happened; `act` is called at every look.

        Raises:
            DrillFailed: It has not in time.
        """
        deadline = time.monotonic() + within_s
        while True:
            self.look()
            if is_there():
                return
            if time.monotonic() > deadline:
                raise DrillFailed(detail=f"{what} did not come within {within_s:.0f} s: {self.last_words()}")
            act()
            time.sleep(pause_s)


class PersisterView:
    """The persister's board, read through the keeper's socket on the node's disk."""

    def __init__(self, state_dir: str) -> None:
        self._sockets = os.path.join(state_dir, "sockets")
        self._board: Board | None = None

    def busy(self) -> dict[str, Any] | None:
        """The save in progress and its phase, None if there is none or nobody answers yet."""
        if self._board is None:
            try:
                newest = max((entry for entry in os.scandir(self._sockets)), key=lambda entry: entry.stat().st_mtime, default=None)
                if newest is None:
                    return None
                link = KeeperLink(newest.path, role="drill")
                self._board = link.board(names.PERSIST)
                link.close()
            except (OSError, KeeperGone):
                return None  # the keeper of this start does not listen yet
        found = self._board.read().get("busy")
        return dict(found) if found else None

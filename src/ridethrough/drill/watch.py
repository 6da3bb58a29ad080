"""Watching the trainee from outside its node: its trace, its acknowledgements, its persister."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.drill.compare import TraceLine, parse_trace
from ridethrough.errors import KeeperGone
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


@dataclass(slots=True)
class Watch:
    """What is known of one run of the trainee, from files that no cut touches."""

    directory: Path
    ranks: int
    lines: list[TraceLine] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    _tails: list[Tail] = field(default_factory=list)
    _log: Tail | None = None

    def __post_init__(self) -> None:
        self._tails = [Tail(self.directory / f"rank-{rank}.jsonl") for rank in range(self.ranks)]
        self._log = Tail(self.log_path)

    @property
    def log_path(self) -> Path:
        """Standard error of the command: our events as JSON lines among the trainee's own output."""
        return self.directory / "command.log"

    def look(self) -> None:
        """`lines` and `events` hold everything written so far."""
        for tail in self._tails:
            self.lines.extend(parse_trace(tail.read()))
        assert self._log is not None
        for line in self._log.read().splitlines():
            if line.startswith('{"ridethrough"'):
                self.events.append(json.loads(line))

    def last_step(self) -> tuple[int, float]:
        """The last step that any rank finished, and when."""
        newest = max((line for line in self.lines if not line.is_resume), key=lambda line: line.at_s, default=None)
        return (newest.step, newest.at_s) if newest else (0, 0.0)

    def of(self, kind: str, *, since: int = 0) -> list[dict[str, Any]]:
        """Events of a kind from the n-th event on."""
        return [event for event in self.events[since:] if event["ridethrough"] == kind]

    def acknowledged(self) -> int:
        """The newest step that was called durable, 0 if none."""
        return max((int(event["step"]) for event in self.of("checkpoint.durable")), default=0)


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

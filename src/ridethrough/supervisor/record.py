"""The supervisor's pen: journal without ever being blocked by storage, and a line on stderr."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import sys
import threading
from typing import Any

from ridethrough.errors import RideThroughError
from ridethrough.journal import Journal
from ridethrough.redact import redact

_WAIT_S = 0.5
"""How long a decision waits for its record: longer than any healthy fsync, and other nodes must not take us for dark."""
_QUEUE = 10_000
_REFUSED = 1000
_RETRY_S = 0.5


_AT_WORK = frozenset({"launch.stepped", "checkpoint.durable", "parts.sealed"})
_ENDED = frozenset({"run.ended"})
_SENTENCES = {
    "launch.decided": "launch {launch} ({reason}): {command}",
    "launch.stepped": "launch {launch} trains on from step {restored_step}",
    "resume.differs": "went on from step {step}; changed since then: {detail}",
    "launch.ended": "launch {launch} ended, {cause}: {detail}; next: {action}",
    "checkpoint.durable": "step {step} is durable ({size_bytes} bytes in {save_s} s)",
    "checkpoint.failed": "step {step} was NOT saved: {message} ({code})",
    "part.quarantined": "{part} of {dir_name} is damaged and was moved to quarantine",
    "replicas.diverged": "ranks {ranks} differ in {tensors} at step {step}: silent divergence",
    "trainer.died": "trainer of rank {ranks} died at step {step}",
    "flush.started": "saving what is in memory, step {step}: {reason}",
    "hang.suspected": "no step for {overdue_s} s",
    "hang.convicted": "no step for {overdue_s} s: the trainers are stopped",
    "peer.suspected": "silent: {nodes}",
    "peer.heard_again": "heard again: {nodes}",
    "peer.convicted": "given up: {nodes}",
    "supervisor.deaf": "this supervisor cannot talk to those of the other nodes: {reason}",
    "muster.waiting": "waiting: {reason}",
    "save.overdue": "step {step} has been {phase} for {waited_s} s: storage hangs or is slow",
    "save.taken_over": "step {step} is saved without {dark}",
    "copy.done": "step {step} is also in {place}",
    "copy.failed": "step {step} was NOT copied to {place}: {message}",
    "incident": "incident, {outcome}: {detail}; went on from step {restored_step}, {lost_steps} steps lost",
    "supervisor.restarted": "the supervisor was restarted",
}
"""For people; what is not listed is only in the journal and in logs."""


def echo(kind: str, data: dict[str, Any]) -> None:
    """The event is on stderr: a sentence on a terminal (if it is worth one there), a JSON line in a log."""
    shown = redact(data)
    if not sys.stderr.isatty():
        line = json.dumps({"ridethrough": kind, **shown}, default=str)
    elif kind in _SENTENCES:
        line = f"ridethrough: {_SENTENCES[kind].format_map(collections.defaultdict(str, shown))}".replace("\n", " ")
    else:
        return
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # The terminal is gone or nobody reads the pipe: that must not cost a save, let alone the supervisor.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the process ends


class Pen:
    """Writes events in order, in a thread of its own; owned by the supervisor until its process ends.

    Before the run directory is known, events wait; those that the journal refuses (a full disk, a
    directory that is not there yet) are tried again, the newest thousand of them. If storage hangs,
    `note` returns after half a second with the event still queued, and from then on at once: a
    decision late on record is better than no decision.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, dict[str, Any], threading.Event]] = queue.Queue(maxsize=_QUEUE)
        self._journal: Journal | None = None
        self._is_open = threading.Event()
        self._given_up: threading.Event | None = None
        """The last event that was waited for in vain."""
        self.refusal: str | None = None
        """Why the last event could not be written, None if it was."""
        self.is_unfinished: bool | None = None
        """The journal's last launch was not ended in order: power, or a kill of everything. None while that is not known."""
        # A daemon: it may be stuck in a dead mount when the supervisor has to end.
        threading.Thread(target=self._write, name="ridethrough-pen", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """The run directory is known."""
        return self._is_open.is_set()

    def open(self, journal: Journal) -> None:
        """Events go to this journal from now on, those that waited first."""
        self._journal = journal
        self._is_open.set()

    def note(self, kind: str, **data: Any) -> bool:
        """The event is on stderr and, if True is returned, in the journal."""
        echo(kind, data)
        done = threading.Event()
        try:
            self._queue.put_nowait((kind, data, done))
        except queue.Full:
            self.refusal = "the journal has not taken an event for a long time"
            return False
        # While one that was given up is still not written, those behind it are not waited for: several in a round would add up.
        if not self.is_open or not (self._given_up is None or self._given_up.is_set()):
            return False
        if not done.wait(_WAIT_S):
            self._given_up = done
            return False
        return self.refusal is None

    def _write(self) -> None:
        self._is_open.wait()
        assert self._journal is not None
        refused: collections.deque[tuple[str, dict[str, Any]]] = collections.deque(maxlen=_REFUSED)
        while True:
            done = None
            with contextlib.suppress(queue.Empty):
                kind, data, done = self._queue.get(timeout=_RETRY_S if refused else None)
                refused.append((kind, data))
            try:
                if self.is_unfinished is None:  # before our own first record; storage may come minutes after us
                    self.is_unfinished = self._journal.was_cut_short(_AT_WORK, _ENDED)
                while refused:
                    self._journal.append(refused[0][0], **refused[0][1])
                    refused.popleft()
                self.refusal = None
            except (RideThroughError, OSError) as error:
                self.refusal = str(error)
            if done is not None:
                done.set()  # a refusal is an answer too: nobody need wait for it

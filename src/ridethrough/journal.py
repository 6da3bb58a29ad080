"""One append-only log of what happened and what was decided, a checksum a record.

A line is JSON and ends in its own checksum::

    {"at":"…Z","boot":"…","data":{…},"kind":"checkpoint.durable","mono_s":12.3,"seq":7,"writer":"persister-812","sum":"…"}

Order is the order in the file. A torn tail is normal after a power cut: reading stops there and
says so, and the next writer starts on a new line. Strings are redacted on the way in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ridethrough.errors import FormatTooNew
from ridethrough.format import layout
from ridethrough.redact import redact
from ridethrough.seam.clock import Clock, boot_id
from ridethrough.seam.fs import FileSystem
from ridethrough.types import FORMAT

MAX_BYTES = 1 << 30
_TAIL_BYTES = 256 << 10
_SUM = ',"sum":"'
_FORMAT_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One record. `mono_s` compares only with events of the same `boot`."""

    kind: str
    at: str
    mono_s: float
    boot: str
    seq: int
    writer: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a journal says, and what of it could not be read."""

    events: tuple[Event, ...]
    damaged_lines: tuple[int, ...]
    """Numbers (from 1) of lines whose checksum does not hold."""
    is_tail_torn: bool
    """The last line was cut short, as a power cut leaves it."""

    def of(self, *kinds: str) -> tuple[Event, ...]:
        """Events of these kinds, oldest first."""
        return tuple(event for event in self.events if event.kind in kinds)


def encode_event(event: Event) -> bytes:
    """The line, with its line end."""
    text = json.dumps(
        {
            "format": FORMAT,
            "kind": event.kind,
            "at": event.at,
            "mono_s": event.mono_s,
            "boot": event.boot,
            "seq": event.seq,
            "writer": event.writer,
            "data": event.data,
        },
        sort_keys=True,
        separators=(",", ":"),
        allow_nan=False,
        default=str,
    )
    return f'{text[:-1]}{_SUM}{xxhash.xxh3_64_hexdigest(text[:-1].encode())}"}}\n'.encode()


def decode_event(line: bytes, *, path: str = "journal") -> Event | None:
    """The event of a line, or None if its checksum does not hold.

    Raises:
        FormatTooNew: Intact, but of a later format.
    """
    body, separator, tail = line.rpartition(_SUM.encode())
    if not separator or tail != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
        return None
    try:
        fields = json.loads(body + b"}")
        if type(fields["format"]) is not int or not 1 <= fields["format"] < _FORMAT_LIMIT:
            return None
        if fields["format"] > FORMAT:
            raise FormatTooNew(path=path, found=fields["format"], known=FORMAT)
        return Event(
            kind=str(fields["kind"]),
            at=str(fields["at"]),
            mono_s=float(fields["mono_s"]),
            boot=str(fields["boot"]),
            seq=int(fields["seq"]),
            writer=str(fields["writer"]),
            data=dict(fields["data"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def decode(data: bytes, *, path: str = "journal") -> History:
    """Everything readable in a journal's bytes."""
    lines = data.split(b"\n")
    is_torn = bool(lines[-1])
    events: list[Event] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        event = decode_event(line, path=path)
        if event is not None:
            events.append(event)
            is_torn = is_torn and number != len(lines)
        elif number != len(lines):
            damaged.append(number)
    return History(events=tuple(events), damaged_lines=tuple(damaged), is_tail_torn=is_torn)


def read(fs: FileSystem, paths: Iterable[str]) -> History:
    """The history in one or several files; an absent file is an empty one."""
    events: list[Event] = []
    damaged: list[int] = []
    is_torn = False
    for path in paths:
        try:
            found = decode(fs.read(path, max_bytes=MAX_BYTES), path=path)
        except FileNotFoundError:
            continue
        events.extend(found.events)
        damaged.extend(found.damaged_lines)
        is_torn = is_torn or found.is_tail_torn
    return History(events=tuple(events), damaged_lines=tuple(damaged), is_tail_torn=is_torn)


def _finite(value: Any) -> Any:
    """The same JSON value with NaN and infinities as text: a diverged loss must not stop its own record."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


class Journal:
    """The writing end, one per process. `append` returns after the record is durable."""

    def __init__(self, fs: FileSystem, clock: Clock, path: str, *, role: str) -> None:
        self.path = path
        self._fs = fs
        self._clock = clock
        self._writer = f"{role}-{os.getpid()}"
        self._seq = 0
        self._boot = boot_id()

    def append(self, kind: str, /, **data: Any) -> Event:
        """The event is in the journal and survives power loss.

        Raises:
            StorageError: It is not; nothing may be acted on as if it were.
            FileNotFoundError: There is no run to keep a journal of.
        """
        event = Event(
            kind=kind,
            at=self._clock.now_at().isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            mono_s=round(self._clock.monotonic_s(), 6),
            boot=self._boot,
            seq=self._seq,
            writer=self._writer,
            data=_finite(redact(data)),
        )
        # Every time: a full disk may have torn our own last record, or another process's.
        line = self._repair_tail() + encode_event(event)
        try:
            self._fs.append(self.path, line)
        except FileNotFoundError:
            # Somebody has removed the directory; the run goes on, and so does its record. Not so where the run's marker is
            # missing, too: that is the mount point of a disk that is not there, or a run that is not there yet.
            self._require_run()
            directory = os.path.dirname(self.path)
            self._fs.make_dir(directory)
            self._fs.sync_dir(os.path.dirname(directory))  # or a cut takes the new journal with it
            self._fs.append(self.path, line)
        self._seq += 1
        return event

    def was_cut_short(self, at_work: frozenset[str], ended: frozenset[str]) -> bool:
        """The last event of either set that this file has is one of work, and not of its end.

        Raises:
            StorageError: It cannot be read.
            FileNotFoundError: There is no run: a disk that is not mounted yet, or a run that has not begun.
        """
        try:
            size = self._fs.stat(self.path).size_bytes
        except FileNotFoundError:
            self._require_run()
            return False
        tail = bytearray(min(size, _TAIL_BYTES))
        got = self._fs.read_into(self.path, memoryview(tail), offset=size - len(tail))
        for line in reversed(bytes(tail[:got]).splitlines()):
            event = decode_event(line, path=self.path)
            if event is not None and event.kind in at_work | ended:
                return event.kind in at_work
        return False

    def _require_run(self) -> None:
        directory = os.path.dirname(os.path.dirname(self.path))
        self._fs.stat(os.path.join(directory, layout.RUN))

    def _repair_tail(self) -> bytes:
        """A line end if the file was torn in mid-record, so that the torn record damages only itself."""
        try:
            size = self._fs.stat(self.path).size_bytes
        except FileNotFoundError:
            return b""
        last = bytearray(1)
        if size and self._fs.read_into(self.path, memoryview(last), offset=size - 1) and last != b"\n":
            return b"\n"
        return b""

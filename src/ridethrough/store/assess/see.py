"""When another node sees what this one made: both ends of the conversation.

The same program is started on the other node by ssh and told what to look for, a line of JSON at a time. All times are
of the asking node's clock: the nodes' clocks need not agree, and a figure includes one answer's way (`answer_s`).

The asking side's order is what matters: a network file system remembers for a while that a name was not there, what a
directory held, and what a file contained.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TextIO

from ridethrough.errors import RideThroughError, StorageError, UsageError
from ridethrough.format import layout
from ridethrough.seam.children import Conversation
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.seam.place import mount_of
from ridethrough.store.assess.findings import Seen

WAIT_S = 15.0
"""For one thing to be seen; a cached answer that lives longer is as bad as one that never ends."""
_CONNECT_S = 20.0
_SLACK_S = 10.0
LIMIT_S = _CONNECT_S + 5 * (WAIT_S + _SLACK_S)
_POLL_S = 0.01
_CONTENT_BYTES = 8192
_RACES_COUNT = 50


class _Failed(Exception):
    pass


def ask_peer(fs: FileSystem, own: str, host: str, argv: tuple[str, ...]) -> dict[str, Any]:
    """What the other node saw, as the fields of `Seen`.

    Args:
        fs: Where this node makes things.
        own: The check's own directory.
        host: The other node.
        argv: The command that starts a program there, up to its name.
    """
    sub = os.path.join(own, f"peer-{hashlib.sha256(host.encode()).hexdigest()[:8]}")
    fs.make_dir(sub)
    seen = Seen(host=host, error=None)
    try:
        with Conversation([*argv, "storage", "see", shlex.quote(sub)]) as peer:
            found = _converse(fs, sub, _Asker(peer))
    except OSError as error:
        return asdict(seen) | {"error": f"{argv[0]}: {os.strerror(error.errno or 0)}"}
    except _Failed as error:
        return asdict(seen) | {"error": str(error)}
    return asdict(seen) | found


class _Asker:
    """The asking end."""

    def __init__(self, peer: Conversation) -> None:
        self._peer = peer

    def ask(self, timeout_s: float, **question: Any) -> dict[str, Any]:
        self._peer.say(json.dumps(question))
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        line = self._peer.hear(timeout_s)
        if line is None:
            raise _Failed(self._peer.complaint() or f"no answer within {timeout_s:.0f} s")
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise _Failed(f"it answered {line[:60]!r}: does its shell print something at login?")
        if "error" in said:
            raise _Failed(str(said["error"]))
        return said


def _converse(fs: FileSystem, sub: str, asker: _Asker) -> dict[str, Any]:
    clock = SystemClock()
    hello = asker.ask(_CONNECT_S, op="hello")
    before_s = clock.monotonic_s()
    asker.ask(_SLACK_S, op="hello")
    found: dict[str, Any] = {"mount": hello["mount"], "answer_s": clock.monotonic_s() - before_s, "torn_count": 0}

    def sight(field: str, name: str, make: Callable[[], str], *, is_watched: bool, op: str = "see", old: str | None = None) -> None:
        content = make() if not is_watched else _digest(_content(name, 0))
        made_s = clock.monotonic_s()
        asker.ask(_SLACK_S, op=op, name=name, digest=content, old=old, wait_s=WAIT_S)
        if is_watched:
            make()
            made_s = clock.monotonic_s()
        said = asker.answer(WAIT_S + _SLACK_S)
        found[field] = clock.monotonic_s() - made_s if said["is_seen"] else None
        found["torn_count"] += said["torn_count"]

    sight("fresh_s", "fresh", lambda: _publish(fs, sub, "fresh", 0), is_watched=False)
    if found["fresh_s"] is None:
        return found  # another directory, most likely: whatever else is asked takes as long and says the same
    sight("watched_s", "watched", lambda: _publish(fs, sub, "watched", 0), is_watched=True)
    sight("listed_s", "listed", lambda: _publish(fs, sub, "listed", 0), is_watched=True, op="list")
    old = _digest(_content("fresh", 0))
    sight("replaced_s", "fresh", lambda: _publish(fs, sub, "fresh", 1), is_watched=False, old=old)
    asker.ask(_SLACK_S, op="race")
    ours, refused = _race(fs, sub)
    said = asker.answer(WAIT_S + _SLACK_S)
    theirs, refused = set(said["won"]), refused or said["refused"]
    if refused:
        return found | {"race_refused": refused}  # whose names those were that were not tried nobody can say
    winners = [(race in ours) + (race in theirs) for race in range(_RACES_COUNT)]
    return found | {"races_count": _RACES_COUNT, "won_by_none_count": winners.count(0), "won_by_several_count": winners.count(2)}


def _content(name: str, version: int) -> bytes:
    return f"{name}{version}".encode().ljust(_CONTENT_BYTES, b"%d" % version)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _publish(fs: FileSystem, directory: str, name: str, version: int) -> str:
    """The file is there as a seal is published; returns the digest of what it holds."""
    path, data = os.path.join(directory, name), _content(name, version)
    with contextlib.closing(fs.create(f"{path}.new{version}", 0)) as writer:
        writer.write(data)
        writer.sync()  # a client may otherwise rename what its server has not got yet: then a torn file is ours, not the place's
    fs.rename(f"{path}.new{version}", path)
    return _digest(data)


def _race(fs: FileSystem, directory: str) -> tuple[set[int], str | None]:
    """The names that this node made first; and what a create answered that neither won nor lost."""
    won: set[int] = set()
    for race in range(_RACES_COUNT):
        try:
            fs.create(os.path.join(directory, f"race{race}"), 0).close()
        except FileExistsError:
            continue
        except StorageError as error:
            return won, str(error.fields["detail"])
        won.add(race)
    return won, None


# -- the other end -------------------------------------------------------------------------------------------------------


def answer(directory: str, questions: TextIO, say: Callable[[dict[str, Any]], None]) -> None:
    """Every question about the directory has its answer; returns at the end of input.

    Raises:
        UsageError: It is not the directory of a check: this program looks at nothing else.
    """
    if layout.parse_check(os.path.basename(os.path.dirname(directory))) is None:
        raise UsageError(detail=f"{directory} is not made by a storage check", hint="ridethrough storage check --help")
    fs = PosixFileSystem()
    for line in questions:
        try:
            for said in _answers(fs, directory, json.loads(line)):
                say(said)
        except (RideThroughError, OSError) as error:
            say({"error": str(error)})


def _answers(fs: FileSystem, directory: str, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    op = question["op"]
    if op == "hello":
        mount = mount_of(directory)
        yield {"mount": f"{mount.file_system} {mount.source}" if mount else None}
        return
    yield {"looking": True}
    name = str(question.get("name"))
    if op == "race":
        won, refused = _race(fs, directory)
        yield {"won": sorted(won), "refused": refused}
    elif op == "list":
        yield {"is_seen": _watch(question["wait_s"], lambda: name in _names(fs, directory)), "torn_count": 0}
    else:
        torn = 0

        def is_seen() -> bool:
            nonlocal torn
            found = _read(fs, os.path.join(directory, name))
            torn += found not in (None, question["digest"], question["old"])
            return found is not None and found == str(question["digest"])

        yield {"is_seen": _watch(question["wait_s"], is_seen), "torn_count": torn}


def _watch(wait_s: float, is_seen: Callable[[], bool]) -> bool:
    clock = SystemClock()
    end_s = clock.monotonic_s() + wait_s
    while not is_seen():
        if clock.monotonic_s() > end_s:
            return False
        clock.sleep(_POLL_S)
    return True


def _names(fs: FileSystem, directory: str) -> list[str]:
    try:
        return fs.list_dir(directory)
    except FileNotFoundError:
        return []


def _read(fs: FileSystem, path: str) -> str | None:
    try:
        return _digest(fs.read(path, max_bytes=1 << 20))
    except FileNotFoundError:
        return None

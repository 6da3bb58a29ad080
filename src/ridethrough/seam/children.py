"""Children that answer within a time, whatever the storage they ask does.

A call into a dead mount never comes back. A child that makes it can be killed, or left to the kernel, and whoever
waits goes on. Children are forked, so this is for commands: programs with other threads must not call it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ridethrough.errors import Internal, RideThroughError, StorageError, StorageUnreachable, all_errors
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.process import die_with_parent

_TICK_S = 0.1
_LAST_WAIT_S = 0.2
"""For a killed child to be gone; one that the kernel holds in a call is not waited for longer."""


@dataclass(slots=True)
class _Child:
    pid: int
    pipe: int
    data: bytes = b""
    has_ended: bool = False


def ask_children(functions: Sequence[Callable[[], Any]], *, limit_s: float, doing: str, path: str, tick: Callable[[], None]) -> list[Any]:
    """What each function returned, each run in a child of its own, all at once.

    Args:
        functions: Each returns what JSON can say.
        limit_s: All together; whoever has not answered then is killed.
        doing: For the error.
        path: For the error.
        tick: Called ten times a second while they run.

    Raises:
        StorageUnreachable: One did not answer in time.
        RideThroughError: One raised it; an OSError becomes a StorageError.
        Internal: One ended without an answer.
    """
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + limit_s
    children: list[_Child] = []
    try:
        for function in functions:
            children.append(_fork(function, [child.pipe for child in children]))
        open_pipes = {child.pipe: child for child in children}
        while open_pipes and clock.monotonic_s() < deadline_s:
            for pipe in _readable(list(open_pipes), _TICK_S):
                data = os.read(pipe, 1 << 16)
                open_pipes[pipe].data += data
                if not data:
                    open_pipes.pop(pipe).has_ended = True
            tick()
        if open_pipes:
            raise StorageUnreachable(detail=f"no answer within {limit_s:.0f} s on {doing}", path=path)
    finally:
        _end(children)
    return [_answer(child, doing) for child in children]


def _fork(function: Callable[[], Any], other_pipes: Sequence[int]) -> _Child:
    reading, writing = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()  # what is still in the buffer would be printed by the child as well
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(pid=pid, pipe=reading)
    _be_child(function, writing, parent, (*other_pipes, reading))


def _be_child(function: Callable[[], Any], pipe: int, parent: int, inherited: Sequence[int]) -> NoReturn:
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means, and kills
        for descriptor in inherited:
            os.close(descriptor)  # a pipe is at its end when its own child closes it, and not when the last of all does
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            # Whoever reads the parent's output to its end would wait for a child that the kernel holds in a dead mount.
            os.dup2(nowhere, descriptor)
        try:
            said: dict[str, Any] = {"value": function()}
        except RideThroughError as error:
            said = {"error": [type(error).__name__, error.fields]}
        except OSError as error:
            fields = {"detail": os.strerror(error.errno or 0), "path": os.fsdecode(error.filename or "?")}
            said = {"error": [StorageError.__name__, fields]}
        except Exception as error:  # noqa: BLE001  a bug of ours, shown by the parent
            said = {"error": [Internal.__name__, {"detail": f"in a helper: {type(error).__name__}: {error}"}]}
        with open(pipe, "wb") as file:
            file.write(json.dumps(said).encode())
    finally:
        os._exit(0)  # nothing of the parent's may run here: no second clean-up, no flush


def _end(children: Sequence[_Child]) -> None:
    clock = SystemClock()
    for child in children:
        os.close(child.pipe)
        if not child.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    give_up_s = clock.monotonic_s() + _LAST_WAIT_S
    for child in children:
        while os.waitpid(child.pid, os.WNOHANG)[0] == 0 and clock.monotonic_s() < give_up_s:
            clock.sleep(0.002)


def _answer(child: _Child, doing: str) -> Any:
    if not child.data:
        raise Internal(detail=f"a helper process ended without an answer on {doing}")
    said = json.loads(child.data)
    if "error" in said:
        name, fields = said["error"]
        raise next(kind for kind in all_errors() if kind.__name__ == name)(**fields)
    return said["value"]


def _readable(descriptors: Sequence[int], wait_s: float) -> list[int]:
    """Those with something to read, or at their end. Not `select`, which refuses the thousandth descriptor of a process."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(wait_s * 1000)]


class Conversation:
    """A program that is spoken to line by line. Context manager: it has ended afterwards."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the conversation
        try:
            self._program = subprocess.Popen(list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0)
        except OSError:
            self._errors.close()
            raise
        self._buffer = b""

    def say(self, line: str) -> None:
        """The line is on its way; a program that has ended is noticed by `hear`."""
        assert self._program.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._program.stdin.write(line.encode() + b"\n")

    def hear(self, timeout_s: float) -> str | None:
        """The next line; None if there is none in time, or no more."""
        assert self._program.stdout is not None
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + timeout_s
        while b"\n" not in self._buffer:
            left_s = deadline_s - clock.monotonic_s()
            if left_s <= 0 or not _readable([self._program.stdout.fileno()], left_s):
                return None
            data = os.read(self._program.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")

    def complaint(self) -> str:
        """The last line of its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """It has seen the end of its input, and is gone."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.close()
        try:
            self._program.wait(1.0)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
        self._program.stdout.close()
        self._errors.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

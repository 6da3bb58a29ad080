"""The command's standard error: passed on unchanged, and its end kept as evidence."""

from __future__ import annotations

import contextlib
import os
import threading

from ridethrough.errors import KeeperGone
from ridethrough.snapshot.link import KeeperLink

_READ_BYTES = 64 << 10
_TAIL_BYTES = 64 << 10


class Relay:
    """Reads the pipe that the keeper holds, in a thread; a restarted supervisor reads on where the last one ended."""

    def __init__(self, link: KeeperLink) -> None:
        self._link = link
        self._tail = bytearray()
        self._thread: threading.Thread | None = None

    def follow(self, launch: int) -> None:
        """Output of this launch goes to our stderr and to the tail, which starts anew."""
        try:
            descriptor = self._link.descriptor("stderr")
        except KeeperGone:
            return  # a library's keeper has no command
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._copy, args=(descriptor, self._tail), name=f"ridethrough-relay-{launch}", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The last output of the command, after waiting a moment for what is still in the pipe."""
        if self._thread is not None:
            self._thread.join(1.0)
        return bytes(self._tail).decode("utf-8", "replace")

    @staticmethod
    def _copy(descriptor: int, tail: bytearray) -> None:
        try:
            while True:
                data = os.read(descriptor, _READ_BYTES)
                if not data:
                    return
                # Bounded in bytes and not in reads: Python prints a traceback in very many small writes.
                tail += data
                del tail[:-_TAIL_BYTES]
                with contextlib.suppress(OSError):  # nobody reads our stderr any more; the tail is still wanted
                    os.write(2, data)
        finally:
            os.close(descriptor)

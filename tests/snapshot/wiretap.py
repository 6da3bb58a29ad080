"""Somebody between two couriers: hears everything, and changes what goes to the holder if told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Wiretap:
    """Passes connections on to a port of this machine.

    Args:
        port: Of the holder.
        change: What becomes of bytes on their way to it: gets the offset within the connection and the bytes.
    """

    def __init__(self, port: int, change: Callable[[int, bytes], bytes] = lambda offset, data: data) -> None:
        self._target = port
        self.change = change
        self.heard: list[bytearray] = []
        """What was sent to the holder, by connection."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self.heard.append(bytearray())
                self._sockets += [near, far]
                for source, target, record in ((near, far, self.heard[-1]), (far, near, None)):
                    thread = threading.Thread(target=self._pump, args=(source, target, record), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
        with contextlib.suppress(OSError):  # closed by a side
            while data := source.recv(1 << 16):
                if record is not None:
                    data, offset = self.change(len(record), data), len(record)
                    record[offset:] = data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """All connections are broken; new ones can be made."""
        sockets, self._sockets = self._sockets, []
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        sockets = list(self._sockets)
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for end in sockets:
            end.close()

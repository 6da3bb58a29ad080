"""TCP between nodes: connections that never wait, so that a peer that has gone dark costs nobody else anything.

What goes wrong with a connection is not an exception but the end of that connection, with the reason kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from ridethrough.errors import UsageError
from ridethrough.seam.udp import interface_address

_SILENCE_S = 3
"""A peer that acknowledges nothing for so long is gone: the kernel's own patience is a quarter of an hour."""
_READ_BYTES = 256 << 10
_PIECES = 64
_BACKLOG = 128


def listen(port: int, interface: str | None = None) -> socket.socket:
    """A listening socket, on every address unless an interface (its name or address) is given; port 0 is any free one.

    Raises:
        UsageError: The port is taken, or there is no such interface.
    """
    address = interface_address(interface) if interface else None
    try:
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(detail=f"cannot listen on TCP port {port} of {address or 'this node'}: {_reason(error)}") from error
    server.setblocking(False)
    return server


def accept(server: socket.socket) -> Connection | None:
    """The next connection that somebody has made, None if there is none (left)."""
    try:
        accepted, address = server.accept()
    except OSError:
        return None  # none is waiting, or it has gone again
    return Connection(accepted, peer=str(address[0]))


class Lookup:
    """The addresses behind a host name, found beside us: a name server that is dark must not hold up anybody."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.is_done = False
        self.found: list[tuple[Any, ...]] = []
        self.reason = ""
        self._look_up(socket.AI_NUMERICHOST)
        if not self.found:
            self.is_done = False
            threading.Thread(target=self._look_up, args=(0,), name="ridethrough-lookup", daemon=True).start()

    def _look_up(self, flags: int) -> None:
        try:
            self.found = list(socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags))
        except (OSError, UnicodeError) as error:
            self.reason = f"no address for {self._host}: {error}"
        self.is_done = True


def connect(candidate: tuple[Any, ...], interface: str | None = None) -> Connection:
    """A connection being made to an address that `Lookup` has found, from the interface if one is given."""
    family, kind, protocol, _, address = candidate
    made = socket.socket(family, kind, protocol)
    connection = Connection(made, peer=str(address[0]), is_connecting=True)
    try:
        if interface:
            source = interface_address(interface)
            if (":" in source) == (family == socket.AF_INET6):
                made.bind((source, 0))
        made.connect(address)
    except BlockingIOError:
        pass
    except (OSError, UsageError) as error:
        connection.close(_reason(error) if isinstance(error, OSError) else str(error))
    return connection


class Connection:
    """One connection. What is sent is queued until it can leave; what has come is taken when asked for."""

    def __init__(self, owned: socket.socket, *, peer: str, is_connecting: bool = False) -> None:
        self._socket = owned
        self._outbox: deque[memoryview] = deque()
        self.peer = peer
        self.is_connecting = is_connecting
        self.is_open = True
        self.reason = ""
        """Why it was closed."""
        owned.setblocking(False)
        with contextlib.suppress(OSError):  # closed by the other side already: the first use will tell
            owned.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            owned.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            owned.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            owned.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            owned.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S)
            owned.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)

    def fileno(self) -> int:
        """For `wait`."""
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        """Something has not left yet."""
        return bool(self._outbox)

    def close(self, reason: str = "closed") -> None:
        """It is closed; the first reason counts. Idempotent."""
        if self.is_open:
            self.is_open = False
            self.reason = reason
            self._outbox.clear()
            self._socket.close()

    def queue(self, pieces: Iterable[bytes]) -> None:
        """The bytes leave with the next `flush`, as far as the peer takes them."""
        if self.is_open:
            self._outbox.extend(memoryview(piece) for piece in pieces if piece)

    def flush(self) -> None:
        """What the kernel takes now is on its way."""
        while self._outbox and self.is_open and self._is_connected():
            try:
                sent = self._socket.sendmsg([*self._outbox][:_PIECES])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.close(_reason(error))
                return
            while sent:
                first = self._outbox.popleft()
                if sent < len(first):
                    self._outbox.appendleft(first[sent:])
                sent -= min(sent, len(first))

    def receive(self, at_most_bytes: int) -> bytes:
        """What has come, b"" if nothing has."""
        if not self.is_open or not self._is_connected():
            return b""
        try:
            data = self._socket.recv(min(at_most_bytes, _READ_BYTES))
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            self.close(_reason(error))
            return b""
        if not data:
            self.close("the other side has hung up")
        return data

    def _is_connected(self) -> bool:
        if self.is_connecting:
            failure = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                self.close(_reason(OSError(failure, os.strerror(failure))))
            else:
                with contextlib.suppress(OSError):  # not connected yet
                    self._socket.getpeername()
                    self.is_connecting = False
        return self.is_open and not self.is_connecting


def wait(connections: Iterable[Connection], server: socket.socket | None, *, timeout_s: float) -> set[int]:
    """The descriptors on which something can be done, as soon as there is one."""
    poll = select.poll()
    if server is not None:
        poll.register(server, select.POLLIN)
    for connection in connections:
        if connection.is_open:
            needs_out = connection.is_connecting or connection.is_sending
            poll.register(connection, select.POLLIN | (select.POLLOUT if needs_out else 0))
    return {descriptor for descriptor, _ in poll.poll(max(timeout_s, 0.0) * 1000)}


def _reason(error: OSError) -> str:
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"

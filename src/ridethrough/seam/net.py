"""Local sockets that carry JSON messages and file descriptors.

Used between the keeper and everybody else on the node. SOCK_SEQPACKET keeps message borders
and tells at once when the other side has died.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from ridethrough.errors import KeeperGone

_MESSAGE_BYTES = 128 << 10
_MAX_DESCRIPTORS = 16


@contextlib.contextmanager
def _short_path(path: str) -> Iterator[str]:
    """A name for `path` that fits the 107 bytes of a socket address, whatever its directory is called."""
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, usable by this user only; a leftover of a dead process is replaced."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short_path(path) as short:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        server.bind(short)
    os.chmod(path, 0o600)
    server.listen(512)
    return server


def connect(path: str, *, timeout_s: float) -> socket.socket:
    """A connection to the process that listens at `path`.

    Raises:
        KeeperGone: Nobody listens there.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(timeout_s)
    try:
        with _short_path(path) as short:
            client.connect(short)
    except OSError as error:
        client.close()
        raise KeeperGone(detail=f"{errno.errorcode.get(error.errno or 0, error)} at {path}") from error
    return client


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """The message and copies of the descriptors are on their way.

    Raises:
        KeeperGone: The other side is dead or does not read.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    try:
        if descriptors:
            socket.send_fds(connection, [data], list(descriptors))
        else:
            connection.sendall(data)
    except OSError as error:
        raise KeeperGone(detail=f"send failed: {error}") from error


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and the descriptors that came with it, which the caller now owns.

    Raises:
        KeeperGone: The other side has died or did not answer in time.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
    except OSError as error:
        raise KeeperGone(detail=f"no answer: {error}") from error
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not data:
        raise KeeperGone(detail="connection closed")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise KeeperGone(detail="answer is not JSON") from error
    if not isinstance(message, dict):
        raise KeeperGone(detail="answer is not an object")
    return message, descriptors

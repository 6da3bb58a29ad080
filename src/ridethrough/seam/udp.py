"""Datagrams between nodes: a socket that never waits and never complains about the network.

A heartbeat that cannot be sent is a heartbeat that is lost; the loop that sends it must go on. So no route, a
refused port, a firewall or a full buffer are not errors here, they are counted. Host names are looked up beside the
loop, since an answer of the name service may take half a minute on the day it matters.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ridethrough.errors import UsageError

_BUFFER_BYTES = 4 << 20
"""Beats of a thousand nodes over two seconds of standing still (the kernel counts about 768 bytes a small packet)."""
_CUT_OFF_BYTES = 16 << 10
"""Well above any packet of ours, so that what was cut off is seen to be too large."""
_AGAIN_S = 30.0
"""A known name is looked up again this often: a restarted container keeps its name and gets another address."""
_RETRY_S = 1.0
_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9


class Datagrams(Protocol):
    """Packets to and from other nodes; each arrives whole, once, twice or never."""

    @property
    def port(self) -> int:
        """Where this end listens."""

    def send(self, data: bytes, host: str, port: int) -> None:
        """The packet is on its way or lost. Never waits; no state of the network is an error."""

    def receive(self) -> bytes | None:
        """The next packet that has arrived, huge ones cut off; None: there is none now."""

    def close(self) -> None:
        """The port is free again."""


class UdpSocket:
    """The real thing, IPv4 and IPv6.

    Args:
        port: To listen on; 0 takes any that is free.
        interface: Name of an interface, or an address of this host; None listens on all.
        resolve: Looks a host name up; the name service unless given.

    Raises:
        UsageError: The port is taken, or this host has no such interface or address.
    """

    def __init__(self, *, port: int = 0, interface: str | None = None, resolve: Callable[[str, int], str | None] | None = None) -> None:
        self._socket = _bind(port, interface)
        self._names = _Names(self._socket, resolve or _resolve)
        self.failures: Counter[str] = Counter()
        """Packets that did not get out, by the reason the system gave."""

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def send(self, data: bytes, host: str, port: int) -> None:
        address = self._names.known.get(host) or self._names.learn(host)
        if address is None:
            self.failures["name not resolved"] += 1
            return
        try:
            self._socket.sendto(data, (address, port))
        except OSError as error:
            # Whatever the system says, the receiver misses one packet, and the loop that sends must go on.
            self.failures[_reason(error)] += 1

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(_CUT_OFF_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            self.failures[_reason(error)] += 1
            return None

    def close(self) -> None:
        self._names.close()
        self._socket.close()


def interface_address(interface: str) -> str:
    """The address to bind and to announce for an interface given by name or address: IPv4 if it has one.

    Raises:
        UsageError: This host has no such interface, or it has no address.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            # Scope 20 is link-local: of no use to a node that does not know through which link.
            if name == interface and scope != "20":
                return str(ipaddress.IPv6Address(int(digits, 16)))
    raise UsageError(detail=f"this host has no interface {interface!r} with an address: set [peers] interface to a name or address of `ip address`")


def reachable_address(towards: str) -> str:
    """The address of this host from which packets to `towards` (host name or address) go out.

    May wait for the name service.

    Raises:
        UsageError: The name is unknown or there is no route.
    """
    try:
        found = socket.getaddrinfo(towards, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(detail=f"no address of node {towards!r} is known ({error}): set its address in [nodes]") from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        # Connecting a datagram socket sends nothing; it only asks for the route.
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                failure = error
    raise UsageError(detail=f"no route to {towards!r} ({failure}): set [peers] interface")


def _bind(port: int, interface: str | None) -> socket.socket:
    address = interface_address(interface) if interface else None
    if address is None:
        try:
            bound = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            address = "::"
        except OSError:  # a kernel without IPv6
            bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            address = "0.0.0.0"  # noqa: S104 - all interfaces is what was asked for; packets without the key are dropped
    else:
        bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        bound.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    bound.setblocking(False)
    try:
        bound.bind((address, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(detail=f"this host has no address {address}: set [peers] interface") from error
        raise UsageError(detail=f"UDP port {port} of {address} cannot be used ({_reason(error)}): set [peers] port, 0 for any free one") from error
    return bound


def _reason(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


def _resolve(host: str, family: int) -> str | None:
    """Numeric address of the name in that family (0: whichever the system puts first), or None; may take long."""
    try:
        return str(socket.getaddrinfo(host, None, family=family, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None


class _Names:
    """Numeric addresses by host, as the socket takes them."""

    def __init__(self, bound: socket.socket, resolve: Callable[[str, int], str | None]) -> None:
        self.known: dict[str, str] = {}
        self._is_both = bound.family == socket.AF_INET6 and not bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        self._family = 0 if self._is_both else int(bound.family)
        self._resolve = resolve
        self._asked: set[str] = set()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def learn(self, host: str) -> str | None:
        """The address if it is written in the host itself; a name is looked up beside us and known later."""
        if host in self._asked:
            return None
        try:
            self.known[host] = self._numeric(host)
        except ValueError:
            self._look_up(host)
            return None
        return self.known[host]

    def _numeric(self, address: str) -> str:
        number = ipaddress.ip_address(address)
        # A socket for both families takes an IPv4 address inside an IPv6 one.
        return f"::ffff:{number}" if self._is_both and number.version == 4 else str(number)

    def _look_up(self, host: str) -> None:
        self._asked.add(host)
        self._queue.put(host)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="ridethrough-names", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        due_s: dict[str, float] = {}
        while True:
            pause_s = max(min(due_s.values()) - time.monotonic(), 0.0) if due_s else None
            try:
                # New names go first: a known one still has its old address.
                host = self._queue.get(timeout=pause_s)
            except queue.Empty:
                host = min(due_s, key=lambda name: due_s[name])
            if host is None:
                return
            found = self._resolve(host, self._family)
            if found is not None:
                self.known[host] = self._numeric(found)
            due_s[host] = time.monotonic() + (_RETRY_S if found is None else _AGAIN_S)

    def close(self) -> None:
        """The thread ends when it has its current answer."""
        if self._thread is not None:
            self._queue.put(None)

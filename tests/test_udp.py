from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridethrough.errors import UsageError
from ridethrough.seam import udp
from ridethrough.seam.udp import Datagrams, UdpSocket, interface_address, reachable_address
from ridethrough.testing import FakeClock
from ridethrough.testing.network import FakeNetwork

_IPV6 = Path("/proc/net/if_inet6")
needs_ipv6 = pytest.mark.skipif(not _IPV6.exists() or "00000000000000000000000000000001" not in _IPV6.read_text(), reason="this host has no ::1")
Pair = tuple[Datagrams, Datagrams, str]


def until(claim: Callable[[], object]) -> None:
    """The claim becomes true within 10 s."""
    deadline_s = time.monotonic() + 10
    while not claim():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.fixture(params=["127.0.0.1", pytest.param("::1", marks=needs_ipv6), "fake"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two sockets that reach each other, and the host of both."""
    host = request.param
    if host == "fake":
        network = FakeNetwork(FakeClock())
        yield network.socket("fake"), network.socket("fake"), host
        return
    first, second = UdpSocket(interface=host), UdpSocket(interface=host)
    yield first, second, host
    first.close()
    second.close()


def test_packets_arrive_whole_and_in_either_direction(pair: Pair) -> None:
    first, second, host = pair
    first.send(b"one", host, second.port)
    first.send(b"two", host, second.port)
    second.send(b"x" * 9000, host, first.port)
    assert [second.receive(), second.receive(), second.receive()] == [b"one", b"two", None]
    assert first.receive() == b"x" * 9000


def test_an_empty_packet_is_not_nothing(pair: Pair) -> None:
    first, second, host = pair
    first.send(b"", host, second.port)
    assert second.receive() == b""
    assert second.receive() is None


def test_nobody_listening_is_no_error(pair: Pair) -> None:
    first, second, host = pair
    port = second.port
    second.close()
    for _ in range(3):
        first.send(b"anybody?", host, port)
        assert first.receive() is None


def test_a_closed_port_can_be_bound_again() -> None:
    first = UdpSocket(interface="127.0.0.1")
    port = first.port
    first.close()
    again = UdpSocket(port=port, interface="127.0.0.1")
    assert again.port == port
    again.close()


def test_a_huge_packet_is_cut_off_and_seen_to_be_too_large() -> None:
    first, second = UdpSocket(interface="lo"), UdpSocket(interface="lo")
    first.send(b"x" * 60000, "127.0.0.1", second.port)
    assert len(second.receive() or b"") == 16384
    assert second.receive() is None
    first.close()
    second.close()


@needs_ipv6
def test_a_socket_on_all_interfaces_speaks_both_families() -> None:
    both, four, six = UdpSocket(), UdpSocket(interface="127.0.0.1"), UdpSocket(interface="::1")
    four.send(b"from 4", "127.0.0.1", both.port)
    six.send(b"from 6", "::1", both.port)
    assert [both.receive(), both.receive()] == [b"from 4", b"from 6"]
    both.send(b"to 4", "127.0.0.1", four.port)
    both.send(b"to 6", "::1", six.port)
    assert [four.receive(), six.receive()] == [b"to 4", b"to 6"]
    assert not both.failures
    for each in (both, four, six):
        each.close()


def test_a_kernel_without_ipv6_is_served_with_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6")
        return real(family, kind)

    monkeypatch.setattr(udp.socket, "socket", without_ipv6)
    first, second = UdpSocket(), UdpSocket()
    first.send(b"hello", "127.0.0.1", second.port)
    assert second.receive() == b"hello"
    first.close()
    second.close()


def test_a_thousand_nodes_fit_into_the_buffer() -> None:
    first, second = UdpSocket(interface="lo"), UdpSocket(interface="lo")
    allowed_bytes = int(Path("/proc/sys/net/core/rmem_max").read_text())
    assert second._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= min(allowed_bytes, 4 << 20)
    first.close()
    second.close()


# -- what the network does is no error ---------------------------------------------------------------------------------


class Failing:
    """A socket on a host whose network is in trouble."""

    def __init__(self, number: int) -> None:
        self.number = number

    def sendto(self, data: bytes, address: object) -> int:
        raise OSError(self.number, "trouble")

    def recv(self, size: int) -> bytes:
        raise OSError(self.number, "trouble")


@pytest.mark.parametrize("name", ["ENETUNREACH", "EHOSTUNREACH", "ECONNREFUSED", "EPERM", "EAGAIN", "ENOBUFS", "ENETDOWN", "EADDRNOTAVAIL"])
def test_trouble_of_the_network_is_counted_and_not_raised(name: str) -> None:
    end = UdpSocket(interface="lo")
    real, end._socket = end._socket, Failing(getattr(errno, name))  # type: ignore[assignment]
    end.send(b"hello", "127.0.0.1", 9)
    assert end.failures == {name: 1}
    assert end.receive() is None
    real.close()


def test_an_address_of_the_other_family_is_counted_and_not_raised() -> None:
    end = UdpSocket(interface="127.0.0.1")
    end.send(b"hello", "::1", 9)
    assert sum(end.failures.values()) == 1
    end.close()


# -- what a person must set right --------------------------------------------------------------------------------------


def test_a_port_in_use_says_what_to_set() -> None:
    first = UdpSocket(interface="127.0.0.1")
    with pytest.raises(UsageError, match=rf"UDP port {first.port} .*\[peers\] port"):
        UdpSocket(port=first.port, interface="127.0.0.1")
    first.close()


def test_an_interface_that_is_not_there_says_what_to_set() -> None:
    with pytest.raises(UsageError, match=r"no interface 'eth-none' .*\[peers\] interface"):
        UdpSocket(interface="eth-none")


def test_an_address_that_is_not_ours_says_what_to_set() -> None:
    with pytest.raises(UsageError, match=r"no address 203\.0\.113\.7: set \[peers\] interface"):
        UdpSocket(interface="203.0.113.7")


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_name_is_looked_up_without_holding_up_the_sender() -> None:
    is_slow = threading.Event()
    asked: list[str] = []

    def resolve(host: str, family: int) -> str | None:
        asked.append(host)
        is_slow.wait(10)
        return "127.0.0.1"

    first, second = UdpSocket(interface="lo", resolve=resolve), UdpSocket(interface="lo")
    began_s = time.monotonic()
    for _ in range(10):
        first.send(b"lost", "node-7", second.port)
    assert time.monotonic() - began_s < 1
    assert first.failures == {"name not resolved": 10}
    is_slow.set()
    until(lambda: "node-7" in first._names.known)
    first.send(b"hello", "node-7", second.port)
    assert second.receive() == b"hello"
    assert asked == ["node-7"]
    first.close()
    second.close()


def test_a_name_that_does_not_resolve_yet_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "_RETRY_S", 0.01)
    answers = iter([None, None, "127.0.0.1"])
    first = UdpSocket(interface="lo", resolve=lambda host, family: next(answers))
    first.send(b"lost", "node-7", 9)
    until(lambda: first._names.known.get("node-7") == "127.0.0.1")
    first.close()


def test_a_name_that_moves_to_another_address_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "_AGAIN_S", 0.01)
    answers = iter(["127.0.0.1"])
    first = UdpSocket(interface="lo", resolve=lambda host, family: next(answers, "127.0.0.2"))
    first.send(b"lost", "node-7", 9)
    until(lambda: first._names.known.get("node-7") == "127.0.0.2")
    first.close()


def test_an_address_that_was_known_stays_while_the_name_service_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "_AGAIN_S", 0.0)
    monkeypatch.setattr(udp, "_RETRY_S", 0.0)
    asked: list[str] = []
    answers = iter(["127.0.0.1"])

    def resolve(host: str, family: int) -> str | None:
        asked.append(host)
        return next(answers, None)

    first = UdpSocket(interface="lo", resolve=resolve)
    first.send(b"lost", "node-7", 9)
    until(lambda: len(asked) > 3)
    assert first._names.known == {"node-7": "127.0.0.1"}
    first.close()


def test_localhost_is_found_by_the_name_service() -> None:
    first, second = UdpSocket(), UdpSocket()
    first.send(b"lost", "localhost", second.port)
    until(lambda: "localhost" in first._names.known)
    first.send(b"hello", "localhost", second.port)
    until(lambda: second.receive() == b"hello")
    first.close()
    second.close()


# -- own addresses -----------------------------------------------------------------------------------------------------


def test_an_interface_is_given_by_name_or_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("10.1.2.3") == "10.1.2.3"
    assert interface_address("FD00:0::7") == "fd00::7"


@pytest.mark.parametrize(("towards", "own"), [("127.0.0.1", "127.0.0.1"), pytest.param("::1", "::1", marks=needs_ipv6)])
def test_own_address_is_that_of_the_route(towards: str, own: str) -> None:
    assert reachable_address(towards) == own


def test_own_address_towards_a_name_that_nobody_knows_says_what_to_set() -> None:
    with pytest.raises(UsageError, match=r"node 'no-such\.invalid' .*\[nodes\]"):
        reachable_address("no-such.invalid")


def test_no_route_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        raise OSError(errno.ENETUNREACH, "no route")

    monkeypatch.setattr(udp.socket, "socket", type("NoRoute", (socket.socket,), {"connect": connect}))
    with pytest.raises(UsageError, match=r"no route to '10\.9\.9\.9' .*\[peers\] interface"):
        reachable_address("10.9.9.9")

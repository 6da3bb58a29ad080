from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from ridethrough.errors import UsageError
from ridethrough.seam import tcp

PATIENCE_S = 10.0


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def found(host: str, port: int) -> tcp.Lookup:
    lookup = tcp.Lookup(host, port)
    until(lambda: lookup.is_done)
    return lookup


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with tcp.listen(0) as made:
        yield made


@pytest.fixture
def pair(server: socket.socket) -> Iterator[tuple[tcp.Connection, tcp.Connection]]:
    """Both ends of a connection."""
    near = tcp.connect(found("127.0.0.1", server.getsockname()[1]).found[0])
    accepted: list[tcp.Connection | None] = []
    until(lambda: accepted.append(tcp.accept(server)) or accepted[-1])
    far = accepted[-1]
    assert far is not None
    yield near, far
    near.close()
    far.close()


def test_bytes_arrive_in_order_although_the_other_end_takes_them_slowly(pair: tuple[tcp.Connection, tcp.Connection]) -> None:
    near, far = pair
    pieces = [bytes([number % 256]) * (number * 37 % 200_000) for number in range(200)]
    near.queue(pieces)
    heard = bytearray()
    wanted = b"".join(pieces)
    rounds = 0
    while len(heard) < len(wanted):
        near.flush()
        heard += far.receive(10_007)
        rounds += 1
        assert near.is_open
        assert rounds < 100_000
    assert heard == wanted
    assert not near.is_sending


def test_a_peer_that_reads_nothing_never_makes_us_wait(pair: tuple[tcp.Connection, tcp.Connection]) -> None:
    near, _ = pair
    began_s = time.monotonic()
    near.queue([bytes(64 << 20)])
    for _ in range(10):
        near.flush()
    assert time.monotonic() - began_s < 2.0
    assert near.is_sending


def test_nothing_to_read_is_no_end(pair: tuple[tcp.Connection, tcp.Connection]) -> None:
    near, _ = pair
    until(lambda: not near.is_connecting or near.receive(10))
    assert near.receive(10) == b""
    assert near.is_open


def test_the_end_of_a_connection_has_a_reason(pair: tuple[tcp.Connection, tcp.Connection]) -> None:
    near, far = pair
    far.close()
    until(lambda: near.receive(10) or not near.is_open)
    assert near.reason == "the other side has hung up"


def test_a_refused_connection_says_so(server: socket.socket) -> None:
    port = server.getsockname()[1]
    server.close()
    connection = tcp.connect(found("127.0.0.1", port).found[0])
    until(lambda: connection.receive(10) or not connection.is_open)
    assert "ECONNREFUSED" in connection.reason


def test_silence_is_limited_on_both_ends(pair: tuple[tcp.Connection, tcp.Connection]) -> None:
    for connection in pair:
        assert connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_both_families_are_listened_to(server: socket.socket, host: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    connection = tcp.connect(found(host, server.getsockname()[1]).found[0])
    until(lambda: tcp.accept(server))
    connection.close()


@pytest.mark.parametrize(("interface", "refused"), [("127.0.0.1", "127.0.0.2"), ("lo", "127.0.0.2")])
def test_only_the_address_of_the_interface_is_listened_to(interface: str, refused: str) -> None:
    with tcp.listen(0, interface) as server:
        assert server.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((refused, server.getsockname()[1]))


def test_a_connection_goes_out_from_the_interface_given(server: socket.socket) -> None:
    connection = tcp.connect(found("127.0.0.1", server.getsockname()[1]).found[0], "127.0.0.5")
    accepted: list[tcp.Connection | None] = []
    until(lambda: accepted.append(tcp.accept(server)) or accepted[-1])
    assert accepted[-1] is not None
    assert accepted[-1].peer.removeprefix("::ffff:") == "127.0.0.5"
    connection.close()
    accepted[-1].close()


def test_a_source_that_this_host_does_not_have_ends_the_connection_and_not_the_program(server: socket.socket) -> None:
    connection = tcp.connect(found("127.0.0.1", server.getsockname()[1]).found[0], "nothing7")
    assert not connection.is_open
    assert "nothing7" in connection.reason


def test_a_port_that_is_taken_is_refused(server: socket.socket) -> None:
    port = server.getsockname()[1]
    with pytest.raises(UsageError, match=f"TCP port {port}.*EADDRINUSE"):
        tcp.listen(port)


def test_a_port_can_be_taken_again_at_once(pair: tuple[tcp.Connection, tcp.Connection], server: socket.socket) -> None:
    """A successor must be found where its predecessor was, although old connections linger in the kernel."""
    port = server.getsockname()[1]
    pair[1].close()
    server.close()
    with tcp.listen(port) as again:
        assert again.getsockname()[1] == port


def test_an_unknown_name_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    lookup = found("nobody.invalid", 1)
    assert lookup.found == []
    assert "no address for nobody.invalid" in lookup.reason


def test_wait_wakes_up_for_what_can_be_done(pair: tuple[tcp.Connection, tcp.Connection], server: socket.socket) -> None:
    near, far = pair
    assert tcp.wait([far], server, timeout_s=0.01) == set()
    near.queue([b"x"])
    near.flush()
    assert tcp.wait([far], server, timeout_s=5) == {far.fileno()}

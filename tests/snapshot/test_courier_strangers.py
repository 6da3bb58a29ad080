"""What comes from others than those who are to send here is refused, counted, and costs next to nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from courier_room import KEY, Room, changed, truth
from wiretap import Wiretap

from ridethrough.seam import tcp
from ridethrough.snapshot import wire
from ridethrough.snapshot.sender import Batch, Sender
from ridethrough.types import AttemptRef


@pytest.fixture
def room() -> Iterator[Room]:
    """Two nodes that do not train yet."""
    made = Room(2)
    yield made
    made.close()


@pytest.fixture
def tap(room: Room) -> Iterator[Wiretap]:
    """On the line from n0 to n1."""
    made = Wiretap(room.nodes[1].answer["port"])
    yield made
    made.close()


def held(room: Room) -> dict[str, list[int]]:
    found: dict[str, list[int]] = room.nodes[1].answer["held"]
    return found


def refused(room: Room) -> int:
    return int(room.nodes[1].answer["refused"])


def trouble(room: Room) -> str:
    return str(room.nodes[0].answer["trouble"].get("n1"))


def listening(room: Room) -> tuple[str, int]:
    return ("127.0.0.1", room.nodes[1].answer["port"])


def packed(rank: int, step: int, payload: bytes | None = None) -> wire.Packed:
    payload = truth(rank, step) if payload is None else payload
    return wire.pack(rank=rank, step=step, index={"step": step, "captured_at": "", "metrics": {}}, tree={}, payload=payload)


def drive(room: Room, sender: Sender, *, for_s: float = 0.5) -> None:
    """The sender does what it can, and the room too."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        sender.advance(time.monotonic())
        if sender.connection is not None:
            sender.connection.flush()
        sender.receive(time.monotonic())
        room.tick()
        time.sleep(0.0005)
    sender.close()


def test_another_key_is_refused(room: Room) -> None:
    room.nodes[0].begin(1, room.plan(0, key="00" * 32))
    room.nodes[1].begin(1, room.plan(1))
    room.nodes[0].post_all(1)
    room.until(lambda: refused(room) >= 2)
    assert "wrong key" in trouble(room)
    assert "wrong key" in room.nodes[1].answer["last_refusal"]
    assert held(room) == {}


def test_a_holder_with_another_key_gets_nothing(room: Room) -> None:
    """Somebody who only pretends to have accepted the proof."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        room.nodes[0].begin(1, room.plan(0, ports={1: server.getsockname()[1]}))
        room.nodes[0].post_all(1)
        room.until(lambda: bool(tcp.wait([], server, timeout_s=0.0)))
        connection, _ = server.accept()
        with connection:
            for answer in ({"status": "challenge", "challenge": "11" * 32}, {"status": "welcome", "proof": "22" * 32}):
                connection.sendall(wire.message(wire.encode_greeting(answer)))
            room.until(lambda: trouble(room) == "has another key")
            connection.settimeout(5)
            heard = b""
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(1 << 16):
                    heard += data
    assert len(heard) < 1000


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"status":"welcome","proof":"00"}', b'{"status":"challenge"}', b"\xff" * 900])
def test_an_answer_that_makes_no_sense_ends_the_connection(room: Room, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        room.nodes[0].begin(1, room.plan(0, ports={1: server.getsockname()[1]}))
        room.until(lambda: bool(tcp.wait([], server, timeout_s=0.0)))
        connection, _ = server.accept()
        with connection:
            connection.sendall(wire.message(answer))
            room.until(lambda: trouble(room) not in ("None", "not connected yet"))


def test_a_recorded_connection_proves_nothing(room: Room, tap: Wiretap) -> None:
    room.begin(ports={1: tap.port})
    room.nodes[0].post_all(1)
    room.until(lambda: held(room) == {"0": [1]})
    room.nodes[0].is_frozen = True
    recorded = bytes(tap.heard[-1])
    assert len(recorded) > len(truth(0, 1))
    before = refused(room)
    with socket.create_connection(listening(room)) as thief:
        thief.sendall(recorded)
        room.until(lambda: refused(room) == before + 1)
    assert "wrong key" in room.nodes[1].answer["last_refusal"]
    assert held(room) == {"0": [1]}


def test_a_repeated_frame_ends_the_connection_and_changes_nothing(room: Room, tap: Wiretap) -> None:
    room.begin(ports={1: tap.port})
    room.nodes[0].post_all(1)
    room.until(lambda: held(room) == {"0": [1]})
    sizes = len(tap.heard[-1])
    room.nodes[0].post_all(2)
    room.until(lambda: held(room) == {"0": [1, 2]})
    second = bytes(tap.heard[-1][sizes:])
    tap.change = lambda offset, data: second
    room.nodes[0].post_all(3)
    room.until(lambda: refused(room) == 1)
    assert held(room) == {"0": [1, 2]}
    tap.change = lambda offset, data: data
    room.until(lambda: held(room) == {"0": [1, 2, 3]})
    assert room.nodes[1].replicas(0)[3][0] == truth(0, 3)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_mangled_frame_ends_the_connection_and_the_part_is_sent_again(room: Room, tap: Wiretap, part: float) -> None:
    room.begin(ports={1: tap.port})
    room.nodes[0].post_all(1)
    room.until(lambda: held(room) == {"0": [1]})
    begin = len(tap.heard[-1])
    place = begin + int(part * len(truth(0, 2)))

    def flip(offset: int, data: bytes) -> bytes:
        at = place - offset
        if 0 <= at < len(data):
            data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        return data

    tap.change = flip
    room.nodes[0].post_all(2)
    room.until(lambda: refused(room) == 1)
    assert held(room) == {"0": [1]}
    tap.change = lambda offset, data: data
    room.until(lambda: held(room) == {"0": [1, 2]})
    assert room.nodes[1].replicas(0)[2][0] == truth(0, 2)


def test_a_connection_cut_in_mid_frame_leaves_nothing_half(room: Room, tap: Wiretap) -> None:
    room.begin(ports={1: tap.port})
    room.nodes[0].post_all(1)
    room.until(lambda: held(room) == {"0": [1]})
    tap.change = lambda offset, data: data[: len(data) // 2]
    room.nodes[0].post_all(2)
    room.work(0.1)
    tap.cut()
    assert held(room) == {"0": [1]}
    tap.change = lambda offset, data: data
    room.until(lambda: held(room) == {"0": [1, 2]})
    assert room.nodes[1].replicas(0)[2][0] == truth(0, 2)


def test_an_earlier_attempt_is_refused_and_counted(room: Room) -> None:
    room.nodes[0].begin(1, room.plan(0))
    room.nodes[1].begin(1, room.plan(1, attempt=AttemptRef(seq=2, nonce="cd" * 16)))
    room.nodes[0].post_all(1)
    room.until(lambda: trouble(room) == "refused: another attempt")
    assert refused(room) >= 1
    assert held(room) == {}


def test_another_attempt_of_the_same_number_is_refused(room: Room) -> None:
    room.nodes[0].begin(1, room.plan(0))
    room.nodes[1].begin(1, room.plan(1, attempt=AttemptRef(seq=1, nonce="cd" * 16)))
    room.until(lambda: trouble(room) == "refused: another attempt")
    assert refused(room) >= 1


def test_a_later_attempt_is_told_to_wait(room: Room) -> None:
    """This node has not heard of its own part in it yet."""
    later = AttemptRef(seq=2, nonce="cd" * 16)
    room.nodes[0].begin(1, room.plan(0, attempt=later))
    room.nodes[1].begin(1, room.plan(1))
    room.nodes[0].post_all(1)
    room.until(lambda: trouble(room).startswith("not yet"))
    assert refused(room) == 0
    room.nodes[1].begin(2, room.plan(1, attempt=later))
    room.until(lambda: held(room) == {"0": [1]})


def test_another_run_at_the_same_port_is_refused(room: Room) -> None:
    room.nodes[0].begin(1, room.plan(0, run_uid="run-2"))
    room.nodes[1].begin(1, room.plan(1))
    room.nodes[0].post_all(1)
    room.until(lambda: trouble(room) == "refused: another run")
    assert refused(room) >= 1
    assert held(room) == {}


def test_a_call_for_another_node_is_refused(room: Room) -> None:
    """An address that now belongs to somebody else."""
    room.begin()
    room.nodes[0].is_frozen = True
    room.settle()
    other = changed(room.plan(0), addresses={"n9": [*listening(room)[:1], 0, listening(room)[1]]})
    sender = Sender(other, "n9", None)
    drive(room, sender)
    assert sender.trouble == "refused: this is not n9"
    assert refused(room) >= 1


def test_a_node_that_is_not_to_send_here_is_refused() -> None:
    room = Room(4)
    room.begin()
    for node in room.nodes:
        node.is_frozen = True
    room.nodes[1].is_frozen = False
    room.settle()
    sender = Sender(room.plan(2), "n1", None)  # n2 sends to n3 and n0
    drive(room, sender)
    assert sender.trouble == "refused: n2 does not send here"
    assert refused(room) >= 1
    room.close()


@pytest.mark.parametrize("rank", [1, 7])
def test_a_rank_of_another_node_is_refused(room: Room, rank: int) -> None:
    room.begin()
    room.nodes[0].is_frozen = True
    room.settle()
    sender = Sender(room.plan(0), "n1", None)
    sender.offer(Batch(step=3, parts=(packed(rank, 3),)))
    drive(room, sender, for_s=0.2)
    assert sender.acknowledged == -1
    assert refused(room) >= 1
    assert held(room) == {}


def test_a_part_over_the_limit_is_refused_by_the_holder_too(room: Room) -> None:
    room.begin()
    room.nodes[0].is_frozen = True
    room.settle()
    sender = Sender(room.plan(0), "n1", None)
    sender.offer(Batch(step=3, parts=(packed(0, 3, bytes(wire.FRAME_LIMIT_BYTES)),)))
    drive(room, sender, for_s=0.3)
    assert refused(room) >= 1
    assert held(room) == {}


def test_a_node_that_calls_again_replaces_its_old_connection(room: Room) -> None:
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: held(room) == {"0": [1]})
    sender = Sender(room.plan(0), "n1", None)
    sender.offer(Batch(step=3, parts=(packed(0, 3),)))
    drive(room, sender)
    assert 3 in held(room)["0"]
    assert len(room.nodes[1].courier._holder.connections) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 1024) + b"{" * 1024,
        wire.message(b""),
        wire.message(b"[]"),
        wire.message(b'{"format":99}'),
        wire.message(b'{"format":1,"nonce":"' + b"00" * 32 + b'","attempt":[1,2],"run":3,"sender":[],"holder":{}}'),
    ],
)
def test_noise_is_refused_and_counted(room: Room, data: bytes) -> None:
    room.begin()
    room.settle()
    with socket.create_connection(listening(room)) as stranger:
        stranger.sendall(data)
        room.until(lambda: refused(room) == 1)


def test_a_stranger_is_told_why_before_the_connection_ends(room: Room) -> None:
    room.begin()
    room.settle()
    with socket.create_connection(listening(room), timeout=5) as stranger:
        stranger.sendall(wire.message(b'{"format":99}'))
        room.until(lambda: refused(room) == 1)
        room.work(0.05)
        assert b"format 99, this version speaks 1" in stranger.recv(4096)


def test_a_stranger_who_says_nothing_is_cut_off(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.snapshot.holder._GREETING_S", 0.2)
    room.nodes[1].begin(1, room.plan(1))
    room.settle()
    with socket.create_connection(listening(room)) as stranger:
        stranger.sendall(struct.pack(">I", 500) + b"{")
        room.work(0.1)
        assert len(room.nodes[1].courier._holder.connections) == 1
        room.until(lambda: room.nodes[1].courier._holder.connections == [])


def test_many_strangers_do_not_keep_the_own_nodes_out(room: Room) -> None:
    with contextlib.ExitStack() as strangers:
        room.nodes[1].begin(1, room.plan(1))
        room.settle()
        for _ in range(100):
            strangers.enter_context(socket.create_connection(listening(room)))
            room.tick()
        room.until(lambda: refused(room) >= 36)
        assert len(room.nodes[1].courier._holder.connections) <= 64
        room.nodes[0].begin(1, room.plan(0))
        room.nodes[0].post_all(1)
        room.until(lambda: held(room) == {"0": [1]}, within_s=2.0)


def test_refusals_are_counted_on_after_a_restart(room: Room) -> None:
    room.begin()
    room.settle()
    with socket.create_connection(listening(room)) as stranger:
        stranger.sendall(wire.message(b"noise"))
        room.until(lambda: refused(room) == 1)
    room.nodes[1].courier.close()
    room.nodes[1].start_courier()
    assert refused(room) == 1


def test_the_key_is_never_on_the_board_or_the_wire(room: Room, tap: Wiretap) -> None:
    room.begin(ports={1: tap.port})
    room.nodes[0].post_all(1)
    room.until(lambda: held(room) == {"0": [1]})
    assert KEY not in str([node.answer for node in room.nodes])
    assert bytes.fromhex(KEY) not in tap.heard[-1]
    assert KEY.encode() not in tap.heard[-1]

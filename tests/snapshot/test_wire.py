from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.errors import Damaged
from ridethrough.format.layout import rank_part
from ridethrough.snapshot import wire
from ridethrough.snapshot.placement import REPLICA_LIMIT_BYTES
from ridethrough.types import AttemptRef

HELLO = wire.Hello(run_uid="run-1", attempt=AttemptRef(seq=3, nonce="ab" * 16), sender="n0", holder="n1")
CHALLENGE = bytes(range(32))


def sessions(*, key: str = "key", other_key: str = "key", challenge: bytes = CHALLENGE) -> tuple[wire.Session, wire.Session]:
    hello = HELLO.encode(bytes(32))
    return wire.Secret(key).session(hello, CHALLENGE, is_sender=True), wire.Secret(other_key).session(hello, challenge, is_sender=False)


def body(frame: tuple[bytes, ...]) -> bytes:
    return b"".join(frame)[4:]


def packed(payload: bytes = b"payload") -> wire.Packed:
    return wire.pack(
        rank=2, step=7, index={"step": 7, "metrics": {}, "captured_s": 1.0, "parts": ["those of the slot"]}, tree={"a": 1}, payload=payload
    )


def test_a_frame_arrives_as_it_was_sent() -> None:
    sender, holder = sessions()
    head, payload = holder.open(body(sender.seal(b'{"x":1}', b"payload")))
    assert (head, bytes(payload)) == ({"x": 1}, b"payload")


def test_both_directions_have_keys_of_their_own() -> None:
    """Otherwise a receipt could be answered with itself."""
    sender, _ = sessions()
    with pytest.raises(Damaged):
        sender.open(body(sender.seal(b"{}")))


def test_a_repeated_frame_is_refused() -> None:
    sender, holder = sessions()
    frame = body(sender.seal(b"{}", b"payload"))
    holder.open(frame)
    with pytest.raises(Damaged):
        holder.open(frame)


def test_frames_in_another_order_are_refused() -> None:
    sender, holder = sessions()
    _, second = body(sender.seal(b"{}")), body(sender.seal(b"{}"))
    with pytest.raises(Damaged):
        holder.open(second)


@pytest.mark.parametrize("others", [{"other_key": "another"}, {"challenge": bytes(32)}])
def test_a_frame_of_another_key_or_connection_is_refused(others: dict[str, Any]) -> None:
    sender, holder = sessions(**others)
    with pytest.raises(Damaged):
        holder.open(body(sender.seal(b"{}", b"payload")))


@given(st.data())
def test_a_frame_with_any_wrong_bit_is_refused(data: st.DataObject) -> None:
    sender, holder = sessions()
    frame = bytearray(body(sender.seal(b'{"x":1}', b"payload")))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged):
        holder.open(bytes(frame))


@pytest.mark.parametrize("length", [0, 4, 35])
def test_a_frame_that_is_too_short_is_refused(length: int) -> None:
    with pytest.raises(Damaged):
        sessions()[1].open(bytes(length))


def test_proofs_differ_by_role_hello_challenge_and_key() -> None:
    """Otherwise somebody without the key could give back what he has heard."""
    secret = wire.Secret("key")
    found = {
        secret.proof(wire.AS_SENDER, b"hello", CHALLENGE),
        secret.proof(wire.AS_HOLDER, b"hello", CHALLENGE),
        secret.proof(wire.AS_SENDER, b"other", CHALLENGE),
        secret.proof(wire.AS_SENDER, b"hello", bytes(32)),
        wire.Secret("other").proof(wire.AS_SENDER, b"hello", CHALLENGE),
    }
    assert len(found) == 5


@given(st.lists(st.binary(max_size=200), max_size=8), st.integers(1, 50))
def test_messages_arrive_whole_however_they_are_cut(bodies: list[bytes], piece: int) -> None:
    stream = b"".join(wire.message(body) for body in bodies)
    inbox, found = wire.Inbox(), []
    for at in range(0, len(stream), piece):
        inbox.add(stream[at : at + piece])
        while (body := inbox.take()) is not None:
            found.append(body)
    assert found == bodies


def test_a_message_over_the_limit_is_refused_before_it_is_taken_in() -> None:
    inbox = wire.Inbox()
    inbox.add(struct.pack(">I", wire.GREETING_LIMIT_BYTES + 1))
    with pytest.raises(Damaged):
        inbox.take()


def test_an_inbox_asks_for_no_more_than_one_message() -> None:
    inbox = wire.Inbox()
    room = inbox.room_bytes
    inbox.add(bytes(100))
    assert (room, inbox.room_bytes) == (wire.GREETING_LIMIT_BYTES + 4, wire.GREETING_LIMIT_BYTES - 96)


def test_a_hello_is_read_as_it_was_written() -> None:
    assert wire.Hello.decode(HELLO.encode(bytes(32))) == HELLO


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"nonce": "00"},
        {"nonce": None},
        {"attempt": 3},
        {"attempt": ["x", "y"]},
        {"attempt": [1, 2, 3]},
        {"attempt": [float("inf"), "x"]},
        {"attempt": [float("nan"), "x"]},
    ],
)
def test_a_hello_that_makes_no_sense_or_is_of_another_version_is_refused(change: dict[str, Any]) -> None:
    fields = {**wire.decode_greeting(HELLO.encode(bytes(32))), **change}
    with pytest.raises(Damaged):
        wire.Hello.decode(wire.encode_greeting(fields))


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 1000, b'{"format":1}'])
def test_a_greeting_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(Damaged):
        wire.Hello.decode(text)


def test_a_part_arrives_with_its_tree_and_the_facts_of_its_snapshot() -> None:
    sender, holder = sessions()
    sent = packed()
    parcel = wire.Parcel.unpack(*holder.open(body(sender.seal(sent.head, sent.payload))))
    assert (parcel.rank, parcel.step, bytes(parcel.payload)) == (2, 7, b"payload")
    assert parcel.index["parts"][0] | {"xxh3_128": ""} == {"name": rank_part(2), "size_bytes": 7, "tree": {"a": 1}, "xxh3_128": ""}
    assert parcel.index["metrics"] == {}


def test_a_time_of_the_senders_own_clock_is_left_out() -> None:
    sent = packed()
    assert b"captured_s" not in sent.head


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 3},
        {"step": 8},
        {"step": -1},
        {"step": "x"},
        {"index": []},
        {"index": {"step": 7, "parts": []}},
        {"index": {"step": 7, "parts": [1]}},
    ],
)
def test_a_part_that_is_not_what_its_head_says_is_refused(change: dict[str, Any]) -> None:
    sent = packed()
    head = {**wire.decode_greeting(sent.head), **change}
    with pytest.raises(Damaged):
        wire.Parcel.unpack(head, sent.payload)


def test_a_payload_that_does_not_match_its_checksum_is_refused() -> None:
    sent = packed()
    with pytest.raises(Damaged):
        wire.Parcel.unpack(wire.decode_greeting(sent.head), b"Payload")


def test_a_part_over_the_limit_is_refused() -> None:
    sent = packed(bytes(REPLICA_LIMIT_BYTES + 1))
    with pytest.raises(Damaged):
        wire.Parcel.unpack(wire.decode_greeting(sent.head), sent.payload)


def test_the_largest_part_fits_in_a_frame() -> None:
    sender, holder = sessions()
    head = b'{"x":"' + b"y" * (wire.HEAD_LIMIT_BYTES - 8) + b'"}'
    inbox = wire.Inbox()
    inbox.limit_bytes = wire.FRAME_LIMIT_BYTES
    inbox.add(b"".join(sender.seal(head, bytes(REPLICA_LIMIT_BYTES))))
    frame = inbox.take()
    assert frame is not None
    assert len(holder.open(frame)[1]) == REPLICA_LIMIT_BYTES

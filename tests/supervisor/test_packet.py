from __future__ import annotations

import json
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.supervisor import packet
from ridethrough.supervisor.packet import (
    ASKS,
    BODY_LIMIT_BYTES,
    DEFLATED,
    HAS_BODY,
    PACKET_LIMIT_BYTES,
    VERSION,
    Letter,
    Packet,
    Refusal,
    Signer,
    milliseconds,
    tag,
)

KEY = bytes(range(32))
SIGNER = Signer(KEY, "run-1")
VIEW = {
    "node": "gpu-rack7-12", "phase": "running", "generation": 2, "attempt": "000002-9f8e7d6c", "ranks": 8, "is_whole": True, "is_at_work": True,
    "is_stepping": True, "step": 48213, "restored_step": 46000, "step_s_p99": 1.31, "posted": [48200, 48210],
}  # fmt: skip


def signed(letter: Letter, *, asks: bool = False) -> bytes:
    return letter.sign(tag("n1"), b"lifelifeecho", 2**32 - 1, b"tokn", 65535, age=milliseconds(0.25), asks=asks)


def opened(data: bytes, signer: Signer = SIGNER) -> Packet:
    found = signer.open(data)
    assert isinstance(found, Packet)
    return found


@given(st.one_of(st.none(), st.binary(max_size=2000)), st.booleans())
def test_a_packet_says_what_was_signed(body: bytes | None, asks: bool) -> None:
    found = opened(signed(SIGNER.letter(body), asks=asks))
    assert found[1:7] == (tag("n1"), b"lifelifeecho", 2**32 - 1, b"tokn", 65535, 250)
    assert found.life == b"lifelife"
    assert bool(found.flags & ASKS) == asks
    assert bool(found.flags & HAS_BODY) == (body is not None)
    assert found.body() == (body or b"")


def test_an_age_beyond_the_largest_is_the_largest() -> None:
    assert milliseconds(1e9) == milliseconds(65.535) == 65535


def test_one_letter_serves_many_receivers() -> None:
    letter = SIGNER.letter(b"to all")
    assert [opened(signed(letter)).body() for _ in range(3)] == [b"to all"] * 3


@pytest.mark.parametrize("filler", [b"x", random.Random(1).randbytes(BODY_LIMIT_BYTES)], ids=["compressible", "not"])
def test_the_largest_body_passes_and_a_larger_one_is_refused(filler: bytes) -> None:
    body = (filler * BODY_LIMIT_BYTES)[:BODY_LIMIT_BYTES]
    data = signed(SIGNER.letter(body))
    assert len(data) <= PACKET_LIMIT_BYTES
    assert opened(data).body() == body
    with pytest.raises(ValueError, match="at most 8192 bytes"):
        SIGNER.letter(body + b"x")


def test_what_a_node_usually_says_shrinks_to_a_third() -> None:
    body = json.dumps(VIEW, separators=(",", ":")).encode()
    assert len(signed(SIGNER.letter(body))) - len(signed(SIGNER.letter())) < len(body) / 3


def test_every_flipped_bit_is_noticed() -> None:
    data = signed(SIGNER.letter(b"step 12"))
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(SIGNER.open(bytes(changed)), Refusal), bit


def test_a_packet_that_was_cut_off_or_prolonged_is_refused() -> None:
    data = signed(SIGNER.letter(b"step 12"))
    for size in range(len(data)):
        assert isinstance(SIGNER.open(data[:size]), Refusal)
    assert SIGNER.open(data + b"\0") is Refusal.KEY
    assert SIGNER.open(data + bytes(PACKET_LIMIT_BYTES)) is Refusal.MANGLED


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_are_a_packet_and_none_raise(data: bytes, looks_like_one: bool) -> None:
    assert isinstance(SIGNER.open(b"rt" + bytes([VERSION]) + data if looks_like_one else data), Refusal)


@pytest.mark.parametrize("other", [Signer(bytes(32), "run-1"), Signer(KEY, "run-2")], ids=["another key", "another run with the same key"])
def test_a_packet_of_another_run_is_refused(other: Signer) -> None:
    assert SIGNER.open(signed(other.letter(b"step 12"))) is Refusal.KEY


def test_another_version_is_named_as_such() -> None:
    data = signed(SIGNER.letter(b"step 12"))
    assert SIGNER.open(data[:2] + bytes([VERSION + 1]) + data[3:]) is Refusal.VERSION


def forged(flags: int, packed: bytes) -> Packet:
    """Made by somebody with the key and a broken program."""
    letter = SIGNER.letter()
    letter._flags = flags
    letter._begin += packed
    letter._mac.update(packed)
    return opened(signed(letter))


def test_a_body_that_cannot_be_unpacked_is_none() -> None:
    assert forged(HAS_BODY | DEFLATED, b"\xff\xff\xff").body() is None


def test_a_body_that_ends_early_is_none() -> None:
    packer = zlib.compressobj(wbits=-12)
    assert forged(HAS_BODY | DEFLATED, (packer.compress(b"x" * 100) + packer.flush())[:-1]).body() is None


def test_a_body_that_unpacks_to_more_than_the_limit_is_none() -> None:
    packer = zlib.compressobj(wbits=-12)
    assert forged(HAS_BODY | DEFLATED, packer.compress(bytes(BODY_LIMIT_BYTES + 1)) + packer.flush()).body() is None


def test_a_short_key_is_no_key() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Signer(b"secret", "run-1")


def test_a_long_key_is_taken_whole() -> None:
    assert Signer(bytes(100), "run-1").open(signed(Signer(bytes(99) + b"x", "run-1").letter())) is Refusal.KEY


GOLDEN = (
    "7274018347757a41a96e516272b6b9aea111c1e836c2886e235dcb348b54f314b364caa31de21d130b2343638c48353103fb1239160df58c0d91a211a80fa802"
    "a4db20b6160007c16952960bcb12fd6c6966656c6966656563686fffffffff746f6b6effff00faccad6ffb3d0c08a62d72b291a135bc99"
)


def test_a_packet_of_an_earlier_program_of_this_version_is_understood() -> None:
    """The layout, the key and the phrases that bodies are compressed with: whoever changes one needs a new version."""
    assert packet.VERSION == 1
    assert opened(bytes.fromhex(GOLDEN))[:7] == (ASKS | HAS_BODY | DEFLATED, tag("n1"), b"lifelifeecho", 2**32 - 1, b"tokn", 65535, 250)
    assert json.loads(opened(bytes.fromhex(GOLDEN)).body() or b"") == VIEW

"""One datagram between two supervisors, and the proof of who sent it. Pure.

::

    "rt" | version 1 | body … | flags 1 | sender 8 | life 8 | echo 4 | counter 4 | token 4 | port 2 | age 2 | mac 16

sender   digest of the node's name; it need not fit any list that the receiver has
life     random, one for each start of the sender's process
echo     the token that the sender was told to echo; zeros: none yet
counter  grows with every packet from this life to this receiver
token    what the receiver shall echo to prove that it is alive now; zeros: the sender does not know the receiver's life
port     where the sender listens
age      of the body in milliseconds: what was lost is repeated later
mac      keyed blake2b over everything before it; the key is derived from the run's key and the run's name, so that
         two runs never mix, not even with one key

The body stands before what differs from receiver to receiver: said to a thousand nodes, it is compressed and hashed
once. It is compressed with words known beforehand, which makes a heartbeat a fifth of its size.
"""

from __future__ import annotations

import hmac
import zlib
from enum import StrEnum
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

VERSION = 1
BODY_LIMIT_BYTES = 8 << 10
"""A supervisor says what changes within seconds; more than this is not a heartbeat."""
KEY_LEAST_BYTES = 16
LIFE_BYTES = 8
TOKEN_BYTES = 4
NO_TOKEN = bytes(TOKEN_BYTES)

_MAGIC = b"rt"
_HEAD = _MAGIC + bytes([VERSION])
_TAIL = Struct(">B8s12sI4sHH")
_MAC_BYTES = 16
_AFTER_BODY_BYTES = _TAIL.size + _MAC_BYTES
_LEAST_BYTES = len(_HEAD) + _AFTER_BODY_BYTES
PACKET_LIMIT_BYTES = _LEAST_BYTES + BODY_LIMIT_BYTES

# JSON of a few hundred bytes: a larger window or more memory costs time and saves nothing, and a code made for each
# body would cost more to unpack than the rest of the packet.
_WINDOW_BITS = -12
_MEMORY_LEVEL = 5
_LEVEL = 6
_PHRASES = (
    b'{"status":,"cause":","fingerprint":","detail":","exit_code":,"is_retryable":,"output":","opened_at":"2026-,"nodes":["],"lost":["],'
    b'"refused":{"number":,"step":,"code":"RT-0","message":","age_s":},"dead_ranks":[],"missing":["],"is_ready":false,"stuck":","end":{'
    b'"signal":15,"stop_seen":,"stop_was_late":true,"is_stopped":true,"stop":{"at_step":,"incident":{"text":","last_step":,"pause_s":,'
    b'"stage":"calling","over","finished","waiting","ended","flush":{"id":1,"reason":"},"outcome":{"action":"restart",'
    b'{"room":"000001-","number":1,"lead":"node-000","stage":"running","generation":1,"members":["node-000","node-000"],"attempt":"000001-",'
    b'"announced":1000,"announcement":1,"dark":["node-000"],"confirmed":{"step":1000,"is_verified":true},"is_suspect":true,'
    b'{"node":"node-000","phase":"running","generation":1,"attempt":"000001-","ranks":8,"is_whole":true,"is_at_work":true,"is_stepping":true,'
    b'"is_inside":true,"is_unsaved":true,"step":1000,"restored_step":0,"since_step_s":0.1,"step_s_p99":0.2,"posted":[1000,1001],'
    b'"replicas":{"node-000":[1000,1001],"node-000":[1000,1001]},"wanted":,"wanted_age_s":,"sealed":[{"step":1000,"dark":[],'
    b'"is_verified":true,"digests":{"replicated":"}}],"durable_step":1000,"is_saving":true,"flushed":1,"has_stepped":true}'
)
"""What supervisors often say. A matter of size only; both ends must have the same, so a change needs a new `VERSION`."""


ASKS = 1
"""Flag: the receiver shall answer at once."""
HAS_BODY = 2
"""Flag: something is said."""
DEFLATED = 4
"""Flag: the body is compressed."""


class Refusal(StrEnum):
    """Why a packet was not believed."""

    MANGLED = "mangled"
    """No packet of ours has this shape."""
    VERSION = "version"
    """From a program that speaks another version of this protocol."""
    KEY = "wrong key"
    """The mac is wrong: another key, another run, or bits that were flipped on the way."""
    UNKNOWN = "unknown node"
    """Authentic, from a node that is not in the list of addresses."""
    REPLAY = "replay"
    """Authentic, but not newer than what was already heard: repeated or overtaken on the way."""
    STALE = "not proven fresh"
    """Authentic, without the right echo: first contact, a restart of either side, or a replay from before one."""


class Packet(NamedTuple):
    """What an authentic packet says. Authentic is not yet fresh.

    A tuple, since thousands are made each second.
    """

    flags: int
    sender: bytes
    proof: bytes
    """Life and echo, which are believed together or not at all."""
    counter: int
    token: bytes
    port: int
    age: int
    packed: bytes
    """The body as it was carried."""

    @property
    def life(self) -> bytes:
        """Of the sender."""
        return self.proof[:LIFE_BYTES]

    def body(self) -> bytes | None:
        """The body as it was said; None if it cannot be unpacked."""
        if not self.flags & DEFLATED:
            return self.packed
        unpacker = zlib.decompressobj(_WINDOW_BITS, _PHRASES)
        try:
            body = unpacker.decompress(self.packed, BODY_LIMIT_BYTES + 1)
        except zlib.error:
            return None
        return body if unpacker.eof and len(body) <= BODY_LIMIT_BYTES else None


def milliseconds(age_s: float) -> int:
    """An age as a packet has it; beyond a minute all are the same."""
    return min(round(age_s * 1000), 0xFFFF)


def tag(node: str) -> bytes:
    """Names the node in a packet."""
    return blake2b(node.encode(), digest_size=8).digest()


class Letter:
    """A body made ready to be sent to many nodes, or none."""

    __slots__ = ("_begin", "_flags", "_mac")

    def __init__(self, keyed: blake2b, body: bytes | None) -> None:
        self._flags = 0
        packed = b""
        if body is not None:
            if len(body) > BODY_LIMIT_BYTES:
                raise ValueError(f"a heartbeat carries at most {BODY_LIMIT_BYTES} bytes, not {len(body)}")
            packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL, zlib.Z_FIXED, _PHRASES)
            packed = packer.compress(body) + packer.flush()
            self._flags = HAS_BODY | DEFLATED
            if len(packed) >= len(body):
                packed = body
                self._flags = HAS_BODY
        self._begin = _HEAD + packed
        self._mac = keyed.copy()
        self._mac.update(self._begin)

    def sign(self, sender: bytes, proof: bytes, counter: int, token: bytes, port: int, *, age: int, asks: bool) -> bytes:
        """The datagram for one receiver, who shall answer at once if it `asks`."""
        tail = _TAIL.pack(self._flags | ASKS if asks else self._flags, sender, proof, counter, token, port, age)
        mac = self._mac.copy()
        mac.update(tail)
        return self._begin + tail + mac.digest()


class Signer:
    """Signs and checks the packets of one run.

    Args:
        key: The run's secret, known to all its nodes.
        scope: Names the run.
    """

    def __init__(self, key: bytes, scope: str) -> None:
        if len(key) < KEY_LEAST_BYTES:
            raise ValueError(f"the key of a run has at least {KEY_LEAST_BYTES} bytes, not {len(key)}")
        # The key is hashed first since blake2b takes 64 bytes at most, and a key file may hold more.
        derived = blake2b(scope.encode(), key=blake2b(key, digest_size=32).digest(), digest_size=32, person=b"rt peers").digest()
        self._keyed = blake2b(key=derived, digest_size=_MAC_BYTES)

    def letter(self, body: bytes | None = None) -> Letter:
        """Ready to be signed for each receiver.

        Raises:
            ValueError: The body is larger than `BODY_LIMIT_BYTES`.
        """
        return Letter(self._keyed, body)

    def open(self, datagram: bytes) -> Packet | Refusal:
        """What the datagram says, if somebody with the key made it; whatever the bytes are, never an exception."""
        size = len(datagram)
        if not _LEAST_BYTES <= size <= PACKET_LIMIT_BYTES:
            return Refusal.MANGLED
        if not datagram.startswith(_HEAD):
            return Refusal.VERSION if datagram.startswith(_MAGIC) else Refusal.MANGLED
        mac = self._keyed.copy()
        mac.update(datagram[:-_MAC_BYTES])
        if not hmac.compare_digest(mac.digest(), datagram[-_MAC_BYTES:]):
            return Refusal.KEY
        end = size - _AFTER_BODY_BYTES
        return Packet._make((*_TAIL.unpack_from(datagram, end), datagram[len(_HEAD) : end]))

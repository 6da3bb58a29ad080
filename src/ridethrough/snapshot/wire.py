"""What couriers say to each other. Pure: bytes in, bytes out.

::

    message    length (4 bytes) | body
    greeting   JSON, four messages: hello, challenge; proof, welcome. Or a refusal, and the end
    frame      MAC (32 bytes) | length of head (4 bytes) | head (JSON) | payload

Both sides prove that they know the run's key, over fresh random numbers of both: what was recorded once proves
nothing later. Every frame is authenticated with a key of that connection and counted, so that none can be
changed, left out, repeated or moved.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from ridethrough.errors import Damaged, shown
from ridethrough.format import record
from ridethrough.format.layout import rank_part
from ridethrough.snapshot.placement import REPLICA_LIMIT_BYTES
from ridethrough.types import AttemptRef

FORMAT = 1
NONCE_BYTES = 32
GREETING_LIMIT_BYTES = 1024
HEAD_LIMIT_BYTES = 1 << 20
_MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
FRAME_LIMIT_BYTES = _MAC_BYTES + _LENGTH.size + HEAD_LIMIT_BYTES + REPLICA_LIMIT_BYTES

AS_SENDER, AS_HOLDER = b"rt sender", b"rt holder"
_AS_SESSION, _TO_HOLDER, _TO_SENDER = b"rt session", b"rt to holder", b"rt to sender"


def message(body: bytes) -> bytes:
    """The body, ready to be sent."""
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Cuts what arrives into messages; never holds more than one of the largest size that is allowed now."""

    def __init__(self) -> None:
        self.limit_bytes = GREETING_LIMIT_BYTES
        self._held = bytearray()

    @property
    def room_bytes(self) -> int:
        """How much may be added."""
        return max(_LENGTH.size + self.limit_bytes - len(self._held), 0)

    def add(self, data: bytes) -> None:
        """These bytes came next."""
        self._held += data

    def take(self) -> bytes | None:
        """The next whole message, None if it is not here yet.

        Raises:
            Damaged: It would be larger than allowed.
        """
        if len(self._held) < _LENGTH.size:
            return None
        length = _LENGTH.unpack_from(self._held)[0]
        if length > self.limit_bytes:
            raise Damaged(path="message", detail=f"{length} bytes, {self.limit_bytes} are allowed")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        body = bytes(memoryview(self._held)[_LENGTH.size : end])
        del self._held[:end]
        return body


# -- greeting ------------------------------------------------------------------------------------------------------


def encode_greeting(fields: dict[str, Any]) -> bytes:
    """One message of the greeting."""
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_greeting(body: bytes) -> dict[str, Any]:
    """The fields of a message of the greeting.

    Raises:
        Damaged: It is no JSON object.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Damaged(path="greeting", detail="not JSON") from error
    if not isinstance(found, dict):
        raise Damaged(path="greeting", detail="not an object")
    return found


def field_bytes(fields: dict[str, Any], name: str) -> bytes:
    """A random number or proof of the greeting.

    Raises:
        Damaged: It is missing or has the wrong size.
    """
    try:
        value = bytes.fromhex(fields[name])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(path="greeting", detail=f"no {name}") from error
    if len(value) != NONCE_BYTES:
        raise Damaged(path="greeting", detail=f"{name} has {len(value)} bytes")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message: who wants to send what to whom."""

    run_uid: str
    attempt: AttemptRef
    sender: str
    holder: str

    def encode(self, nonce: bytes) -> bytes:
        """The message, with the sender's random number."""
        return encode_greeting(
            {
                "format": FORMAT,
                "run": self.run_uid,
                "attempt": [self.attempt.seq, self.attempt.nonce],
                "sender": self.sender,
                "holder": self.holder,
                "nonce": nonce.hex(),
            }
        )

    @staticmethod
    def decode(body: bytes) -> Hello:
        """The message.

        Raises:
            Damaged: It is none, or of another format.
        """
        fields = decode_greeting(body)
        if fields.get("format") != FORMAT:
            raise Damaged(path="greeting", detail=f"format {fields.get('format')!r}, this version speaks {FORMAT}")
        field_bytes(fields, "nonce")
        try:
            seq, nonce = fields["attempt"]
            if type(seq) is not int:  # 1e999 is a number in JSON too, and cannot be made one
                raise ValueError("not a number of an attempt")
            return Hello(
                run_uid=str(fields["run"]),
                attempt=AttemptRef(seq=seq, nonce=str(nonce)),
                sender=str(fields["sender"]),
                holder=str(fields["holder"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(path="greeting", detail="makes no sense") from error


def _mac(key: bytes, purpose: bytes, *pieces: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(key=key, digest_size=_MAC_BYTES, person=purpose)
    for piece in pieces:
        state.update(piece)
    return state.digest()


class Secret:
    """The run's key.

    Args:
        text: As it stands in the plan.
    """

    def __init__(self, text: str) -> None:
        self._key = hashlib.blake2b(text.encode()).digest()

    def proof(self, role: bytes, hello: bytes, challenge: bytes) -> bytes:
        """What only somebody with the key can say, in this role, after this hello and this challenge."""
        return _mac(self._key, role, hello, challenge)

    def session(self, hello: bytes, challenge: bytes, *, is_sender: bool) -> Session:
        """The frames of the connection that began with this hello and this challenge."""
        return Session(_mac(self._key, _AS_SESSION, hello, challenge), is_sender=is_sender)


def is_same(first: bytes, second: bytes) -> bool:
    """The proofs are equal; how long it takes tells nothing."""
    return hmac.compare_digest(first, second)


# -- frames --------------------------------------------------------------------------------------------------------


class Session:
    """Frames of one connection, in both directions."""

    def __init__(self, key: bytes, *, is_sender: bool) -> None:
        self._key = key
        self._out, self._in = (_TO_HOLDER, _TO_SENDER) if is_sender else (_TO_SENDER, _TO_HOLDER)
        self._sent = self._received = 0

    def seal(self, head: bytes, payload: bytes = b"") -> tuple[bytes, ...]:
        """The next frame out, in pieces."""
        size = _LENGTH.pack(len(head))
        code = _mac(self._key, self._out, _COUNTER.pack(self._sent), size, head, payload)
        self._sent += 1
        return _LENGTH.pack(_MAC_BYTES + _LENGTH.size + len(head) + len(payload)) + code + size, head, payload

    def open(self, body: bytes) -> tuple[dict[str, Any], memoryview]:
        """Head and payload of the next frame in.

        Raises:
            Damaged: It is not the very frame that the other side has sent as its next.
        """
        if len(body) < _MAC_BYTES + _LENGTH.size:
            raise Damaged(path="frame", detail="too short")
        view = memoryview(body)
        expected = _mac(self._key, self._in, _COUNTER.pack(self._received), view[_MAC_BYTES:])
        if not is_same(expected, body[:_MAC_BYTES]):
            raise Damaged(path="frame", detail="not what the other side has sent")
        self._received += 1
        begin = _MAC_BYTES + _LENGTH.size
        end = begin + _LENGTH.unpack_from(view, _MAC_BYTES)[0]
        try:
            head = json.loads(body[begin:end], parse_constant=record.refuse_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise Damaged(path="frame", detail="its head is not JSON") from error
        if not isinstance(head, dict):
            raise Damaged(path="frame", detail="its head is not an object")
        return head, view[end:]


def _finite(text: str) -> float:
    """A slot has no place for infinity, and 1e999 is read as that."""
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number without end")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A rank's private part on its way out."""

    rank: int
    head: bytes
    payload: bytes


def pack(*, rank: int, step: int, index: dict[str, Any], tree: Any, payload: bytes) -> Packed:
    """The part, with a checksum of its payload beside it for whoever reads it at the other end.

    Args:
        rank: Whose part.
        step: Of which step.
        index: Of the slot it comes from.
        tree: The part's small state.
        payload: The part.
    """
    # The sender's monotonic clock means nothing on another machine.
    facts = {name: value for name, value in index.items() if name not in ("parts", "captured_s")}
    entry = {"name": rank_part(rank), "size_bytes": len(payload), "tree": tree, "xxh3_128": xxhash.xxh3_128_hexdigest(payload)}
    head = {"rank": rank, "step": step, "index": {**facts, "step": step, "parts": [entry]}}
    return Packed(rank=rank, head=json.dumps(head, separators=(",", ":")).encode(), payload=payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """The private part of one rank at one step, as it has arrived."""

    rank: int
    step: int
    index: dict[str, Any]
    """As in a slot, with this one part; `at` is for whoever puts it somewhere."""
    payload: bytes | memoryview

    @staticmethod
    def unpack(head: dict[str, Any], payload: bytes | memoryview) -> Parcel:
        """From a frame.

        Raises:
            Damaged: It is not what was packed.
        """
        try:
            rank, step, index = int(head["rank"]), int(head["step"]), dict(head["index"])
            (entry,) = index["parts"]
            is_whole = (
                0 <= step < 1 << 63  # as a slot can hold it
                and index["step"] == step
                and entry["name"] == rank_part(rank)
                and entry["size_bytes"] == len(payload)
                and entry["xxh3_128"] == xxhash.xxh3_128_hexdigest(payload)
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Damaged(path="frame", detail="makes no sense") from error
        if not is_whole or len(payload) > REPLICA_LIMIT_BYTES:
            raise Damaged(path=f"rank {shown(rank)}, step {shown(step)}", detail="not the part that was packed")
        return Parcel(rank=rank, step=step, index=index, payload=payload)


def encode_receipt(rank: int, step: int, *, is_held: bool) -> bytes:
    """The answer to a parcel, as the head of a frame."""
    return json.dumps({"rank": rank, "step": step, "is_held": is_held}, separators=(",", ":")).encode()

"""The seal: the small file that vouches for one part. Seals alone decide what exists."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ridethrough.errors import Damaged, shown
from ridethrough.format import layout, record
from ridethrough.format import part as part_format
from ridethrough.types import AttemptRef, Parent

KIND = "seal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Everything needed to prove a part, to load its small state, and to know where it belongs."""

    run_uid: str
    attempt: AttemptRef
    parent: Parent | None
    step: int
    save_id: str
    part: str
    node: str
    roster_digest: str
    payload_name: str
    payload_bytes: int
    chunk_bytes: int
    chunks: tuple[str, ...]
    tensors: tuple[part_format.TensorSpec, ...]
    tree: Any
    meta: dict[str, Any]

    @property
    def payload_digest(self) -> str:
        """One name for the payload's content; equal content has equal digests on every holder."""
        return hashlib.sha256("".join(self.chunks).encode()).hexdigest()

    def encode(self) -> bytes:
        """The seal file."""
        return record.encode(
            KIND,
            {
                "run_uid": self.run_uid,
                "attempt": {"seq": self.attempt.seq, "nonce": self.attempt.nonce},
                "parent": encode_parent(self.parent),
                "step": self.step,
                "save_id": self.save_id,
                "part": self.part,
                "node": self.node,
                "roster_digest": self.roster_digest,
                "payload": {
                    "name": self.payload_name,
                    "size_bytes": self.payload_bytes,
                    "chunk_bytes": self.chunk_bytes,
                    "xxh3_128": list(self.chunks),
                },
                "tensors": [[t.name, t.dtype, list(t.shape), t.begin, t.end] for t in self.tensors],
                "tree": self.tree,
                "meta": self.meta,
            },
        )


def save_id(run_uid: str, nonce: str, step: int) -> str:
    """The name of one save: another run, attempt or step never has it."""
    return hashlib.sha256(f"{run_uid}\0{nonce}\0{step}".encode()).hexdigest()[:32]


def encode_parent(parent: Parent | None) -> dict[str, Any] | None:
    """A parent as JSON."""
    if parent is None:
        return None
    return {"seq": parent.attempt.seq, "nonce": parent.attempt.nonce, "step": parent.step}


def decode_parent(value: Any, *, path: str) -> Parent | None:
    """A parent from JSON."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Damaged(path=path, detail="parent is not an object")
    return Parent(attempt=decode_attempt(value, path=path), step=record.field(value, "step", int, path=path))


def decode_attempt(value: Any, *, path: str) -> AttemptRef:
    """An attempt's name from JSON."""
    if not isinstance(value, dict):
        raise Damaged(path=path, detail="attempt is not an object")
    found = AttemptRef(seq=record.field(value, "seq", int, path=path), nonce=record.identity(value, "nonce", path=path))
    if layout.parse_attempt_dir(found.label) is None:
        raise Damaged(path=path, detail=f"no attempt is called {shown(found.label)}")
    return found


def decode(data: bytes, *, path: str) -> Seal:
    """The seal in a file whose own checksum holds.

    Raises:
        Damaged: See `record.decode`; also if a field is missing or of the wrong type.
    """
    fields = record.decode(KIND, data, path=path)
    payload = record.field(fields, "payload", dict, path=path)
    seal = Seal(
        run_uid=record.identity(fields, "run_uid", path=path),
        attempt=decode_attempt(fields.get("attempt"), path=path),
        parent=decode_parent(fields.get("parent"), path=path),
        step=record.field(fields, "step", int, path=path),
        save_id=record.identity(fields, "save_id", path=path),
        part=record.field(fields, "part", str, path=path),
        node=record.field(fields, "node", str, path=path),
        roster_digest=record.identity(fields, "roster_digest", path=path),
        payload_name=record.field(payload, "name", str, path=path),
        payload_bytes=record.field(payload, "size_bytes", int, path=path),
        chunk_bytes=record.field(payload, "chunk_bytes", int, path=path),
        chunks=tuple(record.field(payload, "xxh3_128", list, path=path)),
        tensors=_decode_tensors(record.field(fields, "tensors", list, path=path), path),
        tree=fields.get("tree"),
        meta=record.field(fields, "meta", dict, path=path),
    )
    if seal.save_id != save_id(seal.run_uid, seal.attempt.nonce, seal.step):
        raise Damaged(path=path, detail="its save id does not belong to its run, attempt and step")
    if not layout.is_part(seal.part, seal.node) or layout.parse_step_dir(layout.step_dir(seal.step, seal.save_id)) is None:
        raise Damaged(path=path, detail=f"no part is called {shown(seal.part)} of {shown(seal.node)} at step {shown(seal.step)}")
    if not all(type(chunk) is str and chunk.isascii() for chunk in seal.chunks):
        raise Damaged(path=path, detail="its checksums make no sense")
    if seal.payload_bytes < 0 or seal.chunk_bytes < 1 or len(seal.chunks) != -(-seal.payload_bytes // seal.chunk_bytes):
        raise Damaged(path=path, detail="its checksums do not cover the payload")
    return seal


def _decode_tensors(rows: list[Any], path: str) -> tuple[part_format.TensorSpec, ...]:
    try:
        return tuple(part_format.spec_of(name, dtype, shape, begin, end) for name, dtype, shape, begin, end in rows)
    except (ValueError, TypeError) as error:
        raise Damaged(path=path, detail="its tensor inventory makes no sense") from error

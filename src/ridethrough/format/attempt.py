"""Records of a run, of an attempt, and of its roster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridethrough.errors import Damaged
from ridethrough.format import record
from ridethrough.format.seal import decode_attempt, decode_parent, encode_parent
from ridethrough.types import AttemptRef, Parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What `run.json` says. It is also the marker that the right disk is mounted."""

    run_uid: str
    name: str
    created_at: str

    def encode(self) -> bytes:
        """The file."""
        return record.encode("run", {"run_uid": self.run_uid, "name": self.name, "created_at": self.created_at})

    @staticmethod
    def decode(data: bytes, *, path: str) -> Run:
        """The record, if intact."""
        fields = record.decode("run", data, path=path)
        return Run(
            run_uid=record.identity(fields, "run_uid", path=path),
            name=record.field(fields, "name", str, path=path),
            created_at=record.field(fields, "created_at", str, path=path),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterPart:
    """One part and the ranks that hold it, in the order in which they are asked to write it."""

    name: str
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who trains and which parts make a checkpoint; fixed for an attempt."""

    run_uid: str
    attempt: AttemptRef
    nodes: tuple[str, ...]
    """Node of each rank, by rank."""
    parts: tuple[RosterPart, ...]

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.nodes)

    @property
    def part_names(self) -> frozenset[str]:
        """The parts a checkpoint must have."""
        return frozenset(part.name for part in self.parts)

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "run_uid": self.run_uid,
            "attempt": {"seq": self.attempt.seq, "nonce": self.attempt.nonce},
            "nodes": list(self.nodes),
            "parts": [{"name": part.name, "holders": list(part.holders)} for part in self.parts],
        }

    @property
    def digest(self) -> str:
        """Names this roster; every seal carries it, so any copy of the roster with this digest is the right one."""
        return record.digest(self.fields())

    def encode(self) -> bytes:
        """The file."""
        return record.encode("roster", self.fields())

    @staticmethod
    def decode(data: bytes, *, path: str) -> Roster:
        """The record, if intact."""
        return Roster.from_fields(record.decode("roster", data, path=path), path=path)

    @staticmethod
    def from_fields(fields: dict[str, Any], *, path: str) -> Roster:
        """From JSON, also where a manifest carries it."""
        nodes = record.field(fields, "nodes", list, path=path)
        if not nodes or not all(type(node) is str for node in nodes):
            raise Damaged(path=path, detail="its nodes make no sense")
        try:
            parts = tuple(_decode_part(part, len(nodes)) for part in record.field(fields, "parts", list, path=path))
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(path=path, detail="its parts make no sense") from error
        if not parts:  # whatever has been sealed would be a whole checkpoint
            raise Damaged(path=path, detail="it names no parts")
        return Roster(
            run_uid=record.identity(fields, "run_uid", path=path),
            attempt=decode_attempt(fields.get("attempt"), path=path),
            nodes=tuple(nodes),
            parts=parts,
        )


def _decode_part(part: Any, world_size: int) -> RosterPart:
    name, holders = part["name"], part["holders"]
    if type(name) is not str or type(holders) is not list or not holders:
        raise ValueError("no part")
    if not all(type(rank) is int and 0 <= rank < world_size for rank in holders):
        raise ValueError("no ranks of this roster")
    return RosterPart(name=name, holders=tuple(holders))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the run: what its start agreement decided."""

    run_uid: str
    attempt: AttemptRef
    parent: Parent | None
    snapshot_interval_steps: int
    world_size: int
    roster_digest: str
    started_at: str

    def encode(self) -> bytes:
        """The file."""
        return record.encode(
            "attempt",
            {
                "run_uid": self.run_uid,
                "attempt": {"seq": self.attempt.seq, "nonce": self.attempt.nonce},
                "parent": encode_parent(self.parent),
                "snapshot_interval_steps": self.snapshot_interval_steps,
                "world_size": self.world_size,
                "roster_digest": self.roster_digest,
                "started_at": self.started_at,
            },
        )

    @staticmethod
    def decode(data: bytes, *, path: str) -> Attempt:
        """The record, if intact."""
        fields = record.decode("attempt", data, path=path)
        return Attempt(
            run_uid=record.identity(fields, "run_uid", path=path),
            attempt=decode_attempt(fields.get("attempt"), path=path),
            parent=decode_parent(fields.get("parent"), path=path),
            snapshot_interval_steps=record.field(fields, "snapshot_interval_steps", int, path=path),
            world_size=record.field(fields, "world_size", int, path=path),
            roster_digest=record.identity(fields, "roster_digest", path=path),
            started_at=record.field(fields, "started_at", str, path=path),
        )

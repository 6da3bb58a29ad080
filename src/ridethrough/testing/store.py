"""A run without a trainer: checkpoints whose every byte follows from a seed, saved by the real store.

`SimpleStore` starts attempts, commits checkpoints and loads the newest one back, with the same
functions that the persister and the trainer use, and knows what every byte must be.
`save_once` is one save from end to end: commit, manifest, verification, quarantine, retention.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ridethrough.errors import Damaged, RideThroughError
from ridethrough.format import layout, part, tree
from ridethrough.format.attempt import Attempt, Roster, RosterPart
from ridethrough.format.seal import Seal, save_id
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import Checkpoint, Problem, candidates, read_catalog
from ridethrough.store.commit import PartSave, commit_part, write_manifest, write_meta
from ridethrough.store.retain import Retention
from ridethrough.store.start import open_run, write_attempt
from ridethrough.store.verify import intact_parts, load_part, verify_checkpoint
from ridethrough.store.writer import RunWriter
from ridethrough.testing.clock import FakeClock
from ridethrough.types import AttemptRef, Parent

STAGES = ("commit", "verify", "retention", "idle")
"""What `save_once` says to its `on_stage`, in order. From "verify" on the save is durable and may be called saved."""

_BLOCK_BYTES = (1 << 20) + 7
_LOWEST_BIT = bytes(value & 1 for value in range(256))


def random_bytes(seed: int, name: str, size_bytes: int) -> bytes:
    """The same bytes for the same arguments, on every machine; beyond a mebibyte they repeat at an odd distance."""
    block = hashlib.shake_128(f"{seed}\0{name}".encode()).digest(min(size_bytes, _BLOCK_BYTES))
    return (block * -(-size_bytes // _BLOCK_BYTES))[:size_bytes]


def simple_payload(seed: int, step: int, part_name: str, *, size_bytes: int) -> bytes:
    """A part's payload of about `size_bytes`: three tensors of different types, filled from the seed."""
    count = max(size_bytes // 5, 1)
    laid = part.lay_out([("weight", "F32", [count]), ("mask", "BOOL", [count]), ("step", "I64", [])])
    body = bytearray(random_bytes(seed, f"{part_name}/{step}", laid.size_bytes - len(laid.header)))
    for spec in laid.tensors:
        if spec.dtype == "BOOL":
            body[spec.begin : spec.end] = body[spec.begin : spec.end].translate(_LOWEST_BIT)
        elif spec.dtype == "I64":
            body[spec.begin : spec.end] = step.to_bytes(8, "little")
    return laid.header + bytes(body)


def simple_state(seed: int, step: int, part_name: str) -> dict[str, Any]:
    """The small state beside the payload, as it was before it was encoded."""
    return {"step": step, "part": part_name, "seed": seed, "betas": (0.9, 0.999), "by_rank": {0: "a", 1: "b"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that was proven while it was read."""

    step: int
    attempt: AttemptRef
    dir_name: str
    payloads: dict[str, bytes]
    states: dict[str, Any]
    rejected: tuple[Problem, ...]
    """Newer or other copies that turned out to be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What `save_once` did."""

    step: int
    seals: tuple[Seal, ...]
    is_verified: bool
    quarantined: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def load_newest(fs: FileSystem, run_dir: str, *, past_cache: bool = True) -> Loaded | None:
    """The best checkpoint that can be proven, None if there is none; falls back part by part, then step by step.

    Raises:
        StorageUnreachable: Something could not be read now.
    """
    rejected: list[Problem] = []
    for checkpoint in candidates(read_catalog(fs, run_dir)):
        loaded = _load(fs, run_dir, checkpoint, rejected, past_cache=past_cache)
        if loaded is not None:
            return loaded
    return None


def _load(fs: FileSystem, run_dir: str, checkpoint: Checkpoint, rejected: list[Problem], *, past_cache: bool) -> Loaded | None:
    payloads: dict[str, bytes] = {}
    states: dict[str, Any] = {}
    for seal in checkpoint.seals:
        if seal.part in payloads:
            continue
        try:
            payloads[seal.part] = bytes(load_part(fs, run_dir, checkpoint.dir_name, seal, past_cache=past_cache))
            states[seal.part] = tree.decode(seal.tree, lambda name: name, path=checkpoint.dir_name)
        except Damaged as error:
            rejected.append(Problem(path=os.path.join(checkpoint.dir_name, seal.payload_name), error=error))
    if checkpoint.roster is None or checkpoint.roster.part_names - payloads.keys():
        return None
    return Loaded(
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        dir_name=checkpoint.dir_name,
        payloads=payloads,
        states=states,
        rejected=tuple(rejected),
    )


@dataclass(slots=True, kw_only=True)
class SimpleStore:
    """A run at `run_dir`; `start` begins an attempt, `commit` makes checkpoints.

    Parts are ``replicated``, held by every rank, and one private part a rank if `has_private_parts`.
    """

    fs: FileSystem
    run_dir: str
    seed: int = 0
    part_bytes: int = 4096
    world_size: int = 2
    has_private_parts: bool = True
    node: str = "node-0"
    retention: Retention = field(default_factory=Retention)
    clock: Clock = field(default_factory=FakeClock)
    verified: set[str] = field(default_factory=set)
    run_uid: str = ""
    attempt: AttemptRef = field(default_factory=lambda: AttemptRef(seq=0, nonce=""))
    parent: Parent | None = None
    roster: Roster | None = None
    resumed_dir: str | None = None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts, in roster order."""
        private = range(self.world_size) if self.has_private_parts else ()
        return (layout.REPLICATED, *(layout.rank_part(rank) for rank in private))

    def start(self, *, parent: Parent | None = None, seq: int | None = None, nonce: str | None = None) -> AttemptRef:
        """A new attempt owns the run, durably; the run is made if it is not there.

        Args:
            parent: Where it goes on from.
            seq: Its number; one more than any seen unless given.
            nonce: Its nonce; follows from seed and number unless given.
        """
        self.run_uid = open_run(self.fs, self.clock, self.run_dir, known_uid=None, is_fresh=False).run_uid
        if seq is None:
            seq = read_catalog(self.fs, self.run_dir).next_seq
        if nonce is None:
            nonce = random_bytes(self.seed, f"nonce/{seq}", 16).hex()
        self.attempt = AttemptRef(seq=seq, nonce=nonce)
        self.parent = parent
        self.roster = Roster(
            run_uid=self.run_uid,
            attempt=self.attempt,
            nodes=(self.node,) * self.world_size,
            parts=(
                RosterPart(name=layout.REPLICATED, holders=tuple(range(self.world_size))),
                *(RosterPart(name=name, holders=(rank,)) for rank, name in enumerate(self.part_names[1:])),
            ),
        )
        record = Attempt(
            run_uid=self.run_uid,
            attempt=self.attempt,
            parent=parent,
            snapshot_interval_steps=1,
            world_size=self.world_size,
            roster_digest=self.roster.digest,
            started_at=self.clock.now_at().isoformat(timespec="seconds"),
        )
        write_attempt(self.fs, self.run_dir, record, self.roster)
        return self.attempt

    def resume(self) -> int:
        """A new attempt goes on from the newest restorable checkpoint; its step, 0 if there is none."""
        open_run(self.fs, self.clock, self.run_dir, known_uid=None, is_fresh=False)
        loaded = load_newest(self.fs, self.run_dir)
        if loaded is None:
            self.start()
            return 0
        self.start(parent=Parent(attempt=loaded.attempt, step=loaded.step))
        self.resumed_dir = loaded.dir_name
        self.verified.add(save_id(self.run_uid, loaded.attempt.nonce, loaded.step))
        return loaded.step

    def truth(self, step: int, part_name: str) -> bytes:
        """What the payload of this part and step must be."""
        return simple_payload(self.seed, step, part_name, size_bytes=self.part_bytes)

    def state(self, step: int, part_name: str) -> dict[str, Any]:
        """What the small state of this part and step must be."""
        return simple_state(self.seed, step, part_name)

    def dir_name(self, step: int) -> str:
        """Directory of this attempt's checkpoint of a step."""
        return layout.step_dir(step, save_id(self.run_uid, self.attempt.nonce, step))

    def part_save(self, step: int, part_name: str) -> PartSave:
        """One part as the persister hands it to the store."""
        assert self.roster is not None, "start() comes first"
        return PartSave(
            run_uid=self.run_uid,
            attempt=self.attempt,
            parent=self.parent,
            step=step,
            save_id=save_id(self.run_uid, self.attempt.nonce, step),
            part=part_name,
            node=self.node,
            roster_digest=self.roster.digest,
            payload=memoryview(self.truth(step, part_name)),
            tree=tree.encode(self.state(step, part_name), part_name, lambda path, value: NotImplemented),
            meta={"step": step, "saved_at": self.clock.now_at().isoformat(timespec="seconds"), "metrics": {"loss": 1.0 / (1 + step)}},
        )

    def commit_parts(self, step: int, *, parts: tuple[str, ...] | None = None) -> tuple[Seal, ...]:
        """These parts of the step (all unless given) are sealed."""
        return tuple(commit_part(self.fs, self.run_dir, self.part_save(step, name)) for name in parts or self.part_names)

    def finish(self, seals: tuple[Seal, ...]) -> None:
        """Manifest and meta.json stand beside the seals."""
        assert self.roster is not None, "start() comes first"
        write_meta(self.fs, self.run_dir, seals[0])
        write_manifest(self.fs, self.run_dir, seals, self.roster)

    def commit(self, *steps: int) -> tuple[Seal, ...]:
        """A whole checkpoint of each step, with manifest and meta.json; the seals of the last one."""
        seals: tuple[Seal, ...] = ()
        for step in steps:
            seals = self.commit_parts(step)
            self.finish(seals)
        return seals

    def writer(self, note: Callable[..., None]) -> RunWriter:
        """The writer of this attempt, which knows what was verified before."""
        assert self.roster is not None, "start() comes first"
        writer = RunWriter(
            self.fs,
            self.run_dir,
            attempt=self.attempt,
            roster=self.roster,
            retention=self.retention,
            monitor=None,
            resumed_dir=self.resumed_dir,
            node=self.node,
            note=note,
        )
        writer.verified = self.verified
        return writer

    def is_true(self, loaded: Loaded) -> bool:
        """What was loaded is, bit for bit, what was saved at its step."""
        wanted = {name: self.truth(loaded.step, name) for name in self.part_names}
        return loaded.payloads == wanted and loaded.states == {name: self.state(loaded.step, name) for name in self.part_names}


def save_once(store: SimpleStore, step: int, *, on_stage: Callable[[str], None] = lambda stage: None) -> Saved:
    """One save from end to end, by the store's own writer, as the persister makes it.

    Args:
        store: The run, with a started attempt.
        step: Step of the save.
        on_stage: Called with each of `STAGES` as it begins.
    """
    events: list[tuple[str, dict[str, Any]]] = []
    writer = store.writer(lambda kind, **data: events.append((kind, data)))
    on_stage("commit")
    seals = writer.commit(store.part_save(step, name) for name in store.part_names)
    is_verified = True
    on_stage("verify")
    try:
        writer.describe(step, seals[0].save_id)
        writer.prove(seals)
        writer.verified.add(seals[0].save_id)
    except Damaged:
        is_verified = False
    if is_verified:
        on_stage("retention")
        writer.prune(store.dir_name(step))
    on_stage("idle")

    def of(kind: str) -> tuple[str, ...]:
        return tuple(data["dir_name"] for found, data in events if found == kind)

    return Saved(step=step, seals=seals, is_verified=is_verified, quarantined=of("part.quarantined"), removed=of("checkpoint.removed"))


def restorable_steps(fs: FileSystem, run_dir: str) -> dict[int, RideThroughError | None]:
    """Every complete checkpoint on the lineage by step, with what is wrong with its bytes (None if intact)."""
    found: dict[int, RideThroughError | None] = {}
    for checkpoint in candidates(read_catalog(fs, run_dir)):
        results = verify_checkpoint(fs, run_dir, checkpoint)
        is_whole = checkpoint.roster is not None and checkpoint.roster.part_names <= intact_parts(results)
        found[checkpoint.step] = None if is_whole else next(r.error for r in results if r.error is not None)
    return found

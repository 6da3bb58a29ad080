"""The persister: from posted slots to durable, verified checkpoints. The only writer.

Per save (numbers as in `store`): wait until every rank of the node has posted the step, pin
their slots, commit the parts this node is to write, answer *durable*; then write manifest and
meta.json, read everything back past the cache, answer *verified*, and only then let retention
remove what is no longer needed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ridethrough.errors import Damaged, Internal, RideThroughError, SaveFailed, StorageError
from ridethrough.format import layout, part
from ridethrough.format.seal import Seal, save_id
from ridethrough.journal import Journal
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot import link as names
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan, first_save
from ridethrough.snapshot.slots import Slot, SlotPart
from ridethrough.store.commit import PartSave
from ridethrough.store.writer import RunWriter, as_suspects

_IDLE_S = 0.02
_BUSY_S = 0.002
_PENDING_EVENTS = 1000
_CRASHES_PER_SAVE = 2


@dataclass(slots=True)
class _Answer:
    """The persister's board."""

    launch: int = 0
    busy: dict[str, Any] | None = None
    taken: int = -1
    durable: dict[str, Any] | None = None
    verified: dict[str, Any] | None = None
    failed: dict[str, Any] | None = None
    failures_in_a_row: int = 0
    flushed: int = 0
    diverged: dict[str, Any] | None = None
    journal_error: str | None = None
    save_s: float | None = None
    crashes: list[int] = field(default_factory=list)
    """Steps at whose save a predecessor died."""
    pid: int = field(default_factory=os.getpid)


class Persister:
    """Serves one keeper until it dies. `tick` does at most one save."""

    def __init__(self, fs: FileSystem, clock: Clock, link: KeeperLink, *, echo: Callable[[str, dict[str, Any]], None]) -> None:
        self._echo = echo
        self._fs = fs
        self._clock = clock
        self._link = link
        self._control = link.board(names.CONTROL)
        self._board = link.board(names.PERSIST)
        # A successor goes on from what its predecessor had answered; what it was busy with is lost.
        before = self._board.read()
        self._answer = _Answer(**{key: value for key, value in before.items() if key not in ("pid", "busy")})
        if before.get("busy"):
            crashed = int(before["busy"]["step"])
            self._answer.crashes = [*self._answer.crashes[-9:], crashed]
        self._plan: Plan | None = None
        self._plan_board: Board | None = None
        self._slots: dict[str, Slot] = {}
        self._journal: Journal | None = None
        self._writer: RunWriter | None = None
        self._pending: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_PENDING_EVENTS)
        self._done_announcement = -1
        self._publish()

    def run(self) -> None:
        """Serves until the keeper dies (raises KeeperGone)."""
        while True:
            self._clock.sleep(_BUSY_S if self.tick() else _IDLE_S)

    def _publish(self) -> None:
        self._board.write({name: getattr(self._answer, name) for name in _Answer.__slots__})

    def _note(self, kind: str, **data: Any) -> None:
        """The event is in the journal, or queued with its refusal shown by `status`: a full disk must not stop the persister."""
        self._echo(kind, data)
        self._pending.append((kind, data))
        if self._journal is None:
            return
        try:
            while self._pending:
                self._journal.append(self._pending[0][0], **self._pending[0][1])
                self._pending.popleft()
            self._answer.journal_error = None
        except (StorageError, OSError) as error:
            self._answer.journal_error = str(error)

    # -- one round -------------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Do what is due; True if a save is awaited, so that the next round should come soon."""
        control = self._control.read()
        launch = int(control.get("launch", 0))
        if launch != self._answer.launch:
            self._change_launch(launch)
        if not launch or not self._load_plan(launch):
            return False
        assert self._plan is not None
        flush = control.get("flush")
        if flush and int(flush["id"]) > self._answer.flushed:
            self._flush(int(flush["id"]), str(flush["reason"]))
        announced = control.get("announced")
        if announced is None:
            announced = first_save(self._plan.restored_step, self._plan.save_interval_steps)
        announced, number = int(announced), int(control.get("announcement", 0))
        durable = self._answer.durable
        if number <= self._done_announcement or (durable and durable["launch"] == launch and durable["step"] >= announced):
            return False
        state = self._slots_at(announced)
        if state == "missed":
            self._done_announcement = number
            self._fail(announced, SaveFailed.code, "a rank had already passed this step when the save was announced")
        elif state == "ready":
            self._done_announcement = number
            self._save(announced)
        return True

    def _change_launch(self, launch: int) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._plan = None
        self._plan_board = None
        self._done_announcement = -1
        self._answer.launch = launch
        self._answer.taken = -1
        self._publish()

    def _load_plan(self, launch: int) -> bool:
        if self._plan is not None:
            return True
        if self._plan_board is None:
            if names.plan_board(launch) not in self._link.names():
                return False
            self._plan_board = self._link.board(names.plan_board(launch), names.PLAN_BYTES)
        value = self._plan_board.read()
        if not value:
            return False
        plan = Plan.from_board(value)
        path = layout.journal_path(plan.run_dir, plan.node)
        if self._journal is None or self._journal.path != path:
            self._journal = Journal(self._fs, self._clock, path, role="persister")
        self._plan = plan
        self._writer = RunWriter(
            self._fs,
            plan.run_dir,
            attempt=plan.attempt,
            roster=plan.roster,
            retention=plan.retention,
            monitor=plan.monitor,
            resumed_dir=plan.resumed_dir,
            note=self._note,
        )
        self._writer.learn_verified()
        self._writer.set_aside(as_suspects(plan.damaged))
        return True

    # -- slots -----------------------------------------------------------------------------------------------------

    def _refresh_slots(self) -> dict[int, list[Slot]]:
        assert self._plan is not None
        prefix = f"{self._answer.launch}/slot/"
        found = self._link.names()
        for name in [n for n in self._slots if n not in found]:
            self._slots.pop(name).close()
        for name, size in found.items():
            if name.startswith(prefix) and (name not in self._slots or self._slots[name].size_bytes != size):
                if name in self._slots:
                    self._slots.pop(name).close()
                self._slots[name] = self._link.slot(name)
        by_rank: dict[int, list[Slot]] = {rank: [] for rank in self._plan.local_ranks}
        for name, slot in self._slots.items():
            by_rank.setdefault(int(name.split("/")[2]), []).append(slot)
        return by_rank

    def _slots_at(self, step: int) -> str:
        by_rank = self._refresh_slots()
        posted = {rank: {slot.posted_step() for slot in slots} for rank, slots in by_rank.items()}
        if all(step in steps for steps in posted.values()):
            return "ready"
        if any(step not in steps and max((s for s in steps if s is not None), default=-1) > step for steps in posted.values()):
            return "missed"
        return "wait"

    def _pin(self, step: int) -> dict[int, Slot] | None:
        """Every rank's slot of this step, pinned; None if one is gone."""
        pinned: dict[int, Slot] = {}
        for rank, slots in self._refresh_slots().items():
            held = next((slot for slot in slots if slot.posted_step() == step and slot.pin(step)), None)
            if held is None:
                for slot in pinned.values():
                    slot.release()
                return None
            pinned[rank] = held
        return pinned

    def _flush(self, flush_id: int, reason: str) -> None:
        """The newest step that every rank of the node has is durable: the trainers are dead or stuck."""
        by_rank = self._refresh_slots()
        common = (
            set.intersection(*({s for slot in slots if (s := slot.posted_step()) is not None} for slots in by_rank.values())) if by_rank else set()
        )
        durable = self._answer.durable
        newest = max(common, default=-1)
        have = durable["step"] if durable and durable["launch"] == self._answer.launch else -1
        kind = "flush.started" if newest > have else "flush.unneeded"
        self._note(kind, reason=reason, step=newest if newest >= 0 else None, durable_step=have if have >= 0 else None)
        if newest > have:
            self._save(newest)
        self._answer.flushed = flush_id
        self._publish()

    # -- one save --------------------------------------------------------------------------------------------------

    def _phase(self, step: int, phase: str) -> None:
        self._answer.busy = {"step": step, "phase": phase, "since_s": self._clock.monotonic_s()}
        self._publish()

    def _fail(self, step: int, code: str, message: str) -> None:
        self._answer.busy = None
        self._answer.taken = max(self._answer.taken, step)
        self._answer.failures_in_a_row += 1
        self._answer.failed = {"launch": self._answer.launch, "step": step, "code": code, "message": message, "at_s": self._clock.monotonic_s()}
        self._note("checkpoint.failed", step=step, code=code, message=message)
        self._publish()

    def _save(self, step: int) -> None:
        assert self._writer is not None
        if self._answer.crashes.count(step) >= _CRASHES_PER_SAVE:
            # Killed once is bad luck and the save is tried again; twice at the same save is a bug of ours.
            self._fail(step, Internal.code, "the persister died at this save before, see its traceback on stderr")
            return
        began_s = self._clock.monotonic_s()
        self._phase(step, "pinning")
        pinned = self._pin(step)
        if pinned is None:
            self._fail(step, SaveFailed.code, "a snapshot was overwritten before it could be pinned")
            return
        self._answer.taken = max(self._answer.taken, step)
        self._phase(step, "writing")
        contents: dict[int, tuple[tuple[SlotPart, ...], dict[str, Any]]] = {}
        try:
            contents = {rank: slot.read() for rank, slot in pinned.items()}
            captured_s = min((float(index["captured_s"]) for _, index in contents.values() if "captured_s" in index), default=began_s)
            seals = self._writer.commit(self._part_saves(step, contents))
            self._compare_holders(step, seals, contents)
        except (RideThroughError, OSError) as error:
            # A save that fails does not stop training: it is a record, an alarm and a wider exposure.
            self._fail(step, getattr(error, "code", StorageError.code), str(error))
            return
        finally:
            contents.clear()  # the views into the slots must go before a slot can be unmapped
            for slot in pinned.values():
                slot.release()
        self._settle(step, seals, began_s, captured_s=captured_s)

    def _part_saves(self, step: int, contents: dict[int, tuple[tuple[SlotPart, ...], dict[str, Any]]]) -> list[PartSave]:
        """The parts this node is to write, each as its first living holder has it."""
        assert self._plan is not None
        plan = self._plan
        # One object for all parts: the first rank's time and metrics stand in every seal.
        index = contents[min(contents)][1]
        saves = []
        for name in plan.my_parts():
            _, first = _holders(name, contents)[0]
            saves.append(
                PartSave(
                    run_uid=plan.run_uid,
                    attempt=plan.attempt,
                    parent=plan.parent,
                    step=step,
                    save_id=save_id(plan.run_uid, plan.attempt.nonce, step),
                    part=name,
                    node=plan.node,
                    roster_digest=plan.roster.digest,
                    payload=first.payload,
                    tree=first.tree,
                    meta={**plan.meta, "step": step, "saved_at": index["captured_at"], "metrics": index["metrics"]},
                )
            )
        return saves

    def _compare_holders(self, step: int, seals: tuple[Seal, ...], contents: dict[int, tuple[tuple[SlotPart, ...], dict[str, Any]]]) -> None:
        """What several ranks hold must be the same; if not, that is the silent divergence nobody sees in the loss."""
        for seal in seals:
            (first_rank, first), *others = _holders(seal.part, contents)
            for rank, other in others:
                if part.checksum_chunks(other.payload) != seal.chunks:
                    names_differing = _differing_tensors(first.payload, other.payload)[:8]
                    self._answer.diverged = {"step": step, "part": seal.part, "ranks": [first_rank, rank], "tensors": names_differing}
                    self._note("replicas.diverged", step=step, part=seal.part, ranks=[first_rank, rank], tensors=names_differing)

    def _settle(self, step: int, seals: tuple[Seal, ...], began_s: float, *, captured_s: float) -> None:
        """Durable is said, then proven by reading back, then retention may run."""
        assert self._writer is not None
        now_s = self._clock.monotonic_s()
        first = seals[0]
        dir_name = layout.step_dir(step, first.save_id)
        size = sum(seal.payload_bytes for seal in seals)
        before = self._answer.durable
        self._answer.save_s = now_s - began_s
        self._answer.durable = {
            "launch": self._answer.launch,
            "step": step,
            "save_id": first.save_id,
            "dir_name": dir_name,
            "at_s": now_s,
            "captured_s": captured_s,
        }
        self._answer.failures_in_a_row = 0
        self._phase(step, "verifying")
        self._note(
            "checkpoint.durable",
            step=step,
            attempt_seq=first.attempt.seq,
            save_id=first.save_id,
            dir_name=dir_name,
            size_bytes=size,
            save_s=round(now_s - began_s, 4),
        )
        try:
            self._writer.settle(seals)
        except Damaged as error:
            self._answer.durable = before
            self._fail(step, error.code, f"read back wrong: {error}")
            return
        except (StorageError, OSError) as error:
            self._fail(step, getattr(error, "code", StorageError.code), f"written but not verified: {error}")
            return
        self._answer.verified = {"launch": self._answer.launch, "step": step, "save_id": first.save_id, "at_s": self._clock.monotonic_s()}
        self._phase(step, "retention")
        self._note("checkpoint.verified", step=step, save_id=first.save_id)
        self._writer.prune(dir_name)
        self._answer.busy = None
        self._publish()


def _holders(name: str, contents: dict[int, tuple[tuple[SlotPart, ...], dict[str, Any]]]) -> list[tuple[int, SlotPart]]:
    """Every local rank's copy of a part, in rank order."""
    return [(rank, found) for rank, (parts, _) in sorted(contents.items()) for found in parts if found.name == name]


def _differing_tensors(first: memoryview, second: memoryview) -> list[str]:
    """Names of the tensors whose bytes differ between two payloads."""
    specs, base = part.parse_header(first, path="slot")
    others, other_base = part.parse_header(second, path="slot")
    by_name = {spec.name: spec for spec in others}
    found = []
    for spec in specs:
        other = by_name.get(spec.name)
        if other is None or first[base + spec.begin : base + spec.end] != second[other_base + other.begin : other_base + other.end]:
            found.append(spec.name)
    return found

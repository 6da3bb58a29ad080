"""The persister: from posted slots to durable, verified checkpoints. The only writer.

Per save (numbers as in `store`): wait until every rank of the node has posted the step, pin
their slots, commit the parts this node is to write and answer *sealed*. If these are all parts of
the roster the save is *durable*; with more nodes the lead says so when it has heard of every part.
Then everything written here is read back past the cache; when that is so on every node the save is
*verified*, and only then may retention remove what is no longer needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
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
from ridethrough.snapshot.copier import held_back
from ridethrough.snapshot.holdings import Holdings
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan, first_save
from ridethrough.snapshot.slots import SlotPart
from ridethrough.store.commit import PartSave
from ridethrough.store.writer import RunWriter, as_suspects

Content = tuple[tuple[SlotPart, ...], dict[str, Any]]
"""Parts and index of one slot."""

_IDLE_S = 0.02
_BUSY_S = 0.002
_PENDING_EVENTS = 1000
_CRASHES_PER_SAVE = 2
_SEALED_KEPT = 4
_REPLICAS_WAIT_S = 2.0
"""Longer than a part of 256 KiB takes; a slot is kept meanwhile, of the few that there are."""


@dataclass(slots=True)
class _Answer:
    """The persister's board."""

    launch: int = 0
    busy: dict[str, Any] | None = None
    taken: int = -1
    sealed: list[dict[str, Any]] = field(default_factory=list)
    """The newest saves whose parts of ours are sealed: launch, step, dark nodes, digests, whether read back."""
    durable: dict[str, Any] | None = None
    verified: dict[str, Any] | None = None
    failed: dict[str, Any] | None = None
    failures_in_a_row: int = 0
    flushed: int = 0
    diverged: dict[str, Any] | None = None
    journal_error: str | None = None
    save_s: float | None = None
    differs_told: int = 0
    """The launch of which it was said what is different from what made its checkpoint."""
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
        self._holdings = Holdings(link)
        self._holdings.change_launch(self._answer.launch)
        self._journal: Journal | None = None
        self._writer: RunWriter | None = None
        self._pending: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_PENDING_EVENTS)
        self._done: tuple[int, int, frozenset[str]] | None = None
        """The announcement that was acted upon last: number, step, dark nodes."""
        self._ready: tuple[int, float] | None = None
        """The step whose save only waits for replicas, and since when."""
        self._sealed_parts: dict[str, set[str]] = {}
        self._refusal_heard: dict[str, Any] | None = None
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
        if control.get("is_over"):
            return False
        self._hear(control)
        flush = control.get("flush")
        if flush and int(flush["id"]) > self._answer.flushed:
            self._flush(flush)
        announced = control.get("announced")
        if announced is None:
            announced = first_save(self._plan.restored_step, self._plan.save_interval_steps)
        announced, number, dark = int(announced), int(control.get("announcement", 0)), frozenset(control.get("dark", ()))
        durable = self._answer.durable
        # Whatever its number: after a partition the word that wins may have counted less far than the one we had heard.
        word = (number, announced, dark)
        if word == self._done or (durable and durable["launch"] == launch and durable["step"] >= announced) or self._is_sealed(announced, dark):
            return False
        state = self._holdings.state_at(announced, self._plan.local_ranks)
        if state == "missed":
            self._done = word
            self._fail(announced, SaveFailed.code, "a rank had already passed this step when the save was announced")
        elif state == "ready" and not self._awaits_replicas(announced, dark):
            self._done = word
            self._save(announced, dark)
        return True

    def _is_sealed(self, step: int, dark: frozenset[str]) -> bool:
        """We, or a predecessor in this launch, have sealed our parts of a save that others may still be at."""
        found = [] if self._is_alone else self._answer.sealed
        return any(s["launch"] == self._answer.launch and s["step"] == step and dark == set(s["dark"]) for s in found)

    def _awaits_replicas(self, step: int, dark: frozenset[str]) -> bool:
        """What we are to write for the dark nodes may still be on its way; for a moment that is worth waiting for."""
        assert self._plan is not None
        wanted = {rank for rank in self._foreign_ranks(dark) if self._plan.roster.nodes[rank] in dark} if dark else set()
        if not wanted or self._holdings.has_replicas(step, wanted):
            return False
        now_s = self._clock.monotonic_s()
        if self._ready is None or self._ready[0] != step:
            self._ready = (step, now_s)
        return now_s - self._ready[1] <= _REPLICAS_WAIT_S

    def _hear(self, control: dict[str, Any]) -> None:
        """What the lead of several nodes says of saves that are on more than one of them."""
        assert self._plan is not None
        if self._is_alone:
            return
        refused = control.get("refused")
        if refused and refused != self._refusal_heard:
            self._refusal_heard = refused
            failed = self._answer.failed or {}
            if failed.get("launch") != self._answer.launch or failed.get("step") != refused["step"]:
                self._fail(int(refused["step"]), str(refused["code"]), str(refused["message"]))
        durable = self._answer.durable
        here = int(durable["step"]) if durable and durable["launch"] == self._answer.launch else None
        confirmed = control.get("confirmed") or {}
        said = int(confirmed["step"]) if confirmed else None
        if said != here:
            # Also backwards: a part that reads back wrong makes its save count no more.
            self._acknowledge(said)
        verified = self._answer.verified or {}
        # By launch too: an earlier one may have verified the same step, of which this one has made another save.
        if said is not None and confirmed["is_verified"] and (verified.get("launch"), verified.get("step")) != (self._answer.launch, said):
            self._conclude(said)

    @property
    def _is_alone(self) -> bool:
        """Every part of the job is on this node: nobody needs to confirm anything."""
        assert self._plan is not None
        return len(self._plan.nodes) == 1

    def _change_launch(self, launch: int) -> None:
        self._holdings.change_launch(launch)
        self._plan = None
        self._plan_board = None
        self._done, self._ready = None, None
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
            node=plan.node,
            has_own_disk=not plan.is_shared and len(plan.nodes) > 1,
            note=self._note,
        )
        self._sealed_parts.clear()
        self._refusal_heard = None
        self._writer.learn_verified()
        self._writer.set_aside(as_suspects(plan.damaged))
        if plan.differs and self._answer.differs_told != launch:
            self._note("resume.differs", step=plan.restored_step, dir_name=plan.resumed_dir, **plan.differs)
            self._answer.differs_told = launch
            self._publish()
        return True

    def _flush(self, flush: dict[str, Any]) -> None:
        """A step that is only in memory is durable: the trainers are dead or stuck.

        The lead of several nodes names the step; a node alone takes the newest that all its ranks have.
        """
        assert self._plan is not None
        step = flush.get("step")
        if step is None:
            step = self._holdings.newest_common(self._plan.local_ranks)
        durable = self._answer.durable
        have = durable["step"] if durable and durable["launch"] == self._answer.launch else -1
        kind = "flush.started" if step > have else "flush.unneeded"
        self._note(kind, reason=str(flush["reason"]), step=step if step >= 0 else None, durable_step=have if have >= 0 else None)
        if step > have:
            self._save(step, frozenset(flush.get("dark", ())))
        self._answer.flushed = int(flush["id"])
        self._publish()

    # -- one save --------------------------------------------------------------------------------------------------

    def _phase(self, step: int, phase: str) -> None:
        self._answer.busy = {"step": step, "phase": phase, "since_s": self._clock.monotonic_s()}
        self._publish()

    def _fail(self, step: int, code: str, message: str) -> None:
        self._answer.busy = None
        self._answer.taken = max(self._answer.taken, step)
        self._answer.failures_in_a_row += 1
        self._answer.failed = {
            "launch": self._answer.launch,
            "number": self._done[0] if self._done is not None else 0,
            "step": step,
            "code": code,
            "message": message,
            "at_s": self._clock.monotonic_s(),
        }
        self._note("checkpoint.failed", step=step, code=code, message=message)
        self._publish()

    def _save(self, step: int, dark: frozenset[str]) -> None:
        assert self._writer is not None
        assert self._plan is not None
        if self._answer.crashes.count(step) >= _CRASHES_PER_SAVE:
            # Killed once is bad luck and the save is tried again; twice at the same save is a bug of ours.
            self._fail(step, Internal.code, "the persister died at this save before, see its traceback on stderr")
            return
        began_s = self._clock.monotonic_s()
        self._phase(step, "pinning")
        pinned = self._holdings.pin(step, self._plan.local_ranks)
        if pinned is None:
            self._fail(step, SaveFailed.code, "a snapshot was overwritten before it could be pinned")
            return
        replicas = self._holdings.pin_replicas(step, self._foreign_ranks(dark))
        self._answer.taken = max(self._answer.taken, step)
        self._phase(step, "writing")
        contents: dict[int, Content] = {}
        try:
            contents = {rank: slot.read() for rank, slot in {**pinned, **replicas}.items()}
            captured_s = min((float(contents[rank][1].get("captured_s", began_s)) for rank in pinned), default=began_s)
            seals = self._writer.commit(self._part_saves(step, contents, dark))
            digests = self._compare_holders(step, seals, contents)
        except (RideThroughError, OSError) as error:
            # A save that fails does not stop training: it is a record, an alarm and a wider exposure.
            self._fail(step, getattr(error, "code", StorageError.code), str(error))
            return
        finally:
            contents.clear()  # the views into the slots must go before a slot can be unmapped
            for slot in pinned.values():
                slot.release()
            for slot in replicas.values():
                slot.close()
        self._seal(step, dark, seals, digests, began_s, captured_s=captured_s)

    def _foreign_ranks(self, dark: frozenset[str]) -> set[int]:
        """Ranks of other nodes whose private part is ours to write."""
        assert self._plan is not None
        holders = {p.name: p.holders for p in self._plan.roster.parts if len(p.holders) == 1}
        return {holders[name][0] for name in self._plan.parts_to_write(dark) if name in holders} - set(self._plan.local_ranks)

    def _part_saves(self, step: int, contents: dict[int, Content], dark: frozenset[str]) -> list[PartSave]:
        """The parts this node is to write, each as its first holder here has it; without those already sealed by us."""
        assert self._plan is not None
        plan = self._plan
        # One object for all parts: the first rank's time and metrics stand in every seal.
        index = contents[min(plan.local_ranks)][1]
        identity = save_id(plan.run_uid, plan.attempt.nonce, step)
        owners = {p.name: {plan.roster.nodes[rank] for rank in p.holders} for p in plan.roster.parts}
        saves = []
        for name in plan.parts_to_write(dark):
            if name in self._sealed_parts.get(identity, ()):
                continue
            held = _holders(name, contents)
            if not held:
                if owners[name] <= dark:
                    raise SaveFailed(step=step, waited_s=0.0, detail=f"nobody here holds part {name} of the dark node")
                continue  # one more copy of what its own node writes; it has not arrived
            saves.append(
                PartSave(
                    run_uid=plan.run_uid,
                    attempt=plan.attempt,
                    parent=plan.parent,
                    step=step,
                    save_id=identity,
                    part=name,
                    node=plan.node,
                    roster_digest=plan.roster.digest,
                    payload=held[0][1].payload,
                    tree=held[0][1].tree,
                    meta={**plan.meta, "step": step, "saved_at": index["captured_at"], "metrics": index["metrics"]},
                )
            )
        return saves

    def _compare_holders(self, step: int, seals: tuple[Seal, ...], contents: dict[int, Content]) -> dict[str, str]:
        """What several ranks hold must be the same; if not, that is the silent divergence nobody sees in the loss.

        Returns:
            A digest of each part that ranks of several nodes hold, for the lead to compare between nodes.
        """
        assert self._plan is not None
        sealed = {seal.part: seal.chunks for seal in seals}
        digests = {}
        for listed in self._plan.roster.parts:
            held = _holders(listed.name, contents)
            if len(listed.holders) == 1 or not held:
                continue
            (first_rank, first), *others = held
            chunks = sealed.get(listed.name) or part.checksum_chunks(first.payload)
            digests[listed.name] = hashlib.sha256("".join(chunks).encode()).hexdigest()[:16]
            for rank, other in others:
                if part.checksum_chunks(other.payload) != chunks:
                    names_differing = part.differing_tensors(first.payload, other.payload)[:8]
                    self._answer.diverged = {"step": step, "part": listed.name, "ranks": [first_rank, rank], "tensors": names_differing}
                    self._note("replicas.diverged", step=step, part=listed.name, ranks=[first_rank, rank], tensors=names_differing)
        return digests

    def _seal(self, step: int, dark: frozenset[str], seals: tuple[Seal, ...], digests: dict[str, str], began_s: float, *, captured_s: float) -> None:
        """Our parts are sealed; durable is said if nobody else has to write; then they are read back."""
        assert self._writer is not None
        assert self._plan is not None
        identity = save_id(self._plan.run_uid, self._plan.attempt.nonce, step)
        self._sealed_parts = {identity: {seal.part for seal in seals} | self._sealed_parts.get(identity, set())}
        size = sum(seal.payload_bytes for seal in seals)
        self._answer.save_s = self._clock.monotonic_s() - began_s
        self._answer.failures_in_a_row = 0
        mine: dict[str, Any] = {"launch": self._answer.launch, "step": step, "dark": sorted(dark), "digests": digests, "is_verified": False}
        mine |= {"captured_s": captured_s, "size_bytes": size, "save_s": round(self._answer.save_s, 4)}
        self._answer.sealed = [*[s for s in self._answer.sealed if s["step"] != step][-_SEALED_KEPT + 1 :], mine]
        before = self._answer.durable
        self._phase(step, "verifying")
        if self._is_alone:
            self._acknowledge(step)
        try:
            if self._is_alone:
                self._writer.describe(step, identity)
            self._writer.prove(seals)
        except Damaged as error:
            if self._is_alone:
                self._answer.durable = before
            self._unseal(step)
            self._fail(step, error.code, f"read back wrong: {error}")
            return
        except (StorageError, OSError) as error:
            self._unseal(step)
            self._fail(step, getattr(error, "code", StorageError.code), f"written but not verified: {error}")
            return
        mine["is_verified"] = True
        if self._is_alone:
            self._conclude(step)
        else:
            self._note("parts.sealed", step=step, save_id=identity, parts=len(seals), size_bytes=size, save_s=mine["save_s"])
        self._answer.busy = None
        self._publish()

    def _unseal(self, step: int) -> None:
        if not self._is_alone:
            self._answer.sealed = [s for s in self._answer.sealed if s["step"] != step]
            self._sealed_parts.clear()

    def _acknowledge(self, step: int | None) -> None:
        """Durable is said: every part of the roster is sealed."""
        assert self._plan is not None
        if step is None:
            self._answer.durable = None
            self._publish()
            return
        identity = save_id(self._plan.run_uid, self._plan.attempt.nonce, step)
        now_s = self._clock.monotonic_s()
        mine: dict[str, Any] = next((s for s in self._answer.sealed if s["step"] == step and s["launch"] == self._answer.launch), {})
        self._answer.durable = {
            "launch": self._answer.launch,
            "step": step,
            "save_id": identity,
            "dir_name": layout.step_dir(step, identity),
            "at_s": now_s,
            "captured_s": mine.get("captured_s", now_s),
        }
        self._publish()
        self._note(
            "checkpoint.durable",
            step=step,
            attempt_seq=self._plan.attempt.seq,
            save_id=identity,
            dir_name=layout.step_dir(step, identity),
            size_bytes=mine.get("size_bytes", 0),
            save_s=mine.get("save_s", 0.0),
            # What is in force now, for whoever asks later how large the run will become.
            retention=dataclasses.asdict(self._plan.retention),
        )

    def _conclude(self, step: int) -> None:
        """Verified is said: every part was read back. Retention may run."""
        assert self._writer is not None
        assert self._plan is not None
        identity = save_id(self._plan.run_uid, self._plan.attempt.nonce, step)
        self._writer.verified.add(identity)
        self._answer.verified = {"launch": self._answer.launch, "step": step, "save_id": identity, "at_s": self._clock.monotonic_s()}
        self._phase(step, "retention")
        self._note("checkpoint.verified", step=step, save_id=identity)
        # On a shared tier one node speaks for all: two that remove the same files would report each other's work as failures.
        if self._is_alone or not self._plan.is_shared or self._control.read().get("is_lead"):
            if not self._is_alone:
                self._describe(step, identity)
            self._writer.prune(layout.step_dir(step, identity), held_back=held_back(self._link))
        self._answer.busy = None
        self._publish()

    def _describe(self, step: int, identity: str) -> None:
        assert self._writer is not None
        try:
            self._writer.describe(step, identity)
        except (RideThroughError, OSError) as error:
            # meta.json and the manifest are copies of what stands in the seals.
            self._note("checkpoint.undescribed", step=step, message=str(error))


def _holders(name: str, contents: dict[int, Content]) -> list[tuple[int, SlotPart]]:
    """Every copy of a part here, in rank order."""
    return [(rank, found) for rank, (parts, _) in sorted(contents.items()) for found in parts if found.name == name]

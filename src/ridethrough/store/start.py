"""Starting an attempt on a tier: the run's marker, the attempt's claim and records, and their fence.

A sequence number belongs to whoever creates its claim: two halves of a job that do not see each
other, but do see the tier, cannot both have it. A claim that is left without records, by an
agreement that was cut, blocks its number for ever and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from ridethrough.errors import Damaged, Fenced, ForeignRecord, RideThroughError, StoreMissing, TierMissing, TwoHeads
from ridethrough.format import layout, record
from ridethrough.format.attempt import Attempt, Roster, Run
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import read_run
from ridethrough.store.commit import ensure_dir, publish
from ridethrough.types import AttemptRef


def open_run(fs: FileSystem, clock: Clock, run_dir: str, *, known_uid: str | None, is_fresh: bool) -> Run:
    """The run directory exists with its marker, durably.

    Args:
        fs: The tier.
        clock: For the creation date.
        run_dir: Where.
        known_uid: The run that this node remembers to have been here.
        is_fresh: The user wants to start anew where a run is remembered.

    Raises:
        TierMissing: A run is remembered here and its marker is gone: an unmounted disk is never a new run.
    """
    try:
        return read_run(fs, run_dir)
    except StoreMissing:
        if known_uid is not None and not is_fresh:
            raise TierMissing(path=run_dir, run_uid=known_uid) from None
    run = new_run(clock, run_dir)
    adopt_run(fs, run_dir, run)
    return run


def new_run(clock: Clock, run_dir: str) -> Run:
    """A run that nobody has heard of."""
    return Run(run_uid=uuid.uuid4().hex, name=os.path.basename(run_dir) or "run", created_at=clock.now_at().isoformat(timespec="seconds"))


def adopt_run(fs: FileSystem, run_dir: str, run: Run) -> None:
    """The marker of this run is in a place where there was none, durably."""
    # The marker comes last: a run that has it has its directories, whenever the power went.
    for name in (layout.ATTEMPTS, layout.JOURNAL):
        ensure_dir(fs, os.path.join(run_dir, name))
    publish(fs, os.path.join(run_dir, layout.RUN), run.encode())


# -- what a node remembers ---------------------------------------------------------------------------------------------


def remembered_run(fs: FileSystem, state_dir: str, run_dir: str) -> str | None:
    """The run uid that this node has seen at `run_dir`; None if none, empty if there was one and the note of it is damaged."""
    return _memory(fs, state_dir, run_dir)[0]


def remembered_storage(fs: FileSystem, state_dir: str, run_dir: str) -> str | None:
    """Whether `run_dir` was "shared" or "node-local" when this node trained there together with others; None if that is not known."""
    return _memory(fs, state_dir, run_dir)[1]


def _memory(fs: FileSystem, state_dir: str, run_dir: str) -> tuple[str | None, str | None]:
    try:
        fields = record.decode("node-run", fs.read(_memory_path(state_dir, run_dir), max_bytes=record.MAX_BYTES), path=state_dir)
        run_uid = record.identity(fields, "run_uid", path=state_dir)
    except FileNotFoundError:
        return None, None
    except Damaged:
        return "", None  # that there was a run is still known: an empty directory must not become a new one
    storage = fields.get("storage")
    return run_uid, storage if isinstance(storage, str) else None


def remember_run(fs: FileSystem, state_dir: str, run_dir: str, run_uid: str, storage: str | None = None) -> None:
    """This node knows, across power cuts, that the run lives at `run_dir`.

    Args:
        fs: The node's own disk.
        state_dir: Its directory for what it knows.
        run_dir: Where the run lives.
        run_uid: Which one.
        storage: "shared" or "node-local"; None leaves what is known of the same run.
    """
    known_uid, known_storage = _memory(fs, state_dir, run_dir)
    if storage is None and known_uid == run_uid:
        storage = known_storage
    if (known_uid, known_storage) == (run_uid, storage):
        return
    path = _memory_path(state_dir, run_dir)
    ensure_dir(fs, os.path.dirname(path))
    publish(fs, path, record.encode("node-run", {"run_uid": run_uid, "run_dir": run_dir, "storage": storage}))


def _memory_path(state_dir: str, run_dir: str) -> str:
    return os.path.join(state_dir, "runs", f"{run_key(run_dir)}.json")


def run_key(run_dir: str) -> str:
    """A file name for a run directory, for what this node keeps about it."""
    return record.digest(os.path.abspath(run_dir))[:24]


# -- an attempt --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Somebody wants to be the attempt with this number."""

    seq: int
    nonce: str
    """Empty if the claim is torn."""
    nodes: tuple[str, ...]
    """Who takes part in that start; empty if the claim is torn."""

    @property
    def label(self) -> str:
        """Names it in messages."""
        return AttemptRef(seq=self.seq, nonce=self.nonce or "unknown").label

    def is_over(self, nodes: Collection[str]) -> bool:
        """Its start agreement has ended: those who made it now make another. A node makes one start at a time."""
        return bool(self.nodes) and set(self.nodes) <= set(nodes)


def claim_attempt(fs: FileSystem, run_dir: str, attempt: AttemptRef, nodes: tuple[str, ...]) -> Claim | None:
    """The sequence number is this attempt's for good; or the claim of the other start that has it.

    Durability:
        The exclusive creation of the file decides, on network file systems too (NFS since version 3);
        a creation that is reported as failed although it was made gives the number to nobody. A cut
        during the call leaves the number free, claimed by us, or claimed by a torn file.
    """
    directory = os.path.join(run_dir, layout.ATTEMPTS)
    ensure_dir(fs, directory)
    path = layout.claim_path(run_dir, attempt.seq)
    data = record.encode("claim", {"nonce": attempt.nonce, "nodes": list(nodes)})
    try:
        writer = fs.create(path, len(data))
    except FileExistsError:
        rival = _read_claim(fs, path, attempt.seq)
        return None if rival.nonce == attempt.nonce else rival
    try:
        writer.write(data)
        writer.sync()  # without it a rival that comes after a power cut could not tell whose it was
    except BaseException:
        with contextlib.suppress(RideThroughError):  # the disk that refused the claim may refuse this too
            fs.remove(path)
        raise
    finally:
        writer.close()
    # Without it a power cut gives the number away again although we go on under it.
    fs.sync_dir(directory)
    return None


def unfinished_claims(fs: FileSystem, run_dir: str, *, above: int) -> tuple[Claim, ...]:
    """Claims of numbers above that of the newest attempt: of starts that are under way, or were cut."""
    found = []
    for name in fs.list_dir(os.path.join(run_dir, layout.ATTEMPTS)):
        seq = layout.parse_claim(name)
        if seq is not None and seq > above:
            found.append(_read_claim(fs, layout.claim_path(run_dir, seq), seq))
    return tuple(found)


def _read_claim(fs: FileSystem, path: str, seq: int) -> Claim:
    try:
        fields = record.decode("claim", fs.read(path, max_bytes=record.MAX_BYTES), path=path)
        nodes = record.field(fields, "nodes", list, path=path)
        if not all(type(node) is str for node in nodes):
            raise Damaged(path=path, detail="its nodes make no sense")
        return Claim(seq=seq, nonce=record.identity(fields, "nonce", path=path), nodes=tuple(nodes))
    except (FileNotFoundError, Damaged, ForeignRecord):
        return Claim(seq=seq, nonce="", nodes=())


def write_attempt(fs: FileSystem, run_dir: str, attempt: Attempt, roster: Roster) -> None:
    """The attempt's claim and records survive power loss on this tier, before its first step.

    The roster goes before the attempt record, which is the promise that its roster can be found.

    Raises:
        TwoHeads: Somebody else has started, or is starting, an attempt with the same number.
        Fenced: Somebody else has started a later one meanwhile.
    """
    own = attempt.attempt
    claimed = claim_attempt(fs, run_dir, own, tuple(dict.fromkeys(roster.nodes)))
    if claimed is not None:
        raise TwoHeads(path=run_dir, seq=own.seq, first=own.label, second=claimed.label)
    directory = layout.attempt_dir(run_dir, own)
    ensure_dir(fs, directory)
    publish(fs, os.path.join(directory, layout.ROSTER), roster.encode())
    publish(fs, os.path.join(directory, layout.ATTEMPT), attempt.encode())
    rival = [label for seq, label in newest_attempts(fs, run_dir) if seq == own.seq and label != own.label]
    if rival:  # of a version that claims nothing
        raise TwoHeads(path=run_dir, seq=own.seq, first=own.label, second=rival[0])
    require_newest(fs, run_dir, own)


def newest_attempts(fs: FileSystem, run_dir: str) -> list[tuple[int, str]]:
    """Sequence number and label of every attempt directory, newest last."""
    found = []
    for name in fs.list_dir(os.path.join(run_dir, layout.ATTEMPTS)):
        parsed = layout.parse_attempt_dir(name)
        if parsed:
            found.append((parsed[0], name))
    return sorted(found)


def require_newest(fs: FileSystem, run_dir: str, attempt: AttemptRef) -> None:
    """No later attempt owns the run.

    Called before anything is deleted or published: a frozen process that wakes up after its run
    was restarted must not touch what its successor relies on.

    Raises:
        Fenced: A later attempt does.
    """
    newest = newest_attempts(fs, run_dir)
    if newest and newest[-1][0] > attempt.seq:
        raise Fenced(path=run_dir, attempt=attempt.label, newer=newest[-1][1])

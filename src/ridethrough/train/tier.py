"""Which run this is, which nodes see the same directory, and what can be restored from it.

Nothing is created before all nodes have said what they have: an empty disk of the first node must
not become a new run while another node has the old one.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ridethrough.errors import Damaged, ForeignRecord, JobStuck, StorageUnreachable, StoreMissing, TierMissing, TwoHeads, UsageError
from ridethrough.format import layout, record
from ridethrough.format.attempt import Roster, Run
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.store import catalog as catalogs
from ridethrough.store import union as unions
from ridethrough.store.catalog import Catalog, Checkpoint, patiently, read_patiently, read_run
from ridethrough.store.probe import leave_probe, remove_probe, see_probes
from ridethrough.store.start import Claim, adopt_run, new_run, unfinished_claims
from ridethrough.store.union import Union
from ridethrough.train.group import Group

SHARED, NODE_LOCAL, DETECT = "shared", "node-local", "detect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a node knows of the run directory before it looks."""

    run_uid: str | None = None
    """The run that it remembers there; None if none, empty if the note is damaged."""
    storage: str | None = None
    """How it remembers it."""
    declared: str = DETECT
    """How its configuration says it is."""
    room: tuple[str, ...] = ()
    """All nodes of its configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the first rank knows of the tier; it tells the others as much as they need."""

    union: Union
    candidates: tuple[Checkpoint, ...]

    def holders(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        """By payload: the nodes that have it on a disk of their own."""
        return self.union.holders.get(checkpoint.dir_name, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The tier, as every rank knows it."""

    run: Run
    storage: str | None
    """Shared or node-local; None where one node trains alone and was never told."""
    next_seq: int
    is_shrunk: bool
    """Fewer nodes than in the newest attempt, or than the configuration has."""
    found: Found | None = None
    """On the first rank only."""

    @property
    def is_shared(self) -> bool:
        """What one node writes is there for all."""
        return self.storage != NODE_LOCAL

    def tier_nodes(self, group: Group) -> tuple[str, ...]:
        """The nodes that write what is written once a tier."""
        return group.node_order[:1] if self.is_shared else group.node_order


def open_tier(group: Group, fs: FileSystem, clock: Clock, run_dir: str, memory: Memory, *, is_fresh: bool, storage_wait_s: float) -> Opening:
    """The run is the same on every node, has its marker, and what it holds is known.

    Raises:
        TierMissing: A node remembers a run here that it does not see now.
        ForeignRecord: The nodes see different runs.
        StorageUnreachable: A tier does not answer, or some nodes see a common directory and others do not.
        UsageError: The storage is not what the configuration says.
        TwoHeads: It cannot be said which attempt is the newest, or another half of the job is starting.
        JobStuck: Fewer nodes than before, and each has a disk of its own; or none of the nodes that made the newest attempt.
    """
    is_several = len(group.node_order) > 1

    def look() -> tuple[Run | None, Memory]:
        shown = f"{group.node}:{run_dir}" if is_several else run_dir
        return _look(fs, clock, run_dir, shown, memory, is_fresh=is_fresh, wait_s=storage_wait_s), memory

    looked = group.each_node(look)
    markers = {node: run for node, (run, _) in looked.items()}
    memories = {node: memory for node, (_, memory) in looked.items()}
    run = group.first_decides(lambda: one_run(markers, run_dir) or new_run(clock, run_dir))
    group.each_node(lambda: adopt_run(fs, run_dir, run) if markers[group.node] is None else None, nodes=group.node_order[:1])
    seen = _probe(group, fs, run_dir) if is_several else None
    storage = group.first_decides(lambda: settle_storage(seen, memories, run_dir, is_fresh=is_fresh))
    if storage == NODE_LOCAL and is_several:
        group.each_node(lambda: adopt_run(fs, run_dir, run) if markers[group.node] is None else None, nodes=group.node_order[1:])
        _require_own_disks(group, fs, run_dir)
    readers = group.node_order if storage == NODE_LOCAL else group.node_order[:1]
    read = _pool(group, lambda: read_patiently(fs, clock, run_dir, storage_wait_s=storage_wait_s), readers)
    kept: list[Found] = []

    def decide() -> Opening:
        found, opening = _survey(fs, run_dir, read, storage, group.node_order, room=memory.room, is_fresh=is_fresh)
        kept.append(found)
        return opening

    opening = group.first_decides(decide)
    return dataclasses.replace(opening, found=kept[0] if kept else None)


def _pool(group: Group, read: Callable[[], Catalog], nodes: tuple[str, ...]) -> dict[str, Catalog]:
    """Outlines of what these nodes have, with the rosters beside that of the first; on the first rank only, nothing elsewhere."""
    pooled: dict[str, Catalog] = {}
    rosters: dict[str, Roster] = {}

    def tell() -> tuple[Catalog, tuple[str, ...]]:
        catalog = read()
        rosters.update(catalog.rosters)
        return unions.outline(catalog, _places), tuple(rosters)

    def ask(told: Mapping[str, tuple[Catalog, tuple[str, ...]]]) -> dict[str, str]:
        pooled.update((node, catalog) for node, (catalog, _) in told.items())
        # Whichever node says it last: the digest proves that they have the same.
        return {digest: node for node, (_, digests) in told.items() for digest in digests if digest not in rosters}

    asked = group.first_decides_from(tell, ask, nodes=nodes)
    for digest, node in asked.items():
        told = group.tell(rosters.get(digest), source=group.first_rank_of(node))
        if group.rank == 0:
            rosters[digest] = told
    if pooled:
        pooled[nodes[0]] = dataclasses.replace(pooled[nodes[0]], rosters=rosters)
    return pooled


def _places(tree: Any) -> dict[str, Any]:
    """Where a rank was in what is dealt to ranks: where their number changes, each compares them all (`state.apply`)."""
    objects = tree.get("objects", {}) if isinstance(tree, dict) else {}
    found = {
        name: {key: value if isinstance(value, (int, float)) else record.digest(value) for key, value in state.items()}
        for name, state in objects.items()
        if isinstance(state, dict) and "dealt" in state
    }
    return {"objects": found}


def _look(fs: FileSystem, clock: Clock, run_dir: str, shown: str, memory: Memory, *, is_fresh: bool, wait_s: float) -> Run | None:
    """The run that this node sees; None if it sees none and remembers none."""

    def read() -> Run | None:
        try:
            return read_run(fs, run_dir)
        except StoreMissing:
            if memory.run_uid is not None and not is_fresh:
                raise TierMissing(path=shown, run_uid=memory.run_uid) from None
            return None

    try:
        # A disk that is mounted a little later than we are started (after a power cut, say) is waited for.
        run = patiently(clock, wait_s, read)
    except (Damaged, ForeignRecord):
        run = read_patiently(fs, clock, run_dir, storage_wait_s=wait_s).run  # its seals name it too; or this raises the same
    if run is not None and memory.run_uid and run.run_uid != memory.run_uid and not is_fresh:
        raise TierMissing(path=shown, run_uid=memory.run_uid)
    return run


def one_run(markers: Mapping[str, Run | None], run_dir: str) -> Run | None:
    """The run that the nodes see; None if none of them sees any.

    Raises:
        ForeignRecord: They see different ones; names them.
    """
    runs = {run.run_uid: run for run in markers.values() if run is not None}
    if len(runs) > 1:
        listed = ", ".join(f"{node} has run {run.run_uid[:8]}" for node, run in markers.items() if run is not None)
        raise ForeignRecord(path=run_dir, detail=f"{listed}: one of them has the wrong disk or directory")
    return next(iter(runs.values()), None)


def _probe(group: Group, fs: FileSystem, run_dir: str) -> dict[str, bool]:
    """Whether each node sees what the first one writes."""
    first = group.node_order[:1]
    token = group.first_decides(lambda: uuid.uuid4().hex)
    group.each_node(lambda: leave_probe(fs, run_dir, token, group.node), nodes=first)
    seen = group.each_node(lambda: bool(see_probes(fs, run_dir, token, first)))
    group.each_node(lambda: remove_probe(fs, run_dir, token, group.node), nodes=first)
    return seen


def _require_own_disks(group: Group, fs: FileSystem, run_dir: str) -> None:
    """No two nodes share a directory where each is believed to have its own: their copies would count twice.

    Raises:
        StorageUnreachable: Some do; names them.
    """
    token = group.first_decides(lambda: uuid.uuid4().hex)
    group.each_node(lambda: leave_probe(fs, run_dir, token, group.node))
    seen = group.each_node(lambda: see_probes(fs, run_dir, token, group.node_order))
    group.each_node(lambda: remove_probe(fs, run_dir, token, group.node))
    group.first_decides(lambda: _refuse_common_disks(seen, run_dir))


def _refuse_common_disks(seen: Mapping[str, frozenset[str]], run_dir: str) -> None:
    for node, others in seen.items():
        if others != {node}:
            raise StorageUnreachable(path=run_dir, detail=f"{listed(sorted(others | {node}))} share it while other nodes do not")


def settle_storage(seen: Mapping[str, bool] | None, memories: Mapping[str, Memory], run_dir: str, *, is_fresh: bool) -> str | None:
    """Whether the run directory is shared or local to each node, and that nobody thinks otherwise.

    Args:
        seen: By node, whether it sees what the first node writes; None if there is one node.
        memories: What each node remembers and was told.
        run_dir: For messages.
        is_fresh: What is remembered does not count.

    Raises:
        StorageUnreachable: It should be shared and is not, for all or for some: a mount is missing.
        UsageError: The configuration says something else, or not the same everywhere.
    """
    declared = {memory.declared for memory in memories.values()} - {DETECT}
    remembered = {memory.storage for memory in memories.values() if memory.storage is not None and not is_fresh}
    if len(declared) > 1:
        raise UsageError(detail="storage is declared differently on the nodes: give all the same ridethrough.toml")
    expected = declared | remembered
    if seen is None:
        if len(expected) > 1:
            raise UsageError(detail=f'{run_dir} was {listed(sorted(remembered))} before and is declared storage = "{declared.pop()}"')
        return next(iter(expected), None)
    blind = [node for node, does in seen.items() if not does]
    storage = SHARED if not blind else NODE_LOCAL
    if blind and (SHARED in expected or len(blind) < len(seen) - 1):
        why = 'it is declared storage = "shared"' if SHARED in declared else "it was shared before" if SHARED in remembered else "others do"
        raise StorageUnreachable(path=run_dir, detail=f"{listed(blind)} cannot see what {next(iter(seen))} writes there and {why}: not mounted?")
    if expected - {storage}:
        how = "is declared" if NODE_LOCAL in declared else "was before"
        raise UsageError(detail=f'{run_dir} is shared by all nodes; it {how} storage = "{NODE_LOCAL}"')
    return storage


def listed(names: Sequence[str], at_most: int = 8) -> str:
    """Names for a message; of a thousand nobody reads more than a few."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


def _survey(
    fs: FileSystem,
    run_dir: str,
    read: Mapping[str, Catalog],
    storage: str | None,
    nodes: tuple[str, ...],
    *,
    room: tuple[str, ...],
    is_fresh: bool,
) -> tuple[Found, Opening]:
    """What there is, and whether these nodes may go on with it."""
    union = unions.merge(read)
    catalog = union.catalog
    try:
        candidates = () if is_fresh else unions.candidates(union) if storage == NODE_LOCAL else catalogs.candidates(catalog)
    except TwoHeads as error:
        raise TwoHeads(**{**error.fields, "path": run_dir}) from error
    before = _nodes_before(catalog)
    is_shrunk = len(nodes) < len(before) or not set(room) <= set(nodes)
    if is_shrunk and not is_fresh:
        if len(nodes) < len(before) and storage != SHARED:
            _refuse_shrinking(storage, nodes, before)
        if before and set(before) <= set(room) and not set(before) & set(nodes):
            _refuse_other_half(nodes, before)
        newest = max((ref.seq for ref, _ in catalog.attempts), default=0)
        for claim in unfinished_claims(fs, run_dir, above=newest):
            if not claim.is_over(nodes):
                refuse_rival(run_dir, nodes, claim)
    found = Found(union=union, candidates=candidates)
    return found, Opening(run=catalog.run, storage=storage, next_seq=catalog.next_seq, is_shrunk=is_shrunk)


def _nodes_before(catalog: Catalog) -> tuple[str, ...]:
    """Who took part in the newest attempt; nobody if that is lost."""
    newest = max((ref for ref, _ in catalog.attempts), key=lambda ref: ref.seq, default=None)
    roster = catalog.roster_of(newest) if newest is not None else None
    return tuple(dict.fromkeys(roster.nodes)) if roster is not None else ()


def refuse_rival(run_dir: str, nodes: tuple[str, ...], claim: Claim) -> NoReturn:
    """Another half of the job is starting, or a start of it was cut: one half alone cannot tell."""
    place = os.path.relpath(layout.claim_path(run_dir, claim.seq), run_dir)
    raise TwoHeads(path=run_dir, seq=claim.seq, first=f"this start of {listed(nodes)}", second=f"{claim.label} ({place})")


def _refuse_shrinking(storage: str | None, nodes: tuple[str, ...], before: tuple[str, ...]) -> NoReturn:
    """Fewer nodes than before do not go on with disks of their own."""
    missing = listed([node for node in before if node not in nodes]) or "some"
    why = (
        "each node has a disk of its own, so that two halves of the job could both go on"
        if storage == NODE_LOCAL
        else 'whether they all see the same run directory is not known: if so, declare storage = "shared" in ridethrough.toml'
    )
    raise JobStuck(detail=f"{len(nodes)} of {len(before)} nodes are here, without {missing}, and {why}; or start all nodes")


def _refuse_other_half(nodes: tuple[str, ...], before: tuple[str, ...]) -> NoReturn:
    """The nodes of the newest attempt may be training now, where these do not hear them: with one of them here they could not."""
    made = f"the newest attempt is that of {listed(before)}, none of which is here, so it may still be training"
    raise JobStuck(detail=f"{made}: start one of them together with {listed(nodes)}, or take them out of [nodes] if they will not come back")


def progress_evidence(group: Group, fs: FileSystem, run_dir: str, opening: Opening) -> str | None:
    """Why it would be a loss to start at step 0, from the records and journals of every tier; on every rank."""

    def from_records() -> tuple[int, str | None]:
        assert opening.found is not None
        since = catalogs.owed_since(opening.found.union.catalog)
        return since, catalogs.catalog_evidence(opening.found.union.catalog, since)

    since, recorded = group.first_decides(from_records)
    journals = group.each_node(lambda: catalogs.journal_evidence(fs, run_dir, since), nodes=opening.tier_nodes(group))
    return next((said for said in journals.values() if said), recorded)

"""Every rank gets its parts of a checkpoint, proven: from its own node where a copy is there, else from another node.

1. Each rank tries the copies that its node can read. It knows outlines of their seals, and reads the seals themselves again.
2. Of a part that nobody has got so, the nodes that have further copies try those, one after the other.
3. What a rank lacks is sent to it, in pieces of a checksum's size, by a rank that has it. Everybody
   hears everything: object collectives work with every backend, and a part that all lack is read once.

A failure ends in the same answer on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ridethrough.errors import Damaged, StateMismatch
from ridethrough.format import layout
from ridethrough.format.attempt import Roster
from ridethrough.format.seal import Seal
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import Checkpoint, patiently, read_seal
from ridethrough.store.verify import load_part
from ridethrough.train.group import Group
from ridethrough.train.state import LoadedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that all ranks are to try, and where its copies are."""

    checkpoint: Checkpoint
    """With outlines for seals: see `union.outline`."""
    holders: Mapping[str, tuple[str, ...]] | None
    """By payload: the nodes that have it on a disk of their own; None if all see the same."""


class Copies:
    """Which node can read which copies of a candidate's parts."""

    def __init__(self, candidate: Candidate, nodes: tuple[str, ...]) -> None:
        self._order = {node: number for number, node in enumerate(nodes)}
        self._is_shared = candidate.holders is None
        self._by_part: dict[str, dict[str, list[Seal]]] = {}
        for seal in candidate.checkpoint.seals:
            # Where all see the same directory the first node's view decides: the others would read the same bytes.
            for node in nodes[:1] if candidate.holders is None else candidate.holders.get(seal.payload_name, ()):
                self._by_part.setdefault(seal.part, {}).setdefault(node, []).append(seal)

    def readable(self, part: str, node: str) -> Sequence[Seal]:
        """What that node can read of a part."""
        found = self._by_part.get(part, {})
        return next(iter(found.values()), []) if self._is_shared else found.get(node, [])

    def next_node(self, part: str, tried: set[str]) -> str | None:
        """The first node that can read a copy and has not tried."""
        return min(self._by_part.get(part, {}).keys() - tried, key=self._order.__getitem__, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCopy:
    """A copy that failed its checksums on some node."""

    node: str
    dir_name: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What came of a candidate, the same on every rank but for the parts."""

    parts: tuple[LoadedPart, ...]
    is_whole: bool
    """Every rank has all its parts."""
    damaged: tuple[DamagedCopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A node's way to its tier."""

    fs: FileSystem
    clock: Clock
    run_dir: str
    wait_s: float
    """How long storage that does not answer is asked again."""

    def read(self, dir_name: str, outline: Seal) -> LoadedPart:
        """The copy, proven.

        Raises:
            Damaged: It is not what was sealed, or its seal is not what it was.
            StorageUnreachable: It cannot be read.
        """
        seal = patiently(self.clock, self.wait_s, lambda: read_seal(self.fs, self.run_dir, dir_name, outline))
        payload = patiently(self.clock, self.wait_s, lambda: load_part(self.fs, self.run_dir, dir_name, seal))
        return LoadedPart(seal=seal, payload=payload)


@dataclass(slots=True, kw_only=True)
class _Tried:
    """What a rank could read."""

    has: list[str] = dataclasses.field(default_factory=list)
    lacks: list[str] = dataclasses.field(default_factory=list)
    damaged: list[DamagedCopy] = dataclasses.field(default_factory=list)


def source_rank(rank: int, saved_world_size: int) -> int:
    """The rank whose private part this rank goes on from; its own where the number of ranks is the same."""
    return rank % saved_world_size


def parts_of(roster: Roster, rank: int) -> tuple[str, ...]:
    """The parts that this rank of the present job needs of a checkpoint."""
    source = source_rank(rank, roster.world_size)
    return tuple(part.name for part in roster.parts if source in part.holders)


def require_elastic(roster: Roster, *, dir_name: str, world_size: int) -> None:
    """The checkpoint can be taken over by so many ranks.

    Raises:
        StateMismatch: Another number of ranks made it, and they held nothing in common.
    """
    if roster.world_size != world_size and layout.REPLICATED not in roster.part_names:
        made = f"{dir_name} was saved by {roster.world_size} ranks, this start has {world_size}"
        raise StateMismatch(name="the job", detail=f"{made}, and without DDP each rank had a model of its own")


def load(group: Group, reader: Reader, candidate: Candidate) -> Loading:
    """The candidate's parts that this rank needs; or that some rank cannot have all of its own.

    Raises:
        StateMismatch: Another number of ranks made it, and they held nothing in common.
        StorageUnreachable: A tier does not answer.
    """
    roster = candidate.checkpoint.roster
    assert roster is not None
    dir_name = candidate.checkpoint.dir_name
    require_elastic(roster, dir_name=dir_name, world_size=group.world_size)
    copies = Copies(candidate, group.node_order)
    loaded: dict[str, LoadedPart] = {}
    damaged: list[DamagedCopy] = []

    def attempt(names: tuple[str, ...]) -> list[_Tried]:
        """What every rank could read of the parts that it was to try."""
        rows = []
        for row, error in group.everyone(lambda: _read(reader, dir_name, copies, group.node, names, loaded)):
            if error is not None:
                raise error
            assert row is not None
            damaged.extend(row.damaged)
            rows.append(row)
        return rows

    wanted = parts_of(roster, group.rank)
    rows = attempt(wanted)
    has = {name: rank for rank in reversed(range(len(rows))) for name in rows[rank].has}
    tried: dict[str, set[str]] = {}
    for rank, row in enumerate(rows):
        for name in row.lacks:
            tried.setdefault(name, set()).add(group.nodes[rank])
    lacking = sorted(tried)
    while True:
        # What no rank has: the next node that can read a copy and did not need the part itself.
        due = {name: node for name in lacking if name not in has and (node := copies.next_node(name, tried[name])) is not None}
        if not due:
            break
        is_speaker = group.rank == group.first_rank_of(group.node)
        rows = attempt(tuple(name for name, node in due.items() if is_speaker and node == group.node))
        has |= {name: rank for rank, row in enumerate(rows) for name in row.has}
        for name, node in due.items():
            tried[name].add(node)
    is_whole = all(name in has for name in lacking)
    for name in lacking if is_whole else ():
        _send(group, name, has[name], loaded, is_wanted=name in wanted)
    # A piece may have been changed on its way: then nobody goes on with it.
    is_whole = is_whole and all(is_mine for is_mine, _ in group.everyone(lambda: all(name in loaded for name in wanted)))
    return Loading(parts=tuple(loaded[name] for name in wanted) if is_whole else (), is_whole=is_whole, damaged=tuple(dict.fromkeys(damaged)))


def _read(reader: Reader, dir_name: str, copies: Copies, node: str, names: tuple[str, ...], loaded: dict[str, LoadedPart]) -> _Tried:
    """The named parts are in `loaded`, each from the first copy that this node can read and that is intact."""
    tried = _Tried()
    for name in names:
        for outline in copies.readable(name, node):
            try:
                loaded[name] = reader.read(dir_name, outline)
                break
            except Damaged:
                tried.damaged.append(DamagedCopy(node=node, dir_name=dir_name, part=name))
        (tried.has if name in loaded else tried.lacks).append(name)
    return tried


def _send(group: Group, name: str, source: int, loaded: dict[str, LoadedPart], *, is_wanted: bool) -> None:
    """The part is in `loaded` of every rank that wants it, if it arrived as it was sealed."""
    mine = loaded.get(name)
    seal: Seal = group.tell(mine.seal if group.rank == source and mine is not None else None, source=source)
    takes = is_wanted and mine is None
    payload = bytearray(seal.payload_bytes if takes else 0)
    is_intact = True
    for index, expected in enumerate(seal.chunks):
        begin, end = index * seal.chunk_bytes, min((index + 1) * seal.chunk_bytes, seal.payload_bytes)
        piece = group.tell(bytes(memoryview(mine.payload)[begin:end]) if group.rank == source and mine is not None else None, source=source)
        if takes:
            payload[begin:end] = piece
            is_intact = is_intact and xxhash.xxh3_128_hexdigest(piece) == expected
    if takes and is_intact and len(payload) == seal.payload_bytes:
        loaded[name] = LoadedPart(seal=seal, payload=payload)

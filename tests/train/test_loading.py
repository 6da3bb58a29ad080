"""Every rank gets its parts, wherever an intact copy is."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from room import CLOCK, Disks, Room, payload, run_ranks, same_error
from torch.utils.data import DataLoader, DistributedSampler

from ridethrough.errors import NothingRestorable, StateMismatch, StorageUnreachable
from ridethrough.format import layout
from ridethrough.format import seal as seal_format
from ridethrough.format.seal import Seal
from ridethrough.journal import Journal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import Checkpoint
from ridethrough.testing import RecordingFileSystem, flip_bit
from ridethrough.train import loading, state
from ridethrough.train.agreement import Choice, Wish, choose
from ridethrough.train.group import Group
from ridethrough.types import AttemptRef

NODES = ("a", "a", "b", "c")
REPLICATED = layout.REPLICATED
HOME = {"a": [REPLICATED, "rank-00000", "rank-00001"], "b": [REPLICATED, "rank-00002"], "c": [REPLICATED, "rank-00003"]}
"""Each node holds its own."""


class Reads(PosixFileSystem):
    """Counts the payloads that were read."""

    def __init__(self) -> None:
        self.payloads: list[str] = []

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        if path.endswith(".safetensors"):
            self.payloads.append(os.path.basename(path).split("~")[0])
        return super().read_into(path, buffer, offset=offset, past_cache=past_cache)


def chosen(room: Room, nodes: tuple[str, ...] = NODES) -> list[Any]:
    def act(group: Group) -> Choice:
        node = group.node
        return choose(group, room.fs_of(node), CLOCK, room.run_dir(node), memory=room.memory(node), wish=Wish(), storage_wait_s=1.0)

    return run_ranks(nodes, act)


def require(outcomes: list[Any], step: int, *, saved_ranks: int = 4) -> None:
    """Every rank has its parts of that step, bit for bit."""
    for rank, choice in enumerate(outcomes):
        assert isinstance(choice, Choice), choice
        assert choice.checkpoint is not None
        assert choice.checkpoint.step == step
        found = {part.seal.part: bytes(part.payload) for part in choice.parts}
        assert found == {name: payload(step, name) for name in (REPLICATED, layout.rank_part(rank % saved_ranks))}


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path, ("a", "b", "c"))


@pytest.fixture
def disks(room: Room) -> Disks:
    made = Disks(room)
    made.open()
    made.start(1, NODES)
    return made


def test_ranks_read_from_their_own_node_and_from_no_other(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    room.fs = {node: Reads() for node in room.nodes}
    require(chosen(room), 10)
    read = {node: sorted(set(fs.payloads)) for node, fs in room.fs.items()}  # type: ignore[attr-defined]
    assert read == {"a": ["rank-00000", "rank-00001", REPLICATED], "b": ["rank-00002", REPLICATED], "c": ["rank-00003", REPLICATED]}


def test_a_private_part_that_only_another_node_holds_is_sent(room: Room, disks: Disks) -> None:
    disks.save(10, {**HOME, "c": [REPLICATED], "b": [REPLICATED, "rank-00002", "rank-00003"]})
    require(chosen(room), 10)


def test_a_node_with_an_empty_disk_gets_everything_from_the_others(room: Room, disks: Disks) -> None:
    disks.save(10, {"a": HOME["a"], "b": [*HOME["b"], "rank-00003"]})
    Path(room.run_dir("c")).rename(room.root / "gone")
    require(chosen(room), 10)


def test_ranks_that_have_changed_places_get_their_parts(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    require(chosen(room, ("c", "b", "a", "a")), 10)


def test_a_damaged_copy_on_one_node_is_taken_from_another(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    flip_bit(str(disks.path("b", 10, REPLICATED)), 500)
    outcomes = chosen(room)
    require(outcomes, 10)
    assert {(copy.node, copy.part) for copy in outcomes[0].damaged} == {("b", REPLICATED)}


def test_only_the_node_with_the_damaged_copy_is_to_look_at_it_again(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    flip_bit(str(disks.path("b", 10, REPLICATED)), 500)

    def act(group: Group) -> Any:
        found = choose(group, PosixFileSystem(), CLOCK, room.run_dir(group.node), memory=room.memory("a"), wish=Wish(), storage_wait_s=1.0)
        return found.suspects(group)

    directory = os.path.basename(disks.path("b", 10, REPLICATED).parent)
    assert run_ranks(NODES, act) == [(), (), ({"dir_name": directory, "part": REPLICATED},), ()]


def test_a_damaged_copy_is_replaced_by_another_one_on_the_same_node_without_asking_others(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    damaged = disks.path("b", 10, "rank-00002")
    disks.save(10, {"b": ["rank-00002"]})
    flip_bit(str(damaged), 500)
    require(chosen(room), 10)


def test_every_copy_of_a_part_is_tried_before_the_checkpoint_is_given_up(room: Room, disks: Disks) -> None:
    disks.save(10, {**HOME, "a": [*HOME["a"], "rank-00003"], "b": [*HOME["b"], "rank-00003"]})
    for node in ("c", "a"):
        flip_bit(str(disks.path(node, 10, "rank-00003")), 500)
    require(chosen(room), 10)


def test_all_ranks_go_back_together_where_no_copy_is_intact(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    disks.save(20, HOME)
    flip_bit(str(disks.path("c", 20, "rank-00003")), 500)
    require(chosen(room), 10)


def test_a_run_without_one_intact_checkpoint_never_begins_anew(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    flip_bit(str(disks.path("c", 10, "rank-00003")), 500)
    assert "1 complete checkpoints failed their checksums" in str(same_error(chosen(room), NothingRestorable))


def test_what_only_the_journal_of_another_node_knows_stops_a_new_beginning(room: Room, disks: Disks) -> None:
    path = layout.journal_path(room.run_dir("c"), "c")
    Journal(PosixFileSystem(), CLOCK, path, role="test").append("checkpoint.durable", step=70, attempt_seq=1)
    assert "step 70 was once durable" in str(same_error(chosen(room), NothingRestorable))


def test_a_first_start_begins_at_step_0(room: Room) -> None:
    assert [choice.checkpoint for choice in chosen(room)] == [None] * 4


def test_a_disk_that_does_not_answer_is_no_reason_to_go_back(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    disks.save(20, HOME)

    class Stale(PosixFileSystem):
        def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
            if path.endswith(".safetensors"):
                raise StorageUnreachable(path=path, detail="ESTALE on read")
            return super().read_into(path, buffer, offset=offset, past_cache=past_cache)

    room.fs["b"] = Stale()
    same_error(chosen(room), StorageUnreachable)


def test_a_part_that_changes_on_its_way_is_not_taken(room: Room, disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    disks.save(10, {**HOME, "c": [REPLICATED], "b": [REPLICATED, "rank-00002", "rank-00003"]})
    disks.save(5, HOME)

    def spoil(group: Group, *arguments: Any, **settings: Any) -> None:
        own = group.tell

        def tell(value: Any, *, source: int) -> Any:
            told = own(value, source=source)
            return bytes(len(told)) if isinstance(told, bytes) and group.rank == 3 else told

        group.tell = tell  # type: ignore[method-assign]
        try:
            send(group, *arguments, **settings)
        finally:
            del group.tell  # type: ignore[method-assign]

    send = loading._send
    monkeypatch.setattr(loading, "_send", spoil)
    require(chosen(room), 5)


def test_a_part_larger_than_a_piece_arrives_whole(room: Room, disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.format.part.CHUNK_BYTES", 1000)
    disks.save(10, {**HOME, "c": [REPLICATED], "b": [REPLICATED, "rank-00002", "rank-00003"]})
    outcomes = chosen(room)
    require(outcomes, 10)
    assert len(outcomes[3].parts[1].seal.chunks) > 3


def test_on_a_shared_directory_a_damaged_part_is_looked_at_by_one_node_only(tmp_path: Path) -> None:
    room = Room(tmp_path, ("a", "b", "c"), is_shared=True)
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES)
    disks.save(10, {"a": [REPLICATED, *(layout.rank_part(rank) for rank in range(4))]})
    disks.save(20, {"a": [REPLICATED, *(layout.rank_part(rank) for rank in range(4))]})
    flip_bit(str(disks.path("a", 20, "rank-00003")), 500)

    def act(group: Group) -> Any:
        found = choose(group, PosixFileSystem(), CLOCK, room.run_dir("a"), memory=room.memory("a"), wish=Wish(), storage_wait_s=1.0)
        return found.checkpoint.step if found.checkpoint else None, len(found.suspects(group))

    assert run_ranks(NODES, act) == [(10, 1), (10, 1), (10, 0), (10, 0)]


def test_a_damaged_part_on_a_shared_directory_is_not_read_by_every_node_in_turn(tmp_path: Path) -> None:
    room = Room(tmp_path, ("a", "b", "c"), is_shared=True)
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES)
    for step in (10, 20):
        disks.save(step, {"a": [REPLICATED, *(layout.rank_part(rank) for rank in range(4))]})
    flip_bit(str(disks.path("a", 20, "rank-00003")), 500)
    room.fs = {node: Reads() for node in room.nodes}
    require(chosen(room), 10)
    assert {node: fs.payloads.count("rank-00003") > 0 for node, fs in room.fs.items()} == {"a": True, "b": False, "c": True}  # type: ignore[attr-defined]


def test_what_one_node_cannot_see_yet_on_a_shared_directory_comes_from_another(tmp_path: Path) -> None:
    """A network file system may show a new file to one node later than to others."""
    room = Room(tmp_path, ("a", "b"), is_shared=True)
    disks = Disks(room)
    disks.open()
    disks.start(1, ("a", "b"))
    disks.save(10, {"a": [REPLICATED, "rank-00000", "rank-00001"]})

    class Blind(PosixFileSystem):
        def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
            if path.endswith(".safetensors"):
                raise FileNotFoundError(2, "No such file or directory", path)
            return super().read_into(path, buffer, offset=offset, past_cache=past_cache)

    room.fs["b"] = Blind()
    require(chosen(room, ("a", "b")), 10, saved_ranks=2)


# -- what is told ----------------------------------------------------------------------------------------------------------


def told(room: Room, nodes: tuple[str, ...] = NODES) -> tuple[list[Any], int]:
    """Every rank's choice, and the size of the largest thing that a rank gave to the others."""
    sizes = []

    def act(group: Group) -> Choice:
        own = group.exchange

        def exchange(value: Any) -> list[Any]:
            sizes.append(len(pickle.dumps(value)))
            return own(value)

        group.exchange = exchange  # type: ignore[method-assign]
        node = group.node
        return choose(group, room.fs_of(node), CLOCK, room.run_dir(node), memory=room.memory(node), wish=Wish(), storage_wait_s=1.0)

    return run_ranks(nodes, act), max(sizes)


@pytest.mark.parametrize("is_shared", [False, True], ids=["node-local", "shared"])
def test_what_ranks_tell_each_other_of_a_tier_does_not_grow_with_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_shared: bool
) -> None:
    sizes = []
    for size, chunk_bytes in ((1, 1 << 24), (100_000, 50)):
        monkeypatch.setattr("ridethrough.format.part.CHUNK_BYTES", chunk_bytes)
        room = Room(tmp_path / str(size), ("a", "b", "c"), is_shared=is_shared)
        disks = Disks(room)
        disks.open()
        disks.start(1, NODES)
        disks.save(10, HOME, trees={name: {"objects": {"metrics": {"seen": "x" * size}}} for parts in HOME.values() for name in parts})
        outcomes, largest = told(room)
        require(outcomes, 10)
        sizes.append(largest)
    assert sizes[1] <= sizes[0] + 50


def test_what_all_nodes_know_of_an_attempts_ranks_is_not_told_by_each(tmp_path: Path) -> None:
    """Every node has the roster of every attempt: of 8,192 ranks that is megabytes."""
    room = Room(tmp_path, ("a", "b", "c"))
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES)
    disks.save(10, HOME)
    _, before = told(room)
    disks.start(2, tuple("abc"[rank % 3] for rank in range(3000)))
    _, after = told(room)
    assert after < before + 300


@pytest.mark.parametrize("knows", ["a", "b", "c"])
def test_who_trained_may_be_known_to_one_node_alone(room: Room, knows: str) -> None:
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES, on=[knows])
    disks.save(10, HOME)
    require(chosen(room), 10)


PLACE = {"seed": 1, "epoch": 2, "batches": 3, "samples": 6, "is_open": True, "dealt": [0, 4]}


@pytest.mark.parametrize("rank", [None, 3])
def test_ranks_that_were_at_different_places_of_an_epoch_are_found_in_what_is_told(room: Room, disks: Disks, rank: int | None) -> None:
    """Of fewer ranks none reads the private parts of the last ones."""

    def tree(of: int) -> dict[str, Any]:
        return {"objects": {"data": {**PLACE, "seed": of, "samples": 8 if of == rank else 6, "dataset": "x" * 10_000}}}

    disks.save(10, HOME, trees={layout.rank_part(of): tree(of) for of in range(4)})
    loader: DataLoader[Any] = DataLoader(range(40), batch_size=2, sampler=DistributedSampler(range(40), 3, 0))  # type: ignore[arg-type]
    item = state.classify("data", loader, world_size=3, seed=1)
    for choice in chosen(room, ("a", "b", "c")):
        assert choice.checkpoint is not None
        assert len(pickle.dumps([seal.tree for seal in choice.checkpoint.seals])) < 4000
        if rank is None:
            state._take_over(item, PLACE, choice.checkpoint.seals, keeps_seed=False)
            continue
        with pytest.raises(StateMismatch, match="at different places of the epoch"):
            state._take_over(item, PLACE, choice.checkpoint.seals, keeps_seed=False)


class SpoilsLater(PosixFileSystem):
    """Seals of one part are intact when they are read for the first time only."""

    def __init__(self, part: str, *, is_lost: bool = False) -> None:
        self._part, self._is_lost = part, is_lost
        self._read: set[str] = set()

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        found = super().read(path, max_bytes=max_bytes, past_cache=past_cache)
        if not path.endswith(".seal") or not os.path.basename(path).startswith(f"{self._part}~"):
            return found
        if path in self._read:
            if self._is_lost:
                raise FileNotFoundError(2, "No such file or directory", path)
            return found.replace(b"step", b"stop")
        self._read.add(path)
        return found


@pytest.mark.parametrize("is_lost", [False, True], ids=["damaged", "lost"])
def test_a_seal_that_is_damaged_after_it_was_counted_is_a_damaged_copy(room: Room, disks: Disks, *, is_lost: bool) -> None:
    disks.save(10, HOME)
    room.fs["b"] = SpoilsLater(REPLICATED, is_lost=is_lost)
    outcomes = chosen(room)
    require(outcomes, 10)
    assert {(copy.node, copy.part) for copy in outcomes[0].damaged} == {("b", REPLICATED)}


def test_a_seal_of_another_save_under_the_name_of_the_counted_one_is_a_damaged_copy(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    [other] = disks.save(20, {"b": [REPLICATED]})
    path = disks.path("b", 10, REPLICATED)
    counted = path.with_suffix(".seal")
    reads: list[str] = []

    def swap(call: str, at: str) -> None:
        if (call, at) == ("read", str(counted)):
            reads.append(at)
            if len(reads) == 2:
                shutil.copy(disks.path("b", 20, REPLICATED), path)
                counted.write_bytes(dataclasses.replace(other, payload_name=path.name).encode())

    room.fs["b"] = RecordingFileSystem(PosixFileSystem(), before=swap)
    outcomes = chosen(room)
    require(outcomes, 10)
    assert {(copy.node, copy.part) for copy in outcomes[0].damaged} == {("b", REPLICATED)}


def test_a_seal_that_asks_for_more_memory_when_it_is_read_again_is_a_damaged_copy(room: Room, disks: Disks) -> None:
    disks.save(10, HOME)
    counted = disks.path("b", 10, REPLICATED).with_suffix(".seal")
    seal = seal_format.decode(counted.read_bytes(), path="x")
    reads: list[str] = []

    def grow(call: str, at: str) -> None:
        if (call, at) == ("read", str(counted)):
            reads.append(at)
            if len(reads) == 2:
                counted.write_bytes(dataclasses.replace(seal, payload_bytes=1 << 50, chunk_bytes=1 << 50, chunks=seal.chunks[:1]).encode())

    room.fs["b"] = RecordingFileSystem(PosixFileSystem(), before=grow)
    outcomes = chosen(room)
    require(outcomes, 10)
    assert {(copy.node, copy.part) for copy in outcomes[0].damaged} == {("b", REPLICATED)}


def sealed(part: str, node: str) -> Seal:
    return Seal(
        run_uid="u", attempt=AttemptRef(seq=1, nonce="n"), parent=None, step=1, save_id="s", part=part, node=node, roster_digest="d",
        payload_name=f"{part}~{node}-00000000.safetensors", payload_bytes=1, chunk_bytes=1, chunks=(), tensors=(), tree={}, meta={},
    )  # fmt: skip


def test_the_next_copy_of_8192_parts_on_1024_nodes_is_found_in_a_second() -> None:
    nodes = tuple(f"n{number:04}" for number in range(1024))
    seals = [sealed(REPLICATED, node) for node in nodes]
    seals += [sealed(layout.rank_part(rank), nodes[(rank // 8 + far) % 1024]) for rank in range(8192) for far in (0, 32, 64)]
    checkpoint = Checkpoint(
        step=1, save_id="s", attempt=AttemptRef(seq=1, nonce="n"), parent=None, dir_name="d", roster=None, seals=tuple(seals), problems=(),
        size_bytes=0,
    )  # fmt: skip
    candidate = loading.Candidate(checkpoint=checkpoint, holders={seal.payload_name: (seal.node,) for seal in seals})
    began_s = time.process_time()
    copies = loading.Copies(candidate, nodes)
    found = [copies.next_node(layout.rank_part(rank), {nodes[rank // 8]}) for rank in range(8192)]
    assert time.process_time() - began_s < 1.0
    assert found == [min(nodes[(rank // 8 + far) % 1024] for far in (32, 64)) for rank in range(8192)]
    assert copies.next_node(REPLICATED, set(nodes[:1000])) == nodes[1000]
    assert copies.next_node(REPLICATED, set(nodes)) is None
    assert [seal.node for seal in copies.readable(REPLICATED, nodes[7])] == [nodes[7]]
    assert copies.readable(layout.rank_part(0), nodes[7]) == []


# -- another number of ranks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [("a", "b", "c"), ("a", "b", "c", "c", "b", "a", "a")], ids=["fewer", "more"])
def test_another_number_of_ranks_takes_what_is_common_and_the_private_parts_in_turn(room: Room, disks: Disks, nodes: tuple[str, ...]) -> None:
    disks.save(10, HOME)
    require(chosen(room, nodes), 10)


def test_ranks_that_had_nothing_in_common_do_not_change_their_number(room: Room) -> None:
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES, has_replicated=False)
    disks.save(10, {node: [name for name in parts if name != REPLICATED] for node, parts in HOME.items()})
    error = same_error(chosen(room, ("a", "b", "c")), StateMismatch)
    assert "was saved by 4 ranks, this start has 3, and without DDP" in str(error)

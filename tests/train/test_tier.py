"""Which run this is, who sees what, and when that is refused: several nodes, with a disk each or one for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from room import CLOCK, RUN_UID, Disks, Room, run_ranks, same_error

from ridethrough.errors import ForeignRecord, JobStuck, StorageUnreachable, TierMissing, TwoHeads, UsageError
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_run
from ridethrough.store.start import claim_attempt
from ridethrough.testing import flip_bit
from ridethrough.train.group import Group
from ridethrough.train.tier import Memory, Opening, open_tier
from ridethrough.types import AttemptRef, Parent

NODES = ("a", "a", "b", "c")
REPLICATED = layout.REPLICATED
FS = PosixFileSystem()


def local(root: Path) -> Room:
    return Room(root, ("a", "b", "c"))


def shared(root: Path) -> Room:
    return Room(root, ("a", "b", "c"), is_shared=True)


def opened(room: Room, nodes: tuple[str, ...] = NODES, *, is_fresh: bool = False) -> list[Any]:
    def act(group: Group) -> Opening:
        node = group.node
        return open_tier(group, room.fs_of(node), CLOCK, room.run_dir(node), room.memory(node), is_fresh=is_fresh, storage_wait_s=2.0)

    return run_ranks(nodes, act)


def markers(room: Room) -> dict[str, str]:
    return {node: read_run(FS, path).run_uid for node, path in room.disks.items()}


# -- which run -----------------------------------------------------------------------------------------------------------


def test_a_first_start_gives_every_disk_the_same_new_run(tmp_path: Path) -> None:
    room = local(tmp_path)
    found = opened(room)
    assert set(markers(room).values()) == {opening.run.run_uid for opening in found}
    assert len({opening.run.run_uid for opening in found}) == 1


@pytest.mark.parametrize("empty", ["a", "b", "c"])
def test_an_empty_disk_takes_the_run_of_the_others(tmp_path: Path, empty: str) -> None:
    """Also that of the first node, which would otherwise begin a new run."""
    room = local(tmp_path)
    Disks(room).open(*(node for node in room.nodes if node != empty))
    opened(room)
    assert set(markers(room).values()) == {RUN_UID}


def test_two_runs_are_refused_and_named_and_nothing_is_changed(tmp_path: Path) -> None:
    room = local(tmp_path)
    Disks(room).open("a")
    Disks(room, run_uid="6b" * 16).open("c")
    error = same_error(opened(room), ForeignRecord)
    assert "a has run 5a5a5a5a, c has run 6b6b6b6b" in str(error)
    assert not os.path.exists(room.run_dir("b"))


def test_a_node_that_remembers_the_run_and_sees_none_has_not_mounted_its_disk(tmp_path: Path) -> None:
    room = local(tmp_path)
    Disks(room).open("a", "b")
    room.memories["c"] = Memory(run_uid=RUN_UID)
    error = same_error(opened(room), TierMissing)
    assert "c:" in str(error)
    assert not os.path.exists(room.run_dir("c"))


def test_a_disk_with_another_run_than_the_remembered_one_is_not_the_right_disk(tmp_path: Path) -> None:
    room = local(tmp_path)
    Disks(room).open()
    room.memories["b"] = Memory(run_uid="6b" * 16)
    same_error(opened(room), TierMissing)


def test_a_disk_that_is_mounted_a_little_later_is_waited_for(tmp_path: Path) -> None:
    room = local(tmp_path)
    Disks(room).open()
    late = Path(room.run_dir("c"))
    late.rename(tmp_path / "not yet")

    class Mounts(PosixFileSystem):
        looks = 0

        def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
            self.looks += 1
            if self.looks == 3:
                (tmp_path / "not yet").rename(late)
            return super().read(path, max_bytes=max_bytes, past_cache=past_cache)

    room.fs["c"] = Mounts()
    room.memories["c"] = Memory(run_uid=RUN_UID)
    assert {opening.run.run_uid for opening in opened(room)} == {RUN_UID}


def test_a_damaged_marker_is_known_by_its_seals_and_left_as_it_is(tmp_path: Path) -> None:
    room = local(tmp_path)
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES)
    disks.save(10, {"b": [REPLICATED, "rank-00002"]})
    path = os.path.join(room.run_dir("b"), layout.RUN)
    flip_bit(path, 30)
    before = Path(path).read_bytes()
    assert {opening.run.run_uid for opening in opened(room)} == {RUN_UID}
    assert Path(path).read_bytes() == before


# -- shared or not -------------------------------------------------------------------------------------------------------


def test_a_directory_that_all_see_is_shared(tmp_path: Path) -> None:
    assert {opening.storage for opening in opened(shared(tmp_path))} == {"shared"}


def test_directories_that_only_their_nodes_see_are_local(tmp_path: Path) -> None:
    assert {opening.storage for opening in opened(local(tmp_path))} == {"node-local"}


def test_probes_are_removed(tmp_path: Path) -> None:
    for room in (local(tmp_path), shared(tmp_path)):
        opened(room)
        assert [name for path in room.disks.values() for name in os.listdir(path) if name.startswith("probe")] == []


def link(room: Room, node: str, to: str) -> None:
    """That node sees the directory of another."""
    Path(room.run_dir(to)).mkdir(parents=True, exist_ok=True)
    Path(room.run_dir(node)).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(room.run_dir(to), room.run_dir(node))


def test_a_directory_that_only_some_see_is_refused_and_the_blind_are_named(tmp_path: Path) -> None:
    room = local(tmp_path)
    link(room, "b", "a")
    error = same_error(opened(room), StorageUnreachable)
    assert "c cannot see what a writes there and others do" in str(error)


def test_a_directory_that_two_nodes_share_behind_the_firsts_back_is_refused(tmp_path: Path) -> None:
    room = local(tmp_path)
    link(room, "c", "b")
    error = same_error(opened(room), StorageUnreachable)
    assert "b, c share it while other nodes do not" in str(error)


@pytest.mark.parametrize("memory", [Memory(declared="shared"), Memory(run_uid=RUN_UID, storage="shared")], ids=["declared", "remembered"])
def test_a_shared_directory_that_is_not_shared_now_is_a_missing_mount(tmp_path: Path, memory: Memory) -> None:
    room = local(tmp_path)
    Disks(room).open()
    room.memories = dict.fromkeys(room.nodes, memory)
    error = same_error(opened(room), StorageUnreachable)
    assert "b, c cannot see what a writes there" in str(error)
    assert error.retryable  # type: ignore[attr-defined]


@pytest.mark.parametrize("memory", [Memory(declared="node-local"), Memory(run_uid=RUN_UID, storage="node-local")], ids=["declared", "remembered"])
def test_a_local_directory_that_is_shared_is_refused(tmp_path: Path, memory: Memory) -> None:
    room = shared(tmp_path)
    Disks(room).open()
    room.memories = dict.fromkeys(room.nodes, memory)
    assert "shared by all nodes; it" in str(same_error(opened(room), UsageError))


def test_nodes_with_different_declarations_are_refused(tmp_path: Path) -> None:
    room = shared(tmp_path)
    room.memories = {"a": Memory(declared="shared"), "b": Memory(declared="node-local")}
    assert "declared differently" in str(same_error(opened(room), UsageError))


def test_one_node_is_as_it_was_or_as_it_is_declared(tmp_path: Path) -> None:
    room = local(tmp_path)
    for memory, storage in ((Memory(), None), (Memory(storage="shared"), "shared"), (Memory(declared="node-local"), "node-local")):
        room.memories["a"] = memory
        assert opened(room, ("a", "a"))[0].storage == storage


def test_one_node_that_is_declared_otherwise_than_it_was_is_refused(tmp_path: Path) -> None:
    room = local(tmp_path)
    room.memories["a"] = Memory(storage="shared", declared="node-local")
    assert 'was shared before and is declared storage = "node-local"' in str(same_error(opened(room, ("a",)), UsageError))


def test_a_fresh_start_does_not_mind_what_was_remembered(tmp_path: Path) -> None:
    room = local(tmp_path)
    room.memories = dict.fromkeys(room.nodes, Memory(run_uid="6b" * 16, storage="shared"))
    assert {opening.storage for opening in opened(room, is_fresh=True)} == {"node-local"}


# -- what it holds -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_complete_only_over_all_disks_is_a_candidate(tmp_path: Path) -> None:
    room = local(tmp_path)
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES)
    disks.save(10, {"a": [REPLICATED, "rank-00000", "rank-00001"], "b": ["rank-00002"], "c": ["rank-00003"]})
    disks.save(20, {"a": [REPLICATED, "rank-00000", "rank-00001"], "b": ["rank-00002"]})
    found = opened(room)[0].found
    assert [checkpoint.step for checkpoint in found.candidates] == [10]


def test_only_the_first_rank_is_told_of_all_candidates(tmp_path: Path) -> None:
    found = opened(local(tmp_path))
    assert [opening.found is not None for opening in found] == [True, False, False, False]


def test_the_next_number_is_above_that_of_any_disk(tmp_path: Path) -> None:
    room = local(tmp_path)
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES)
    disks.start(2, NODES, on=["b"])
    assert {opening.next_seq for opening in opened(room)} == {3}


def test_two_heads_on_different_nodes_are_refused_with_their_nodes(tmp_path: Path) -> None:
    room = local(tmp_path)
    disks = Disks(room)
    disks.open()
    first = disks.start(2, NODES, on=["a", "c"], nonce="1a" * 16)
    second = disks.start(2, NODES, on=["b"], nonce="2b" * 16)
    error = same_error(opened(room), TwoHeads)
    assert f"{first.label} (on a, c)" in str(error)
    assert f"{second.label} (on b)" in str(error)


# -- fewer nodes ---------------------------------------------------------------------------------------------------------


def before(room: Room, nodes: tuple[str, ...] = NODES) -> Disks:
    disks = Disks(room)
    disks.open()
    disks.start(1, nodes)
    return disks


def test_fewer_nodes_with_disks_of_their_own_are_refused_and_the_missing_are_named(tmp_path: Path) -> None:
    room = local(tmp_path)
    before(room)
    error = same_error(opened(room, ("a", "b")), JobStuck)
    assert "2 of 3 nodes are here, without c" in str(error)
    assert error.exit_code == 21  # type: ignore[attr-defined]


def test_fewer_nodes_go_on_where_all_share_the_directory(tmp_path: Path) -> None:
    room = shared(tmp_path)
    before(room)
    assert [opening.is_shrunk for opening in opened(room, ("a", "c"))] == [True, True]


def test_as_many_or_more_nodes_are_no_shrunk_start(tmp_path: Path) -> None:
    room = local(tmp_path)
    before(room, ("a", "b"))
    assert not opened(room)[0].is_shrunk


def test_one_node_of_several_goes_on_only_where_the_directory_is_known_to_be_shared(tmp_path: Path) -> None:
    room = shared(tmp_path)
    before(room)
    assert "is not known" in str(same_error(opened(room, ("b",)), JobStuck))
    room.memories["b"] = Memory(storage="shared")
    assert opened(room, ("b",))[0].is_shrunk


def test_fewer_nodes_than_in_an_attempt_that_was_itself_shrunk_count_from_there(tmp_path: Path) -> None:
    room = shared(tmp_path)
    disks = before(room)
    disks.start(2, ("a", "b"), parent=Parent(attempt=AttemptRef(seq=1, nonce="01" * 16), step=5))
    assert not opened(room, ("a", "b"))[0].is_shrunk
    room.memories["b"] = Memory(storage="shared")
    assert opened(room, ("b", "b"))[0].is_shrunk


ROOM = ("a", "b", "c", "d")


def in_room(room: Room) -> Room:
    room.memories = {node: Memory(room=ROOM, declared="shared") for node in ROOM}
    return room


def test_nodes_that_hear_nobody_of_the_newest_attempt_do_not_go_on_beside_it(tmp_path: Path) -> None:
    """Two halves of a room: the one that went on first may be training now, also where it has its records already."""
    room = in_room(Room(tmp_path, ROOM, is_shared=True))
    disks = before(room, ROOM)
    disks.start(2, ("a", "b"), parent=Parent(attempt=AttemptRef(seq=1, nonce="01" * 16), step=5))
    for half in (("c", "d"), ("d",)):
        error = same_error(opened(room, half), JobStuck)
        assert "that of a, b, none of which is here" in str(error)


def test_nodes_with_one_of_the_newest_attempt_among_them_go_on(tmp_path: Path) -> None:
    room = in_room(Room(tmp_path, ROOM, is_shared=True))
    disks = before(room, ROOM)
    disks.start(2, ("a", "b"), parent=Parent(attempt=AttemptRef(seq=1, nonce="01" * 16), step=5))
    assert opened(room, ("b", "c"))[0].is_shrunk
    assert not opened(room, ROOM)[0].is_shrunk


def test_other_nodes_than_before_go_on_where_no_configuration_has_those_before(tmp_path: Path) -> None:
    """A scheduler gives other nodes at each start."""
    room = Room(tmp_path, ROOM, is_shared=True)
    before(room, ("a", "b"))
    assert not opened(room, ("c", "d"))[0].is_shrunk


def test_a_shrunk_start_is_refused_while_another_half_may_be_starting(tmp_path: Path) -> None:
    room = shared(tmp_path)
    before(room)
    claim_attempt(FS, room.run_dir("a"), AttemptRef(seq=2, nonce="9c" * 16), ("c",))
    error = same_error(opened(room, ("a", "b")), TwoHeads)
    assert "000002-9c9c9c9c (attempts/000002.claim)" in str(error)


def test_a_shrunk_start_goes_on_past_a_claim_that_its_own_nodes_have_left(tmp_path: Path) -> None:
    """Cut between claim and record: both nodes that claimed are here, so nobody else goes on under it."""
    room = shared(tmp_path)
    before(room)
    claim_attempt(FS, room.run_dir("a"), AttemptRef(seq=2, nonce="9c" * 16), ("a", "b"))
    assert {opening.next_seq for opening in opened(room, ("a", "b"))} == {3}


def test_a_full_start_goes_on_past_any_claim(tmp_path: Path) -> None:
    room = shared(tmp_path)
    before(room)
    Path(layout.claim_path(room.run_dir("a"), 2)).write_bytes(b"")
    claim_attempt(FS, room.run_dir("a"), AttemptRef(seq=3, nonce="9c" * 16), ("x", "y"))
    assert {opening.next_seq for opening in opened(room)} == {4}


def test_a_shrunk_start_does_not_go_past_a_torn_claim(tmp_path: Path) -> None:
    room = shared(tmp_path)
    before(room)
    Path(layout.claim_path(room.run_dir("a"), 2)).write_bytes(b"")
    same_error(opened(room, ("a", "b")), TwoHeads)

"""Issuing the attempt: one number, one nonce, durable on every tier before anybody makes a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from room import CLOCK, Disks, Room, run_ranks, same_error

from ridethrough.errors import MemoryTooSmall, StoreLocked, TwoHeads, UsageError
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_catalog
from ridethrough.store.start import claim_attempt
from ridethrough.testing import RecordingFileSystem
from ridethrough.train import agreement
from ridethrough.train.agreement import Agreement, RankFacts, Wish, settle_wishes
from ridethrough.train.group import Group
from ridethrough.train.tier import Memory
from ridethrough.types import AttemptRef

NODES = ("a", "a", "b", "c")
FS = PosixFileSystem()
LARGE = 1 << 40


def facts(**changed: Any) -> RankFacts:
    found = {"holds_replicated": True, "state_bytes": 1000, "available_bytes": LARGE, "save_interval_steps": 100, "wanted_interval_steps": None}
    return RankFacts(**{**found, **changed})


def agreed(room: Room, nodes: tuple[str, ...] = NODES, *, mine: Any = None, launch: Any = None) -> list[Any]:
    def act(group: Group) -> Agreement:
        node, fs = group.node, room.fs_of(group.node)
        choice = agreement.choose(group, fs, CLOCK, room.run_dir(node), memory=room.memory(node), wish=Wish(), storage_wait_s=1.0)
        own = mine(group) if mine else facts()
        return agreement.agree(group, fs, CLOCK, room.run_dir(node), choice, own, new_launch=lambda: launch(group) if launch else 1)

    return run_ranks(nodes, act)


def attempts(room: Room) -> dict[str, list[str]]:
    return {node: [ref.label for ref, _ in read_catalog(FS, path).attempts] for node, path in room.disks.items()}


@pytest.fixture(params=[False, True], ids=["a disk each", "shared"])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Room:
    return Room(tmp_path, ("a", "b", "c"), is_shared=request.param)


def test_all_ranks_go_on_under_one_attempt_that_every_disk_knows(room: Room) -> None:
    found = agreed(room)
    [label] = {answer.attempt.label for answer in found}
    assert attempts(room) == {node: [label] for node in room.disks}
    assert {answer.roster.digest for answer in found} == {found[0].roster.digest}


def test_roster_names_the_node_of_each_rank_and_who_holds_what(room: Room) -> None:
    roster = agreed(room)[0].roster
    assert roster.nodes == NODES
    assert [(part.name, part.holders) for part in roster.parts[:2]] == [(layout.REPLICATED, (0, 1, 2, 3)), ("rank-00000", (0,))]


def test_one_rank_without_a_replicated_model_makes_everything_private(room: Room) -> None:
    roster = agreed(room, mine=lambda group: facts(holds_replicated=group.rank != 2))[0].roster
    assert layout.REPLICATED not in roster.part_names


def test_each_rank_has_the_launch_of_its_own_node(room: Room) -> None:
    found = agreed(room, launch=lambda group: {"a": 5, "b": 1, "c": 2}[group.node])
    assert [answer.launch for answer in found] == [5, 5, 1, 2]


def test_numbers_go_up_from_start_to_start(room: Room) -> None:
    assert [agreed(room)[0].attempt.seq for _ in range(3)] == [1, 2, 3]


def test_a_start_that_is_refused_by_a_keeper_leaves_no_attempt(room: Room) -> None:
    def launch(group: Group) -> int:
        if group.node == "b":
            raise StoreLocked(path="p", holder="another")
        return 1

    same_error(agreed(room, launch=launch), StoreLocked)
    assert attempts(room) == {node: [] for node in room.disks}


def test_memory_that_is_short_on_one_node_counts_for_all(room: Room) -> None:
    found = agreed(room, mine=lambda group: facts(available_bytes=4000 if group.node == "b" else LARGE))
    assert {answer.slots.interval_steps for answer in found} == {2}


def test_a_node_without_memory_stops_all(room: Room) -> None:
    same_error(agreed(room, mine=lambda group: facts(available_bytes=10 if group.node == "c" else LARGE)), MemoryTooSmall)


def test_ranks_with_different_intervals_are_refused(room: Room) -> None:
    error = same_error(agreed(room, mine=lambda group: facts(save_interval_steps=50 if group.rank == 3 else 100)), UsageError)
    assert "Checkpointer of rank 3 has other intervals" in str(error)


class Rival(PosixFileSystem):
    """Another start claims the number just before we do."""

    def __init__(self, seq: int, nodes: tuple[str, ...]) -> None:
        self._left = [AttemptRef(seq=seq, nonce="9c" * 16)]
        self._nodes = nodes

    def create(self, path: str, size_bytes: int) -> Any:
        if path.endswith(".claim") and self._left:
            claim_attempt(FS, os.path.dirname(os.path.dirname(path)), self._left.pop(), self._nodes)
        return super().create(path, size_bytes)


def test_a_full_start_takes_the_next_number_where_a_rival_has_the_first(room: Room) -> None:
    room.fs["a"] = Rival(1, ("x", "y"))
    assert {answer.attempt.seq for answer in agreed(room)} == {2}
    assert all(names == [names[0]] and names[0].startswith("000002") for names in attempts(room).values())


def test_a_rival_on_the_disk_of_any_node_counts(tmp_path: Path) -> None:
    room = Room(tmp_path, ("a", "b", "c"))
    room.fs["c"] = Rival(1, ("x", "y"))
    assert {answer.attempt.seq for answer in agreed(room)} == {2}


def before(root: Path) -> Room:
    room = Room(root, ("a", "b", "c"), is_shared=True)
    disks = Disks(room)
    disks.open()
    disks.start(1, NODES)
    return room


def test_a_shrunk_start_that_meets_a_rival_is_refused(tmp_path: Path) -> None:
    room = before(tmp_path)
    room.fs["a"] = Rival(2, ("c",))
    error = same_error(agreed(room, ("a", "b")), TwoHeads)
    assert "claim sequence number 2: this start of a, b and 000002-9c9c9c9c (attempts/000002.claim)" in str(error)


def test_of_two_halves_that_start_at_once_one_goes_on(tmp_path: Path) -> None:
    """Both have read the catalog before either has claimed."""
    room = before(tmp_path)
    other: list[Any] = []

    class Interleaved(PosixFileSystem):
        def create(self, path: str, size_bytes: int) -> Any:
            if path.endswith(".claim") and not other:
                other.append(None)
                other[:] = agreed(Room(tmp_path, ("b", "c"), is_shared=True), ("b", "c"))
            return super().create(path, size_bytes)

    room.fs["a"] = Interleaved()
    room.memories["a"] = Memory(storage="shared")
    same_error(agreed(room, ("a", "a")), TwoHeads)
    assert [type(outcome) for outcome in other] == [Agreement, Agreement]


def test_a_start_that_was_cut_between_claim_and_record_does_not_block_the_next(room: Room) -> None:
    class Cut(Exception):
        pass

    def cut(call: str, path: str) -> None:
        if call == "create" and layout.ROSTER in path:
            raise Cut

    room.fs["a"] = RecordingFileSystem(FS, before=cut)
    # The cut is no error of ours: only its rank sees it, the others would wait for ever. One node alone is enough here.
    [outcome] = agreed(room, ("a",))
    assert isinstance(outcome, Cut)
    room.fs.clear()
    assert {answer.attempt.seq for answer in agreed(room)} == {2}


def test_the_attempt_is_on_every_disk_before_any_rank_goes_on(tmp_path: Path) -> None:
    room = Room(tmp_path, ("a", "b", "c"))
    seen: list[dict[str, list[str]]] = []

    def act(group: Group) -> None:
        fs, path = PosixFileSystem(), room.run_dir(group.node)
        choice = agreement.choose(group, fs, CLOCK, path, memory=room.memory("a"), wish=Wish(), storage_wait_s=1.0)
        agreement.agree(group, fs, CLOCK, path, choice, facts(), new_launch=lambda: 1)
        seen.append(attempts(room))

    run_ranks(NODES, act)
    assert all(len(names) == 1 for found in seen for names in found.values())
    assert len(seen) == 4


# -- starting anew ---------------------------------------------------------------------------------------------------------

FRESH, PLAIN, RESTART = Wish(is_fresh=True), Wish(), Wish(is_restart=True)


def test_all_start_anew_if_all_were_asked_to() -> None:
    assert settle_wishes({"a": FRESH, "b": FRESH})
    assert not settle_wishes({"a": PLAIN, "b": RESTART})


def test_node_that_was_given_its_command_again_does_not_make_the_others_begin_anew() -> None:
    """It has lost its power, and its unit file says --fresh; the others have got through that start long ago."""
    assert not settle_wishes({"a": RESTART, "b": FRESH})


def test_nodes_of_which_only_some_were_asked_to_start_anew_are_refused_and_named() -> None:
    with pytest.raises(UsageError, match="b want to start at step 0"):
        settle_wishes({"a": PLAIN, "b": FRESH})


def test_every_rank_is_told_of_wishes_that_differ(tmp_path: Path) -> None:
    room = Room(tmp_path, ("a", "b"), is_shared=True)

    def act(group: Group) -> agreement.Choice:
        wish = FRESH if group.node == "b" else PLAIN
        return agreement.choose(group, FS, CLOCK, room.run_dir("a"), memory=room.memory("a"), wish=wish, storage_wait_s=1.0)

    same_error(run_ranks(("a", "b", "b"), act), UsageError)

"""What was verified goes on into another place, and nothing of it keeps a save waiting."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_node import FakeNode

from ridethrough import journal
from ridethrough.errors import UsageError
from ridethrough.format import layout
from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.snapshot.copier import Copier, Tier, held_back, share_of
from ridethrough.store.catalog import Checkpoint
from ridethrough.store.place import Place
from ridethrough.store.retain import Retention
from ridethrough.testing import ErrorOn, SimpleStore, load_newest, restorable_steps
from ridethrough.types import AttemptRef


@pytest.fixture
def node(store: SimpleStore) -> Iterator[FakeNode]:
    found = FakeNode(store)
    yield found
    found.close()


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "room-b" / "exp001")


class Notes(list[tuple[str, dict[str, Any]]]):
    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        self.append((kind, data))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [data for found, data in self if found == kind]


def copier(node: FakeNode, place: str, *, notes: Notes | None = None, fs: FileSystem | None = None, **settings: Any) -> Copier:
    tier = Tier(name="mirror", place=place, domain="room-b", **settings)
    found = Copier(PosixFileSystem(), node.clock, node.link, tier, echo=notes if notes is not None else Notes())  # type: ignore[arg-type]
    if fs is not None:
        found._there = Place(fs=fs, run_dir=place, shown=place, is_mounted=True)
    return found


def save(node: FakeNode, fs: FileSystem, *steps: int) -> None:
    persister = node.persister(fs)
    for step in steps:
        node.post(step)
        node.say(announced=step)
        persister.tick()
        assert node.answer["verified"]["step"] == step


def board(node: FakeNode) -> dict[str, Any]:
    found = node.link.board(links.copier_board("mirror"))
    try:
        return found.read()
    finally:
        found.close()


def steps_in(place: str) -> list[int]:
    if not os.path.exists(os.path.join(place, layout.RUN)):
        return []
    found = restorable_steps(PosixFileSystem(), place)
    assert set(found.values()) <= {None}
    return sorted(found)


def test_nothing_is_copied_before_it_was_verified(node: FakeNode, place: str) -> None:
    copier(node, place).tick()
    assert steps_in(place) == []


def test_what_was_verified_is_in_the_other_place_and_on_record(node: FakeNode, fs: FileSystem, place: str, store: SimpleStore) -> None:
    save(node, fs, 10)
    notes = Notes()
    copier(node, place, notes=notes).tick()
    loaded = load_newest(fs, place)
    assert loaded is not None
    assert (loaded.step, store.is_true(loaded)) == (10, True)
    [said] = notes.of("copy.done")
    assert (said["step"], said["tier"], said["place"]) == (10, "mirror", place)
    [event] = journal.read(fs, [layout.journal_path(store.run_dir, store.node)]).of("copy.done")
    assert event.data["step"] == 10
    assert board(node)["done"]["step"] == 10


def test_of_several_saves_only_the_newest_is_copied_and_only_once(node: FakeNode, fs: FileSystem, place: str) -> None:
    save(node, fs, 10, 20, 30)
    notes = Notes()
    found = copier(node, place, notes=notes)
    for _ in range(3):
        found.tick()
    assert steps_in(place) == [30]
    assert len(notes.of("copy.done")) == 1


def test_the_other_place_keeps_what_its_own_retention_says(node: FakeNode, fs: FileSystem, place: str) -> None:
    found = copier(node, place, retention=Retention(keep_last=2))
    for step in (10, 20, 30, 40):
        save(node, fs, step)
        found.tick()
    assert steps_in(place) == [30, 40]


def test_a_place_that_refuses_is_on_record_and_tried_again_after_a_pause(node: FakeNode, fs: FileSystem, place: str) -> None:
    save(node, fs, 10)
    notes = Notes()
    fault = ErrorOn(PosixFileSystem(), "create", errno.ENOSPC, is_lasting=True, within=".safetensors")
    found = copier(node, place, notes=notes, fs=fault)
    for _ in range(5):
        found.tick()
    assert len(notes.of("copy.failed")) == 1, "not again at once"
    assert "ENOSPC" in board(node)["failed"]["message"]
    save(node, fs, 20)
    node.clock.advance(6)
    found.tick()
    assert board(node)["failures_in_a_row"] == 2
    found._there = Place(fs=PosixFileSystem(), run_dir=place, shown=place, is_mounted=True)
    node.clock.advance(20)
    found.tick()
    assert steps_in(place) == [20]
    assert (board(node)["failures_in_a_row"], board(node)["failed"]) == (0, None)


def test_what_is_being_copied_is_not_removed_here_and_goes_when_it_is_there(node: FakeNode, fs: FileSystem, place: str, store: SimpleStore) -> None:
    save(node, fs, 10)
    found = copier(node, place)
    seen: list[bool] = []

    class SavesMeanwhile(ErrorOn):
        """Four more saves are made while the first payload is on its way."""

        def enter(self, call: str, path: str) -> None:
            if call == "sync" and ".safetensors" in path and not seen:
                seen.append(True)
                assert held_back(node.link) == {store.dir_name(10)}
                save(node, fs, 20, 30, 40, 50)
            super().enter(call, path)

    found._there = Place(fs=SavesMeanwhile(PosixFileSystem(), "none", 0), run_dir=place, shown=place, is_mounted=True)
    found.tick()
    assert seen
    assert steps_in(place) == [10]
    assert held_back(node.link) == frozenset()
    save(node, fs, 60)
    assert store.dir_name(10) not in os.listdir(store.run_dir)


def test_a_successor_goes_on_with_what_its_predecessor_had_copied(node: FakeNode, fs: FileSystem, place: str, store: SimpleStore) -> None:
    save(node, fs, 10)

    class Killed(Exception):
        pass

    class KilledLate(ErrorOn):
        def enter(self, call: str, path: str) -> None:
            if call == "create" and "rank-00001" in path:
                raise Killed
            super().enter(call, path)

    first = copier(node, place, fs=KilledLate(PosixFileSystem(), "none", 0))
    with pytest.raises(Killed):
        first.tick()
    notes = Notes()
    copier(node, place, notes=notes).tick()
    [said] = notes.of("copy.done")
    assert 0 < said["copied_bytes"] < sum(len(store.truth(10, name)) for name in store.part_names)
    assert steps_in(place) == [10]


def test_a_bounded_copy_takes_its_time(node: FakeNode, fs: FileSystem, place: str, store: SimpleStore) -> None:
    save(node, fs, 10)
    began_s = node.clock.monotonic_s()
    copier(node, place, bandwidth_bytes_per_s=1000.0).tick()
    copied_bytes = board(node)["done"]["copied_bytes"]
    assert node.clock.monotonic_s() - began_s >= copied_bytes / 1000.0 * 0.99


def test_a_place_of_another_run_is_an_alarm_and_left_alone(node: FakeNode, fs: FileSystem, tmp_path: Path) -> None:
    other = SimpleStore(fs=fs, run_dir=str(tmp_path / "other"), seed=5)
    other.start()
    save(node, fs, 10)
    copier(node, other.run_dir).tick()
    assert "it holds run" in board(node)["failed"]["message"]
    assert steps_in(other.run_dir) == []


def test_a_place_that_is_none_is_said_at_once(node: FakeNode) -> None:
    with pytest.raises(UsageError, match="no kind of place"):
        copier(node, "ftp://nowhere/x")


def test_what_several_nodes_hold_is_copied_by_one_and_what_a_dark_one_held_by_whoever_has_it() -> None:
    ref = AttemptRef(seq=1, nonce="a" * 32)
    nodes = ("n0", "n1", "n2")
    parts = (RosterPart(name="replicated", holders=(0, 1, 2)), *(RosterPart(name=f"rank-{rank:05d}", holders=(rank,)) for rank in range(3)))
    roster = Roster(run_uid="u", attempt=ref, nodes=nodes, parts=parts)

    def on(node: str, *names: str) -> Checkpoint:
        seals = tuple(sealed(name, node) for name in names)
        return Checkpoint(
            step=1, save_id="s", attempt=ref, parent=None, dir_name="d", roster=roster, seals=seals, problems=(), size_bytes=0, meta={},
        )  # fmt: skip

    def copied(node: str, *names: str, dark: frozenset[str] = frozenset()) -> list[str]:
        return [seal.part for seal in share_of(on(node, *names), node, dark=dark).seals]

    assert copied("n0", "replicated", "rank-00000") == ["replicated", "rank-00000"]
    assert copied("n1", "replicated", "rank-00001") == ["rank-00001"]
    # n0 is dark: the next holder copies what all hold, and n2 has what was n0's alone, from memory.
    assert copied("n1", "replicated", "rank-00001", dark=frozenset({"n0"})) == ["replicated", "rank-00001"]
    assert copied("n2", "replicated", "rank-00002", "rank-00000", dark=frozenset({"n0"})) == ["rank-00002", "rank-00000"]


def sealed(part: str, node: str) -> Seal:
    return Seal(
        run_uid="u", attempt=AttemptRef(seq=1, nonce="n"), parent=None, step=1, save_id="s", part=part, node=node, roster_digest="d",
        payload_name=f"{part}~{node}-00000000.safetensors", payload_bytes=1, chunk_bytes=1, chunks=("x",), tensors=(), tree={}, meta={},
    )  # fmt: skip

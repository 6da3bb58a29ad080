"""What the persister must never lose: good copies, the fence, and its way out of its own crashes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_node import LAUNCH, FakeNode
from test_persist import FlipAfterWrite, seals_of, step_dirs

from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot.persist import Persister
from ridethrough.testing import RecordingFileSystem, SimpleStore, flip_bit, restorable_steps


def save(node: FakeNode, persister: Persister, *steps: int) -> None:
    for step in steps:
        node.say(announced=step)
        node.post(step)
        persister.tick()


def quarantined(node: FakeNode) -> list[str]:
    root = Path(node.store.run_dir) / "quarantine"
    return sorted(str(p.relative_to(root)).split("~")[0] for p in root.rglob("*.safetensors")) if root.is_dir() else []


def test_damaged_part_is_quarantined(node: FakeNode) -> None:
    save(node, node.persister(FlipAfterWrite(within="rank-00001")), 10)
    assert quarantined(node) == [f"{node.store.dir_name(10)}/rank-00001"]


def test_intact_parts_of_a_damaged_save_are_left_where_they_are(node: FakeNode) -> None:
    save(node, node.persister(FlipAfterWrite(within="rank-00001")), 10)
    assert seals_of(node, 10) == ["rank-00000", "replicated"]


def test_damaged_save_is_not_counted_as_durable(node: FakeNode) -> None:
    save(node, node.persister(FlipAfterWrite(within="rank-00001")), 10)
    assert node.answer["durable"] is None


def test_damaged_save_leaves_the_older_one_counted(node: FakeNode) -> None:
    persister = node.persister(FlipAfterWrite(within=node.store.dir_name(20)))
    save(node, persister, 10, 20)
    assert node.answer["durable"]["step"] == 10


def test_damaged_save_removes_no_older_one(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(FlipAfterWrite(within=node.store.dir_name(50)))
    save(node, persister, 10, 20, 30, 40, 50)
    assert restorable_steps(fs, node.store.run_dir) == {20: None, 30: None, 40: None}


def test_save_after_a_damaged_one_is_verified(node: FakeNode) -> None:
    persister = node.persister(FlipAfterWrite(within=node.store.dir_name(10)))
    save(node, persister, 10, 20)
    assert node.answer["verified"]["step"] == 20


def test_copies_that_ranks_found_damaged_are_quarantined_at_the_next_launch(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    save(node, persister, 10, 20)
    dir_name = node.store.dir_name(20)
    flip_bit(next(str(p) for p in (Path(node.store.run_dir) / dir_name).glob("replicated*.safetensors")), -1)
    node.store.resume()
    node.start(LAUNCH + 1, restored_step=10, damaged=({"dir_name": dir_name, "part": "replicated"},))
    persister.tick()
    assert quarantined(node) == [f"{dir_name}/replicated"]


def test_copy_suspected_in_error_stays(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    save(node, persister, 10)
    dir_name = node.store.dir_name(10)
    node.store.resume()
    node.start(LAUNCH + 1, restored_step=10, damaged=({"dir_name": dir_name, "part": "replicated"},))
    persister.tick()
    assert quarantined(node) == []


def test_retention_keeps_the_last_three(node: FakeNode, fs: PosixFileSystem) -> None:
    save(node, node.persister(fs), 10, 20, 30, 40, 50)
    assert restorable_steps(fs, node.store.run_dir) == {30: None, 40: None, 50: None}


def test_retention_runs_only_after_the_new_save_is_verified(node: FakeNode) -> None:
    too_early: list[str] = []

    def look(call: str, path: str) -> None:
        verified = node.answer.get("verified") or {"step": -1}
        if call == "remove" and verified["step"] < 40 and ".tmp" not in path:
            too_early.append(path)

    save(node, node.persister(RecordingFileSystem(PosixFileSystem(), before=look)), 10, 20, 30, 40)
    assert not too_early
    assert len(step_dirs(node)) == 3


def test_reason_of_a_removal_is_on_record_before_the_bytes_go(node: FakeNode) -> None:
    order: list[str] = []

    def look(call: str, path: str) -> None:
        if call == "append":
            order.append("record")
        elif call == "remove" and path.endswith(".seal"):
            order.append("remove")

    persister = node.persister(RecordingFileSystem(PosixFileSystem(), before=look))
    save(node, persister, 10, 20, 30)
    order.clear()
    save(node, persister, 40)
    # Durable, verified and the reason, then three seals.
    assert order[:6] == ["record", "record", "record", "remove", "remove", "remove"]


class Died(BaseException):
    """The persister's process is gone."""


def die_in(node: FakeNode, call: str, within: str) -> None:
    """One persister serves and dies at its first such call."""

    def kill(found: str, path: str) -> None:
        if found == call and within in path:
            raise Died

    persister = node.persister(RecordingFileSystem(PosixFileSystem(), before=kill))
    with pytest.raises(Died):
        persister.tick()


def test_successor_of_a_dead_persister_saves_what_it_was_at(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    die_in(node, "write", "rank-00001")
    node.persister(fs).tick()
    assert restorable_steps(fs, node.store.run_dir) == {10: None}


def test_save_at_which_the_persister_died_twice_is_given_up(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    die_in(node, "write", "rank-00001")
    die_in(node, "write", "rank-00001")
    node.persister(fs).tick()
    assert node.answer["failed"]["code"] == "RT-070"
    assert restorable_steps(fs, node.store.run_dir) == {}


def test_save_after_the_one_given_up_works(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    die_in(node, "write", "rank-00001")
    die_in(node, "write", "rank-00001")
    persister = node.persister(fs)
    persister.tick()
    save(node, persister, 20)
    assert restorable_steps(fs, node.store.run_dir) == {20: None}


def test_successor_goes_on_from_what_was_already_durable(node: FakeNode, fs: PosixFileSystem) -> None:
    save(node, node.persister(fs), 10)
    before = node.answer["durable"]
    node.persister(fs)
    assert node.answer["durable"] == before


def test_successor_knows_which_copies_were_verified(node: FakeNode, fs: PosixFileSystem) -> None:
    save(node, node.persister(fs), 10, 20, 30)
    save(node, node.persister(fs), 40)
    assert restorable_steps(fs, node.store.run_dir) == {20: None, 30: None, 40: None}


def fenced(node: FakeNode, act: Callable[[Persister], None], fs: PosixFileSystem) -> list[str]:
    """Names in the run after an attempt was overtaken on disk and then did something."""
    persister = node.persister(fs)
    save(node, persister, 10, 20, 30)
    other = SimpleStore(fs=fs, run_dir=node.store.run_dir, seed=7)
    other.start()
    before = step_dirs(node)
    act(persister)
    assert before == step_dirs(node), "nothing was written or deleted"
    return before


def test_attempt_with_a_newer_one_on_disk_saves_and_removes_nothing(node: FakeNode, fs: PosixFileSystem) -> None:
    fenced(node, lambda persister: save(node, persister, 40), fs)
    assert node.answer["failed"]["code"] == "RT-061"


def test_attempt_with_a_newer_one_on_disk_flushes_nothing(node: FakeNode, fs: PosixFileSystem) -> None:
    def flush(persister: Persister) -> None:
        node.post(35)
        node.say(flush={"id": 1, "reason": "a trainer died"})
        persister.tick()

    fenced(node, flush, fs)
    assert node.answer["failed"]["code"] == "RT-061"


def test_newer_attempt_that_comes_in_mid_save_keeps_its_files(node: FakeNode) -> None:
    """The fence is asked again before anything is removed."""
    fs = PosixFileSystem()
    is_overtaken = False

    def overtake(call: str, path: str) -> None:
        nonlocal is_overtaken
        if call == "rename" and path.endswith("manifest.json") and node.store.dir_name(40) in path and not is_overtaken:
            is_overtaken = True
            SimpleStore(fs=fs, run_dir=node.store.run_dir, seed=7).start()

    save(node, node.persister(RecordingFileSystem(fs, after=overtake)), 10, 20, 30, 40)
    assert is_overtaken
    assert {name for name in os.listdir(node.store.run_dir) if name.startswith("step-")} == {node.store.dir_name(s) for s in (10, 20, 30, 40)}


def test_attempt_with_a_newer_one_on_disk_quarantines_nothing(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    save(node, persister, 10)
    dir_name = node.store.dir_name(10)
    flip_bit(next(str(p) for p in (Path(node.store.run_dir) / dir_name).glob("replicated*.safetensors")), -1)
    SimpleStore(fs=fs, run_dir=node.store.run_dir, seed=7).start()
    node.start(LAUNCH + 1, damaged=({"dir_name": dir_name, "part": "replicated"},))
    persister.tick()
    assert quarantined(node) == []

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fake_node import LAUNCH, FakeNode

from ridethrough import journal
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing import ErrorOn, RecordingFileSystem, SimpleStore, flip_bit, load_newest, restorable_steps


def step_dirs(node: FakeNode) -> list[str]:
    return sorted(name for name in os.listdir(node.store.run_dir) if name.startswith("step-"))


def seals_of(node: FakeNode, step: int) -> list[str]:
    directory = Path(node.store.run_dir) / node.store.dir_name(step)
    return sorted(p.name.split("~")[0] for p in directory.glob("*.seal")) if directory.is_dir() else []


def test_nothing_is_saved_before_the_announced_step(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    for step in (1, 5, 9):
        node.post(step)
        persister.tick()
    assert step_dirs(node) == []


def test_first_save_needs_no_announcement(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    node.persister(fs).tick()
    assert restorable_steps(fs, node.store.run_dir) == {10: None}


def test_save_waits_until_every_rank_has_posted(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    node.post(10, ranks=(0,))
    assert persister.tick(), "a save is awaited"
    assert step_dirs(node) == []


def test_save_goes_on_when_the_last_rank_has_posted(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    node.post(10, ranks=(0,))
    persister.tick()
    node.post(10, ranks=(1,))
    persister.tick()
    assert restorable_steps(fs, node.store.run_dir) == {10: None}


def test_saved_bytes_are_the_posted_bytes(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    node.persister(fs).tick()
    loaded = load_newest(fs, node.store.run_dir)
    assert loaded is not None
    assert loaded.payloads == {name: node.store.truth(10, name) for name in node.store.part_names}


def test_saved_trees_are_the_posted_trees(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    node.persister(fs).tick()
    loaded = load_newest(fs, node.store.run_dir)
    assert loaded is not None
    assert loaded.states == {name: node.store.state(10, name) for name in node.store.part_names}


def test_durable_is_said_only_after_every_seal_exists(node: FakeNode) -> None:
    seen: list[tuple[bool, int]] = []

    def look(_call: str, _path: str) -> None:
        seen.append((bool(node.answer.get("durable")), len(seals_of(node, 10))))

    node.post(10)
    node.persister(RecordingFileSystem(PosixFileSystem(), before=look)).tick()
    assert {count for is_durable, count in seen if is_durable} == {3}


def test_verified_is_said_only_after_every_payload_was_read_back(node: FakeNode) -> None:
    read: list[str] = []
    too_early: list[str] = []

    def look(call: str, path: str) -> None:
        if call == "read_into" and path.endswith(".safetensors"):
            read.append(os.path.basename(path).split("~")[0])
        elif node.answer.get("verified") and len(set(read)) < 3:
            too_early.append(path)

    node.post(10)
    node.persister(RecordingFileSystem(PosixFileSystem(), after=look)).tick()
    assert set(read) == set(node.store.part_names)
    assert not too_early


def test_durable_and_verified_are_in_the_journal_in_that_order(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    node.persister(fs).tick()
    found = journal.read(fs, [layout.journal_path(node.store.run_dir, node.store.node)])
    assert [event.kind for event in found.events] == ["checkpoint.durable", "checkpoint.verified"]


def test_with_a_durable_save_it_is_on_record_how_many_are_kept(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    persister = node.persister(fs)
    persister.tick()
    found = journal.read(fs, [layout.journal_path(node.store.run_dir, node.store.node)])
    assert found.of("checkpoint.durable")[0].data["retention"]["keep_last"] == node._keep_last


def test_announced_step_is_saved(node: FakeNode, fs: PosixFileSystem) -> None:
    node.say(announced=20)
    persister = node.persister(fs)
    for step in (10, 20):
        node.post(step)
        persister.tick()
    assert restorable_steps(fs, node.store.run_dir) == {20: None}


def test_step_that_a_rank_had_already_passed_is_reported_as_failed(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(11)
    node.persister(fs).tick()
    assert "already passed" in node.answer["failed"]["message"]


def test_meta_json_names_step_and_metrics(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    node.persister(fs).tick()
    loaded = load_newest(fs, node.store.run_dir)
    assert loaded is not None
    text = (Path(node.store.run_dir) / loaded.dir_name / "meta.json").read_text()
    assert '"step":10' in text
    assert '"loss":0.1' in text


def test_flush_saves_the_newest_step_that_every_rank_has(node: FakeNode, fs: PosixFileSystem) -> None:
    for step in (3, 4):
        node.post(step)
    node.post(5, ranks=(0,))
    node.say(flush={"id": 1, "reason": "a trainer died"})
    node.persister(fs).tick()
    assert restorable_steps(fs, node.store.run_dir) == {4: None}


def test_flush_is_confirmed_by_its_number(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(3)
    node.say(flush={"id": 7, "reason": "a trainer died"})
    node.persister(fs).tick()
    assert node.answer["flushed"] == 7


def test_flush_with_nothing_posted_is_confirmed(node: FakeNode, fs: PosixFileSystem) -> None:
    node.say(flush={"id": 1, "reason": "a trainer died"})
    node.persister(fs).tick()
    assert node.answer["flushed"] == 1


def test_flush_of_an_older_step_than_durable_saves_nothing(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    node.post(10)
    persister.tick()
    node.say(flush={"id": 1, "reason": "a trainer died"})
    persister.tick()
    assert len(step_dirs(node)) == 1


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("create", errno.ENOSPC, "RT-014"),
        ("write", errno.EIO, "RT-013"),
        ("sync", errno.EIO, "RT-013"),
        ("rename", errno.EROFS, "RT-017"),
        ("make_dir", errno.EACCES, "RT-016"),
        ("list_dir", errno.ESTALE, "RT-013"),
    ],
)
def test_failing_disk_is_reported_with_its_code(node: FakeNode, call: str, error: int, code: str) -> None:
    fs = ErrorOn(PosixFileSystem(), call, error, is_lasting=True, within=layout.ATTEMPTS if call == "list_dir" else "step-")
    node.post(10)
    node.persister(fs).tick()
    failed = node.answer["failed"]
    assert (failed["step"], failed["code"]) == (10, code)


def test_failing_disk_never_makes_a_save_durable(node: FakeNode) -> None:
    node.post(10)
    node.persister(ErrorOn(PosixFileSystem(), "sync", errno.EIO, is_lasting=True)).tick()
    assert node.answer["durable"] is None


def test_failed_save_leaves_the_snapshot_posted(node: FakeNode) -> None:
    node.post(10)
    node.persister(ErrorOn(PosixFileSystem(), "sync", errno.EIO)).tick()
    assert node.slot(0, 0).posted_step() == 10


def test_failed_save_leaves_no_pin(node: FakeNode) -> None:
    node.post(10)
    node.persister(ErrorOn(PosixFileSystem(), "sync", errno.EIO)).tick()
    assert node.slot(0, 0).begin()


def test_save_after_a_failed_one_works(node: FakeNode) -> None:
    fs = ErrorOn(PosixFileSystem(), "sync", errno.EIO)
    persister = node.persister(fs)
    node.post(10)
    persister.tick()
    node.say(announced=20)
    node.post(20)
    persister.tick()
    assert restorable_steps(PosixFileSystem(), node.store.run_dir) == {20: None}


def test_launch_after_a_failed_save_is_served(node: FakeNode) -> None:
    persister = node.persister(ErrorOn(PosixFileSystem(), "sync", errno.EIO))
    node.post(10)
    persister.tick()
    node.store.start()
    node.start(LAUNCH + 1)
    node.post(10)
    persister.tick()
    assert node.answer["durable"]["launch"] == LAUNCH + 1


def test_failures_in_a_row_are_counted_and_end_with_a_success(node: FakeNode) -> None:
    persister = node.persister(ErrorOn(PosixFileSystem(), "sync", errno.EIO))
    node.post(10)
    persister.tick()
    assert node.answer["failures_in_a_row"] == 1
    node.say(announced=20)
    node.post(20)
    persister.tick()
    assert node.answer["failures_in_a_row"] == 0


def test_journal_that_cannot_be_written_stops_no_save(node: FakeNode) -> None:
    node.post(10)
    node.persister(ErrorOn(PosixFileSystem(), "append", errno.ENOSPC, is_lasting=True)).tick()
    assert node.answer["verified"]["step"] == 10
    assert "ENOSPC" in node.answer["journal_error"]


def test_events_that_the_journal_refused_are_written_later(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(ErrorOn(PosixFileSystem(), "append", errno.ENOSPC, nth=1))
    node.post(10)
    persister.tick()
    found = journal.read(fs, [layout.journal_path(node.store.run_dir, node.store.node)])
    assert [event.kind for event in found.events] == ["checkpoint.durable", "checkpoint.verified"]


def test_unreadable_storage_at_the_start_of_a_launch_does_not_end_the_persister(node: FakeNode) -> None:
    persister = node.persister(ErrorOn(PosixFileSystem(), "list_dir", errno.EIO, within=layout.JOURNAL))
    node.post(10)
    for _ in range(3):
        persister.tick()
    assert node.answer["verified"]["step"] == 10


def test_run_directory_that_vanishes_is_a_failed_save(node: FakeNode, fs: PosixFileSystem) -> None:
    persister = node.persister(fs)
    node.post(1)
    persister.tick()
    os.rename(node.store.run_dir, node.store.run_dir + ".unmounted")
    node.post(10)
    persister.tick()
    assert node.answer["failed"]["step"] == 10


def test_run_directory_that_vanished_is_not_made_anew(node: FakeNode, fs: PosixFileSystem) -> None:
    """A save into the empty mount point of a lost disk would be on the wrong disk."""
    persister = node.persister(fs)
    node.post(1)
    persister.tick()
    os.rename(node.store.run_dir, node.store.run_dir + ".unmounted")
    node.post(10)
    persister.tick()
    assert not os.path.exists(node.store.run_dir)


def test_replicas_that_differ_raise_an_alarm_that_names_the_tensor(node: FakeNode, fs: PosixFileSystem) -> None:
    other = bytearray(node.store.truth(10, "replicated"))
    other[-9] ^= 1  # the last 8 bytes are the scalar `step`; before it lies `mask`
    node.post(10, replicated={1: bytes(other)})
    node.persister(fs).tick()
    assert node.noted("replicas.diverged") == [{"step": 10, "part": "replicated", "ranks": [0, 1], "tensors": ["mask"]}]


def test_equal_replicas_raise_no_alarm(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    node.persister(fs).tick()
    assert node.noted("replicas.diverged") == []
    assert node.answer["diverged"] is None


def test_part_held_by_several_ranks_is_written_once(node: FakeNode, fs: PosixFileSystem) -> None:
    node.post(10)
    node.persister(fs).tick()
    assert seals_of(node, 10) == ["rank-00000", "rank-00001", "replicated"]


def test_store_with_one_rank_is_saved(fs: PosixFileSystem, tmp_path: Path) -> None:
    store = SimpleStore(fs=fs, run_dir=str(tmp_path / "one"), world_size=1)
    store.start()
    node = FakeNode(store)
    node.post(10)
    node.persister(fs).tick()
    assert restorable_steps(fs, store.run_dir) == {10: None}
    node.close()


def test_flipped_bit_on_the_medium_is_found_by_the_read_back(node: FakeNode) -> None:
    node.post(10)
    node.persister(FlipAfterWrite(within="rank-00001")).tick()
    assert node.answer["failed"]["code"] == "RT-040"
    assert node.answer["verified"] is None


class FlipAfterWrite(RecordingFileSystem):
    """The first payload whose path contains `within` has a wrong bit on the medium once its directory is synced."""

    def __init__(self, *, within: str) -> None:
        super().__init__(PosixFileSystem())
        self._within = within
        self._is_done = False

    def leave(self, call: str, path: str) -> None:
        super().leave(call, path)
        if call == "close" and self._within in path and path.endswith(".safetensors") and not self._is_done:
            self._is_done = True
            flip_bit(path, -1)


def test_what_is_different_from_what_made_the_checkpoint_is_said_once_a_launch_whoever_serves(node: FakeNode, fs: PosixFileSystem) -> None:
    node.start(2, restored_step=10, resumed_dir="step-000000010-0123abcd", differs={"detail": "commit a -> b", "differences": []})
    node.persister(fs).tick()
    node.persister(fs).tick()
    told = {"step": 10, "dir_name": "step-000000010-0123abcd", "detail": "commit a -> b", "differences": []}
    assert node.noted("resume.differs") == [told]
    [event] = journal.read(fs, [layout.journal_path(node.store.run_dir, node.store.node)]).of("resume.differs")
    assert event.data == told
    node.start(3, restored_step=10, differs={"detail": "commit a -> c", "differences": []})
    node.persister(fs).tick()
    assert [data["detail"] for data in node.noted("resume.differs")] == ["commit a -> b", "commit a -> c"]


def test_a_launch_that_changed_nothing_says_nothing_of_it(node: FakeNode, fs: PosixFileSystem) -> None:
    node.persister(fs).tick()
    assert node.noted("resume.differs") == []

"""Starting a run or an attempt is durable, and a cut in the middle of it is no obstacle to the next start."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from ridethrough.errors import Damaged, Fenced, StoreFull, TierMissing, TwoHeads
from ridethrough.format import layout, record
from ridethrough.journal import Journal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import state_dir
from ridethrough.store.catalog import read_catalog, read_run
from ridethrough.store.start import (
    Claim,
    claim_attempt,
    open_run,
    remember_run,
    remembered_run,
    remembered_storage,
    require_newest,
    unfinished_claims,
)
from ridethrough.testing import FakeClock, RecordingFileSystem, SimpleStore, flip_bit, load_newest
from ridethrough.types import AttemptRef


class PowerCut(Exception):
    """Nothing after this call happens."""


def cut_after(nth: int) -> tuple[RecordingFileSystem, list[int]]:
    left = [nth]

    def cut(call: str, path: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise PowerCut

    return RecordingFileSystem(PosixFileSystem(), before=cut), left


def opened(fs: object, path: Path) -> str:
    return open_run(fs, FakeClock(), str(path), known_uid=None, is_fresh=False).run_uid  # type: ignore[arg-type]


def test_a_run_opened_twice_is_the_same_run(tmp_path: Path) -> None:
    assert opened(PosixFileSystem(), tmp_path / "a" / "b" / "run") == opened(PosixFileSystem(), tmp_path / "a" / "b" / "run")


def test_the_marker_is_the_last_thing_a_new_run_gets(tmp_path: Path) -> None:
    recorder = RecordingFileSystem(PosixFileSystem())
    opened(recorder, tmp_path / "run")
    assert recorder.changes()[-2:] == [("rename", "run.json"), ("sync_dir", "run")]


def test_a_cut_at_any_call_of_a_first_start_leaves_a_place_that_starts_whole(tmp_path: Path) -> None:
    nth = 0
    while True:
        nth += 1
        path = tmp_path / str(nth) / "run"
        fs, left = cut_after(nth)
        with contextlib.suppress(PowerCut):
            opened(fs, path)
        uid = opened(PosixFileSystem(), path)
        assert read_run(PosixFileSystem(), str(path)).run_uid == uid
        # What the first minute of a run needs is there, whenever the power went.
        Journal(PosixFileSystem(), FakeClock(), layout.journal_path(str(path), "n"), role="t").append("run.started")
        assert (path / layout.ATTEMPTS).is_dir()
        if left[0] > 0:
            break
    assert nth > 15


def test_a_cut_at_any_call_of_a_new_attempt_never_hides_the_checkpoints_before_it(tmp_path: Path) -> None:
    nth = 0
    while True:
        nth += 1
        store = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / f"run-{nth}"), world_size=1, part_bytes=300)
        store.start()
        store.commit(1)
        store.fs, left = cut_after(nth)
        with contextlib.suppress(PowerCut):
            store.resume()
        store.fs = PosixFileSystem()
        loaded = load_newest(store.fs, store.run_dir)
        assert loaded is not None
        assert store.is_true(loaded)
        assert store.resume() == 1
        store.commit(2)
        newest = load_newest(store.fs, store.run_dir)
        assert newest is not None
        assert newest.step == 2
        if left[0] > 0:
            break
    assert nth > 20


def test_the_roster_is_durable_before_the_attempt_that_needs_it(store: SimpleStore) -> None:
    store.fs = recorder = RecordingFileSystem(PosixFileSystem())
    store.start()
    changes = recorder.changes()
    renames = [name for call, name in changes if call == "rename"]
    assert renames == ["roster.json", "attempt.json"]
    assert changes[changes.index(("rename", "roster.json")) + 1][0] == "sync_dir"
    assert changes[-1][0] == "sync_dir"


def test_a_rival_with_the_same_number_is_named(store: SimpleStore) -> None:
    with pytest.raises(TwoHeads) as caught:
        store.start(seq=1, nonce="f0" * 16)
    assert caught.value.fields["second"] != caught.value.fields["first"]


def test_what_a_node_remembers_survives_and_is_per_directory(tmp_path: Path) -> None:
    fs = PosixFileSystem()
    assert remembered_run(fs, state_dir(), str(tmp_path / "a")) is None
    remember_run(fs, state_dir(), str(tmp_path / "a"), "1" * 32)
    remember_run(fs, state_dir(), str(tmp_path / "b"), "2" * 32)
    assert remembered_run(fs, state_dir(), str(tmp_path / "a")) == "1" * 32
    assert remembered_run(fs, state_dir(), str(tmp_path / "b")) == "2" * 32


def test_damaged_memory_of_a_node_still_knows_that_there_was_a_run(tmp_path: Path) -> None:
    fs = PosixFileSystem()
    remember_run(fs, state_dir(), str(tmp_path / "a"), "1" * 32)
    [path] = Path(state_dir(), "runs").iterdir()
    flip_bit(str(path), 40)
    known = remembered_run(fs, state_dir(), str(tmp_path / "a"))
    assert known == ""
    with pytest.raises(TierMissing):
        open_run(fs, FakeClock(), str(tmp_path / "a"), known_uid=known, is_fresh=False)


def test_a_damaged_marker_is_never_overwritten_by_a_start(store: SimpleStore) -> None:
    path = os.path.join(store.run_dir, layout.RUN)
    flip_bit(path, 30)
    before = Path(path).read_bytes()
    with pytest.raises(Damaged):
        opened(PosixFileSystem(), Path(store.run_dir))
    assert Path(path).read_bytes() == before


def test_a_run_starts_in_a_hostile_directory(hostile_dir: Path) -> None:
    path = hostile_dir / "sub 'dir"
    assert opened(PosixFileSystem(), path) == opened(PosixFileSystem(), path)
    remember_run(PosixFileSystem(), state_dir(), str(path), "1" * 32)
    assert remembered_run(PosixFileSystem(), state_dir(), str(path)) == "1" * 32


# -- how the run directory was -------------------------------------------------------------------------------------------


def test_a_node_remembers_how_the_run_directory_was(tmp_path: Path) -> None:
    fs, path = PosixFileSystem(), str(tmp_path / "a")
    assert remembered_storage(fs, state_dir(), path) is None
    remember_run(fs, state_dir(), path, "1" * 32, "shared")
    assert remembered_storage(fs, state_dir(), path) == "shared"
    remember_run(fs, state_dir(), path, "1" * 32)
    assert remembered_storage(fs, state_dir(), path) == "shared", "a start that did not look keeps what is known"


def test_a_new_run_at_the_same_place_forgets_how_the_old_one_was(tmp_path: Path) -> None:
    fs, path = PosixFileSystem(), str(tmp_path / "a")
    remember_run(fs, state_dir(), path, "1" * 32, "node-local")
    remember_run(fs, state_dir(), path, "2" * 32)
    assert (remembered_run(fs, state_dir(), path), remembered_storage(fs, state_dir(), path)) == ("2" * 32, None)


def test_a_note_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    fs, path = PosixFileSystem(), str(tmp_path / "a")
    remember_run(fs, state_dir(), path, "1" * 32)
    [note] = Path(state_dir(), "runs").iterdir()
    note.write_bytes(record.encode("node-run", {"run_uid": "1" * 32, "run_dir": path}))
    assert (remembered_run(fs, state_dir(), path), remembered_storage(fs, state_dir(), path)) == ("1" * 32, None)


def test_what_is_known_already_is_not_written_again(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    remember_run(PosixFileSystem(), state_dir(), path, "1" * 32, "shared")
    recorder = RecordingFileSystem(PosixFileSystem())
    remember_run(recorder, state_dir(), path, "1" * 32)
    assert recorder.changes() == []


# -- claims --------------------------------------------------------------------------------------------------------------


def ref(seq: int, nonce: str) -> AttemptRef:
    return AttemptRef(seq=seq, nonce=nonce * 16)


def test_a_number_belongs_to_whoever_claims_it_first(store: SimpleStore) -> None:
    assert claim_attempt(store.fs, store.run_dir, ref(7, "a1"), ("a", "b")) is None
    rival = claim_attempt(store.fs, store.run_dir, ref(7, "b2"), ("c",))
    assert rival == Claim(seq=7, nonce="a1" * 16, nodes=("a", "b"))
    assert rival is not None
    assert rival.label == "000007-a1a1a1a1"


def test_a_claim_of_ones_own_is_no_rival(store: SimpleStore) -> None:
    for _ in range(2):
        assert claim_attempt(store.fs, store.run_dir, ref(7, "a1"), ("a",)) is None


def test_of_many_that_claim_at_once_exactly_one_gets_the_number(store: SimpleStore) -> None:
    outcomes: list[Claim | None] = []
    barrier = threading.Barrier(8)

    def run(nonce: str) -> None:
        barrier.wait(10)
        outcomes.append(claim_attempt(PosixFileSystem(), store.run_dir, ref(9, nonce), (nonce,)))

    threads = [threading.Thread(target=run, args=(f"{number:02x}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert outcomes.count(None) == 1
    assert len(outcomes) == 8


def test_claims_are_not_attempts(store: SimpleStore) -> None:
    claim_attempt(store.fs, store.run_dir, ref(5, "a1"), ("a",))
    catalog = read_catalog(store.fs, store.run_dir)
    assert [found.seq for found, _ in catalog.attempts] == [1]
    assert catalog.problems == ()
    require_newest(store.fs, store.run_dir, store.attempt)


def test_a_claimed_number_is_never_given_again(store: SimpleStore) -> None:
    claim_attempt(store.fs, store.run_dir, ref(5, "a1"), ("a",))
    assert read_catalog(store.fs, store.run_dir).next_seq == 6


def test_claims_above_the_newest_attempt_are_unfinished(store: SimpleStore) -> None:
    claim_attempt(store.fs, store.run_dir, ref(2, "a1"), ("a",))
    Path(layout.claim_path(store.run_dir, 3)).write_bytes(b"")
    assert unfinished_claims(store.fs, store.run_dir, above=1) == (Claim(seq=2, nonce="a1" * 16, nodes=("a",)), Claim(seq=3, nonce="", nodes=()))
    assert unfinished_claims(store.fs, store.run_dir, above=3) == ()


@pytest.mark.parametrize(
    ("claimed", "here", "is_over"),
    [(("a", "b"), ("a", "b"), True), (("a",), ("a", "b"), True), (("a", "c"), ("a", "b"), False), ((), ("a",), False)],
    ids=["the same nodes", "some of us", "somebody else too", "torn"],
)
def test_a_claim_is_over_where_all_who_made_it_start_anew(claimed: tuple[str, ...], here: tuple[str, ...], is_over: bool) -> None:
    assert Claim(seq=1, nonce="a1" * 16, nodes=claimed).is_over(here) is is_over


def test_a_cut_at_any_call_of_a_claim_leaves_it_free_whole_or_torn_and_the_next_start_whole(tmp_path: Path) -> None:
    nth, is_over = 0, False
    while not is_over:
        nth += 1
        store = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / f"run-{nth}"), world_size=1, part_bytes=300)
        store.start()
        store.commit(1)
        fs, left = cut_after(nth)
        with contextlib.suppress(PowerCut):
            claim_attempt(fs, store.run_dir, ref(2, "a1"), ("a",))
        found = unfinished_claims(PosixFileSystem(), store.run_dir, above=1)
        assert found in ((), (Claim(seq=2, nonce="", nodes=()),), (Claim(seq=2, nonce="a1" * 16, nodes=("a",)),))
        assert store.resume() == 1
        store.commit(2)
        is_over = left[0] > 0
    assert nth > 5


def test_a_claim_is_durable_when_the_number_is_ours(store: SimpleStore) -> None:
    recorder = RecordingFileSystem(PosixFileSystem())
    claim_attempt(recorder, store.run_dir, ref(2, "a1"), ("a",))
    changes = recorder.changes()[-4:]
    assert changes == [("create", "000002.claim"), ("write", "000002.claim"), ("sync", "000002.claim"), ("sync_dir", "attempts")]


def test_the_claim_comes_before_the_records_it_is_for(store: SimpleStore) -> None:
    store.fs = recorder = RecordingFileSystem(PosixFileSystem())
    store.start()
    changes = recorder.changes()
    before = changes[: changes.index(("create", "000002.claim"))]
    assert all("roster" not in name and "attempt.json" not in name for _, name in before)


def test_a_disk_that_refuses_a_claim_does_not_keep_its_number(store: SimpleStore) -> None:
    class Full(RecordingFileSystem):
        def enter(self, call: str, path: str) -> None:
            if call == "sync" and path.endswith(".claim"):
                raise StoreFull(path=path, detail="ENOSPC on fsync")
            super().enter(call, path)

    with pytest.raises(StoreFull):
        claim_attempt(Full(PosixFileSystem()), store.run_dir, ref(2, "a1"), ("a",))
    assert claim_attempt(store.fs, store.run_dir, ref(2, "b2"), ("b",)) is None


def test_an_attempt_is_not_written_over_the_claim_of_another(store: SimpleStore) -> None:
    claim_attempt(store.fs, store.run_dir, ref(2, "a1"), ("a",))
    with pytest.raises(TwoHeads) as caught:
        store.start(seq=2, nonce="b2" * 16)
    assert "000002-a1a1a1a1" in str(caught.value)
    assert [found.seq for found, _ in read_catalog(store.fs, store.run_dir).attempts] == [1]


def test_an_attempt_that_was_overtaken_while_it_started_is_fenced(store: SimpleStore) -> None:
    claim_attempt(store.fs, store.run_dir, ref(2, "a1"), ("a",))
    store.start(seq=3, nonce="b2" * 16)
    with pytest.raises(Fenced):
        store.start(seq=2, nonce="a1" * 16)

"""The newest restorable checkpoint is found by seals and lineage, and by nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ridethrough.errors import RideThroughError, TwoHeads
from ridethrough.format import layout
from ridethrough.journal import Journal
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import Catalog, candidates, lineage, on_lineage, progress_evidence, read_catalog
from ridethrough.testing import SimpleStore, flip_bit, load_newest
from ridethrough.types import AttemptRef, Parent


def order(store: SimpleStore) -> list[tuple[int, int]]:
    """Candidates as (attempt, step), best first."""
    return [(c.attempt.seq, c.step) for c in candidates(read_catalog(store.fs, store.run_dir))]


def go_on(store: SimpleStore, *, at: int, seq: int | None = None, nonce: str | None = None) -> AttemptRef:
    return store.start(parent=Parent(attempt=store.attempt, step=at), seq=seq, nonce=nonce)


def test_the_newest_step_is_the_first_candidate(store: SimpleStore) -> None:
    store.commit(1, 2, 10)
    assert order(store) == [(1, 10), (1, 2), (1, 1)]


def test_the_newest_attempt_comes_before_a_higher_step_of_its_parent(store: SimpleStore) -> None:
    store.commit(1, 2, 3)
    go_on(store, at=2)
    store.commit(3)
    assert order(store) == [(2, 3), (1, 2), (1, 1)]


def test_a_step_of_an_abandoned_branch_never_wins_by_its_number(store: SimpleStore) -> None:
    store.commit(1, 2, 99)
    go_on(store, at=2)
    assert order(store) == [(1, 2), (1, 1)]


def test_a_grandparents_steps_past_the_fork_are_abandoned_too(store: SimpleStore) -> None:
    store.commit(1, 2, 3)
    first = store.attempt
    go_on(store, at=2)
    store.commit(3, 4, 50)
    go_on(store, at=3)
    store.commit(4)
    assert order(store) == [(3, 4), (2, 3), (1, 2), (1, 1)]
    store.start(parent=Parent(attempt=first, step=1))
    assert order(store) == [(1, 1)]


def test_an_attempt_from_scratch_starts_a_lineage_of_its_own(store: SimpleStore) -> None:
    store.commit(1, 2)
    store.start()
    assert order(store) == []
    store.commit(1)
    assert order(store) == [(2, 1)]


def test_two_heads_are_refused_and_both_are_named(store: SimpleStore) -> None:
    store.commit(1)
    first = go_on(store, at=1, nonce="1a" * 16)
    directory = os.path.join(store.run_dir, layout.ATTEMPTS, first.label)
    shutil.move(directory, directory + ".away")
    os.unlink(layout.claim_path(store.run_dir, first.seq))  # by versions that claim nothing, or on disks of two nodes
    store.attempt = AttemptRef(seq=1, nonce=first.nonce)
    second = store.start(seq=2, nonce="2b" * 16)
    shutil.move(directory + ".away", directory)
    with pytest.raises(TwoHeads) as caught:
        order(store)
    assert caught.value.exit_code == 21
    assert first.label in str(caught.value)
    assert second.label in str(caught.value)


def test_an_attempt_that_finds_a_rival_with_its_number_stops_at_once(store: SimpleStore) -> None:
    with pytest.raises(TwoHeads, match="000001-"):
        store.start(seq=1, nonce="2b" * 16)


def test_two_old_attempts_with_one_number_do_not_matter_below_a_newer_head(store: SimpleStore) -> None:
    store.commit(1)
    with pytest.raises(TwoHeads):
        store.start(seq=1, nonce="2b" * 16)
    store.commit(7)
    store.start(seq=2, parent=Parent(attempt=store.attempt, step=7))
    assert order(store) == [(1, 7)]


def test_a_torn_attempt_record_is_ignored_but_its_number_is_not_used_again(store: SimpleStore) -> None:
    store.commit(1)
    torn = go_on(store, at=1)
    path = Path(layout.attempt_dir(store.run_dir, torn), layout.ATTEMPT)
    path.write_bytes(path.read_bytes()[:50])
    catalog = read_catalog(store.fs, store.run_dir)
    assert [ref.seq for ref, _ in catalog.attempts] == [1]
    assert catalog.next_seq == 3
    assert [problem.path for problem in catalog.problems] == [os.path.join("attempts", torn.label, "attempt.json")]
    assert order(store) == [(1, 1)]


def test_an_attempt_directory_left_empty_by_a_cut_uses_up_its_number(store: SimpleStore) -> None:
    os.mkdir(os.path.join(store.run_dir, layout.ATTEMPTS, "000007-01234567"))
    assert read_catalog(store.fs, store.run_dir).next_seq == 8


def test_an_attempt_whose_records_are_gone_is_known_from_its_seals(store: SimpleStore) -> None:
    store.commit(1)
    go_on(store, at=1)
    store.commit(2)
    shutil.rmtree(layout.attempt_dir(store.run_dir, store.attempt))
    assert order(store) == [(2, 2), (1, 1)]


def test_a_missing_attempt_record_alone_does_not_lose_its_roster(store: SimpleStore) -> None:
    seals = store.commit_parts(1)  # no manifest yet
    os.remove(os.path.join(layout.attempt_dir(store.run_dir, store.attempt), layout.ATTEMPT))
    assert len(seals) == 3
    assert order(store) == [(1, 1)]


def test_a_checkpoint_exists_without_manifest_and_meta(store: SimpleStore) -> None:
    store.commit_parts(1)
    assert order(store) == [(1, 1)]


def test_a_manifest_alone_makes_no_checkpoint(store: SimpleStore) -> None:
    store.finish(store.commit_parts(1, parts=("replicated", "rank-00000")))
    assert order(store) == []


@pytest.mark.parametrize("part", ["replicated", "rank-00000", "rank-00001"])
def test_a_checkpoint_without_one_of_its_parts_does_not_exist(store: SimpleStore, part: str) -> None:
    store.commit(1)
    store.commit_parts(2, parts=tuple(name for name in store.part_names if name != part))
    [second] = [c for c in read_catalog(store.fs, store.run_dir).checkpoints if c.step == 2]
    assert second.missing_parts == (part,)
    assert order(store) == [(1, 1)]


def test_any_holders_seal_suffices(store: SimpleStore) -> None:
    store.commit(1)
    [again] = store.commit_parts(1, parts=("rank-00000",))
    directory = Path(store.run_dir, store.dir_name(1))
    for path in directory.glob("rank-00000~*.safetensors"):
        if path.name != again.payload_name:
            flip_bit(str(path), 500)
    loaded = load_newest(store.fs, store.run_dir)
    assert loaded is not None
    assert store.is_true(loaded)
    assert len(loaded.rejected) <= 1


def test_times_pointers_and_temporary_files_decide_nothing(store: SimpleStore) -> None:
    store.commit(1, 2)
    first, second = (os.path.join(store.run_dir, store.dir_name(step)) for step in (1, 2))
    os.utime(first, (4e9, 4e9))
    os.utime(second, (1, 1))
    os.symlink(first, os.path.join(store.run_dir, "last"))
    Path(second, "replicated~node-0-00000000.seal.0a0a0a0a.tmp").write_bytes(b"half a sea")
    assert order(store) == [(1, 2), (1, 1)]


def test_a_loop_of_parents_ends_instead_of_hanging() -> None:
    a, b = AttemptRef(seq=1, nonce="a" * 32), AttemptRef(seq=2, nonce="b" * 32)
    chain = lineage([(a, Parent(attempt=b, step=9)), (b, Parent(attempt=a, step=5))])
    assert chain == ((b, None), (a, 5))


def test_no_attempts_have_no_lineage() -> None:
    assert lineage([]) == ()


def test_lineage_decides_what_retention_may_touch(store: SimpleStore) -> None:
    store.commit(1, 2)
    go_on(store, at=1)
    store.commit(2)
    catalog: Catalog = read_catalog(store.fs, store.run_dir)
    chain = lineage(catalog.attempts)
    assert {(c.attempt.seq, c.step): on_lineage(c, chain) for c in catalog.checkpoints} == {(1, 1): True, (1, 2): False, (2, 2): True}


def evidence(store: SimpleStore) -> str | None:
    return progress_evidence(store.fs, store.run_dir, read_catalog(store.fs, store.run_dir))


def test_a_run_that_never_made_progress_may_start_at_step_0(store: SimpleStore) -> None:
    assert evidence(store) is None
    store.commit_parts(1, parts=("replicated",))
    assert evidence(store) is None


def test_a_durable_step_in_the_journal_is_progress_although_no_checkpoint_is_left(store: SimpleStore) -> None:
    mine = Journal(PosixFileSystem(), SystemClock(), layout.journal_path(store.run_dir, "node-0"), role="t")
    mine.append("checkpoint.durable", step=12)
    assert "12" in (evidence(store) or "")


def test_a_damaged_checkpoint_is_progress(store: SimpleStore) -> None:
    [seal] = store.commit_parts(1, parts=("replicated",))
    os.truncate(os.path.join(store.run_dir, store.dir_name(1), seal.payload_name), 10)
    assert evidence(store) is not None


def test_an_attempt_that_had_resumed_is_progress(store: SimpleStore) -> None:
    store.commit(1)
    go_on(store, at=1)
    shutil.rmtree(os.path.join(store.run_dir, next(n for n in os.listdir(store.run_dir) if n.startswith("step-"))))
    assert evidence(store) is not None


def test_a_strange_file_in_the_journal_directory_is_no_obstacle(store: SimpleStore) -> None:
    os.mkdir(os.path.join(store.run_dir, layout.JOURNAL, "lost+found"))
    assert evidence(store) is None


def test_problems_carry_the_file_and_an_error_of_ours(store: SimpleStore) -> None:
    store.commit(1)
    for path in Path(store.run_dir, store.dir_name(1)).glob("*.seal"):
        flip_bit(str(path), 60)
    problems = read_catalog(store.fs, store.run_dir).problems
    assert len(problems) == 3
    assert all(isinstance(p.error, RideThroughError) and os.path.exists(os.path.join(store.run_dir, p.path)) for p in problems)

"""Retention never removes what is needed, and a deletion that is cut leaves whole checkpoints or none."""

from __future__ import annotations

import dataclasses
import datetime
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.errors import Fenced
from ridethrough.format import layout, record
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_catalog
from ridethrough.store.retain import Found, Retention, Verdict, delete_checkpoint, plan, survey
from ridethrough.store.start import require_newest
from ridethrough.testing import FakeClock, RecordingFileSystem, SimpleStore, flip_bit, load_newest, save_once
from ridethrough.types import Parent


def found(step: int, *, attempt_seq: int = 1, **changes: object) -> Found:
    fields = {"is_complete": True, "is_verified": True, "is_on_lineage": True, "metric": None, **changes}
    return Found(dir_name=f"{attempt_seq}/{step}", step=step, attempt_seq=attempt_seq, **fields)  # type: ignore[arg-type]


rows = st.builds(
    found,
    st.integers(0, 30),
    attempt_seq=st.integers(0, 3),
    is_complete=st.booleans(),
    is_verified=st.booleans(),
    is_on_lineage=st.booleans(),
    is_ours=st.sampled_from([True, True, True, False]),
    metric=st.none() | st.floats(-5, 5),
)
tiers = st.lists(rows, max_size=12, unique_by=lambda f: f.dir_name).map(tuple)
policies = st.builds(
    Retention, keep_last=st.integers(0, 5), keep_top=st.integers(0, 3), mode=st.sampled_from(["min", "max"]), keep_every=st.sampled_from([0, 0, 1, 4])
)
some_dir = st.none() | st.builds(lambda a, s: f"{a}/{s}", st.integers(1, 3), st.integers(0, 30))


def age(f: Found) -> tuple[int, int]:
    return (f.attempt_seq, f.step)


def decide(tier: tuple[Found, ...], policy: Retention, in_progress: str | None = None, resumed: str | None = None) -> dict[str, Verdict]:
    return {v.dir_name: v for v in plan(tier, policy, in_progress=in_progress, resumed_from=resumed)}


@settings(max_examples=500, deadline=None)
@given(tiers, policies, some_dir, some_dir)
def test_retention_never_removes_what_is_needed(tier: tuple[Found, ...], policy: Retention, in_progress: str | None, resumed: str | None) -> None:
    verdicts = decide(tier, policy, in_progress, resumed)
    assert set(verdicts) == {f.dir_name for f in tier}
    alive = [f for f in tier if f.is_on_lineage and f.is_complete]
    proven = sorted((f for f in alive if f.is_verified), key=age)
    for f in tier:
        verdict = verdicts[f.dir_name]
        assert verdict.reason
        if verdict.keep:
            continue
        assert f.dir_name not in (in_progress, resumed)
        assert f.is_ours
        assert proven, "nothing goes before something is proven"
        assert f is not proven[-1], "the newest verified never goes"
        if f.attempt_seq:
            assert age(f) < age(proven[-1]), "only what is older than a verified one goes"
        else:
            assert f.step <= proven[-1].step
    kept_alive = [f for f in alive if verdicts[f.dir_name].keep]
    newest = sorted(alive, key=age)[-max(policy.keep_last, 1) :]
    assert all(f in kept_alive for f in newest), "keep_last is honoured"


@settings(max_examples=200, deadline=None)
@given(tiers, policies)
def test_what_retention_keeps_is_bounded(tier: tuple[Found, ...], policy: Retention) -> None:
    ours = tuple(f for f in tier if f.is_ours)
    proven = [f for f in ours if f.is_on_lineage and f.is_complete and f.is_verified]
    if not proven:
        return
    anchor = max(proven, key=age)
    older = [f for f in ours if age(f) < age(anchor) and not (f.attempt_seq == 0 and f.step > anchor.step)]
    kept = [f for f in older if decide(ours, policy)[f.dir_name].keep]
    multiples = [f for f in older if policy.keep_every and f.step % policy.keep_every == 0]
    assert len(kept) <= max(policy.keep_last, 1) + policy.keep_top + len(multiples)


@settings(max_examples=200, deadline=None)
@given(tiers, policies)
def test_of_the_lineage_every_whole_checkpoint_whose_step_is_a_multiple_stays(tier: tuple[Found, ...], policy: Retention) -> None:
    verdicts = decide(tier, policy)
    without = decide(tier, dataclasses.replace(policy, keep_every=0))
    for f in tier:
        is_multiple = bool(policy.keep_every) and f.step % policy.keep_every == 0 and f.is_on_lineage and f.is_complete
        assert verdicts[f.dir_name].keep == (is_multiple or without[f.dir_name].keep)


@settings(max_examples=200, deadline=None)
@given(tiers, policies)
def test_retention_applied_twice_removes_nothing_more(tier: tuple[Found, ...], policy: Retention) -> None:
    left = tuple(f for f in tier if decide(tier, policy)[f.dir_name].keep)
    assert all(v.keep for v in decide(left, policy).values())


def removed(tier: list[Found], policy: Retention) -> list[int]:
    return [f.step for f in tier if not decide(tuple(tier), policy)[f.dir_name].keep]


def test_the_last_three_are_kept_by_default() -> None:
    assert removed([found(step) for step in range(1, 7)], Retention()) == [1, 2, 3]


@pytest.mark.parametrize(("mode", "kept_best"), [("min", 2), ("max", 5)])
def test_the_best_is_kept_too(mode: str, kept_best: int) -> None:
    losses = {1: 0.5, 2: 0.1, 3: 0.5, 4: 0.4, 5: 0.9, 6: 0.3}
    tier = [found(step, metric=loss) for step, loss in losses.items()]
    assert set(range(1, 6)) - set(removed(tier, Retention(keep_last=1, keep_top=1, mode=mode))) == {kept_best}


def test_unverified_newer_checkpoints_never_push_out_the_newest_verified() -> None:
    tier = [found(1), *(found(step, is_verified=False) for step in range(2, 9))]
    assert removed(tier, Retention(keep_last=2)) == []


def test_an_abandoned_branch_goes_once_its_successor_is_verified() -> None:
    tier = [found(1), found(5, is_on_lineage=False), found(2, attempt_seq=2)]
    assert removed(tier, Retention(keep_last=3)) == [5]


def test_leftovers_without_a_seal_go_once_a_newer_step_is_verified_and_not_before() -> None:
    leftover = found(5, attempt_seq=0, is_complete=False, is_verified=False, is_on_lineage=False)
    assert removed([found(4), leftover], Retention()) == []
    assert removed([found(6), leftover], Retention()) == [5]


def names_removed(store: SimpleStore) -> set[str]:
    verified = frozenset(c.save_id for c in read_catalog(store.fs, store.run_dir).checkpoints)
    rows = survey(read_catalog(store.fs, store.run_dir), verified=verified, monitor="loss")
    return {v.dir_name for v in plan(rows, Retention(keep_last=1), in_progress=None, resumed_from=None) if not v.keep}


def test_checkpoints_of_another_run_are_never_removed(store: SimpleStore, tmp_path: Path) -> None:
    import shutil

    other = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "other"), seed=5)
    other.start()
    other.commit(1)
    name = other.dir_name(1)
    shutil.copytree(os.path.join(other.run_dir, name), os.path.join(store.run_dir, name))
    store.commit(1, 2, 3)
    assert names_removed(store) == {store.dir_name(1), store.dir_name(2)}


def test_checkpoints_of_a_newer_version_are_never_removed(store: SimpleStore) -> None:
    import json

    store.commit(1, 2, 3)
    for path in Path(store.run_dir, store.dir_name(1)).glob("*.seal"):
        path.write_bytes(record.encode("seal", {**json.loads(path.read_bytes())["record"], "format": 99}))
    assert names_removed(store) == {store.dir_name(2)}


def test_a_newer_checkpoint_whose_seals_are_damaged_is_left_for_a_person(store: SimpleStore) -> None:
    store.commit(1, 2)
    for path in Path(store.run_dir, store.dir_name(2)).glob("*.seal"):
        flip_bit(str(path), 50)
    assert names_removed(store) == set()
    store.commit(3)
    assert names_removed(store) == {store.dir_name(1), store.dir_name(2)}


@pytest.mark.parametrize("metrics", [None, [], "x", {"loss": None}, {"loss": "low"}, {"loss": float("1e400")}, {"other": 1}])
def test_a_metric_that_is_no_number_is_no_rating(store: SimpleStore, metrics: object) -> None:
    import dataclasses

    store.commit(1)
    catalog = read_catalog(store.fs, store.run_dir)
    odd = dataclasses.replace(catalog, checkpoints=(dataclasses.replace(catalog.checkpoints[0], meta={"metrics": metrics}),))
    assert survey(odd, verified=frozenset(), monitor="loss")[0].metric is None


def test_a_deletion_goes_the_other_way_round_than_the_commit(store: SimpleStore) -> None:
    store.commit(1)
    directory = os.path.join(store.run_dir, store.dir_name(1))
    recorder = RecordingFileSystem(PosixFileSystem())
    delete_checkpoint(recorder, store.run_dir, store.dir_name(1))
    words = []
    for call, path in recorder.calls[1:]:
        kind = {directory: "checkpoint", store.run_dir: "run"}.get(path) or path.rsplit(".", 1)[1].replace("json", os.path.basename(path))
        words.append(f"{call} {kind}")
    assert words == [
        "remove manifest.json", "sync_dir checkpoint",
        "remove seal", "remove seal", "remove seal", "sync_dir checkpoint",
        "remove meta.json", "remove safetensors", "remove safetensors", "remove safetensors", "sync_dir checkpoint",
        "remove checkpoint", "sync_dir run",
    ]  # fmt: skip
    assert not os.path.exists(directory)


class PowerCut(Exception):
    """Nothing after this call happens."""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_cut_around_any_call_of_a_deletion_leaves_no_seal_without_its_payload(tmp_path: Path, moment: str) -> None:
    nth = 0
    while True:
        nth += 1
        store = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / f"run-{nth}"), world_size=1, part_bytes=300)
        store.start()
        store.commit(1, 2)
        left = nth

        def cut(call: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise PowerCut

        is_done = False
        try:
            delete_checkpoint(RecordingFileSystem(store.fs, **{moment: cut}), store.run_dir, store.dir_name(1))
            is_done = True
        except PowerCut:
            pass
        directory = Path(store.run_dir, store.dir_name(1))
        for seal in directory.glob("*.seal"):
            assert seal.with_suffix(".safetensors").exists(), nth
        steps = {c.step: c for c in read_catalog(store.fs, store.run_dir).checkpoints}
        assert not any(c.problems for c in steps.values()), nth
        loaded = load_newest(store.fs, store.run_dir)
        assert loaded is not None
        assert (loaded.step, store.is_true(loaded)) == (2, True)
        if directory.exists():
            delete_checkpoint(store.fs, store.run_dir, store.dir_name(1))
        assert not directory.exists()
        if is_done:
            break
    assert nth > 10


def test_saving_on_keeps_exactly_the_last_three(store: SimpleStore) -> None:
    for step in range(1, 8):
        assert save_once(store, step).is_verified
    assert sorted(n for n in os.listdir(store.run_dir) if n.startswith("step-")) == sorted(store.dir_name(step) for step in (5, 6, 7))


@pytest.mark.parametrize("jump_days", [-400, -1, 0, 4000])
def test_a_wall_clock_that_jumps_changes_nothing_of_what_is_kept_and_restored(store: SimpleStore, jump_days: int) -> None:
    """Backwards, as after a power cut with an empty clock battery, or forwards; the times of the files jump with it."""
    assert isinstance(store.clock, FakeClock)
    for step in range(1, 4):
        save_once(store, step)
    store.clock.set_wall(store.clock.now_at() + datetime.timedelta(days=jump_days))
    assert store.resume() == 3
    for step in range(4, 7):
        assert save_once(store, step).is_verified
        for name in os.listdir(os.path.join(store.run_dir, store.dir_name(step))):
            os.utime(os.path.join(store.run_dir, store.dir_name(step), name), (store.clock.now_at().timestamp(),) * 2)
    loaded = load_newest(store.fs, store.run_dir)
    assert loaded is not None
    assert (loaded.step, store.is_true(loaded)) == (6, True)
    kept = {name for name in os.listdir(store.run_dir) if name.startswith("step-")}
    assert {store.dir_name(step) for step in (4, 5, 6)} <= kept
    assert len(kept) == 4, "and the one that was resumed from"


def test_the_checkpoint_an_attempt_resumed_from_is_kept(store: SimpleStore) -> None:
    save_once(store, 1)
    origin = store.dir_name(1)
    assert store.resume() == 1
    for step in range(2, 8):
        save_once(store, step)
    assert origin in os.listdir(store.run_dir)


def test_a_frozen_attempt_that_wakes_up_is_fenced(store: SimpleStore) -> None:
    old = store.attempt
    require_newest(store.fs, store.run_dir, old)
    newer = store.start(parent=Parent(attempt=old, step=0))
    require_newest(store.fs, store.run_dir, newer)
    with pytest.raises(Fenced) as caught:
        require_newest(store.fs, store.run_dir, old)
    assert newer.label in str(caught.value)
    assert layout.ATTEMPTS in os.listdir(store.run_dir)


def test_on_a_disk_of_its_own_a_node_judges_a_checkpoint_by_the_ranks_that_it_had_then(tmp_path: Path) -> None:
    """Ranks stand on other nodes after a change of ranks for each node, or of a host."""
    tier = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "run"), world_size=2, node="a")
    tier.start()
    tier.commit(1)
    [checkpoint] = read_catalog(tier.fs, tier.run_dir).checkpoints
    roster = checkpoint.roster
    assert roster is not None
    for nodes, is_complete in ((("a", "b"), True), (("b", "a"), False)):
        mine = tuple(seal for seal in checkpoint.seals if seal.part in ("replicated", "rank-00000"))
        spread = dataclasses.replace(checkpoint, seals=mine, roster=dataclasses.replace(roster, nodes=nodes))
        catalog = dataclasses.replace(read_catalog(tier.fs, tier.run_dir), checkpoints=(spread,))
        [row] = survey(catalog, verified=frozenset({spread.save_id}), monitor=None, own_node="a")
        assert row.is_complete is is_complete

"""Verification proves the bytes on the medium; what is wrong moves aside, seal first, within a bound."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest

from ridethrough.errors import Damaged
from ridethrough.format import layout, part
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store import quarantine
from ridethrough.store.catalog import read_catalog
from ridethrough.store.verify import check_part, intact_parts, load_part, verify_checkpoint
from ridethrough.testing import LoopDisk, RecordingFileSystem, SimpleStore, flip_bit, load_newest, save_once

CHUNK = 64 << 10


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of 200 KB then have four chunks, as those of 60 MB have in earnest."""
    monkeypatch.setattr(part, "CHUNK_BYTES", CHUNK)


def one_part(store: SimpleStore) -> tuple[Seal, str]:
    store.part_bytes = 200_000
    [seal] = store.commit_parts(1, parts=("replicated",))
    return seal, os.path.join(store.run_dir, store.dir_name(1), seal.payload_name)


PLACES = [0, 7, 8, 100, CHUNK - 1, CHUNK, CHUNK + 4095, 2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK - 1, 3 * CHUNK, -2, -1]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("past_cache", [True, False])
def test_a_flipped_bit_at_the_head_middle_or_tail_of_any_chunk_is_found_and_placed(store: SimpleStore, past_cache: bool) -> None:
    seal, path = one_part(store)
    assert len(seal.chunks) == 4
    for place in PLACES:
        flip_bit(path, place, 5)
        with pytest.raises(Damaged) as caught:
            check_part(store.fs, store.run_dir, store.dir_name(1), seal, past_cache=past_cache)
        begin = place % seal.payload_bytes // CHUNK * CHUNK
        assert f"bytes {begin} to " in str(caught.value), place
        with pytest.raises(Damaged):
            load_part(store.fs, store.run_dir, store.dir_name(1), seal, past_cache=past_cache)
        flip_bit(path, place, 5)
    assert load_part(store.fs, store.run_dir, store.dir_name(1), seal, past_cache=past_cache) == store.truth(1, "replicated")


@pytest.mark.usefixtures("small_chunks")
def test_a_payload_cut_at_any_chunk_border_is_found(store: SimpleStore) -> None:
    seal, path = one_part(store)
    for length in (3 * CHUNK, 2 * CHUNK + 1, CHUNK - 1, 1, 0):
        os.truncate(path, length)
        with pytest.raises(Damaged, match="cut short"):
            check_part(store.fs, store.run_dir, store.dir_name(1), seal)


def test_a_missing_payload_is_damaged(store: SimpleStore) -> None:
    seal, path = one_part(store)
    os.remove(path)
    with pytest.raises(Damaged, match="missing"):
        check_part(store.fs, store.run_dir, store.dir_name(1), seal)


def test_progress_adds_up_to_the_payload(store: SimpleStore) -> None:
    seal, _ = one_part(store)
    seen: list[int] = []
    check_part(store.fs, store.run_dir, store.dir_name(1), seal, progress=seen.append)
    assert sum(seen) == seal.payload_bytes


def test_a_payload_whose_tensors_are_not_those_of_its_seal_is_damaged(store: SimpleStore) -> None:
    seal, _ = one_part(store)
    other = dataclasses.replace(seal, tensors=seal.tensors[1:])
    with pytest.raises(Damaged, match="tensors"):
        load_part(store.fs, store.run_dir, store.dir_name(1), other)


def test_the_outline_of_a_seal_proves_nothing(store: SimpleStore) -> None:
    seal, _ = one_part(store)
    with pytest.raises(ValueError, match="0 checksums do not cover"):
        check_part(store.fs, store.run_dir, store.dir_name(1), dataclasses.replace(seal, chunks=()))


def test_every_copy_is_verified_and_one_intact_copy_is_enough(store: SimpleStore) -> None:
    store.commit(1)
    [again] = store.commit_parts(1, parts=("rank-00000",))
    flip_bit(os.path.join(store.run_dir, store.dir_name(1), again.payload_name), 300)
    [checkpoint] = read_catalog(store.fs, store.run_dir).checkpoints
    results = verify_checkpoint(store.fs, store.run_dir, checkpoint)
    assert [r.error is None for r in results].count(False) == 1
    assert len(results) == 4
    assert intact_parts(results) == set(store.part_names)


@pytest.mark.root
@pytest.mark.usefixtures("small_chunks")
def test_damage_on_the_medium_is_found_although_the_page_cache_still_holds_the_right_bytes() -> None:
    with LoopDisk(32 << 20) as disk:
        store = SimpleStore(fs=PosixFileSystem(), run_dir=os.path.join(disk.path, "run"))
        store.start()
        seal, _ = one_part(store)
        truth = store.truth(1, "replicated")
        image = Path(disk.image).read_bytes()
        for place in (200, CHUNK + 9, 3 * CHUNK + 100):
            at = image.index(truth[place : place + 64])
            flip_bit(disk.image, at, 2)
            check_part(store.fs, store.run_dir, store.dir_name(1), seal, past_cache=False)
            with pytest.raises(Damaged):
                check_part(store.fs, store.run_dir, store.dir_name(1), seal, past_cache=True)
            flip_bit(disk.image, at, 2)
        check_part(store.fs, store.run_dir, store.dir_name(1), seal, past_cache=True)


def test_quarantine_moves_the_seal_durably_before_the_payload(store: SimpleStore) -> None:
    store.commit(1)
    [checkpoint] = read_catalog(store.fs, store.run_dir).checkpoints
    seal = checkpoint.seals[0]
    recorder = RecordingFileSystem(PosixFileSystem())
    target = quarantine.quarantine_part(recorder, store.run_dir, checkpoint.dir_name, seal, reason="a test")
    stem = seal.payload_name.removesuffix(".safetensors")
    source = os.path.join(store.run_dir, checkpoint.dir_name)
    calls = [c for c in recorder.calls if c[0] in ("rename", "sync_dir")]
    moves = calls[calls.index(("rename", os.path.join(target, f"{stem}.seal"))) :]
    assert moves[:6] == [
        ("rename", os.path.join(target, f"{stem}.seal")),
        ("sync_dir", target),
        ("sync_dir", source),
        ("rename", os.path.join(target, f"{stem}.safetensors")),
        ("sync_dir", target),
        ("sync_dir", source),
    ]
    assert (Path(target) / f"{stem}.reason.json").exists()
    assert [c.is_complete for c in read_catalog(store.fs, store.run_dir).checkpoints] == [False]


class PowerCut(Exception):
    """Nothing after this call happens."""


def test_a_cut_at_any_call_of_a_quarantine_never_leaves_a_seal_without_its_payload(tmp_path: Path) -> None:
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

        damaged = next(c for c in read_catalog(store.fs, store.run_dir).checkpoints if c.step == 2)
        with contextlib.suppress(PowerCut):
            quarantine.quarantine_part(RecordingFileSystem(store.fs, before=cut), store.run_dir, damaged.dir_name, damaged.seals[0], reason="a test")
        directory = Path(store.run_dir, damaged.dir_name)
        for seal in directory.glob("*.seal"):
            assert seal.with_suffix(".safetensors").exists(), nth
        loaded = load_newest(store.fs, store.run_dir)
        assert loaded is not None
        assert store.is_true(loaded)
        if left > 0:
            break
    assert nth > 8


def test_the_quarantine_is_bounded_and_keeps_the_newest_step(store: SimpleStore) -> None:
    store.part_bytes = 3000
    for step in (1, 2, 3, 1_000_000_000):
        [seal] = store.commit_parts(step, parts=("replicated",))
        quarantine.quarantine_part(store.fs, store.run_dir, store.dir_name(step), seal, reason="a test")
    kept = lambda: sorted(int(n.split("-")[1]) for n in os.listdir(os.path.join(store.run_dir, layout.QUARANTINE)))  # noqa: E731
    assert quarantine.bound(store.fs, store.run_dir, budget_bytes=1 << 30) == ()
    quarantine.bound(store.fs, store.run_dir, budget_bytes=10_000)
    assert kept() == [3, 1_000_000_000]
    quarantine.bound(store.fs, store.run_dir, budget_bytes=0)
    assert kept() == [1_000_000_000]


def test_no_quarantine_needs_no_bound(store: SimpleStore) -> None:
    assert quarantine.bound(store.fs, store.run_dir, budget_bytes=0) == ()


def test_a_save_that_reads_back_wrong_goes_to_quarantine_and_the_one_before_stays(store: SimpleStore) -> None:
    save_once(store, 1)

    def damage(stage: str) -> None:
        if stage == "verify":
            [path] = Path(store.run_dir, store.dir_name(2)).glob("rank-00001~*.safetensors")
            flip_bit(str(path), 400)

    saved = save_once(store, 2, on_stage=damage)
    assert not saved.is_verified
    assert len(saved.quarantined) == 1
    loaded = load_newest(store.fs, store.run_dir)
    assert loaded is not None
    assert (loaded.step, store.is_true(loaded)) == (1, True)
    assert save_once(store, 3).is_verified

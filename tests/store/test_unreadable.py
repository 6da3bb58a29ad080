"""What cannot be read now is never called damaged, never quarantined, and is waited for within a bound."""

from __future__ import annotations

import errno
import os

import pytest

from ridethrough.errors import Damaged, StorageUnreachable
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_catalog, read_patiently
from ridethrough.store.verify import check_part, is_surely_damaged, verify_checkpoint
from ridethrough.testing import ErrorOn, FakeClock, FlipBit, RecordingFileSystem, ShortRead, SimpleStore, flip_bit, load_newest

UNREACHABLE = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENODEV, errno.EREMOTEIO]


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_an_error_at_any_read_of_a_load_is_unreachable_and_nothing_is_decided(store: SimpleStore, error: int) -> None:
    store.commit(1, 2)
    recorder = RecordingFileSystem(PosixFileSystem())
    load_newest(recorder, store.run_dir)
    for nth in range(1, len(recorder.calls) + 1):
        fault = ErrorOn(PosixFileSystem(), "*", error, nth=nth)
        with pytest.raises(StorageUnreachable) as caught:
            load_newest(fault, store.run_dir)
        assert caught.value.exit_code == 13, fault.failed
        assert caught.value.retryable
        assert not isinstance(caught.value, Damaged)
    assert layout.QUARANTINE not in os.listdir(store.run_dir)


@pytest.mark.parametrize("error", UNREACHABLE, ids=errno.errorcode.get)
def test_every_errno_of_a_lost_server_or_disk_means_unreachable(store: SimpleStore, error: int) -> None:
    store.commit(1)
    with pytest.raises(StorageUnreachable):
        read_catalog(ErrorOn(PosixFileSystem(), "read", error, within=".seal"), store.run_dir)


@pytest.mark.parametrize("within", [".safetensors", ".seal", "roster.json", "attempt.json", "run.json"])
def test_a_short_read_of_a_whole_file_is_unreachable_not_damaged(store: SimpleStore, within: str) -> None:
    store.commit(1)
    with pytest.raises(StorageUnreachable, match="short read"):
        load_newest(ShortRead(PosixFileSystem(), within=within), store.run_dir)


def test_one_short_read_passes_when_asked_again(store: SimpleStore) -> None:
    store.commit(1)
    fs = ShortRead(PosixFileSystem(), within=".seal", times=1)
    catalog = read_patiently(fs, FakeClock(), store.run_dir, storage_wait_s=10)
    assert catalog.checkpoints[0].is_complete


def test_an_unreadable_payload_is_not_a_verdict(store: SimpleStore) -> None:
    store.commit(1)
    [checkpoint] = read_catalog(store.fs, store.run_dir).checkpoints
    with pytest.raises(StorageUnreachable):
        verify_checkpoint(ErrorOn(PosixFileSystem(), "read_into", errno.EIO), store.run_dir, checkpoint)
    with pytest.raises(StorageUnreachable):
        is_surely_damaged(ErrorOn(PosixFileSystem(), "read_into", errno.EIO), store.run_dir, checkpoint.dir_name, checkpoint.seals[0])


def test_damage_followed_by_an_unreadable_second_look_is_not_sure(store: SimpleStore) -> None:
    [seal] = store.commit_parts(1, parts=("replicated",))
    flip_bit(os.path.join(store.run_dir, store.dir_name(1), seal.payload_name), 100)
    with pytest.raises(StorageUnreachable):
        is_surely_damaged(ErrorOn(PosixFileSystem(), "read_into", errno.EIO, nth=2), store.run_dir, store.dir_name(1), seal)


def test_the_same_wrong_bytes_twice_are_surely_damaged(store: SimpleStore) -> None:
    [seal] = store.commit_parts(1, parts=("replicated",))
    fs = FlipBit(PosixFileSystem(), within=".safetensors", at_byte=100)
    assert is_surely_damaged(fs, store.run_dir, store.dir_name(1), seal)


def test_different_wrong_bytes_on_each_read_are_the_fault_of_the_path_not_of_the_medium(store: SimpleStore) -> None:
    [seal] = store.commit_parts(1, parts=("replicated",))
    fs = FlipBit(PosixFileSystem(), within=".safetensors", at_byte=100, is_moving=True)
    with pytest.raises(Damaged):
        check_part(fs, store.run_dir, store.dir_name(1), seal)
    assert not is_surely_damaged(fs, store.run_dir, store.dir_name(1), seal)


def test_one_wrong_read_out_of_two_is_not_damage(store: SimpleStore) -> None:
    class FlipOnce(FlipBit):
        def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
            got = super().read_into(path, buffer, offset=offset, past_cache=past_cache)
            self._within = "\0"
            return got

    [seal] = store.commit_parts(1, parts=("replicated",))
    assert not is_surely_damaged(FlipOnce(PosixFileSystem(), within=".safetensors", at_byte=100), store.run_dir, store.dir_name(1), seal)


def test_storage_that_comes_back_is_waited_for(store: SimpleStore) -> None:
    store.commit(1)
    clock = FakeClock()

    def away(call: str, path: str) -> None:
        if clock.monotonic_s() < began_s + 7:
            raise StorageUnreachable(detail="ESTALE on read", path=path)

    began_s = clock.monotonic_s()
    catalog = read_patiently(RecordingFileSystem(PosixFileSystem(), before=away), clock, store.run_dir, storage_wait_s=60)
    assert catalog.checkpoints[0].step == 1
    assert 7 <= clock.monotonic_s() - began_s < 20


@pytest.mark.parametrize("wait_s", [0, 1, 30, 300])
def test_storage_that_stays_away_is_given_up_within_the_bound(store: SimpleStore, wait_s: float) -> None:
    clock = FakeClock()
    began_s = clock.monotonic_s()
    fs = ErrorOn(PosixFileSystem(), "*", errno.ESTALE, is_lasting=True)
    with pytest.raises(StorageUnreachable) as caught:
        read_patiently(fs, clock, store.run_dir, storage_wait_s=wait_s)
    assert caught.value.exit_code == 13
    assert clock.monotonic_s() - began_s <= wait_s
    assert clock.sleeps_s == sorted(clock.sleeps_s)
    assert max(clock.sleeps_s, default=0) <= 10


def test_damage_is_not_waited_for(store: SimpleStore) -> None:
    store.commit(1)
    clock = FakeClock()
    for name in os.listdir(os.path.join(store.run_dir, store.dir_name(1))):
        flip_bit(os.path.join(store.run_dir, store.dir_name(1), name), 30)
    read_patiently(store.fs, clock, store.run_dir, storage_wait_s=60)
    assert clock.sleeps_s == []

"""The run's key survives power cuts and is never open to others, not even for an instant."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from ridethrough.errors import StorageError, UsageError
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.key import ensure_key, keep_key, kept_key, new_key
from ridethrough.testing import RecordingFileSystem


class PowerCut(Exception):
    """Nothing after this call happens."""


def test_a_kept_key_is_read_back(tmp_path: Path) -> None:
    key = new_key()
    keep_key(PosixFileSystem(), str(tmp_path), key)
    assert kept_key(PosixFileSystem(), str(tmp_path)) == key


def test_no_key_is_none(tmp_path: Path) -> None:
    assert kept_key(PosixFileSystem(), str(tmp_path)) is None


def test_keys_differ() -> None:
    assert len({new_key() for _ in range(50)}) == 50


def test_keeping_the_same_key_again_writes_nothing(tmp_path: Path) -> None:
    key = new_key()
    keep_key(PosixFileSystem(), str(tmp_path), key)
    recorder = RecordingFileSystem(PosixFileSystem())
    keep_key(recorder, str(tmp_path), key)
    assert recorder.changes() == []


def test_a_cut_at_any_call_leaves_the_old_key_none_or_the_new_one_and_no_file_that_others_can_open(tmp_path: Path) -> None:
    old, new = "1a" * 32, "2b" * 32
    for before in (None, old):
        nth, is_over = 0, False
        while not is_over:
            nth += 1
            path = tmp_path / f"{before}-{nth}"
            path.mkdir()
            if before:
                keep_key(PosixFileSystem(), str(path), before)
            left = [nth]

            def cut(call: str, name: str, left: list[int] = left, path: Path = path) -> None:
                assert {os.stat(found).st_mode & 0o077 for found in path.iterdir()} <= {0}
                left[0] -= 1
                if left[0] == 0:
                    raise PowerCut

            with contextlib.suppress(PowerCut):
                keep_key(RecordingFileSystem(PosixFileSystem(), before=cut), str(path), new)
            assert kept_key(PosixFileSystem(), str(path)) in (before, new)
            is_over = left[0] > 0
        assert nth > 3


def test_the_name_is_durable_before_the_key_is_used(tmp_path: Path) -> None:
    recorder = RecordingFileSystem(PosixFileSystem())
    keep_key(recorder, str(tmp_path), new_key())
    assert [call for call, _ in recorder.changes()][-3:] == ["append", "rename", "sync_dir"]


def test_node_that_loses_the_race_takes_the_key_of_the_other_whatever_the_file_system_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = new_key()

    def link(source: str, target: str) -> None:
        keep_key(PosixFileSystem(), str(tmp_path), theirs)
        raise PermissionError(errno.EPERM, "what sshfs says", target)

    monkeypatch.setattr(os, "link", link)
    assert ensure_key(PosixFileSystem(), str(tmp_path)) == theirs


@pytest.mark.parametrize(("number", "expected"), [(errno.EPERM, UsageError), (errno.EOPNOTSUPP, UsageError), (errno.EIO, StorageError)])
def test_where_no_key_can_be_made_it_is_said_and_storage_that_may_recover_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number), target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(expected):
        ensure_key(PosixFileSystem(), str(tmp_path))
    assert list(tmp_path.iterdir()) == []

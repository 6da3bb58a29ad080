"""A save that fails in its middle gives its space back."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ridethrough.errors import StorageError
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing import ErrorOn, SimpleStore, load_newest


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_refused_save_leaves_no_part_of_it_behind(tmp_path: Path, nth: int) -> None:
    store = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "run"))
    store.start()
    store.commit(1)
    store.fs = ErrorOn(PosixFileSystem(), "create", errno.ENOSPC, nth=nth)
    saves = [store.part_save(2, name) for name in store.part_names]
    with pytest.raises(StorageError):
        store.writer(lambda kind, **_: None).commit(saves)
    left = [path.name for path in (tmp_path / "run" / store.dir_name(2)).glob("*")]
    assert left == []
    loaded = load_newest(PosixFileSystem(), store.run_dir)
    assert loaded is not None
    assert loaded.step == 1

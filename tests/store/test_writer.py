"""A save that fails in its middle gives its space back."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ridethrough.errors import StorageError
from ridethrough.format import layout
from ridethrough.journal import Journal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.testing import ErrorOn, FakeClock, SimpleStore, load_newest


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


def test_only_the_nodes_own_journal_is_asked_what_was_verified(tmp_path: Path) -> None:
    """A thousand nodes that each read a thousand journals before their first save would not get to it."""
    store = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "run"))
    store.start()
    for node in (store.node, "another"):
        path = layout.journal_path(store.run_dir, node)
        Journal(store.fs, FakeClock(), path, role="persister").append("checkpoint.verified", save_id=f"of {node}")
    writer = store.writer(lambda kind, **_: None)
    writer.learn_verified()
    assert writer.verified == {f"of {store.node}"}

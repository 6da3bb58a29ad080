"""A power cut at any call of a journal: what was on record stays on record, and what comes after is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ridethrough import journal
from ridethrough.errors import StorageError
from ridethrough.journal import Journal
from ridethrough.seam.fs import FileSystem
from ridethrough.testing import CrashFS, DropDirSyncs, ErrorOn, FakeClock, State, Timeline

RUN, PATH = "/disk/run", "/disk/run/journal/node-0.jsonl"
SIZES = (10, 5000, 10, 18000, 300)
"""Of the text in an event: within a page, and over several."""
Wrap = Callable[[FileSystem], FileSystem]


def with_run(fs: FileSystem) -> None:
    """A run that lost its journal directory: the next event makes it."""
    fs.make_dir(RUN)
    fs.sync_dir("/disk")
    marker = fs.create(f"{RUN}/run.json", 0)
    marker.write(b"{}")
    marker.sync()
    marker.close()
    fs.sync_dir(RUN)


def story(disk: CrashFS, wrap: Wrap) -> dict[str, str]:
    """Two processes write in turn, and say what is on record; returns every text there was, by its name."""
    fs, texts = wrap(disk), {}
    writers = [Journal(fs, FakeClock(), PATH, role=role) for role in ("persister", "supervisor")]
    for number, size in enumerate(SIZES):
        name = f"event-{number}"
        texts[name] = name[-1] * size
        try:
            writers[number % 2].append("told", name=name, text=texts[name])
        except StorageError:
            continue
        disk.mark(name)
    return texts


def harm(state: State, texts: dict[str, str]) -> str | None:
    """What is wrong after this cut; None if nothing is."""
    found = journal.read(state.fs, [PATH]).of("told")
    names = [event.data["name"] for event in found]
    if any(event.data["text"] != texts[event.data["name"]] for event in found):
        return "an event that nobody wrote"
    if names != sorted(set(names)):
        return f"out of order or twice: {names}"
    if not set(state.marks) <= set(names):
        return f"on record were {state.marks}, there are {names}"
    disk = state.fs
    Journal(disk, FakeClock(), PATH, role="next").append("told", name="later", text="x")
    again = [event.data["name"] for event in journal.read(disk, [PATH]).of("told")]
    return None if again == [*names, "later"] else f"after a later event {names} became {again}"


class Forgetful(CrashFS):
    """No record is synced."""

    def sync_file(self, inode: int, path: str) -> None:
        return


def first_harm(wrap: Wrap, *, profile: Any = "posix", page_bytes: int = 4096, disk_of: type[CrashFS] = CrashFS) -> tuple[str | None, int]:
    disk = disk_of(profile=profile, page_bytes=page_bytes, timeline=Timeline(seed=1))
    with_run(disk)
    begun = len(disk.timeline.calls)
    texts = story(disk, wrap)
    count = 0
    for state in disk.states(limit=1 << 12):
        if state.call_count < begun:
            continue
        count += 1
        wrong = harm(state, texts)
        if wrong is not None:
            return f"{wrong} ({state})", count
    return None, count


@pytest.mark.parametrize("profile", ["posix", "journal"])
@pytest.mark.parametrize("page_bytes", [4096, 512])
def test_no_cut_takes_back_what_was_on_record_or_damages_what_comes_after(profile: Any, page_bytes: int) -> None:
    wrong, count = first_harm(lambda fs: fs, profile=profile, page_bytes=page_bytes)
    assert wrong is None
    assert count > 40


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("is_late", [False, True])
def test_a_record_that_was_refused_takes_no_other_one_with_it(nth: int, is_late: bool) -> None:
    wrong, _ = first_harm(lambda fs: ErrorOn(fs, "append", 5, nth=nth, is_late=is_late))
    assert wrong is None


@pytest.mark.parametrize(
    ("wrap", "disk_of"), [(lambda fs: fs, Forgetful), (DropDirSyncs, CrashFS)], ids=["no sync of the record", "no sync of a directory"]
)
def test_a_journal_that_lacks_it_is_found_out(wrap: Wrap, disk_of: type[CrashFS]) -> None:
    wrong, _ = first_harm(wrap, disk_of=disk_of)
    assert wrong is not None
    assert "on record were" in wrong

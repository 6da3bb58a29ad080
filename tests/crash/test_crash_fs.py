"""`CrashFS` keeps the promise of a file system while power is there, and leaves exactly what is legal when it goes."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.errors import StorageError, StoreFull
from ridethrough.seam.fs import FileSystem, PosixFileSystem, Writer
from ridethrough.testing import CrashFS, State, Timeline

PAGE = 4096


def write(fs: FileSystem, path: str, data: bytes, *, reserve: bool = False) -> Writer:
    writer = fs.create(path, len(data) if reserve else 0)
    writer.write(data)
    return writer


def contents(fs: FileSystem, path: str = "/disk") -> dict[str, bytes | None]:
    """Every name below a directory; None for a directory."""
    found: dict[str, bytes | None] = {}
    for name in fs.list_dir(path):
        full = f"{path}/{name}"
        if fs.stat(full).is_dir:
            found[full.removeprefix("/disk/")] = None
            found.update(contents(fs, full))
        else:
            found[full.removeprefix("/disk/")] = fs.read(full, max_bytes=1 << 30)
    return found


def last_states(fs: CrashFS) -> list[dict[str, bytes | None]]:
    """What a cut after the last call may leave."""
    return [contents(state.fs) for state in fs.states(only={len(fs.timeline.calls)})]


# -- while power is there ------------------------------------------------------------------------------------------------


NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/a", "a/x", "missing/x", "d/../b", "d/./a", "a" * 256])
STEPS = st.one_of(
    st.tuples(st.just("create"), NAMES, st.sampled_from([0, 10, 5000])),
    st.tuples(st.just("append"), NAMES, st.binary(max_size=9)),
    st.tuples(st.just("make_dir"), NAMES),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.sampled_from(["remove", "sync_dir", "list_dir", "stat", "read", "read_into"]), NAMES),
)


def answer(fs: FileSystem, root: str, step: tuple[Any, ...]) -> object:
    """What a caller sees of one call: its result, or the kind of its error."""
    call, name, *rest = step
    path = f"{root}/{name}"
    try:
        if call == "create":
            writer = fs.create(path, rest[0])
            for data in (b"x" * 5, b"", b"y" * 4100):
                writer.write(memoryview(data))
            writer.sync()
            writer.close()
            writer.close()
            return "made"
        if call == "rename":
            return fs.rename(path, f"{root}/{rest[0]}")
        if call == "append":
            return fs.append(path, rest[0])
        if call == "stat":
            found = fs.stat(path)
            return found.is_dir, None if found.is_dir else found.size_bytes
        if call == "read":
            return fs.read(path, max_bytes=4200)
        if call == "read_into":
            buffer = bytearray(7)
            return fs.read_into(path, memoryview(buffer), offset=3), bytes(buffer)
        return getattr(fs, call)(path)
    except (StorageError, OSError) as error:
        # The text behind the errno names the call of the operating system, which there is none of here.
        return type(error).__name__, str(error.fields["detail"]).split()[0] if isinstance(error, StorageError) and error.__cause__ else ""


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=14))
def test_every_call_answers_as_the_real_file_system_does(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as real_root:
        fs = CrashFS(root="/disk")
        for step in [("make_dir", "d"), ("append", "d/a", b"12345"), *steps]:
            assert answer(fs, "/disk", step) == answer(PosixFileSystem(), real_root, step), step


def test_a_full_disk_refuses_a_reservation_and_leaves_no_file() -> None:
    fs = CrashFS(capacity_bytes=10_000)
    write(fs, "/disk/a", b"a" * 6000, reserve=True).close()
    with pytest.raises(StoreFull):
        fs.create("/disk/b", 6000)
    assert fs.list_dir("/disk") == ["a"]
    fs.remove("/disk/a")
    assert fs.usage("/disk").free_bytes == 10_000
    fs.create("/disk/b", 6000).close()


def test_a_write_beyond_the_disk_is_refused_and_what_fits_stays() -> None:
    fs = CrashFS(capacity_bytes=100)
    writer = fs.create("/disk/a", 0)
    with pytest.raises(StoreFull):
        writer.write(b"a" * 150)
    assert fs.stat("/disk/a").size_bytes == 100


def test_a_closed_writer_writes_no_more() -> None:
    fs = CrashFS()
    writer = write(fs, "/disk/a", b"a")
    writer.close()
    with pytest.raises(StorageError, match="EBADF"):
        writer.write(b"b")
    with pytest.raises(StorageError, match="EBADF"):
        writer.sync()


# -- when it goes ----------------------------------------------------------------------------------------------------------


def test_a_synced_file_without_a_synced_directory_may_lose_its_name_and_nothing_else() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"data").sync()
    assert sorted(last_states(fs), key=len) == [{}, {"a": b"data"}]


def test_a_synced_directory_keeps_names_and_no_data() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"data")
    fs.sync_dir("/disk")
    assert sorted(map(str, last_states(fs))) == sorted(map(str, [{"a": b""}, {"a": b"\0\0\0\0"}, {"a": b"data"}]))


def test_data_without_its_size_is_a_short_file_and_size_without_data_is_zeros() -> None:
    fs = CrashFS()
    data = b"a" * PAGE + b"b" * PAGE
    writer = write(fs, "/disk/a", data[:PAGE])
    writer.sync()
    fs.sync_dir("/disk")
    writer.write(data[PAGE:])
    found = {state["a"] for state in last_states(fs)}
    assert found == {data[:PAGE], data[:PAGE] + bytes(PAGE), data}


def test_each_page_of_a_write_lands_by_itself() -> None:
    fs = CrashFS(page_bytes=512)
    writer = fs.create("/disk/a", 1536)
    writer.sync()
    fs.sync_dir("/disk")
    writer.write(b"a" * 1536)
    found = {state["a"] for state in last_states(fs)}
    assert found == {b"".join(pages) for pages in itertools.product((b"a" * 512, bytes(512)), repeat=3)}


def test_a_rename_lands_whole_or_not_at_all_and_may_overtake_the_data() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"old").sync()
    fs.sync_dir("/disk")
    write(fs, "/disk/t", b"new")
    fs.rename("/disk/t", "/disk/a")
    found = {(state["a"], state.get("t")) for state in last_states(fs)}
    assert {a for a, _ in found} == {b"old", b"", b"\0\0\0", b"new"}
    assert all(t is None or a == b"old" for a, t in found)


def test_a_rename_across_directories_is_durable_when_both_are_synced_and_never_leaves_neither_name() -> None:
    def moved(*synced: str) -> set[tuple[str, ...]]:
        fs = CrashFS()
        for name in ("d", "e"):
            fs.make_dir(f"/disk/{name}")
        write(fs, "/disk/d/a", b"data").sync()
        for name in ("", "/d", "/e"):
            fs.sync_dir(f"/disk{name}")
        fs.rename("/disk/d/a", "/disk/e/a")
        for name in synced:
            fs.sync_dir(f"/disk/{name}")
        return {tuple(name for name in state if "/" in name) for state in last_states(fs)}

    old, new, both = ("d/a",), ("e/a",), ("d/a", "e/a")
    assert moved() == {old, new}
    assert moved("d") == {old, new}
    assert moved("e") == {new, both}
    assert moved("e", "d") == moved("d", "e", "d") == {new}


def test_a_directory_that_was_never_synced_takes_what_is_durable_inside_it_away() -> None:
    fs = CrashFS()
    fs.make_dir("/disk/d")
    write(fs, "/disk/d/a", b"data").sync()
    fs.sync_dir("/disk/d")
    assert sorted(last_states(fs), key=len) == [{}, {"d": None, "d/a": b"data"}]


def test_a_removal_may_come_back_until_its_directory_is_synced() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"data").sync()
    fs.sync_dir("/disk")
    fs.remove("/disk/a")
    assert sorted(last_states(fs), key=len) == [{}, {"a": b"data"}]
    fs.sync_dir("/disk")
    assert last_states(fs) == [{}]


def test_an_appended_line_is_whole_once_the_call_has_returned_and_may_be_torn_before() -> None:
    fs = CrashFS()
    fs.append("/disk/j", b"one\n")
    assert last_states(fs) == [{"j": b"one\n"}]
    fs.append("/disk/j", b"two\n")
    assert last_states(fs) == [{"j": b"one\ntwo\n"}]
    during = {contents(state.fs).get("j") for state in fs.states()}
    assert during == {None, b"", bytes(4), b"one\n", b"one\n" + bytes(4), b"one\ntwo\n"}


def test_in_the_journal_profile_names_keep_their_order_and_a_synced_file_keeps_its_name() -> None:
    fs = CrashFS(profile="journal")
    for name in "abc":
        fs.make_dir(f"/disk/{name}")
    assert [sorted(state) for state in last_states(fs)] == [[], ["a"], ["a", "b"], ["a", "b", "c"]]
    write(fs, "/disk/f", b"data").sync()
    fs.make_dir("/disk/g")
    assert [sorted(state) for state in last_states(fs)] == [["a", "b", "c", "f"], ["a", "b", "c", "f", "g"]]


@pytest.mark.parametrize("profile", ["posix", "journal"])
def test_every_sampled_state_is_one_of_all_legal_ones(profile: Any) -> None:
    def story(fs: CrashFS) -> None:
        fs.make_dir("/disk/d")
        writer = write(fs, "/disk/d/a", b"a" * 2 * PAGE, reserve=True)
        fs.rename("/disk/d/a", "/disk/a")
        writer.sync()
        write(fs, "/disk/d/b", b"b" * PAGE)

    every, some = CrashFS(profile=profile), CrashFS(profile=profile)
    story(every)
    story(some)
    all_keys = {state.key for state in every.states(limit=1 << 12)}
    sampled = {state.key for state in some.states(limit=1)}
    assert sampled < all_keys


def test_what_was_said_before_a_cut_is_known_in_its_states() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"data").sync()
    fs.sync_dir("/disk")
    fs.mark("durable")
    assert [contents(state.fs) for state in fs.states() if "durable" in state.marks] == [{"a": b"data"}]


def test_a_state_is_a_disk_of_its_own_that_can_be_cut_again() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"data").sync()
    [without, *_] = (state for state in fs.states(only={len(fs.timeline.calls)}) if not contents(state.fs))
    again = without.fs
    write(again, "/disk/b", b"more").sync()
    assert sorted(last_states(again), key=len) == [{}, {"b": b"more"}]
    assert contents(without.fs) == {}
    assert contents(fs) == {"a": b"data"}


def test_equal_states_are_visited_once_for_the_same_words() -> None:
    fs = CrashFS()
    for name in "abc":
        write(fs, f"/disk/{name}", b"")
        fs.remove(f"/disk/{name}")
    states = list(fs.states())
    assert len({state.key for state in states}) == len(states)


def test_of_two_disks_the_one_that_keeps_power_is_as_its_users_see_it() -> None:
    timeline = Timeline()
    disks = {name: CrashFS(name=name, timeline=timeline) for name in ("one", "two")}
    for disk in disks.values():
        write(disk, "/disk/a", b"data").sync()

    def found(*hit: str) -> set[tuple[int, int]]:
        states = timeline.states(hit=hit, only={len(timeline.calls)})
        return {(len(contents(state.disks()["one"])), len(contents(state.disks()["two"]))) for state in states}

    assert found("one") == {(0, 1), (1, 1)}
    assert found("two") == {(1, 0), (1, 1)}
    assert found("one", "two") == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_flipped_bit_stays_on_the_medium() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"data").sync()
    fs.sync_dir("/disk")
    fs.flip_bit("/disk/a", -1)
    assert last_states(fs) == [{"a": b"dat`"}]


def test_a_state_tells_its_story_in_words() -> None:
    fs = CrashFS()
    write(fs, "/disk/a", b"data")
    lost: Callable[[State], bool] = lambda state: not state.landed["disk"]  # noqa: E731
    text = next(state for state in fs.states(only={len(fs.timeline.calls)}) if lost(state)).describe()
    assert "disk create /disk/a" in text
    assert "power cut of disk after call 2" in text
    assert "lost   disk page 0 of write /disk/a" in text


def test_the_real_file_system_is_not_touched(tmp_path: Path) -> None:
    fs = CrashFS(root=str(tmp_path))
    write(fs, f"{tmp_path}/a", b"data").sync()
    assert os.listdir(tmp_path) == []

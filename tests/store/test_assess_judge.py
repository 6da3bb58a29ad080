"""What findings mean: the verdict of a place, without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.config import StorageFacts
from ridethrough.errors import Internal, StorageUnreachable, StoreFull
from ridethrough.format import layout
from ridethrough.seam.children import ask_children
from ridethrough.seam.place import Block, Mount, mount_holding, parse_mounts
from ridethrough.store.assess.findings import Bandwidth, Calls, DirSync, Exclusive, Findings, Rename, Seen, Sync, timed
from ridethrough.store.assess.judge import State, Verdict, human_s, judge
from ridethrough.store.assess.measure import affordable_bytes, is_leftover

MIB, GIB = 1 << 20, 1 << 30
EXT4 = Mount(point="/ckpt", file_system="ext4", source="/dev/sda1", options=("rw", "relatime"), device="8:1")
DISK = Block(name="sda", is_rotational=False, write_cache="write back", backing_file=None)
GOOD = Findings(
    path="/ckpt", mount=EXT4, block=DISK, below=None, total_bytes=GIB, free_bytes=GIB,
    sync=Sync(refused=None, write=timed([5e-6] * 200), synced=timed([1e-3] * 200)), dir_sync=DirSync(refused=None, took=timed([1e-3] * 100)),
    rename=Rename(renames_count=100, reads_count=100, missing_count=0, torn_count=0, unreadable_count=0),
    exclusive=Exclusive(processes_count=8, races_count=40, won_by_none_count=0, won_by_several_count=0, refused=None),
    calls=Calls(has_links=True, reads_past_cache=True),
    bandwidth=Bandwidth(size_bytes=256 * MIB, write_s=1.0, read_bytes=256 * MIB, read_s=0.5), creates=(), seen=(), newest=None, waited_s=15.0,
)  # fmt: skip
SEEN = Seen(
    host="n1", error=None, mount="nfs4 server:/x", watched_s=0.01, fresh_s=0.01, listed_s=0.01, replaced_s=0.01, torn_count=0, won_by_none_count=0,
    won_by_several_count=0, races_count=50, answer_s=0.001,
)  # fmt: skip


def test_a_sound_disk_is_fit_without_remarks() -> None:
    answer = judge(GOOD, None)
    assert (answer.verdict, answer.objections, answer.remarks) == (Verdict.FIT, (), ())
    assert answer.reason == "fit for checkpoints, as far as software can tell"


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "tmpfs": ({"mount": replace(EXT4, file_system="tmpfs")}, "memory"),
    "volatile overlay": ({"mount": replace(EXT4, file_system="overlay", options=("rw", "volatile"))}, "volatile"),
    "volatile overlay, newer kernels": ({"mount": replace(EXT4, file_system="overlay", options=("rw", "fsync=volatile"))}, "volatile"),
    "no barriers": ({"mount": replace(EXT4, options=("rw", "barrier=0"))}, "not flushed"),
    "fsync refused": ({"sync": replace(GOOD.sync, refused="EINVAL", synced=None)}, "fsync is refused"),  # type: ignore[type-var]
    "directory fsync refused": ({"dir_sync": DirSync(refused="EINVAL", took=None)}, "fsync of a directory"),
    "torn": ({"rename": replace(GOOD.rename, torn_count=1)}, "not atomic"),  # type: ignore[type-var]
    "two winners": ({"exclusive": replace(GOOD.exclusive, won_by_several_count=1)}, "several winners"),  # type: ignore[type-var]
    "no exclusive create": ({"exclusive": replace(GOOD.exclusive, refused="EINVAL")}, "exclusive create is refused"),  # type: ignore[type-var]
    "another directory": ({"seen": (replace(SEEN, fresh_s=None),)}, "does not see"),
    "torn on a peer": ({"seen": (replace(SEEN, torn_count=2),)}, "neither old nor new"),
    "both won": ({"seen": (replace(SEEN, won_by_several_count=1),)}, "both won"),
}
REMARKED: dict[str, tuple[dict[str, Any], str]] = {
    "network": ({"mount": replace(EXT4, file_system="nfs4"), "block": None}, "server"),
    "FUSE": ({"mount": replace(EXT4, file_system="fuse.mine"), "block": None}, "program"),
    "unproven": ({"mount": replace(EXT4, file_system="zfs"), "block": None}, "no power cut has been tested"),
    "container's layer": ({"mount": replace(EXT4, file_system="overlay")}, "goes with the container"),
    "loop": ({"block": replace(DISK, backing_file="/home/disk.img")}, "/home/disk.img"),
    "cheap fsync": ({"sync": replace(GOOD.sync, synced=timed([6e-6] * 200))}, "suspicious, no proof"),  # type: ignore[type-var]
    "a disk too fast": ({"block": replace(DISK, is_rotational=True), "sync": replace(GOOD.sync, synced=timed([2e-4]))}, "rotates"),  # type: ignore[type-var]
    "reader without a file": ({"rename": replace(GOOD.rename, missing_count=1)}, "while a file is replaced"),  # type: ignore[type-var]
    "no O_DIRECT": ({"calls": Calls(has_links=True, reads_past_cache=False)}, "no O_DIRECT"),
    "no winner": ({"exclusive": replace(GOOD.exclusive, won_by_none_count=1)}, "no winner"),  # type: ignore[type-var]
    "no room": ({"bandwidth": None}, "too little space"),
    "late": ({"seen": (replace(SEEN, listed_s=30.0),)}, "sees late: in a listing 30 s"),
    "never in a listing": ({"seen": (replace(SEEN, listed_s=None),)}, "in a listing not within 15 s"),
    "loser told another reason": (
        {"seen": (replace(SEEN, race_refused="EPERM on create", races_count=None),)},
        "exclusive create against n1 failed (EPERM on create)",
    ),
    "not asked": ({"seen": (Seen(host="n1", error="Permission denied"),)}, "n1 was not asked: Permission denied"),
    "left": ({"not_removed": ("storage-check~x",)}, "remove it as its owner"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_loses_or_mixes_checkpoints_is_not_fit(name: str) -> None:
    change, word = UNFIT[name]
    answer = judge(replace(GOOD, **change), None)
    assert answer.verdict is Verdict.UNFIT
    assert len(answer.objections) == 1
    assert word in answer.reason
    assert answer.saves == ()  # nothing is called durable there


@pytest.mark.parametrize("name", REMARKED)
def test_what_cannot_be_told_or_may_matter_is_a_remark(name: str) -> None:
    change, word = REMARKED[name]
    answer = judge(replace(GOOD, **change), None)
    assert (answer.verdict, answer.objections) == (Verdict.REMARKS, ())
    assert len(answer.remarks) == 1
    assert word in answer.remarks[0]


def test_without_a_volatile_cache_nobody_misses_the_flushes() -> None:
    found = replace(GOOD, mount=replace(EXT4, options=("rw", "nobarrier")), block=replace(DISK, write_cache="write through"))
    assert judge(found, None).verdict is Verdict.FIT


def test_what_was_not_measured_is_never_said_to_be() -> None:
    nothing = replace(GOOD, mount=None, block=None, sync=None, dir_sync=None, rename=None, exclusive=None, calls=None, bandwidth=None)
    answer = judge(nothing, None)
    assert {fact.state for fact in answer.facts} == {State.UNKNOWN}
    assert answer.saves == ()


@given(st.fixed_dictionaries({f.name: st.one_of(st.none(), st.text(min_size=1)) for f in fields(StorageFacts) if f.name != "path"}))
def test_the_four_questions_are_configured_or_unknown_and_never_guessed(told: dict[str, str | None]) -> None:
    facts = {fact.name: fact for fact in judge(GOOD, StorageFacts(path="/ckpt", **told)).facts}
    for key, name in (("replicas", "copies"), ("repair", "repair"), ("concurrent_writes", "concurrent writes"), ("one_node_dark", "one node dark")):
        assert facts[name].state is (State.CONFIGURED if told[key] else State.UNKNOWN)
        assert told[key] is None or facts[name].text == told[key]


def test_a_save_is_written_then_read_back_then_the_next_one_begins() -> None:
    save = judge(GOOD, None).saves[0]
    assert save.size_bytes == GIB
    assert save.durable_s == pytest.approx(4.0 + 0.003)
    assert save.interval_s == pytest.approx(save.durable_s + 2.0)
    assert save.lost_s == save.interval_s + save.durable_s


@pytest.mark.parametrize(
    ("duration_s", "text"), [(2e-6, "2 µs"), (0.0123, "12 ms"), (1.26, "1.3 s"), (99, "99 s"), (160, "2.7 min"), (1620, "27 min"), (7200, "2.0 h")]
)
def test_durations_have_two_digits(duration_s: float, text: str) -> None:
    assert human_s(duration_s) == text


# -- whose directory it is -------------------------------------------------------------------------------------------------

ME = layout.check_name("n0", "boot1", "4026", 100, 5)


@pytest.mark.parametrize(
    ("name", "age_s", "is_alive", "expected"),
    [
        (layout.check_name("n0", "boot1", "4026", 99, 5), 0.0, False, True),
        (layout.check_name("n0", "boot1", "4026", 99, 5), 0.0, True, False),
        (layout.check_name("n0", "boot1", "4027", 99, 5), 0.0, False, False),  # another container's pid says nothing
        (layout.check_name("n0", "boot0", "4026", 99, 5), 0.0, True, True),  # before a power cut
        (layout.check_name("n1", "boot9", "4026", 99, 5), 60.0, False, False),
        (layout.check_name("n1", "boot9", "4026", 99, 5), 4000.0, False, True),
        ("step-000000001-01234567", 4000.0, False, False),
    ],
)
def test_a_directory_is_a_leftover_only_if_its_check_cannot_be_running(name: str, age_s: float, is_alive: bool, expected: bool) -> None:
    assert is_leftover(name, ME, age_s=age_s, is_alive=lambda pid, started: is_alive) is expected


@given(st.integers(0), st.integers(0, 1 << 50))
def test_the_large_file_never_crowds_the_place(asked: int, free: int) -> None:
    assert affordable_bytes(None, free, path="/x") <= free // 4
    if asked > free:
        with pytest.raises(StoreFull):
            affordable_bytes(asked, free, path="/x")
    else:
        assert affordable_bytes(asked, free, path="/x") == asked


# -- the kernel's words ----------------------------------------------------------------------------------------------------

MOUNTS = parse_mounts(
    "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n"
    "30 27 0:27 / /mnt/a\\040b rw - tmpfs tmp\\134fs rw,size=1k\n"
    "31 27 8:1 / /ckpt rw - xfs /dev/sda1 rw\n"
    "32 31 0:40 / /ckpt ro - nfs4 server:/x rw,vers=4.2\n"
    "a line of tomorrow\n"
)


def test_mounts_are_read_as_the_kernel_writes_them() -> None:
    assert [mount.file_system for mount in MOUNTS] == ["ext4", "tmpfs", "xfs", "nfs4"]
    assert (MOUNTS[1].point, MOUNTS[1].source) == ("/mnt/a b", "tmp\\fs")
    assert (MOUNTS[3].option("vers"), MOUNTS[3].option("ro"), MOUNTS[3].option("soft")) == ("4.2", "", None)


@pytest.mark.parametrize(("path", "expected"), [("/ckpt/run", "nfs4"), ("/ckpt", "nfs4"), ("/ckpt2", "ext4"), ("/mnt/a b/c", "tmpfs")])
def test_a_path_lies_in_the_deepest_mount_and_of_several_in_the_last(path: str, expected: str) -> None:
    found = mount_holding(path, MOUNTS)
    assert found is not None
    assert found.file_system == expected


# -- children that answer ---------------------------------------------------------------------------------------------------


def asked(*functions: Callable[[], Any], limit_s: float = 10.0) -> list[Any]:
    return ask_children(functions, limit_s=limit_s, doing="trying", path="/x", tick=lambda: None)


def test_children_run_at_once_and_answer_in_order() -> None:
    assert asked(lambda: 1, lambda: {"a": [2]}, lambda: None) == [1, {"a": [2]}, None]


def test_an_error_of_a_child_is_raised_with_its_fields() -> None:
    def fail() -> None:
        raise StoreFull(detail="ENOSPC on write", path="/x")

    with pytest.raises(StoreFull, match="ENOSPC on write") as caught:
        asked(fail)
    assert caught.value.fields == {"detail": "ENOSPC on write", "path": "/x"}


def test_a_bug_in_a_child_is_a_bug_and_not_an_answer() -> None:
    with pytest.raises(Internal, match="ZeroDivisionError"):
        asked(lambda: 1 // 0)


def test_a_child_that_does_not_answer_is_given_up() -> None:
    import time

    with pytest.raises(StorageUnreachable, match="no answer within 0 s on trying"):
        asked(lambda: time.sleep(60), limit_s=0.3)

"""`ridethrough storage check` on real file systems: what it says of each, and what it leaves behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from faulty_disk import FaultyDisk
from lacking import lacking
from ridethrough.format import layout
from ridethrough.store.assess.measure import own_name
from ridethrough.testing import LoopDisk, SimpleStore, missing_for_disks, save_once

root = pytest.mark.root
MIB = 1 << 20
QUICK = (str(Path(__file__).with_name("quick_check.py")),)
WHOLE = ("-m", "ridethrough")


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str
    took_s: float

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def fact(self, name: str) -> dict[str, Any]:
        found = [fact for fact in self.json["facts"] if fact["name"] == name]
        assert len(found) == 1, [fact["name"] for fact in self.json["facts"]]
        return dict(found[0])


def words(path: object, *args: object, program: tuple[str, ...] = QUICK) -> list[str]:
    return [sys.executable, *program, "storage", "check", str(path), *map(str, args)]


def check(path: object, *args: object, program: tuple[str, ...] = QUICK) -> Answer:
    begin_s = time.monotonic()
    done = subprocess.run(words(path, "--json", *args, program=program), capture_output=True, text=True, check=False, timeout=120)
    answer = Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - begin_s)
    assert "Traceback" not in answer.err
    return answer


@contextlib.contextmanager
def mounted(kind: str, point: Path, options: str = "rw") -> Iterator[Path]:
    point.mkdir()
    subprocess.run(["mount", "-t", kind, "-o", options, kind, point], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyDisk]:
    with FaultyDisk(tmp_path / "faulty") as made:
        yield made


def overlay(tmp_path: Path, upper_on: Path, *more: str) -> contextlib.AbstractContextManager[Path]:
    for path in (upper_on / "upper", upper_on / "work", tmp_path / "lower"):
        path.mkdir()
    options = ",".join([f"lowerdir={tmp_path}/lower", f"upperdir={upper_on}/upper", f"workdir={upper_on}/work", *more])
    return mounted("overlay", tmp_path / "overlay", options)


# -- what it says of each file system --------------------------------------------------------------------------------------


@root
@pytest.mark.parametrize(
    ("file_system", "size_bytes"),
    [("ext4", 64 * MIB), pytest.param("xfs", 320 * MIB, marks=pytest.mark.slow), pytest.param("btrfs", 160 * MIB, marks=pytest.mark.slow)],
)
def test_a_real_disk_is_fit_and_named_with_what_holds_it(file_system: str, size_bytes: int) -> None:
    lacking(missing_for_disks(file_system))
    with LoopDisk(size_bytes, file_system=file_system) as disk:
        answer = check(disk.path)
        assert answer.code == 0, answer.out
        found = answer.fact("file system")
        assert found["figures"]["file_system"] == file_system
        assert found["figures"]["kind"] == "local"
        assert re.fullmatch(r"loop\d+", found["figures"]["disk"])
        assert any("disk.img" in remark for remark in answer.json["remarks"])
        for name in ("fsync", "directory fsync", "rename", "exclusive create", "O_DIRECT", "write", "read", "drive's cache"):
            assert answer.fact(name)["state"] == "measured", name
        assert answer.fact("rename")["figures"]["reads_count"] > 20
        assert answer.fact("exclusive create")["figures"]["won_by_several_count"] == 0
        assert answer.fact("what it reaches")["state"] == "unknown"
        assert answer.fact("seen by others")["state"] == "unknown"
        assert os.listdir(disk.path) in ([], ["lost+found"])


@root
def test_memory_is_not_durable(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "memory") as place:
        answer = check(place)
    assert answer.code == 1
    assert answer.json["reason"] == "not fit for checkpoints: tmpfs is memory, gone with the power"


@pytest.mark.slow
@root
def test_an_overlay_is_worth_what_holds_its_upper_directory(tmp_path: Path) -> None:
    with LoopDisk(64 * MIB) as disk, overlay(tmp_path, Path(disk.path)) as place:
        answer = check(place)
    assert answer.code == 0
    assert any("an overlay, its upper directory on ext4" in remark for remark in answer.json["remarks"])


@pytest.mark.slow
@root
def test_an_overlay_over_memory_is_not_durable(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "memory") as memory, overlay(tmp_path, memory) as place:
        answer = check(place)
    assert (answer.code, answer.json["objections"]) == (1, ["the overlay's upper directory is on tmpfs, gone with the power"])


@pytest.mark.slow
@root
def test_an_overlay_that_was_told_not_to_sync_is_not_durable(tmp_path: Path) -> None:
    with LoopDisk(64 * MIB) as disk, overlay(tmp_path, Path(disk.path), "volatile") as place:
        answer = check(place)
    assert (answer.code, answer.json["objections"]) == (1, ["overlay mounted volatile: fsync does nothing"])


@root
def test_a_disk_mounted_without_flushes_is_not_durable() -> None:
    with LoopDisk(64 * MIB, options="nobarrier") as disk:
        answer = check(disk.path)
        if answer.fact("drive's cache")["figures"]["write_cache"] == "write through":
            assert answer.code == 0  # there is nothing to flush
        else:
            assert (answer.code, answer.json["objections"]) == (1, ["mounted with nobarrier: the drive's cache is not flushed"])


@root
def test_refused_fsync_is_not_fit_and_said_with_its_error(faulty: FaultyDisk) -> None:
    faulty.fail("fsync", errno.EIO)
    answer = check(faulty.path)
    assert (answer.code, answer.json["objections"]) == (1, ["fsync is refused (EIO on fsync)"])
    assert answer.json["saves"] == []
    assert answer.fact("rename")["state"] == "measured"


@root
def test_refused_fsync_of_a_directory_is_not_fit(faulty: FaultyDisk) -> None:
    faulty.fail("fsyncdir", errno.EIO)
    answer = check(faulty.path)
    assert answer.code == 1
    assert "fsync of a directory is refused (EIO on fsync of directory)" in answer.json["reason"]


@root
def test_fsync_that_costs_nothing_is_suspicious_but_no_proof(faulty: FaultyDisk) -> None:
    faulty.lie("fsync")
    answer = check(faulty.path)
    assert answer.code == 0
    assert [remark for remark in answer.json["remarks"] if remark.startswith("suspicious, no proof: fsync costs hardly more")]
    assert answer.fact("cost of fsync")["figures"]["ratio"] < 3


@root
def test_a_rename_that_is_a_copy_is_found_by_its_reader(faulty: FaultyDisk) -> None:
    faulty.lie("rename")
    answer = check(faulty.path)
    assert answer.code == 1
    assert "rename is not atomic for a reader" in answer.json["reason"]
    assert answer.fact("rename")["figures"]["torn_count"] > 0


@root
def test_a_disk_that_hangs_is_given_up_in_time(faulty: FaultyDisk) -> None:
    faulty.hang()
    answer = check(faulty.path)
    faulty.heal()
    assert answer.code == 13
    assert "no answer within 6 s on looking" in answer.err
    assert answer.took_s < 20


@pytest.mark.slow
@root
def test_a_disk_that_begins_to_hang_is_given_up_in_time_and_cleaned_by_the_next_check(faulty: FaultyDisk) -> None:
    child = subprocess.Popen(words(faulty.path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait(lambda: any(layout.parse_check(name) for name in os.listdir(faulty.path)))
    faulty.hang()
    _, err = child.communicate(timeout=40)
    faulty.heal()
    assert child.returncode == 13, err
    assert "no answer within 6 s" in err
    assert check(faulty.path).code in (0, 1)
    assert os.listdir(faulty.path) == []


@root
@pytest.mark.parametrize("fault", [("write", errno.ENOSPC, 14), ("create", errno.EDQUOT, 14), ("mkdir", errno.EACCES, 13), ("read", errno.EIO, 13)])
def test_what_cannot_be_measured_is_an_error_with_its_exit_code(fault: tuple[str, int, int], faulty: FaultyDisk) -> None:
    call, error, code = fault
    faulty.fail(call, error)
    answer = check(faulty.path)
    assert (answer.code, answer.out) == (code, "")
    assert errno.errorcode[error] in answer.err
    assert os.listdir(faulty.path) == []


@root
def test_a_full_disk_is_exit_14(tmp_path: Path) -> None:
    with LoopDisk(24 * MIB) as disk:
        subprocess.run(["dd", "if=/dev/zero", f"of={disk.path}/filler", "bs=4096"], check=False, capture_output=True)
        assert os.statvfs(disk.path).f_bavail == 0
        answer = check(disk.path)
        assert answer.code == 14, answer.out + answer.err
        assert json.loads(answer.err)["code"] == "RT-014"
        assert set(os.listdir(disk.path)) == {"filler", "lost+found"}


@root
def test_a_read_only_disk_is_exit_14() -> None:
    with LoopDisk(24 * MIB) as disk:
        disk.remount(options="ro")
        answer = check(disk.path)
        assert (answer.code, json.loads(answer.err)["code"]) == (14, "RT-017")


@pytest.mark.slow
@root
def test_a_disk_whose_power_is_cut_meanwhile_is_exit_13() -> None:
    with LoopDisk(64 * MIB) as disk:
        child = subprocess.Popen(words(disk.path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _wait(lambda: any(layout.parse_check(name) for name in os.listdir(disk.path)))
        disk.cut()
        out, err = child.communicate(timeout=60)
        # The cut may come upon the call that is asked about: then that is the answer.
        assert child.returncode in (1, 13), out + err
        assert "EIO" in out + err


def test_a_directory_that_is_not_there_is_exit_10(tmp_path: Path) -> None:
    answer = check(tmp_path / "nowhere")
    assert (answer.code, json.loads(answer.err)["code"]) == (10, "RT-010")
    assert "there is no such directory" in answer.err
    assert os.listdir(tmp_path) == ["node-state"] or not os.listdir(tmp_path)


def test_a_file_is_exit_10_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    answer = check(tmp_path / "file")
    assert (answer.code, json.loads(answer.err)["code"]) == (10, "RT-010")
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("size", ["0", "-1", "many", "8GB", "1.5GiB"])
def test_a_size_that_is_none_is_refused_with_an_example(size: str, tmp_path: Path) -> None:
    answer = check(tmp_path, f"--size={size}")
    assert answer.code == 2
    assert "--size 8GiB" in json.loads(answer.err)["hint"]


def test_a_size_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    answer = check(tmp_path, "--size", "900TiB")
    assert answer.code == 14
    assert str(tmp_path) in answer.err
    assert re.fullmatch(r"--size \d+ or less", json.loads(answer.err)["hint"])


# -- figures ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_size_asked_for_is_written_and_read_whole(tmp_path: Path) -> None:
    answer = check(tmp_path, "--size", "20MiB")
    assert answer.fact("write")["figures"]["size_bytes"] == answer.fact("read")["figures"]["size_bytes"] == 20 * MIB


@pytest.mark.slow
def test_the_time_of_a_save_follows_from_the_bandwidth(tmp_path: Path) -> None:
    answer = check(tmp_path)
    write = answer.fact("write")["figures"]["write_bytes_per_s"]
    read = answer.fact("read")["figures"]["read_bytes_per_s"]
    for save in answer.json["saves"]:
        assert save["durable_s"] == pytest.approx(save["size_bytes"] / write, rel=0.1, abs=0.2)
        assert save["interval_s"] == pytest.approx(save["durable_s"] + save["size_bytes"] / read)
        assert save["lost_s"] == pytest.approx(save["interval_s"] + save["durable_s"])


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_a_row_of_the_table(store: SimpleStore) -> None:
    save_once(store, step=7)
    answer = check(store.run_dir)
    row = answer.json["saves"][0]
    size_bytes = sum(path.stat().st_size for path in Path(store.run_dir).glob("step-*/*.safetensors"))
    assert (row["step"], row["size_bytes"]) == (7, size_bytes)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_whole_check_takes_about_twenty_seconds(tmp_path: Path) -> None:
    answer = check(tmp_path, program=WHOLE)
    assert answer.code in (0, 1)
    assert answer.took_s < 40  # twice that on a machine that does other things


def test_the_output_is_what_the_schema_says(tmp_path: Path) -> None:
    schema = json.loads((resources.files("ridethrough.cli") / "schemas" / "storage-check.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    answer = check(tmp_path)
    jsonschema.validate(answer.json, schema, format_checker=jsonschema.FormatChecker())
    assert answer.json["schema"] == {"name": "ridethrough.storage-check", "version": 1}
    assert set(answer.json) == set(schema["properties"])
    assert answer.err == ""


def test_what_a_person_wrote_about_the_storage_is_reported_as_configured(tmp_path: Path) -> None:
    place = tmp_path / "ckpt" / "exp1"
    place.mkdir(parents=True)
    file = tmp_path / "ridethrough.toml"
    file.write_text('[storage_facts."/"]\nrepair = "never"\n[storage_facts.ckpt]\nreplicas = "8+2 erasure code"\n', encoding="utf-8")
    answer = check(place, "--config", file)
    assert (answer.fact("copies")["state"], answer.fact("copies")["text"]) == ("configured", "8+2 erasure code")
    assert answer.fact("repair")["state"] == "unknown"  # the deeper path counts, as a whole
    assert {answer.fact(name)["state"] for name in ("concurrent writes", "one node dark")} == {"unknown"}


# -- nothing is left -------------------------------------------------------------------------------------------------------


def _wait(is_so: Any) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def tree(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*")}


def test_a_hostile_directory_is_checked_and_nothing_is_left_or_changed(hostile_dir: Path) -> None:
    (hostile_dir / "mine").write_bytes(b"mine")
    answer = check(hostile_dir)
    assert answer.code in (0, 1)
    assert tree(hostile_dir) == {"mine"}
    assert (hostile_dir / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("after_s", [0.4, *(pytest.param(after_s, marks=pytest.mark.slow) for after_s in (0.05, 1.0, 1.6))])
def test_ctrl_c_leaves_nothing_and_is_exit_130(after_s: float, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    child = subprocess.Popen(words(place), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _wait(lambda: os.listdir(place))
    time.sleep(after_s)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert err == ""
    assert os.listdir(place) == []


@pytest.mark.slow
def test_what_a_kill_leaves_is_removed_by_the_next_check_and_no_process_stays(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    child = subprocess.Popen(words(place), stdout=subprocess.DEVNULL)
    _wait(lambda: any(place.rglob("file*")))
    child.kill()
    child.wait()
    (left,) = os.listdir(place)
    assert layout.parse_check(left)
    _wait(lambda: not _writers_below(place))
    assert check(place).code in (0, 1)
    assert os.listdir(place) == []


def _writers_below(place: Path) -> list[str]:
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue  # ended meanwhile
        if target.startswith(str(place)):
            found.append(target)
    return found


def test_the_directory_of_a_check_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    live = tmp_path / own_name()  # this process is alive
    live.mkdir()
    assert check(tmp_path).code in (0, 1)
    assert live.is_dir()


def test_a_link_with_the_name_of_a_check_is_not_followed(tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    for path in (place, other):
        path.mkdir()
    (other / "precious").write_bytes(b"x")
    (place / layout.check_name("n", "0", "1", 1, 1)).symlink_to(other)
    os.utime(other, (1, 1))
    assert check(place).code in (0, 1)
    assert (other / "precious").exists()


def test_a_check_of_a_run_directory_changes_nothing_that_a_restart_reads(store: SimpleStore) -> None:
    save_once(store, step=3)
    before = {name: (Path(store.run_dir) / name).stat().st_mtime_ns for name in tree(Path(store.run_dir))}
    assert check(store.run_dir).code in (0, 1)
    assert {name: (Path(store.run_dir) / name).stat().st_mtime_ns for name in tree(Path(store.run_dir))} == before


def described(*names: str) -> Iterable[str]:
    return [f"| {name} " for name in names]


def test_the_page_says_of_each_file_system_whether_it_is_proven() -> None:
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text(encoding="utf-8")
    for row in described("ext4", "XFS", "btrfs", "tmpfs", "overlayfs", "sshfs", "NFS", "Lustre", "GPFS", "CephFS", "BeeGFS", "S3"):
        assert row in page

"""A real rsync daemon and rsync over a real sshd as a file system: whole files or none, and one clear line for what is wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from replaced import require_old_or_new

from ridethrough.errors import StorageDenied, StorageError, StorageUnreachable, StoreFull, StoreReadOnly, UsageError
from ridethrough.seam import rsync
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import processes_with_environment
from ridethrough.seam.rsync import RsyncFileSystem
from ridethrough.seam.staging import Staging
from ridethrough.store.catalog import Checkpoint, candidates, read_catalog
from ridethrough.store.copy import copy_checkpoint
from ridethrough.store.place import Place, open_place
from ridethrough.store.retain import delete_checkpoint
from ridethrough.testing import LoopDisk, SimpleStore, load_newest
from rsync_servers import PASSWORD, Server, SlowLink, free_port, rsync_daemon, ssh_server

MIB = 1 << 20


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """What the far machine has on its disk."""
    path = tmp_path / "served"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.delenv("RSYNC_PASSWORD", raising=False)
    return path


@pytest.fixture
def daemon(tmp_path: Path, served: Path) -> Iterator[Server]:
    with rsync_daemon(tmp_path / "daemon", served) as server:
        yield server


@pytest.fixture
def daemon_url(daemon: Server) -> str:
    return f"rsync://127.0.0.1:{daemon.port}/runs"


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    with ssh_server(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture
def ssh_url(sshd: tuple[Server, str], served: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    server, way = sshd
    monkeypatch.setenv("RSYNC_RSH", way)
    return f"ssh://127.0.0.1:{server.port}{served}"


@pytest.fixture(params=["rsync", pytest.param("ssh", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("daemon_url" if request.param == "rsync" else "ssh_url"))


def put(fs: RsyncFileSystem, path: str, data: bytes) -> None:
    writer = fs.create(path, len(data))
    try:
        writer.write(data)
        writer.sync()
    finally:
        writer.close()


def newest(source: Place) -> Checkpoint:
    return next(iter(candidates(read_catalog(source.fs, source.run_dir))))


def visible(directory: Path) -> list[str]:
    """Files there, without those that rsync still receives or was killed over."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))


# -- files and directories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, 5000, 21 * MIB + 7])
def test_a_file_reads_back_as_it_was_written(url: str, size_bytes: int) -> None:
    fs, data = RsyncFileSystem(url), os.urandom(size_bytes)
    put(fs, "/a/b", data)
    assert (fs.stat("/a/b").size_bytes, fs.stat("/a/b").is_dir) == (size_bytes, False)
    assert abs(fs.stat("/a/b").modified_s - time.time()) < 60
    assert fs.read("/a/b", max_bytes=64 * MIB) == data
    middle = bytearray(min(size_bytes, 100))
    assert fs.read_into("/a/b", memoryview(middle), offset=size_bytes // 2) == len(data[size_bytes // 2 : size_bytes // 2 + len(middle)])
    assert bytes(middle) == data[size_bytes // 2 : size_bytes // 2 + len(middle)]
    assert fs.read_into("/a/b", memoryview(bytearray(10)), offset=size_bytes) == 0


def test_a_file_is_fetched_once_for_all_its_ranges_and_anew_when_the_far_side_is_asked_from_its_start(url: str, served: Path) -> None:
    fs = RsyncFileSystem(url)
    put(fs, "/f", b"a" * 300)
    buffer = bytearray(100)
    assert fs.read_into("/f", memoryview(buffer), past_cache=True) == 100
    (served / "f").write_bytes(b"b" * 300)
    fs.read_into("/f", memoryview(buffer), offset=100, past_cache=True)
    assert bytes(buffer) == b"a" * 100
    fs.read_into("/f", memoryview(buffer), past_cache=True)
    assert bytes(buffer) == b"b" * 100


def test_nothing_is_there_before_it_is_synced_and_nothing_stays_here(url: str, served: Path, staging: Path) -> None:
    fs = RsyncFileSystem(url)
    writer = fs.create("/large", 40 * MIB)
    for _ in range(5):
        writer.write(bytes(8 * MIB))
    with pytest.raises(FileNotFoundError):
        fs.stat("/large")
    writer.close()  # given up
    assert list(served.iterdir()) == []
    assert fs.list_dir("/") == []
    put(fs, "/small", b"x")
    fs.read_into("/small", memoryview(bytearray(1)))
    [ours] = staging.iterdir()
    assert [path.name for path in ours.iterdir() if path.is_dir()] == []
    del fs, writer
    assert list(staging.iterdir()) == []


def test_a_file_that_is_replaced_within_a_second_by_one_of_the_same_size_is_the_new_one(url: str) -> None:
    fs = RsyncFileSystem(url)
    for number in range(10):
        put(fs, "/record", bytes([number]) * 3000)
        assert fs.read("/record", max_bytes=10_000) == bytes([number]) * 3000


@pytest.mark.slow
def test_a_file_that_is_replaced_is_the_old_or_the_new_one_for_every_reader(daemon_url: str) -> None:
    require_old_or_new(lambda: RsyncFileSystem(daemon_url))


def test_directories_and_absent_names_are_told_apart(url: str) -> None:
    fs = RsyncFileSystem(f"{url}/runs/exp001")
    with pytest.raises(FileNotFoundError):
        fs.list_dir("/")
    for name in ("run.json", "attempts/000001-aa/attempt.json", "step-1/x.seal", "step-1/x.safetensors"):
        put(fs, f"/{name}", b"x")
    assert fs.list_dir("/") == ["attempts", "run.json", "step-1"]
    assert fs.list_dir("/step-1") == ["x.safetensors", "x.seal"]
    assert fs.stat("/").is_dir
    assert fs.stat("/attempts").is_dir
    assert not fs.stat("/run.json").is_dir
    for name in ("/absent", "/ste", "/absent/x"):
        for call in (fs.list_dir, fs.stat, lambda path: fs.read(path, max_bytes=10)):
            with pytest.raises(FileNotFoundError):
                call(name)
    with pytest.raises(NotADirectoryError):
        fs.list_dir("/run.json")
    with pytest.raises(IsADirectoryError):
        fs.read("/attempts", max_bytes=10)
    with pytest.raises(StorageError, match="at most 0") as caught:
        fs.read("/run.json", max_bytes=0)
    assert caught.value.__cause__ is None  # by which a reader knows it from a refusal


def test_what_is_removed_is_gone_and_only_that(url: str) -> None:
    fs = RsyncFileSystem(url)
    for name in ("d/a", "d/ab", "d/a.b", "a", "e/x"):
        put(fs, f"/{name}", b"x")
    fs.remove("/d/a")
    fs.remove("/d/a")
    assert fs.list_dir("/d") == ["a.b", "ab"]
    assert fs.list_dir("/") == ["a", "d", "e"]
    with pytest.raises(StorageError, match="non-empty"):
        fs.remove("/d")
    assert fs.list_dir("/d") == ["a.b", "ab"]
    fs.remove("/e/x")
    fs.remove("/e")
    fs.remove("/never/there")
    assert fs.list_dir("/") == ["a", "d"]


def test_names_that_are_hard_to_quote_are_taken_as_they_are(url: str, served: Path) -> None:
    fs = RsyncFileSystem(f"{url}/a b'c\"d $(x) ;é日本")
    for name in ("-n", "x y  z", "new\nline", "back\\slash", "\\#012", ":colon", "~", "100%"):
        put(fs, f"/{name}", name.encode())
        assert fs.read(f"/{name}", max_bytes=100) == name.encode()
    assert fs.list_dir("/") == sorted(["-n", "x y  z", "new\nline", "back\\slash", "\\#012", ":colon", "~", "100%"])
    for name in fs.list_dir("/"):
        fs.remove(f"/{name}")
    assert fs.list_dir("/") == []
    assert [path.name for path in served.iterdir()] == ["a b'c\"d $(x) ;é日本"]


def test_what_rsync_would_take_as_a_pattern_is_refused_and_touches_nothing(url: str) -> None:
    fs = RsyncFileSystem(url)
    put(fs, "/e1/a", b"x")
    put(fs, "/ab", b"x")
    for name in ("/e[1]/a", "/a*", "/a?"):
        for call in (fs.remove, fs.stat, fs.list_dir, lambda path: put(fs, path, b"y"), lambda path: fs.read(path, max_bytes=9)):
            with pytest.raises(StorageError, match="patterns"):
                call(name)
    assert fs.read("/e1/a", max_bytes=9) == b"x"
    with pytest.raises(UsageError, match="patterns"):
        RsyncFileSystem(f"{url}/exp[1]")


@pytest.mark.slow
def test_a_thousand_and_more_names_are_all_listed(daemon_url: str, served: Path) -> None:
    (served / "d").mkdir()
    for number in range(1100):
        (served / "d" / f"{number:04}").touch()
    assert len(RsyncFileSystem(daemon_url).list_dir("/d")) == 1100


def test_a_listing_is_understood_in_every_form_that_versions_of_rsync_print() -> None:
    text = (
        b"Welcome to the mirror\n\n"
        b"drwxr-xr-x          4,096 2026/11/30 04:07:19 .\n"
        b"-rw-r--r--      3,000,000 2026/11/30 04:07:19 x y\n"
        b"-rw-r--r--      3.000.000 2026/11/30 04:07:19  leading\n"
        b"-rw-r--r--        3000000 2026/11/30 04:07:19 new\\#012line-\xc3\xa9\n"
    )
    assert [(kind, size, name) for kind, size, _, name in rsync.parse_listing(text)] == [
        ("d", 4096, "."),
        ("-", 3_000_000, "x y"),
        ("-", 3_000_000, " leading"),
        ("-", 3_000_000, "new\nline-é"),
    ]


# -- a run -----------------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_another_machine_alone(url: str, store: SimpleStore, tmp_path: Path) -> None:
    store.commit(10, 20)
    here, there = open_place(store.run_dir), open_place(f"{url}/backups/exp001")
    assert not there.is_mounted
    done = copy_checkpoint(here, there, newest(here))
    assert done.copied_bytes > 0
    assert copy_checkpoint(here, there, newest(here)).copied_bytes == 0
    loaded = load_newest(there.fs, there.run_dir)
    assert loaded is not None
    assert (loaded.step, store.is_true(loaded)) == (20, True)
    shutil.rmtree(store.run_dir)
    back = open_place(str(tmp_path / "new-disk" / "exp001"))
    copy_checkpoint(there, back, newest(there))
    again = SimpleStore(fs=PosixFileSystem(), run_dir=back.run_dir, seed=store.seed)
    assert again.resume() == 20
    assert again.run_uid == store.run_uid
    delete_checkpoint(there.fs, there.run_dir, store.dir_name(20))
    assert load_newest(there.fs, there.run_dir) is None
    assert store.dir_name(20) not in there.fs.list_dir("/")


def large_store(tmp_path: Path) -> SimpleStore:
    made = SimpleStore(fs=PosixFileSystem(), run_dir=str(tmp_path / "large" / "exp001"), part_bytes=6 * MIB, has_private_parts=False)
    made.start()
    made.commit(10)
    return made


def payloads(directory: Path) -> list[str]:
    return [name for name in visible(directory) if name.endswith(".safetensors")]


@pytest.mark.parametrize("who", ["far", "here"])
def test_a_transfer_that_is_cut_leaves_nothing_under_the_name_and_the_same_copy_goes_on(
    daemon: Server, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    store = large_store(tmp_path)
    here = open_place(store.run_dir)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("RSYNC_TEST_MARK", mark)
    with SlowLink(daemon.port, bytes_s=2 * MIB) as link:
        there = open_place(f"rsync://127.0.0.1:{link.port}/runs/exp001")
        caught: list[StorageError] = []

        def copy() -> None:
            try:
                copy_checkpoint(here, there, newest(here))
            except StorageError as error:
                caught.append(error)

        copying = threading.Thread(target=copy)
        copying.start()
        wait_until(lambda: link.forwarded_bytes > 2 * MIB)
        if who == "far":
            assert daemon.kill_children()
        else:
            for pid in processes_with_environment("RSYNC_TEST_MARK", mark):
                os.kill(pid, signal.SIGKILL)
        copying.join(30)
    [error] = caught
    assert isinstance(error, StorageUnreachable)
    assert "\n" not in str(error)
    assert payloads(served) == []
    there = open_place(f"rsync://127.0.0.1:{daemon.port}/runs/exp001")
    assert copy_checkpoint(here, there, newest(here)).copied_bytes > 6 * MIB
    loaded = load_newest(there.fs, there.run_dir)
    assert loaded is not None
    assert store.is_true(loaded)


def wait_until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


PUSH = """
import sys
from ridethrough.seam.rsync import RsyncFileSystem
fs = RsyncFileSystem(sys.argv[1])
writer = fs.create("/large", 6 << 20)
writer.write(bytes(6 << 20))
try:
    writer.sync()
finally:
    writer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_us_ends_the_transfer_and_what_was_staged_is_gone_at_the_latest_at_the_next_one(
    daemon: Server, served: Path, staging: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("RSYNC_TEST_MARK", mark)
    with SlowLink(daemon.port, bytes_s=MIB) as link:
        pushing = subprocess.Popen(
            [sys.executable, "-c", PUSH, f"rsync://127.0.0.1:{link.port}/runs"], start_new_session=True, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: link.forwarded_bytes > MIB)
        pushing.send_signal(number)
        assert pushing.wait(20) != 0
        wait_until(lambda: not processes_with_environment("RSYNC_TEST_MARK", mark), 10)
    assert visible(served) == []
    if number == signal.SIGINT:
        assert list(staging.iterdir()) == []
    put(RsyncFileSystem(f"rsync://127.0.0.1:{daemon.port}/runs"), "/small", b"x")
    assert list(staging.iterdir()) == []


def test_what_lives_is_not_taken_for_what_was_left_behind(staging: Path) -> None:
    first, second = Staging("x"), Staging("x")
    room = first.make_room()
    assert second.make_room()
    assert os.path.isdir(room)
    del first
    assert not os.path.exists(room)


def test_a_staging_directory_that_cannot_be_had_is_not_taken_for_a_file_that_is_absent(daemon_url: str, staging: Path) -> None:
    fs = RsyncFileSystem(daemon_url)
    put(fs, "/f", b"x")
    [ours] = staging.iterdir()
    shutil.rmtree(ours)
    for call in (lambda: fs.read("/f", max_bytes=9), lambda: fs.read_into("/f", memoryview(bytearray(1))), lambda: put(fs, "/g", b"x")):
        with pytest.raises(StorageError, match="stage"):
            call()


@pytest.mark.slow
def test_a_slow_link_does_not_time_out_while_bytes_flow(daemon: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsync, "_ANSWER_S", 2)
    monkeypatch.setattr(rsync, "_SYNC_S", 2)
    data = os.urandom(2 * MIB)
    with SlowLink(daemon.port, bytes_s=400_000) as link:
        fs = RsyncFileSystem(f"rsync://127.0.0.1:{link.port}/runs")
        began_s = time.monotonic()
        put(fs, "/f", data)
        assert time.monotonic() - began_s > 4
        assert fs.read("/f", max_bytes=8 * MIB) == data


# -- what goes wrong -------------------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert PASSWORD not in text
    assert len(text) < 400
    return text


def test_a_bounded_transfer_takes_its_time(daemon_url: str) -> None:
    fs = RsyncFileSystem(daemon_url, bytes_per_s=500_000)
    began_s = time.monotonic()
    put(fs, "/bounded", os.urandom(1_000_000))
    assert time.monotonic() - began_s > 1.0


def test_a_wrong_password_is_one_clear_line_and_a_right_one_goes_through(daemon: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = RsyncFileSystem(f"rsync://mirror@127.0.0.1:{daemon.port}/secret")
    for password in (None, "wrong-" + PASSWORD[:3]):
        if password is not None:
            monkeypatch.setenv("RSYNC_PASSWORD", password)
        for call in (lambda: fs.list_dir("/"), lambda: put(fs, "/x", b"x"), lambda: fs.read("/x", max_bytes=1), lambda: fs.remove("/x")):
            with pytest.raises(StorageDenied) as caught:
                call()
            assert "auth failed on module secret" in one_line(caught.value)
    monkeypatch.setenv("RSYNC_PASSWORD", PASSWORD)
    put(fs, "/x", b"x")
    assert fs.read("/x", max_bytes=1) == b"x"


@pytest.mark.slow
def test_a_key_that_is_not_let_in_is_one_clear_line(sshd: tuple[Server, str], served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, way = sshd
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    monkeypatch.setenv("RSYNC_RSH", way.replace(way.split(" -i ")[1].split()[0], str(tmp_path / "other")))
    fs = RsyncFileSystem(f"ssh://127.0.0.1:{server.port}{served}")
    for call in (lambda: fs.list_dir("/"), lambda: put(fs, "/x", b"x"), lambda: fs.sync_dir("/")):
        with pytest.raises(StorageDenied, match="publickey") as caught:
            call()
        one_line(caught.value)


def test_a_module_without_write_access_can_be_read_and_says_so(daemon: Server, served: Path) -> None:
    (served / "x").write_bytes(b"x")
    fs = RsyncFileSystem(f"rsync://127.0.0.1:{daemon.port}/read-only")
    assert fs.read("/x", max_bytes=1) == b"x"
    for call in (lambda: put(fs, "/y", b"y"), lambda: fs.remove("/x")):
        with pytest.raises(StoreReadOnly) as caught:
            call()
        one_line(caught.value)
    assert visible(served) == ["x"]


def test_a_module_that_refuses_to_delete_keeps_all_and_says_so(daemon: Server, served: Path) -> None:
    fs = RsyncFileSystem(f"rsync://127.0.0.1:{daemon.port}/keeps-all")
    put(fs, "/x", b"x")
    with pytest.raises(StorageDenied, match="delete"):
        fs.remove("/x")
    assert visible(served) == ["x"]


def test_a_module_that_is_not_there_is_named(daemon: Server) -> None:
    with pytest.raises(StorageError, match="Unknown module 'absent'"):
        RsyncFileSystem(f"rsync://127.0.0.1:{daemon.port}/absent").list_dir("/")


@pytest.mark.root
def test_a_full_disk_far_away_is_said_and_keeps_what_it_had(tmp_path: Path, store: SimpleStore) -> None:
    store.commit(10)
    here, large = open_place(store.run_dir), large_store(tmp_path)
    with LoopDisk(4 * MIB) as disk, rsync_daemon(tmp_path / "daemon", Path(disk.path)) as server:
        url = f"rsync://127.0.0.1:{server.port}/runs"
        there = open_place(f"{url}/exp001")
        copy_checkpoint(here, there, newest(here))
        with pytest.raises(StoreFull) as caught:
            copy_checkpoint(open_place(large.run_dir), open_place(f"{url}/large"), newest(open_place(large.run_dir)))
        assert url in one_line(caught.value)
        assert payloads(Path(disk.path) / "large") == []
        assert load_newest(there.fs, there.run_dir) is not None


@pytest.mark.slow
@pytest.mark.root
def test_a_full_disk_here_names_the_directory_here(daemon_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(RsyncFileSystem(daemon_url), "/large", bytes(8 * MIB))

    def read_and_write(full: str) -> None:
        monkeypatch.setattr(tempfile, "tempdir", full)
        fs = RsyncFileSystem(daemon_url)
        with pytest.raises(StoreFull, match=full):
            fs.read("/large", max_bytes=64 * MIB)
        with pytest.raises(StoreFull, match=full):
            fs.create("/other", 8 * MIB)

    with LoopDisk(4 * MIB) as disk:
        read_and_write(disk.path)
        gc.collect()  # what was raised holds the file system, and with it its directory on this disk


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("kind", ["daemon", "ssh"])
def test_what_is_written_survives_a_cut_over_there_as_far_as_it_is_promised(
    tmp_path: Path, sshd: tuple[Server, str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    server, way = sshd
    monkeypatch.setenv("RSYNC_RSH", way)
    data = os.urandom(3 * MIB)
    with LoopDisk(64 * MIB) as disk, rsync_daemon(tmp_path / "daemon", Path(disk.path)) as daemon:
        url = f"ssh://127.0.0.1:{server.port}{disk.path}" if kind == "ssh" else f"rsync://127.0.0.1:{daemon.port}/runs"
        put(RsyncFileSystem(url), "/a/b/f", data)
        disk.cut()
        daemon.kill_children()
        disk.remount()
        found = Path(disk.path) / "a" / "b" / "f"
        if kind == "ssh" or found.exists():  # of a daemon the name may be lost, the content may not
            assert found.read_bytes() == data


def test_a_machine_that_is_away_is_unreachable(served: Path) -> None:
    port = free_port()
    for url in (f"rsync://127.0.0.1:{port}/runs", f"ssh://127.0.0.1:{port}{served}", "rsync://no-such-host.invalid/runs"):
        fs = RsyncFileSystem(url)
        began_s = time.monotonic()
        for call in (lambda fs=fs: fs.list_dir("/"), lambda fs=fs: put(fs, "/x", b"x")):
            with pytest.raises(StorageUnreachable) as caught:
                call()
            one_line(caught.value)
        assert time.monotonic() - began_s < 30


@pytest.mark.slow
def test_a_machine_that_accepts_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsync, "_ANSWER_S", 1)
    monkeypatch.setattr(rsync, "_CONNECT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        fs = RsyncFileSystem(f"rsync://127.0.0.1:{silent.getsockname()[1]}/runs")
        began_s = time.monotonic()
        with pytest.raises(StorageUnreachable) as caught:
            fs.list_dir("/")
    one_line(caught.value)
    assert time.monotonic() - began_s < 20


@pytest.mark.slow
def test_an_account_without_the_programs_is_one_clear_line(ssh_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="rsync") as caught:
        raise rsync.failure(
            127, "bash: line 1: rsync: command not found\nrsync error: remote command not found (code 127)", path=ssh_url, doing="read"
        )
    assert not isinstance(caught.value, StorageUnreachable)


def test_a_far_rsync_that_cannot_sync_is_told_by_name() -> None:
    error = rsync.failure(1, "rsync: --fsync: unknown option\nrsync error: syntax or usage error (code 1) at main.c(1886)", path="p", doing="write")
    assert "older than 3.2.4" in str(error)
    assert not isinstance(error, StorageUnreachable)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("rsync://", "names no host"),
        ("rsync://host", "names no module"),
        ("rsync://host/", "names no module"),
        ("ssh://host", "names no path"),
        ("ssh://-oProxyCommand=x/y", "names no host"),
        ("ssh://-l@host/y", "names no host"),
        ("rsync://host:port/m", "names no host"),
        (f"rsync://user:{PASSWORD}@host/m", "RSYNC_PASSWORD|password does not belong"),
        (f"ssh://user:{PASSWORD}@host/m", "password does not belong"),
    ],
)
def test_what_is_no_place_is_said(url: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        open_place(url)
    assert PASSWORD not in repr(caught.value.fields)


def test_addresses_are_read_as_they_are_written() -> None:
    assert rsync.parse_url("rsync://mirror@[::1]:8730/runs/a%20b/").remote("/x") == "rsync://mirror@[::1]:8730/runs/a b/x"
    assert rsync.parse_url("SSH://me@host:22/data").remote("/", inside=True) == "me@host:/data/"
    assert rsync.parse_url("ssh://host/data").shown == "ssh://host/data"


def test_a_machine_without_rsync_or_with_an_old_one_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    rsync._require_rsync.cache_clear()
    with pytest.raises(UsageError, match="rsync is not installed"):
        RsyncFileSystem("rsync://host/m")
    for text in ("rsync  version 3.2.3  protocol version 31", "openrsync: protocol version 29"):
        (programs / "rsync").write_text(f"#!/bin/sh\necho '{text}'\n")
        (programs / "rsync").chmod(0o755)
        with pytest.raises(UsageError, match=f"cannot sync.*{text}"):
            RsyncFileSystem("rsync://host/m")


def test_what_rsync_cannot_do_is_refused_by_name(daemon_url: str) -> None:
    fs = RsyncFileSystem(daemon_url)
    for call in (lambda: fs.append("/x", b""), lambda: fs.rename("/x", "/y"), lambda: fs.usage("/")):
        with pytest.raises(StorageError, match=daemon_url):
            call()


def test_no_secret_is_on_a_command_line(daemon: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSYNC_PASSWORD", PASSWORD)
    seen: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            for entry in os.listdir("/proc"):
                if entry.isdigit():
                    with contextlib.suppress(OSError):
                        seen.add(Path(f"/proc/{entry}/cmdline").read_text(errors="replace"))

    watcher = threading.Thread(target=look)
    watcher.start()
    fs = RsyncFileSystem(f"rsync://mirror@127.0.0.1:{daemon.port}/secret")
    for _ in range(5):
        put(fs, "/x", bytes(MIB))
    is_over.set()
    watcher.join()
    assert any("--fsync" in line for line in seen)
    assert not [line for line in seen if PASSWORD in line]

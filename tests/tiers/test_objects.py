"""A real S3 server as a file system: whole objects or none, the same answers as from a directory, one clear line for what is wrong."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from replaced import require_old_or_new

from ridethrough.errors import StorageDenied, StorageError, StorageUnreachable, UsageError
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.objects import ObjectFileSystem
from ridethrough.store.catalog import candidates, read_catalog
from ridethrough.store.copy import copy_checkpoint
from ridethrough.store.place import open_place
from ridethrough.store.retain import delete_checkpoint
from ridethrough.testing import SimpleStore, load_newest

MIB = 1 << 20


def put(fs: ObjectFileSystem, path: str, data: bytes) -> None:
    writer = fs.create(path, len(data))
    writer.write(data)
    writer.sync()
    writer.close()


@pytest.mark.parametrize("size_bytes", [0, 1, 5000, 21 * MIB + 7])
def test_an_object_reads_back_as_it_was_written(bucket: str, size_bytes: int) -> None:
    fs, data = ObjectFileSystem(bucket), os.urandom(size_bytes)
    put(fs, "/a/b", data)
    assert fs.stat("/a/b").size_bytes == size_bytes
    assert fs.read("/a/b", max_bytes=64 * MIB) == data
    middle = bytearray(min(size_bytes, 100))
    assert fs.read_into("/a/b", memoryview(middle), offset=size_bytes // 2) == len(data[size_bytes // 2 : size_bytes // 2 + len(middle)])
    assert fs.read_into("/a/b", memoryview(bytearray(10)), offset=size_bytes) == 0


def test_nothing_is_visible_of_an_upload_before_it_is_finished(bucket: str) -> None:
    fs = ObjectFileSystem(bucket)
    writer = fs.create("/large", 40 * MIB)
    for _ in range(5):
        writer.write(bytes(8 * MIB))
    with pytest.raises(FileNotFoundError):
        fs.stat("/large")
    writer.close()  # given up
    del writer
    with pytest.raises(FileNotFoundError):
        fs.read("/large", max_bytes=64 * MIB)
    assert fs.list_dir("/") == []


def test_an_object_that_is_replaced_is_the_old_or_the_new_one_for_every_reader(bucket: str) -> None:
    require_old_or_new(lambda: ObjectFileSystem(bucket))


def test_directories_are_what_lies_in_them(bucket: str) -> None:
    fs = ObjectFileSystem(f"{bucket}/runs")
    for name in ("run.json", "attempts/000001-aa/attempt.json", "step-1/x.seal", "step-1/x.safetensors"):
        put(fs, f"/{name}", b"x")
    assert fs.list_dir("/") == ["attempts", "run.json", "step-1"]
    assert fs.list_dir("/step-1") == ["x.safetensors", "x.seal"]
    assert fs.stat("/attempts").is_dir
    assert not fs.stat("/run.json").is_dir
    for name in ("/absent", "/ste"):
        with pytest.raises(FileNotFoundError):
            fs.list_dir(name)
        with pytest.raises(FileNotFoundError):
            fs.stat(name)
    fs.remove("/step-1/x.seal")
    fs.remove("/step-1/x.seal")
    assert fs.list_dir("/step-1") == ["x.safetensors"]


def test_a_thousand_and_more_names_are_all_listed(bucket: str) -> None:
    fs = ObjectFileSystem(bucket)
    for number in range(1100):
        put(fs, f"/d/{number:04}", b"")
    assert len(fs.list_dir("/d")) == 1100


def test_a_run_goes_on_from_an_object_store_alone(bucket: str, store: SimpleStore, tmp_path: Path) -> None:
    store.commit(10, 20)
    here, there = open_place(store.run_dir), open_place(f"{bucket}/exp001")
    copy_checkpoint(here, there, next(iter(candidates(read_catalog(here.fs, here.run_dir)))))
    loaded = load_newest(there.fs, there.run_dir)
    assert loaded is not None
    assert (loaded.step, store.is_true(loaded)) == (20, True)
    back = open_place(str(tmp_path / "new-disk" / "exp001"))
    copy_checkpoint(there, back, next(iter(candidates(read_catalog(there.fs, there.run_dir)))))
    again = SimpleStore(fs=PosixFileSystem(), run_dir=back.run_dir, seed=store.seed)
    assert again.resume() == 20
    assert again.run_uid == store.run_uid
    delete_checkpoint(there.fs, there.run_dir, store.dir_name(20))
    assert load_newest(there.fs, there.run_dir) is None


def test_wrong_credentials_are_one_clear_line(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _answering(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 58\r\n\r\n<Error><Code>InvalidAccessKeyId</Code><Message/></Error>   ") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        fs = ObjectFileSystem(bucket)
        with pytest.raises(StorageDenied) as caught:
            fs.list_dir("/")
        with pytest.raises(StorageDenied):
            put(fs, "/x", b"x")
    assert "\n" not in str(caught.value)
    assert bucket in str(caught.value)


def test_a_store_that_is_away_is_unreachable_within_its_retries(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        fs = ObjectFileSystem(bucket)
        began_s = time.monotonic()
        with pytest.raises(StorageUnreachable):
            fs.list_dir("/")
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize(
    ("url", "text"), [("s3://", "names no bucket"), ("ftp://x/y", "no kind of place"), ("file:/x/y", ""), ("file://x", "three slashes")]
)
def test_what_is_no_place_is_said(url: str, text: str) -> None:
    if text:
        with pytest.raises(UsageError, match=text):
            open_place(url)
    else:
        assert open_place(url).is_mounted


def test_what_an_object_store_cannot_do_is_refused_by_name(bucket: str) -> None:
    fs = ObjectFileSystem(bucket)
    for call in (lambda: fs.append("/x", b""), lambda: fs.rename("/x", "/y"), lambda: fs.usage("/")):
        with pytest.raises(StorageError, match=bucket):
            call()


class _answering:
    """A server that says the same to whoever asks."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._server = socket.create_server(("127.0.0.1", 0))
        self._is_over = False

    def __enter__(self) -> str:
        threading.Thread(target=self._serve, daemon=True).start()
        return f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def _serve(self) -> None:
        while not self._is_over:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2)
                connection.recv(65536)
                connection.sendall(self._answer)

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._server.close()

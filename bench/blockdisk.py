"""A disk that remembers: every write, discard and flush that a file system sends to it, in order.

One file, `disk`, on a small FUSE file system of its own. A loop device on it turns block writes into FUSE writes and cache
flushes (REQ_FLUSH; FUA comes as a flush after the write) into FUSE fsyncs. A second file, `marks`, puts what the workload
says (a save is acknowledged, a call begins) into the same log, so that no clock has to order the two.

    python bench/blockdisk.py MOUNTPOINT SIZE_BYTES STEM      keeps STEM.img, writes STEM.log until it is unmounted
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITE, ZERO, FLUSH, MARK = b"W", b"Z", b"F", b"M"
_HEAD = struct.Struct("<cQQQ")
"""Kind, offset, length on the disk, bytes that follow."""
_PUNCH_HOLE, _ZERO_RANGE = 0x02, 0x10
_START_S = 20.0
_STOP_TRIES = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing the disk was told."""

    kind: bytes
    offset: int = 0
    length: int = 0
    data: bytes = b""

    @property
    def is_change(self) -> bool:
        """It may or may not be on the medium after a cut before the next flush."""
        return self.kind in (WRITE, ZERO)

    @property
    def mark(self) -> dict[str, Any]:
        """What the workload said."""
        return dict(json.loads(self.data))


def encode(entry: Entry) -> bytes:
    """As it stands in a log."""
    return _HEAD.pack(entry.kind, entry.offset, entry.length, len(entry.data)) + entry.data


def read_log(path: Path) -> list[Entry]:
    """Every whole entry of a log."""
    data = path.read_bytes()
    found, at = [], 0
    while at + _HEAD.size <= len(data):
        kind, offset, length, follows = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        found.append(Entry(kind, offset, length, data[at : at + follows]))
        at += follows
    return found


class BlockDisk:
    """The disk, served by a process of its own while the context lasts.

    Args:
        work: An empty directory on fast storage, of this disk alone.
        size_bytes: Size of the disk.
    """

    def __init__(self, work: Path, size_bytes: int) -> None:
        self._front = work / "front"
        self._stem = work / "disk"
        self._size_bytes = size_bytes
        self._marks = -1
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> Path:
        """The file that a loop device may sit on."""
        return self._front / "disk"

    @property
    def log(self) -> Path:
        """Where the log is written."""
        return self._stem.with_suffix(".log")

    def __enter__(self) -> BlockDisk:
        self._front.mkdir()
        self._server = subprocess.Popen([sys.executable, __file__, str(self._front), str(self._size_bytes), str(self._stem)])
        try:
            deadline_s = time.monotonic() + _START_S
            while not self.path.exists():
                if self._server.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError("the FUSE disk does not start")
                time.sleep(0.02)
            self._marks = os.open(self._front / "marks", os.O_WRONLY)
        except BaseException:
            self.__exit__()
            raise
        return self

    def mark(self, **said: Any) -> None:
        """It stands in the log after everything that the disk has been told so far."""
        os.pwrite(self._marks, json.dumps(said).encode(), 0)

    def __exit__(self, *_: object) -> None:
        if self._marks >= 0:
            os.close(self._marks)
            self._marks = -1
        server, self._server = self._server, None
        if server is None:
            return
        try:
            # A detached loop device may hold its file a little longer.
            for _try in range(_STOP_TRIES):
                if server.poll() is not None or subprocess.run(["umount", self._front], capture_output=True, check=False).returncode == 0:
                    server.wait(_START_S)
                    return
                time.sleep(0.05)
        except subprocess.TimeoutExpired:
            pass
        subprocess.run(["umount", "--lazy", self._front], capture_output=True, check=False)
        server.kill()
        server.wait()


def serve(mount_point: str, size_bytes: int, stem: str) -> None:
    """The file is there until somebody unmounts it, or until whoever started this process is gone."""
    import mfusepy  # noqa: PLC0415  reading a log needs no FUSE

    from ridethrough.seam.process import die_with_parent  # noqa: PLC0415

    die_with_parent()

    class Disk(mfusepy.Operations):
        use_ns = True

        def __init__(self) -> None:
            self.disk = os.open(f"{stem}.img", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.ftruncate(self.disk, size_bytes)
            self.log = os.open(f"{stem}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def remember(self, entry: Entry) -> None:
            os.write(self.log, encode(entry))

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if path in ("/disk", "/marks"):
                return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size_bytes}
            raise mfusepy.FuseOSError(errno.ENOENT)

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", "disk", "marks"]

        def open(self, path: str, flags: int) -> int:
            return 1 if path == "/disk" else 2

        def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
            raise mfusepy.FuseOSError(errno.ENOSYS)  # any other answer, and the kernel asks again before each write

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(self.disk, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            if fh == 2:
                self.remember(Entry(MARK, data=data))
            else:
                os.pwrite(self.disk, data, offset)
                self.remember(Entry(WRITE, offset, len(data), data))
            return len(data)

        def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
            if mode & (_PUNCH_HOLE | _ZERO_RANGE):
                for at in range(offset, offset + length, 1 << 20):
                    os.pwrite(self.disk, bytes(min(1 << 20, offset + length - at)), at)
                self.remember(Entry(ZERO, offset, length))
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            self.remember(Entry(FLUSH))
            return 0

        def flush(self, path: str, fh: int) -> int:
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            return 0

        def release(self, path: str, fh: int) -> int:
            return 0

    mfusepy.FUSE(Disk(), mount_point, foreground=True, nothreads=True)


@contextlib.contextmanager
def xfs_commits_often() -> Iterator[None]:
    """XFS writes its log every second, on the whole machine, until the context ends: otherwise every 30 s, after a run has ended."""
    path = Path("/proc/sys/fs/xfs/xfssyncd_centisecs")
    before = path.read_text(encoding="ascii")
    path.write_text("100", encoding="ascii")
    try:
        yield
    finally:
        path.write_text(before, encoding="ascii")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])

"""A directory on a FUSE file system whose calls fail on request with an errno of the kernel, lie, or hang.

with FaultyDisk(work) as disk:
    disk.fail("fsync", errno.EIO)
    disk.hang()
    disk.heal()
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CHANGES = ("create", "write", "fsync", "fsyncdir", "mkdir", "rename", "unlink")
"""Calls that change the medium."""
EVERYTHING = (*CHANGES, "getattr", "open", "read", "readdir")
_START_S = 20.0


class FaultyDisk:
    """The directory, served by a process of its own while the context lasts.

    Args:
        work: An empty directory on the real file system that keeps the bytes.
    """

    def __init__(self, work: Path) -> None:
        self.path = work / "disk"
        self._back = work / "back"
        self._rule = work / "rule"
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FaultyDisk:
        for directory in (self.path, self._back):
            directory.mkdir(parents=True)
        self.heal()
        self._server = subprocess.Popen([sys.executable, __file__, str(self.path), str(self._back), str(self._rule)])
        deadline_s = time.monotonic() + _START_S
        while not os.path.ismount(self.path):
            if self._server.poll() is not None or time.monotonic() > deadline_s:
                self.__exit__()
                raise RuntimeError("the FUSE directory does not start")
            time.sleep(0.02)
        return self

    def fail(self, calls: str | Iterable[str], error: int) -> None:
        """These calls fail from now on."""
        self._say({"calls": [calls] if isinstance(calls, str) else list(calls), "error": error})

    def lie(self, calls: str | Iterable[str]) -> None:
        """These calls say yes from now on, and do nothing; a rename is made, but as a copy into the old file."""
        self._say({"calls": [], "error": 0, "lies": [calls] if isinstance(calls, str) else list(calls)})

    def hang(self) -> None:
        """No call comes back, as on a hard mount whose server is gone: whoever waits can be killed, and nothing else."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)
        os.waitpid(self._server.pid, os.WUNTRACED)  # a signal that is only sent leaves time for one more answer

    def heal(self) -> None:
        """Everything works again, also what hangs."""
        self._say({"calls": [], "error": 0})
        if self._server is not None:
            self._server.send_signal(signal.SIGCONT)

    def _say(self, rule: dict[str, Any]) -> None:
        temporary = self._rule.with_suffix(".new")
        temporary.write_text(json.dumps(rule), encoding="ascii")
        temporary.replace(self._rule)

    def __exit__(self, *_: object) -> None:
        self.heal()
        server, self._server = self._server, None
        if server is None:
            return
        subprocess.run(["umount", "--lazy", self.path], capture_output=True, check=False)
        server.kill()  # whoever still holds a file there gets an error; the bytes are on the real file system
        server.wait()


def serve(mount_point: str, back: str, rule_path: str) -> None:
    """The directory is there until somebody unmounts it, or until whoever started this process is gone."""
    import mfusepy

    from ridethrough.seam.process import die_with_parent

    die_with_parent()

    def obey(op: str) -> None:
        rule = json.loads(Path(rule_path).read_text(encoding="ascii"))
        if op in rule["calls"]:
            raise mfusepy.FuseOSError(rule["error"])

    def is_lie(op: str) -> bool:
        return op in json.loads(Path(rule_path).read_text(encoding="ascii")).get("lies", ())

    def obedient(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def obeying(*arguments: Any) -> Any:
            obey(op)
            if op != "rename" and is_lie(op):
                return 0
            try:
                return call(*arguments)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from None

        return obeying

    def copy(data: bytes, path: str) -> None:
        with open(path, "wb", buffering=0) as file:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                file.write(half)
                time.sleep(0.005)

    class Disk(mfusepy.Operations):
        use_ns = True

        def _at(self, path: str) -> str:
            return back + path

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            found = os.lstat(self._at(path))
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
            return {name: getattr(found, name) for name in names} | {f"st_{t}time": getattr(found, f"st_{t}time_ns") for t in "amc"}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(self._at(path))]

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(self._at(path), flags & (os.O_ACCMODE | os.O_APPEND))

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def flush(self, path: str, fh: int) -> int:
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(self._at(path), length)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(self._at(path), mode)
            return 0

        def rename(self, old: str, new: str) -> int:
            if is_lie("rename") and os.path.exists(self._at(new)):
                data = Path(self._at(old)).read_bytes()
                os.unlink(self._at(old))
                # After the answer: until then the FUSE library lets nobody else at the file.
                threading.Thread(target=copy, args=(data, self._at(new))).start()
                return 0
            os.rename(self._at(old), self._at(new))
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(self._at(path))
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(self._at(path))
            return 0

        def link(self, target: str, source: str) -> int:
            os.link(self._at(source), self._at(target))
            return 0

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(self._at(path), mode)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(self._at(path))
            return {name: getattr(found, name) for name in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize", "f_namemax")}

    for op in EVERYTHING:
        setattr(Disk, op, obedient(op, getattr(Disk, op)))
    # Attributes and entries are asked for each time: a cached answer would hide a fault.
    mfusepy.FUSE(Disk(), mount_point, foreground=True, attr_timeout=0, entry_timeout=0, negative_timeout=0)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3])

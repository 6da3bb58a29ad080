"""A small disk of its own, ext4 or XFS, whose power can be cut; or btrfs, which cannot be cut while it is mounted.

Needs root, loop devices and the ``mkfs`` of the file system; `missing_for_disks` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from types import TracebackType

from ridethrough.errors import Internal
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.process import LOGFLUSH, NOLOGFLUSH, cut_power_of, run_captured

CUT_JOURNAL_FLUSHED = LOGFLUSH
CUT = NOLOGFLUSH

_MKFS = {
    # Without these options mkfs leaves a kernel thread that writes to the disk behind our back.
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
    "btrfs": ("mkfs.btrfs", "-q", "-f", "-K"),
}
_COMMAND_S = 60.0
_UMOUNT_TRIES = 100


def missing_for_disks(file_system: str = "ext4") -> str | None:
    """What this machine lacks for a `LoopDisk` with this file system, or None if it can have one."""
    if os.geteuid() != 0:
        return "not root"
    if not os.path.exists("/dev/loop-control"):
        return "no loop devices (/dev/loop-control)"
    for program in (_MKFS[file_system][0], "losetup", "mount", "umount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    code, _ = run_captured(["losetup", "--find"], timeout_s=_COMMAND_S)
    return None if code == 0 else "no free loop device"


class LoopDisk:
    """A file system in a sparse image, mounted at `path` while the context lasts.

    Args:
        size_bytes: Size of the disk; XFS wants 300 MiB, btrfs 110 MiB.
        options: Mount options, comma separated.
        directory: Where image and mount point go; a temporary directory unless given.
        file_system: "ext4", "xfs" or "btrfs".

    Durability:
        After `cut` every call on the mount fails with EIO, and `remount` shows what a machine
        finds when its power comes back.
    """

    def __init__(self, size_bytes: int, *, options: str = "", directory: str | None = None, file_system: str = "ext4") -> None:
        self.size_bytes = size_bytes
        self.file_system = file_system
        self.options = options
        self._directory = directory
        self._work = ""
        self._device = ""
        self._is_mounted = False
        self.path = ""

    @property
    def image(self) -> str:
        """The file that is the medium."""
        return os.path.join(self._work, "disk.img")

    def __enter__(self) -> LoopDisk:
        self._work = tempfile.mkdtemp(prefix="ridethrough-disk-", dir=self._directory)
        try:
            self.path = os.path.join(self._work, "mnt")
            os.mkdir(self.path)
            with open(self.image, "wb") as file:
                file.truncate(self.size_bytes)
            _run(*_MKFS[self.file_system], self.image)
            self._device = _run("losetup", "--find", "--show", self.image).strip()
            self._mount()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def cut(self, flag: int = CUT) -> None:
        """The power of this disk is gone: nothing that was not durable will be seen again."""
        cut_power_of(self.path, flag)

    def unmount(self) -> None:
        """The path is an empty directory, as when the disk is not there. Idempotent."""
        clock = SystemClock()
        for left in range(_UMOUNT_TRIES, -1, -1):
            if not self._is_mounted:
                return
            # A process killed a moment ago may still hold a file open.
            code, _ = run_captured(["umount", self.path], timeout_s=_COMMAND_S)
            self._is_mounted = code != 0 and _is_listed(self.path)
            if self._is_mounted and left:
                clock.sleep(0.02)
        if self._is_mounted:
            raise Internal(detail=f"cannot unmount {self.path}: something still uses it")

    def remount(self, *, options: str | None = None) -> None:
        """The power is back: unmounted if it was mounted, journal replayed, mounted again.

        Args:
            options: Mount options from now on; as before unless given.

        Raises:
            Internal: What is mounted is still the file system that was cut.
        """
        self.unmount()
        if options is not None:
            self.options = options
        self._mount()
        try:
            os.listdir(self.path)
        except OSError as error:
            # Nothing was replayed, and whoever reads on would take that for a loss.
            raise Internal(detail=f"{self.path} is still cut: another mount namespace holds a copy of the mount") from error

    def close(self) -> None:
        """Nothing is left of it: no mount, no loop device, no file. Idempotent."""
        try:
            self.unmount()
        finally:
            if self._is_mounted:
                run_captured(["umount", "--lazy", self.path], timeout_s=_COMMAND_S)
                self._is_mounted = False
            if self._device:
                run_captured(["losetup", "--detach", self._device], timeout_s=_COMMAND_S)
                self._device = ""
            if self._work:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self._work)

    def _mount(self) -> None:
        _run("mount", "-t", self.file_system, *(["-o", self.options] if self.options else []), self._device, self.path)
        self._is_mounted = True


def _run(*argv: str) -> str:
    code, output = run_captured(argv, timeout_s=_COMMAND_S)
    if code:
        raise Internal(detail=f"{' '.join(argv)} ended with {code}")
    return output


def _is_listed(path: str) -> bool:
    """The kernel lists it as mounted. Not `ismount`: of an XFS that has shut down nobody can `lstat` the root."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        return any(line.split()[1] == path.replace(" ", "\\040") for line in file)

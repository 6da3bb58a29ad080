"""What the kernel says about a place for files, and the few calls that only a check of it makes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from ridethrough.seam.fs import reads_direct, translated

_OCTAL = re.compile(r"\\([0-7]{3})")
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.EACCES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of `/proc/self/mountinfo`."""

    point: str
    file_system: str
    source: str
    options: tuple[str, ...]
    """Of the mount, then of the file system."""
    device: str
    """`major:minor`."""

    def option(self, name: str) -> str | None:
        """The value of an option `name=value`; empty for a plain `name`, None if it is not there."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What `/sys/block` says about a disk; None for what it does not say."""

    name: str
    is_rotational: bool | None
    write_cache: str | None
    """`write back`: volatile, the kernel flushes it on fsync. `write through`: none that the drive admits to."""
    backing_file: str | None
    """Of a loop device."""


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """Every mount in the text of a `mountinfo`, in its order.

    Source: proc(5), /proc/pid/mountinfo.
    """
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not dash or len(left) < 6 or len(right) < 3:
            continue
        options = dict.fromkeys(option for option in (*left[5].split(","), *right[2].split(",")) if option)
        found.append(Mount(point=_plain(left[4]), file_system=right[0], source=_plain(right[1]), options=tuple(map(_plain, options)), device=left[2]))
    return tuple(found)


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda m: chr(int(m.group(1), 8)), text)


def mount_holding(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount that an absolute path without links lies in: the deepest, and of several on one point the last."""
    best: Mount | None = None
    for mount in mounts:
        is_above = mount.point == "/" or path == mount.point or path.startswith(f"{mount.point}/")
        if is_above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mount_of(path: str) -> Mount | None:
    """The mount that holds the path."""
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return mount_holding(os.path.realpath(path), parse_mounts(text))


def block_of(mount: Mount) -> Block | None:
    """The disk below the mount; None if there is none, as below memory and networks."""
    numbers = mount.device
    with contextlib.suppress(OSError, ValueError):  # in a container the device may have no name
        status = os.stat(mount.source)
        if stat.S_ISBLK(status.st_mode):
            numbers = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if numbers.startswith("0:"):
        return None
    disk = Path("/sys/dev/block", numbers).resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    rotational = _line(disk / "queue/rotational")
    return Block(
        name=disk.name,
        is_rotational=None if rotational is None else rotational == "1",
        write_cache=_line(disk / "queue/write_cache"),
        backing_file=_line(disk / "loop/backing_file"),
    )


def _line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None


def links(source: str, target: str) -> bool:
    """The file has a second name; False if this place has no hard links."""
    with translated(target, "link"):
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise
    return True


def reads_past_cache(path: str) -> bool:
    """The place can be asked for what is on the medium (O_DIRECT), which is what *verified* rests on."""
    with translated(path, "read with O_DIRECT"):
        return reads_direct(path)


def remove_tree(path: str) -> None:
    """The directory and everything in it is gone; links in it are removed and not followed. Absent is fine."""
    with translated(path, "remove"), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def process_space() -> str:
    """Names the set of processes among which a pid means something: containers have their own."""
    return str(os.stat("/proc/self/ns/pid").st_ino)

"""Which images a cut can leave of a logged disk, how to build them, and how to mount them.

Between two flushes a disk may have kept any of the writes it was told, in any order. So an image is everything up to a flush,
and some of the writes since: none, all so far, a random subset, or all so far with the last one torn. It can be what a cut
leaves at any position from its last write to the next flush, and what was acknowledged at all of them must be in it.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdisk import FLUSH, WRITE, Entry

MIB = 1 << 20
_COPY_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """A file system, and how a disk of it is made and mounted."""

    name: str
    size_bytes: int
    mkfs: tuple[str, ...]
    live_options: str
    """While the workload runs: background commits must fall into it, or unsynced saves look safe."""
    image_options: str


# No discard and no lazy initialisation: the log shall hold the workload and nothing else.
MEDIA = {
    "ext4": Medium(
        name="ext4",
        size_bytes=64 * MIB,
        mkfs=("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
        live_options="commit=1",
        image_options="",
    ),
    # The smallest that mkfs.xfs makes; a copy has the UUID of the disk it was taken of.
    "xfs": Medium(name="xfs", size_bytes=320 * MIB, mkfs=("mkfs.xfs", "-q", "-f", "-K"), live_options="", image_options="nouuid"),
    "btrfs": Medium(name="btrfs", size_bytes=128 * MIB, mkfs=("mkfs.btrfs", "-q", "-f", "-K", "-M"), live_options="commit=1", image_options=""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One image: everything before `epoch`, and of the writes since it those in `kept`."""

    kind: str
    epoch: int
    """Position of the first entry after the last flush."""
    kept: tuple[int, ...] = ()
    """Positions of the writes that reached the medium."""
    torn_bytes: int = 0
    """How much of the last one did; 0 for all of it."""
    first: int = 0
    last: int = 0
    """Between which positions of the log a cut can leave this image."""

    def __str__(self) -> str:
        kept = f"{len(self.kept)} writes up to {self.kept[-1]}" if self.kept else "no write"
        torn = f", the last one torn after {self.torn_bytes} bytes" if self.torn_bytes else ""
        return f"{self.kind}: flushed up to {self.epoch}, then {kept}{torn}; a cut between {self.first} and {self.last}"


def cuts_of(entries: Sequence[Entry], begin: int, *, chance: random.Random, randoms: int, grain_bytes: int) -> list[Cut]:
    """Every different image to be tried, in the order of the log.

    Args:
        entries: The log.
        begin: Where the workload begins in it.
        chance: Chooses subsets and places of tears.
        randoms: How many random subsets to take for each write.
        grain_bytes: Writes are torn at multiples of this; 0 for not at all.
    """
    cuts: list[Cut] = []
    epoch, earliest = begin, begin
    while epoch <= len(entries):
        flush = next((at for at in range(epoch, len(entries)) if entries[at].kind == FLUSH), len(entries))
        writes = [at for at in range(epoch, flush) if entries[at].is_change]
        is_last = flush == len(entries)
        if writes or is_last:  # otherwise the next flush changes nothing: it is the same image
            cuts.append(Cut(kind="none", epoch=epoch, first=earliest, last=flush))
        seen: set[tuple[int, ...]] = {()}
        # All writes before a flush are the same image as none after it, and belong to that one.
        whole = tuple(writes)
        for count in range(1, len(writes) + 1):
            so_far = whole[:count]
            seen.add(so_far)
            if count < len(writes) or is_last:
                cuts.append(Cut(kind="all", epoch=epoch, kept=so_far, first=so_far[-1] + 1, last=flush))
            entry = entries[so_far[-1]]
            if grain_bytes and entry.kind == WRITE and entry.length > grain_bytes:
                torn = grain_bytes * chance.randrange(1, -(-entry.length // grain_bytes))
                cuts.append(Cut(kind="torn", epoch=epoch, kept=so_far, torn_bytes=torn, first=so_far[-1] + 1, last=flush))
            for _ in range(randoms):
                some = tuple(at for at in so_far if chance.random() < 0.5)
                if some not in seen:
                    seen.add(some)
                    cuts.append(Cut(kind="random", epoch=epoch, kept=some, first=some[-1] + 1, last=flush))
        earliest = writes[-1] + 1 if writes else earliest
        epoch = flush + 1
    return cuts


def sample(cuts: list[Cut], count: int, chance: random.Random, acks: Sequence[int]) -> list[Cut]:
    """At most `count` of them in their order, 0 for all.

    Those that a cut soon after an acknowledgement can leave come first, since a lie about durability shows there; half of
    the others are images at a flush boundary.

    Args:
        cuts: All of them.
        count: How many to take.
        chance: Chooses.
        acks: Positions of the acknowledgements.
    """
    if not count or len(cuts) <= count:
        return cuts
    urgent = [at for at, cut in enumerate(cuts) if any(cut.epoch <= ack < cut.last for ack in acks)]
    chosen = set(chance.sample(urgent, min(len(urgent), count // 2)))
    boundaries = [at for at, cut in enumerate(cuts) if cut.kind == "none" and at not in chosen]
    others = [at for at, cut in enumerate(cuts) if cut.kind != "none" and at not in chosen]
    half = min(len(boundaries), (count - len(chosen)) // 2)
    chosen |= set(chance.sample(boundaries, half))
    chosen |= set(chance.sample(others, min(len(others), count - len(chosen))))
    return [cuts[at] for at in sorted(chosen)]


class Images:
    """Builds images of one log, in the order of the log.

    Args:
        work: Where they are put.
        entries: The log.
        size_bytes: Size of the disk.
    """

    def __init__(self, work: Path, entries: Sequence[Entry], size_bytes: int) -> None:
        self._work = work
        self._entries = entries
        self._size_bytes = size_bytes
        self._base = os.open(work / "base.img", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(self._base, size_bytes)
        self._applied = 0
        self._count = 0

    def __enter__(self) -> Images:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._base)

    def build(self, cut: Cut) -> Path:
        """The image is a file of its own."""
        while self._applied < cut.epoch:
            _apply(self._base, self._entries[self._applied])
            self._applied += 1
        assert self._applied == cut.epoch or cut.kind == "none", "images are built in the order of the log"
        self._count += 1
        path = self._work / f"cut-{self._count}.img"
        image = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(image, self._size_bytes)
            _copy(self._base, image)
            for at in cut.kept:
                _apply(image, self._entries[at], cut.torn_bytes if at == cut.kept[-1] else 0)
        finally:
            os.close(image)
        return path


def _apply(target: int, entry: Entry, torn_bytes: int = 0) -> None:
    if entry.kind == WRITE:
        data = memoryview(entry.data)[: torn_bytes or entry.length]
        for at in range(0, len(data), _COPY_BYTES):
            _put(target, data[at : at + _COPY_BYTES], entry.offset + at)
    elif entry.is_change:
        for at in range(0, entry.length, _COPY_BYTES):
            _put(target, memoryview(bytes(min(_COPY_BYTES, entry.length - at))), entry.offset + at)


def _put(target: int, data: memoryview, offset: int) -> None:
    if bytes(data).strip(b"\0"):
        os.pwrite(target, data, offset)
        return
    # Zeroes over a hole would only make every copy of the base longer.
    at, end = offset, offset + len(data)
    while at < end:
        try:
            at = os.lseek(target, at, os.SEEK_DATA)
        except OSError:
            return
        stop = min(os.lseek(target, at, os.SEEK_HOLE), end)
        if at < end:
            os.pwrite(target, bytes(stop - at), at)
        at = stop if stop > at else end


def _copy(source: int, target: int) -> None:
    at = 0
    while True:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            chunk = os.pread(source, min(_COPY_BYTES, end - at), at)
            os.pwrite(target, chunk, at)
            at += len(chunk)


@contextlib.contextmanager
def mounted(medium: Medium, image: Path, mount_point: Path, options: str) -> Iterator[bool]:
    """Its journal has been replayed and it is mounted, or not; then it is neither mounted nor there any more."""
    wanted = ",".join(part for part in ("loop", options) if part)
    done = subprocess.run(["mount", "-t", medium.name, "-o", wanted, image, mount_point], capture_output=True, check=False)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", mount_point], check=True)
        image.unlink()

"""A file system in memory that knows what a power cut at any of its calls may leave."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Collection, Iterator
from typing import Any

from ridethrough.seam.fs import FileStat, Usage, Writer, read_whole, translated
from ridethrough.testing.crash_cuts import State, Timeline
from ridethrough.testing.crash_model import EXHAUSTIVE_STATES, Call, Change, Entry, Image, Medium, Page, Profile, Size

_NAME_BYTES = 255
_inodes = itertools.count(2)


class CrashFS:
    """Keeps the promise of `seam.fs.FileSystem` in memory, records every call, and enumerates what a power cut may leave.

    ``for state in fs.timeline.states(): check(state.fs, state.marks)`` visits, for a cut after each
    call, the legal states of the disk. `Timeline.mark` puts on record what was said meanwhile.
    Several disks that are given one timeline are cut together, or one beside the others.

    Args:
        profile: What the file system promises beyond its syncs.
        page_bytes: What is written whole or not at all; 512 is harsher than any disk in use.
        capacity_bytes: Room for data; beyond it writes and reservations are refused as on a full disk.
        root: A directory that is there at the beginning, durably, with its parents.
        name: Names the disk on its timeline.
        timeline: Where its calls are recorded; one of its own unless given.
        seed: For a timeline of its own.
    """

    publishes_whole = False

    def __init__(
        self,
        *,
        profile: Profile = "posix",
        page_bytes: int = 4096,
        capacity_bytes: int = 1 << 30,
        root: str = "/disk",
        name: str = "disk",
        timeline: Timeline | None = None,
        seed: int = 0,
    ) -> None:
        dirs: dict[int, dict[str, int]] = {1: {}}
        at = 1
        for part in filter(None, root.split("/")):
            inode = next(_inodes)
            dirs[at][part] = inode
            dirs[inode] = {}
            at = inode
        self.profile: Profile = profile
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes
        self.name = name
        self._adopt(Image(1, dirs, {}), timeline or Timeline(seed=seed))

    def _adopt(self, image: Image, timeline: Timeline) -> None:
        self._base = image
        self._dirs, self._files = dict(image.dirs), dict(image.files)
        self._used_bytes: int | None = None
        self._changed_at: dict[int, int] = {}
        self._known: dict[str, int] = {}
        self.timeline = timeline
        if self.name in timeline.disks:
            raise ValueError(f"two disks named {self.name!r}")
        timeline.disks[self.name] = self

    def reborn(self, image: Image, timeline: Timeline) -> CrashFS:
        """A disk like this one that holds the image, durably."""
        fs = object.__new__(CrashFS)
        fs.profile, fs.page_bytes, fs.capacity_bytes, fs.name = self.profile, self.page_bytes, self.capacity_bytes, self.name
        fs._adopt(image, timeline)
        return fs

    def medium(self) -> Medium:
        """The disk as it was before the first call, for playing the calls back."""
        return Medium(self.profile, self._base.root, dict(self._base.dirs), dict(self._base.files), self.page_bytes)

    def mark(self, said: Any) -> None:
        """`Timeline.mark` of its timeline."""
        self.timeline.mark(said)

    def states(self, *, limit: int = EXHAUSTIVE_STATES, random_count: int = 32, only: Collection[int] | None = None) -> Iterator[State]:
        """`Timeline.states` of its timeline."""
        return self.timeline.states(limit=limit, random_count=random_count, only=only)

    def flip_bit(self, path: str, at_byte: int, bit: int = 0) -> None:
        """The synced file on the medium differs in one bit, and nobody says so; a negative place counts from the end."""
        with self.timeline.lock:
            inode = self._file(path)
            data = bytearray(self._files[inode])
            data[at_byte % len(data)] ^= 1 << bit
            self._files[inode] = bytes(data)
            self._record("flip_bit", path, synced=inode, flipped=bytes(data))

    # -- finding ---------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> int:
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._walk(path)
        return known

    def _walk(self, path: str) -> int:
        at = [self._base.root]
        for name in path.split("/"):
            entries = self._dirs.get(at[-1])
            if entries is None:
                raise _error(errno.ENOTDIR, path)
            if name == "..":
                at = at[:-1] or at
            elif name and name != ".":
                child = entries.get(name)
                if child is None:
                    raise _error(errno.ENAMETOOLONG if len(os.fsencode(name)) > _NAME_BYTES else errno.ENOENT, path)
                at.append(child)
        return at[-1]

    def _parent(self, path: str) -> tuple[int, str]:
        """The directory that holds, or would hold, the last name of a path."""
        head, _, name = path.rstrip("/").rpartition("/")
        parent = self._find(head)
        if parent not in self._dirs:
            raise _error(errno.ENOTDIR, path)
        if name in ("", ".", ".."):
            raise _error(errno.EBUSY, path)
        return parent, name

    def _child(self, parent: int, name: str, path: str) -> int:
        """The inode that has the name in a directory; 0 if none has."""
        if len(os.fsencode(name)) > _NAME_BYTES:
            raise _error(errno.ENAMETOOLONG, path)
        return self._dirs[parent].get(name, 0)

    def _file(self, path: str) -> int:
        inode = self._find(path)
        if inode in self._dirs:
            raise _error(errno.EISDIR, path)
        return inode

    # -- recording -------------------------------------------------------------------------------------------------

    def _record(
        self, name: str, path: str, *changes: Change, synced: int = 0, new_dir: int = 0, new_file: int = 0, flipped: bytes | None = None
    ) -> None:
        calls = self.timeline.calls
        calls.append(Call(disk=self.name, name=name, path=path, changes=changes, synced=synced, new_dir=new_dir, new_file=new_file, flipped=flipped))
        for change in changes:
            if isinstance(change, Entry):
                for half in filter(None, (change.gone, change.made)):
                    self._changed_at[half[0]] = len(calls)
            else:
                self._changed_at[change.file] = len(calls)

    def _entry(self, *, gone: tuple[int, str, int] | None = None, made: tuple[int, str, int] | None = None) -> Entry:
        """The change, made for every reader; an image's own dictionaries stay as they are."""
        self._known.clear()
        if gone is not None:
            self._dirs[gone[0]] = {name: inode for name, inode in self._dirs[gone[0]].items() if name != gone[1]}
        if made is not None:
            replaced = self._dirs[made[0]].get(made[1])
            if replaced is not None and replaced in self._files:
                self._use(-len(self._files[replaced]))
            self._dirs[made[0]] = {**self._dirs[made[0]], made[1]: made[2]}
        elif gone is not None and gone[2] in self._files:
            self._use(-len(self._files[gone[2]]))
        return Entry(next(self.timeline.serials), gone, made)

    def _used(self) -> int:
        if self._used_bytes is None:
            named = {inode for entries in self._dirs.values() for inode in entries.values()}
            self._used_bytes = sum(len(data) for inode, data in self._files.items() if inode in named)
        return self._used_bytes

    def _use(self, size_bytes: int) -> None:
        self._used_bytes = self._used() + size_bytes

    # -- the protocol ----------------------------------------------------------------------------------------------

    def create(self, path: str, size_bytes: int) -> Writer:
        with self.timeline.lock:
            with translated(path, "create"):
                parent, name = self._parent(path)
                if self._child(parent, name, path):
                    raise _error(errno.EEXIST, path)
                inode = self._new_file("create", path, parent, name)
            if size_bytes:
                if self._used() + size_bytes > self.capacity_bytes:
                    self.remove(path)
                    with translated(path, "reserve space"):
                        raise _error(errno.ENOSPC, path)
                self._use(size_bytes)
                self._files[inode] = bytes(size_bytes)
                # A reservation shows in the length, as posix_fallocate's does, and is no more durable than a write.
                self._record("reserve", path, Size(next(self.timeline.serials), inode, size_bytes))
            return _CrashWriter(self, path, inode)

    def _new_file(self, call: str, path: str, parent: int, name: str) -> int:
        inode = next(_inodes)
        self._files[inode] = b""
        self._record(call, path, self._entry(made=(parent, name, inode)), new_file=inode)
        return inode

    def write_at(self, inode: int, path: str, at_byte: int, data: bytes) -> None:
        """What `Writer.write` does; on a full disk what fits is written."""
        with self.timeline.lock, translated(path, "write"):
            old = self._files[inode]
            room = self.capacity_bytes - self._used() + len(old) - at_byte
            fits = data[: max(room, 0)] if at_byte + len(data) > len(old) else data
            end = at_byte + len(fits)
            new = old[:at_byte] + fits + old[end:]
            changes: list[Change] = []
            if len(new) > len(old):
                self._use(len(new) - len(old))
                changes.append(Size(next(self.timeline.serials), inode, len(new)))
            for index in range(at_byte // self.page_bytes, -(-end // self.page_bytes) if fits else 0):
                page = new[index * self.page_bytes : (index + 1) * self.page_bytes]
                changes.append(Page(next(self.timeline.serials), inode, index, page))
            self._files[inode] = new
            self._record("write", path, *changes)
            if len(fits) < len(data):
                raise _error(errno.ENOSPC, path)

    def sync_file(self, inode: int, path: str) -> None:
        """What `Writer.sync` does."""
        with self.timeline.lock:
            self._record("sync", path, synced=inode)

    def append(self, path: str, data: bytes) -> None:
        # The lock is taken for each part: other users of the disk may come in between, as on a real one.
        with self.timeline.lock, translated(path, "append"):
            parent, name = self._parent(path)
            inode = self._child(parent, name, path)
            if inode in self._dirs:
                raise _error(errno.EISDIR, path)
            created = not inode
            if created:
                inode = self._new_file("create", path, parent, name)
            self.write_at(inode, path, len(self._files[inode]), data)
        self.sync_file(inode, path)
        if created:
            self.sync_dir(os.path.dirname(path))

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        return read_whole(self, path, max_bytes=max_bytes, past_cache=past_cache)

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        with self.timeline.lock:
            self._looked("read_into", path)
            found = self._files[self._file(path)][offset : offset + len(buffer)]
            buffer[: len(found)] = found
            return len(found)

    def stat(self, path: str) -> FileStat:
        with self.timeline.lock:
            inode = self._looked("stat", path)
            size = 0 if inode in self._dirs else len(self._files[inode])
            return FileStat(size_bytes=size, is_dir=inode in self._dirs, modified_s=float(self._changed_at.get(inode, 0)))

    def list_dir(self, path: str) -> list[str]:
        with self.timeline.lock:
            self._looked("list_dir", path)
            return sorted(self._dir(path))

    def _looked(self, call: str, path: str) -> int:
        """Most of the time of a check goes into reads: translating costs only where there is an error."""
        try:
            inode = self._find(path)
        except OSError:
            with translated(path, call):
                raise
        self.timeline.calls.append(Call(self.name, call, path))
        return inode

    def _dir(self, path: str) -> dict[str, int]:
        entries = self._dirs.get(self._find(path))
        if entries is None:
            raise _error(errno.ENOTDIR, path)
        return entries

    def make_dir(self, path: str) -> bool:
        with self.timeline.lock, translated(path, "mkdir"):
            try:
                parent, name = self._parent(path)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    return False
                raise
            if self._child(parent, name, path):
                return False
            inode = next(_inodes)
            self._dirs[inode] = {}
            self._record("make_dir", path, self._entry(made=(parent, name, inode)), new_dir=inode)
            return True

    def rename(self, source: str, target: str) -> None:
        with self.timeline.lock, translated(target, "rename"):
            from_dir, from_name = self._parent(source)
            to_dir, to_name = self._parent(target)
            inode = self._child(from_dir, from_name, source)
            if not inode:
                raise _error(errno.ENOENT, source)
            there = self._child(to_dir, to_name, target)
            if inode in self._dirs and to_dir in self._below(inode):
                raise _error(errno.EINVAL, target)
            if there == inode:
                self._record("rename", target)
                return
            if there:
                if inode in self._dirs and there not in self._dirs:
                    raise _error(errno.ENOTDIR, target)
                if inode not in self._dirs and there in self._dirs:
                    raise _error(errno.EISDIR if from_dir not in self._below(there) else errno.ENOTEMPTY, target)
                if self._dirs.get(there):
                    raise _error(errno.ENOTEMPTY, target)
            entry = self._entry(gone=(from_dir, from_name, inode), made=(to_dir, to_name, inode))
            self._record("rename", target, entry)

    def _below(self, inode: int) -> set[int]:
        found = {inode}
        for child in self._dirs.get(inode, {}).values():
            found |= self._below(child)
        return found

    def remove(self, path: str) -> None:
        with self.timeline.lock, translated(path, "remove"):
            try:
                parent, name = self._parent(path)
            except FileNotFoundError:
                return
            inode = self._child(parent, name, path)
            if not inode:
                return
            if self._dirs.get(inode):
                raise _error(errno.ENOTEMPTY, path)
            self._record("remove", path, self._entry(gone=(parent, name, inode)))

    def sync_dir(self, path: str) -> None:
        with self.timeline.lock, translated(path, "fsync of directory"):
            self._dir(path)
            self._record("sync_dir", path, synced=self._find(path))

    def usage(self, path: str) -> Usage:
        with self.timeline.lock, translated(path, "usage"):
            self._find(path)
            self._record("usage", path)
            return Usage(total_bytes=self.capacity_bytes, free_bytes=max(self.capacity_bytes - self._used(), 0))


class _CrashWriter:
    def __init__(self, fs: CrashFS, path: str, inode: int) -> None:
        self._fs = fs
        self._path = path
        self._inode = inode
        self._at_byte = 0

    def write(self, data: bytes | memoryview) -> None:
        self._require_open("write")
        found = bytes(memoryview(data).cast("B"))
        self._fs.write_at(self._inode, self._path, self._at_byte, found)
        self._at_byte += len(found)

    def sync(self) -> None:
        self._require_open("fsync")
        self._fs.sync_file(self._inode, self._path)

    def close(self) -> None:
        self._inode = 0

    def _require_open(self, doing: str) -> None:
        with translated(self._path, doing):
            if not self._inode:
                raise _error(errno.EBADF, self._path)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)

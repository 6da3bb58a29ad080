"""Wrappers over a file system, each with one named fault.

They stack: ``ErrorOn(RecordingFileSystem(PosixFileSystem()), …)``. Reads and writes reach the real
storage underneath; only the named fault is added.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ridethrough.errors import StorageError
from ridethrough.seam.fs import FileStat, FileSystem, Usage, Writer, read_whole, translated

Hook = Callable[[str, str], None]
"""Called with the name of a call and its path."""

READS = frozenset({"read", "read_into", "stat", "list_dir", "usage"})
"""Calls that change nothing on the medium."""


class RecordingFileSystem:
    """Every call is recorded in order, and a hook runs before and after each.

    Calls are named as in `FileSystem`; those of a writer are ``write``, ``sync`` and ``close``
    with the path of its file. `rename` is recorded with its target.

    Args:
        inner: Where the calls go.
        before: Runs before each call; what it raises is what the caller sees, and the call is not made.
        after: Runs after each call that succeeded; what it raises reaches the caller although the call was made.
    """

    def __init__(self, inner: FileSystem, *, before: Hook | None = None, after: Hook | None = None) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self._before = before
        self._after = after

    @property
    def publishes_whole(self) -> bool:
        return self.inner.publishes_whole

    def enter(self, call: str, path: str) -> None:
        """Record the call, then run the first hook; subclasses put their fault here."""
        self.calls.append((call, path))
        if self._before is not None:
            self._before(call, path)

    def leave(self, call: str, path: str) -> None:
        """The call has been made; subclasses put a late fault here."""
        if self._after is not None:
            self._after(call, path)

    def changes(self) -> list[tuple[str, str]]:
        """The recorded calls that change the medium, as (call, last part of the path)."""
        return [(call, os.path.basename(path)) for call, path in self.calls if call not in READS and call != "close"]

    def create(self, path: str, size_bytes: int) -> Writer:
        self.enter("create", path)
        writer = RecordingWriter(self, path, self.inner.create(path, size_bytes))
        try:
            self.leave("create", path)
        except BaseException:
            writer.inner.close()
            raise
        return writer

    def append(self, path: str, data: bytes) -> None:
        self.enter("append", path)
        self.inner.append(path, data)
        self.leave("append", path)

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        self.enter("read", path)
        data = self.inner.read(path, max_bytes=max_bytes, past_cache=past_cache)
        self.leave("read", path)
        return data

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        self.enter("read_into", path)
        got = self.inner.read_into(path, buffer, offset=offset, past_cache=past_cache)
        self.leave("read_into", path)
        return got

    def stat(self, path: str) -> FileStat:
        self.enter("stat", path)
        found = self.inner.stat(path)
        self.leave("stat", path)
        return found

    def list_dir(self, path: str) -> list[str]:
        self.enter("list_dir", path)
        names = self.inner.list_dir(path)
        self.leave("list_dir", path)
        return names

    def make_dir(self, path: str) -> bool:
        self.enter("make_dir", path)
        made = self.inner.make_dir(path)
        self.leave("make_dir", path)
        return made

    def rename(self, source: str, target: str) -> None:
        self.enter("rename", target)
        self.inner.rename(source, target)
        self.leave("rename", target)

    def remove(self, path: str) -> None:
        self.enter("remove", path)
        self.inner.remove(path)
        self.leave("remove", path)

    def sync_dir(self, path: str) -> None:
        self.enter("sync_dir", path)
        self.inner.sync_dir(path)
        self.leave("sync_dir", path)

    def usage(self, path: str) -> Usage:
        self.enter("usage", path)
        found = self.inner.usage(path)
        self.leave("usage", path)
        return found


class RecordingWriter:
    """A writer whose calls its file system records."""

    def __init__(self, fs: RecordingFileSystem, path: str, inner: Writer) -> None:
        self.inner = inner
        self._fs = fs
        self._path = path

    def write(self, data: bytes | memoryview) -> None:
        self._fs.enter("write", self._path)
        self.inner.write(data)
        self._fs.leave("write", self._path)

    def sync(self) -> None:
        self._fs.enter("sync", self._path)
        self.inner.sync()
        self._fs.leave("sync", self._path)

    def close(self) -> None:
        try:
            self._fs.enter("close", self._path)
        except StorageError:
            self.inner.close()  # a failed close still frees the descriptor
            raise
        self.inner.close()
        self._fs.leave("close", self._path)


class ErrorOn(RecordingFileSystem):
    """One call fails with an error of the operating system.

    Args:
        inner: Where the other calls go.
        call: Name of the call as `RecordingFileSystem` records it, or ``"*"`` for any.
        error: The errno.
        nth: Which of the matching calls fails, from 1; later ones too if `is_lasting`.
        within: Only calls whose path contains this text count.
        is_lasting: Every matching call from the nth on fails, as on a disk that stays full.
        is_late: The call is made and reported as failed all the same.
    """

    def __init__(
        self,
        inner: FileSystem,
        call: str,
        error: int,
        *,
        nth: int = 1,
        within: str = "",
        is_lasting: bool = False,
        is_late: bool = False,
    ) -> None:
        super().__init__(inner)
        self._call = call
        self._error = error
        self._nth = nth
        self._within = within
        self._is_lasting = is_lasting
        self._is_late = is_late
        self.seen_count = 0
        self.failed: list[tuple[str, str]] = []

    def enter(self, call: str, path: str) -> None:
        super().enter(call, path)
        if self._call in ("*", call) and self._within in path:
            self.seen_count += 1
            if not self._is_late:
                self._fail(call, path)

    def leave(self, call: str, path: str) -> None:
        if self._is_late and self._call in ("*", call) and self._within in path:
            self._fail(call, path)

    def _fail(self, call: str, path: str) -> None:
        if self.seen_count == self._nth or (self._is_lasting and self.seen_count > self._nth):
            self.failed.append((call, path))
            with translated(path, call):
                raise OSError(self._error, os.strerror(self._error), path)


class FlipBit(RecordingFileSystem):
    """Reads of one file come back with one bit flipped; the medium itself stays as it is.

    Args:
        inner: Where the calls go.
        within: Text in the path of the file.
        at_byte: Place of the bit in the file.
        bit: Which bit of that byte.
        is_moving: Each read flips the next bit instead of the same one: a fault of the path to the medium.
    """

    def __init__(self, inner: FileSystem, *, within: str, at_byte: int, bit: int = 0, is_moving: bool = False) -> None:
        super().__init__(inner)
        self._within = within
        self._at_byte = at_byte
        self._bit = bit
        self._is_moving = is_moving

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        data = bytearray(super().read(path, max_bytes=max_bytes, past_cache=past_cache))
        self._flip(path, memoryview(data), 0, len(data))
        return bytes(data)

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        got = super().read_into(path, buffer, offset=offset, past_cache=past_cache)
        self._flip(path, buffer, offset, got)
        return got

    def _flip(self, path: str, view: memoryview, offset: int, length: int) -> None:
        if self._within in path and offset <= self._at_byte < offset + length:
            view[self._at_byte - offset] ^= 1 << self._bit
            if self._is_moving:
                self._bit = (self._bit + 1) % 8


class TruncateOnce(RecordingFileSystem):
    """The first file created whose path contains `within` loses its second half once it is closed, and nobody says so."""

    def __init__(self, inner: FileSystem, *, within: str) -> None:
        super().__init__(inner)
        self._within = within
        self._is_done = False

    def leave(self, call: str, path: str) -> None:
        super().leave(call, path)
        if call == "close" and self._within in path and not self._is_done:
            self._is_done = True
            os.truncate(path, os.stat(path).st_size // 2)


class ShortRead(RecordingFileSystem):
    """Reads of files whose path contains `within` return only the first half, although the file has its length.

    Args:
        inner: Where the calls go.
        within: Text in the path.
        times: How many reads are short; all unless given.
    """

    def __init__(self, inner: FileSystem, *, within: str, times: int | None = None) -> None:
        super().__init__(inner)
        self._within = within
        self._left = times

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        return super().read_into(path, buffer[: self._cut(path, len(buffer))], offset=offset, past_cache=past_cache)

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        return read_whole(self, path, max_bytes=max_bytes, past_cache=past_cache)

    def _cut(self, path: str, length: int) -> int:
        if self._within not in path or self._left == 0:
            return length
        if self._left is not None:
            self._left -= 1
        return length // 2


class DropSyncs(RecordingFileSystem):
    """No fsync reaches the storage: what every save looks like that forgot them. A crash test must fail with it."""

    def create(self, path: str, size_bytes: int) -> Writer:
        self.enter("create", path)
        return _UnsyncedWriter(self.inner.create(path, size_bytes))

    def append(self, path: str, data: bytes) -> None:
        self.enter("append", path)
        with translated(path, "append"):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            with contextlib.closing(os.fdopen(descriptor, "wb")) as file:
                file.write(data)

    def sync_dir(self, path: str) -> None:
        self.enter("sync_dir", path)


class DropDirSyncs(RecordingFileSystem):
    """No fsync of a directory reaches the storage: bytes are there after a cut, names perhaps not. A crash test must fail with it."""

    def sync_dir(self, path: str) -> None:
        self.enter("sync_dir", path)


class _UnsyncedWriter:
    def __init__(self, inner: Writer) -> None:
        self._inner = inner

    def write(self, data: bytes | memoryview) -> None:
        self._inner.write(data)

    def sync(self) -> None:
        return

    def close(self) -> None:
        self._inner.close()


def flip_bit(path: str, at_byte: int, bit: int = 0) -> None:
    """The file on the medium differs in one bit; a negative place counts from the end."""
    with open(path, "r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        place = at_byte % size
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ (1 << bit)]))

"""The only door to storage.

`FileSystem` is the promise, `PosixFileSystem` keeps it on Linux. What a call promises about
power loss is said with each method; what it does not promise, a caller must not rely on.
Errors of the operating system become ours here, so that everybody above can tell
*unreachable now* (retry) from *full* or *denied* (do not) from *damaged* (never an OSError).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat as stat_module
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ridethrough.errors import StorageDenied, StorageError, StorageUnreachable, StoreFull, StoreReadOnly

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", -1), errno.EFBIG}
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system says that knows no hard links."""
_DENIED = {errno.EACCES, errno.EPERM}
_UNREACHABLE = {
    getattr(errno, name, -1)
    for name in (
        "EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "ENODEV", "ENXIO", "ECONNRESET", "ENOLINK", "ESHUTDOWN",
    )
}  # fmt: skip
# O_DIRECT wants memory, offset and length aligned to the logical block; 4 KiB covers every disk in use.
_ALIGN = 4096
_READ_BLOCK_BYTES = 4 << 20
# Reading works on every system; these two exist on some.
_O_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_O_BINARY = getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """What a directory entry says; sizes in bytes, times only for people."""

    size_bytes: int
    is_dir: bool
    modified_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Space of the file system that holds a path."""

    total_bytes: int
    free_bytes: int


class Writer(Protocol):
    """One new file, being written front to back by its creator."""

    def write(self, data: bytes | memoryview) -> None:
        """All of `data` is handed to the file system; nothing is durable yet."""

    def sync(self) -> None:
        """Everything written so far survives power loss, but not yet the file's name."""

    def close(self) -> None:
        """The descriptor is gone. Idempotent; promises nothing about durability."""


class FileSystem(Protocol):
    """What the store needs of storage. Paths are absolute strings."""

    @property
    def publishes_whole(self) -> bool:
        """A file has its name only once all of it is durable (`Writer.sync`): there is no need to write it under another one first."""

    def create(self, path: str, size_bytes: int) -> Writer:
        """A new, empty file with `size_bytes` reserved; FileExistsError if the name is taken."""

    def append(self, path: str, data: bytes) -> None:
        """`data` is at the end of the file (created if absent) and survives power loss, name included."""

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        """The whole file, at most `max_bytes`; `past_cache` asks the medium and not the page cache."""

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""

    def stat(self, path: str) -> FileStat:
        """Size and kind; FileNotFoundError if absent."""

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted; FileNotFoundError if absent."""

    def make_dir(self, path: str) -> bool:
        """The directory exists; True if this call made it. Not durable until its parent is synced."""

    def rename(self, source: str, target: str) -> None:
        """The entry has the new name for every reader. Not durable until the directory is synced."""

    def remove(self, path: str) -> None:
        """The file or empty directory has no name any more; absent is fine. Durable as for rename."""

    def sync_dir(self, path: str) -> None:
        """All earlier entry changes in this directory survive power loss."""

    def usage(self, path: str) -> Usage:
        """Space left for us (not for root) on the file system that holds `path`."""


@contextlib.contextmanager
def translated(path: str, doing: str) -> Iterator[None]:
    """OSError becomes ours, with path and errno kept; not-found and already-exists stay as they are."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError):
        raise
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        kind: type[StorageError] = StorageError
        if error.errno in _FULL:
            kind = StoreFull
        elif error.errno == errno.EROFS:
            kind = StoreReadOnly
        elif error.errno in _DENIED:
            kind = StorageDenied
        elif error.errno in _UNREACHABLE:
            kind = StorageUnreachable
        raise kind(detail=f"{name} on {doing}", path=path) from error


class PosixWriter:
    """A file created by `PosixFileSystem.create`."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with translated(self._path, "write"):
            while view:
                view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        # Without this the bytes are only in the page cache. After an error here the kernel has dropped
        # the dirty pages, so a second fsync would lie: the caller must give this file up.
        with translated(self._path, "fsync"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # Network file systems report a failed write-back only here.
            with translated(self._path, "close"):
                os.close(descriptor)


def read_whole(fs: FileSystem, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
    """`FileSystem.read` by way of `stat` and `read_into`.

    Raises:
        StorageUnreachable: The read came back short although the file has its length: not a torn file.
    """
    size = fs.stat(path).size_bytes
    if size > max_bytes:
        raise StorageError(detail=f"{size} bytes where at most {max_bytes} make sense", path=path)
    buffer = bytearray(size)
    got = fs.read_into(path, memoryview(buffer), past_cache=past_cache)
    if got < size and fs.stat(path).size_bytes >= size:
        raise StorageUnreachable(detail=f"short read, {got} of {size} bytes", path=path)
    return bytes(buffer[:got])


def names_in(fs: FileSystem, path: str) -> list[str]:
    """`FileSystem.list_dir`; a directory that is not there has none."""
    try:
        return fs.list_dir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


class PosixFileSystem:
    """Local and network file systems mounted on Linux."""

    publishes_whole = False

    def create(self, path: str, size_bytes: int) -> Writer:
        with translated(path, "create"):
            descriptor = _create_exclusively(path)
        try:
            if size_bytes:
                # ENOSPC must come here, before anything is at risk, and not in the middle of the payload.
                with translated(path, "reserve space"):
                    try:
                        os.posix_fallocate(descriptor, 0, size_bytes)
                    except OSError as error:
                        # Some network file systems cannot reserve; writes will then report a full disk.
                        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                            raise
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):  # the reservation failed; an empty leftover is pruned later
                os.unlink(path)
            raise
        return PosixWriter(path, descriptor)

    def append(self, path: str, data: bytes) -> None:
        with translated(path, "append"):
            created = not os.path.lexists(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                # A record that is not on the medium when its decision is acted on might as well not exist.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if created:
            self.sync_dir(os.path.dirname(path))  # without it the first records lose their file's name

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        return read_whole(self, path, max_bytes=max_bytes, past_cache=past_cache)

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        with translated(path, "read"):
            if past_cache and offset % _ALIGN == 0 and hasattr(os, "O_DIRECT"):
                got = _read_direct(path, buffer, offset)
                if got is not None:
                    return got
            # A pipe in a file's place must not hang us: opened without waiting, and refused below.
            with open(os.open(path, os.O_RDONLY | _O_NONBLOCK | _O_BINARY), "rb", buffering=0) as file:
                if not stat_module.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise IsADirectoryError(errno.EISDIR, "not a regular file", path)
                if past_cache and hasattr(os, "posix_fadvise"):
                    # No O_DIRECT here (tmpfs, some FUSE): the best there is makes the kernel forget clean pages.
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(offset)
                done = 0
                while done < len(buffer):
                    got = file.readinto(buffer[done : done + _READ_BLOCK_BYTES])
                    if not got:
                        break
                    done += got
                return done

    def stat(self, path: str) -> FileStat:
        with translated(path, "stat"):
            found = os.stat(path)
        return FileStat(size_bytes=found.st_size, is_dir=stat_module.S_ISDIR(found.st_mode), modified_s=found.st_mtime)

    def list_dir(self, path: str) -> list[str]:
        with translated(path, "list"):
            return sorted(os.listdir(path))

    def make_dir(self, path: str) -> bool:
        with translated(path, "mkdir"):
            try:
                os.mkdir(path, 0o755)
            except FileExistsError:
                return False
            return True

    def rename(self, source: str, target: str) -> None:
        # Atomic for readers: the old entry or the new one, never neither.
        with translated(target, "rename"):
            os.rename(source, target)

    def remove(self, path: str) -> None:
        with translated(path, "remove"):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            except IsADirectoryError:
                os.rmdir(path)

    def sync_dir(self, path: str) -> None:
        with translated(path, "fsync of directory"):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Without this a rename, create or remove may be undone by a power cut.
                os.fsync(descriptor)
                # On an XFS that has shut itself down (its disk failed) fsync of a directory that was opened before says yes to
                # what is lost. Opening it again tells.
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            finally:
                os.close(descriptor)

    def usage(self, path: str) -> Usage:
        with translated(path, "usage"):
            found = shutil.disk_usage(path)
        return Usage(total_bytes=found.total, free_bytes=found.free)


def name_new(source: str, target: str) -> None:
    """The file or directory has the new name for every reader; FileExistsError if the name is taken, also meanwhile.

    Not durable until the directory is synced.
    """
    with translated(target, "name"):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if not os.path.isdir(source):
            try:
                # A link and not a rename, which would replace what somebody else has put there since.
                os.link(source, target)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
            else:
                os.unlink(source)
                return
        os.rename(source, target)  # of a directory: refused where the target is one that is not empty


def sync_tree(path: str) -> None:
    """Everything in and below the directory survives power loss, but not yet its own name."""
    with translated(path, "fsync"):
        for directory, _, names in os.walk(path, topdown=False, onerror=_raise):
            # Whoever wrote the files was not us: without this their bytes may be in the page cache only, then their names.
            for place in (*(os.path.join(directory, name) for name in names), directory):
                descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error


def _create_exclusively(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except PermissionError as error:
        # SFTP has no code for "the name is taken": sshfs says EPERM to whoever loses a race for it.
        if error.errno == errno.EPERM and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        raise


def reads_direct(path: str) -> bool:
    """The file (not empty) can be read with O_DIRECT."""
    return _read_direct(path, memoryview(bytearray(_ALIGN)), 0) is not None


def _read_direct(path: str, buffer: memoryview, offset: int) -> int | None:
    """Fill the buffer with O_DIRECT; None where the file system cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT | _O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    done = 0
    try:
        block = mmap.mmap(-1, min(_READ_BLOCK_BYTES, -(-max(len(buffer), 1) // _ALIGN) * _ALIGN))
        view = memoryview(block)
        try:
            while done < len(buffer):
                try:
                    got = os.preadv(descriptor, [view], offset + done)
                except OSError as error:
                    if error.errno == errno.EINVAL and not done:
                        return None
                    raise
                if not got:
                    break
                take = min(got, len(buffer) - done)
                buffer[done : done + take] = view[:take]
                done += take
                if got % _ALIGN:
                    break
        finally:
            view.release()
            block.close()
        return done
    finally:
        os.close(descriptor)

"""A private directory for files on their way to or from another machine; nothing of it stays."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator

from ridethrough.errors import StorageError
from ridethrough.seam.fs import translated


class Staging:
    """A directory in TMPDIR, made when it is first needed and gone with this object or this process.

    What a power cut or a SIGKILL left behind is removed by the next one with the same name: gigabytes would pile up.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"ridethrough-{name}-{os.getuid()}-"
        self._directory: str | None = None
        self._lock = threading.Lock()

    @property
    def directory(self) -> str:
        """Where it is."""
        with self._lock:
            if self._directory is None:
                with _never_absent("TMPDIR"):
                    _remove_left_behind(self._prefix)
                    self._directory, descriptor = _make_locked(self._prefix)
                weakref.finalize(self, _remove, self._directory, descriptor, os.getpid())
            return self._directory

    def make_room(self) -> str:
        """An empty directory for one file."""
        with _never_absent(self.directory):
            return tempfile.mkdtemp(dir=self.directory)

    def remove_room(self, room: str) -> None:
        """It is gone with what is in it."""
        shutil.rmtree(room, ignore_errors=True)

    @contextlib.contextmanager
    def room(self) -> Iterator[str]:
        """An empty directory while the context lasts."""
        room = self.make_room()
        try:
            yield room
        finally:
            self.remove_room(room)


@contextlib.contextmanager
def _never_absent(path: str) -> Iterator[None]:
    """A staging directory that cannot be had is not to be taken for a far file that is not there."""
    try:
        with translated(path, "stage"):
            yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(path=path, detail=f"stage: {error.strerror}") from error


def _make_locked(prefix: str) -> tuple[str, int]:
    while True:
        directory = tempfile.mkdtemp(prefix=prefix)
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The lock says that its owner lives; the kernel drops it with the process.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.isdir(directory):
                return directory, descriptor
        except BlockingIOError:
            pass  # somebody who cleans up was quicker than our lock
        os.close(descriptor)


def _remove_left_behind(prefix: str) -> None:
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)]
    for directory in found:
        with contextlib.suppress(OSError):  # it lives, or somebody else has just removed it
            descriptor = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(directory)
            finally:
                os.close(descriptor)


def _remove(directory: str, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # a child that was forked meanwhile shares it and must leave it alone
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)

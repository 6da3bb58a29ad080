"""Storage that answers within a time, with an error if it has nothing else to say.

A mount whose server is gone may hang a read or a write for ever. Nobody can take such a call back, but whoever waits
for it can go away.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ridethrough.errors import StorageError, StorageUnreachable
from ridethrough.seam.fs import FileStat, FileSystem, Usage, Writer

T = TypeVar("T")


class BoundedFileSystem:
    """A file system of which every call ends within `limit_s`. For one thread at a time.

    A call that was given up may still be made later, while this process lives: whoever is told so must treat it as a
    power cut does, done or not. Until it has come back every other call is refused at once, so that none overtakes it.

    Args:
        inner: Where the calls go.
        limit_s: Longer than any call takes on storage that is only slow.

    Raises:
        StorageUnreachable: From every call that did not end in time.
    """

    def __init__(self, inner: FileSystem, *, limit_s: float) -> None:
        self._inner = inner
        self._limit_s = limit_s
        self._worker: _Worker | None = None

    @property
    def publishes_whole(self) -> bool:
        return self._inner.publishes_whole

    def ask(self, path: str, doing: str, call: Callable[[], T]) -> T:
        """What the call returns or raises, or that it did not come back."""
        worker = self._worker = self._worker or _Worker()
        if not worker.is_free():
            raise StorageUnreachable(path=path, detail=f"{worker.doing} has not come back, so no {doing}")
        answer = worker.ask(call, doing, self._limit_s)
        if answer is None:
            raise StorageUnreachable(path=path, detail=f"no answer within {self._limit_s:g} s on {doing}")
        found, error = answer
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """No thread of ours is left; one that hangs ends when its call comes back. Another call may follow all the same."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def create(self, path: str, size_bytes: int) -> Writer:
        return _BoundedWriter(self, path, self.ask(path, "create", lambda: self._inner.create(path, size_bytes)))

    def append(self, path: str, data: bytes) -> None:
        self.ask(path, "append", lambda: self._inner.append(path, data))

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        return self.ask(path, "read", lambda: self._inner.read(path, max_bytes=max_bytes, past_cache=past_cache))

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        return self.ask(path, "read", lambda: self._inner.read_into(path, buffer, offset=offset, past_cache=past_cache))

    def stat(self, path: str) -> FileStat:
        return self.ask(path, "stat", lambda: self._inner.stat(path))

    def list_dir(self, path: str) -> list[str]:
        return self.ask(path, "list", lambda: self._inner.list_dir(path))

    def make_dir(self, path: str) -> bool:
        return self.ask(path, "mkdir", lambda: self._inner.make_dir(path))

    def rename(self, source: str, target: str) -> None:
        self.ask(target, "rename", lambda: self._inner.rename(source, target))

    def remove(self, path: str) -> None:
        self.ask(path, "remove", lambda: self._inner.remove(path))

    def sync_dir(self, path: str) -> None:
        self.ask(path, "fsync of directory", lambda: self._inner.sync_dir(path))

    def usage(self, path: str) -> Usage:
        return self.ask(path, "usage", lambda: self._inner.usage(path))


class _BoundedWriter:
    def __init__(self, fs: BoundedFileSystem, path: str, inner: Writer) -> None:
        self._fs = fs
        self._path = path
        self._inner = inner

    def write(self, data: bytes | memoryview) -> None:
        self._fs.ask(self._path, "write", lambda: self._inner.write(data))

    def sync(self) -> None:
        self._fs.ask(self._path, "fsync", self._inner.sync)

    def close(self) -> None:
        self._fs.ask(self._path, "close", self._inner.close)


class _Worker:
    """A thread that makes one call after the other."""

    def __init__(self) -> None:
        self.doing = ""
        self._is_awaited = False
        """An answer is still to come that nobody waits for any more."""
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        # A daemon: a call that never comes back must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="ridethrough-storage", daemon=True)
        self._thread.start()

    def is_free(self) -> bool:
        """No call is under way: what came of one that was given up is dropped."""
        if self._is_awaited:
            with contextlib.suppress(queue.Empty):
                _drop(self._answers.get_nowait()[0])
                self._is_awaited = False
        return not self._is_awaited

    def ask(self, call: Callable[[], Any], doing: str, limit_s: float) -> tuple[Any, BaseException | None] | None:
        """What came of the call: a result or an error; None if nothing did in time."""
        self.doing, self._is_awaited = doing, True
        self._calls.put(call)
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=limit_s)
            self._is_awaited = False
            return answer
        return None

    def end(self) -> None:
        """The thread is gone, or will be when its call comes back."""
        self._calls.put(None)
        if self.is_free():
            self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put((call(), None))
            except BaseException as error:  # noqa: BLE001  raised where the call was asked for
                self._answers.put((None, error))


def _drop(found: Any) -> None:
    if hasattr(found, "close"):  # a file that was made after all
        with contextlib.suppress(StorageError):
            found.close()

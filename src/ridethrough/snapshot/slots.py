"""Slots: the memory of one snapshot of one rank.

A slot is laid out so that each part in it already *is* the file that will be written::

    header (one page) | part payload (safetensors) … | index (JSON: step, parts, trees, meta)

Pins are locks of the kernel on the slot's memory: the trainer writes under an exclusive lock, the
persister reads under a shared one. The kernel drops a lock with its process, so nobody's death
leaves a slot locked, and a header that says *posted* under its own checksum is a whole snapshot.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from ridethrough.errors import Damaged
from ridethrough.seam.process import reopen

PAGE = 4096
_HEADER = struct.Struct("<8sIIQQQ")
_MAGIC = b"RTSLOT01"
_WRITING, _POSTED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPart:
    """A part inside a posted slot."""

    name: str
    payload: memoryview
    tree: Any


def aligned(size_bytes: int) -> int:
    """The next page border."""
    return -(-size_bytes // PAGE) * PAGE


class Slot:
    """One mapped slot, for its writer or a reader. `close` unmaps it.

    Args:
        descriptor: The memory; closed here after a private reopen, so that locks are our own.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = reopen(descriptor)
        os.close(descriptor)
        self.size_bytes = os.fstat(self._descriptor).st_size
        self.memory = mmap.mmap(self._descriptor, self.size_bytes)

    def close(self) -> None:
        """Unmapped and unlocked. Views handed out must be gone."""
        if self._descriptor >= 0:
            self.memory.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, how: int) -> bool:
        try:
            # Without the lock a slot could be overwritten while the persister reads it: a mixed checkpoint.
            fcntl.flock(self._descriptor, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def begin(self) -> bool:
        """The slot is ours to write and holds no snapshot any more; False if somebody reads it."""
        if not self._lock(fcntl.LOCK_EX):
            return False
        self._write_header(_WRITING, 0, 0, 0, 0)
        return True

    def post(self, step: int, index: dict[str, Any], index_at: int) -> None:
        """The slot is a whole snapshot of `step`, for any reader, from now on."""
        text = json.dumps(index, separators=(",", ":"), allow_nan=False).encode()
        if index_at + len(text) > self.size_bytes:
            raise ValueError("the index does not fit in the slot")
        self.memory[index_at : index_at + len(text)] = text
        # Before the header: whoever sees it posted must be able to pin it at once. Only this process writes here.
        self.release()
        # The header comes last: until it says posted, under its checksum, nobody takes the slot for whole.
        self._write_header(_POSTED, len(text), step, index_at, xxhash.xxh3_64_intdigest(text))

    def release(self) -> None:
        """The pin or write lock is given back."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _write_header(self, state: int, length: int, step: int, index_at: int, index_sum: int) -> None:
        head = _HEADER.pack(_MAGIC, state, length, step, index_at, index_sum)
        self.memory[: len(head) + 8] = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))

    def posted_step(self) -> int | None:
        """The step of the whole snapshot in this slot, None if there is none."""
        head = self.memory[: _HEADER.size + 8]
        if xxhash.xxh3_64_intdigest(head[: _HEADER.size]) != struct.unpack_from("<Q", head, _HEADER.size)[0]:
            return None
        magic, state, _, step, _, _ = _HEADER.unpack_from(head)
        return int(step) if magic == _MAGIC and state == _POSTED else None

    def pin(self, step: int) -> bool:
        """The snapshot of `step` stays in this slot until `release`; False if it is not there any more."""
        if not self._lock(fcntl.LOCK_SH):
            return False
        if self.posted_step() != step:
            self.release()
            return False
        return True

    def read(self) -> tuple[tuple[SlotPart, ...], dict[str, Any]]:
        """The parts and the index of a pinned slot."""
        _, _, length, _, index_at, index_sum = _HEADER.unpack_from(self.memory)
        text = self.memory[index_at : index_at + length]
        if xxhash.xxh3_64_intdigest(text) != index_sum:
            raise Damaged(path="slot", detail="the index of a snapshot in memory does not match its checksum")
        index = json.loads(text)
        view = memoryview(self.memory)
        parts = tuple(
            SlotPart(name=part["name"], payload=view[part["at"] : part["at"] + part["size_bytes"]], tree=part["tree"]) for part in index["parts"]
        )
        return parts, index

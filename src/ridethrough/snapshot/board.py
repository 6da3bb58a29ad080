"""A small shared page: one writer, many readers, never torn.

Two halves are written in turn, each with a generation and a checksum, so that a writer killed in
mid-write leaves the previous value readable. Neither side ever blocks the other.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any

import xxhash

_HEAD = struct.Struct("<QQI")


class Board:
    """A JSON object in shared memory.

    Args:
        descriptor: The memory; this object maps it and closes the descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self._half = size // 2
        self._generation = self._newest()[0]

    def write(self, value: dict[str, Any]) -> None:
        """Readers see this value."""
        payload = json.dumps(value, separators=(",", ":"), default=str).encode()
        if _HEAD.size + len(payload) > self._half:
            raise ValueError(f"{len(payload)} bytes do not fit on a board of {self._half}")
        self._generation += 1
        at = self._half * (self._generation % 2)
        self._map[at + _HEAD.size : at + _HEAD.size + len(payload)] = payload
        self._map[at : at + _HEAD.size] = _HEAD.pack(self._generation, self._sum(self._generation, payload), len(payload))

    def read(self) -> dict[str, Any]:
        """The newest whole value; empty if nothing was ever written."""
        return self._newest()[1]

    @property
    def generation(self) -> int:
        """Changes whenever the value does; far cheaper than reading it."""
        return max(int(_HEAD.unpack_from(self._map, at)[0]) for at in (0, self._half))

    def close(self) -> None:
        """The memory is unmapped. Idempotent."""
        self._map.close()

    @staticmethod
    def _sum(generation: int, payload: bytes) -> int:
        return xxhash.xxh3_64_intdigest(payload, seed=generation)

    def _newest(self) -> tuple[int, dict[str, Any]]:
        # A half may be overwritten while it is read; the other is then whole. Twice in a row needs two writes.
        for left in range(7, -1, -1):
            newest = self.generation
            found: list[tuple[int, bytes]] = []
            for at in (0, self._half):
                generation, checksum, length = _HEAD.unpack_from(self._map, at)
                payload = self._map[at + _HEAD.size : at + _HEAD.size + min(length, self._half)]
                if generation and self._sum(generation, payload) == checksum:
                    found.append((generation, payload))
            if found:
                generation, payload = max(found)
                # Older than what was there before: we were overtaken twice, and a reader must not go back. The last try
                # takes what is whole, for a writer killed in its header announces a value that never comes.
                if generation >= newest or not left:
                    return generation, json.loads(payload)
            elif newest == 0:
                break
        return 0, {}

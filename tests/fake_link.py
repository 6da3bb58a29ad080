"""Memory by name, without a keeper."""

from __future__ import annotations

import os

from ridethrough.seam import process
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.link import board_bytes
from ridethrough.snapshot.slots import Slot


class FakeLink:
    """Keeps the promise of `KeeperLink` as far as memory goes."""

    path = "no keeper"

    def __init__(self) -> None:
        self._memory: dict[str, tuple[int, int]] = {}

    def names(self) -> dict[str, int]:
        return {name: size for name, (_, size) in list(self._memory.items())}

    def descriptor(self, op: str, *, name: str, size_bytes: int = 0) -> int:
        assert op == "memory"
        held = self._memory.get(name)
        if held is None or (size_bytes and held[1] != size_bytes):
            held = self._memory[name] = (process.memory_file("test", size_bytes), size_bytes)
        return os.dup(held[0])

    def board(self, name: str, size_bytes: int = 0) -> Board:
        return Board(self.descriptor("memory", name=name, size_bytes=size_bytes or board_bytes(name)))

    def slot(self, name: str, size_bytes: int = 0) -> Slot:
        return Slot(self.descriptor("memory", name=name, size_bytes=size_bytes))

    def close(self) -> None:
        for descriptor, _ in self._memory.values():
            os.close(descriptor)
        self._memory.clear()

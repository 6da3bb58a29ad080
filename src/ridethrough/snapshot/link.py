"""Talking to the keeper: who asks what, and the names of shared memory."""

from __future__ import annotations

import os
import socket
from typing import Any

from ridethrough.errors import KeeperGone, RideThroughError, StoreLocked
from ridethrough.seam import net
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.slots import Slot

SOCKET_VARIABLE = "RIDETHROUGH_SOCKET"
LAUNCH_VARIABLE = "RIDETHROUGH_LAUNCH"
FRESH_VARIABLE = "RIDETHROUGH_FRESH"
RESTART_VARIABLE = "RIDETHROUGH_RESTART"
"""Set once a launch of the command has got through its start agreement: a wish for a fresh start is fulfilled."""

CONTROL = "control"
"""Board written by the supervisor: launch, announced save, stop, flush."""
PERSIST = "persist"
"""Board written by the persister: what is durable, verified, failed."""
COURIER = "courier"
"""Board written by the courier: what it holds of other nodes, and where it listens."""
COPIER = "copier/"
"""Beginning of the names of boards that copiers write, one a tier."""
BOARD_BYTES = 64 << 10
NAMES_BYTES = 1 << 20
"""Boards that name nodes: when many are dark, many of them, several times; of the memory only what is used exists."""
PLAN_BYTES = 32 << 20

_ANSWER_S = 10.0


def board_bytes(name: str) -> int:
    """How large a board of that name is: the same for whoever opens it first."""
    return NAMES_BYTES if name in (CONTROL, PERSIST) else BOARD_BYTES


def copier_board(tier: str) -> str:
    """Board written by the copier of a tier: what it is at, what is there, what went wrong."""
    return f"{COPIER}{tier}"


def rank_board(launch: int, rank: int) -> str:
    """Board written by a rank: where it is."""
    return f"{launch}/rank/{rank}"


def plan_board(launch: int) -> str:
    """Board written once by the first rank of the node: what the start agreement decided."""
    return f"{launch}/plan"


def slot_name(launch: int, rank: int, index: int) -> str:
    """Memory of one slot."""
    return f"{launch}/slot/{rank}/{index}"


def replica_slot(launch: int, rank: int, index: int) -> str:
    """Memory of one snapshot of the private part of a rank on another node."""
    return f"{launch}/replica/{rank}/{index}"


class KeeperLink:
    """A connection to the keeper. One per thread."""

    def __init__(self, socket_path: str, *, role: str, timeout_s: float = _ANSWER_S, **facts: Any) -> None:
        self._connection: socket.socket = net.connect(socket_path, timeout_s=timeout_s)
        self.path = socket_path
        self.hello = self.request("hello", role=role, pid=os.getpid(), **facts)

    def close(self) -> None:
        """Hung up. Idempotent."""
        self._connection.close()

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        net.send(self._connection, message)
        answer, descriptors = net.receive(self._connection)
        error = answer.get("error")
        if error is not None:
            raise _rebuild(error)
        return answer, descriptors

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        """The keeper's answer.

        Raises:
            KeeperGone: It is dead or does not answer.
            StoreLocked: Another keeper owns the run.
        """
        answer, descriptors = self._ask({"op": op, **fields})
        for descriptor in descriptors:
            os.close(descriptor)
        return answer

    def descriptor(self, op: str, **fields: Any) -> int:
        """A descriptor that the keeper holds; the caller owns the copy."""
        _, descriptors = self._ask({"op": op, **fields})
        if len(descriptors) != 1:
            raise KeeperGone(detail=f"{op} {fields} brought {len(descriptors)} descriptors")
        return descriptors[0]

    def names(self) -> dict[str, int]:
        """All shared memory and its sizes."""
        found = self.request("names")["names"]
        return {str(name): int(size) for name, size in found.items()}

    def board(self, name: str, size_bytes: int = 0) -> Board:
        """A board, made if it is not there yet, with the size that boards of this name have unless another is given."""
        return Board(self.descriptor("memory", name=name, size_bytes=size_bytes or board_bytes(name)))

    def slot(self, name: str, size_bytes: int = 0) -> Slot:
        """A slot; made with that size if it is not there yet."""
        return Slot(self.descriptor("memory", name=name, size_bytes=size_bytes))

    def wait_for_end(self) -> None:
        """Returns when the keeper dies."""
        self._connection.settimeout(None)
        try:
            while True:
                net.receive(self._connection)
        except KeeperGone:
            return


def _rebuild(error: dict[str, Any]) -> RideThroughError:
    if error.get("code") == StoreLocked.code:
        return StoreLocked(path=error["path"], holder=error["holder"])
    return KeeperGone(detail=str(error.get("message", error)))

"""Where a drill takes place: nodes that can lose their power, as real as this machine allows."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Protocol

from ridethrough.drill import machine
from ridethrough.drill.cluster import Cluster
from ridethrough.errors import DrillFailed, UsageError
from ridethrough.seam import process


class Site(Protocol):
    """Nodes, on from the start."""

    realism: str
    names: tuple[str, ...]
    shared: str | None
    """Where every node has the file server, if there is one."""

    @property
    def disk(self) -> str:
        """Where every node has its own disk."""

    @property
    def interface(self) -> str:
        """Through which a node reaches the others."""

    def address(self, name: str) -> str:
        """The node's address."""

    def seen(self, name: str, path: str) -> str:
        """How the drill reaches a file of the node."""

    def start(self, name: str, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        """The node's command runs, its output in the log, which is not on the node."""

    def has_ended(self, name: str) -> int | None:
        """Exit code of the node's command, None while it runs or if there is none."""

    def cut(self, names: Iterable[str]) -> None:
        """The power is gone: link, processes and everything that was not synced, at one instant."""

    def power_on(self, names: Iterable[str]) -> None:
        """The nodes are up, after the recovery of their file systems. Their command is not given."""

    def set_links(self, names: Iterable[str], *, is_up: bool) -> None:
        """The nodes' cables are in or out."""

    def part(self, *groups: Iterable[str]) -> None:
        """Nodes of different groups do not hear each other."""

    def heal(self) -> None:
        """All hear each other again."""

    def await_shared(self, names: Iterable[str]) -> None:
        """The nodes have mounted the file server."""

    def close(self) -> None:
        """Nothing of it is left on this machine. Idempotent."""


def free_port() -> int:
    """A TCP port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """Without root: one node, and of it only processes. The page cache survives the cut, so this proves nothing about the disk."""

    realism = "process"
    names: tuple[str, ...] = ("n0",)
    shared: str | None = None
    interface = "lo"

    def __init__(self) -> None:
        self.disk = tempfile.mkdtemp(prefix="ridethrough-drill-")
        self._command: subprocess.Popen[bytes] | None = None

    def address(self, name: str) -> str:
        return "127.0.0.1"

    def seen(self, name: str, path: str) -> str:
        return path

    def start(self, name: str, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        self._command = subprocess.Popen(list(argv), env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def has_ended(self, name: str) -> int | None:
        return self._command.poll() if self._command else None

    def _pids(self) -> list[int]:
        if self._command is None or self._command.poll() is not None:
            return []
        return [self._command.pid, *process.descendants(self._command.pid)]

    def cut(self, names: Iterable[str]) -> None:
        for _ in range(100):
            pids = self._pids()
            if not pids:
                return
            process.send_signal(pids, signal.SIGKILL)
            time.sleep(0.02)
        raise DrillFailed(detail=f"processes survive SIGKILL: {pids}")

    def power_on(self, names: Iterable[str]) -> None:
        """Nothing to do: only processes were lost."""

    def set_links(self, names: Iterable[str], *, is_up: bool) -> None:
        raise DrillFailed(detail="without root there are no links to cut")

    def part(self, *groups: Iterable[str]) -> None:
        raise DrillFailed(detail="without root there are no links to cut")

    def heal(self) -> None:
        """Nothing was parted."""

    def await_shared(self, names: Iterable[str]) -> None:
        """There is no file server."""

    def close(self) -> None:
        self.cut(self.names)
        shutil.rmtree(self.disk, ignore_errors=True)


def make_site(names: Sequence[str], *, has_server: bool = False) -> Site:
    """The most real nodes that this machine allows.

    Raises:
        UsageError: Several nodes are asked for, and this machine allows none.
    """
    why = machine.missing(has_server=has_server)
    if why is None:
        return Cluster(names, has_server=has_server)
    if len(names) > 1 or has_server:
        raise UsageError(detail=f"a drill of several nodes needs root, loop devices and namespaces: {why}")
    return Processes()

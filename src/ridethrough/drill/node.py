"""Virtual nodes: something whose power can be cut for real on one machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from ridethrough.errors import DrillFailed
from ridethrough.seam import process

DISK_BYTES = 512 << 20
_WAIT_S = 10.0


class Node(Protocol):
    """A machine that can lose its power."""

    realism: str
    disk: str
    """A directory on the node's own disk."""

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        """The command runs on the node, its standard error in the log, which is not on the node."""

    def has_ended(self) -> int | None:
        """Exit code of the command, None while it runs."""

    def cut(self) -> None:
        """The power is gone: link, processes and everything that was not synced, at one instant."""

    def restore_power(self) -> None:
        """The disk is mounted again, after the recovery of its file system."""

    def close(self) -> None:
        """Nothing of the node is left on this machine. Idempotent."""


def free_port() -> int:
    """A TCP port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ProcessNode:
    """Without root: processes only. The page cache survives the cut, so this proves nothing about the disk."""

    realism = "process"

    def __init__(self) -> None:
        self.disk = tempfile.mkdtemp(prefix="ridethrough-drill-")
        self._command: subprocess.Popen[bytes] | None = None

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        self._command = subprocess.Popen(list(argv), env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def has_ended(self) -> int | None:
        return self._command.poll() if self._command else None

    def _pids(self) -> list[int]:
        if self._command is None or self._command.poll() is not None:
            return []
        return [self._command.pid, *process.descendants(self._command.pid)]

    def cut(self) -> None:
        for _ in range(100):
            pids = self._pids()
            if not pids:
                return
            process.send_signal(pids, signal.SIGKILL)
            time.sleep(0.02)
        raise DrillFailed(detail=f"processes survive SIGKILL: {pids}")

    def restore_power(self) -> None:
        """Nothing to do: only processes were lost."""

    def close(self) -> None:
        self.cut()
        shutil.rmtree(self.disk, ignore_errors=True)


class NamespaceNode:
    """As root: a network namespace, an ext4 disk on a loop device, and the processes in them."""

    realism = "netns+fs-shutdown"

    def __init__(self) -> None:
        self._name = f"rt-{uuid.uuid4().hex[:8]}"
        self._work = tempfile.mkdtemp(prefix="ridethrough-drill-")
        self._image = os.path.join(self._work, "disk.img")
        self.disk = os.path.join(self._work, "disk")
        self._command: subprocess.Popen[bytes] | None = None
        self._is_mounted = self._has_namespace = False
        try:
            os.mkdir(self.disk)
            with open(self._image, "wb") as image:
                image.truncate(DISK_BYTES)
            _run("mkfs.ext4", "-q", "-F", self._image)
            _run("ip", "netns", "add", self._name)
            self._has_namespace = True
            _run("ip", "-n", self._name, "link", "set", "lo", "up")
            self.restore_power()
        except BaseException:
            self.close()
            raise

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        entered = ["nsenter", f"--net=/var/run/netns/{self._name}", "--", *argv]
        self._command = subprocess.Popen(entered, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def has_ended(self) -> int | None:
        return self._command.poll() if self._command else None

    def _pids(self) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self._name).split()]

    def cut(self) -> None:
        # First the disk: from this instant on nothing can become durable, so nothing later can be acknowledged.
        process.cut_power_of(self.disk)
        _run("ip", "-n", self._name, "link", "set", "lo", "down")
        self._kill()
        self._unmount()

    def _kill(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            if self._command is not None:
                self._command.poll()
            pids = self._pids()
            if not pids:
                return
            process.send_signal(pids, signal.SIGKILL)
            time.sleep(0.01)
        raise DrillFailed(detail=f"processes survive SIGKILL: {pids}")

    def _unmount(self) -> None:
        if self._is_mounted:
            _run("umount", self.disk)
            self._is_mounted = False
        deadline = time.monotonic() + _WAIT_S
        # The kernel may hold the image a moment longer; mounting it twice would damage it.
        while _run("losetup", "-j", self._image) and time.monotonic() < deadline:
            time.sleep(0.02)

    def restore_power(self) -> None:
        _run("mount", "-o", "loop", self._image, self.disk)
        self._is_mounted = True
        _run("ip", "-n", self._name, "link", "set", "lo", "up")

    def close(self) -> None:
        if self._has_namespace:
            self._kill()
        with contextlib.suppress(DrillFailed):  # a half-built node has less to take down
            self._unmount()
        if self._has_namespace:
            _run("ip", "netns", "del", self._name)
            self._has_namespace = False
        shutil.rmtree(self._work, ignore_errors=True)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise DrillFailed(detail=f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def missing_for_namespaces() -> str | None:
    """Why power cannot be cut for real here, None if it can."""
    if os.geteuid() != 0:
        return "not root"
    absent = [name for name in ("ip", "nsenter", "mkfs.ext4", "losetup", "mount", "umount") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (packages iproute2, util-linux, e2fsprogs)"
    if not Path("/dev/loop-control").exists():
        return "no loop devices"
    return None


def make_node() -> Node:
    """The most real node that this machine allows."""
    return NamespaceNode() if missing_for_namespaces() is None else ProcessNode()

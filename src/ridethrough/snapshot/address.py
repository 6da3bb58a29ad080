"""Where a run's keeper answers on this node. Everything here is on local disk."""

from __future__ import annotations

import contextlib
import os
import uuid

from ridethrough.seam import process
from ridethrough.seam.bounded import BoundedFileSystem
from ridethrough.seam.clock import boot_id
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.commit import ensure_dir, publish
from ridethrough.store.start import run_key


def _directory(name: str) -> str:
    directory = os.path.join(process.state_dir(), name)
    ensure_dir(PosixFileSystem(), directory)
    return directory


def new_socket_path() -> str:
    """A path for a new keeper's socket; its directory exists, and sockets of keepers that were killed are gone."""
    directory = _directory("sockets")
    for name in os.listdir(directory):
        pid = name.partition("-")[0]
        if pid.isdigit() and not process.is_alive(int(pid)):
            with contextlib.suppress(FileNotFoundError):  # another start was faster
                os.unlink(os.path.join(directory, name))
    return os.path.join(directory, f"{os.getpid()}-{uuid.uuid4().hex[:8]}.sock")


def lock_path(run_dir: str) -> str:
    """The lock of a run on this node; its directory exists. The lock's text says who holds it and where it answers."""
    return os.path.join(_directory("locks"), f"{run_key(run_dir)}.lock")


def log_path(run_dir: str) -> str:
    """Where a keeper that a training script has started writes its messages."""
    return os.path.join(_directory("logs"), f"{run_key(run_dir)}.log")


def real_path(path: str, *, limit_s: float) -> str:
    """The run's directory without links.

    Raises:
        StorageUnreachable: The disk does not answer within `limit_s`. A guess would give one run two names, and two locks.
    """
    storage = BoundedFileSystem(PosixFileSystem(), limit_s=limit_s)
    try:
        return storage.ask(os.path.abspath(path), "look up", lambda: os.path.realpath(path))
    finally:
        storage.close()  # whoever asks may be about to fork


def remember_alias(path: str, run_dir: str) -> None:
    """`find_socket` knows the run also by this path (through a link, say), without having to look at the disk it is on."""
    if os.path.abspath(path) != run_dir:
        publish(PosixFileSystem(), os.path.join(_directory("aliases"), run_key(path)), run_dir.encode("utf-8", "surrogateescape"))


def find_socket(run_dir: str) -> str | None:
    """Where the keeper of a run answers, None if none lives; never touches the run directory."""
    alias = os.path.join(process.state_dir(), "aliases", run_key(run_dir))
    with contextlib.suppress(FileNotFoundError), open(alias, encoding="utf-8", errors="surrogateescape") as file:
        run_dir = file.read()
    path = os.path.join(process.state_dir(), "locks", f"{run_key(run_dir)}.lock")
    with contextlib.suppress(OSError, ValueError, IndexError):  # no lock, or one that was never filled in: nobody keeps the run
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
        started, _, boot = lines[2].partition(" ")
        # After a power cut another process may have the number.
        if boot == boot_id() and process.is_alive(int(lines[0]), int(started)):
            return lines[1]
    return None

"""Finding or starting the keeper of a run, from inside the training process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from ridethrough.errors import KeeperGone, StoreLocked
from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.snapshot.address import find_socket, lock_path, log_path, new_socket_path
from ridethrough.snapshot.link import LAUNCH_VARIABLE, SOCKET_VARIABLE, KeeperLink

_START_S = 30.0


def launch_from_environment() -> int | None:
    """The launch that `ridethrough run` started this process for, None if it did not."""
    return int(os.environ[LAUNCH_VARIABLE]) if SOCKET_VARIABLE in os.environ else None


def attach(clock: Clock, run_dir: str, *, rank: int) -> KeeperLink:
    """A link to the keeper that owns the run on this node.

    Under `ridethrough run` that is the command's own keeper, which does not own the run before
    `claim`, and this process dies with its launcher from now on: the kernel sees to it, even if
    the process is stopped. Otherwise a keeper is found or started; it outlives this process to
    save what it leaves in memory.

    Raises:
        StoreLocked: A `ridethrough run` owns the run, and this process is not part of it.
        KeeperGone: No keeper could be reached or started.
    """
    process.require_linux("ridethrough.Checkpointer")
    socket_path = os.environ.get(SOCKET_VARIABLE)
    if socket_path:
        process.die_with_parent()
        return KeeperLink(socket_path, role="trainer", rank=rank)
    lock = process.FileLock(lock_path(run_dir) + ".start")
    deadline_s = clock.monotonic_s() + _START_S
    is_started = False
    try:
        while clock.monotonic_s() < deadline_s:
            found = find_socket(run_dir)
            link = _library_link(found, run_dir, rank=rank) if found is not None else None
            if link is not None:
                return link
            if found is None and not is_started and _try_lock(lock, run_dir):
                # One of the node's ranks starts the keeper; the others wait for it.
                process.start_detached([sys.executable, "-m", "ridethrough.supervisor.start", run_dir, new_socket_path()], log_path=log_path(run_dir))
                is_started = True
            clock.sleep(0.05)
    finally:
        lock.release()
    raise KeeperGone(detail=f"none answered within {_START_S:.0f} s, see {log_path(run_dir)}")


def _library_link(socket_path: str, run_dir: str, *, rank: int) -> KeeperLink | None:
    """A link to the keeper that owns the run; None if it does not answer: it may be about to listen, or about to end."""
    try:
        link = KeeperLink(socket_path, role="trainer", rank=rank)
    except KeeperGone:
        return None
    if not link.hello.get("is_library"):
        raise StoreLocked(path=run_dir, holder=f"process {link.hello['keeper_pid']} (ridethrough run)")
    return link


def claim(link: KeeperLink, run_dir: str) -> None:
    """The keeper owns the run on this node; trainers that a dead keeper has left are gone.

    Raises:
        StoreLocked: Another command owns the run, or this keeper another run.
    """
    link.request("claim", run_dir=run_dir, lock_path=lock_path(run_dir))


def _try_lock(lock: process.FileLock, run_dir: str) -> bool:
    try:
        lock.acquire(run=run_dir, note="")
    except StoreLocked:
        return False
    return True


def watch(link: KeeperLink, *, is_fatal: bool, on_loss: Callable[[], None]) -> None:
    """When the keeper dies this process dies too (`is_fatal`), or `on_loss` is called, from a thread of ours."""

    def wait() -> None:
        link.wait_for_end()
        if is_fatal:
            # Nobody holds our snapshots and nobody will restart us: training on would be unprotected, and a
            # second start of the command must not meet us.
            os.kill(os.getpid(), signal.SIGKILL)
        on_loss()

    threading.Thread(target=wait, name="ridethrough-watch", daemon=True).start()

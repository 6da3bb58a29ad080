"""For verbs that change a run: nobody else changes it meanwhile, and what they do is on record first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ridethrough import journal
from ridethrough.cli.target import Target
from ridethrough.format import layout
from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot import address
from ridethrough.store.catalog import Catalog

_LOOK_UP_S = 60.0
"""Longer than any mount needs that only is slow."""


@contextlib.contextmanager
def owning(run_dir: str, *, shown: str) -> Iterator[None]:
    """No job on this node has the run, and none gets it, while the block runs.

    The lock is this node's. Of a run on a shared directory a job on another node is not kept out.

    Raises:
        StoreLocked: A job, or another verb, has it; names the process.
    """
    # The path that a keeper takes, too: through a link it would be another lock.
    lock = process.FileLock(address.lock_path(address.real_path(run_dir, limit_s=_LOOK_UP_S)))
    # Without it a persister could write, remove or set aside the same files at the same time.
    lock.acquire(run=shown, note=None)
    try:
        yield
    finally:
        lock.release()


def require_marker(catalog: Catalog) -> None:
    """`run.json` says which run this is.

    Raises:
        Damaged: It does not; looking works all the same, changing does not.
    """
    for problem in catalog.problems:
        if problem.path == layout.RUN:
            raise problem.error


def record(fs: FileSystem, clock: Clock, wanted: Target, verb: str) -> journal.Journal:
    """This node's journal of the run."""
    return journal.Journal(fs, clock, layout.journal_path(wanted.run_dir, process.node_name()), role=verb)

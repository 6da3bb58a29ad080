"""Starting a keeper: from the command line, or from a training script that runs alone."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from ridethrough import config as configuration
from ridethrough.config import TierConfig
from ridethrough.errors import RideThroughError
from ridethrough.seam import process
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot.address import lock_path
from ridethrough.snapshot.copier import Copier, Tier, finish
from ridethrough.snapshot.courier import Courier
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.persist import Persister
from ridethrough.store.place import open_place
from ridethrough.store.retain import Retention
from ridethrough.supervisor.keeper import Keeper
from ridethrough.supervisor.loop import Supervisor
from ridethrough.supervisor.record import echo
from ridethrough.supervisor.settings import Settings


def keep(settings: Settings, *, run_dir: str | None, socket_path: str) -> int:
    """Runs a keeper with its supervisor, persister and courier until the run is over; returns its exit code.

    Args:
        settings: What to run and how.
        run_dir: Claimed at once if given; otherwise with the first trainer that names one.
        socket_path: Where it answers.

    Raises:
        StoreLocked: Another keeper owns the run.
        UsageError: Nobody knows how to get to the place of a tier.
    """
    for tier in settings.config.tiers:
        open_place(tier.place)  # now, and not when the first copy is due
    facts: dict[str, Any] = {"argv": process.shown_command(settings.argv), "is_library": not settings.argv, "config": settings.config.as_facts()}
    helpers: dict[str, Callable[[str], None]] = {
        "supervisor": lambda path: _supervise(path, settings),
        "persister": _persist,
        "courier": _carry,
        **{f"copier-{tier.name}": functools.partial(_copy, tier) for tier in settings.config.tiers},
    }
    keeper = Keeper(SystemClock(), socket_path, helpers, facts)
    if run_dir is not None:
        keeper.claim(run_dir, lock_path(run_dir))
    code = keeper.run()
    config = settings.config
    # On a shared directory one node copies for all.
    mine = config.tiers if config.storage != "shared" or config.order[:1] in ((), (process.node_name(),)) else ()
    if run_dir is not None:
        finish(PosixFileSystem(), SystemClock(), run_dir, tuple(_tier(tier) for tier in mine), node=process.node_name(), echo=echo)
    return code


def _supervise(socket_path: str, settings: Settings) -> None:
    link = KeeperLink(socket_path, role="supervisor")
    Supervisor(PosixFileSystem(), SystemClock(), link, settings).run()


def _persist(socket_path: str) -> None:
    link = KeeperLink(socket_path, role="persister")
    Persister(PosixFileSystem(), SystemClock(), link, echo=echo).run()


def _carry(socket_path: str) -> None:
    link = KeeperLink(socket_path, role="courier")
    Courier(SystemClock(), link, link.hello["config"]).run()


def _copy(tier: TierConfig, socket_path: str) -> None:
    link = KeeperLink(socket_path, role="copier")
    Copier(PosixFileSystem(), SystemClock(), link, _tier(tier), echo=echo).run()


def _tier(tier: TierConfig) -> Tier:
    retention = Retention(keep_last=tier.keep_last, keep_every=tier.keep_every)
    return Tier(name=tier.name, place=tier.place, domain=tier.domain, bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s, retention=retention)


def main() -> None:
    """Entry of the keeper that a library starts: ``python -m ridethrough.supervisor.start RUN_DIR SOCKET``."""
    run_dir, socket_path = sys.argv[1:3]
    try:
        settings = Settings(argv=(), config=configuration.load(None, os.environ, {"run": run_dir}))
        raise SystemExit(keep(settings, run_dir=run_dir, socket_path=socket_path))
    except RideThroughError as error:
        echo("keeper.refused", error.as_dict())
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()

"""A keeper at the socket named, whose only helper is a courier."""

from __future__ import annotations

import sys

from ridethrough.seam.clock import SystemClock
from ridethrough.snapshot.courier import Courier
from ridethrough.snapshot.link import KeeperLink
from ridethrough.supervisor.keeper import Keeper


def serve(socket_path: str) -> None:
    Courier(SystemClock(), KeeperLink(socket_path, role="courier"), {}).run()


if __name__ == "__main__":
    sys.exit(Keeper(SystemClock(), sys.argv[1], {"courier": serve}, {}).run())

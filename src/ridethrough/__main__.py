"""`python -m ridethrough` is `ridethrough`."""

from __future__ import annotations

import sys

from ridethrough.cli import main

if __name__ == "__main__":
    sys.exit(main())

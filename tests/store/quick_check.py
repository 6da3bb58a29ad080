"""`ridethrough` with a storage check that measures for a tenth of the time: for tests that ask what it says, not how long it takes."""

from __future__ import annotations

import sys

from ridethrough.cli import main
from ridethrough.store.assess import measure, see

if __name__ == "__main__":
    measure._SYNC_S = measure._DIR_SYNC_S = measure._RENAME_S = measure._CREATE_S = measure._BANDWIDTH_S = 0.15
    measure._CREATED_COUNT, measure._LIMIT_S, measure.DEFAULT_SIZE_BYTES = 400, 6.0, 8 << 20
    see.WAIT_S = 3.0
    sys.exit(main())

"""Finding the run's key before any rank could tell it, without ever waiting for storage."""

from __future__ import annotations

import os
import threading

from ridethrough.errors import RideThroughError, UsageError
from ridethrough.format import layout
from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.store.commit import ensure_dir
from ridethrough.store.key import ensure_key, kept_key, read_key
from ridethrough.store.start import remembered_run

_RETRY_S = 1.0


class KeyFinder:
    """Looks for the key in a thread of its own until it has it.

    Args:
        fs: The tier.
        clock: For the pauses.
        run_dir: The run directory.
        key_file: Where the user has put the key, None if it lies in the run directory.
    """

    def __init__(self, fs: FileSystem, clock: Clock, run_dir: str, key_file: str | None) -> None:
        self._fs, self._clock, self._run_dir, self._key_file = fs, clock, run_dir, key_file
        self.key: str | None = None
        self.reason = "storage: the run's key has not been read yet"
        """Why there is no key yet."""
        self.refusal: UsageError | None = None
        """A key that must not be used: no waiting helps."""
        # A daemon: it may be stuck in a dead mount when the supervisor has to end.
        threading.Thread(target=self._look, name="ridethrough-key", daemon=True).start()

    def _look(self) -> None:
        while self.key is None and self.refusal is None:
            try:
                self.key = self._find()
            except UsageError as error:
                self.refusal = error
            except (RideThroughError, OSError) as error:
                self.reason = f"storage: {error}"
            if self.key is None:
                self._clock.sleep(_RETRY_S)

    def _find(self) -> str | None:
        if self._key_file is not None:
            return read_key(self._fs, self._key_file)
        try:
            found = kept_key(self._fs, self._run_dir)
        except FileNotFoundError:
            found = None
        if found is not None:
            return found
        is_known = remembered_run(self._fs, process.state_dir(), self._run_dir) is not None
        if is_known and not os.path.exists(os.path.join(self._run_dir, layout.RUN)):
            # An unmounted disk must not get a key of its own, which would then not be that of the others.
            self.reason = f"storage: the run was at {self._run_dir} before and its marker is not there: disk not mounted?"
            return None
        ensure_dir(self._fs, self._run_dir)
        return ensure_key(self._fs, self._run_dir)

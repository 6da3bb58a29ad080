"""One run on one tier, as the one process that may write it sees it.

A save from end to end, each line before the next:

1. `commit`: the parts are sealed. When all of the roster are, the save may be called durable.
2. `describe`: meta.json and manifest, for people.
3. `prove`: everything read back past the cache. From here on it may be called verified. What was
   read back wrong goes to quarantine and the save does not count.
4. `prune`: what retention no longer keeps is removed, for a newer verified checkpoint exists.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from ridethrough import journal
from ridethrough.errors import Damaged, RideThroughError
from ridethrough.format import layout
from ridethrough.format.attempt import Roster
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem
from ridethrough.store import quarantine, retain
from ridethrough.store.catalog import read_catalog, read_seals
from ridethrough.store.commit import PartSave, commit_part, write_manifest, write_meta
from ridethrough.store.retain import Retention
from ridethrough.store.start import require_newest
from ridethrough.store.verify import check_part, check_seal, is_surely_damaged
from ridethrough.types import AttemptRef

QUARANTINE_CHECKPOINTS = 2
"""The quarantine may hold as many bytes as this many checkpoints."""

Note = Callable[..., None]
"""Puts an event (kind, then its data as keywords) on record; called before what it says is done."""


class RunWriter:
    """Commits, proves and prunes the checkpoints of one attempt.

    Args:
        fs: The tier.
        run_dir: The run's directory on it.
        attempt: Ours; once a newer one is on the tier nothing is written or removed any more.
        roster: Its roster.
        retention: What to keep.
        monitor: Name of the metric that retention compares.
        resumed_dir: Checkpoint this attempt came from.
        node: This node: its journal tells what was verified.
        has_own_disk: The tier is one of several, each on a node of its own, and a checkpoint is spread over them.
        note: Puts events on record.
    """

    def __init__(
        self,
        fs: FileSystem,
        run_dir: str,
        *,
        attempt: AttemptRef,
        roster: Roster,
        retention: Retention,
        monitor: str | None,
        resumed_dir: str | None,
        node: str,
        has_own_disk: bool = False,
        note: Note,
    ) -> None:
        self._fs = fs
        self._run_dir = run_dir
        self._attempt = attempt
        self._roster = roster
        self._retention = retention
        self._monitor = monitor
        self._resumed_dir = resumed_dir
        self._node = node
        self._has_own_disk = has_own_disk
        self._note = note
        self.verified: set[str] = set()
        """Save ids that were read back intact."""

    def learn_verified(self) -> None:
        """What earlier writers have verified counts as verified, as far as this node's journal says so.

        Those of the other nodes say the same: a thousand of them, read by a thousand nodes, would keep the first save waiting.
        """
        try:
            history = journal.read(self._fs, [layout.journal_path(self._run_dir, self._node)])
        except (RideThroughError, OSError) as error:
            # Saves go on all the same: not knowing what was verified only makes retention keep more.
            self._note("journal.unreadable", message=str(error))
            return
        self.verified |= {str(event.data.get("save_id")) for event in history.of("checkpoint.verified")}

    def commit(self, saves: Iterable[PartSave]) -> tuple[Seal, ...]:
        """Every part is sealed and survives power loss of this tier.

        Raises:
            Fenced: A newer attempt owns the run.
            StorageError: The tier refuses; what this call had written is taken back as far as the tier lets us.
        """
        require_newest(self._fs, self._run_dir, self._attempt)
        done: list[Seal] = []
        try:
            for save in saves:
                done.append(commit_part(self._fs, self._run_dir, save))
        except BaseException:
            self._take_back(done)
            raise
        return tuple(done)

    def _take_back(self, seals: list[Seal]) -> None:
        """Parts of a save that will never be whole do not keep the space that the next save needs."""
        for seal in seals:
            directory = os.path.join(self._run_dir, layout.step_dir(seal.step, seal.save_id))
            # The disk that refused the save may refuse this too; retention removes what stays behind.
            with contextlib.suppress(RideThroughError, OSError):
                self._fs.remove(os.path.join(directory, layout.seal_name(seal.payload_name)))
                self._fs.sync_dir(directory)  # never a seal without its payload
                self._fs.remove(os.path.join(directory, seal.payload_name))

    def describe(self, step: int, save_id: str) -> None:
        """meta.json and the manifest of a committed save are there, from the seals found on the tier.

        Raises:
            StorageError: They cannot be written now; the save stays durable.
        """
        seals = read_seals(self._fs, self._run_dir, layout.step_dir(step, save_id))
        if seals:
            write_meta(self._fs, self._run_dir, seals[0])
            write_manifest(self._fs, self._run_dir, seals, self._roster)

    def prove(self, seals: tuple[Seal, ...]) -> None:
        """The seals and their payloads are intact, read back from the medium.

        Raises:
            Damaged: A part reads back wrong; it is in quarantine.
            StorageError: It cannot be read now; it stays durable.
        """
        for seal in seals:
            dir_name = layout.step_dir(seal.step, seal.save_id)
            try:
                check_seal(self._fs, self._run_dir, dir_name, seal)
                check_part(self._fs, self._run_dir, dir_name, seal)
            except Damaged:
                self.set_aside({(dir_name, s.part) for s in seals})
                raise

    def prune(self, in_progress: str, *, held_back: frozenset[str] = frozenset()) -> None:
        """What the retention policy no longer keeps is gone; a refusal is on record and tried again at the next save.

        Args:
            in_progress: Directory of the save that was just made.
            held_back: Directories that somebody is still reading.
        """
        try:
            require_newest(self._fs, self._run_dir, self._attempt)
            found = retain.survey(
                read_catalog(self._fs, self._run_dir),
                verified=frozenset(self.verified),
                monitor=self._monitor,
                own_node=self._node if self._has_own_disk else None,
            )
            for verdict in retain.plan(found, self._retention, in_progress=in_progress, resumed_from=self._resumed_dir):
                if not verdict.keep and verdict.dir_name not in held_back:
                    self._note("checkpoint.removed", dir_name=verdict.dir_name, reason=verdict.reason)
                    retain.delete_checkpoint(self._fs, self._run_dir, verdict.dir_name)
        except (RideThroughError, OSError) as error:
            self._note("retention.failed", message=str(error))

    def set_aside(self, suspects: set[tuple[str, str]]) -> None:
        """Suspect parts (directory, part) that two uncached reads find wrong are in quarantine, which is bounded."""
        if not suspects:
            return
        try:
            require_newest(self._fs, self._run_dir, self._attempt)
            catalog = read_catalog(self._fs, self._run_dir)
            largest = max((c.size_bytes for c in catalog.checkpoints), default=0)
            for checkpoint in catalog.checkpoints:
                for seal in checkpoint.seals:
                    self._examine(checkpoint.dir_name, seal, suspects)
            quarantine.bound(self._fs, self._run_dir, budget_bytes=largest * QUARANTINE_CHECKPOINTS)
        except (RideThroughError, OSError) as error:
            self._note("quarantine.failed", message=str(error))

    def _examine(self, dir_name: str, seal: Seal, suspects: set[tuple[str, str]]) -> None:
        if (dir_name, seal.part) in suspects and is_surely_damaged(self._fs, self._run_dir, dir_name, seal):
            self._note("part.quarantined", dir_name=dir_name, part=seal.part, payload=seal.payload_name)
            quarantine.quarantine_part(self._fs, self._run_dir, dir_name, seal, reason="two reads past the cache found wrong bytes")


def as_suspects(rows: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    """Suspects from JSON."""
    return {(str(row["dir_name"]), str(row["part"])) for row in rows}

"""The copier: what was verified goes on into one other place, in the background. One process a tier, so that none waits for another.

It never keeps a save waiting. The newest verified checkpoint is copied; those that were made meanwhile and are no longer
the newest are left out. While it copies, its board names the checkpoint, and retention leaves that alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ridethrough.errors import RideThroughError, StorageError
from ridethrough.format import layout
from ridethrough.journal import Journal
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot import link as names
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan
from ridethrough.store import retain
from ridethrough.store.catalog import Checkpoint, candidates, read_catalog
from ridethrough.store.copy import Copied, copy_checkpoint, paced
from ridethrough.store.place import Place, open_place
from ridethrough.store.retain import Retention

_LOOK_S = 0.5
_PAUSES_S = (5.0, 15.0, 60.0, 300.0)
"""After failures in a row."""
Echo = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One other place, as the configuration has it."""

    name: str
    place: str
    domain: str
    bandwidth_bytes_per_s: float | None = None
    retention: Retention = field(default_factory=Retention)


class Copier:
    """Serves one keeper and one tier until the keeper dies. `tick` makes at most one copy.

    Args:
        fs: Where the run is.
        clock: The clock.
        link: To the keeper.
        tier: Where to copy to.
        echo: Puts events where people look.

    Raises:
        UsageError: Nobody knows how to get to that place.
    """

    def __init__(self, fs: FileSystem, clock: Clock, link: KeeperLink, tier: Tier, *, echo: Echo) -> None:
        self._fs, self._clock, self._link, self._tier, self._echo = fs, clock, link, tier, echo
        self._there = open_place(tier.place, bytes_per_s=tier.bandwidth_bytes_per_s)
        self._control = link.board(names.CONTROL)
        self._persist = link.board(names.PERSIST)
        self._board = link.board(names.copier_board(tier.name))
        before = self._board.read()
        self._done: dict[str, Any] | None = before.get("done")
        self._failed: dict[str, Any] | None = before.get("failed")
        self._failures = int(before.get("failures_in_a_row") or 0)
        self._again_s = float("-inf")
        self._launch = 0
        self._plan: Plan | None = None
        self._journal: Journal | None = None
        self._publish(None)

    def run(self) -> None:
        """Serves until the keeper dies (raises KeeperGone)."""
        while True:
            self.tick()
            self._clock.sleep(_LOOK_S)

    def tick(self) -> None:
        """The newest verified checkpoint is in the other place, or it is known why not."""
        control, answer = self._control.read(), self._persist.read()
        verified = answer.get("verified")
        if not verified or not self._load_plan(int(control.get("launch", 0))) or self._clock.monotonic_s() < self._again_s:
            return
        assert self._plan is not None
        # On a shared directory one node copies for all; with a disk of its own each has parts that no other has.
        if self._plan.is_shared and len(self._plan.nodes) > 1 and not control.get("is_lead"):
            return
        dir_name = layout.step_dir(int(verified["step"]), str(verified["save_id"]))
        if self._done is not None and self._done["dir_name"] == dir_name:
            return
        self._copy(self._plan, dir_name, int(verified["step"]), is_lead=len(self._plan.nodes) == 1 or bool(control.get("is_lead")))

    def _load_plan(self, launch: int) -> bool:
        if launch != self._launch or self._plan is None:
            self._launch, self._plan = launch, None
            if not launch or names.plan_board(launch) not in self._link.names():
                return False
            board = self._link.board(names.plan_board(launch), names.PLAN_BYTES)
            value = board.read()
            board.close()
            if not value:
                return False
            self._plan = Plan.from_board(value)
            self._journal = Journal(self._fs, self._clock, layout.journal_path(self._plan.run_dir, self._plan.node), role=f"copier-{self._tier.name}")
        return True

    def _copy(self, plan: Plan, dir_name: str, step: int, *, is_lead: bool) -> None:
        began_s = self._clock.monotonic_s()
        copied_bytes = 0

        def advance(count: int) -> None:
            nonlocal copied_bytes
            copied_bytes += count
            self._publish({"dir_name": dir_name, "step": step, "since_s": began_s, "copied_bytes": copied_bytes})

        advance(0)
        here = Place(fs=self._fs, run_dir=plan.run_dir, shown=plan.run_dir, is_mounted=True)
        try:
            copied = self._copy_to(here, plan, dir_name, paced(self._clock, advance, self._tier.bandwidth_bytes_per_s))
        except (RideThroughError, OSError) as error:
            # A copy that fails stops nothing: it is on record, an alarm, and tried again.
            pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
            self._failures += 1
            self._again_s = self._clock.monotonic_s() + pause_s
            self._failed = {"step": step, "message": str(error), "at_s": self._clock.monotonic_s()}
            self._publish(None)
            self._note("copy.failed", tier=self._tier.name, place=self._there.shown, step=step, message=str(error), pause_s=pause_s)
            return
        now_s = self._clock.monotonic_s()
        self._failures, self._failed = 0, None
        self._done = {"dir_name": dir_name, "step": step, "at_s": now_s, "copied_bytes": copied.copied_bytes}
        self._publish(None)
        self._note(
            "copy.done",
            tier=self._tier.name,
            place=self._there.shown,
            step=step,
            dir_name=dir_name,
            copied_bytes=copied.copied_bytes,
            copy_s=round(now_s - began_s, 3),
        )
        if is_lead:
            self._prune(dir_name)

    def _copy_to(self, here: Place, plan: Plan, dir_name: str, advance: Callable[[int], None]) -> Copied:
        found = next((c for c in read_catalog(self._fs, here.run_dir).checkpoints if c.dir_name == dir_name), None)
        if found is None:
            raise StorageError(path=here.run_dir, detail=f"{dir_name} is not there any more")
        if not plan.is_shared and len(plan.nodes) > 1:
            found = share_of(found, plan.node, dark=frozenset(self._control.read().get("dark") or ()))
        return copy_checkpoint(here, self._there, found, advance=advance)

    def _prune(self, in_progress: str) -> None:
        """What the tier's retention no longer keeps is gone there."""
        try:
            catalog = read_catalog(self._there.fs, self._there.run_dir)
            # Nothing is sealed there that was not read back there.
            whole = frozenset(c.save_id for c in catalog.checkpoints if c.is_complete)
            found = retain.survey(catalog, verified=whole, monitor=None)
            for verdict in retain.plan(found, self._tier.retention, in_progress=in_progress, resumed_from=None):
                if not verdict.keep:
                    self._note("copy.removed", tier=self._tier.name, dir_name=verdict.dir_name, reason=verdict.reason)
                    retain.delete_checkpoint(self._there.fs, self._there.run_dir, verdict.dir_name)
        except (RideThroughError, OSError) as error:
            self._note("retention.failed", tier=self._tier.name, message=str(error))

    def _publish(self, busy: Mapping[str, Any] | None) -> None:
        self._board.write(
            {
                "place": self._there.shown,
                "domain": self._tier.domain,
                "busy": dict(busy) if busy is not None else None,
                "done": self._done,
                "failed": self._failed,
                "failures_in_a_row": self._failures,
                "pid": os.getpid(),
            }
        )

    def _note(self, kind: str, **data: Any) -> None:
        """On stderr, and in the journal if that takes it: the board says the same to whoever asks."""
        self._echo(kind, data)
        if self._journal is not None:
            try:
                self._journal.append(kind, **data)
            except (StorageError, OSError) as error:
                self._echo("journal.refused", {"message": str(error)})


def share_of(checkpoint: Checkpoint, node: str, *, dark: frozenset[str] = frozenset()) -> Checkpoint:
    """The parts that this node is to copy, of those on its disk: what a thousand nodes hold goes over the wire once.

    Of several holders the first one in roster order that is not dark copies; where all of them are, whoever has the part.
    """
    if checkpoint.roster is None:
        return checkpoint
    nodes = checkpoint.roster.nodes
    first = {part.name: next((nodes[rank] for rank in part.holders if nodes[rank] not in dark), node) for part in checkpoint.roster.parts}
    return replace(checkpoint, seals=tuple(seal for seal in checkpoint.seals if first.get(seal.part, node) == node))


def held_back(link: KeeperLink) -> frozenset[str]:
    """Checkpoints that are being copied now: retention leaves them."""
    found = set()
    for name in link.names():
        if name.startswith(names.COPIER):
            board = link.board(name)
            busy = board.read().get("busy")
            board.close()
            if busy:
                found.add(str(busy["dir_name"]))
    return frozenset(found)


def finish(fs: FileSystem, clock: Clock, run_dir: str, tiers: tuple[Tier, ...], *, node: str, echo: Echo) -> None:
    """When the job is over: the newest checkpoint is in every tier, too, or it was said why not. For whoever starts a keeper."""
    for tier in tiers:
        try:
            there, catalog = open_place(tier.place, bytes_per_s=tier.bandwidth_bytes_per_s), read_catalog(fs, run_dir)
            sealed = sorted((c for c in catalog.checkpoints if c.seals), key=lambda c: (c.attempt.seq, c.step))
            # Complete if it is all here; of a job with a disk a node, this node's share of the newest.
            chosen = next(iter(candidates(catalog)), share_of(sealed[-1], node) if sealed else None)
            if chosen is None:
                return
            here = Place(fs=fs, run_dir=run_dir, shown=run_dir, is_mounted=True)
            copied = copy_checkpoint(here, there, chosen, advance=paced(clock, lambda _: None, tier.bandwidth_bytes_per_s))
            echo("copy.done", {"tier": tier.name, "place": there.shown, "step": chosen.step, "copied_bytes": copied.copied_bytes})
        except (RideThroughError, OSError) as error:
            echo("copy.failed", {"tier": tier.name, "place": tier.place, "step": None, "message": str(error)})

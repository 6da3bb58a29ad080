"""One rank's dealings with its keeper: boards, slots, and what is asked and answered through them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ridethrough.errors import KeeperGone, RideThroughError, SaveFailed
from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.snapshot import link as names
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan, first_save
from ridethrough.snapshot.post import PartState, Poster
from ridethrough.snapshot.ranks import RankPhase
from ridethrough.train.attach import attach, launch_from_environment, watch

_log = logging.getLogger("ridethrough")
_STOP_WAIT_S = 10.0
_STOP_SETTLE_S = 5.0
"""Longer than the supervisor needs from reading our board to publishing what follows, its record (2 s at most) included."""
_POLL_S = 0.002


class Session:
    """From `attach` to the end of the process.

    Args:
        clock: The clock.
        link: To the keeper.
        run_dir: Directory of the run.
        rank: This rank.
        world_size: Ranks of the job.
    """

    def __init__(self, clock: Clock, link: KeeperLink, *, run_dir: str, rank: int, world_size: int) -> None:
        self._clock = clock
        self.link = link
        self._run_dir = run_dir
        self._rank = rank
        self._world_size = world_size
        self._launch = 0
        self._plan: Plan | None = None
        self._slot_count = 0
        self._board: Board | None = None
        self._control: Board | None = None
        self._persist: Board | None = None
        self._poster: Poster | None = None
        self._control_generation = -1
        self._control_value: dict[str, Any] = {}
        self._is_lost = False
        self.says: dict[str, Any] = {}
        """What stands on this rank's board; see `snapshot.ranks.RankState`."""
        self.posted_step = -1
        """The newest step of which this rank has a snapshot."""

    # -- this rank's board -----------------------------------------------------------------------------------------

    def open_board(self, launch: int) -> None:
        """This rank can be seen by the supervisor."""
        self._board = self.link.board(names.rank_board(launch, self._rank))
        self.say(
            rank=self._rank,
            pid=os.getpid(),
            process_started=process.start_time(os.getpid()),
            world_size=self._world_size,
            run_dir=self._run_dir,
        )

    def say(self, **news: Any) -> None:
        """The board has this, too."""
        self.says.update(news)
        if self._board is not None:
            self._board.write(self.says)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """An error of ours is on the board before it is raised, so that the supervisor knows it by its code."""
        try:
            yield
        except RideThroughError as error:
            self.say(phase=RankPhase.FAILED, failure=error.as_dict())
            raise

    # -- a launch --------------------------------------------------------------------------------------------------

    def new_launch(self) -> int:
        """Number of this start of the job: given by `ridethrough run`, else by the keeper that a library shares.

        Raises:
            StoreLocked: Another job is training this run.
        """
        given = launch_from_environment()
        return given if given is not None else int(self.link.request("launch")["launch"])

    def begin(self, plan: Plan, *, launch: int, slot_count: int) -> None:
        """Boards, plan and slots of the launch exist; the persister may start."""
        self._launch, self._plan, self._slot_count = launch, plan, slot_count
        if plan.differs and self._rank == 0 and launch_from_environment() is None:
            # The persister says it too, but to the log of a keeper that we have started: a file that nobody watches.
            _log.warning("ridethrough: went on from step %d; changed since then: %s", plan.restored_step, plan.differs["detail"])
        self.link.request("join", pid=os.getpid())
        self.open_board(launch)
        self._control = self.link.board(names.CONTROL)
        self._persist = self.link.board(names.PERSIST)
        self._control_generation = -1
        if self._poster is not None:
            self._poster.close()  # of a keeper that has died: without this its memory would stay with us
        self._poster = Poster(self.link, launch=launch, rank=self._rank, count=slot_count)
        if self._rank == plan.local_ranks[0]:
            board = self.link.board(names.plan_board(launch), names.PLAN_BYTES)
            board.write(plan.as_board())
            board.close()
        watcher = KeeperLink(self.link.path, role="watch", rank=self._rank)
        watch(watcher, is_fatal=launch_from_environment() is not None, on_loss=self._lose)

    def _lose(self) -> None:
        self._is_lost = True

    def recover(self) -> None:
        """If a keeper that we had started ourselves has died, another one has our slots from now on."""
        if not self._is_lost:
            return
        assert self._plan is not None
        self._is_lost = False
        step = int(self.says.get("step", self._plan.restored_step))
        try:
            self.link = attach(self._clock, self._run_dir, rank=self._rank)
            # What was different at the start was said by then.
            self.begin(dataclasses.replace(self._plan, restored_step=step, differs={}), launch=self._launch + 1, slot_count=self._slot_count)
        except KeeperGone:
            self._is_lost = True  # unprotected for this step; the next one tries again

    # -- snapshots and saves ---------------------------------------------------------------------------------------

    def post(self, step: int, parts: tuple[PartState, ...], facts: Mapping[str, Any]) -> None:
        """The snapshot of `step` is in memory that outlives this process, if a slot was free."""
        assert self._poster is not None
        began_s = self._clock.monotonic_s()
        if self._poster.post(step, parts, facts, reserved=self._reserved_step()):
            self.posted_step = step
        self.says["posted_step"] = self.posted_step
        self.says["posted_steps"] = self._poster.posted_steps
        self.says["snapshot_s"] = self._clock.monotonic_s() - began_s
        self.says["state_bytes"] = sum(part.layout.size_bytes for part in parts)

    def _read_control(self) -> dict[str, Any]:
        assert self._control is not None
        generation = self._control.generation
        if generation != self._control_generation:
            self._control_generation = generation
            self._control_value = self._control.read()
        return self._control_value

    def _reserved_step(self) -> int | None:
        """The step announced to become durable, until the persister has taken it."""
        assert self._plan is not None
        assert self._persist is not None
        control = self._read_control()
        announced = control.get("announced") if control.get("launch") == self._launch else None
        reserved = int(announced) if announced is not None else first_save(self._plan.restored_step, self._plan.save_interval_steps)
        answer = self._persist.read()
        return None if answer.get("launch") == self._launch and int(answer.get("taken", -1)) >= reserved else reserved

    def wait_until_durable(self, step: int, *, wait_s: float) -> None:
        """The posted snapshot of `step` is durable.

        Raises:
            SaveFailed: It could not be made durable, or nobody answered within `wait_s`.
        """
        assert self._persist is not None
        began_s = self._clock.monotonic_s()
        self.say(phase=RankPhase.SAVING, wanted_save=step, wanted_at_s=began_s, posted_step=self.posted_step)
        try:
            while True:
                answer = self._persist.read()
                durable, failed = answer.get("durable") or {}, answer.get("failed") or {}
                if durable.get("launch") == self._launch and durable["step"] >= step:
                    return
                waited_s = self._clock.monotonic_s() - began_s
                # An older refusal of the same step does not count: it has been asked for anew.
                if failed.get("launch") == self._launch and failed.get("step") == step and failed["at_s"] >= began_s:
                    raise SaveFailed(step=step, waited_s=waited_s, detail=failed["message"])
                if waited_s > wait_s or self._is_lost:
                    raise SaveFailed(step=step, waited_s=waited_s, detail="the persister has not answered")
                self._clock.sleep(_POLL_S)
        finally:
            # Whoever catches the error and trains on must not keep the periodic saves waiting.
            self.say(wanted_save=None)

    # -- stopping --------------------------------------------------------------------------------------------------

    def is_asked_to_stop(self, step: int) -> bool:
        """True if all ranks stop at `step`, the one just made; see `supervisor.stop` for the agreement."""
        stop = self._read_control().get("stop")
        if not stop or stop["step"] < 0:
            return False
        if int(stop["id"]) > int(self.says.get("stop_seen", 0)):
            self.say(stop_seen=int(stop["id"]), stop_was_late=step > int(stop["step"]), step=step)
        if step != int(stop["step"]):
            return False
        began_s = self._clock.monotonic_s()
        while (waited_s := self._clock.monotonic_s() - began_s) < _STOP_WAIT_S + _STOP_SETTLE_S:
            now = self._read_control().get("stop") or {}
            if now.get("id") != stop["id"] or now.get("state") == "signalled":
                return False
            if now.get("state") == "committed":
                return True
            if waited_s > _STOP_WAIT_S and not self.says["stop_was_late"]:
                # We go on, so the others must not stop here; only a decision made before this word was read still counts.
                self.say(stop_was_late=True)
            self._clock.sleep(_POLL_S)
        return False

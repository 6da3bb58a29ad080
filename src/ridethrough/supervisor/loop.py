"""The supervisor's loop: observe, decide, record, act. Never touches storage itself."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from ridethrough.errors import JobStuck
from ridethrough.format import layout
from ridethrough.journal import Journal
from ridethrough.redact import redact_text
from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot import link as names
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import first_save
from ridethrough.snapshot.ranks import RankPhase, RankState, decode_rank
from ridethrough.supervisor import policy
from ridethrough.supervisor.record import Pen
from ridethrough.supervisor.relay import Relay
from ridethrough.supervisor.stop import Stopper

ROUND_S = 0.05
_LEAD_S = 4 * ROUND_S
"""An announcement must be seen by every rank before it gets there: a few rounds ahead."""
_FLUSH_WAIT_S = 120.0
_UNKILLABLE_S = 60.0
_LIBRARY_WAIT_S = 120.0
_STEPPING = {RankPhase.TRAINING, RankPhase.OUTSIDE, RankPhase.SAVING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `ridethrough run` was told."""

    argv: tuple[str, ...]
    """Empty if a library started us: then nothing is started or restarted."""
    is_fresh: bool = False
    hang_s: float = 60.0
    grace_s: float = 30.0


@dataclass(slots=True)
class Memory:
    """What a restarted supervisor must still know; lives on the control board."""

    launch: int = 0
    announced: int | None = None
    announcement: int = 0
    """Counts announcements of this launch, so that the same step can be announced again."""
    announced_at_s: float = 0.0
    has_agreed: bool = False
    """Some launch of this command got through its start agreement."""
    flush: dict[str, Any] | None = None
    stop: dict[str, Any] | None = None
    past: list[dict[str, Any]] = field(default_factory=list)
    suspected: bool = False
    convicted: bool = False
    recovered: bool = False
    """The first step of this launch is on record."""
    dead_ranks: list[int] = field(default_factory=list)
    ended: dict[str, Any] | None = None
    """The decision about an end, while its flush is awaited."""


class Supervisor:
    """Serves one keeper until the run is over."""

    def __init__(self, fs: FileSystem, clock: Clock, link: KeeperLink, settings: Settings) -> None:
        self._fs = fs
        self._clock = clock
        self._link = link
        self._settings = settings
        self._control = link.board(names.CONTROL)
        self._persist = link.board(names.PERSIST)
        kept = self._control.read()
        self.memory = Memory(**kept) if kept else Memory()
        self._pen = Pen()
        self._relay = Relay(link)
        self._ranks: dict[str, Board] = {}
        self._plan: dict[str, Any] = {}
        self._stopper = Stopper(settings.grace_s)
        self._began_s = clock.monotonic_s()
        if kept:
            self._pen.note("supervisor.restarted", launch=self.memory.launch)
            self._relay.follow(self.memory.launch)

    def run(self) -> None:
        """Serves until the keeper ends (raises KeeperGone)."""
        while True:
            self.round()
            self._clock.sleep(ROUND_S)

    def _publish(self) -> None:
        self._control.write({name: getattr(self.memory, name) for name in Memory.__slots__})

    # -- one round -------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Observe everything once, and do what follows from it."""
        look = self._link.request("look")
        self._open_journal(look)
        if self._settings.argv and int(look["launch"]) > self.memory.launch:
            self._adopt(int(look["launch"]))
        if self.memory.launch == 0 and not self._begin(look):
            return
        ranks = self._observe_ranks()
        answer = self._persist.read()
        self._record_recovery(ranks)
        if self.memory.ended is not None:
            self._conclude(look, answer)
            return
        if self._settings.argv and look["status"] is not None:
            self._judge_end(look, ranks, answer)
            return
        self._announce(ranks, answer)
        self._watch_ranks(ranks)
        if not self._settings.argv:
            self._watch_library(ranks, answer)
        for number in look["signals"][:1]:
            self._stop(number, ranks)

    def _open_journal(self, look: dict[str, Any]) -> None:
        if look["run_dir"] and not self._pen.is_open:
            path = layout.journal_path(look["run_dir"], process.node_name())
            self._pen.open(Journal(self._fs, self._clock, path, role="supervisor"))

    def _begin(self, look: dict[str, Any]) -> bool:
        if not self._settings.argv:
            found = [int(name.split("/")[0]) for name in self._link.names() if name[0].isdigit()]
            if found:
                self.memory.launch = max(found)
                self._publish()
            elif not look["trainers"] and self._clock.monotonic_s() - self._began_s > _LIBRARY_WAIT_S:
                self._link.request("finish", code=0)
            return bool(found)
        if look["signals"]:
            self._finish(128 + look["signals"][0], "stopped before the command was started")
            return False
        self._launch("first start")
        return False

    def _launch(self, reason: str) -> None:
        old = self.memory
        # A fresh start is wished for until there was one; what comes after is a restart and goes on.
        environment = {names.RESTART_VARIABLE: "1"} if old.has_agreed else {names.FRESH_VARIABLE: "1"} if self._settings.is_fresh else {}
        self._pen.note(
            "launch.decided", launch=old.launch + 1, reason=reason, at_s=self._clock.monotonic_s(), command=process.shown_command(self._settings.argv)
        )
        if old.launch:
            self._link.request("free", prefix=f"{old.launch}/")
        answer = self._link.request("spawn", argv=list(self._settings.argv), environment=environment)
        self._adopt(int(answer["launch"]))

    def _adopt(self, launch: int) -> None:
        """The launch is ours to watch. Also one that a predecessor has started and died before it could write that down."""
        for board in self._ranks.values():
            board.close()
        self._ranks.clear()
        self._plan = {}
        self.memory = Memory(launch=launch, past=self.memory.past, has_agreed=self.memory.has_agreed)
        self._publish()
        self._relay.follow(launch)

    # -- observing -------------------------------------------------------------------------------------------------

    def _observe_ranks(self) -> tuple[RankState, ...]:
        launch = self.memory.launch
        for name, size in self._link.names().items():
            if name.startswith(f"{launch}/rank/") and name not in self._ranks:
                self._ranks[name] = self._link.board(name, size)
            elif name == names.plan_board(launch) and not self._plan:
                board = self._link.board(name, size)
                self._plan = board.read()
                board.close()
                self.memory.has_agreed = self.memory.has_agreed or bool(self._plan)
        states = [decode_rank(board.read()) for board in self._ranks.values()]
        return tuple(sorted((s for s in states if s is not None), key=lambda s: s.rank))

    def _record_recovery(self, ranks: tuple[RankState, ...]) -> None:
        """Once a launch, when every rank has made its first step: how long each phase of the start took."""
        if self.memory.recovered or not ranks or not self._plan or not all("first_step" in r.times_s for r in ranks):
            return
        slowest = max(ranks, key=lambda r: r.times_s["first_step"])
        self._pen.note(
            "launch.stepped",
            launch=self.memory.launch,
            restored_step=slowest.restored_step,
            times_s=slowest.times_s,
            attempt=self._plan["attempt"],
        )
        self.memory.recovered = True
        self._publish()

    # -- saves -----------------------------------------------------------------------------------------------------

    def _announce(self, ranks: tuple[RankState, ...], answer: dict[str, Any]) -> None:
        """The next save is announced when the previous one is confirmed or has failed."""
        if not self._plan or not ranks:
            return
        interval = int(self._plan["save_interval_steps"])
        current = self.memory.announced
        if current is None:
            current = first_save(int(self._plan["restored_step"]), interval)
        durable = answer.get("durable") or {}
        durable_step = int(durable["step"]) if durable.get("launch") == self.memory.launch else -1
        failed = answer.get("failed") or {}
        has_failed = failed.get("launch") == self.memory.launch and int(failed.get("step", -1)) >= current
        wanted = {r.wanted_save for r in ranks if r.wanted_save is not None}
        if len(ranks) == self._local_world() and len(wanted) == 1 and all(r.wanted_save is not None for r in ranks):
            target = wanted.pop()
            assert target is not None
            # A step that was refused before it was asked for (again) is announced anew.
            is_refused = failed.get("launch") == self.memory.launch and failed.get("step") == target
            is_retry = is_refused and failed["at_s"] < max(r.wanted_at_s for r in ranks) and self.memory.announced_at_s <= failed["at_s"]
            if target > durable_step and (current != target or is_retry):
                self._set_announced(target)
            return
        if durable_step >= current or has_failed:
            newest = max(r.step for r in ranks)
            step_s = max((r.step_s_p99 for r in ranks), default=0.0)
            self._set_announced(
                policy.next_announcement(interval_steps=interval, newest_step=newest, previous=current, step_s=step_s, lead_s=_LEAD_S)
            )

    def _local_world(self) -> int:
        nodes = self._plan["roster"]["nodes"]
        return sum(1 for node in nodes if node == self._plan["node"])

    def _set_announced(self, step: int) -> None:
        self.memory.announced = step
        self.memory.announcement += 1
        self.memory.announced_at_s = self._clock.monotonic_s()
        self._publish()

    def _request_flush(self, reason: str) -> None:
        self._want_flush(reason)
        self._publish()

    def _want_flush(self, reason: str) -> None:
        number = int(self.memory.flush["id"]) + 1 if self.memory.flush else 1
        self.memory.flush = {"id": max(number, int(self._persist.read().get("flushed", 0)) + 1), "reason": reason}

    # -- trouble ---------------------------------------------------------------------------------------------------

    def _watch_ranks(self, ranks: tuple[RankState, ...]) -> None:
        alive_phases = {RankPhase.DONE, RankPhase.STOPPED, RankPhase.FAILED}
        dead = [r for r in ranks if r.phase not in alive_phases and not process.is_alive(r.pid, r.process_started)]
        fresh = [r.rank for r in dead if r.rank not in self.memory.dead_ranks]
        if fresh:
            self.memory.dead_ranks.extend(fresh)
            self._pen.note("trainer.died", ranks=fresh, step=max(r.step for r in ranks))
            self._request_flush(f"trainer of rank {', '.join(map(str, fresh))} died")
        pace = self._pace(ranks)
        found = policy.suspicion(pace, hang_s=self._settings.hang_s)
        if found is None and self.memory.suspected and not self.memory.convicted:
            self.memory.suspected = False
            self._pen.note("hang.cleared", step=max(r.step for r in ranks))
            self._publish()
        if found is not None and not self.memory.suspected:
            self.memory.suspected = True
            self._pen.note("hang.suspected", overdue_s=round(pace.overdue_s, 2), step_s_p99=round(pace.step_s_p99, 4))
            self._request_flush("steps are overdue")
        if found == "convict" and not self.memory.convicted and self._settings.argv:
            self.memory.convicted = True
            self._pen.note("hang.convicted", overdue_s=round(pace.overdue_s, 2), action="stop the trainers and restart")
            self._publish()
        if self.memory.convicted:
            # Each round: a supervisor that died after writing the verdict has not carried it out.
            self._link.request("signal", number=signal.SIGKILL, whom="workers")

    def _pace(self, ranks: tuple[RankState, ...]) -> policy.Pace:
        stepping = bool(ranks) and all(r.phase in (RankPhase.TRAINING, RankPhase.OUTSIDE) and "first_step" in r.times_s for r in ranks)
        newest_s = max((r.step_at_s for r in ranks), default=0.0)
        return policy.Pace(
            is_stepping=stepping,
            is_inside=stepping and all(r.phase is RankPhase.TRAINING for r in ranks),
            overdue_s=self._clock.monotonic_s() - newest_s if stepping else 0.0,
            step_s_p99=max((r.step_s_p99 for r in ranks), default=0.0),
        )

    def _watch_library(self, ranks: tuple[RankState, ...], answer: dict[str, Any]) -> None:
        """Without a command of ours: when the trainers are gone, flush what they left and end."""
        if ranks and all(not process.is_alive(r.pid, r.process_started) for r in ranks):
            if any(r.is_unsaved or r.phase not in (RankPhase.DONE, RankPhase.STOPPED) for r in ranks):
                self._want_flush("the trainers have ended")
            self.memory.ended = {"action": "finish", "exit_code": 0, "reason": "the trainers have ended", "since_s": self._clock.monotonic_s()}
            self._publish()

    # -- the end of a launch ---------------------------------------------------------------------------------------

    def _judge_end(self, look: dict[str, Any], ranks: tuple[RankState, ...], answer: dict[str, Any]) -> None:
        if look["workers"]:
            # Nobody of the old launch may live on into the next: SIGKILL also ends the frozen.
            self._link.request("signal", number=signal.SIGKILL, whom="workers")
            if self._clock.monotonic_s() - float(look["ended_s"]) > _UNKILLABLE_S:
                text = f"{look['workers']} processes of launch {self.memory.launch} cannot be killed (stuck in a driver or a dead mount)"
                self._finish(JobStuck.exit_code, text)
            return
        start_step = max((r.restored_step for r in ranks), default=-1)
        end = policy.LaunchEnd(
            status=int(look["status"]),
            output=self._relay.tail(),
            start_step=start_step,
            last_step=max((r.step for r in ranks), default=start_step),
            failures=tuple(r.failure for r in ranks if r.failure is not None),
            was_convicted=self.memory.convicted,
            is_stopped=bool(ranks) and bool(look["signals"]) and all(r.phase is RankPhase.STOPPED for r in ranks),
        )
        verdict = policy.classify(end)
        durable = answer.get("durable") or {}
        durable_step = int(durable.get("step", -1))
        past = tuple(policy.PastEnd(**p) for p in self.memory.past)
        action = policy.next_action(verdict, end, past, durable_step=durable_step)
        if look["signals"] and action.action == "restart":
            action = policy.NextAction(action="finish", reason=verdict.detail)
        self._pen.note(
            "launch.ended",
            launch=self.memory.launch,
            status=end.status,
            cause=verdict.cause.value,
            fingerprint=verdict.fingerprint,
            detail=verdict.detail,
            last_step=end.last_step,
            action=action.action,
            reason=action.reason,
            exit_code=action.exit_code,
            pause_s=action.pause_s,
            ended_s=look["ended_s"],
            output=end.output[-2000:] if verdict.cause not in (policy.Cause.FINISHED, policy.Cause.STOPPED) else None,
        )
        self.memory.past = [
            *self.memory.past[-50:],
            {"fingerprint": verdict.fingerprint, "last_step": end.last_step, "durable_step": durable_step},
        ]
        is_orderly = verdict.cause in (policy.Cause.FINISHED, policy.Cause.STOPPED)
        if ranks and (not is_orderly or any(r.is_unsaved for r in ranks)):
            self._want_flush(f"launch {self.memory.launch} ended: {verdict.cause.value}")
        self.memory.ended = {
            "action": action.action,
            "reason": action.reason,
            "exit_code": action.exit_code,
            "pause_s": action.pause_s,
            "cause": verdict.cause.value,
            "had_ranks": bool(ranks),
            "since_s": self._clock.monotonic_s(),
        }
        self._publish()

    def _conclude(self, look: dict[str, Any], answer: dict[str, Any]) -> None:
        """Once the flush is done (or has taken too long): restart or finish."""
        ended = self.memory.ended
        assert ended is not None
        waited_s = self._clock.monotonic_s() - float(ended["since_s"])
        flush = self.memory.flush
        is_flushed = flush is None or int(answer.get("flushed", 0)) >= int(flush["id"]) or not self._plan
        # A save in progress is waited for as long as it takes: cut short it would be thrown away.
        if answer.get("busy") or (not is_flushed and waited_s < _FLUSH_WAIT_S):
            return
        if ended["action"] == "restart" and not look["signals"]:
            if waited_s < float(ended["pause_s"]):
                return
            self._launch(str(ended["reason"]))
            return
        code, text = self._exit(look, ended, answer)
        self._finish(code, text)

    def _exit(self, look: dict[str, Any], ended: dict[str, Any], answer: dict[str, Any]) -> tuple[int, str]:
        durable = answer.get("durable") or {}
        saved = f"step {durable['step']} is durable" if durable else "nothing was saved"
        if look["signals"] and ended.get("cause") != policy.Cause.FINISHED.value:
            number = int(look["signals"][0])
            name = signal.Signals(number).name
            if number == signal.SIGINT:
                return 130, f"stopped by {name}; {saved}"
            if durable:
                return 20, f"stopped by {name}; {saved}; run the same command to go on"
            return 128 + number, f"stopped by {name}; {saved}"
        code = int(ended["exit_code"])
        if code:
            return code, f"{ended['reason']}; {saved}"
        if self._settings.argv and not ended.get("had_ranks"):
            return 0, "the command ended with 0 but made no ridethrough.Checkpointer: nothing of it was protected"
        return 0, f"finished; {saved}" if self._settings.argv else ""

    def _finish(self, code: int, text: str) -> None:
        self._pen.note("run.ended", exit_code=code, reason=text)
        self._link.request("finish", code=code, message=f"ridethrough: {redact_text(text)} (exit {code})" if text else "")

    # -- being stopped ---------------------------------------------------------------------------------------------

    def _stop(self, number: int, ranks: tuple[RankState, ...]) -> None:
        """One more step of the agreement to stop; see `stop`."""
        before = self.memory.stop
        wish = self._stopper.advance(before, ranks, number=number, now_s=self._clock.monotonic_s())
        if wish.record is not None:
            self._pen.note("stop.decided", **wish.record)
        if wish.state != before:
            self.memory.stop = wish.state
            self._publish()
        if wish.send is not None:
            whom = "workers" if wish.send == signal.SIGKILL else "command"
            if wish.send == signal.SIGKILL and ranks and wish.record is not None:
                self._request_flush("the grace time is over")
            if self._settings.argv:
                self._link.request("signal", number=wish.send, whom=whom)

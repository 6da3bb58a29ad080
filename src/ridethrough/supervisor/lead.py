"""The lead's decisions: from what every node says to one word for all. Pure but for a few timers; no I/O."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridethrough.errors import Fenced, JobStuck
from ridethrough.supervisor import muster, policy, saving
from ridethrough.supervisor.directive import Directive, Incident, Outcome, Stage
from ridethrough.supervisor.muster import Presence
from ridethrough.supervisor.scene import ORDERLY, Scene, Sight, Surroundings
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.stop import Stopper, as_rank
from ridethrough.supervisor.view import NodePhase, NodeView

_HEAR_S = 0.2
"""An announcement must be seen by every rank before it gets there: a few rounds ahead."""
_HEAR_FAR_S = 1.0
"""The same with other nodes: a beat may be lost and is sent again."""
_OTHER_ENDS_S = 4.0
"""After one node's command has failed, the others get this long to tell what they saw: the first is not always the root."""
_SLOW_NODE_S = 120.0
"""A node that takes longer than this for a save has a dead mount: others write its parts."""
_FLUSH_WAIT_S = 120.0
_MUSTER_S = 1.0
"""Nodes that only have to look at their gates are ready by then; later it is said who is waited for."""
_NAMED = 4
_REASON_CHARS = 300
_NOTHING_SAVED: dict[str, Any] = {
    "announced": None,
    "announcement": 0,
    "dark": (),
    "flush": None,
    "confirmed": None,
    "refused": None,
    "stop": None,
    "is_suspect": False,
    "outcome": None,
}


@dataclass(frozen=True, slots=True)
class Event:
    """Goes on record."""

    kind: str
    data: dict[str, Any]


class Lead:
    """Decides while its node leads; a successor starts with fresh timers and the same directive."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopper = Stopper(settings.grace_s)
        self._since: dict[str, float] = {}
        self._said: set[str] = set()
        self._silent: set[str] = set()
        self._dead: set[tuple[str, int]] = set()
        self._slow: dict[str, int] = {}
        """Nodes that hang in a dead mount, and since which save."""
        self.events: list[Event] = []

    def _note(self, kind: str, **data: Any) -> None:
        self.events.append(Event(kind, data))

    def _waited_s(self, what: str, scene: Scene) -> float:
        """Since this was first asked of this launch."""
        name = f"{what} of {scene.directive.room} {scene.directive.generation}"
        return scene.around.now_s - self._since.setdefault(name, scene.around.now_s)

    def decide(self, directive: Directive, sights: Mapping[str, Sight], around: Surroundings) -> Directive:
        """The next word; an equal one if nothing changes. What goes on record is in `events`."""
        if directive.stage is Stage.RUNNING and around.attempt is not None and directive.attempt != around.attempt:
            directive = replace(directive, attempt=around.attempt, **{**_NOTHING_SAVED, "stop": directive.stop})
        scene = Scene(directive=directive, sights=sights, around=around, settings=self._settings)
        if directive.stage is Stage.CALLING:
            return self._call(scene)
        if directive.stage is Stage.RUNNING:
            return self._run(scene)
        if directive.stage is Stage.OVER:
            return self._conclude(scene)
        return directive

    # -- calling the nodes -----------------------------------------------------------------------------------------

    def _call(self, scene: Scene) -> Directive:
        directive = scene.directive
        if scene.signal:
            code = 130 if scene.signal == signal.SIGINT and directive.generation else 128 + scene.signal
            return self._finish(scene, code, "stopped before the command was started")
        outcome = directive.outcome
        if outcome is not None and self._waited_s("pause", scene) < outcome.pause_s:
            return directive
        present = {
            node: Presence(is_ready=sight.view.is_ready and sight.view.phase is not NodePhase.RUNNING, missing=sight.view.missing)
            for node, sight in scene.sights.items()
            if sight.view is not None and sight.age_s <= self._settings.suspect_s
        }
        call = muster.call(
            self._settings.config.recovery,
            scene.around.order,
            present,
            waited_s=self._waited_s("muster", scene),
            has_shared_tier=scene.around.has_shared_tier,
        )
        if call.action == "wait" and self._waited_s("muster", scene) < _MUSTER_S:
            return directive
        if call.action == "wait":
            said = f"{directive.generation} {call.reason}"
            if said not in self._said:
                self._said.add(said)
                absent = [n for n in scene.around.order if n not in present or not present[n].is_ready]
                self._note("muster.waiting", reason=call.reason, missing=absent)
            return directive
        if call.action == "stop":
            return self._finish(scene, JobStuck.exit_code, call.reason)
        reason = outcome.reason if outcome is not None else "first start"
        self._since = {name: at_s for name, at_s in self._since.items() if name == "incident"}
        self._said.clear()
        return replace(
            directive,
            stage=Stage.RUNNING,
            # A node may come from a launch that the word we go on from does not know.
            generation=max([directive.generation, *(s.view.generation for s in scene.sights.values() if s.view is not None)]) + 1,
            called_s=scene.around.now_s,
            members=call.members,
            reason=f"{reason}; {call.reason}"[:_REASON_CHARS] if call.is_shrunk else reason,
            **_NOTHING_SAVED,
        )

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _run(self, scene: Scene) -> Directive:
        over = self._judge(scene)
        if over is not None:
            return over
        directive = self._close_incident(scene)
        if not scene.living:
            return directive
        directive = self._watch(scene, directive)
        if scene.signal:
            directive = self._stop(scene, directive)
        return self._save(scene, directive)

    def _judge(self, scene: Scene) -> Directive | None:
        """The launch is over if every living node's command has ended, one has failed, a node is given up, or nothing moves."""
        if scene.stuck is not None:
            return self._finish(scene, JobStuck.exit_code, scene.stuck)
        if scene.fenced is not None and self._settings.argv:
            return self._finish(scene, Fenced.exit_code, scene.fenced)
        lost = scene.lost()
        if lost:
            detail = f"{_listed(lost)} {'has' if len(lost) == 1 else 'have'} gone dark"
            return self._give_up(scene, lost, detail)
        if policy.suspicion(scene.pace, hang_s=self._settings.hang_s) == "convict" and self._settings.argv:
            self._note("hang.convicted", overdue_s=round(scene.pace.overdue_s, 2), action="stop the trainers and restart")
            verdict = policy.Verdict(cause=policy.Cause.HANG, fingerprint="hang", detail="no rank made progress; the trainers were stopped")
            return self._end(scene, verdict)
        if not scene.ends or (not scene.failed and scene.at_work):
            return None
        if scene.at_work and self._waited_s("end", scene) < _OTHER_ENDS_S:
            return None
        if scene.silent and scene.has_only_symptoms:
            # Or no failure at all: whether the silent nodes are dark decides what it means.
            sights = [scene.seen[n] for n in scene.silent]
            if not any(s.has_restarted for s in sights) and min(s.silent_s for s in sights) < self._settings.dead_s:
                return None
            if scene.failed:
                return self._give_up(scene, scene.silent, f"{_listed(scene.silent)} silent, and the collectives of the others broke")
        root = scene.root()
        assert root.end is not None
        verdict = policy.Verdict(
            cause=policy.Cause(root.end.cause),
            fingerprint=root.end.fingerprint,
            detail=root.end.detail if len(scene.members) == 1 else f"{root.node}: {root.end.detail}",
            exit_code=root.end.exit_code,
            is_retryable=root.end.is_retryable,
        )
        return self._end(scene, verdict, root=root)

    def _give_up(self, scene: Scene, lost: tuple[str, ...], detail: str) -> Directive:
        self._note("peer.convicted", **scene.silence(lost))
        return self._end(scene, policy.Verdict(cause=policy.Cause.DARK, fingerprint="dark", detail=detail), lost=lost)

    def _end(self, scene: Scene, verdict: policy.Verdict, *, lost: tuple[str, ...] = (), root: NodeView | None = None) -> Directive:
        directive, around = scene.directive, scene.around
        end = policy.LaunchEnd(status=0, output="", start_step=scene.start_step, last_step=scene.last_step)
        action = policy.next_action(verdict, end, around.past, durable_step=scene.saved_step)
        if scene.signal and action.action == "restart":
            action = policy.NextAction(action="finish", reason=verdict.detail)
        is_orderly = verdict.cause in ORDERLY
        own = root.end if root is not None else None
        self._note(
            "launch.ended",
            launch=directive.generation,
            status=own.status if own is not None else None,
            cause=verdict.cause.value,
            fingerprint=verdict.fingerprint,
            detail=verdict.detail,
            members=list(scene.members) if len(scene.members) > 1 else None,
            lost=list(lost) or None,
            last_step=scene.last_step,
            action=action.action,
            reason=action.reason,
            exit_code=action.exit_code,
            pause_s=action.pause_s,
            output=own.output if own is not None and not is_orderly else None,
        )
        incident = directive.incident
        if incident is None and not is_orderly and scene.last_step >= 0:
            incident = Incident(cause=verdict.cause.value, detail=verdict.detail, nodes=lost, last_step=scene.last_step, opened_at=around.now_at)
            self._since["incident"] = around.now_s
        elif incident is not None and lost:
            incident = replace(incident, nodes=tuple(dict.fromkeys([*incident.nodes, *lost])))
        outcome = Outcome(
            cause=verdict.cause.value,
            fingerprint=verdict.fingerprint,
            detail=verdict.detail,
            action=action.action,
            reason=action.reason,
            exit_code=action.exit_code,
            pause_s=action.pause_s,
            last_step=scene.last_step,
            lost=lost,
        )
        return replace(directive, stage=Stage.OVER, is_suspect=False, incident=incident, outcome=outcome)

    def _close_incident(self, scene: Scene) -> Directive:
        """Every rank has made a step again: the incident is over."""
        directive, incident = scene.directive, scene.directive.incident
        here = [scene.living[n] for n in scene.members if n in scene.living]
        if incident is None or len(here) < len(scene.members) or not all(v.has_stepped and v.generation >= directive.generation for v in here):
            return directive
        restored_step = max(v.restored_step for v in here)
        began_s = self._since.pop("incident", None)
        self._note(
            "incident",
            outcome="recovered",
            cause=incident.cause,
            detail=incident.detail,
            nodes=list(incident.nodes),
            opened_at=incident.opened_at,
            last_step=incident.last_step,
            restored_step=restored_step,
            lost_steps=max(incident.last_step - restored_step, 0),
            recovery_s=round(scene.around.now_s - began_s, 2) if began_s is not None else None,
            members=list(scene.members),
        )
        return replace(directive, incident=None)

    def _watch(self, scene: Scene, directive: Directive) -> Directive:
        """What is suspicious stops nothing; memory is made durable."""
        why = []
        fresh = [node for node in scene.silent if node not in self._silent]
        if fresh:
            # One record for all: half a room of them, each with its fsync, would hold up what is to be done about it.
            self._note("peer.suspected", **scene.silence(fresh))
            why.append(f"{_listed(fresh)} silent")
        heard = sorted(self._silent & set(scene.living))
        if heard:
            self._note("peer.heard_again", nodes=heard)
        self._silent = set(scene.silent)
        dead = {(n, rank) for n, v in scene.living.items() for rank in v.dead_ranks}
        if dead - self._dead:
            why.append(f"trainer of rank {', '.join(str(rank) for _, rank in sorted(dead, key=lambda d: d[1]))} died")
        self._dead = dead
        found = policy.suspicion(scene.pace, hang_s=self._settings.hang_s)
        if found is None and directive.is_suspect:
            self._note("hang.cleared", step=scene.last_step)
            directive = replace(directive, is_suspect=False)
        elif found is not None and not directive.is_suspect:
            self._note("hang.suspected", overdue_s=round(scene.pace.overdue_s, 2), step_s_p99=round(scene.pace.step_s_p99, 4))
            directive = replace(directive, is_suspect=True)
            why.append("steps are overdue")
        return self._flush(scene, directive, "; ".join(why)) if why else directive

    def _stop(self, scene: Scene, directive: Directive) -> Directive:
        """One more step of the agreement to stop; see `stop`."""
        # A silent node counts as one that has not seen the proposal: all stop at one step, or none does.
        views = {n: s.view for n, s in scene.seen.items() if s.view is not None and s.view.ranks and not s.has_restarted}
        ranks = tuple(as_rank(v, is_heard=n in scene.living) for n, v in views.items())
        wish = self._stopper.advance(directive.stop, ranks, number=scene.signal, now_s=scene.around.now_s)
        if wish.record is not None:
            self._note("stop.decided", **wish.record)
        if wish.state != directive.stop:
            directive = replace(directive, stop=wish.state)
        if wish.send == signal.SIGKILL and ranks and wish.record is not None:
            directive = self._flush(scene, directive, "the grace time is over")
        return directive

    # -- saves -----------------------------------------------------------------------------------------------------

    def _flush(self, scene: Scene, directive: Directive, reason: str) -> Directive:
        """What is only in memory becomes durable, as far as it is whole without the dark nodes."""
        if self._settings.config.recovery.resume == "roll-back":
            self._note("flush.omitted", reason=f"{reason}; recovery.resume is roll-back")
            return directive
        number = max([int((directive.flush or {}).get("id", 0)), *(v.flushed for v in scene.living.values())]) + 1
        flush: dict[str, Any] = {"id": number, "reason": reason}
        if len(scene.members) > 1:
            steps = saving.complete_steps(scene.living, scene.dark, scene.around.replica_nodes, is_shared=scene.around.has_shared_tier)
            flush |= {"step": max(steps, default=-1), "dark": sorted(scene.dark)}
        return replace(directive, flush=flush)

    def _save(self, scene: Scene, directive: Directive) -> Directive:
        around = scene.around
        if around.attempt is None or not all(v.ranks and v.attempt == around.attempt for v in scene.living.values()):
            return directive
        durable_step = scene.durable_step
        if len(scene.members) > 1:
            before = directive.confirmed
            directive = saving.confirm(directive, scene.members, scene.living, around.is_covered)
            durable_step = int(directive.confirmed["step"]) if directive.confirmed else -1
            diverged = saving.divergence(scene.members, scene.living, durable_step) if directive.confirmed != before else None
            if diverged is not None and f"{durable_step} {diverged[0]}" not in self._said:
                self._said.add(f"{durable_step} {diverged[0]}")
                self._note("replicas.diverged", step=durable_step, part=diverged[0], nodes=list(diverged[1]), ranks=[], tensors=[])
            directive = saving.hear_refusal(directive, scene.living)
            directive = self._take_over(scene, directive, durable_step)
        dark = tuple(sorted(self._absent(scene))) if len(scene.members) > 1 else ()
        return saving.announce(
            directive,
            scene.living,
            durable_step=durable_step,
            save_interval_steps=around.save_interval_steps,
            restored_step=around.restored_step,
            lead_s=_HEAR_S if len(scene.members) == 1 else _HEAR_FAR_S,
            is_whole=not scene.dark and all(v.is_whole for v in scene.living.values()),
            dark=dark if around.is_covered(dark) else (),
        )

    def _take_over(self, scene: Scene, directive: Directive, durable_step: int) -> Directive:
        """The announced save is made without nodes that have fallen silent since, or hang in a dead mount."""
        around, living = scene.around, scene.living
        current = saving.announced_step(directive, restored_step=around.restored_step, save_interval_steps=around.save_interval_steps)
        self._slow = {n: step for n, step in self._slow.items() if n in living and not saving.has_answered(living[n], step)}
        if current <= durable_step or saving.is_refused(directive, current) or not all(v.step >= current for v in living.values()):
            return directive
        if self._waited_s(f"save {current}", scene) > _SLOW_NODE_S:
            self._slow |= {n: current for n, v in living.items() if not saving.has_answered(v, current)}
        dark = {*self._absent(scene), *directive.dark}
        if dark == set(directive.dark) or not around.is_covered(dark):
            return directive  # without what they have it would never be whole; the others may yet be heard
        writers = {n: v for n, v in living.items() if n not in dark}
        if current in saving.complete_steps(writers, dark, around.replica_nodes, is_shared=around.has_shared_tier):
            self._note("save.taken_over", step=current, dark=sorted(dark))
            return replace(directive, announced=current, announcement=directive.announcement + 1, dark=tuple(sorted(dark)))
        if any(v.posted and current not in v.posted and v.posted[-1] > current for v in writers.values()):
            return saving.refuse(directive, current, f"{_listed(sorted(dark))} did not seal their parts in time, and memory no longer has the step")
        return directive

    def _absent(self, scene: Scene) -> set[str]:
        """Members without whom the next save is made: silent, or at an old one for minutes."""
        return {*scene.dark, *self._slow}

    # -- the end ---------------------------------------------------------------------------------------------------

    def _conclude(self, scene: Scene) -> Directive:
        """When nobody is left and memory is durable (or it has taken too long): call again, or finish."""
        directive, outcome = scene.directive, scene.directive.outcome
        assert outcome is not None
        if scene.stuck is not None:
            return self._finish(scene, JobStuck.exit_code, scene.stuck)
        # A node may have fallen silent a moment ago and still be at its flush; one that has restarted has nothing left to flush.
        unsure = [scene.seen[n] for n in scene.silent if n not in outcome.lost]
        is_unsure = any(sight.silent_s < self._settings.dead_s and not sight.has_restarted for sight in unsure)
        # Whoever was never called, its link being out just then, has nothing to end.
        if is_unsure or any(v.phase is NodePhase.RUNNING for v in scene.living.values()):
            return directive
        living = {n: v for n, v in scene.living.items() if v.generation >= directive.generation}
        ranks = {n: v for n, v in living.items() if v.ranks and v.attempt is not None}
        if ranks and (outcome.cause not in ORDERLY or any(v.is_unsaved for v in ranks.values())):
            flush = directive.flush or {}
            if flush.get("of") != f"{directive.room} {directive.generation}":
                asked = self._flush(scene, directive, f"launch {directive.generation} ended: {outcome.cause}")
                if asked.flush is not directive.flush:
                    return replace(asked, flush={**(asked.flush or {}), "of": f"{directive.room} {directive.generation}"})
            elif any(v.flushed < int(flush["id"]) for v in ranks.values()) and self._waited_s("over", scene) < _FLUSH_WAIT_S:
                return directive
        # A save in progress is waited for as long as it takes: cut short it would be thrown away.
        if any(v.is_saving for v in scene.living.values()):
            return directive
        if len(scene.members) > 1:
            # Of this launch only: what a node has sealed in an earlier one, of the same step, is no part of this save.
            confirmed = saving.hear_refusal(saving.confirm(directive, scene.members, living, scene.around.is_covered), living)
            if confirmed is not directive:
                return confirmed  # said to all before the launch is forgotten
            if self._waited_s("told", scene) < 2 * _HEAR_S:
                return directive
        if outcome.action == "restart" and not scene.signal:
            return replace(directive, stage=Stage.CALLING, reason=outcome.reason)
        code, text = scene.last_words(outcome)
        return self._finish(scene, code, text)

    def _finish(self, scene: Scene, code: int, text: str) -> Directive:
        incident = scene.directive.incident
        if incident is not None:
            self._note(
                "incident",
                outcome="handed to a person" if code else "ended with the run",
                cause=incident.cause,
                detail=incident.detail,
                nodes=list(incident.nodes),
                opened_at=incident.opened_at,
                last_step=incident.last_step,
            )
        return replace(scene.directive, stage=Stage.FINISHED, code=code, text=text, incident=None)


def _listed(nodes: Sequence[str]) -> str:
    """Names for people; of a thousand nobody reads more than a few, and a heartbeat has no room for them."""
    return ", ".join(nodes[:_NAMED]) + (f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else "")

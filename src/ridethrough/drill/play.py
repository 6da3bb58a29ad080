"""One run of the trainee on a site, with the faults of a scenario, to its end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ridethrough.drill import command, measure
from ridethrough.drill.measure import CutResult
from ridethrough.drill.scenario import SERVER, Cut, Fault, Instant, Scenario
from ridethrough.drill.site import Site
from ridethrough.drill.watch import Event, PersisterView, Watch
from ridethrough.errors import DrillFailed

STEP_WAIT_S = 180.0
_SLOW_STEP_S = 1.0
"""Four ranks on two busy cores."""
_POLL_S = 0.002
_POLL_MANY_S = 0.01
"""Several nodes leave less of the processor to those who only look."""
_VERDICTS = ("peer.convicted", "node.convicted", "trainer.died", "hang.convicted", "launch.ended")
Say = Callable[[str], None]


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    cuts: list[CutResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    shrunk_s: float | None = None
    """When it began to go on without a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Struck:
    """A fault whose consequence has not been seen yet."""

    cut: Cut
    phase: str
    at_s: float
    at_step: int
    since: int
    """Number of the first event after it."""
    seq: int
    """Newest attempt that had made a step before it."""
    acknowledged: int
    limit_steps: int | None


class Play:
    """Drives one run.

    Args:
        site: Its nodes.
        watch: What is seen of it.
        scenario: What happens to it.
        sabotage: A class of state to break after each resume: the run then ends with the first one.
        rng: Of the instants within a step.
        say: Told of each stage.
    """

    def __init__(self, site: Site, watch: Watch, scenario: Scenario, *, sabotage: str | None, rng: random.Random, say: Say) -> None:
        self._site = site
        self._watch = watch
        self._scenario = scenario
        self._sabotage = sabotage
        self._rng = rng
        self._say = say
        self._poll_s = _POLL_S if scenario.nodes == 1 else _POLL_MANY_S
        self._due: list[tuple[float, Cut, tuple[str, ...]]] = []
        self._running: set[str] = set()
        """Nodes whose command must not have failed."""
        self._power_s: dict[str, float] = {}
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """The run has ended by itself, and every consequence is on record; or why it could not be driven to its end."""
        try:
            self._run()
        except DrillFailed as error:
            self._outcome.failures.append(str(error))
        return self._outcome

    def _run(self) -> None:
        if self._site.shared:
            self._site.await_shared(self._site.names)
        for node in self._site.names:
            self._give_command(node)
        struck: list[_Struck] = []
        for cut in (*self._scenario.cuts, None):
            if struck and (cut is None or cut.kind is not Instant.RECOVERING):
                result = self._felt(struck) if struck[-1].cut.is_felt else self._unfelt(struck[-1])
                self._outcome.cuts.append(result)
                struck = []
                if self._sabotage is not None:
                    # What was broken shows right after the resume: no need to train to the end.
                    self._await(lambda: sum(line.is_resume for line in self._watch.lines) >= self._scenario.ranks, "the state after the resume")
                    return
            if cut is not None:
                struck.append(self._strike(cut))
        everything = STEP_WAIT_S + self._scenario.steps * _SLOW_STEP_S
        self._await(lambda: all(self._site.has_ended(node) is not None for node in self._running), "the end of the run", within_s=everything)
        for node in sorted(self._running):
            code = self._site.has_ended(node)
            if code != 0:
                self._outcome.failures.append(f"the run ended with {code} on {node}: {self._watch.last_words((node,))}")

    # -- commands and time -----------------------------------------------------------------------------------------

    def _give_command(self, node: str) -> None:
        with self._watch.log_path(node).open("ab") as log:
            argv = command.command(self._site, self._scenario, self._watch.directory, sabotage=self._sabotage)
            self._site.start(node, argv, environment=command.environment(self._site, node), log=log)
        self._running.add(node)

    def _act(self) -> None:
        """What is due is done: power and links come back, commands are given again."""
        now_s = time.monotonic()
        due = [entry for entry in self._due if entry[0] <= now_s]
        self._due = [entry for entry in self._due if entry[0] > now_s]
        for _, cut, nodes in due:
            if cut.fault is Fault.POWER:
                self._site.power_on(nodes)
                self._power_s.update(dict.fromkeys(nodes, time.monotonic()))
                for node in nodes:
                    if node != SERVER:
                        self._give_command(node)
            elif cut.fault is Fault.CABLE:
                self._site.set_links(nodes, is_up=True)
            else:
                self._site.heal()
            if self._scenario.nodes > 1:
                self._say(f"back: {', '.join(nodes)}")

    def _await(self, is_there: Callable[[], object], what: str, *, within_s: float = STEP_WAIT_S) -> None:
        def act() -> None:
            self._act()
            ended = {node: code for node in self._running if (code := self._site.has_ended(node)) is not None}
            # One node's command may end a little before the others'.
            if any(ended.values()) or len(ended) == len(self._running) > 0:
                self._watch.look()
                if not is_there():
                    text = ", ".join(f"{code} on {node}" for node, code in sorted(ended.items()))
                    raise DrillFailed(detail=f"the command ended with {text} before {what}: {self._watch.last_words(tuple(ended))}")

        self._watch.wait(is_there, what, within_s=within_s, act=act, pause_s=self._poll_s)

    # -- faults ----------------------------------------------------------------------------------------------------

    def _strike(self, cut: Cut) -> _Struck:
        """The fault has happened, at its instant; its end is due."""
        phase, limit = self._await_instant(cut)
        self._watch.look()
        since, seq = len(self._watch.events), self._watch.newest_seq()
        at_s = time.monotonic()
        if cut.fault is Fault.POWER:
            self._site.cut(cut.nodes)
            self._running -= set(cut.nodes)
        elif cut.fault is Fault.CABLE:
            self._site.set_links(cut.nodes, is_up=False)
        else:
            self._site.part(cut.nodes, set(self._site.names) - set(cut.nodes))
        self._watch.look()
        by_delay: dict[float, list[str]] = {}
        for node in cut.nodes:
            if node not in cut.never:
                by_delay.setdefault(cut.back_after_s(node), []).append(node)
        self._due += [(at_s + delay, cut, tuple(nodes)) for delay, nodes in by_delay.items()]
        step = self._watch.last_step()[0]
        who = f" of {cut.describe()}" if self._scenario.nodes > 1 else ""
        self._say(f"cut{who}, {cut.kind.value}, after step {step} (persister: {phase})")
        return _Struck(
            cut=cut, phase=phase, at_s=at_s, at_step=step, since=since, seq=seq, acknowledged=self._watch.acknowledged(), limit_steps=limit
        )

    def _await_instant(self, cut: Cut) -> tuple[str, int | None]:
        """Returns at the instant of the cut; says what the persister was doing, and how many steps may be lost."""
        if cut.kind is Instant.RECOVERING:
            since = len(self._watch.events)
            self._await(lambda: self._watch.of("peer.convicted", "launch.decided", since=since), "the recovery")
            self._hold(self._rng.random() * 2.0)
            return "recovering", None
        after = cut.after_step
        if cut.kind is Instant.AGAIN:
            after += max((int(event.data["restored_step"]) for event in self._watch.of("launch.stepped")[-1:]), default=0)
        left = max(after - self._watch.last_step()[0], 0)
        self._await(lambda: self._watch.last_step()[0] >= after, f"step {after}", within_s=STEP_WAIT_S + left * _SLOW_STEP_S)
        victims = [node for node in cut.nodes if node != SERVER]
        view = PersisterView(self._site.seen((victims or list(self._site.names))[0], command.state_dir(self._site)))
        if cut.kind is Instant.MID_SAVE:
            deadline = time.monotonic() + STEP_WAIT_S
            while time.monotonic() < deadline:
                busy = view.busy()
                if busy and busy["phase"] == "writing":
                    time.sleep(self._rng.random() * 0.005)
                    break
            else:
                raise DrillFailed(detail="no save was seen in progress")
        else:
            time.sleep(self._rng.random() * 0.04)
        found = view.busy()
        busy = found or (busy if cut.kind is Instant.MID_SAVE else None)
        self._watch.look()
        return (str(busy["phase"]) if busy else "train"), self._limit(cut, busy_step=int(busy["step"]) if busy and "step" in busy else None)

    def _limit(self, cut: Cut, *, busy_step: int | None) -> int | None:
        """How many steps this fault may cost."""
        left = set(self._site.names) - set(cut.nodes)
        if left or not cut.is_felt:
            return command.SNAPSHOT_INTERVAL_STEPS
        made = self._watch.last_step()[0]
        # A save in progress does not count yet: what it was begun for may be lost with it.
        return self._scenario.save_interval_steps + max(made - busy_step, 0) if busy_step is not None else self._scenario.save_interval_steps

    def _hold(self, time_s: float) -> None:
        end_s = time.monotonic() + time_s
        self._await(lambda: time.monotonic() >= end_s, "a moment")

    # -- consequences ----------------------------------------------------------------------------------------------

    def _felt(self, struck: list[_Struck]) -> CutResult:
        """The job has started again, and made a step."""
        first, last = struck[0], struck[-1]
        self._await(lambda: self._stepped(first), "the first step after the resume")
        self._hold(5 * self._poll_s)  # the other nodes' word on the same start
        stepped = max(self._stepped(first), key=lambda event: float(event.data["times_s"]["first_step"]))
        times_s = stepped.data["times_s"]
        restored, attached_s = int(stepped.data["restored_step"]), float(times_s["attached"])
        victims = {node for one in struck for node in one.cut.nodes if one.cut.fault is Fault.POWER}
        verdicts = [e for e in self._watch.of(*_VERDICTS, since=first.since) if e.node not in victims and e.seen_s < attached_s]
        decided = [e.at_s for e in self._watch.of("launch.decided", since=first.since) if e.at_s <= attached_s]
        power_s = max((self._power_s[node] for node in victims if self._power_s.get(node, 0.0) < attached_s and node in self._power_s), default=0.0)
        detected_s = verdicts[0].seen_s if verdicts else power_s
        ended = [e.seen_s for e in verdicts if e.kind == "launch.ended"]
        at_step, at_s = self._watch.last_step(before_s=attached_s)
        rto_s, phases = measure.phases(
            last_step_s=at_s,
            power_s=power_s,
            detected_s=detected_s,
            classified_s=ended[0] if ended else detected_s,
            launched_s=max(decided, default=attached_s),
            times_s=times_s,
        )
        if self._scenario.shrinks and self._outcome.shrunk_s is None and any(one.cut.never for one in struck):
            self._outcome.shrunk_s = attached_s
        acknowledged = max(last.acknowledged, self._watch.acknowledged(before_s=attached_s))
        if restored < acknowledged:
            self._outcome.failures.append(f"step {acknowledged} was called durable and step {restored} was restored")
        convicted = [e for e in verdicts if e.kind in ("peer.convicted", "node.convicted")]
        self._say(f"resumed at step {restored}: RPO {at_step - restored} steps, RTO {rto_s:.1f} s")
        return CutResult(
            kind="+".join(one.cut.kind.value for one in struck),
            phase="+".join(one.phase for one in struck),
            nodes=", then ".join(one.cut.describe() for one in struck),
            returns=", then ".join(one.cut.describe_return() for one in struck),
            at_step=at_step,
            restored_step=restored,
            rpo_steps=at_step - restored,
            rpo_limit_steps=self._scenario.save_interval_steps if len(struck) > 1 else last.limit_steps,
            rto_s=rto_s,
            rto_phases_s=phases,
            convicted_s=convicted[0].seen_s - first.at_s if convicted else None,
        )

    def _stepped(self, struck: _Struck) -> list[Event]:
        """The newest attempt's word that it has made a step, if it began after the fault."""
        found = [e for e in self._watch.of("launch.stepped", since=struck.since) if int(e.data["attempt"]["seq"]) > struck.seq]
        newest = max((int(e.data["attempt"]["seq"]) for e in found), default=0)
        return [e for e in found if int(e.data["attempt"]["seq"]) == newest]

    def _unfelt(self, struck: _Struck) -> CutResult:
        """The job has gone on without a restart, and saves again."""
        cut = struck.cut
        self._await(lambda: not self._due, "the end of the fault")
        end_s, step = time.monotonic(), self._watch.last_step()[0]
        self._await(lambda: self._watch.last_step()[0] > step + 2, "a step after the fault")
        self._await(lambda: self._watch.acknowledged() > max(struck.acknowledged, step), "a durable save after the fault")
        restarts = [event for event in self._watch.of("launch.ended", "launch.decided", since=struck.since)]
        if restarts:
            self._outcome.failures.append(f"a healthy job was restarted: {restarts[0].kind} on {restarts[0].node}")
        times_s = [line.at_s for line in self._watch.lines if not line.is_resume]
        still_s = measure.standstill(times_s, from_s=struck.at_s, to_s=end_s)
        before_s, after_s = max(t for t in times_s if t <= end_s), min(t for t in times_s if t > end_s)
        rto_s = after_s - max(before_s, end_s)
        self._say(f"went on without a restart; at most {still_s:.1f} s without a step")
        return CutResult(
            kind=cut.kind.value,
            phase=struck.phase,
            nodes=cut.describe(),
            returns=cut.describe_return(),
            at_step=struck.at_step,
            restored_step=None,
            rpo_steps=0,
            rpo_limit_steps=struck.limit_steps,
            rto_s=rto_s,
            rto_phases_s={**dict.fromkeys(measure.PHASES, 0.0), "first_step": rto_s},
            standstill_s=still_s,
        )

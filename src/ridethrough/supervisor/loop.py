"""The supervisor's loop: observe this node, hear the others, decide if this node leads, do what the lead says.

Never touches storage itself. A job of one node has a room of one: the same loop, with nobody to talk to.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ridethrough.format import layout
from ridethrough.journal import Journal
from ridethrough.redact import redact_text
from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot import link as names
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan
from ridethrough.supervisor import muster, policy, saving
from ridethrough.supervisor.directive import Directive, Stage
from ridethrough.supervisor.gates import Gates
from ridethrough.supervisor.lead import Lead
from ridethrough.supervisor.memory import Memory
from ridethrough.supervisor.observe import Observer
from ridethrough.supervisor.record import Pen
from ridethrough.supervisor.rooms import Rooms
from ridethrough.supervisor.scene import Sight, Surroundings
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.talk import CALL_SLACK_S, MANY, Talk
from ridethrough.supervisor.view import NodePhase, NodeView

ROUND_S = 0.05
_LIBRARY_WAIT_S = 120.0
_SURVEY_S, _FAR_SURVEY_S = 1.0, 5.0
FAR_DECIDE_S = 0.25
"""Between two decisions for many nodes: each looks at all of them."""
_FAREWELL_S = 3.0
"""How long a lead that ends repeats its last word for nodes that have not heard it."""


class Supervisor:
    """Serves one keeper until the run is over.

    Args:
        fs: For the journal and the key.
        clock: The clock.
        link: To the keeper.
        settings: What to run and how.
        pen: Where events go; one of its own unless given.
        talk: With the other nodes; over real UDP unless given.
    """

    def __init__(
        self, fs: FileSystem, clock: Clock, link: KeeperLink, settings: Settings, *, pen: Pen | None = None, talk: Talk | None = None
    ) -> None:
        self._fs = fs
        self._clock = clock
        self._link = link
        self._settings = settings
        self._me = process.node_name()
        self._control = link.board(names.CONTROL)
        kept = self._control.read()
        self.memory = Memory(**kept["memory"]) if kept else Memory()
        self._pen = pen or Pen()
        self._is_library = not settings.argv
        self._observer = Observer(clock, link, self._me, is_library=self._is_library)
        self._lead = Lead(settings)
        self._talk = talk or Talk(clock, settings, self._me)
        self._rooms = Rooms(fs, clock, link, settings, self._talk, self._pen, me=self._me)
        self._began_s = clock.monotonic_s()
        self._gates: Gates | None = None
        self._farewell_s: float | None = None
        self._survives: dict[str, int] = {}
        self._silent_s: dict[str, float | None] = {}
        self._surveyed_s = self._decided_s = float("-inf")
        self._overdue: tuple[int, str] | None = None
        """Step and phase of the save that is known to be overdue."""
        self._written: dict[str, Any] = {}
        self.directive = Directive.decode(self.memory.directive) if kept else self._first_word()
        self._encoded: Directive | None = None
        """What `memory.directive` is the code of."""
        if kept:
            self._pen.note("supervisor.restarted", launch=self.memory.launch)
            self._observer.follow(self.memory.launch)

    def _first_word(self) -> Directive:
        # A library's trainers run already; there is nothing to call.
        return Directive(lead=self._me, stage=Stage.RUNNING if self._is_library else Stage.CALLING)

    def run(self) -> None:
        """Serves until the keeper ends (raises KeeperGone)."""
        while True:
            self.round()
            self._clock.sleep(ROUND_S)

    # -- one round -------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Observe everything once, and do what follows from it."""
        look = self._link.request("look")
        self._open_journal(look)
        self._find_launch(look)
        self._observer.look()
        self._rooms.open(look, has_launched=self.memory.launch > 0)
        self.directive = self._rooms.change(self.directive, self._observer.plan, self.memory)
        heard = self._talk.hear(self.directive)
        mine = self._view(look)
        is_lead = self._talk.leads(mine, heard)
        if is_lead:
            heard = self._decide(heard, mine)
        self._take(heard)
        self._publish(is_lead=is_lead)
        for event in self._lead.events:
            self._pen.note(event.kind, **event.data)
        self._lead.events.clear()
        self._note_own(mine, is_lead=is_lead)
        self._obey(look, mine, is_lead=is_lead)
        self._talk.say(mine, self.directive, is_lead=is_lead)

    def _open_journal(self, look: dict[str, Any]) -> None:
        if look["run_dir"] and not self._pen.is_open:
            path = layout.journal_path(look["run_dir"], self._me)
            self._pen.open(Journal(self._fs, self._clock, path, role="supervisor"))

    def _find_launch(self, look: dict[str, Any]) -> None:
        if not self._is_library:
            if int(look["launch"]) > self.memory.launch:
                # A predecessor had started it and died before it could write that down.
                self._adopt(int(look["launch"]), self.directive.generation)
            return
        found = [int(name.split("/")[0]) for name in self._link.names() if name[0].isdigit()]
        if found and max(found) > self.memory.launch:
            self._adopt(max(found), self.directive.generation)
        elif not found and not look["trainers"] and self._clock.monotonic_s() - self._began_s > _LIBRARY_WAIT_S:
            self._link.request("finish", code=0)

    def _adopt(self, launch: int, generation: int) -> None:
        """The launch is ours to watch."""
        self.memory = Memory(
            launch=launch,
            generation=generation,
            has_agreed=self.memory.has_agreed,
            past=self.memory.past,
            judged=self.memory.judged,
            directive=self.directive.encode(),
        )
        self._observer.follow(launch)

    def _view(self, look: dict[str, Any]) -> NodeView:
        return self._observer.view(
            look,
            generation=self.memory.generation,
            is_stopping=self.directive.stop is not None,
            readiness=self._readiness(),
            confirmed_step=int((self.directive.confirmed or {}).get("step", -1)),
        )

    def _readiness(self) -> tuple[bool, tuple[str, ...]]:
        """Whether this node may be called, and the gates that are still shut; they are asked only while nobody trains."""
        if not self._settings.config.has_gates:
            return True, ()
        if self.directive.stage is not Stage.CALLING:
            return False, ()  # a lead that calls must not go by what was said before: storage may have died since
        if self._rooms.keyless is not None:
            return False, (self._rooms.keyless,)
        if self._gates is None:
            self._gates = Gates(self._clock, self._settings.config, self._settings.config.run, node=self._me)
        found = self._gates.look(self.directive.lead or None)
        return found.is_ready, found.missing

    def _decide(self, directive: Directive, mine: NodeView) -> Directive:
        plan, now_s = self._observer.plan, self._clock.monotonic_s()
        if self._rooms.is_changing(directive):
            return directive
        if directive.lead == self._me and len(self._talk.order) > MANY and now_s - self._decided_s < FAR_DECIDE_S:
            return directive
        self._decided_s = now_s
        sights = self._talk.sights(mine, directive)
        self._survey(sights, plan)
        around = Surroundings(
            me=self._me,
            order=self._talk.order,
            attempt=plan.attempt.label if plan else None,
            save_interval_steps=plan.save_interval_steps if plan else 1,
            restored_step=plan.restored_step if plan else 0,
            replica_nodes=plan.replica_nodes if plan else lambda node: (),
            is_covered=plan.is_covered if plan else lambda dark: not dark,
            has_shared_tier=self._settings.config.storage == "shared" or (plan is not None and plan.is_shared),
            past=tuple(policy.PastEnd(**p) for p in self.memory.past),
            now_s=now_s,
            now_at=self._clock.now_at().isoformat(timespec="milliseconds"),
        )
        decided = self._lead.decide(directive, sights, around)
        if decided == directive and directive.lead == self._me:
            return directive
        return replace(decided, number=directive.number + 1, lead=self._me)

    def _survey(self, sights: Mapping[str, Sight], plan: Plan | None) -> None:
        """For `status`: what memory would still have after a loss, and who is heard. Now and then: it looks at every node."""
        every_s = _SURVEY_S if len(sights) <= MANY else _FAR_SURVEY_S
        if len(sights) == 1 or self._clock.monotonic_s() - self._surveyed_s < every_s:
            return
        self._surveyed_s = self._clock.monotonic_s()
        # Of those that are heard there is nothing to tell, and a thousand of them would make a long story.
        silent = {n: s for n, s in sights.items() if s.view is None or s.silent_s > self._settings.suspect_s}
        self._silent_s = {n: round(s.silent_s, 2) if s.view is not None else None for n, s in silent.items()}
        self._survives = {}
        if plan is not None:
            members = frozenset(plan.nodes)
            living = {n: s.view for n, s in sights.items() if n in members and s.view is not None and s.silent_s <= self._settings.suspect_s}
            by_domain: dict[str, list[str]] = {}
            for node in plan.nodes:
                by_domain.setdefault(plan.domains.get(node, node), []).append(node)
            scopes: dict[str, Iterable[Collection[str]]] = {"any one node": [[n] for n in plan.nodes]}
            if len(by_domain) < len(plan.nodes):
                scopes["any one power domain"] = by_domain.values()
            self._survives = {
                scope: saving.surviving_step(living, groups, plan.replica_nodes, is_shared=plan.is_shared) for scope, groups in scopes.items()
            }

    def _take(self, directive: Directive) -> None:
        """The word is known here; what it ends is remembered with it, in one breath."""
        outcome = directive.outcome
        if outcome is not None and directive.stage is not Stage.RUNNING and directive.generation > self.memory.judged:
            self.memory.judged = directive.generation
            saved = int((directive.confirmed or {}).get("step", -1))
            past = policy.PastEnd(fingerprint=outcome.fingerprint, last_step=outcome.last_step, durable_step=max(saved, self._observer.saved_step()))
            self.memory.past = [*self.memory.past[-50:], asdict(past)]
        self.directive = directive

    def _publish(self, *, is_lead: bool) -> None:
        """Trainers, persister, courier and a successor know what this supervisor knows."""
        plan = self._observer.plan
        if plan is not None:
            self.memory.has_agreed = True
        if self._encoded is not self.directive:
            self._encoded = self.directive
            self.memory.directive = self.directive.encode()
        said = self.directive
        is_ours = plan is not None and said.attempt == plan.attempt.label and said.generation == self.memory.generation
        self._write(
            {
                # Not `asdict`, which copies every name of a thousand nodes, each round.
                "memory": {name: getattr(self.memory, name) for name in Memory.__slots__} | {"dead_ranks": list(self.memory.dead_ranks)},
                "launch": self.memory.launch,
                # The word is of the next launch: whatever it says, or does not say any more, is nothing for this one.
                "is_over": said.generation > self.memory.generation,
                "is_lead": is_lead,
                "peer_port": self._rooms.port,
                "suspected": said.is_suspect,
                "refused_packets": self._talk.refused,
                "survives": self._survives,
                "silent_s": self._silent_s,
                # What the lead has said of another attempt is no word for the ranks of this one.
                "announced": said.announced if is_ours else None,
                "announcement": said.announcement if is_ours else 0,
                "dark": list(said.dark) if is_ours else [],
                "flush": said.flush if is_ours or plan is None else None,
                "confirmed": said.confirmed if is_ours else None,
                "refused": said.refused if is_ours else None,
                "stop": said.stop if said.generation == self.memory.generation else None,
            }
        )

    def _write(self, value: dict[str, Any]) -> None:
        if value != self._written:  # every rank reads what changes, in each of its steps
            self._control.write(value)
            self._written = value

    # -- what happens here -----------------------------------------------------------------------------------------

    def _note_own(self, mine: NodeView, *, is_lead: bool) -> None:
        ranks = self._observer.ranks
        fresh = [rank for rank in mine.dead_ranks if rank not in self.memory.dead_ranks]
        if fresh and self.directive.stage is Stage.RUNNING:  # later they die because we say so
            self.memory.dead_ranks.extend(fresh)
            self._pen.note("trainer.died", ranks=fresh, step=mine.step)
        self._note_overdue_save()
        if mine.has_stepped and not self.memory.recovered and self._observer.plan is not None:
            # Once a launch, when every rank has made its first step: how long each phase of the start took.
            slowest = max(ranks, key=lambda r: r.times_s["first_step"])
            attempt = self._observer.plan.attempt
            self._pen.note(
                "launch.stepped",
                launch=self.memory.generation or self.memory.launch,
                restored_step=slowest.restored_step,
                times_s=slowest.times_s,
                attempt={"seq": attempt.seq, "nonce": attempt.nonce},
            )
            self.memory.recovered = True
            self._note_return(mine, slowest.restored_step, is_lead=is_lead)

    def _note_overdue_save(self) -> None:
        """Said when a phase has begun to hang: the persister, which could say more, is the one that is stuck."""
        found = self._observer.overdue_save()
        overdue = (found.step, found.phase) if found is not None else None
        if found is not None and overdue != self._overdue:
            durable_step = self._observer.saved_step()
            self._pen.note(
                "save.overdue",
                step=found.step,
                phase=found.phase,
                waited_s=round(found.waited_s, 1),
                durable_step=durable_step if durable_step >= 0 else None,
            )
        self._overdue = overdue

    def _note_return(self, mine: NodeView, restored_step: int, *, is_lead: bool) -> None:
        """The run goes on after all supervisors were gone, so nobody could open an incident: power, or a kill of everything."""
        if is_lead and self._pen.is_unfinished and not self.memory.past and self.directive.incident is None and restored_step > 0:
            self._pen.note(
                "incident",
                outcome="recovered",
                cause="dark",
                detail="every supervisor was gone without having ended the run: power, or a kill of everything",
                nodes=list(self.directive.members) or [self._me],
                restored_step=restored_step,
                lost_steps=None,
                recovery_s=round(mine.up_s, 2),
                members=list(self.directive.members) or [self._me],
            )

    def _obey(self, look: dict[str, Any], mine: NodeView, *, is_lead: bool) -> None:
        """What the lead says is done; again each round, for whoever wrote it down may have died before doing it."""
        said = self.directive
        if look["status"] is not None and look["workers"]:
            # Nobody of the old launch may live on into the next: SIGKILL also ends the frozen.
            self._link.request("signal", number=signal.SIGKILL, whom="workers")
        if said.stage is Stage.FINISHED:
            self._finish(mine, is_lead=is_lead)
            return
        is_member = not said.members or self._me in said.members
        if said.generation > self.memory.generation and self._clock.monotonic_s() - mine.up_s > said.called_s + CALL_SLACK_S:
            return  # called before this keeper was there: its ranks would meet those of a launch that has long begun
        if self._is_library:
            return
        is_current = is_member and said.stage is Stage.RUNNING and said.generation == self.memory.generation
        if mine.phase is NodePhase.RUNNING and not is_current:
            # Over, or of a launch that the others know nothing of any more: it may have been frozen and wake up now.
            self._link.request("signal", number=signal.SIGKILL, whom="workers")
        elif not is_member:
            return
        elif said.stage is Stage.RUNNING and said.generation > self.memory.generation:
            self._launch(said)
        elif said.stop is not None and said.stop["state"] == "signalled" and said.generation == self.memory.generation:
            if said.stop.get("killed"):
                self._link.request("signal", number=signal.SIGKILL, whom="workers")
            elif not self.memory.is_terminated:
                self.memory.is_terminated = True
                self._link.request("signal", number=signal.SIGTERM, whom="command")

    def _launch(self, said: Directive) -> None:
        # A fresh start is wished for until there was one; what comes after is a restart and goes on.
        agreed = {names.RESTART_VARIABLE: "1"} if self.memory.has_agreed else {names.FRESH_VARIABLE: "1"} if self._settings.is_fresh else {}
        config = self._settings.config
        environment = muster.launch_environment(
            said.members,
            node=self._me,
            addresses=config.addresses,
            rendezvous_port=config.recovery.rendezvous_port,
            generation=said.generation,
            argv=self._settings.argv,
        )
        self._pen.note(
            "launch.decided",
            launch=said.generation,
            reason=said.reason,
            at_s=self._clock.monotonic_s(),
            command=process.shown_command(self._settings.argv),
            members=list(said.members) if len(said.members) > 1 else None,
        )
        old = self.memory.launch
        if old:
            self._link.request("free", prefix=f"{old}/")
        answer = self._link.request("spawn", argv=list(self._settings.argv), environment={**environment, **agreed})
        self._adopt(int(answer["launch"]), said.generation)
        self._publish(is_lead=False)
        if old:
            # Before the courier has heard of the new launch it may have made memory for one more replica of the old one.
            self._link.request("free", prefix=f"{old}/")

    def _finish(self, mine: NodeView, *, is_lead: bool) -> None:
        """The keeper ends with the lead's code; a lead waits until the others have heard."""
        said = self.directive
        if mine.phase is NodePhase.RUNNING and not self._is_library and not mine.stuck:
            self._link.request("signal", number=signal.SIGKILL, whom="workers")
            return
        if self._farewell_s is None:
            self._farewell_s = self._clock.monotonic_s()
            self._pen.note("run.ended", exit_code=said.code, reason=said.text)
        if is_lead and self._talk.is_open and self._clock.monotonic_s() - self._farewell_s < _FAREWELL_S:
            return
        text = redact_text(said.text)
        self._link.request("finish", code=said.code, message=f"ridethrough: {text} (exit {said.code})" if text else "")

"""With whom this node decides.

A *room* is the set of nodes that decide together. With nodes in the configuration it is those, for
good. Otherwise a node is alone until its ranks have agreed on an attempt with other nodes; the room is
then that attempt's nodes, until the attempt is over.
"""

from __future__ import annotations

from typing import Any

from ridethrough.errors import UsageError
from ridethrough.redact import redact_text
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import FileSystem
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan
from ridethrough.supervisor.directive import Directive, Stage
from ridethrough.supervisor.memory import Memory
from ridethrough.supervisor.record import Pen
from ridethrough.supervisor.secret import KeyFinder
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.talk import Talk

_KEY_WAIT_S = 2.0
"""Healthy storage has told the key by then; later a person is told why nothing happens."""
_PARTING_S = 1.0
"""How long nodes that had met only for an attempt repeat that it is over before they are alone again: two beats."""


class Rooms:
    """Opens the talk with other nodes and closes it.

    Args:
        fs: For the key.
        clock: The clock.
        link: To the keeper.
        settings: The nodes and how they are reached.
        talk: What is opened.
        pen: Where it is said why it cannot be.
        me: This node.
    """

    def __init__(self, fs: FileSystem, clock: Clock, link: KeeperLink, settings: Settings, talk: Talk, pen: Pen, *, me: str) -> None:
        self._fs, self._clock, self._link, self._talk, self._pen, self._me = fs, clock, link, talk, pen, me
        self._config = settings.config
        self._is_configured = len(settings.config.nodes) > 1 and bool(settings.argv)
        self._began_s = clock.monotonic_s()
        self._finder: KeyFinder | None = None
        self._said = ""
        self._parting_s: float | None = None
        self.port = 0
        """Where this node listens; 0 while it does not."""

    @property
    def keyless(self) -> str | None:
        """Why the key of the configured nodes is not known yet, None if it is or none is needed."""
        return self._finder.reason if self._finder is not None and self._finder.key is None else None

    def is_changing(self, said: Directive) -> bool:
        """Nothing is decided now: without the key nobody can be called, and from a room that is over each goes on by itself."""
        return (self._is_configured and not self._talk.is_open) or self._is_over(said)

    @staticmethod
    def _is_over(said: Directive) -> bool:
        return bool(said.room) and said.stage is Stage.CALLING

    def open(self, look: dict[str, Any], *, has_launched: bool) -> None:
        """This node listens: with configured nodes from the beginning, else when a rank has found that there are other nodes."""
        if not self.port and (self._is_configured or look["wants_peers"]):
            try:
                self.port = self._talk.listen()
            except UsageError as error:
                self._give_up(error, has_launched=has_launched)
                return
        if not self._is_configured or self._talk.is_open:
            return
        config = self._config
        assert config.run is not None
        if self._finder is None:
            self._finder = KeyFinder(self._fs, self._clock, config.run, config.peers.key_file)
        if self._finder.refusal is not None:
            self._give_up(self._finder.refusal, has_launched=has_launched)
        elif self._finder.key is not None:
            addresses = {node: (address, config.peers.port) for node, address in config.addresses.items()}
            self._talk.enter(key=self._finder.key, scope=config.run, addresses=addresses, order=config.order)
            self._talk.election.enter(None, now_s=self._clock.monotonic_s())
        elif self._clock.monotonic_s() - self._began_s > _KEY_WAIT_S and self._finder.reason != self._said:
            self._said = self._finder.reason  # the other nodes cannot say it for us: we cannot talk to them
            self._pen.note("muster.waiting", reason=self._said, missing=[self._me])

    def _give_up(self, error: UsageError, *, has_launched: bool) -> None:
        """Waiting does not help: the command ends with what is wrong; but not one that trains, whose supervisor was only restarted."""
        if not has_launched:
            said = f"ridethrough: {redact_text(str(error))} ({error.code}, exit {error.exit_code})"
            self._link.request("finish", code=error.exit_code, message=said)
        elif str(error) != self._said:
            self._said = str(error)
            self._pen.note("supervisor.deaf", reason=self._said)

    def change(self, said: Directive, plan: Plan | None, memory: Memory) -> Directive:
        """The word to go on from: a node that was alone meets those of its attempt, and is alone again when the attempt is over."""
        if self._is_configured:
            return said
        now_s = self._clock.monotonic_s()
        if self._is_over(said):
            # Each repeats it for a moment: whoever has lost the one packet would wait until it believes the others dead.
            self._parting_s = now_s if self._parting_s is None else self._parting_s
            if now_s - self._parting_s < _PARTING_S:
                return said
            self._parting_s = None
            self._talk.leave()
            return Directive(lead=self._me, generation=memory.generation, outcome=said.outcome, incident=said.incident)
        if plan is None or len(plan.nodes) == 1 or self._talk.is_open or said.stage is not Stage.RUNNING:
            return said
        addresses = {node: (str(a[0]), int(a[1])) for node, a in plan.addresses.items()}
        self._talk.enter(key=plan.key, scope=plan.run_uid, addresses=addresses, order=plan.nodes)
        self._talk.election.enter(plan.nodes[0], now_s=now_s)
        if said.room == plan.attempt.label:
            return said
        # Every node says the same of the new room, so nobody has to be told.
        memory.generation = plan.attempt.seq
        memory.judged = min(memory.judged, plan.attempt.seq - 1)
        return Directive(
            room=plan.attempt.label,
            lead=plan.nodes[0],
            stage=Stage.RUNNING,
            generation=plan.attempt.seq,
            called_s=now_s,
            members=plan.nodes,
            attempt=plan.attempt.label,
            incident=said.incident,
        )

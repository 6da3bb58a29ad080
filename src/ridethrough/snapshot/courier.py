"""The courier: private parts of every new snapshot to two other nodes, and theirs into this node's memory.

What a dark node had for itself (random generators, loader position) is then still in the memory of others. The
courier never touches storage, never waits for a peer, and never keeps a trainer from its slots.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from ridethrough.errors import UsageError
from ridethrough.format.layout import rank_part
from ridethrough.seam import tcp
from ridethrough.seam.clock import Clock
from ridethrough.snapshot import link as names
from ridethrough.snapshot.holder import Holder
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.posted import Posted
from ridethrough.snapshot.replicas import Replicas
from ridethrough.snapshot.sender import Batch, Sender

_LOOK_S, _LOOK_CALM_S = 0.005, 0.05
_LOOKS_A_STEP = 10
"""So often are slots looked at, within these limits: a step is then seen within a tenth of its time."""
_NAMES_S, _NAMES_CALM_S = 0.05, 0.25
"""How often the keeper is asked for new slots: while there are some, since a rank makes them with its first snapshots, and later."""
_LISTEN_AGAIN_S = 1.0


class Courier:
    """Serves one keeper until it dies. Its board says where it listens, what it holds and how far its own parts have got.

    Args:
        clock: For pauses and deadlines.
        link: To the keeper.
        config: The node's configuration, as it stands in the keeper's facts.
    """

    def __init__(self, clock: Clock, link: KeeperLink, config: Mapping[str, Any]) -> None:
        peers = config.get("peers") or {}
        self._port = int(peers.get("port") or 0)
        self._interface: str | None = peers.get("interface") or None
        self._clock = clock
        self._link = link
        self._control = link.board(names.CONTROL)
        self._control_generation = -1
        self._is_wanted = False
        self._board = link.board(names.COURIER)
        before = self._board.read()
        # The other nodes know the port from the start agreement: a successor must be found there.
        self._known_port = int(before.get("port") or 0)
        self._refused_before = int(before.get("refused") or 0)
        self._server: socket.socket | None = None
        self._listen_error: str | None = None
        self._listen_at_s = 0.0
        self._launch = 0
        self._plan: Plan | None = None
        self._replicas = Replicas(link)
        self._holder = Holder(self._replicas)
        self._posted: Posted | None = None
        self._offered = -1
        self._senders: dict[str, Sender] = {}
        self._look_at_s = self._names_at_s = self._moved_s = 0.0
        self._step_s = 0.0
        self._names_pause_s = _NAMES_S
        self._held: dict[str, list[int]] = {}
        self._published: dict[str, Any] = {}
        self._look(self._clock.monotonic_s())
        self._publish()

    def run(self) -> None:
        """Serves until the keeper dies (raises KeeperGone)."""
        while True:
            self.tick()

    def tick(self, wait_s: float | None = None) -> None:
        """One round: what has come is dealt with, what is new is sent.

        Args:
            wait_s: How long to wait for something to happen at most; until the next look at the slots unless given.
        """
        now_s = self._clock.monotonic_s()
        if now_s >= self._look_at_s:
            self._look(now_s)
        self._flush()
        pause_s = self._look_at_s - now_s
        ready = tcp.wait(self._connections(), self._server, timeout_s=pause_s if wait_s is None else min(wait_s, pause_s))
        now_s = self._clock.monotonic_s()
        self._holder.serve(self._server, ready, now_s)
        for sender in self._senders.values():
            if sender.connection is not None and sender.connection.fileno() in ready:
                sender.receive(now_s)
            sender.advance(now_s)
        # Before the receipts leave: what another node believes to be held here stands on our board.
        self._publish()
        self._flush()

    def close(self) -> None:
        """Everything is let go; what is held stays with the keeper. Idempotent."""
        self._forget_launch()
        self._replicas.close()
        self._stop_listening()
        self._control.close()
        self._board.close()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _connections(self) -> list[tcp.Connection]:
        mine = [sender.connection for sender in self._senders.values() if sender.connection is not None]
        return [*mine, *self._holder.connections]

    def _flush(self) -> None:
        for connection in self._connections():
            connection.flush()

    def _look(self, now_s: float) -> None:
        generation = self._control.generation
        if generation != self._control_generation:
            self._control_generation = generation
            control = self._control.read()
            self._is_wanted = bool(control.get("peer_port"))
            launch = int(control.get("launch", 0))
            if launch != self._launch:
                self._change_launch(launch)
        if now_s >= self._names_at_s:
            is_new = self._learn()
            self._names_pause_s = _NAMES_S if is_new else min(2 * self._names_pause_s, _NAMES_CALM_S)
            self._names_at_s = now_s + self._names_pause_s
        self._listen(now_s)
        self._offer(now_s)
        step_s = max(self._step_s, now_s - self._moved_s)
        self._look_at_s = now_s + min(max(step_s / _LOOKS_A_STEP, _LOOK_S), _LOOK_CALM_S)

    def _learn(self) -> bool:
        """The plan once it is there, and slots made since, are known; False if there was nothing new."""
        if self._posted is not None:
            return self._posted.refresh()
        known = self._link.names()
        if self._plan is not None or not self._launch or names.plan_board(self._launch) not in known:
            return False
        board = self._link.board(names.plan_board(self._launch), known[names.plan_board(self._launch)])
        value = board.read()
        board.close()
        if value:
            self._begin(Plan.from_board(value))
        return bool(value)

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        if not self._has_peers:
            self._stop_listening()
            return
        private = [rank for rank in plan.local_ranks if rank_part(rank) in plan.roster.part_names]
        self._posted = Posted(self._link, self._launch, private)
        self._posted.refresh()
        self._senders = {node: Sender(plan, node, self._interface) for node in plan.replica_nodes(plan.node) if node in plan.addresses}
        self._holder.change_plan(plan)

    @property
    def _has_peers(self) -> bool:
        return self._plan is not None and bool(self._plan.key) and len(self._plan.addresses) > 1

    def _forget_launch(self) -> None:
        self._plan = None
        self._holder.change_plan(None)
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        if self._posted is not None:
            self._posted.close()
            self._posted = None
        self._offered = -1

    def _change_launch(self, launch: int) -> None:
        self._forget_launch()
        self._launch = launch
        self._replicas.change_launch(launch)
        self._held = self._replicas.held()
        self._names_at_s = 0.0

    def _offer(self, now_s: float) -> None:
        """The newest step that all ranks of this node have is what the senders send next."""
        if self._posted is None:
            return
        newest = self._posted.newest_common()
        if newest <= self._offered:
            return
        self._step_s, self._moved_s = now_s - self._moved_s, now_s
        parts = self._posted.copy_all(newest)
        if not parts:
            return  # overwritten meanwhile: the next look finds a newer one
        self._offered = newest
        for sender in self._senders.values():
            sender.offer(Batch(step=newest, parts=parts))
            sender.advance(now_s)

    # -- listening -------------------------------------------------------------------------------------------------

    def _listen(self, now_s: float) -> None:
        # On a node that is alone nobody listens: the supervisor opens its port when a rank has found other nodes.
        is_wanted = self._has_peers if self._plan is not None else self._is_wanted
        if self._server is not None or not is_wanted or now_s < self._listen_at_s:
            return
        try:
            self._server = tcp.listen(self._port or self._known_port, self._interface)
        except UsageError as error:
            self._listen_error = str(error)
            self._listen_at_s = now_s + _LISTEN_AGAIN_S
            if not self._has_peers:
                self._known_port = 0  # nobody counts on that port any more: any will do
            return
        self._listen_error = None
        self._known_port = int(self._server.getsockname()[1])

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    # -- the board -------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self._holder.has_news:
            self._holder.has_news = False
            self._held = self._replicas.held()
        answer = {
            "pid": os.getpid(),
            "port": int(self._server.getsockname()[1]) if self._server is not None else 0,
            "launch": self._launch,
            "held": self._held,
            "lag": {node: sender.acknowledged for node, sender in self._senders.items() if sender.acknowledged >= 0},
            "refused": self._refused_before + self._holder.refused,
            "last_refusal": self._holder.last_refusal,
            "too_large": sorted(self._posted.too_large) if self._posted is not None else [],
            "trouble": {node: sender.trouble for node, sender in self._senders.items() if sender.trouble},
            "error": self._listen_error,
        }
        if answer != self._published:
            self._published = answer
            self._board.write(answer)

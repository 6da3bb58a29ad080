"""This node's talk with the others: views go to the lead, the lead's directive comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ridethrough.seam.clock import Clock
from ridethrough.seam.udp import Datagrams, UdpSocket
from ridethrough.supervisor.directive import Directive
from ridethrough.supervisor.election import Election
from ridethrough.supervisor.peers import Peers
from ridethrough.supervisor.scene import Sight
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.view import NodeView

BEAT_S = 0.4
"""Three beats and a question fit into the time after which a node is suspected."""
_FAR_BEAT_S = 1.0
"""Of the lead to many nodes."""
_MANY = 64
_GAP_S = 0.04
_DEPUTIES = 2
"""Nodes after the lead that hear every view, so that a successor knows at once who is there."""
CALL_SLACK_S = 0.2
"""Ages of calls and keepers are compared across nodes: a packet's way and a round of the loop may lie between."""

OpenSocket = Callable[[int, str | None], Datagrams]


def _open_udp(port: int, interface: str | None) -> UdpSocket:
    return UdpSocket(port=port, interface=interface)


class Talk:
    """Heartbeats, views and directives of one node. Nothing here waits.

    Args:
        clock: The clock.
        settings: Ports and times.
        me: This node.
        open_socket: Binds a port of an interface; real UDP unless given.
    """

    def __init__(self, clock: Clock, settings: Settings, me: str, *, open_socket: OpenSocket | None = None) -> None:
        self._clock = clock
        self._settings = settings
        self._me = me
        self._open_socket: OpenSocket = open_socket or _open_udp
        self._socket: Datagrams | None = None
        self._peers: Peers | None = None
        self.election = Election(me, suspect_s=settings.suspect_s, listen_s=settings.suspect_s + 0.5)
        self.order: tuple[str, ...] = (me,)
        self._views: dict[str, NodeView] = {}
        self._follows: dict[str, str] = {}
        self._heard_s: dict[str, float] = {}
        self._lives: dict[str, str | None] = {}
        self._lead_number = -1
        """Of the newest directive that whom we follow is known to have."""
        self._sent_s = float("-inf")
        self._sent: tuple[Any, ...] = ()

    # -- opening ---------------------------------------------------------------------------------------------------

    def listen(self) -> int:
        """The port on which this node listens, bound now if it was not.

        Raises:
            UsageError: The configured port is in use, or there is no such interface.
        """
        if self._socket is None:
            self._socket = self._open_socket(self._settings.config.peers.port, self._settings.config.peers.interface)
        return self._socket.port

    def enter(self, *, key: str, scope: str, addresses: Mapping[str, tuple[str, int]], order: tuple[str, ...]) -> None:
        """These are the nodes now."""
        self.listen()
        assert self._socket is not None
        self._peers = Peers(
            self._clock,
            self._socket,
            key=bytes.fromhex(key),
            scope=scope,
            node=self._me,
            addresses=addresses,
            suspect_s=self._settings.suspect_s,
        )
        self.order = order
        self._views.clear()
        self._follows.clear()
        self._lead_number = -1
        self._sent = ()

    def leave(self) -> None:
        """This node is alone."""
        self._peers = None
        self.order = (self._me,)
        self._views.clear()

    @property
    def is_open(self) -> bool:
        """There are others to talk to."""
        return self._peers is not None

    @property
    def refused(self) -> dict[str, int]:
        """Packets that were not believed, by reason."""
        return {str(reason): count for reason, count in self._peers.refused.items()} if self._peers is not None else {}

    # -- hearing ---------------------------------------------------------------------------------------------------

    def hear(self, directive: Directive) -> Directive:
        """The newest word, ours or another's."""
        if self._peers is None:
            return directive
        now_s = self._clock.monotonic_s()
        for heard in self._peers.receive():
            try:
                body = json.loads(heard.body)
                if body.get("r") != directive.room:
                    continue
                self._views[heard.node] = NodeView.decode(body["v"])
                self._follows[heard.node] = str(body["f"])
                self._heard_s[heard.node] = now_s
                self._lives[heard.node] = self._peers.life(heard.node)
                said = self._decode(body["d"], now_s) if "d" in body else None
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # authentic, so of another version: it cannot be understood, and is no word from a living peer
            if heard.node == self.election.following:
                self._lead_number = said.number if said is not None else int(body.get("n", 0))
            if said is not None and self._beats(said, directive):
                directive = said
            if said is not None and said.lead == heard.node and said.lead == directive.lead:
                self.election.follow(said.lead, now_s=now_s)
        return directive

    def _beats(self, one: Directive, other: Directive) -> bool:
        """Of two words the later one counts, of two equally late ones that of the earlier node.

        A later launch comes first: whoever was cut off meanwhile may have said more, but of something that is over.
        """
        if (one.generation, one.number) != (other.generation, other.number):
            return (one.generation, one.number) > (other.generation, other.number)
        return self._rank_of(one.lead) < self._rank_of(other.lead)

    def _rank_of(self, node: str) -> int:
        return self.order.index(node) if node in self.order else len(self.order)

    def leads(self, mine: NodeView, directive: Directive) -> bool:
        """This node decides now."""
        if self._peers is None:
            return True
        now_s = self._clock.monotonic_s()
        order, holders = self._candidates(mine, directive, now_s)
        followed = self.election.following
        if followed is not None and followed not in holders and any(n == self._me or self._is_heard(n) for n in holders):
            # It has no part in the launch: it does not know the roster, nor who holds what of it.
            self.election.following = followed = None
        is_said_since = followed is not None and self._heard_s.get(followed, float("-inf")) > self.election.since_s
        if followed is not None and followed != self._me and is_said_since and self._follows.get(followed) not in (None, "", followed):
            # Whom we follow does not lead: it knows better. Unless it said so before we had given up whom it names.
            self.election.follow(self._follows[followed], now_s=now_s)
        is_lead = self.election.lead(order, self._peers.age_s, now_s=now_s) == self._me
        if is_lead:
            # Before anything is decided: a node that did not owe this one a word was not silent.
            self._peers.watch(n for n in self.order if n != self._me)
        return is_lead

    def _candidates(self, mine: NodeView, directive: Directive, now_s: float) -> tuple[tuple[str, ...], set[str]]:
        """Who may lead, first come first, and which of them hold the launch: those that have restarted come after these."""
        members = [n for n in self.order if n in directive.members] or list(self.order)
        views = {**{n: (v, self._heard_s[n]) for n, v in self._views.items()}, self._me: (mine, now_s)}
        younger = {n for n, (view, said_s) in views.items() if _is_younger(view, said_s, directive)}
        holders = [n for n in members if n not in younger]
        return (*holders, *(n for n in self.order if n not in holders)), set(holders)

    def _is_heard(self, node: str) -> bool:
        assert self._peers is not None
        age_s = self._peers.age_s(node)
        return age_s is not None and age_s <= self._settings.suspect_s

    def sights(self, mine: NodeView, directive: Directive) -> dict[str, Sight]:
        """Every node as this one sees it."""
        now_s = self._clock.monotonic_s()
        found = {self._me: Sight(view=mine, silent_s=0.0, has_restarted=_is_younger(mine, now_s, directive))}
        if self._peers is None:
            return found
        for node in self.order:
            if node == self._me:
                continue
            view, age_s = self._views.get(node), self._peers.age_s(node)
            silent_s = self._silent_s(node, now_s)
            found[node] = Sight(
                view=view,
                silent_s=silent_s,
                age_s=float("inf") if age_s is None else max(silent_s, age_s),
                has_restarted=view is not None and _is_younger(view, self._heard_s[node], directive),
            )
        return found

    def _silent_s(self, node: str, now_s: float) -> float:
        """Silence of the life whose view we have: that the next one is there does not make it true."""
        assert self._peers is not None
        is_same_life = node not in self._views or self._lives[node] == self._peers.life(node)
        return self._peers.silence_s(node) if is_same_life else now_s - self._heard_s[node]

    # -- speaking --------------------------------------------------------------------------------------------------

    def say(self, view: NodeView, directive: Directive, *, is_lead: bool) -> None:
        """What the others should know is on its way: at once if it is news, else once a beat."""
        if self._peers is None:
            return
        now_s = self._clock.monotonic_s()
        news = _news(view, directive if is_lead else None)
        beat_s = BEAT_S if not is_lead or len(self.order) <= _MANY else _FAR_BEAT_S
        since_s = now_s - self._sent_s
        if since_s < _GAP_S or (since_s < beat_s and news == self._sent):
            return
        self._sent_s, self._sent = now_s, news
        following = self.election.following
        body: dict[str, Any] = {"r": directive.room, "f": following or "", "v": view.encode()}
        if is_lead or directive.number > self._lead_number:
            # A lead that has just started may know less than those it leads.
            body["d"] = self._encode(directive, now_s)
        else:
            body["n"] = directive.number
        if is_lead or following is None:
            to = [node for node in self.order if node != self._me]
        else:
            order = [*directive.members, *(n for n in self.order if n not in directive.members)]
            to = [following, *(n for n in order if n not in (following, self._me))][: _DEPUTIES + 1]
        if not is_lead:
            self._peers.watch([following] if following else [])
        self._peers.send(json.dumps(body, separators=(",", ":"), default=str).encode(), to=to)

    def _encode(self, directive: Directive, now_s: float) -> dict[str, Any]:
        """For the way: an age instead of a time, and of a thousand names one digit for four nodes."""
        found = directive.encode()
        found["called_s"] = round(now_s - directive.called_s, 3)
        for holder, name in self._lists(found):
            holder[name] = self._pack(holder[name])
        return found

    def _decode(self, value: dict[str, Any], now_s: float) -> Directive:
        for holder, name in self._lists(value):
            holder[name] = self._unpack(holder[name])
        return Directive.decode({**value, "called_s": now_s - float(value["called_s"])})

    @staticmethod
    def _lists(value: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
        places = [(value, "members"), (value, "dark")]
        places += [(value[holder], name) for holder, name in (("flush", "dark"), ("outcome", "lost"), ("incident", "nodes")) if value.get(holder)]
        return [(holder, name) for holder, name in places if holder.get(name)]

    def _pack(self, names: Iterable[str]) -> str:
        wanted = set(names)
        bits = sum(1 << at for at, node in enumerate(self.order) if node in wanted)
        return f"{bits:x}"

    def _unpack(self, text: str) -> list[str]:
        bits = int(text, 16)
        return [node for at, node in enumerate(self.order) if bits >> at & 1]


def _is_younger(view: NodeView, said_s: float, directive: Directive) -> bool:
    """The node's keeper has started after the launch was called, so it has no part in it."""
    return view.generation < directive.generation and said_s - view.up_s > directive.called_s + CALL_SLACK_S


def _news(view: NodeView, directive: Directive | None) -> tuple[Any, ...]:
    """What must be told at once, and not with the next beat."""
    return (
        view.phase,
        view.generation,
        view.attempt,
        view.is_ready,
        view.signal,
        view.sealed,
        view.refused.number if view.refused else None,
        view.wanted,
        view.stop_seen,
        view.is_stopped,
        view.dead_ranks,
        view.flushed,
        view.has_stepped,
        view.stuck,
        view.is_at_work,
        directive,
    )

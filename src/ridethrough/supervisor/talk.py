"""This node's talk with the others: views go to the lead, the lead's directive comes back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ridethrough.seam.clock import Clock
from ridethrough.seam.udp import Datagrams, UdpSocket
from ridethrough.supervisor.directive import Directive
from ridethrough.supervisor.election import Election
from ridethrough.supervisor.packet import BODY_LIMIT_BYTES
from ridethrough.supervisor.peers import Peers
from ridethrough.supervisor.scene import Sight
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.view import NodeView

BEAT_S = 0.4
"""Three beats and a question fit into the time after which a node is suspected."""
FAR_BEAT_S = 0.75
"""Between many nodes: what the lead hears and says grows with their number. A lost one is asked for before it is missed."""
MANY = 64
_GAP_S = 0.04
_FREE_TEXTS = frozenset({"output", "detail", "reason", "message", "text", "stuck", "missing", "fingerprint"})
_NO_WORD = (-1, "", -1)
_STOP_TIMES = ("since_s", "term_s")
_CUTS = (300, 100, 30)
_CUT_ITEMS = 4
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
        self._watched: tuple[str, ...] = ()
        self._younger: set[str] = set()
        """Nodes whose keeper is younger than the launch called then."""
        self._younger_than: tuple[int, float] | None = None
        self._asked: tuple[tuple[str, ...], frozenset[str]] | None = None
        self._answer: tuple[tuple[str, ...], frozenset[str]] = ((me,), frozenset())
        self._lives: dict[str, str | None] = {}
        self._lead_word = _NO_WORD
        """The newest directive that whom we follow is known to have."""
        self._outdated: set[str] = set()
        """Nodes that lead by an older word than ours: they are told."""
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
        self._younger_than = self._asked = None
        self._watched = ()
        self._lead_word = _NO_WORD
        self._outdated.clear()
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
            said_s = now_s - heard.age_s
            try:
                body = json.loads(heard.body.decode())
                if body.get("r") != directive.room:
                    continue
                view, follows = self._decode_view(body["v"]), str(body["f"])
                said = self._decode(body["d"], said_s) if "d" in body else None
                knows = _word(said) if said is not None else _as_word(body["n"])
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                continue  # authentic, so of another version: it cannot be understood
            self._views[heard.node], self._follows[heard.node], self._heard_s[heard.node] = view, follows, said_s
            self._lives[heard.node] = self._peers.life(heard.node)
            if _is_younger(self._views[heard.node], said_s, directive):
                self._younger.add(heard.node)
            else:
                self._younger.discard(heard.node)
            if heard.node == self.election.following:
                self._lead_word = knows
            if said is not None and self._beats(said, directive):
                directive = said
            elif said is not None and self._beats(directive, said):
                self._outdated.add(heard.node)  # it cannot hear whom we follow, or has just started
            if said is not None and said.lead == heard.node and said.lead == directive.lead:
                self.election.follow(said.lead, now_s=now_s)
        return directive

    def _beats(self, one: Directive, other: Directive) -> bool:
        """Of two words the later one counts, of two equally late ones that of the earlier node."""
        if _word(one) != _word(other):
            return _word(one) > _word(other)
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
            self._watch(self.order)
        return is_lead

    def _candidates(self, mine: NodeView, directive: Directive, now_s: float) -> tuple[tuple[str, ...], frozenset[str]]:
        """Who may lead, first come first, and which of them hold the launch: those that have restarted come after these."""
        call = (directive.generation, directive.called_s)
        if self._younger_than != call:
            self._younger_than = call
            self._younger = {n for n, view in self._views.items() if _is_younger(view, self._heard_s[n], directive)}
        younger = frozenset(self._younger | {self._me} if _is_younger(mine, now_s, directive) else self._younger)
        if (directive.members, younger) != self._asked:
            # Kept until somebody restarts or another launch is called: all nodes would be looked at in each round.
            self._asked = (directive.members, younger)
            holders = frozenset(directive.members or self.order) - younger
            first = [n for n in self.order if n in holders]
            self._answer = ((*first, *(n for n in self.order if n not in holders)), holders)
        return self._answer

    def _is_heard(self, node: str) -> bool:
        assert self._peers is not None
        age_s = self._peers.age_s(node)
        return age_s is not None and age_s <= self._settings.suspect_s

    def sights(self, mine: NodeView, directive: Directive) -> dict[str, Sight]:
        """Every node as this one sees it."""
        now_s = self._clock.monotonic_s()
        found = {self._me: Sight(view=mine, silent_s=0.0, has_restarted=_is_younger(mine, now_s, directive))}
        peers = self._peers
        if peers is None:
            return found
        for node in self.order:
            if node == self._me:
                continue
            view, age_s, silent_s = self._views.get(node), peers.age_s(node), peers.silence_s(node)
            if view is None:
                found[node] = Sight(view=None, silent_s=silent_s, age_s=float("inf") if age_s is None else age_s)
                continue
            heard_s = self._heard_s[node]
            if age_s is None or self._lives[node] != peers.life(node):
                # Silence of the life whose view we have: that the next one is there does not make it true.
                silent_s = age_s = now_s - heard_s
            found[node] = Sight(view=view, silent_s=silent_s, age_s=age_s, has_restarted=_is_younger(view, heard_s, directive))
        return found

    def _watch(self, nodes: tuple[str, ...]) -> None:
        assert self._peers is not None
        if nodes != self._watched:
            self._watched = nodes
            self._peers.watch(n for n in nodes if n != self._me)

    # -- speaking --------------------------------------------------------------------------------------------------

    def say(self, view: NodeView, directive: Directive, *, is_lead: bool) -> None:
        """What the others should know is on its way: at once if it is news, else once a beat."""
        if self._peers is None:
            return
        now_s = self._clock.monotonic_s()
        news = _news(view, directive if is_lead else None)
        beat_s = BEAT_S if len(self.order) <= MANY else FAR_BEAT_S
        since_s = now_s - self._sent_s
        if since_s < _GAP_S or (since_s < beat_s and news == self._sent):
            return
        self._sent_s, self._sent = now_s, news
        following = self.election.following
        body: dict[str, Any] = {"r": directive.room, "f": following or "", "v": self._encode_view(view)}
        if is_lead or self._outdated or _word(directive) > self._lead_word:
            # A lead that has just started may know less than those it leads.
            body["d"] = self._encode(directive, now_s)
        else:
            body["n"] = list(_word(directive))
        if is_lead or following is None:
            to = [node for node in self.order if node != self._me]
        else:
            nearest = itertools.chain(directive.members, self.order)
            to = list(itertools.islice(dict.fromkeys(itertools.chain([following], (n for n in nearest if n != self._me))), _DEPUTIES + 1))
        if not is_lead:
            self._watch(self.election.watched)
        self._peers.send(_fitted(body), to=list(dict.fromkeys([*to, *self._outdated])))
        self._outdated.clear()

    def _encode(self, directive: Directive, now_s: float) -> dict[str, Any]:
        """For the way: an age instead of a time, and of a thousand names one digit for four nodes."""
        found = _turned({**directive.encode(), "called_s": directive.called_s}, now_s)
        for holder, name in self._lists(found):
            holder[name] = self._pack(holder[name])
        return found

    def _decode(self, value: dict[str, Any], now_s: float) -> Directive:
        for holder, name in self._lists(value):
            holder[name] = self._unpack(holder[name])
        return Directive.decode(_turned(value, now_s))

    def _encode_view(self, view: NodeView) -> dict[str, Any]:
        found = view.encode()
        for sealed in found.get("sealed", ()):
            sealed["dark"] = self._pack(sealed["dark"])
        return found

    def _decode_view(self, value: dict[str, Any]) -> NodeView:
        for sealed in value.get("sealed", ()):
            sealed["dark"] = self._unpack(sealed["dark"])
        return NodeView.decode(value)

    @staticmethod
    def _lists(value: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
        places = [(value, "members"), (value, "dark")]
        inner = (("flush", "dark"), ("confirmed", "dark"), ("outcome", "lost"), ("incident", "nodes"))
        places += [(value[holder], name) for holder, name in inner if value.get(holder)]
        return [(holder, name) for holder, name in places if holder.get(name)]

    def _pack(self, names: Iterable[str]) -> str:
        wanted = set(names)
        if not wanted:
            return ""
        bits = sum(1 << at for at, node in enumerate(self.order) if node in wanted)
        return f"{bits:x}"

    def _unpack(self, text: str) -> list[str]:
        if not text:
            return []
        bits = int(text, 16)
        return [node for at, node in enumerate(self.order) if bits >> at & 1]


Word = tuple[int, str, int]
"""What orders directives: launch, attempt, number.

A later launch comes first: whoever was cut off meanwhile may have said more, but of something that is over. Of two halves
that were both called to the same launch, the one whose ranks have agreed on the later attempt goes on: the claim decided so.
"""


def _word(directive: Directive) -> Word:
    return directive.generation, directive.attempt or "", directive.number


def _as_word(value: Any) -> Word:
    generation, attempt, number = value
    return int(generation), str(attempt), int(number)


def _turned(value: dict[str, Any], now_s: float) -> dict[str, Any]:
    """Times of this node's clock as ages, or ages as times: every node's monotonic clock began somewhere else."""
    found = {**value, "called_s": round(now_s - float(value["called_s"]), 3)}
    if value.get("stop") is not None:
        stop = value["stop"]
        found["stop"] = {**stop, **{name: round(now_s - float(stop[name]), 3) for name in _STOP_TIMES if name in stop}}
    return found


def _fitted(body: dict[str, Any]) -> bytes:
    """The body as it is sent. What is only for people to read is cut if it is too long: a node must not fall silent over it."""
    data = _packed(body)
    for chars in _CUTS:
        if len(data) <= BODY_LIMIT_BYTES:
            break
        data = _packed(_cut(body, chars))
    return data


def _packed(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), default=str).encode()


def _cut(value: Any, chars: int, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(inner, chars, key) for key, inner in value.items()}
    if isinstance(value, str):
        return value[:chars] if name in _FREE_TEXTS else value
    if isinstance(value, list | tuple):
        return [_cut(inner, chars, name) for inner in (value[:_CUT_ITEMS] if name in _FREE_TEXTS else value)]
    return value


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

"""Heartbeats between supervisors: what the other nodes say, and how long they have been silent.

Every round of its loop the supervisor calls `receive`, and `send` when it has something to say. Nothing here waits.
What is said is authenticated and proven fresh, but not secret. See `packet` for the bytes on the wire.

How two nodes come to believe each other
    1. A packet is *authentic* if its mac is right. That alone proves nothing about now: it may be a recording.
    2. It is *fresh* if it echoes the token that we gave to this life of the node, and its counter is above the last one
       heard from that life. A life that we do not know must echo the token that we have on offer for the node's next
       one. Tokens are random and made anew at our start and with each new life: recordings from before our start, or
       of a life that was replaced, echo nothing that counts. No counter is stored on disk, no clock compared.
    3. An authentic packet that is not fresh (first contact, restart of either side, recording) is not believed. It is
       answered with the token that its sender would have to echo: once a round, and with no more bytes than it had.
    After two round trips at most both ends believe each other. A packet that is not authentic is never answered.

Silence is measured in the time that we listened: a supervisor that was stopped for a minute has not heard anybody for
a minute, and must not hold that against them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ridethrough.seam.clock import Clock
from ridethrough.seam.udp import Datagrams
from ridethrough.supervisor.packet import ASKS, HAS_BODY, LIFE_BYTES, NO_TOKEN, TOKEN_BYTES, Letter, Packet, Refusal, Signer, milliseconds, tag

SUSPECT_S = 1.5
_ASK_RATIO = 0.75
"""Of the suspicion time: later than the lead's slowest beat, with rounds enough left to ask again."""
_ASK_PAUSE_S = 0.04
"""Just under a round of the supervisor: every round asks once more."""
_ASK_COPIES = 8
"""With four of ten packets lost, 31 asks in six rounds leave a living node silent once in a million times."""
_ASK_LOST_PAUSE_S = 0.5
_BURST_PACKETS = 512
"""Asks and answers a round beyond one for each node: when half the room is dark, repeating helps nobody."""
_STOOD_STILL_S = 1.0
_STOOD_STILL_COUNTS_S = 0.1
_ROUND_PACKETS = 8192
"""Read in one call; a flood may not hold the loop."""


class Heard(NamedTuple):
    """What a node said last.

    A tuple, since thousands are made each second.
    """

    node: str
    body: bytes
    age_s: float
    """How long ago it was said first when it was sent: more than 0 where a lost word was repeated."""


@dataclass(slots=True)
class Traffic:
    """Packets and their bytes since the start, without the headers of UDP and IP."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Peer:
    """What we know of one other node."""

    node: str
    host: str
    port: int
    """Where it listens, as we were told, or as it has told us since."""
    told: tuple[str, int]
    """Its address as we were told it."""
    tag: bytes
    life: bytes = b""
    """The newest that was proven."""
    token: bytes = NO_TOKEN
    """What that life must echo to us."""
    offer: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    """What the next life must echo to us."""
    proof: bytes = b""
    """Life and token, as its packets have them."""
    echo: bytes = NO_TOKEN
    """What we echo to it."""
    counter: int = 0
    """Of the newest packet heard from that life."""
    sent: int = 0
    heard_s: float | None = None
    quiet_since_s: float = 0.0
    """When it was last heard, or when we began to watch it: a node that owed us no word was not silent."""
    asked_s: float = float("-inf")
    asks: int = 0
    """Rounds of asking since it was last heard."""
    packed: bytes | None = None
    """The body that was returned last, as it was carried."""
    said: Letter | None = None
    said_s: float = 0.0
    """When, by the clock: what was said before we stood still is old."""


class Peers:
    """This node's end of the talk between supervisors.

    Args:
        clock: Only its monotonic time is used; the nodes' wall clocks may be hours apart.
        socket: Bound; stays the caller's to close.
        key: The run's secret.
        scope: Names the run.
        node: This node.
        addresses: Host and port of every node; this node's own is not used.
        suspect_s: Silence after which the caller suspects a watched node; it is asked for a word before that.
    """

    def __init__(
        self,
        clock: Clock,
        socket: Datagrams,
        *,
        key: bytes,
        scope: str,
        node: str,
        addresses: Mapping[str, tuple[str, int]],
        suspect_s: float = SUSPECT_S,
    ) -> None:
        self._clock = clock
        self._socket = socket
        self._port = socket.port
        self._signer = Signer(key, scope)
        self._node = node
        self._tag = tag(node)
        self._suspect_s = suspect_s
        self._life = secrets.token_bytes(LIFE_BYTES)
        self._nod = self._signer.letter()
        self._peers: dict[str, _Peer] = {}
        self._by_tag: dict[bytes, _Peer] = {}
        self._watched: list[_Peer] = []
        self._at_s = clock.monotonic_s()
        self._listened_s = 0.0
        self.refused: Counter[Refusal] = Counter()
        """Packets that were not believed, by reason."""
        self.traffic = Traffic()
        self.update(addresses)

    # -- who there is ----------------------------------------------------------------------------------------------

    def update(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """These are the nodes now. What is known of those that stay is kept, also a port that they told us since."""
        for node in [n for n in self._peers if n not in addresses]:
            del self._by_tag[self._peers.pop(node).tag]
        for node, (host, port) in addresses.items():
            if node == self._node:
                continue
            peer = self._peers.get(node)
            if peer is None:
                peer = self._peers[node] = _Peer(node, host, port, told=(host, port), tag=tag(node))
                self._by_tag[peer.tag] = peer
            elif peer.told != (host, port):
                peer.told = (host, port)
                peer.host, peer.port = host, port
        self._watched = [peer for peer in self._watched if peer.node in self._peers]

    def watch(self, nodes: Iterable[str]) -> None:
        """Just these nodes owe us words from now on: they are asked when they fall silent, and new ones at once."""
        before = set(self._watched)
        self._watched = [self._peers[node] for node in dict.fromkeys(nodes) if node in self._peers]
        for peer in self._watched:
            if peer not in before:
                peer.quiet_since_s = max(peer.quiet_since_s, self._listened_s)
                self._post(peer, self._nod, asks=True)

    def age_s(self, node: str) -> float | None:
        """Since the last authentic and fresh word of that node, in time that we listened; None: never heard by us."""
        peer = self._peers.get(node)
        return None if peer is None or peer.heard_s is None else self._listened_s - peer.heard_s

    def silence_s(self, node: str) -> float:
        """As `age_s`, but not counting time in which the node was not watched: what suspicion and conviction rest on."""
        peer = self._peers.get(node)
        return self._listened_s - peer.quiet_since_s if peer is not None else 0.0

    def silent(self, *, longer_than_s: float) -> tuple[str, ...]:
        """The watched nodes that have been silent for longer than that."""
        since_s = self._listened_s - longer_than_s
        return tuple([peer.node for peer in self._watched if peer.quiet_since_s < since_s])

    def life(self, node: str) -> str | None:
        """Names the process that speaks for the node: another one after a restart of its supervisor; None: never heard."""
        peer = self._peers.get(node)
        return None if peer is None or not peer.life else peer.life.hex()

    # -- speaking --------------------------------------------------------------------------------------------------

    def send(self, body: bytes, *, to: Iterable[str]) -> None:
        """The body is on its way to those nodes, once; itself and nodes it does not know are passed over.

        Raises:
            ValueError: The body is larger than `packet.BODY_LIMIT_BYTES`.
        """
        letter = self._signer.letter(body)
        now_s = self._clock.monotonic_s()
        for node in to:
            peer = self._peers.get(node)
            if peer is not None:
                peer.said = letter
                peer.said_s = now_s
                self._post(peer, letter)

    def probe(self, node: str) -> None:
        """The node is asked to answer at once with what it said to us last. `receive` does so by itself for watched nodes."""
        peer = self._peers.get(node)
        if peer is not None:
            self._repeat(peer, asks=True)

    def _repeat(self, peer: _Peer, *, asks: bool) -> None:
        """What was said to the node last goes with every question and answer, if it still counts: it may have been lost."""
        age_s = self._clock.monotonic_s() - peer.said_s
        if peer.said is None or age_s > self._suspect_s:
            self._post(peer, self._nod, asks=asks)
        else:
            self._post(peer, peer.said, age=milliseconds(age_s), asks=asks)

    def _post(self, peer: _Peer, letter: Letter, *, age: int = 0, asks: bool = False) -> None:
        self._write(peer, letter, peer.token, peer.echo, peer.port, age, asks)

    def _write(self, peer: _Peer, letter: Letter, token: bytes, echo: bytes, port: int, age: int, asks: bool) -> None:
        peer.sent += 1
        datagram = letter.sign(self._tag, self._life + echo, peer.sent, token, self._port, age=age, asks=asks)
        self.traffic.sent += 1
        self.traffic.sent_bytes += len(datagram)
        self._socket.send(datagram, peer.host, port)

    # -- listening -------------------------------------------------------------------------------------------------

    def receive(self) -> list[Heard]:
        """What has arrived since the last call and is authentic, fresh and new: the newest of each node.

        A body that is what the same life of the node said before is not returned again: it proves only that the node
        is alive, and most beats between two steps are such.

        Also answers whoever asked, and asks watched nodes that are about to be suspected.
        """
        self._listen()
        received = received_bytes = 0
        newest: dict[_Peer, Packet] = {}
        asking: Counter[_Peer] = Counter()
        strange: dict[tuple[_Peer, bytes], Packet] = {}
        for _ in range(_ROUND_PACKETS):
            datagram = self._socket.receive()
            if datagram is None:
                break
            received += 1
            received_bytes += len(datagram)
            self._take(datagram, newest, asking, strange)
        self.traffic.received += received
        self.traffic.received_bytes += received_bytes
        self._answer(asking)
        self._introduce(strange)
        self._ask_overdue()
        heard = []
        for peer, packet in newest.items():
            if packet.packed == peer.packed:
                continue
            body = packet.body()
            if body is None:
                self.refused[Refusal.MANGLED] += 1
            else:
                peer.packed = packet.packed
                heard.append(Heard(peer.node, body, packet.age / 1000))
        return heard

    def _listen(self) -> None:
        now_s = self._clock.monotonic_s()
        gap_s = now_s - self._at_s
        self._at_s = now_s
        # Stopped or starved: what came meanwhile waits in the socket, but much of it may have been dropped there.
        self._listened_s += gap_s if gap_s <= _STOOD_STILL_S else _STOOD_STILL_COUNTS_S

    def _take(self, datagram: bytes, newest: dict[_Peer, Packet], asking: Counter[_Peer], strange: dict[tuple[_Peer, bytes], Packet]) -> None:
        packet = self._signer.open(datagram)
        if isinstance(packet, Refusal):
            self.refused[packet] += 1
            return
        flags, sender, proof, counter, token, port, _, _ = packet
        peer = self._by_tag.get(sender)
        if peer is None:
            self.refused[Refusal.UNKNOWN] += 1
            return
        if proof == peer.proof:
            if counter <= peer.counter:
                self.refused[Refusal.REPLAY] += 1
                return
        else:
            life = packet.life
            if life == peer.life or proof != life + peer.offer:
                self.refused[Refusal.STALE] += 1
                # However many recordings come, each life is answered once; best what has a token, for echoing it proves us fresh.
                if token != NO_TOKEN or (peer, life) not in strange:
                    strange[peer, life] = packet
                return
            peer.life, peer.token, peer.proof = life, peer.offer, proof
            peer.offer = secrets.token_bytes(TOKEN_BYTES)
            peer.packed = None
            newest.pop(peer, None)  # that was another life's
        peer.counter = counter
        peer.echo = token
        peer.port = port
        peer.heard_s = peer.quiet_since_s = self._listened_s
        peer.asks = 0
        if flags & ASKS:
            asking[peer] += 1
        if flags & HAS_BODY:
            newest[peer] = packet

    def _introduce(self, strange: dict[tuple[_Peer, bytes], Packet]) -> None:
        """The senders of packets that are not fresh learn what they must echo, and are asked to: if they are there at all."""
        for (peer, life), packet in strange.items():
            token = peer.token if life == peer.life else peer.offer
            # Its host is the one we were told, so that no recording makes us write to anybody else.
            self._write(peer, self._nod, token, packet.token, packet.port, 0, asks=True)

    def _answer(self, asking: Counter[_Peer]) -> None:
        spare = _BURST_PACKETS // len(asking) if asking else 0
        for peer, times in asking.items():
            for _ in range(max(min(times, spare), 1)):
                self._repeat(peer, asks=False)

    def _ask_overdue(self) -> None:
        """Asks each round more often, so that lost packets alone make nobody silent; those that are lost only now and then."""
        ask_since_s = self._listened_s - self._suspect_s * _ASK_RATIO
        overdue = [peer for peer in self._watched if peer.quiet_since_s < ask_since_s]
        spare = _BURST_PACKETS // len(overdue) if overdue else 0
        for peer in overdue:
            is_lost = self._listened_s - peer.quiet_since_s > self._suspect_s
            if self._listened_s - peer.asked_s < (_ASK_LOST_PAUSE_S if is_lost else _ASK_PAUSE_S):
                continue
            peer.asked_s = self._listened_s
            copies = 1 if is_lost else max(min(1 << peer.asks, _ASK_COPIES, spare), 1)
            peer.asks += 1
            self._repeat(peer, asks=True)
            for _ in range(copies - 1):
                self._post(peer, self._nod, asks=True)

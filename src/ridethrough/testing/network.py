"""A network that loses, delays, repeats, reorders and mangles packets, all from one seed, in time that moves when told to.

`FakeNetwork` hands out sockets that keep the promise of `seam.udp.Datagrams`. `Room` puts the real `Peers` of several
nodes on one and runs them as their supervisors would.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ridethrough.supervisor.peers import Heard, Peers
from ridethrough.testing.clock import FakeClock

_RECORDED_PACKETS = 4096


@dataclass(slots=True, kw_only=True)
class Weather:
    """What happens to packets; may be changed at any time."""

    loss_ratio: float = 0.0
    duplicate_ratio: float = 0.0
    replay_ratio: float = 0.0
    """Beside so many packets, one that was carried some time ago to the same host arrives again."""
    mangle_ratio: float = 0.0
    """So many arrive with flipped bits, cut off, or with bytes added."""
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Uniform between these: a wide one reorders."""


class Carried(NamedTuple):
    """A packet as somebody on the way could have recorded it."""

    data: bytes
    source: str
    host: str
    port: int


class FakeNetwork:
    """Carries packets between hosts, which are names.

    Args:
        clock: Time on the network.
        seed: Everything that happens to packets follows from it.
        weather: What happens to packets; clear unless given.
    """

    def __init__(self, clock: FakeClock, *, seed: int = 0, weather: Weather | None = None) -> None:
        self.weather = weather or Weather()
        self.recorded: list[Carried] = []
        """The last few thousand packets, as sent."""
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - must repeat, not surprise
        self._sockets: dict[tuple[str, int], FakeSocket] = {}
        self._cut: set[frozenset[str]] = set()
        self._dark: set[str] = set()
        self._number = 0

    def socket(self, host: str, port: int = 0) -> FakeSocket:
        """A socket of that host. Binding a port again replaces the socket of a dead process."""
        if port == 0:
            port = next(p for p in range(40000, 65536) if (host, p) not in self._sockets)
        made = self._sockets[host, port] = FakeSocket(self, self._clock, host, port)
        return made

    def darken(self, *hosts: str) -> None:
        """Nothing reaches or leaves those hosts."""
        self._dark.update(hosts)

    def part(self, some: Iterable[str], others: Iterable[str]) -> None:
        """Nothing passes between the two groups."""
        others = tuple(others)
        self._cut.update(frozenset((a, b)) for a in some for b in others)

    def heal(self) -> None:
        """All hosts reach each other again."""
        self._cut.clear()
        self._dark.clear()

    def inject(self, carried: Carried) -> None:
        """The packet arrives now, whatever the weather and whoever sent it: what an attacker can do."""
        self._deliver(carried.data, carried.host, carried.port, after_s=0.0)

    def carry(self, packet: Carried) -> None:
        """What a socket sends goes through here."""
        chance = self._random.random
        weather = self.weather
        self.counts["sent"] += 1
        self.recorded.append(packet)
        del self.recorded[:-_RECORDED_PACKETS]
        if packet.source in self._dark or packet.host in self._dark or frozenset((packet.source, packet.host)) in self._cut:
            self.counts["dark"] += 1
            return
        if chance() < weather.replay_ratio:
            old = self._random.choice(self.recorded)
            self.counts["replayed"] += 1
            self._deliver(old.data, old.host, old.port, after_s=self._random.uniform(*weather.delay_s))
        if chance() < weather.loss_ratio:
            self.counts["lost"] += 1
            return
        copies = 1
        if chance() < weather.duplicate_ratio:
            self.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            data = packet.data
            if chance() < weather.mangle_ratio:
                self.counts["mangled"] += 1
                data = mangled(data, self._random)
            self._deliver(data, packet.host, packet.port, after_s=self._random.uniform(*weather.delay_s))

    def _deliver(self, data: bytes, host: str, port: int, *, after_s: float) -> None:
        socket = self._sockets.get((host, port))
        # Nobody listens there: UDP does not tell.
        if socket is not None:
            self._number += 1
            heapq.heappush(socket.inbox, (self._clock.monotonic_s() + after_s, self._number, data))

    def forget(self, socket: FakeSocket) -> None:
        """Nobody listens there any more."""
        if self._sockets.get((socket.host, socket.port)) is socket:
            del self._sockets[socket.host, socket.port]


class FakeSocket:
    """Keeps the promise of `seam.udp.Datagrams`."""

    def __init__(self, network: FakeNetwork, clock: FakeClock, host: str, port: int) -> None:
        self.host = host
        self.inbox: list[tuple[float, int, bytes]] = []
        """A heap: when due, in which order sent, what."""
        self._port = port
        self._network = network
        self._clock = clock

    @property
    def port(self) -> int:
        return self._port

    def send(self, data: bytes, host: str, port: int) -> None:
        self._network.carry(Carried(data, self.host, host, port))

    def receive(self) -> bytes | None:
        if not self.inbox or self.inbox[0][0] > self._clock.monotonic_s():
            return None
        return heapq.heappop(self.inbox)[2]

    def close(self) -> None:
        self._network.forget(self)


def mangled(data: bytes, chance: random.Random) -> bytes:
    """The packet after an accident: never what it was."""
    kind = chance.randrange(3)
    if kind == 0 and data:
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        if changed != data:
            return bytes(changed)
    if kind == 1 and data:
        return data[: chance.randrange(len(data))]
    return data + chance.randbytes(chance.randint(1, 64))


Views = Callable[[str], bytes]


@dataclass(slots=True, kw_only=True)
class _Node:
    peers: Peers
    socket: FakeSocket
    next_round_s: float
    next_beat_s: float
    targets: tuple[str, ...]


class Room:
    """Several nodes, each with a real `Peers`, run in rounds; everybody beats to everybody unless told otherwise.

    Args:
        names: Of the nodes; each is its own host.
        seed: All that is random here follows from it, but for the secrets of `Peers`.
        weather: Of the network.
        say: What a node says at each beat.
        key: The run's secret.
        round_s: Of the supervisors' loops.
        beat_s: Between two beats of a node.
        suspect_s: Silence after which a node is suspected.
        clock: Of the room; one of its own unless given.
    """

    def __init__(
        self,
        *names: str,
        seed: int = 0,
        weather: Weather | None = None,
        say: Views = lambda node: node.encode(),
        key: bytes = b"k" * 32,
        round_s: float = 0.05,
        beat_s: float = 0.4,
        suspect_s: float = 1.5,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.network = FakeNetwork(self.clock, seed=seed, weather=weather)
        self.addresses = {name: (name, 29577) for name in names}
        self.heard: dict[tuple[str, str], bytes] = {}
        """What the first node heard last from the second."""
        self.ever_silent: Counter[tuple[str, str]] = Counter()
        """Rounds in which the first node found the second silent for longer than the suspicion time."""
        self._random = random.Random(seed)  # noqa: S311 - must repeat, not surprise
        self._say = say
        self._key = key
        self._round_s = round_s
        self._beat_s = beat_s
        self._suspect_s = suspect_s
        self._nodes: dict[str, _Node] = {}
        for name in names:
            self.start(name)

    def start(self, name: str, *, scope: str = "run", key: bytes | None = None, port: int = 29577) -> Peers:
        """The node's supervisor runs, in a new life; one that ran is gone without a word."""
        socket = self.network.socket(name, port)
        peers = Peers(
            self.clock, socket, key=key or self._key, scope=scope, node=name, addresses=self.addresses, suspect_s=self._suspect_s
        )  # fmt: skip
        now_s = self.clock.monotonic_s()
        targets = tuple(n for n in self.addresses if n != name)
        peers.watch(targets)
        self._nodes[name] = _Node(
            peers=peers,
            socket=socket,
            # Rounds of different nodes are not in step.
            next_round_s=now_s + self._random.uniform(0.0, self._round_s),
            next_beat_s=now_s + self._random.uniform(0.0, self._beat_s),
            targets=targets,
        )
        return peers

    def stop(self, name: str) -> None:
        """The node's supervisor is gone without a word, its port with it."""
        self._nodes.pop(name).socket.close()

    def peers(self, name: str) -> Peers:
        """That node's end."""
        return self._nodes[name].peers

    def socket(self, name: str) -> FakeSocket:
        """Where that node listens; emptying its `inbox` loses what is on the way."""
        return self._nodes[name].socket

    def freeze(self, name: str, duration_s: float) -> None:
        """The node's supervisor does nothing for so long, as after SIGSTOP; what arrives meanwhile waits."""
        node = self._nodes[name]
        node.next_round_s += duration_s
        node.next_beat_s = max(node.next_beat_s, node.next_round_s)

    def talk(self, name: str, *, to: Iterable[str]) -> None:
        """From now on the node beats to those only, and watches them only."""
        self._nodes[name].targets = tuple(to)
        self._nodes[name].peers.watch(self._nodes[name].targets)

    def run_for(self, duration_s: float) -> None:
        """So much time has passed."""
        end_s = self.clock.monotonic_s() + duration_s
        while self._nodes:
            name = min(self._nodes, key=lambda n: self._nodes[n].next_round_s)
            due_s = self._nodes[name].next_round_s
            if due_s > end_s:
                break
            self.clock.advance(max(due_s - self.clock.monotonic_s(), 0.0))
            self._round(name, self._nodes[name])
        self.clock.advance(max(end_s - self.clock.monotonic_s(), 0.0))

    def _round(self, name: str, node: _Node) -> None:
        now_s = self.clock.monotonic_s()
        heard: list[Heard] = node.peers.receive()
        for word in heard:
            self.heard[name, word.node] = word.body
        for other in node.peers.silent(longer_than_s=self._suspect_s):
            self.ever_silent[name, other] += 1
        if now_s >= node.next_beat_s:
            node.peers.send(self._say(name), to=node.targets)
            node.next_beat_s = now_s + self._beat_s
        node.next_round_s = now_s + self._round_s

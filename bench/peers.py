"""What the heartbeats of a thousand nodes cost the one that leads, and how soon it knows what they know.

One real `Peers` over real loopback UDP is the lead; another process plays the other nodes, each with a `Peers` and a
port of its own, and throws away one packet in ten in both directions. The lead does what a supervisor does: 20 rounds
a second, JSON of what is new, the newest step that all have, who is silent, a broadcast each second and on change.
Its processor time is that of its process alone; the floor is that of the bare system calls for the same packets.

Two windows: steps of 0.2 s, where every beat says something new, and steps of 1 s, which a thousand nodes rather take.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import figures

from ridethrough.seam.clock import SystemClock
from ridethrough.seam.udp import UdpSocket
from ridethrough.supervisor.peers import SUSPECT_S, Peers

NODES = int(os.environ.get("BENCH_NODES", "1024"))
RANKS_A_NODE = 8
LOSS_RATIO = 0.1
WARM_UP_S = 4.0
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "16"))
FAST_STEP_S = 0.2
SLOW_STEP_S = 1.0
FAST_END_S = WARM_UP_S + WINDOW_S
SLOW_END_S = FAST_END_S + WINDOW_S
DARK_NODES = 32
END_S = SLOW_END_S + 3.0
SKEW_S = 0.1
"""How much later than the first the last node makes a step."""
ROUND_S = 0.05
GROUPS = 10
BEAT_S = (0.4, 0.5)
BROADCAST_S = 1.0
CHANGE_S = 5.0
UDP_IP_BYTES = 28
LATE_S = 0.3
"""Nodes that were late by more than this have not beaten as they should: then this measured the machine."""
KEY = bytes(range(32))
NAMES = [f"node-{number:04}" for number in range(NODES)]
LEAD, OTHERS = NAMES[0], NAMES[1:]


def step_at(elapsed_s: float) -> int:
    """The step that a node has made so long after the start."""
    fast = min(elapsed_s, FAST_END_S) / FAST_STEP_S
    return int(fast + max(elapsed_s - FAST_END_S, 0.0) / SLOW_STEP_S)


def made_at(step: int) -> float:
    """So long after the start every node has made that step."""
    fast = round(FAST_END_S / FAST_STEP_S)
    return min(step, fast) * FAST_STEP_S + max(step - fast, 0) * SLOW_STEP_S + SKEW_S


def view(number: int, step: int) -> bytes:
    """What a node of eight ranks says at each beat."""
    held = [step // 10 * 10 - 10, step // 10 * 10]
    said = {
        "node": NAMES[number], "phase": "running", "generation": 3, "attempt": "000003-1a2b3c4d", "ranks": RANKS_A_NODE, "is_whole": True,
        "is_stepping": True, "step": step, "restored_step": 0, "step_s_p99": 0.212, "posted": held,
        "replicas": {NAMES[number - 1]: held, NAMES[number - 2]: held},
    }  # fmt: skip
    return json.dumps(said, separators=(",", ":")).encode()


def directive(number: int, common: int) -> bytes:
    """What the lead says to all."""
    said = {
        "room": "000003-1a2b3c4d", "number": number, "lead": LEAD, "stage": "running", "generation": 3, "attempt": "000003-1a2b3c4d",
        "announced": common // 100 * 100 + 100, "announcement": number, "dark": ["node-0512", "node-0513"],
        "confirmed": {"step": common // 100 * 100, "is_verified": True}, "flush": {"id": 2, "reason": "node-0512 and node-0513 are silent"},
        "reason": "node-0512 was silent for 1.6 s while every rank of it owed a step",
    }  # fmt: skip
    return json.dumps(said, separators=(",", ":")).encode()


class Lossy:
    """A socket that loses packets in both directions."""

    def __init__(self, inner: UdpSocket, seed: int) -> None:
        self._inner = inner
        self._chance = random.Random(seed).random
        self.port = inner.port
        self.fileno = inner._socket.fileno

    def send(self, data: bytes, host: str, port: int) -> None:
        if self._chance() >= LOSS_RATIO:
            self._inner.send(data, host, port)

    def receive(self) -> bytes | None:
        while (data := self._inner.receive()) is not None:
            if self._chance() >= LOSS_RATIO:
                return data
        return None

    def close(self) -> None:
        self._inner.close()


def generate(lead_port: int) -> None:
    """The other process: all nodes but the lead."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    clock, chance = SystemClock(), random.Random(1)
    addresses = {LEAD: ("127.0.0.1", lead_port)}
    sockets = [Lossy(UdpSocket(interface="lo"), number) for number in range(len(OTHERS))]
    nodes = [Peers(clock, socket, key=KEY, scope="bench", node=name, addresses=addresses) for name, socket in zip(OTHERS, sockets, strict=True)]
    print(json.dumps([socket.port for socket in sockets]), flush=True)
    begin_s = float(sys.stdin.readline())
    skews = [SKEW_S, *(chance.uniform(0.0, SKEW_S) for _ in nodes[1:])]
    beats_s = [chance.uniform(0.0, BEAT_S[1]) for _ in nodes]
    heard_s = [0.0] * len(nodes)
    # Nodes take turns in groups. To leave the processor to the lead, a node's round does nothing if nothing can have changed.
    groups = [range(first, len(nodes), GROUPS) for first in range(GROUPS)]
    ready = [select.epoll() for _ in groups]
    for number, socket in enumerate(sockets):
        ready[number % GROUPS].register(socket.fileno(), select.EPOLLIN)
    numbers = {socket.fileno(): number for number, socket in enumerate(sockets)}
    for peers in nodes:
        peers.watch([LEAD])
    lead_silent, late_s, due_s = 0, 0.0, 0.0
    for turn in itertools.count():
        due_s += ROUND_S / GROUPS
        time.sleep(max(begin_s + due_s - time.monotonic(), 0.0))
        elapsed_s = time.monotonic() - begin_s
        late_s = max(late_s, elapsed_s - due_s)
        if elapsed_s >= END_S:
            break
        for descriptor, _ in ready[turn % GROUPS].poll(0):
            heard_s[numbers[descriptor]] = 0.0
        for number in groups[turn % GROUPS]:
            is_beat = elapsed_s >= beats_s[number]
            is_dark = elapsed_s >= SLOW_END_S and number < DARK_NODES
            if is_dark or not (is_beat or elapsed_s - heard_s[number] > BROADCAST_S):
                continue
            peers = nodes[number]
            peers.receive()
            heard_s[number] = elapsed_s - (peers.age_s(LEAD) or 0.0)
            if WARM_UP_S <= elapsed_s < SLOW_END_S:
                lead_silent += len(peers.silent(longer_than_s=SUSPECT_S))
            if is_beat:
                beats_s[number] += chance.uniform(*BEAT_S)
                peers.send(view(number + 1, step_at(max(elapsed_s - skews[number], 0.0))), to=[LEAD])
    print(json.dumps({"lead_silent": lead_silent, "late_s": late_s}), flush=True)


@dataclass
class Window:
    """What the lead's process did in a part of the run."""

    name: str
    begin_s: float
    end_s: float
    cpu_s: float = 0.0
    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    fresh: int = 0
    """Bodies that were new."""
    json_s: float = 0.0
    """Processor time for reading them."""
    waits_s: list[float] = field(default_factory=list)

    def add(self, peers: Peers, sign: int) -> None:
        """Called at the end with 1 and at the begin with -1."""
        self.cpu_s += sign * time.process_time()
        for name in ("sent", "sent_bytes", "received", "received_bytes"):
            setattr(self, name, getattr(self, name) + sign * getattr(peers.traffic, name))

    def bare_calls_s(self) -> float:
        """Processor time that the system calls alone take for as many packets of that size."""
        here, there = UdpSocket(interface="lo"), UdpSocket(interface="lo")
        address = ("127.0.0.1", here.port)
        total_s = 0.0
        for count, size, is_said in ((self.received, self.received_bytes // self.received, False), (self.sent, self.sent_bytes // self.sent, True)):
            data = bytes(size)
            for _ in range(count // 100):
                began_s = time.process_time()
                for _ in range(100):
                    there._socket.sendto(data, address)
                middle_s = time.process_time()
                for _ in range(100):
                    here._socket.recv(16384)
                total_s += middle_s - began_s if is_said else time.process_time() - middle_s
        return total_s

    def rows(self) -> list[dict[str, Any]]:
        wall_s = self.end_s - self.begin_s
        megabytes = (self.sent_bytes + self.received_bytes + (self.sent + self.received) * UDP_IP_BYTES) / wall_s / 1e6
        core, floor, late_s = self.cpu_s / wall_s, self.bare_calls_s() / wall_s, max(self.waits_s, default=WINDOW_S)
        heard = f"{self.received / wall_s:.0f} packets of {self.received_bytes / self.received:.0f} bytes heard"
        said = f"{self.sent / wall_s:.0f} of {self.sent_bytes / self.sent:.0f} bytes said"
        print(f"{self.name}, a second: {heard}, {said}; JSON of {self.fresh / wall_s:.0f} new bodies takes {self.json_s / wall_s:.3f} of a core")
        return [
            {"name": f"{self.name}: traffic, both directions", "value": megabytes, "unit": "MB/s", "target": 1.0},
            {"name": f"{self.name}: processor time", "value": core, "unit": "of a core", "floor": floor, "ratio": core / floor, "target": 0.05},
            {"name": f"{self.name}: newest common step known after", "value": late_s, "unit": "s", "target": 2.0},
        ]


def lead() -> tuple[list[Window], dict[str, Any]]:
    """The one that is measured."""
    socket = UdpSocket(interface="lo")
    child = subprocess.Popen([sys.executable, __file__, str(socket.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    addresses = {name: ("127.0.0.1", port) for name, port in zip(OTHERS, json.loads(child.stdout.readline()), strict=True)}
    peers = Peers(SystemClock(), socket, key=KEY, scope="bench", node=LEAD, addresses=addresses)
    peers.watch(OTHERS)
    begin_s = time.monotonic() + 0.5
    child.stdin.write(f"{begin_s}\n")
    child.stdin.flush()
    windows = [Window("steps of 0.2 s", WARM_UP_S, FAST_END_S), Window("steps of 1 s", FAST_END_S, SLOW_END_S)]
    warm_up, after = Window("", 0.0, WARM_UP_S), Window("", SLOW_END_S, END_S)
    parts = iter([*windows, after])
    window = warm_up
    steps: dict[str, int] = {}
    silent: set[str] = set()
    noticed: dict[str, float] = {}
    common, number = -1, 0
    broadcast_s, change_s, round_s = 0.0, CHANGE_S, 0.0
    while (now_s := time.monotonic() - begin_s) < END_S:
        if now_s >= window.end_s:
            window.add(peers, 1)
            window = next(parts)
            window.add(peers, -1)
        words = peers.receive()
        before_s = time.process_time()
        for word in words:
            steps[word.node] = json.loads(word.body.decode())["step"]
        window.json_s += time.process_time() - before_s
        window.fresh += len(words)
        if len(steps) == len(OTHERS) and (newest := min(steps.values())) > common:
            window.waits_s += [now_s - made_at(step) for step in range(common + 1, newest + 1)]
            common = newest
        quiet = peers.silent(longer_than_s=SUSPECT_S)
        if quiet and window is after:
            for node in quiet:
                noticed.setdefault(node, now_s - SLOW_END_S)
        elif quiet and window is not warm_up:
            silent.update(quiet)
        if now_s >= min(broadcast_s, change_s):
            number += 1
            peers.send(directive(number, max(common, 0)), to=OTHERS)
            if now_s >= broadcast_s:
                broadcast_s += BROADCAST_S
            else:
                change_s += CHANGE_S
        round_s = max(round_s + ROUND_S, now_s)
        time.sleep(max(begin_s + round_s - time.monotonic(), 0.0))
    generator = json.loads(child.stdout.readline())
    assert child.wait(30) == 0
    found = {
        **generator,
        "silent": len(silent),
        "noticed_s": max(noticed.get(node, END_S - SLOW_END_S) for node in OTHERS[:DARK_NODES]),
        "refused": dict(peers.refused),
        "not_sent": dict(socket.failures),
    }
    return windows, found


def main() -> None:
    sizes = f"{len(view(500, 24000))} and {len(directive(500, 24000))} bytes"
    print(f"{NODES} nodes of {RANKS_A_NODE} ranks, {LOSS_RATIO:.0%} of the packets lost, bodies of {sizes}")
    windows, found = lead()
    rows = [row for window in windows for row in window.rows()]
    rows += [
        {"name": "nodes falsely silent to the lead", "value": found["silent"], "unit": "nodes", "target": 0},
        {"name": "the lead falsely silent to a node", "value": found["lead_silent"], "unit": "rounds", "target": 0},
        {"name": "dark nodes noticed after", "value": found["noticed_s"], "unit": "s", "target": 2.0},
    ]
    print(f"{'':48}{'value':>8} {'unit':10}{'target':>7}{'floor':>8}")
    is_measured = found["late_s"] <= LATE_S
    for row in rows:
        row["met"] = is_measured and row["value"] <= row["target"]
        if not is_measured:
            row["reason"] = f"not measured: the machine was too busy, the other nodes were late by {found['late_s']:.2f} s"
        floor = f"{row['floor']:8.3f}" if "floor" in row else " " * 8
        print(f"{row['name']:48}{row['value']:8.3f} {row['unit']:10}{row['target']:>7}{floor}{'' if row['met'] else '  missed'}")
    if not is_measured:
        print(rows[0]["reason"])
    print(f"figures: {figures.write('peers', rows, **found)}")


if __name__ == "__main__":
    generate(int(sys.argv[1])) if len(sys.argv) > 1 else main()

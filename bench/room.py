"""What a room of a thousand nodes costs the one that leads, and how soon it is told that a save is durable.

The heartbeats themselves are measured by `peers.py`; here is what is made of them. Four parts:

1. *Rounds*: the real supervisor of the lead, then of another node, over boards in real shared memory, with what the
   other nodes say handed to it ready to be read. Processor time of its process for each second of the room.
2. *Words*: how large the views, the lead's word and the control board are, also in the night in which half of the
   room is dark.
3. *Time*: a thousand nodes that talk over a simulated network which loses one packet in ten. How long from the last
   seal until every node knows that the save is durable, and until the lead knows the newest step that all have.
4. *Start*: the pure parts of the start agreement: roster, plan, and the catalogs of all nodes made one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import figures

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from fake_link import FakeLink
from ridethrough.config import Config, NodeConfig, PeersConfig
from ridethrough.errors import KeeperGone
from ridethrough.format.attempt import Attempt, Roster, RosterPart, Run
from ridethrough.format.layout import REPLICATED, rank_part
from ridethrough.format.part import TensorSpec
from ridethrough.format.seal import Seal, save_id
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import start_time
from ridethrough.snapshot import link as links
from ridethrough.snapshot import placement
from ridethrough.snapshot.board import Board
from ridethrough.snapshot.plan import Plan
from ridethrough.store import union
from ridethrough.store.catalog import Catalog, Checkpoint
from ridethrough.store.retain import Retention
from ridethrough.supervisor.directive import Directive, Incident, Outcome, Stage
from ridethrough.supervisor.lead import Lead
from ridethrough.supervisor.loop import FAR_DECIDE_S, ROUND_S, Supervisor
from ridethrough.supervisor.packet import BODY_LIMIT_BYTES
from ridethrough.supervisor.peers import Heard, Peers
from ridethrough.supervisor.scene import Surroundings
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.talk import FAR_BEAT_S, Talk
from ridethrough.supervisor.view import NodePhase, NodeView, Sealed
from ridethrough.testing import FakeClock
from ridethrough.testing.network import FakeNetwork, Weather
from ridethrough.train.agreement import RankFacts, new_roster, size_slots
from ridethrough.types import AttemptRef

NODES = int(os.environ.get("BENCH_NODES", "1024"))
RANKS = 8
SLOW_STEP_S, FAST_STEP_S = 1.0, 0.2
FIRST_STEP = 24010
DEPUTIES = 2
"""Nodes beside the lead that hear every view."""
WINDOW_S = float(os.environ.get("BENCH_WINDOW_S", "4"))
LOSS_RATIO = 0.1
NAMES = tuple(f"gpu-{number // 32:02}-{number % 32:02}.cluster" for number in range(NODES))
"""As long as names are on a real cluster."""
DARK = NAMES[1::2]
KEY = "5a" * 32
REF = AttemptRef(seq=123, nonce="1a2b3c4d" * 4)
WORD = (5, REF.label, 1000)
"""What every node knows: launch, attempt, number of the directive."""


# -- what a room consists of -----------------------------------------------------------------------------------------------


def make_roster() -> Roster:
    """One part that all ranks hold, and a private one for each."""
    where = tuple(name for name in NAMES for _ in range(RANKS))
    ranks = range(len(where))
    parts = (RosterPart(name=REPLICATED, holders=tuple(ranks)), *(RosterPart(name=rank_part(rank), holders=(rank,)) for rank in ranks))
    return Roster(run_uid="run", attempt=REF, nodes=where, parts=parts)


def make_plan(node: str) -> Plan:
    return Plan(
        run_dir="/ckpt/run", run_uid="run", attempt=REF, parent=None, resumed_dir=None, roster=make_roster(), node=node, meta={},
        retention=Retention(), monitor=None, save_interval_steps=100, snapshot_interval_steps=1, restored_step=0, damaged=(), is_shared=True,
        addresses={name: [name, 29577, 29577] for name in NAMES}, key=KEY, domains={name: name.split("-")[1] for name in NAMES},
    )  # fmt: skip


def make_view(number: int, step: int, *, dark: tuple[str, ...] = (), sealed_step: int | None = None) -> NodeView:
    """A node that trains, in the middle of a run."""
    saved = step // 100 * 100
    posted = tuple(range(max(step - 3, 0), step + 1))
    seals = [Sealed(step=saved, is_verified=True, digests={REPLICATED: "0123456789abcdef"})]
    if sealed_step is not None:
        seals.append(Sealed(step=sealed_step, dark=dark, digests={REPLICATED: "0123456789abcdef"}))
    return NodeView(
        node=NAMES[number], up_s=86400.0 + number, phase=NodePhase.RUNNING, generation=5, attempt=REF.label, ranks=RANKS, is_whole=True,
        is_at_work=True, is_stepping=True, is_inside=True, step=step, restored_step=0, since_step_s=0.3, step_s_p99=1.05, posted=posted,
        replicas={NAMES[number - 32]: posted, NAMES[number - 64]: posted}, sealed=tuple(seals), durable_step=saved, saved_step=saved,
        has_stepped=True,
    )  # fmt: skip


def calm_word(called_s: float) -> Directive:
    """The lead's word while all goes well."""
    return Directive(
        room=REF.label, number=1000, lead=NAMES[0], stage=Stage.RUNNING, generation=5, called_s=called_s, members=NAMES, reason="first start",
        attempt=REF.label, announced=24100, announcement=241, confirmed={"step": 24000, "is_verified": True, "dark": []},
    )  # fmt: skip


def dark_word(called_s: float) -> Directive:
    """And in the night in which half of the room has gone dark, with every field in use."""
    text = "x" * 300
    return replace(
        calm_word(called_s), stage=Stage.OVER, reason=text, text=text, dark=DARK, is_suspect=True,
        flush={"id": 9, "reason": text, "step": 24050, "dark": list(DARK), "of": f"{REF.label} 5"},
        refused={"number": 241, "step": 24000, "code": "RT-014", "message": text},
        stop={"id": 1, "state": "proposed", "step": 24060, "since_s": 1e5},
        outcome=Outcome(cause="dark", fingerprint="dark", detail=text, action="restart", reason=text, last_step=24050, lost=DARK),
        incident=Incident(cause="dark", detail=text, nodes=DARK, last_step=24050, opened_at="2026-01-01T00:00:00.000+00:00"),
    )  # fmt: skip


class Keeper(FakeLink):
    """Answers as a keeper whose command runs; its memory is real."""

    def board(self, name: str, size_bytes: int = 0) -> Board:
        return super().board(name, size_bytes or links.board_bytes(name))

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        if op != "look":
            return {}
        return {
            "keeper_pid": 1, "run_dir": None, "launch": 1, "pid": os.getpid(), "status": None, "ended_s": None, "trainers": RANKS, "workers": None,
            "signals": [], "wants_peers": True, "up_s": 86400.0, "helpers": {},
        }  # fmt: skip

    def descriptor(self, op: str, **fields: Any) -> int:
        if op != "memory":
            raise KeeperGone(detail=op)
        return super().descriptor(op, **fields)


class Ear:
    """Stands where `Peers` stands: hands over what was put into it, and counts what is said."""

    def __init__(self, clock: FakeClock, heard: list[str]) -> None:
        self.refused: dict[str, int] = {}
        self._clock = clock
        self.heard_s = dict.fromkeys(heard, clock.monotonic_s())
        self.inbox: list[Heard] = []
        self.said: list[tuple[bytes, int]] = []
        """Bodies, and to how many."""

    def receive(self) -> list[Heard]:
        found, self.inbox = self.inbox, []
        now_s = self._clock.monotonic_s()
        for word in found:
            self.heard_s[word.node] = now_s
        return found

    def age_s(self, node: str) -> float | None:
        at_s = self.heard_s.get(node)
        return None if at_s is None else self._clock.monotonic_s() - at_s

    def silence_s(self, node: str) -> float:
        return self._clock.monotonic_s() - self.heard_s.get(node, 0.0)

    def life(self, node: str) -> bytes:
        return b"life"

    def watch(self, nodes: Any) -> None:
        for _ in nodes:
            pass

    def send(self, body: bytes, *, to: Any) -> None:
        assert len(body) <= BODY_LIMIT_BYTES
        self.said.append((body, len(list(to))))


class Pen:
    is_open, is_unfinished = True, False

    def note(self, kind: str, **data: Any) -> bool:
        return True


class Site:
    """One real supervisor in the middle of a run of a thousand nodes."""

    def __init__(self, number: int) -> None:
        self.clock, self.number = FakeClock(monotonic_s=1e5), number
        self.keeper = Keeper()
        name = NAMES[number]
        nodes = tuple(NodeConfig(name=n, address=n, domain=n.split("-")[1]) for n in NAMES)
        settings = Settings(argv=("train",), config=Config(run="/ckpt/run", storage="shared", nodes=nodes, peers=PeersConfig(port=29577)))
        network = FakeNetwork(self.clock)
        plan = self.keeper.board(links.plan_board(1), links.PLAN_BYTES)
        plan.write(make_plan(name).as_board())
        word = calm_word(self.clock.monotonic_s() - 80000)
        self.write_boards(FIRST_STEP)
        memory = {"launch": 1, "generation": 5, "has_agreed": True, "recovered": True, "directive": word.encode()}
        self.keeper.board(links.CONTROL).write({"memory": memory})
        with mock.patch.dict(os.environ, RIDETHROUGH_NODE=name):
            talk = Talk(self.clock, settings, name, open_socket=lambda port, interface: network.socket(name, port))
            self.supervisor = Supervisor(PosixFileSystem(), self.clock, self.keeper, settings, pen=Pen(), talk=talk)  # type: ignore[arg-type]
        talk.enter(key=KEY, scope="run", addresses={n: (n, 29577) for n in NAMES}, order=NAMES)
        talk.election.enter(NAMES[0], now_s=self.clock.monotonic_s())
        self.ear = Ear(self.clock, [n for n in NAMES if n != name] if number <= DEPUTIES else [NAMES[0]])
        talk._peers = self.ear  # type: ignore[assignment]
        self.supervisor._gates = mock.Mock(look=lambda host: mock.Mock(is_ready=True, missing=()))

    def warm_up(self) -> None:
        """Everybody was heard, and what is made once is made."""
        if len(self.ear.heard_s) > 1:
            self.ear.inbox += [_heard(n, {"v": make_view(n, FIRST_STEP).encode(), "n": 1000}) for n in range(NODES) if n != self.number]
        for _ in range(3):
            self.supervisor.round()
            self.clock.advance(ROUND_S)
        self.ear.said.clear()

    def write_boards(self, step: int) -> None:
        """What this node's ranks, persister and courier say."""
        pid, now_s = os.getpid(), self.clock.monotonic_s()
        for rank in range(self.number * RANKS, (self.number + 1) * RANKS):
            self.keeper.board(links.rank_board(1, rank)).write(
                {
                    "rank": rank, "pid": pid, "process_started": start_time(pid), "world_size": NODES * RANKS, "run_dir": "/ckpt/run",
                    "phase": "training", "step": step, "restored_step": 0, "step_at_s": now_s, "step_s_p99": 1.05,
                    "posted_steps": list(range(step - 3, step + 1)), "times_s": {"first_step": 1.0},
                }
            )  # fmt: skip
        held = {str(r): list(range(step - 3, step + 1)) for n in (self.number - 32, self.number - 64) for r in _ranks_of(n)}
        self.keeper.board(links.COURIER).write({"launch": 1, "port": 1, "held": held})
        seals = [{"launch": 1, "step": s, "dark": [], "digests": {REPLICATED: "0" * 16}, "is_verified": True} for s in range(23700, 24001, 100)]
        self.keeper.board(links.PERSIST).write({"launch": 1, "sealed": seals, "durable": {"launch": 1, "step": 24000}, "flushed": 0})

    def close(self) -> None:
        self.keeper.close()


def _heard(speaker: int, said: dict[str, Any]) -> Heard:
    body = json.dumps({"r": REF.label, "f": NAMES[0], **said}, separators=(",", ":"))
    return Heard(node=NAMES[speaker], body=body.encode(), age_s=0.0)


def _ranks_of(number: int) -> range:
    first = number % NODES * RANKS
    return range(first, first + RANKS)


# -- 1. rounds -------------------------------------------------------------------------------------------------------------


def measure_rounds(name: str, number: int) -> list[dict[str, Any]]:
    """A node's supervisor without the packets themselves. Of three windows the quietest counts: others use this machine too."""
    site = Site(number)
    chance = random.Random(1)
    speakers = [n for n in range(NODES) if n != number] if number <= DEPUTIES else []
    due_s = {n: chance.uniform(0.0, FAR_BEAT_S) for n in speakers}
    talk = site.supervisor._talk
    said = {"v": talk._encode_view(make_view(0, FIRST_STEP)), "d": talk._encode(calm_word(0.0), 1.0)}
    lead_due_s, longest_s, windows_s = 0.0, 0.0, [0.0] * 3
    site.warm_up()
    for count in range(round(3 * WINDOW_S / ROUND_S)):
        elapsed_s = count * ROUND_S
        step = FIRST_STEP + int(elapsed_s / SLOW_STEP_S)
        if elapsed_s % SLOW_STEP_S < ROUND_S:
            site.write_boards(step)
        for speaker in speakers:
            if elapsed_s >= due_s[speaker]:
                due_s[speaker] += chance.uniform(0.95, 1.05) * FAR_BEAT_S
                view = make_view(speaker, step - (chance.random() < 0.2))
                site.ear.inbox.append(_heard(speaker, {"v": talk._encode_view(view), "n": list(WORD)}))
        if not speakers and elapsed_s >= lead_due_s:
            lead_due_s += FAR_BEAT_S
            site.ear.inbox.append(_heard(0, said))
        began_s = time.process_time()
        site.supervisor.round()
        took_s = time.process_time() - began_s
        windows_s[int(elapsed_s / WINDOW_S)] += took_s
        longest_s = max(longest_s, took_s)
        site.clock.advance(ROUND_S)
    assert site.supervisor.directive.stage is Stage.RUNNING
    traffic = sum(packet_bytes(body) * receivers for body, receivers in site.ear.said) / (3 * WINDOW_S)
    site.close()
    return [
        {"name": f"{name}: processor time", "value": min(windows_s) / WINDOW_S, "unit": "of a core", "target": 0.05},
        {"name": f"{name}: longest round", "value": longest_s, "unit": "s", "target": ROUND_S},
        {"name": f"{name}: what it says", "value": traffic / 1e6, "unit": "MB/s", "target": 1.0},
    ]


def packet_bytes(body: bytes) -> int:
    """Size on the wire, with the headers of UDP and IP."""
    network = FakeNetwork(FakeClock())
    peers = Peers(FakeClock(), network.socket("a", 1), key=bytes.fromhex(KEY), scope="run", node="a", addresses={"b": ("b", 1)})
    peers.send(body, to=["b"])
    return len(network.recorded[-1].data) + 28


# -- 2. words --------------------------------------------------------------------------------------------------------------


def measure_words() -> list[dict[str, Any]]:
    """How large what is said is, at most."""
    site = Site(0)
    supervisor, talk = site.supervisor, site.supervisor._talk
    sizes = {}
    for name, word in (("calm", calm_word(1e5)), ("half of the room dark", dark_word(1e5))):
        site.ear.said.clear()
        talk._sent_s = float("-inf")
        talk.say(make_view(0, FIRST_STEP), word, is_lead=True)
        supervisor.directive = word
        supervisor._publish(is_lead=True)
        board_bytes = len(json.dumps(supervisor._control.read(), separators=(",", ":")))
        sizes[name] = (site.ear.said[0][0], board_bytes)
    view_bytes = len(json.dumps(make_view(5, FIRST_STEP).encode(), separators=(",", ":")))
    site.close()
    rows = [{"name": "view of a node", "value": view_bytes, "unit": "bytes", "target": BODY_LIMIT_BYTES}]
    for name, (said, board) in sizes.items():
        rows.append({"name": f"word of the lead, {name}", "value": len(said), "unit": "bytes", "target": BODY_LIMIT_BYTES})
        rows.append({"name": f"its packet, {name}", "value": packet_bytes(said), "unit": "bytes", "target": 1500})
        rows.append({"name": f"control board, {name}", "value": board, "unit": "bytes", "target": links.NAMES_BYTES // 2})
    return rows


# -- 3. time ---------------------------------------------------------------------------------------------------------------

SETTLE_S = 2.0
SEAL_S = (3.0, 3.5)
"""Nodes seal the save between these; the last one at the end."""
FAST_AT_S = 5.0
"""From here on steps take 0.2 s, before it 1 s, which a thousand nodes rather take."""
END_S = 8.0
SKEW_S = 0.1


def step_at(elapsed_s: float) -> int:
    """The step that a node has made so long after the start."""
    slow = min(elapsed_s, FAST_AT_S) / SLOW_STEP_S
    return FIRST_STEP + int(slow + max(elapsed_s - FAST_AT_S, 0.0) / FAST_STEP_S + 1e-9)


def made_at(step: int) -> float:
    """So long after the start every node has made that step."""
    slow = round(FAST_AT_S / SLOW_STEP_S)
    steps = step - FIRST_STEP
    return min(steps, slow) * SLOW_STEP_S + max(steps - slow, 0) * FAST_STEP_S + SKEW_S


def measure_time() -> list[dict[str, Any]]:
    """Every node talks, over a network that loses one packet in ten; time is simulated."""
    clock, chance = FakeClock(monotonic_s=1e5), random.Random(7)
    network = FakeNetwork(clock, seed=7, weather=Weather(loss_ratio=LOSS_RATIO, delay_s=(0.0002, 0.002)))
    settings = Settings(argv=("train",), config=Config(peers=PeersConfig(port=29577)))
    addresses = {name: (name, 29577) for name in NAMES}
    plan = make_plan(NAMES[0])
    begin_s = clock.monotonic_s()
    talks, words = [], []
    phases_s = [chance.uniform(0.0, ROUND_S) for _ in NAMES]
    for name in NAMES:
        talk = Talk(clock, settings, name, open_socket=lambda port, interface, name=name: network.socket(name, port))  # type: ignore[misc]
        talk.enter(key=KEY, scope="run", addresses=addresses, order=NAMES)
        talk.election.enter(NAMES[0], now_s=begin_s)
        talks.append(talk)
        words.append(calm_word(begin_s - 80000))
    skews_s = [SKEW_S, *(chance.uniform(0.0, SKEW_S) for _ in NAMES[1:])]
    seals_s = [SEAL_S[1], *(chance.uniform(*SEAL_S) for _ in NAMES[1:])]
    lead, decided_s = Lead(settings), float("-inf")
    known_s: dict[str, float] = {}
    waits_s: dict[bool, list[float]] = {False: [], True: []}
    common, false_alarms = -1, 0
    turns = sorted(range(NODES), key=phases_s.__getitem__)
    for number, round_number in ((n, r) for r in range(round(END_S / ROUND_S)) for n in turns):
        now_s = round_number * ROUND_S + phases_s[number]
        clock.advance(max(begin_s + now_s - clock.monotonic_s(), 0.0))
        view = make_view(number, step_at(max(now_s - skews_s[number], 0.0)), sealed_step=24100 if now_s >= seals_s[number] else None)
        talk = talks[number]
        word = talk.hear(words[number])
        is_lead = talk.leads(view, word)
        if is_lead and now_s - decided_s >= FAR_DECIDE_S:
            decided_s = now_s
            sights = talk.sights(view, word)
            around = Surroundings(
                me=NAMES[number], order=NAMES, attempt=REF.label, save_interval_steps=100, replica_nodes=plan.replica_nodes,
                is_covered=plan.is_covered, now_s=clock.monotonic_s(), now_at="",
            )  # fmt: skip
            decided = lead.decide(word, sights, around)
            if decided != word:
                word = replace(decided, number=word.number + 1, lead=NAMES[number])
            if now_s > SETTLE_S:
                false_alarms += sum(s.silent_s > settings.suspect_s for s in sights.values())
                newest = min(s.view.step if s.view is not None else -1 for s in sights.values())
                for step in range(max(common, FIRST_STEP) + 1, newest + 1):
                    waits_s[made_at(step) > FAST_AT_S + SKEW_S].append(now_s - made_at(step))
                common = max(common, newest)
        words[number] = word
        talk.say(view, word, is_lead=is_lead)
        if (word.confirmed or {}).get("step") == 24100:
            known_s.setdefault(NAMES[number], now_s - SEAL_S[1])
    everybody_s = [known_s.get(name, float("inf")) for name in NAMES]
    return [
        {"name": "last seal until the lead knows that it is durable", "value": min(everybody_s), "unit": "s", "target": 2.0},
        {"name": "last seal until half of the nodes know", "value": statistics.median(everybody_s), "unit": "s", "target": 2.0},
        {"name": "last seal until every node knows", "value": max(everybody_s), "unit": "s", "target": 3.0},
        {"name": "newest common step known after, steps of 1 s", "value": max(waits_s[False]), "unit": "s", "target": 2.0},
        {"name": "newest common step known after, steps of 0.2 s", "value": max(waits_s[True]), "unit": "s", "target": 2.0},
        {"name": "nodes falsely suspected", "value": false_alarms, "unit": "nodes", "target": 0},
    ]


# -- 4. start --------------------------------------------------------------------------------------------------------------

TENSORS = 64
"""In the part that all ranks hold."""


def make_catalogs(roster: Roster) -> dict[str, Catalog]:
    """What every node finds on its own disk: its parts of three saves, and replicas of two other nodes."""
    run = Run(run_uid="run", name="run", created_at="then")
    digest = roster.digest
    tensors = tuple(TensorSpec(name=f"layers.{n}.weight", dtype="F32", shape=(1024, 1024), begin=n << 22, end=(n + 1) << 22) for n in range(TENSORS))
    found = {}
    for number, name in enumerate(NAMES):
        checkpoints = []
        for step in (1000, 2000, 3000):
            identity = save_id("run", REF.nonce, step)
            mine = [REPLICATED, *(rank_part(r) for n in (number, number - 32, number - 64) for r in _ranks_of(n))]
            seals = []
            for part in mine:
                is_large = part == REPLICATED
                # Each node has read its own files: nothing is shared in memory before the union makes it so.
                seals.append(
                    Seal(
                        run_uid="run", attempt=REF, parent=None, step=step, save_id=identity, part=part, node=name, roster_digest=digest,
                        payload_name=f"{part}~{name}-1a2b3c4d.safetensors", payload_bytes=TENSORS << 22 if is_large else 5000, chunk_bytes=16 << 20,
                        chunks=tuple(f"{n:032x}" for n in range(TENSORS // 4 if is_large else 1)),
                        tensors=tuple(replace(t) for t in tensors) if is_large else (), tree={"step": step, "part": part},
                        meta={"step": step, "experiment": "bench", "git_commit": "0" * 40},
                    )
                )  # fmt: skip
            checkpoints.append(
                Checkpoint(
                    step=step, save_id=identity, attempt=REF, parent=None, dir_name=f"step-{step:09}-{identity[:8]}", roster=roster,
                    seals=tuple(seals), problems=(), size_bytes=1 << 30,
                )
            )  # fmt: skip
        found[name] = Catalog(
            run=run, attempts=((REF, None),), checkpoints=tuple(checkpoints), problems=(), next_seq=REF.seq + 1, rosters={digest: roster}
        )  # fmt: skip
    return found


def measure_start() -> list[dict[str, Any]]:
    """The parts of the start agreement that grow with the number of ranks and touch neither disk nor network."""
    rows = []

    def timed(name: str, target_s: float, what: Callable[[], Any]) -> Any:
        began_s = time.process_time()
        made = what()
        rows.append({"name": name, "value": time.process_time() - began_s, "unit": "s", "target": target_s})
        return made

    where = tuple(name for name in NAMES for _ in range(RANKS))
    facts = [
        RankFacts(holds_replicated=True, state_bytes=1 << 30, available_bytes=1 << 37, save_interval_steps=100, wanted_interval_steps=None)
        for _ in where
    ]
    ranks = len(where)
    timed(f"slots for {ranks} ranks", 0.5, lambda: size_slots(where, facts))
    roster = timed("roster", 0.5, lambda: new_roster("run", REF, where, has_replicated=True))
    timed("roster: digest", 0.5, lambda: roster.digest)
    text = timed("roster: record", 0.5, lambda: roster.encode())
    timed("roster: read back", 0.5, lambda: Roster.decode(text, path="roster"))
    attempt = Attempt(
        run_uid="run", attempt=REF, parent=None, snapshot_interval_steps=1, world_size=ranks, roster_digest=roster.digest, started_at="then"
    )  # fmt: skip
    assert attempt.world_size == ranks
    plan = make_plan(NAMES[500])
    board = timed("plan: to the board", 0.5, lambda: json.dumps(plan.as_board()))
    timed("plan: from the board", 0.5, lambda: Plan.from_board(json.loads(board)))
    timed("holders of every node's private parts", 0.5, lambda: placement.all_replicas(plan.nodes, plan.domains))
    timed("parts that a node is to write, half of the room dark", 0.5, lambda: plan.parts_to_write(frozenset(DARK)))
    timed("whether half of the room covers the other", 0.5, lambda: plan.is_covered(DARK))
    catalogs = make_catalogs(roster)
    merged = timed(f"catalogs of {NODES} nodes made one", 10.0, lambda: union.merge(catalogs))
    tracemalloc.start()
    union.merge(catalogs)
    rows.append({"name": "memory that this takes beside them", "value": tracemalloc.get_traced_memory()[1] / 1e6, "unit": "MB", "target": 1000.0})
    tracemalloc.stop()
    best = timed("candidates of the union", 5.0, lambda: union.candidates(merged))
    assert [c.step for c in best] == [3000, 2000, 1000]
    rows.append({"name": "plan board", "value": len(board), "unit": "bytes", "target": links.PLAN_BYTES // 2})
    return rows


# -- all of it -------------------------------------------------------------------------------------------------------------


def main() -> None:
    print(f"{NODES} nodes of {RANKS} ranks")
    rows: list[dict[str, Any]] = []
    for name, number in (("the lead", 0), ("its deputy", 1), ("another node", NODES // 2)):
        rows += measure_rounds(name, number)
    rows += measure_words()
    rows += measure_time()
    rows += measure_start()
    print(f"{'':62}{'value':>10} {'unit':10}{'target':>9}")
    for row in rows:
        row["met"] = row["value"] <= row["target"]
        value = f"{row['value']:10.3f}" if isinstance(row["value"], float) else f"{row['value']:10}"
        print(f"{row['name']:62}{value} {row['unit']:10}{row['target']:>9g}{'' if row['met'] else '  missed'}")
    load = os.getloadavg()[0]
    if load > (os.cpu_count() or 1):
        print(f"the machine was busy with other things (load {load:.1f}): processor times are too high")
    print(f"figures: {figures.write('room', rows, load=load)}")


if __name__ == "__main__":
    main()

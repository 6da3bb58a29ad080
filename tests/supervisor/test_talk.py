"""What goes between supervisors: the word of the lead, views of the nodes, and what is made of late, lost and foreign ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.config import Config, PeersConfig
from ridethrough.errors import UsageError
from ridethrough.supervisor import packet
from ridethrough.supervisor.directive import Directive, Incident, Outcome, Stage
from ridethrough.supervisor.peers import Peers
from ridethrough.supervisor.scene import Sight
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.talk import BEAT_S, CALL_SLACK_S, Talk
from ridethrough.supervisor.view import End, NodePhase, NodeView, Refused, Sealed
from ridethrough.testing import FakeClock
from ridethrough.testing.network import FakeNetwork

PORT = 29577
KEY = "5a" * 32
SETTINGS = Settings(argv=("train",), config=Config(peers=PeersConfig(port=PORT)))


@dataclass(slots=True)
class Speaker:
    """A node that only talks: it says its view, follows whom it hears, and leads where it should."""

    name: str
    talk: Talk
    word: Directive
    view: NodeView
    is_mute: bool = False
    is_lead: bool = False


class Hall:
    """Speakers on one network, all in one round."""

    def __init__(self, *names: str, room: str = "r", lead: str | None = None, scope: str = "run", key: str = KEY) -> None:
        self.clock = FakeClock()
        self.network = FakeNetwork(self.clock)
        self.names = names
        self.speakers = {name: self.join(name, lead=lead or names[0], room=room, scope=scope, key=key) for name in names}

    def join(self, name: str, *, lead: str | None, room: str = "r", scope: str = "run", key: str = KEY) -> Speaker:
        talk = Talk(self.clock, SETTINGS, name, open_socket=lambda port, interface: self.network.socket(name, port))
        talk.enter(key=key, scope=scope, addresses={n: (n, PORT) for n in self.names}, order=self.names)
        talk.election.enter(lead, now_s=self.clock.monotonic_s())
        word = Directive(room=room, lead=lead or "", stage=Stage.RUNNING, generation=1, called_s=self.clock.monotonic_s(), members=self.names)
        return Speaker(name, talk, word, NodeView(node=name, generation=1, up_s=10.0))

    def run(self, duration_s: float) -> None:
        end_s = self.clock.monotonic_s() + duration_s
        while self.clock.monotonic_s() < end_s:
            for one in self.speakers.values():
                if one.is_mute:
                    continue
                one.word = one.talk.hear(one.word)
                one.is_lead = one.talk.leads(one.view, one.word)
                if one.is_lead and one.word.lead != one.name:
                    one.word = replace(one.word, lead=one.name, number=one.word.number + 1)
                one.talk.say(one.view, one.word, is_lead=one.is_lead)
            self.clock.advance(0.05)

    def sights(self, name: str) -> dict[str, Sight]:
        one = self.speakers[name]
        return one.talk.sights(one.view, one.word)


# -- hearing ---------------------------------------------------------------------------------------------------------------


def test_word_of_the_lead_reaches_every_node() -> None:
    hall = Hall("a", "b", "c")
    hall.speakers["a"].word = replace(hall.speakers["a"].word, announced=70, number=5)
    hall.run(1.0)
    assert {one.word.announced for one in hall.speakers.values()} == {70}


def test_views_of_the_nodes_reach_the_lead() -> None:
    hall = Hall("a", "b", "c")
    hall.speakers["c"].view = hall.speakers["c"].view._replace(step=12)
    hall.run(1.0)
    found = hall.sights("a")["c"].view
    assert found is not None
    assert found.step == 12


def test_news_is_said_at_once_and_the_rest_with_the_next_beat() -> None:
    hall = Hall("a", "b", "c")
    hall.run(2.0)
    sent = hall.network.counts["sent"]
    hall.speakers["b"].view = hall.speakers["b"].view._replace(step=13)
    hall.run(0.1)
    quiet = hall.network.counts["sent"] - sent
    hall.speakers["b"].view = hall.speakers["b"].view._replace(flushed=3)
    hall.run(0.1)
    heard = hall.sights("a")["b"].view
    assert heard is not None
    assert heard.flushed == 3
    assert quiet <= 4, "a step is no news"


def test_nodes_beat_even_if_nothing_changes() -> None:
    hall = Hall("a", "b")
    hall.run(10.0)
    assert hall.sights("a")["b"].age_s <= BEAT_S + 0.1


def test_later_word_counts_and_of_two_equally_late_ones_that_of_the_earlier_node() -> None:
    hall = Hall("a", "b", "c")
    talk, word = hall.speakers["c"].talk, hall.speakers["c"].word
    assert talk._beats(replace(word, number=3, lead="b"), replace(word, number=2, lead="a"))
    assert talk._beats(replace(word, number=2, lead="a"), replace(word, number=2, lead="b"))
    assert not talk._beats(replace(word, number=2, lead="b"), replace(word, number=2, lead="b"))
    assert talk._beats(replace(word, number=1, generation=2, lead="b"), replace(word, number=9, lead="a"))


def test_of_two_halves_called_to_one_launch_the_one_with_the_later_attempt_is_heard() -> None:
    """A claim has decided which of them goes on; the other may have said more."""
    talk = Hall("a", "b").speakers["a"].talk
    loser = Directive(stage=Stage.FINISHED, generation=6, number=99, lead="a", attempt="000005-11111111", code=21)
    winner = Directive(stage=Stage.RUNNING, generation=6, number=70, lead="b", attempt="000006-22222222")
    assert talk._beats(winner, loser)
    assert not talk._beats(loser, winner)


def test_lead_that_does_not_hear_a_later_word_is_told_of_it_by_those_who_do() -> None:
    hall = Hall("a", "b", "c", lead="a")
    hall.network.part(["a"], ["b"])
    hall.run(0.5)
    hall.speakers["a"].word = replace(hall.speakers["a"].word, number=50, generation=4, lead="a")
    hall.run(5.0)
    assert hall.speakers["b"].word.generation == 4


def test_word_of_another_room_is_not_heard() -> None:
    hall = Hall("a", "b")
    hall.speakers["b"].word = replace(hall.speakers["b"].word, room="other")
    hall.run(1.0)
    assert hall.sights("a")["b"].view is None


def test_node_with_another_key_is_not_heard_and_is_counted() -> None:
    hall = Hall("a", "b")
    hall.speakers["b"] = hall.join("b", lead="a", key="17" * 32)
    hall.run(2.0)
    assert hall.sights("a")["b"].view is None
    assert hall.speakers["a"].talk.refused["wrong key"] > 0


def test_node_of_another_run_is_not_heard() -> None:
    hall = Hall("a", "b")
    hall.speakers["b"] = hall.join("b", lead="a", scope="another run")
    hall.run(2.0)
    assert hall.sights("a")["b"].view is None


NONSENSE = [
    b"", b"[]", b"{}", b"null", b"\xff", b'{"r":"r"}', b'{"r":"r","f":"a","v":{"node":"b","phase":"dancing"}}', b'{"r":"r","f":"a","v":{},"d":3}',
]  # fmt: skip


@pytest.mark.parametrize("body", NONSENSE)
def test_authentic_nonsense_is_no_word_and_no_error(body: bytes) -> None:
    hall = Hall("a", "b")
    hall.run(1.0)
    before = hall.sights("a")["b"].view
    peers = hall.speakers["b"].talk._peers
    assert isinstance(peers, Peers)
    hall.speakers["b"].is_mute = True
    peers.send(body, to=["a"])
    hall.run(0.2)
    assert hall.sights("a")["b"].view == before


def test_nodes_after_the_lead_hear_every_view_so_that_a_successor_knows_who_is_there() -> None:
    hall = Hall("a", "b", "c", "d", "e")
    hall.run(1.0)
    for deputy in ("b", "c"):
        assert all(hall.sights(deputy)[n].view is not None for n in hall.names)
    assert hall.sights("d")["e"].view is None


# -- what a lead makes of it -----------------------------------------------------------------------------------------------


def test_node_whose_keeper_is_younger_than_the_launch_has_restarted() -> None:
    hall = Hall("a", "b")
    hall.run(5.0)
    hall.speakers["b"].view = NodeView(node="b", generation=0, up_s=1.0)
    hall.run(1.0)
    assert hall.sights("a")["b"].has_restarted


def test_node_that_came_up_just_before_the_call_has_not_restarted() -> None:
    hall = Hall("a", "b")
    hall.speakers["b"].view = NodeView(node="b", generation=0, up_s=0.0)
    hall.run(CALL_SLACK_S / 2)
    assert not hall.sights("a")["b"].has_restarted


def test_new_life_of_a_node_is_not_taken_for_the_one_whose_view_we_have() -> None:
    """It is there, but what the last life had said is not true of it."""
    hall = Hall("a", "b")
    hall.run(3.0)
    hall.speakers["b"].is_mute = True
    hall.run(3.0)
    fresh = hall.join("b", lead=None, room="")
    assert isinstance(fresh.talk._peers, Peers)
    hall.speakers["b"] = fresh
    for _ in range(6):
        fresh.talk._peers.receive()
        fresh.talk._peers.probe("a")
        hall.speakers["a"].talk.hear(hall.speakers["a"].word)
        hall.clock.advance(0.05)
    assert hall.speakers["a"].talk._peers.age_s("b") < 0.5  # type: ignore[union-attr]
    assert hall.sights("a")["b"].silent_s > 2.0
    assert hall.sights("a")["b"].age_s > 2.0


def test_new_lead_gives_nodes_that_owed_it_no_word_time_to_speak_but_does_not_call_them_heard() -> None:
    hall = Hall("a", "b", "c", "d", "e")
    hall.run(1.0)
    for name in ("a", "b", "c", "e"):
        hall.speakers[name].is_mute = True
    for _ in range(200):
        hall.run(0.05)
        if hall.speakers["d"].is_lead:
            break
    assert hall.sights("d")["e"].silent_s < 0.2
    assert hall.sights("d")["e"].age_s > 3.0


# -- how much is said ------------------------------------------------------------------------------------------------------

NAMES = tuple(f"gpu-{rack:02}-{slot:02}.cluster.example" for rack in range(32) for slot in range(32))


def full_word(order: tuple[str, ...]) -> Directive:
    """With every field in use, and half of the room dark."""
    dark = order[1::2]
    long = "x" * 300
    flush = {"id": 9, "reason": long, "step": 10**6, "dark": list(dark), "of": "000123-1a2b3c4d 123"}
    refused = {"number": 9, "step": 10**6, "code": "RT-014", "message": long}
    outcome = Outcome(cause="dark", fingerprint="x" * 200, detail=long, action="restart", reason=long, pause_s=60.0, last_step=10**6, lost=dark)
    incident = Incident(cause="dark", detail=long, nodes=dark, last_step=10**6, opened_at="2026-01-01T00:00:00.000+00:00")
    stop = {"id": 3, "state": "proposed", "step": 10**6, "since_s": 1e6}
    confirmed = {"step": 10**6, "is_verified": True, "dark": list(dark)}
    return Directive(
        room="000123-1a2b3c4d", number=10**6, lead=order[0], stage=Stage.OVER, generation=123, called_s=1e6, members=order, reason=long,
        attempt="000123-1a2b3c4d", announced=10**6, announcement=10**4, dark=dark, flush=flush, confirmed=confirmed,
        refused=refused, stop=stop, is_suspect=True, outcome=outcome, incident=incident, code=21, text=long,
    )  # fmt: skip


def full_view(node: str) -> NodeView:
    seals = tuple(Sealed(step=10**6 + n, dark=NAMES[1::2], is_verified=True, digests={"replicated": "0" * 16}) for n in range(4))
    end = End(status=-9, cause="application", fingerprint="x" * 200, detail="x" * 300, exit_code=22, output="\n" * 1500)
    return NodeView(
        node=node, up_s=1e6, phase=NodePhase.ENDED, generation=123, attempt="000123-1a2b3c4d", missing=("storage: " + "x" * 200,) * 3, ranks=8,
        step=10**6, posted=tuple(range(10**6, 10**6 + 4)), replicas={n: tuple(range(10**6, 10**6 + 4)) for n in NAMES[1:3]}, sealed=seals,
        refused=Refused(number=9, step=10**6, code="RT-014", message="x" * 300, age_s=1e6), dead_ranks=tuple(range(8)), end=end,
    )  # fmt: skip


def test_largest_word_of_a_thousand_nodes_fits_into_a_heartbeat() -> None:
    clock = FakeClock()
    network = FakeNetwork(clock)
    talk = Talk(clock, SETTINGS, NAMES[0], open_socket=lambda port, interface: network.socket(NAMES[0], port))
    talk.enter(key=KEY, scope="run", addresses={n: (n, PORT) for n in NAMES}, order=NAMES)
    talk.election.enter(NAMES[0], now_s=clock.monotonic_s())
    assert talk.leads(full_view(NAMES[0]), full_word(NAMES))
    talk.say(full_view(NAMES[0]), full_word(NAMES), is_lead=True)
    assert network.counts["sent"] >= len(NAMES) - 1


def test_output_in_any_script_and_colour_does_not_keep_a_node_from_speaking() -> None:
    hall = Hall("a", "b")
    end = End(status=1, cause="application", fingerprint="值错误", detail="错误的批次" * 60, output="\x1b[31m错误" * 250)
    hall.speakers["b"].view = hall.speakers["b"].view._replace(phase=NodePhase.ENDED, end=end)
    hall.run(1.0)
    found = hall.sights("a")["b"].view
    assert found is not None
    assert found.end is not None
    assert (found.end.cause, found.end.fingerprint) == ("application", "值错误")


def test_what_the_sites_gates_say_at_length_does_not_keep_a_node_from_speaking() -> None:
    hall = Hall("a", "b")
    hall.speakers["b"].view = full_view("b")._replace(missing=tuple(f"storage: /data/{n} does not answer: {'x' * 200}" for n in range(100)))
    hall.run(1.0)
    found = hall.sights("a")["b"].view
    assert found is not None
    assert found.missing[0].startswith("storage: /data/0")


@settings(max_examples=200, deadline=None)
@given(dark=st.sets(st.sampled_from(NAMES[:70])), members=st.sets(st.sampled_from(NAMES[:70]), min_size=1))
def test_lists_of_nodes_come_out_of_the_packing_as_they_went_in(dark: set[str], members: set[str]) -> None:
    order = NAMES[:70]
    talk = Talk(FakeClock(), SETTINGS, order[0])
    talk.order = order
    listed = tuple(n for n in order if n in dark)
    word = Directive(
        members=tuple(n for n in order if n in members), dark=listed, called_s=900.0, flush={"id": 1, "dark": list(listed)},
        outcome=Outcome(cause="", fingerprint="", detail="", action="", reason="", lost=listed),
        incident=Incident(cause="", detail="", nodes=listed, last_step=1, opened_at=""),
    )  # fmt: skip
    carried = json.loads(json.dumps(talk._encode(word, 1000.0)))
    assert talk._decode(carried, 1000.0) == word


def test_times_are_told_as_ages_for_clocks_differ_between_nodes() -> None:
    talk = Talk(FakeClock(), SETTINGS, "a")
    carried = talk._encode(Directive(called_s=990.0, stop={"id": 1, "state": "signalled", "since_s": 995.0, "term_s": 998.0}), 1000.0)
    heard = talk._decode(dict(carried), 50.0)
    assert heard.called_s == 40.0
    assert heard.stop == {"id": 1, "state": "signalled", "since_s": 45.0, "term_s": 48.0}


# -- opening ---------------------------------------------------------------------------------------------------------------


def test_port_in_use_is_refused_when_it_is_opened() -> None:
    first = Talk(FakeClock(), Settings(argv=("train",)), "a")
    taken = Config(peers=PeersConfig(port=first.listen()))
    with pytest.raises(UsageError, match="cannot be used"):
        Talk(FakeClock(), Settings(argv=("train",), config=taken), "a").listen()
    assert first._socket is not None
    first._socket.close()


def test_node_alone_hears_nothing_and_leads() -> None:
    alone = Talk(FakeClock(), SETTINGS, "a")
    word = Directive(lead="a")
    assert alone.hear(word) is word
    assert alone.leads(NodeView(node="a"), word)
    assert set(alone.sights(NodeView(node="a"), word)) == {"a"}
    alone.say(NodeView(node="a"), word, is_lead=True)


def test_room_that_was_left_is_forgotten() -> None:
    hall = Hall("a", "b")
    hall.run(1.0)
    talk = hall.speakers["a"].talk
    talk.leave()
    assert not talk.is_open
    assert talk.leads(hall.speakers["a"].view, hall.speakers["a"].word)


def test_body_limit_of_the_protocol_is_the_one_that_is_meant_here() -> None:
    assert packet.BODY_LIMIT_BYTES == 8 << 10

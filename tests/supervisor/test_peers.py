from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.seam.udp import UdpSocket
from ridethrough.supervisor import packet, peers
from ridethrough.supervisor.packet import Refusal, Signer
from ridethrough.supervisor.peers import Heard, Peers
from ridethrough.testing import FakeClock
from ridethrough.testing.network import Carried, FakeNetwork, Room, Weather

KEY = b"k" * 32
PORT = 29577
SUSPECT_S = 1.5
_IPV6 = Path("/proc/net/if_inet6")
needs_ipv6 = pytest.mark.skipif(not _IPV6.exists() or "00000000000000000000000000000001" not in _IPV6.read_text(), reason="this host has no ::1")


def acquainted(*names: str, seconds: float = 3.0, **more: object) -> Room:
    """A room in which everybody has heard everybody."""
    room = Room(*names, **more)  # type: ignore[arg-type]
    room.run_for(seconds)
    assert all(room.peers(a).life(b) is not None for a in names for b in names if a != b)
    room.ever_silent.clear()
    return room


def exchange(*ends: Peers, rounds: int = 6) -> None:
    """Everybody listens in turn, until nothing more is to be said."""
    for _ in range(rounds):
        for end in ends:
            end.receive()


# -- what is heard -----------------------------------------------------------------------------------------------------


def test_two_nodes_believe_each_other_after_two_round_trips() -> None:
    clock = FakeClock()
    network = FakeNetwork(clock)
    addresses = {"a": ("a", PORT), "b": ("b", PORT)}
    a, b = (Peers(clock, network.socket(n, PORT), key=KEY, scope="run", node=n, addresses=addresses) for n in "ab")
    a.send(b"first", to=["b"])
    for _ in range(2):
        b.receive()
        a.receive()
    assert a.life("b") is not None
    assert b.life("a") is not None
    assert network.counts["sent"] == 4


@pytest.mark.parametrize("lost", range(4))
def test_whichever_packet_of_the_introduction_is_lost_the_next_word_makes_up_for_it(lost: int) -> None:
    clock = FakeClock()
    network = FakeNetwork(clock)
    addresses = {"a": ("a", PORT), "b": ("b", PORT)}
    sockets = {n: network.socket(n, PORT) for n in "ab"}
    a, b = (Peers(clock, sockets[n], key=KEY, scope="run", node=n, addresses=addresses) for n in "ab")
    a.send(b"first", to=["b"])
    for number in range(4):
        for socket in sockets.values():
            if number == lost:
                socket.inbox.clear()
        (a if number % 2 else b).receive()
    assert a.life("b") is None
    a.send(b"second", to=["b"])
    exchange(b, a, rounds=3)
    a.send(b"third", to=["b"])
    b.send(b"third", to=["a"])
    assert (b.receive(), a.receive()) == ([Heard("a", b"third", 0.0)], [Heard("b", b"third", 0.0)])


def test_what_is_said_is_heard_by_those_it_is_said_to() -> None:
    room = acquainted("n0", "n1", "n2")
    room.peers("n0").receive()
    room.peers("n1").send(b"step 12", to=["n0", "n1", "nobody"])
    assert room.peers("n0").receive() == [Heard("n1", b"step 12", 0.0)]
    assert room.peers("n2").receive() == []


def test_the_newest_word_of_a_node_wins() -> None:
    room = acquainted("n0", "n1")
    for step in range(5):
        room.peers("n1").send(b"step %d" % step, to=["n0"])
    assert room.peers("n0").receive() == [Heard("n1", b"step 4", 0.0)]


def test_a_word_that_was_overtaken_is_refused() -> None:
    room = acquainted("n0", "n1")
    room.peers("n0").receive()
    room.peers("n1").send(b"old", to=["n0"])
    old = room.network.recorded[-1]
    room.socket("n0").inbox.clear()  # it is still on its way
    room.peers("n1").send(b"new", to=["n0"])
    assert room.peers("n0").receive() == [Heard("n1", b"new", 0.0)]
    room.network.inject(old)
    assert room.peers("n0").receive() == []
    assert room.peers("n0").refused[Refusal.REPLAY] == 1


def test_a_word_that_says_nothing_new_keeps_a_node_alive_and_is_not_returned_again() -> None:
    room = acquainted("n0", "n1", say=lambda node: b"the same")
    room.run_for(1.0)
    room.clock.advance(0.5)
    room.peers("n1").send(b"the same", to=["n0"])
    assert room.peers("n0").receive() == []
    assert room.peers("n0").age_s("n1") == 0.0


def test_an_empty_word_is_heard_too() -> None:
    room = acquainted("n0", "n1")
    room.peers("n1").send(b"", to=["n0"])
    assert room.peers("n0").receive() == [Heard("n1", b"", 0.0)]


def test_a_word_that_is_too_long_is_an_error_of_the_caller() -> None:
    room = Room("n0", "n1")
    with pytest.raises(ValueError, match="at most 8192"):
        room.peers("n0").send(bytes(packet.BODY_LIMIT_BYTES + 1), to=["n1"])


def test_nodes_with_wall_clocks_years_apart_and_boots_at_different_times_hear_each_other() -> None:
    network_clock = FakeClock()
    network = FakeNetwork(network_clock)
    clocks = {
        "a": FakeClock(now_at=datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), monotonic_s=3.0),
        "b": FakeClock(now_at=datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC), monotonic_s=9e8),
    }
    addresses = {"a": ("a", PORT), "b": ("b", PORT)}
    a, b = (Peers(clocks[n], network.socket(n, PORT), key=KEY, scope="run", node=n, addresses=addresses) for n in "ab")
    for step in range(40):
        a.send(b"%d" % step, to=["b"])
        heard = b.receive()
        a.receive()
        for clock in (network_clock, *clocks.values()):
            clock.advance(0.05)
        clocks["b"].set_wall(clocks["a"].now_at())
    assert heard == [Heard("a", b"39", 0.0)]


# -- silence -----------------------------------------------------------------------------------------------------------


def test_age_is_that_of_the_last_word() -> None:
    room = acquainted("n0", "n1", beat_s=10.0)
    room.peers("n1").send(b"x", to=["n0"])
    room.peers("n0").receive()
    assert room.peers("n0").age_s("n1") == 0.0
    room.clock.advance(0.7)
    room.peers("n0").receive()
    assert room.peers("n0").age_s("n1") == pytest.approx(0.7)


def test_a_node_that_was_never_heard_has_no_age() -> None:
    room = Room("n0", "n1")
    assert room.peers("n0").age_s("n1") is None
    assert room.peers("n0").age_s("nobody") is None
    assert room.peers("n0").life("n1") is None


@pytest.mark.parametrize("seed", range(5))
def test_a_node_that_goes_dark_is_silent_after_the_suspicion_time_and_before_two_seconds(seed: int) -> None:
    room = acquainted("n0", "n1", "n2", seed=seed, weather=Weather(loss_ratio=0.1))
    room.run_for(seed * 0.13)
    room.network.darken("n1")
    dark_s = room.clock.monotonic_s()
    while not room.ever_silent:
        room.run_for(0.01)
    assert set(room.ever_silent) <= {("n0", "n1"), ("n2", "n1"), ("n1", "n0"), ("n1", "n2")}
    while ("n0", "n1") not in room.ever_silent:
        room.run_for(0.01)
    # Its last word may have been lost, then it counts from the one before.
    assert SUSPECT_S - 0.9 <= room.clock.monotonic_s() - dark_s <= 2.0


@pytest.mark.parametrize("loss_ratio", [0.1, 0.25, 0.4])
def test_lost_packets_alone_make_nobody_silent_within_half_an_hour(loss_ratio: float) -> None:
    weather = Weather(loss_ratio=loss_ratio, duplicate_ratio=0.05, delay_s=(0.0, 0.01))
    room = acquainted("n0", "n1", "n2", seconds=30.0, weather=weather, seed=3)
    room.run_for(1800.0)
    assert room.network.counts["lost"] > 1000
    assert not room.ever_silent


def test_without_asking_ten_percent_of_loss_would_make_nodes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    room = acquainted("n0", "n1", "n2", seconds=30.0, weather=Weather(loss_ratio=0.1), seed=3)
    monkeypatch.setattr(Peers, "_ask_overdue", lambda self: None)
    room.run_for(1800.0)
    assert room.ever_silent


def test_what_a_node_says_is_known_within_two_seconds_although_packets_are_lost() -> None:
    clock = FakeClock()
    room = acquainted("n0", "n1", "n2", weather=Weather(loss_ratio=0.1), seed=5, clock=clock, say=lambda node: b"%.3f" % clock.monotonic_s())
    worst_s = 0.0
    for _ in range(20_000):
        room.run_for(0.05)
        worst_s = max(worst_s, *(room.clock.monotonic_s() - float(room.heard["n0", node]) for node in ("n1", "n2")))
    assert 0.8 < worst_s < 2.0 - 0.05


def test_a_supervisor_that_stood_still_believes_nobody_silent_when_it_wakes() -> None:
    room = acquainted("n0", "n1", "n2")
    room.freeze("n0", 60.0)
    room.run_for(59.0)
    assert {("n1", "n0"), ("n2", "n0")} == set(room.ever_silent)
    room.ever_silent.clear()
    room.run_for(10.0)
    assert not [pair for pair in room.ever_silent if pair[0] == "n0"]


def test_a_supervisor_whose_socket_lost_everything_while_it_stood_still_believes_nobody_silent_either() -> None:
    room = acquainted("n0", "n1", "n2")
    room.freeze("n0", 60.0)
    room.run_for(59.9)
    room.socket("n0").inbox.clear()
    room.ever_silent.clear()
    room.run_for(10.0)
    assert not [pair for pair in room.ever_silent if pair[0] == "n0"]


def test_time_in_which_one_did_not_listen_counts_little() -> None:
    room = acquainted("n0", "n1")
    room.network.darken("n1")
    room.run_for(0.1)
    before_s = room.peers("n0").age_s("n1")
    assert before_s is not None
    room.clock.advance(1000.0)
    room.peers("n0").receive()
    assert room.peers("n0").age_s("n1") == pytest.approx(before_s + 0.1, abs=0.06)


def test_a_partition_makes_both_sides_silent_and_heals() -> None:
    room = acquainted("n0", "n1", "n2", "n3")
    lives = {n: room.peers("n0").life(n) for n in ("n1", "n2", "n3")}
    room.network.part(["n0", "n1"], ["n2", "n3"])
    room.run_for(10.0)
    assert set(room.ever_silent) == {(a, b) for a in ("n0", "n1") for b in ("n2", "n3")} | {(b, a) for a in ("n0", "n1") for b in ("n2", "n3")}
    room.network.heal()
    room.run_for(1.0)
    room.ever_silent.clear()
    room.run_for(10.0)
    assert not room.ever_silent
    assert {n: room.peers("n0").life(n) for n in lives} == lives


def test_silence_counts_from_when_a_node_is_watched() -> None:
    room = acquainted("n0", "n1", "n2")
    room.talk("n0", to=["n2"])
    room.talk("n1", to=["n2"])
    room.run_for(30.0)
    n0 = room.peers("n0")
    assert (n0.age_s("n1") or 0.0) > 20
    assert n0.silent(longer_than_s=SUSPECT_S) == ()
    n0.watch(["n1", "n2"])
    assert n0.silence_s("n1") == 0.0
    room.network.darken("n1")
    room.run_for(1.0)
    assert n0.silence_s("n1") == pytest.approx(1.0, abs=0.1)
    room.run_for(1.0)
    assert n0.silent(longer_than_s=SUSPECT_S) == ("n1",)


def test_a_node_that_nobody_watches_is_not_asked() -> None:
    room = acquainted("n0", "n1")
    for name in ("n0", "n1"):
        room.talk(name, to=[])
    room.network.counts.clear()
    room.run_for(10.0)
    assert room.network.counts["sent"] == 0


def test_a_node_that_is_newly_watched_is_asked_at_once() -> None:
    room = Room("n0", "n1", beat_s=1000.0)
    room.run_for(0.5)
    assert room.peers("n0").life("n1") is not None


def test_a_probe_is_answered_at_once_with_what_was_said_last() -> None:
    room = acquainted("n0", "n1", beat_s=1000.0)
    room.network.weather.loss_ratio = 1.0
    room.peers("n1").send(b"lost", to=["n0"])
    room.network.weather.loss_ratio = 0.0
    room.clock.advance(0.3)
    room.peers("n0").probe("n1")
    room.peers("n0").probe("nobody")
    room.peers("n1").receive()
    assert room.peers("n0").receive() == [Heard("n1", b"lost", pytest.approx(0.3, abs=0.001))]


def test_what_was_said_long_ago_is_not_said_again() -> None:
    room = acquainted("n0", "n1", beat_s=1000.0)
    room.talk("n0", to=[])
    room.talk("n1", to=[])
    room.run_for(1.0)
    room.peers("n1").send(b"old", to=["n0"])
    room.socket("n0").inbox.clear()
    room.run_for(SUSPECT_S + 0.1)
    assert (room.peers("n0").age_s("n1") or 0.0) > SUSPECT_S
    room.peers("n0").probe("n1")
    room.run_for(0.2)
    assert room.peers("n0").age_s("n1") == pytest.approx(0.1, abs=0.11)
    assert room.heard == {}


def test_what_was_said_before_standing_still_is_not_said_again() -> None:
    room = acquainted("n0", "n1", beat_s=1000.0)
    room.peers("n1").send(b"old", to=["n0"])
    room.socket("n0").inbox.clear()
    room.clock.advance(20.0)
    room.peers("n0").probe("n1")
    room.peers("n1").receive()
    assert room.peers("n0").receive() == []
    assert room.peers("n0").age_s("n1") == 0.0


def test_half_a_room_that_goes_dark_is_asked_within_bounds() -> None:
    names = [f"n{number}" for number in range(200)]
    clock = FakeClock()
    network = FakeNetwork(clock)
    lead = Peers(clock, network.socket("lead"), key=KEY, scope="run", node="lead", addresses={n: (n, PORT) for n in names})
    lead.watch(names)
    sent = []
    for _ in range(200):
        clock.advance(0.05)
        before = lead.traffic.sent
        lead.receive()
        sent.append(lead.traffic.sent - before)
    assert set(lead.silent(longer_than_s=SUSPECT_S)) == set(names)
    assert max(sent) <= 512
    # Later it is only looked whether they are back.
    assert sum(sent[-100:]) <= 200 * 11


# -- who is not believed -----------------------------------------------------------------------------------------------


def record(room: Room, name: str) -> list[Carried]:
    """What somebody on the way has of that node."""
    return [packet for packet in room.network.recorded if packet.source == name]


def replay(room: Room, recorded: list[Carried], *, to: str) -> None:
    """It arrives again, a third at a time, while the node that it came from is dark or dead."""
    for third in range(3):
        for one in recorded[third::3]:
            room.network.inject(one._replace(host=to))
        room.run_for(0.2)


def test_packets_repeated_within_a_life_prove_nothing() -> None:
    room = acquainted("n0", "n1")
    recorded = record(room, "n1")
    room.network.darken("n1")
    room.run_for(1.0)
    room.heard.clear()
    replay(room, recorded, to="n0")
    assert room.peers("n0").age_s("n1") == pytest.approx(1.6, abs=0.6)
    assert ("n0", "n1") in room.ever_silent
    assert room.heard == {}
    assert room.peers("n0").refused[Refusal.REPLAY] > 0


def test_packets_of_an_earlier_life_of_the_sender_prove_nothing() -> None:
    room = acquainted("n0", "n1")
    recorded = record(room, "n1")
    old = room.peers("n0").life("n1")
    room.stop("n1")
    room.start("n1")
    room.run_for(1.0)
    new = room.peers("n0").life("n1")
    assert new not in (None, old)
    room.stop("n1")
    room.heard.clear()
    replay(room, recorded, to="n0")
    assert room.peers("n0").life("n1") == new
    assert room.heard == {}
    room.run_for(1.5)
    assert room.peers("n0").silent(longer_than_s=SUSPECT_S) == ("n1",)


def test_packets_of_an_earlier_life_do_not_interrupt_the_living_one() -> None:
    room = acquainted("n0", "n1", say=lambda node: b"the same")
    recorded = record(room, "n1")
    room.stop("n1")
    room.start("n1")
    room.run_for(2.0)
    room.heard.clear()
    for one in recorded:
        room.network.inject(one)
        room.run_for(0.3)
    assert room.heard == {}
    assert (room.peers("n0").age_s("n1") or 0.0) < 0.5


def test_packets_from_before_a_restart_of_the_receiver_prove_nothing() -> None:
    room = acquainted("n0", "n1")
    recorded = record(room, "n1")
    room.stop("n1")
    room.stop("n0")
    room.start("n0")
    room.heard.clear()
    replay(room, recorded, to="n0")
    assert room.peers("n0").life("n1") is None
    assert room.peers("n0").age_s("n1") is None
    assert room.heard == {}
    assert room.peers("n0").refused[Refusal.STALE] == len(recorded)


def test_packets_to_one_node_prove_nothing_to_another() -> None:
    room = acquainted("n0", "n1", "n2")
    recorded = [one for one in record(room, "n1") if one.host == "n2"]
    room.stop("n1")
    before = room.peers("n0").age_s("n1")
    assert before is not None
    replay(room, recorded, to="n0")
    assert room.peers("n0").age_s("n1") == pytest.approx(before + 0.6, abs=0.11)


def test_a_life_that_was_recorded_and_never_arrived_does_not_displace_the_living_one() -> None:
    room = acquainted("n0", "n1", beat_s=1000.0)
    n0 = room.peers("n0")
    room.stop("n1")
    n1 = room.start("n1")
    n0.receive()  # hears of the new life and tells it what to echo
    room.network.darken("n1")
    n1.receive()
    stolen = room.network.recorded[-1]  # the right echo, on its way
    room.stop("n1")
    room.network.heal()
    room.start("n1")
    room.run_for(1.0)
    living = n0.life("n1")
    assert living not in (None, n1._life.hex())
    room.network.inject(stolen)
    n0.receive()
    assert n0.life("n1") == living


def test_a_node_gets_to_know_others_in_a_storm_of_recordings() -> None:
    weather = Weather(replay_ratio=0.5, duplicate_ratio=0.3, loss_ratio=0.1, mangle_ratio=0.1, delay_s=(0.0, 0.2))
    room = acquainted("n0", "n1", "n2", weather=weather, seconds=20.0)
    before = room.peers("n0").life("n1")
    room.stop("n1")
    room.start("n1")
    room.run_for(10.0)
    after = room.peers("n0").life("n1")
    assert after not in (None, before)
    room.ever_silent.clear()
    room.run_for(300.0)
    assert room.peers("n0").life("n1") == after
    assert not room.ever_silent


@pytest.fixture
def quiet() -> Room:
    """Two acquainted nodes that do nothing by themselves; nothing is on the way."""
    room = acquainted("n0", "n1")
    for name in ("n0", "n1"):
        room.peers(name).watch([])
    exchange(room.peers("n0"), room.peers("n1"))
    room.network.counts.clear()
    return room


def unanswered(room: Room, data: bytes, reason: Refusal) -> None:
    """The packet changes nothing, is counted, and nothing is sent for it."""
    n0 = room.peers("n0")
    life, refused = n0.life("n1"), n0.refused[reason]
    room.clock.advance(1.0)
    room.network.inject(Carried(data, "n1", "n0", PORT))
    assert n0.receive() == []
    assert n0.refused[reason] == refused + 1
    assert room.network.counts["sent"] == 0
    assert (n0.age_s("n1") or 0.0) >= 1.0
    assert n0.life("n1") == life


def foreign(node: str, *, key: bytes = KEY, scope: str = "run") -> bytes:
    """A first word of somebody who got into the way of this run."""
    network = FakeNetwork(FakeClock())
    Peers(FakeClock(), network.socket("elsewhere"), key=key, scope=scope, node=node, addresses={"n0": ("n0", PORT)}).send(b"hello", to=["n0"])
    return network.recorded[-1].data


def test_a_packet_with_a_wrong_key_is_never_answered(quiet: Room) -> None:
    unanswered(quiet, foreign("n1", key=b"x" * 32), Refusal.KEY)


def test_a_packet_of_another_run_with_the_same_key_is_never_answered(quiet: Room) -> None:
    unanswered(quiet, foreign("n1", scope="another run"), Refusal.KEY)


def test_a_packet_of_a_node_that_is_not_in_the_list_is_never_answered(quiet: Room) -> None:
    unanswered(quiet, foreign("n7"), Refusal.UNKNOWN)


def test_a_packet_of_ones_own_is_never_answered(quiet: Room) -> None:
    quiet.peers("n0").send(b"hello", to=["n1"])
    quiet.network.counts.clear()
    unanswered(quiet, quiet.network.recorded[-1].data, Refusal.UNKNOWN)


def test_a_packet_of_another_version_is_never_answered(quiet: Room) -> None:
    data = foreign("n1")
    unanswered(quiet, data[:2] + bytes([packet.VERSION + 1]) + data[3:], Refusal.VERSION)


def test_a_huge_packet_is_never_answered(quiet: Room) -> None:
    unanswered(quiet, foreign("n1")[:3] + bytes(60000), Refusal.MANGLED)


def test_a_body_that_cannot_be_unpacked_is_counted_and_the_node_is_alive(quiet: Room) -> None:
    n0, n1 = quiet.peers("n0"), quiet.peers("n1")
    letter = n1._signer.letter(b"x" * 100)
    letter._begin += b"\xff"
    letter._begin = letter._begin[:3] + b"\xff" * 20
    letter._mac = n1._signer._keyed.copy()
    letter._mac.update(letter._begin)
    quiet.clock.advance(1.0)
    n1._post(n1._peers["n0"], letter)
    assert n0.receive() == []
    assert n0.refused[Refusal.MANGLED] == 1
    assert n0.age_s("n1") == 0.0


_QUIET = acquainted("n0", "n1")
_QUIET.peers("n0").watch([])
exchange(_QUIET.peers("n0"))


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda data: b"rt" + bytes([packet.VERSION]) + data)))
def test_no_bytes_raise_or_are_answered(data: bytes) -> None:
    sent = _QUIET.peers("n0").traffic.sent
    _QUIET.network.inject(Carried(data, "n1", "n0", PORT))
    assert _QUIET.peers("n0").receive() == []
    assert _QUIET.peers("n0").traffic.sent == sent


@given(st.data())
def test_no_mangled_packet_raises_or_is_answered(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(record(_QUIET, "n1"))).data
    cut = whole[: data.draw(st.integers(0, len(whole)))] + data.draw(st.binary(max_size=20))
    bit = data.draw(st.integers(0, max(len(cut) * 8 - 1, 0)))
    changed = bytearray(cut)
    if changed:
        changed[bit // 8] ^= 1 << bit % 8
    if bytes(changed) == whole:
        return
    sent = _QUIET.peers("n0").traffic.sent
    _QUIET.network.inject(Carried(bytes(changed), "n1", "n0", PORT))
    assert _QUIET.peers("n0").receive() == []
    assert _QUIET.peers("n0").traffic.sent == sent


def test_a_node_with_a_wrong_key_is_not_heard_and_hears_nothing() -> None:
    room = Room("n0", "n1")
    room.start("n1", key=b"x" * 32)
    room.run_for(10.0)
    assert room.heard == {}
    assert room.peers("n0").refused[Refusal.KEY] > 0
    assert room.peers("n1").refused[Refusal.KEY] > 0


def test_two_runs_on_one_range_of_ports_do_not_hear_each_other() -> None:
    clock = FakeClock()
    network = FakeNetwork(clock)
    ports = {("red", "a"): 1000, ("red", "b"): 1001, ("blue", "a"): 1001, ("blue", "b"): 1000}
    # The second run took over the ports of the first, whose nodes still send to them.
    ends = {}
    for (run, node), port in ports.items():
        addresses = {n: ("host", p) for (r, n), p in ports.items() if r == run}
        ends[run, node] = Peers(clock, network.socket("host", port), key=KEY, scope=run, node=node, addresses=addresses)
        ends[run, node].watch(addresses)
    for _ in range(40):
        clock.advance(0.05)
        for (run, _), end in ends.items():
            end.send(run.encode(), to=["a", "b"])
            assert all(heard.body == run.encode() for heard in end.receive())
    assert any(end.refused[Refusal.KEY] for end in ends.values())
    assert ends["blue", "a"].life("b") is not None


def test_recordings_are_answered_once_a_round_and_with_no_more_than_came() -> None:
    room = acquainted("n0", "n1")
    recorded = record(room, "n1")
    room.stop("n0")
    n0 = room.start("n0")
    n0.watch([])
    exchange(n0)
    sent, sent_bytes = n0.traffic.sent, n0.traffic.sent_bytes
    room.clock.advance(1.0)
    for one in recorded:
        room.network.inject(one)
    n0.receive()
    assert n0.traffic.sent - sent == 1
    assert n0.traffic.sent_bytes - sent_bytes <= min(len(one.data) for one in recorded)


def test_recordings_never_make_a_node_write_to_a_host_it_was_not_told() -> None:
    room = acquainted("n0", "n1")
    for one in record(room, "n1"):
        room.network.inject(one._replace(source="victim"))
    room.run_for(1.0)
    assert {one.host for one in record(room, "n0")} == {"n1"}


def test_a_flood_does_not_hold_the_loop() -> None:
    room = acquainted("n0", "n1")
    for _ in range(20_000):
        room.network.inject(Carried(b"flood", "n1", "n0", PORT))
    before = room.peers("n0").traffic.received
    room.peers("n0").receive()
    assert room.peers("n0").traffic.received - before == peers._ROUND_PACKETS


# -- restarts and changes ----------------------------------------------------------------------------------------------


def test_a_restart_is_recognised_and_disturbs_nobody_else() -> None:
    room = acquainted("n0", "n1", "n2")
    before = {n: room.peers("n0").life(n) for n in ("n1", "n2")}
    room.stop("n1")
    room.start("n1")
    room.heard.clear()
    room.run_for(1.0)
    assert room.peers("n0").life("n1") not in (None, before["n1"])
    assert room.peers("n0").life("n2") == before["n2"]
    assert room.heard["n0", "n1"] == room.heard["n2", "n1"] == b"n1"
    assert not room.ever_silent


def test_the_last_word_of_a_life_is_not_put_into_the_mouth_of_the_next() -> None:
    room = acquainted("n0", "n1", beat_s=1000.0)
    n0, old = room.peers("n0"), room.peers("n1")
    room.stop("n1")
    new = room.start("n1")
    n0.receive()
    old.send(b"old", to=["n0"])
    new.receive()
    assert n0.receive() == []
    assert n0.life("n1") == new._life.hex()


def test_what_a_node_said_before_its_restart_is_news_after_it() -> None:
    room = acquainted("n0", "n1", say=lambda node: b"the same")
    room.heard.clear()
    room.run_for(2.0)
    assert room.heard == {}
    room.stop("n1")
    room.start("n1")
    room.run_for(2.0)
    assert room.heard["n0", "n1"] == b"the same"


def test_a_restarted_node_with_another_port_is_found_again() -> None:
    room = acquainted("n0", "n1")
    before = room.peers("n0").life("n1")
    room.stop("n1")
    room.start("n1", port=41234)
    room.run_for(2.0)
    assert room.peers("n0").life("n1") != before
    room.ever_silent.clear()
    room.run_for(5.0)
    assert not room.ever_silent


def test_nodes_that_stay_are_known_after_a_change_of_the_list() -> None:
    room = acquainted("n0", "n1", "n2")
    n0 = room.peers("n0")
    life, age_s = n0.life("n1"), n0.age_s("n1")
    n0.update({"n0": ("n0", PORT), "n1": ("n1", PORT), "n3": ("n3", PORT)})
    assert (n0.life("n1"), n0.age_s("n1")) == (life, age_s)
    assert (n0.life("n2"), n0.age_s("n2")) == (None, None)
    assert n0.silent(longer_than_s=-1.0) == ("n1",)
    n0.send(b"hello", to=["n1", "n2", "n3"])
    assert [one.host for one in room.network.recorded[-2:]] == ["n1", "n3"]
    room.run_for(1.0)
    assert n0.refused[Refusal.UNKNOWN] > 0


def test_a_changed_address_is_used_and_an_unchanged_one_does_not_undo_what_was_learned() -> None:
    room = acquainted("n0", "n1")
    room.stop("n1")
    room.start("n1", port=41234)
    room.run_for(2.0)
    n0 = room.peers("n0")
    n0.update(room.addresses)
    n0.send(b"hello", to=["n1"])
    assert room.network.recorded[-1].port == 41234
    n0.update({"n1": ("n1", 5000)})
    n0.send(b"hello", to=["n1"])
    assert room.network.recorded[-1].port == 5000


# -- the real network --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_nodes_hear_each_other_over_real_sockets(host: str) -> None:
    clock = FakeClock()
    sockets = {name: UdpSocket(interface=host) for name in "abc"}
    addresses = {name: (host, socket.port) for name, socket in sockets.items()}
    ends = {name: Peers(clock, socket, key=KEY, scope="run", node=name, addresses=addresses) for name, socket in sockets.items()}
    for step in range(8):
        clock.advance(0.05)
        for name, end in ends.items():
            end.send(b"%s %d" % (name.encode(), step), to="abc")
        heard = {name: {word.node: word.body for word in end.receive()} for name, end in ends.items()}
    assert heard["c"] == {"a": b"a 7", "b": b"b 7"}
    assert heard["a"] == {"b": b"b 6", "c": b"c 6"} or heard["a"] == {"b": b"b 7", "c": b"c 7"}
    assert all(not socket.failures for socket in sockets.values())
    for socket in sockets.values():
        socket.close()


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="key"):
        Signer(b"", "run")

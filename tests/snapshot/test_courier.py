"""Private parts of each snapshot reach two other nodes, whole, and cost nobody anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from courier_room import Room, make_plan, state, truth

from ridethrough.seam import tcp
from ridethrough.snapshot import link as links
from ridethrough.snapshot.placement import REPLICA_LIMIT_BYTES
from ridethrough.snapshot.replicas import SLOTS_PER_RANK

Build = Callable[..., Room]


@pytest.fixture
def build() -> Iterator[Build]:
    made: list[Room] = []

    def build(count: int, **options: object) -> Room:
        made.append(Room(count, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for room in made:
        room.close()


# -- what arrives --------------------------------------------------------------------------------------------------


def test_a_replica_is_the_private_part_bit_for_bit(build: Build) -> None:
    room = build(2)
    room.begin()
    room.nodes[0].post_all(7)
    room.until(lambda: room.nodes[1].held(0) == [7])
    payload, tree, index = room.nodes[1].replicas(0)[7]
    assert payload == truth(0, 7)
    assert tree == state(0, 7)
    assert (index["step"], index["captured_at"], index["metrics"]) == (7, "then 7", {"loss": 1 / 7})


def test_the_largest_part_that_is_sent_arrives_whole(build: Build) -> None:
    room = build(2)
    room.begin()
    room.nodes[0].post_all(1, size_bytes=REPLICA_LIMIT_BYTES)
    room.until(lambda: room.nodes[1].held(0) == [1])
    assert room.nodes[1].replicas(0)[1][0] == truth(0, 1, REPLICA_LIMIT_BYTES)


def test_both_holders_have_every_rank_and_nobody_else_has_any(build: Build) -> None:
    room = build(4, ranks=2)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == room.lag(0, 2) == 1)
    assert [[node.held(rank) for rank in (0, 1)] for node in room.nodes] == [[[], []], [[1], [1]], [[1], [1]], [[], []]]


def test_parts_arrive_over_ipv6(build: Build) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    room = build(2, host="::1")
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.nodes[1].held(0) == [1])


def test_a_holder_is_found_by_its_name(build: Build) -> None:
    room = build(2, host="localhost")
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.nodes[1].held(0) == [1])


def test_an_interface_given_by_name_is_used_at_both_ends(build: Build) -> None:
    room = build(2, config={"peers": {"port": 0, "interface": "lo"}})
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.nodes[1].held(0) == [1])


def test_a_step_is_sent_when_every_rank_of_the_node_has_posted_it(build: Build) -> None:
    room = build(2, ranks=2)
    room.begin()
    room.nodes[0].post(1, rank=0)
    room.work(0.1)
    assert room.nodes[1].answer["held"] == {}
    room.nodes[0].post(1, rank=1)
    room.until(lambda: room.nodes[1].answer["held"] == {"0": [1], "1": [1]})


def test_a_rank_that_is_a_step_ahead_does_not_keep_the_last_common_step_back(build: Build) -> None:
    room = build(2, ranks=2)
    room.begin()
    room.nodes[0].post_all(1)
    room.nodes[0].post(2, rank=0)
    room.until(lambda: room.nodes[1].answer["held"] == {"0": [1], "1": [1]})


def test_as_many_steps_are_held_as_a_rank_has_slots_the_newest_ones(build: Build) -> None:
    room = build(2)
    room.begin()
    for step in range(1, 8):
        room.nodes[0].post_all(step)
        room.until(lambda step=step: room.lag(0, 1) == step)
    assert SLOTS_PER_RANK == 4
    assert room.nodes[1].held(0) == sorted(room.nodes[1].replicas(0)) == [4, 5, 6, 7]


def test_what_is_acknowledged_stands_on_the_holders_board(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    room = build(2)
    room.begin()
    flush = tcp.Connection.flush
    boards = []

    def look_and_flush(connection: tcp.Connection) -> None:
        if connection.is_sending and connection in room.nodes[1].courier._holder.connections:
            boards.append(room.nodes[1].held(0) == sorted(room.nodes[1].replicas(0)))
        flush(connection)

    monkeypatch.setattr(tcp.Connection, "flush", look_and_flush)
    for step in range(1, 10):
        room.nodes[0].post_all(step)
        room.until(lambda step=step: room.lag(0, 1) == step)
    assert len(boards) > 9
    assert all(boards)


def test_a_pinned_replica_is_not_overwritten(build: Build) -> None:
    room = build(2)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    slot = room.nodes[1].link.slot(links.replica_slot(1, 0, 0))
    assert slot.pin(1)
    for step in range(2, 9):
        room.nodes[0].post_all(step)
        room.until(lambda step=step: room.lag(0, 1) == step)
    assert room.nodes[1].held(0) == [1, 6, 7, 8]
    (part,), _ = slot.read()
    assert bytes(part.payload) == truth(0, 1)
    part.payload.release()
    slot.close()


def test_a_step_for_which_there_is_no_room_is_not_acknowledged(build: Build) -> None:
    room = build(2)
    room.begin()
    for step in range(1, 5):
        room.nodes[0].post_all(step)
        room.until(lambda step=step: room.lag(0, 1) == step)
    pinned = [room.nodes[1].link.slot(links.replica_slot(1, 0, index)) for index in range(SLOTS_PER_RANK)]
    for slot in pinned:
        assert slot.pin(slot.posted_step() or 0)
    room.nodes[0].post_all(5)
    room.work(0.2)
    assert room.lag(0, 1) == 4
    for slot in pinned:
        slot.close()
    room.nodes[0].post_all(6)
    room.until(lambda: room.lag(0, 1) == 6)
    assert room.nodes[1].held(0) == [2, 3, 4, 6]


def test_a_part_that_has_grown_is_still_held(build: Build) -> None:
    room = build(2)
    room.begin()
    for step, size in enumerate((100, 100, 100, 100, 100_000, 200_000), 1):
        room.nodes[0].post_all(step, size_bytes=size)
        room.until(lambda step=step: room.lag(0, 1) == step)
    found = room.nodes[1].replicas(0)
    assert (found[5][0], found[6][0]) == (truth(0, 5, 100_000), truth(0, 6, 200_000))


def test_a_slot_that_was_made_anew_is_watched(build: Build) -> None:
    """A rank's state grows after the first step, when the optimizer makes its own."""
    room = build(2)
    room.begin()
    for step in range(1, 6):
        room.nodes[0].post(step, rank=0, slot_bytes=1 << 16)
        room.until(lambda step=step: room.lag(0, 1) == step)
    for step in range(6, 12):
        room.nodes[0].post(step, rank=0, slot_bytes=1 << 18)
    room.until(lambda: room.lag(0, 1) == 11)


def test_a_part_over_the_limit_is_said_and_never_sent(build: Build) -> None:
    room = build(2, ranks=2)
    room.begin()
    for step in (1, 2, 3):
        room.nodes[0].post(step, rank=0)
        room.nodes[0].post(step, rank=1, size_bytes=REPLICA_LIMIT_BYTES + 1)
        room.until(lambda step=step: room.lag(0, 1) == step)
    assert room.nodes[0].answer["too_large"] == [1]
    assert room.nodes[1].answer["held"] == {"0": [1, 2, 3]}


# -- slow and dark peers -------------------------------------------------------------------------------------------


def test_a_peer_that_is_behind_gets_the_newest_step_and_not_every_one(build: Build) -> None:
    room = build(2, ranks=2)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    room.nodes[1].is_frozen = True
    for step in range(2, 30):
        room.nodes[0].post_all(step)
        room.work(0.01)
    room.nodes[1].is_frozen = False
    room.until(lambda: room.lag(0, 1) == 29)
    assert room.nodes[1].held(0) == room.nodes[1].held(1)
    assert len(room.nodes[1].held(0)) == 3, "the first, the one that was under way, the newest"


def test_a_frozen_peer_does_not_delay_the_other(build: Build) -> None:
    room = build(3)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == room.lag(0, 2) == 1)
    room.nodes[1].is_frozen = True
    for step in range(2, 20):
        room.nodes[0].post_all(step, size_bytes=REPLICA_LIMIT_BYTES)
        room.until(lambda step=step: room.lag(0, 2) == step, within_s=2.0)


def test_a_peer_that_never_answers_does_not_delay_the_other(build: Build) -> None:
    room = build(3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        room.begin(ports={1: silent.getsockname()[1]})
        longest_s = 0.0
        for step in range(1, 40):
            room.nodes[0].post_all(step)
            began = time.monotonic()
            room.nodes[0].courier.tick(0.0)
            longest_s = max(longest_s, time.monotonic() - began)
            room.until(lambda step=step: room.lag(0, 2) == step, within_s=2.0)
    assert longest_s < 1.0
    assert room.lag(0, 1) == -1


def test_a_peer_that_never_answers_is_given_up_and_called_again(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.snapshot.sender._GREETING_S", 0.1)
    room = build(2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        room.begin(ports={1: silent.getsockname()[1]})
        room.until(lambda: room.nodes[0].answer["trouble"] == {"n1": "does not answer"})
        silent.settimeout(5)
        for _ in range(2):
            silent.accept()[0].close()
            room.work(0.5)


def test_a_peer_that_stops_giving_receipts_is_called_again(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.snapshot.sender._RECEIPT_S", 0.1)
    room = build(2)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    room.nodes[1].is_frozen = True
    room.nodes[0].post_all(2)
    room.until(lambda: room.nodes[0].answer["trouble"] == {"n1": "does not answer"})
    room.nodes[1].is_frozen = False
    room.until(lambda: room.lag(0, 1) == 2)
    room.until(lambda: room.nodes[0].answer["trouble"] == {})


def test_a_name_server_that_does_not_answer_delays_nobody(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def slow(host: str, *args: object, **options: object) -> object:
        if host == "dark.example" and not options.get("flags"):
            time.sleep(5.0)
        return look_up(host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    room = build(3)
    addresses = {**room.addresses(), "n1": ["dark.example", 0, 1]}
    for at, node in enumerate(room.nodes):
        node.begin(1, make_plan(f"n{at}", room.rank_nodes, addresses))
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 2) == 1, within_s=3.0)

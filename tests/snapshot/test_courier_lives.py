"""Couriers come and go with launches, kills and keepers; and a trainer never notices that one is there."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Callable, Iterator

import pytest
from courier_room import SLOT_BYTES, Node, Room, make_plan, truth

from ridethrough.errors import KeeperGone
from ridethrough.format.layout import rank_part
from ridethrough.snapshot import courier as courier_module
from ridethrough.snapshot import link as links
from ridethrough.snapshot.posted import Posted
from ridethrough.snapshot.replicas import SLOTS_PER_RANK
from ridethrough.snapshot.slots import Slot

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


def mapped(size_bytes: int) -> int:
    """How many pieces of shared memory of this size this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        ranges = [line.split()[0].split("-") for line in file if "memfd:ridethrough" in line]
    return sum(int(end, 16) - int(begin, 16) == size_bytes for begin, end in ranges)


# -- starts and ends -----------------------------------------------------------------------------------------------


def test_the_port_is_on_the_board_before_any_plan(build: Build) -> None:
    room = build(1)
    with socket.create_connection(("127.0.0.1", room.nodes[0].answer["port"])):
        pass


def test_a_plan_that_comes_later_on_the_other_node_is_waited_for(build: Build) -> None:
    room = build(2)
    room.nodes[0].begin(1, room.plan(0))
    room.nodes[1].begin(1, None)
    room.nodes[0].post_all(1)
    room.until(lambda: room.nodes[0].answer["trouble"].get("n1", "").startswith("not yet"))
    room.nodes[1].begin(1, room.plan(1))
    room.until(lambda: room.lag(0, 1) == 1)
    assert room.nodes[1].answer["refused"] == 0


def test_a_new_launch_begins_anew(build: Build) -> None:
    room = build(2)
    room.begin(1)
    room.nodes[0].post_all(5)
    room.until(lambda: room.lag(0, 1) == 5)
    room.begin(2)
    room.until(lambda: [node.answer["launch"] for node in room.nodes] == [2, 2])
    assert [room.nodes[0].answer["lag"], room.nodes[1].answer["held"]] == [{}, {}]
    room.nodes[0].post_all(3)
    room.until(lambda: room.lag(0, 1) == 3)
    assert room.nodes[1].held(0) == [3]


def test_what_still_comes_from_the_last_attempt_is_not_taken_for_the_next(build: Build) -> None:
    room = build(2)
    room.begin(1)
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    room.nodes[1].begin(2, None)
    room.until(lambda: room.nodes[1].answer["launch"] == 2)
    room.nodes[0].post_all(2)
    room.work(0.3)
    assert room.nodes[1].answer["held"] == {}
    assert not [name for name in room.nodes[1].link.names() if name.startswith("2/replica/")]


def test_launches_need_not_have_the_same_number_on_every_node(build: Build) -> None:
    room = build(2)
    room.nodes[0].begin(3, room.plan(0))
    room.nodes[1].begin(8, room.plan(1))
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    assert room.nodes[1].replicas(0)[1][0] == truth(0, 1)


def test_memory_of_an_old_launch_is_let_go(build: Build) -> None:
    room = build(2)
    room.begin(1)
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    assert mapped(SLOT_BYTES) == 2, "the rank's and the courier's"
    room.begin(2)
    room.until(lambda: [node.answer["launch"] for node in room.nodes] == [2, 2])
    assert mapped(SLOT_BYTES) == 0


def test_one_node_neither_listens_nor_sends(build: Build) -> None:
    room = build(1)
    port = room.nodes[0].answer["port"]
    room.nodes[0].begin(1, make_plan("n0", ("n0",), {}))
    room.nodes[0].post_all(1)
    room.until(lambda: room.nodes[0].answer["port"] == 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    room.nodes[0].begin(2, None)
    room.until(lambda: room.nodes[0].answer["port"] == port)


def test_a_plan_without_a_key_sends_and_takes_nothing(build: Build) -> None:
    room = build(2)
    room.begin(key="")
    room.nodes[0].post_all(1)
    room.work(0.5)
    assert room.nodes[1].answer["held"] == {}


def test_a_configured_port_that_is_taken_is_said_and_tried_again(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "_LISTEN_AGAIN_S", 0.1)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        room = build(1, config={"peers": {"port": port, "interface": None}})
        room.work(0.3)
        assert room.nodes[0].answer["port"] == 0
        assert f"TCP port {port}" in room.nodes[0].answer["error"]
    room.until(lambda: room.nodes[0].answer["port"] == port)
    assert room.nodes[0].answer["error"] is None


def test_an_interface_that_is_not_there_is_said(build: Build) -> None:
    room = build(1, config={"peers": {"port": 0, "interface": "nothing7"}})
    room.work(0.1)
    assert "nothing7" in room.nodes[0].answer["error"]


def test_a_broken_connection_is_made_again(build: Build) -> None:
    room = build(2)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    room.nodes[1].courier._holder.close()
    room.nodes[0].post_all(2)
    room.until(lambda: room.lag(0, 1) == 2)


# -- a courier that was killed -------------------------------------------------------------------------------------


def kill(node: Node) -> None:
    """As SIGKILL leaves it: sockets are closed, nothing else is done."""
    node.courier._stop_listening()
    for connection in node.courier._connections():
        connection.close()


def test_a_successor_finds_the_replicas_and_is_found_at_the_same_port(build: Build) -> None:
    room = build(2)
    room.begin()
    for step in (1, 2):
        room.nodes[0].post_all(step)
        room.until(lambda step=step: room.lag(0, 1) == step)
    before = room.nodes[1].answer
    kill(room.nodes[1])
    room.nodes[1].start_courier()
    assert room.nodes[1].answer["port"] == before["port"]
    assert room.nodes[1].held(0) == [1, 2]
    assert room.nodes[1].replicas(0)[2][0] == truth(0, 2)


def test_a_successor_goes_on_overwriting_the_oldest(build: Build) -> None:
    room = build(2)
    room.begin()
    for step in range(1, 7):
        room.nodes[0].post_all(step)
        room.until(lambda step=step: room.lag(0, 1) == step)
        if step % 2:
            kill(room.nodes[1])
            room.nodes[1].start_courier()
    assert room.nodes[1].held(0) == [3, 4, 5, 6]
    assert len([name for name in room.nodes[1].link.names() if "/replica/" in name]) == SLOTS_PER_RANK


def test_a_replica_that_its_courier_was_killed_writing_is_none(build: Build) -> None:
    room = build(2)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    kill(room.nodes[1])
    slot = room.nodes[1].link.slot(links.replica_slot(1, 0, 0))
    slot.begin()
    slot.close()
    room.nodes[1].start_courier()
    assert room.nodes[1].held(0) == []
    room.nodes[0].post_all(2)
    room.until(lambda: room.nodes[1].held(0) == [2])


def test_a_successor_of_a_sender_sends_the_newest_step_again(build: Build) -> None:
    room = build(2)
    room.begin()
    room.nodes[0].post_all(1)
    room.until(lambda: room.lag(0, 1) == 1)
    kill(room.nodes[0])
    room.nodes[0].start_courier()
    room.until(lambda: room.lag(0, 1) == 1)
    assert room.nodes[1].held(0) == [1]


# -- the trainer's slots -------------------------------------------------------------------------------------------


def posted_by(node: Node, room: Room) -> Posted:
    node.begin(1, room.plan(0))
    node.post_all(1)
    posted = Posted(node.link, 1, (0,))
    posted.refresh()
    return posted


def test_a_part_that_is_overwritten_while_it_is_copied_is_not_taken(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    node = (room := build(1)).nodes[0]
    posted = posted_by(node, room)
    read = Slot.read

    def then_overwrite(slot: Slot) -> object:
        found = read(slot)
        for step in range(2, 7):
            assert node.post(step, rank=0)
        return found

    assert posted.copy_all(1) is not None
    monkeypatch.setattr(Slot, "read", then_overwrite)
    assert posted.copy_all(1) is None
    posted.close()


def test_a_part_that_is_being_overwritten_after_it_was_copied_is_not_taken(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    node = (room := build(1)).nodes[0]
    posted = posted_by(node, room)
    read = Slot.read
    other = node.link.slot(links.slot_name(1, 0, 0))

    def then_begin(slot: Slot) -> object:
        found = read(slot)
        assert other.begin()
        return found

    monkeypatch.setattr(Slot, "read", then_begin)
    assert posted.copy_all(1) is None
    other.close()
    posted.close()


def test_the_trainer_finds_its_slot_free_while_the_part_is_copied(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    node = (room := build(1)).nodes[0]
    posted = posted_by(node, room)
    read = Slot.read
    other = node.link.slot(links.slot_name(1, 0, 0))
    free = []

    def then_lock(slot: Slot) -> object:
        free.append(other._lock(fcntl.LOCK_EX))
        other.release()
        return read(slot)

    monkeypatch.setattr(Slot, "read", then_lock)
    found = posted.copy_all(1)
    assert free == [True]
    assert found is not None
    assert found[0].payload == truth(0, 1)
    assert rank_part(0).encode() in found[0].head
    other.close()
    posted.close()


def test_a_courier_ends_with_its_keeper(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    room = build(1)

    def gone() -> dict[str, int]:
        raise KeeperGone(detail="test")

    monkeypatch.setattr(room.nodes[0].link, "names", gone)
    with pytest.raises(KeeperGone):
        room.nodes[0].courier.run()

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from slot_child import PAYLOAD_BYTES, post

from ridethrough.seam.process import memory_file
from ridethrough.snapshot.slots import PAGE, Slot, aligned

CHILD = str(Path(__file__).with_name("slot_child.py"))
HEADER_BYTES = 48
SIZE_BYTES = aligned(PAYLOAD_BYTES + 4 * PAGE)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = memory_file("slot", SIZE_BYTES)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def writer(memory: int) -> Iterator[Slot]:
    slot = Slot(os.dup(memory))
    yield slot
    slot.close()


@pytest.fixture
def reader(memory: int) -> Iterator[Slot]:
    slot = Slot(os.dup(memory))
    yield slot
    slot.close()


def start_child(descriptor: int, *arguments: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, CHILD, str(descriptor), *arguments], pass_fds=[descriptor], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def kill(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()


def is_whole(slot: Slot) -> bool:
    """The bytes of the part are those that its tree vouches for."""
    parts, index = slot.read()
    try:
        return parts[0].tree["sum"] == xxhash.xxh3_64_hexdigest(parts[0].payload) and index["step"] == slot.posted_step()
    finally:
        for part in parts:
            part.payload.release()


def test_new_slot_holds_no_snapshot(reader: Slot) -> None:
    assert reader.posted_step() is None


def test_posted_step_is_seen_only_when_the_snapshot_is_whole(writer: Slot, reader: Slot) -> None:
    assert writer.begin()
    writer.memory[PAGE : PAGE + 10] = b"0123456789"
    assert reader.posted_step() is None
    writer.post(7, {"step": 7, "parts": []}, 2 * PAGE)
    assert reader.posted_step() == 7


def test_begin_takes_the_old_snapshot_away(writer: Slot, reader: Slot) -> None:
    post(writer, 1)
    assert writer.begin()
    assert reader.posted_step() is None


def test_read_gives_back_what_was_posted(writer: Slot, reader: Slot) -> None:
    post(writer, 3)
    assert reader.pin(3)
    assert is_whole(reader)


def test_snapshot_can_be_pinned_as_soon_as_it_is_seen_posted(writer: Slot, reader: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that were given back only later would make the persister take the snapshot for overwritten."""
    write_header = Slot._write_header
    pinned = []

    def then_pin(slot: Slot, *fields: int) -> None:
        write_header(slot, *fields)
        if reader.posted_step() is not None:
            pinned.append(reader.pin(7))

    monkeypatch.setattr(Slot, "_write_header", then_pin)
    post(writer, 7)
    assert pinned == [True]


def test_pin_blocks_the_writer(writer: Slot, reader: Slot) -> None:
    post(writer, 1)
    assert reader.pin(1)
    assert not writer.begin()


def test_refused_begin_leaves_the_pinned_snapshot_whole(writer: Slot, reader: Slot) -> None:
    post(writer, 1)
    assert reader.pin(1)
    writer.begin()
    assert reader.posted_step() == 1


def test_released_pin_lets_the_writer_in(writer: Slot, reader: Slot) -> None:
    post(writer, 1)
    assert reader.pin(1)
    reader.release()
    assert writer.begin()


def test_pin_of_another_step_is_refused(writer: Slot, reader: Slot) -> None:
    post(writer, 2)
    assert not reader.pin(1)


def test_refused_pin_leaves_no_lock(writer: Slot, reader: Slot) -> None:
    post(writer, 2)
    reader.pin(1)
    assert writer.begin()


def test_slot_that_is_being_written_cannot_be_pinned(writer: Slot, reader: Slot) -> None:
    post(writer, 1)
    assert writer.begin()
    assert not reader.pin(1)


def test_index_that_does_not_fit_is_refused_and_nothing_is_posted(writer: Slot, reader: Slot) -> None:
    assert writer.begin()
    with pytest.raises(ValueError, match="does not fit"):
        writer.post(1, {"text": "x" * SIZE_BYTES}, PAGE)
    assert reader.posted_step() is None


@given(place=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_header_with_any_wrong_bit_is_no_snapshot(place: int, bit: int) -> None:
    memory = memory_file("slot", SIZE_BYTES)
    slot = Slot(memory)
    try:
        assert slot.begin()
        slot.post(5, {"parts": []}, PAGE)
        slot.memory[place] ^= 1 << bit
        assert slot.posted_step() is None
    finally:
        slot.close()


def test_killed_writer_leaves_a_whole_snapshot_or_none(memory: int, reader: Slot) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    found = []
    for _ in range(10):
        child = start_child(memory, "write")
        time.sleep(rng.uniform(0.0, 0.01))
        kill(child)
        step = reader.posted_step()
        found.append(step)
        if step is not None:
            assert reader.pin(step), f"seed {seed}: the dead writer's lock is still there"
            assert is_whole(reader), f"seed {seed}, step {step}"
            reader.release()
    assert len(found) == 10


def test_writer_killed_in_mid_write_leaves_no_snapshot(memory: int, writer: Slot, reader: Slot) -> None:
    post(writer, 1)
    code = (
        f"import os,signal; from ridethrough.snapshot.slots import Slot; s = Slot({memory}); assert s.begin(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], pass_fds=[memory], check=False).returncode == -signal.SIGKILL
    assert reader.posted_step() is None


def test_lock_of_a_killed_writer_is_gone(memory: int, writer: Slot) -> None:
    code = (
        f"import os,signal; from ridethrough.snapshot.slots import Slot; s = Slot({memory}); assert s.begin(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], pass_fds=[memory], check=False)
    assert writer.begin()


def test_pin_of_a_dead_process_is_gone(memory: int, writer: Slot) -> None:
    post(writer, 1)
    child = start_child(memory, "pin", "1")
    assert not writer.begin()
    kill(child)
    assert writer.begin()

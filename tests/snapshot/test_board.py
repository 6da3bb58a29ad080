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
from board_child import value
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.seam.process import memory_file
from ridethrough.snapshot.board import Board

CHILD = str(Path(__file__).with_name("board_child.py"))
SIZE_BYTES = 4096


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = memory_file("board", SIZE_BYTES)
    yield descriptor
    os.close(descriptor)


def start_writer(descriptor: int) -> subprocess.Popen[str]:
    writer = subprocess.Popen([sys.executable, CHILD, str(descriptor)], pass_fds=[descriptor], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def stop_writer(writer: subprocess.Popen[str]) -> None:
    assert writer.stdout is not None
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    writer.stdout.close()


def test_empty_board_reads_as_empty(memory: int) -> None:
    assert Board(os.dup(memory)).read() == {}


def test_reader_sees_the_newest_value(memory: int) -> None:
    writer, reader = Board(os.dup(memory)), Board(os.dup(memory))
    for number in range(5):
        writer.write({"number": number})
        assert reader.read() == {"number": number}


def test_generation_changes_with_every_value(memory: int) -> None:
    writer, reader = Board(os.dup(memory)), Board(os.dup(memory))
    seen = set()
    for _ in range(4):
        writer.write({"same": True})
        seen.add(reader.generation)
    assert len(seen) == 4


def test_second_writer_goes_on_after_the_first(memory: int) -> None:
    first = Board(os.dup(memory))
    for number in range(3):
        first.write({"number": number})
    Board(os.dup(memory)).write({"number": 3})
    assert Board(os.dup(memory)).read() == {"number": 3}


def test_value_that_does_not_fit_is_refused_and_the_old_one_stays(memory: int) -> None:
    board = Board(os.dup(memory))
    board.write({"kept": 1})
    with pytest.raises(ValueError, match="do not fit"):
        board.write({"text": "x" * SIZE_BYTES})
    assert board.read() == {"kept": 1}


@given(damage=st.lists(st.tuples(st.integers(0, SIZE_BYTES - 1), st.integers(0, 255)), max_size=8), is_second=st.booleans())
def test_half_that_was_cut_in_mid_write_never_hides_the_older_value(damage: list[tuple[int, int]], *, is_second: bool) -> None:
    memory = memory_file("board", SIZE_BYTES)
    try:
        board = Board(os.dup(memory))
        board.write({"number": 1})
        board.write({"number": 2})
        half = SIZE_BYTES // 2
        newest = half * (board.generation % 2)
        # Whatever a killed writer left in the half that it was writing (the one with the older value, or the newest).
        torn = newest if is_second else half - newest
        for place, byte in damage:
            os.pwrite(memory, bytes([byte]), torn + place % half)
        found = Board(os.dup(memory)).read()
        assert found in ({"number": 1}, {"number": 2}), found
        if not is_second:
            assert found == {"number": 2}
    finally:
        os.close(memory)


def test_concurrent_reader_never_sees_a_torn_value(memory: int) -> None:
    writer, reader = start_writer(memory), Board(os.dup(memory))
    try:
        deadline_s = time.monotonic() + 1.0
        seen: set[int] = set()
        while time.monotonic() < deadline_s:
            found = reader.read()
            assert found, "a value was written before, so there is one"
            assert found == value(int(found["number"]))
            seen.add(int(found["number"]))
        assert len(seen) > 100, "the writer was not fast enough to prove anything"
    finally:
        stop_writer(writer)


def test_concurrent_reader_never_goes_back(memory: int) -> None:
    writer, reader = start_writer(memory), Board(os.dup(memory))
    try:
        deadline_s = time.monotonic() + 0.5
        newest = 0
        while time.monotonic() < deadline_s:
            number = int(reader.read().get("number", 0))
            assert number >= newest
            newest = number
    finally:
        stop_writer(writer)


def test_writer_killed_at_any_moment_leaves_a_whole_value(memory: int) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    newest = 0
    for _ in range(8):
        writer = start_writer(memory)
        time.sleep(rng.uniform(0.0, 0.02))
        stop_writer(writer)
        found = Board(os.dup(memory)).read()
        assert found == value(int(found["number"])), f"seed {seed}"
        assert int(found["number"]) >= newest, f"seed {seed}"
        newest = int(found["number"])

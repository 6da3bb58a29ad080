from __future__ import annotations

import os
import threading

import pytest

from ridethrough.errors import KeeperGone
from ridethrough.supervisor.relay import _TAIL_BYTES, Relay


class FakeLink:
    """Hands out the reading end of a pipe; none stands for a library's keeper."""

    def __init__(self, reading: int | None) -> None:
        self._reading = reading

    def descriptor(self, op: str) -> int:
        assert op == "stderr"
        if self._reading is None:
            raise KeeperGone(detail="no command was started")
        return self._reading


def relayed(*writes: bytes) -> str:
    reading, writing = os.pipe()
    relay = Relay(FakeLink(reading))  # type: ignore[arg-type]
    relay.follow(1)

    def write() -> None:
        for data in writes:
            os.write(writing, data)
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(10)
    return relay.tail()


def test_tail_is_the_output_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert relayed(b"one\n", b"two\n") == "one\ntwo\n"


def test_output_is_passed_on_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    relayed(b"one\n", b"\x1b[31mtwo\x1b[0m\n")
    assert capfd.readouterr().err == "one\n\x1b[31mtwo\x1b[0m\n"


def test_tail_of_much_output_is_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(relayed(*[b"x" * 1000 + b"\n"] * 500)) <= _TAIL_BYTES


def test_tail_of_much_output_is_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    assert relayed(*[b"x" * 1000 + b"\n"] * 500, b"the end\n").endswith("xxx\nthe end\n")


def test_traceback_printed_in_many_small_writes_is_whole(capfd: pytest.CaptureFixture[str]) -> None:
    text = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x\n'
    assert relayed(*[bytes([byte]) for byte in text]).encode() == text


def test_output_that_is_no_text_is_kept_as_far_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert relayed(b"\xff\xfeok\n").endswith("ok\n")


def test_tail_starts_anew_with_each_launch(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = os.pipe(), os.pipe()
    relay = Relay(FakeLink(first[0]))  # type: ignore[arg-type]
    relay.follow(1)
    os.write(first[1], b"old\n")
    os.close(first[1])
    relay.tail()
    relay._link = FakeLink(second[0])  # type: ignore[assignment]
    relay.follow(2)
    os.write(second[1], b"new\n")
    os.close(second[1])
    assert relay.tail() == "new\n"


def test_keeper_without_a_command_has_no_output() -> None:
    relay = Relay(FakeLink(None))  # type: ignore[arg-type]
    relay.follow(1)
    assert relay.tail() == ""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ridethrough.errors import StoreFull
from ridethrough.supervisor import record
from ridethrough.supervisor.record import Pen, echo


class FakeJournal:
    """A journal that keeps its events, hangs while told to, or refuses."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.refuses = False
        self.is_away = False
        self.is_cut_short = False

    def append(self, kind: str, /, **data: Any) -> None:
        self.may_go.wait(30)
        if self.refuses:
            raise StoreFull(path="/run", detail="ENOSPC on append")
        self.events.append((kind, data))

    def was_cut_short(self, at_work: frozenset[str], ended: frozenset[str]) -> bool:
        if self.is_away:
            raise FileNotFoundError
        return self.is_cut_short


@pytest.fixture
def journal() -> Iterator[FakeJournal]:
    made = FakeJournal()
    yield made
    made.may_go.set()


@pytest.fixture
def pen() -> Pen:
    return Pen()


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_WAIT_S", 0.05)


def wait_for_events(journal: FakeJournal, count: int) -> None:
    deadline_s = time.monotonic() + 5
    while len(journal.events) < count and time.monotonic() < deadline_s:
        time.sleep(0.005)


def test_noted_event_is_in_the_journal(pen: Pen, journal: FakeJournal) -> None:
    pen.open(journal)  # type: ignore[arg-type]
    assert pen.note("launch.decided", launch=1)
    assert journal.events == [("launch.decided", {"launch": 1})]


def test_events_before_the_run_is_known_are_written_first(pen: Pen, journal: FakeJournal) -> None:
    assert not pen.note("first"), "not on record yet"
    pen.open(journal)  # type: ignore[arg-type]
    pen.note("second")
    assert [kind for kind, _ in journal.events] == ["first", "second"]


def test_note_before_the_run_is_known_does_not_wait(pen: Pen) -> None:
    began_s = time.monotonic()
    pen.note("first")
    assert time.monotonic() - began_s < 1.0


def test_wait_for_a_record_is_at_most_two_seconds() -> None:
    assert record._WAIT_S <= 2.0


@pytest.mark.usefixtures("short_wait")
def test_note_returns_while_the_journal_hangs(pen: Pen, journal: FakeJournal) -> None:
    journal.may_go.clear()
    pen.open(journal)  # type: ignore[arg-type]
    began_s = time.monotonic()
    assert not pen.note("hang.suspected")
    assert time.monotonic() - began_s < 1.0


def test_journal_that_hangs_is_waited_for_once_and_not_with_every_event(pen: Pen, journal: FakeJournal) -> None:
    journal.may_go.clear()
    pen.open(journal)  # type: ignore[arg-type]
    began_s = time.monotonic()
    for number in range(20):
        assert not pen.note("peer.suspected", nodes=[f"n{number}"])
    assert time.monotonic() - began_s < 2 * record._WAIT_S


@pytest.mark.usefixtures("short_wait")
def test_events_of_a_journal_that_hung_are_written_when_it_goes_on(pen: Pen, journal: FakeJournal) -> None:
    journal.may_go.clear()
    pen.open(journal)  # type: ignore[arg-type]
    for kind in ("one", "two", "three"):
        pen.note(kind)
    journal.may_go.set()
    wait_for_events(journal, 3)
    assert [kind for kind, _ in journal.events] == ["one", "two", "three"]


def test_refused_event_is_said_to_be_not_on_record(pen: Pen, journal: FakeJournal) -> None:
    journal.refuses = True
    pen.open(journal)  # type: ignore[arg-type]
    assert not pen.note("launch.decided")


def test_refusal_is_answered_without_waiting(pen: Pen, journal: FakeJournal) -> None:
    journal.refuses = True
    pen.open(journal)  # type: ignore[arg-type]
    began_s = time.monotonic()
    pen.note("launch.decided")
    assert time.monotonic() - began_s < 1.0


def test_reason_of_a_refusal_is_kept(pen: Pen, journal: FakeJournal) -> None:
    journal.refuses = True
    pen.open(journal)  # type: ignore[arg-type]
    pen.note("launch.decided")
    assert "ENOSPC" in str(pen.refusal)


def test_record_after_a_refusal_clears_it(pen: Pen, journal: FakeJournal) -> None:
    journal.refuses = True
    pen.open(journal)  # type: ignore[arg-type]
    pen.note("one")
    journal.refuses = False
    assert pen.note("two")
    assert pen.refusal is None


def test_refused_events_are_written_first_when_the_journal_takes_them_again(pen: Pen, journal: FakeJournal) -> None:
    journal.refuses = True
    pen.open(journal)  # type: ignore[arg-type]
    pen.note("one")
    pen.note("two")
    journal.refuses = False
    pen.note("three")
    assert [kind for kind, _ in journal.events] == ["one", "two", "three"]


def test_refused_event_is_written_without_a_newer_one(pen: Pen, journal: FakeJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_RETRY_S", 0.01)
    journal.refuses = True
    pen.open(journal)  # type: ignore[arg-type]
    pen.note("one")
    journal.refuses = False
    wait_for_events(journal, 1)
    assert [kind for kind, _ in journal.events] == ["one"]


def test_whether_the_run_was_cut_short_is_looked_up_when_storage_has_come(pen: Pen, journal: FakeJournal) -> None:
    journal.is_away = journal.is_cut_short = True
    pen.open(journal)  # type: ignore[arg-type]
    pen.note("muster.waiting")
    assert pen.is_unfinished is None
    journal.is_away = False
    pen.note("launch.decided")
    assert pen.is_unfinished is True


@pytest.mark.usefixtures("short_wait")
def test_full_queue_refuses_at_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_QUEUE", 3)
    pen = Pen()
    notes = [pen.note(f"event-{n}") for n in range(5)]
    assert not any(notes)
    assert "for a long time" in str(pen.refusal)


def test_event_is_echoed_as_a_json_line_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    echo("launch.decided", {"launch": 1})
    assert json.loads(capsys.readouterr().err) == {"ridethrough": "launch.decided", "launch": 1}


def test_echoed_event_has_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    echo("launch.decided", {"command": "train.py --api-key=sk-hunter2hunter2hunter2"})
    assert "hunter2" not in capsys.readouterr().err


def test_echoed_event_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    echo("launch.ended", {"output": "a\nb\nc"})
    assert capsys.readouterr().err.count("\n") == 1

"""The journal says what happened, or where it cannot say."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough import journal
from ridethrough.errors import FormatTooNew, StoreFull
from ridethrough.journal import Event, Journal, decode, encode_event
from ridethrough.seam.fs import PosixFileSystem, Writer
from ridethrough.testing import ErrorOn, FakeClock, RecordingFileSystem
from ridethrough.types import FORMAT

json_data = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
        lambda x: st.lists(x, max_size=3),
        max_leaves=4,
    ),
    max_size=4,
)


def event(number: int, **data: Any) -> Event:
    return Event(kind="test.event", at="2026-01-01T00:00:00Z", mono_s=float(number), boot="b", seq=number, writer="w-1", data=data)


def lines(count: int) -> list[bytes]:
    return [encode_event(event(n, text=f"number {n}")) for n in range(count)]


@settings(max_examples=200, deadline=None)
@given(json_data)
def test_an_event_reads_back_as_it_was_written(data: dict[str, Any]) -> None:
    written = event(1, **{f"k{key}": value for key, value in data.items()})
    line = encode_event(written)
    assert line.count(b"\n") == 1
    assert json.loads(line)["data"] == written.data
    assert decode(line).events == (written,)


def test_a_tail_torn_at_any_byte_loses_only_the_torn_record() -> None:
    whole = lines(3)
    kept = b"".join(whole[:2])
    for length in range(1, len(whole[2])):
        history = decode(kept + whole[2][:length])
        is_whole_but_its_line_end = length == len(whole[2]) - 1
        assert len(history.events) == (3 if is_whole_but_its_line_end else 2), f"torn at byte {length}"
        assert history.is_tail_torn is not is_whole_but_its_line_end
        assert history.damaged_lines == ()


def test_any_flipped_bit_in_the_middle_is_noticed_and_hurts_only_its_neighbourhood() -> None:
    whole = lines(4)
    data = b"".join(whole)
    begin, end = len(whole[0]), len(whole[0]) + len(whole[1])
    for place in range(begin, end):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            history = decode(bytes(flipped))
            sequence = [e.seq for e in history.events]
            assert history.damaged_lines, f"byte {place} bit {bit} went unnoticed"
            # A flipped line end glues two records together; both are then unreadable.
            assert sequence in ([0, 2, 3], [0, 3]), f"byte {place} bit {bit}: {sequence}"


def test_a_lost_page_in_the_middle_is_reported_and_the_rest_is_read() -> None:
    data = bytearray(b"".join(lines(200)))
    data[4096:8192] = bytes(4096)
    history = decode(bytes(data))
    assert history.damaged_lines
    assert history.events[0].seq == 0
    assert history.events[-1].seq == 199


def test_a_record_of_a_later_format_is_refused_with_a_hint() -> None:
    import xxhash

    body = encode_event(event(1)).rpartition(b',"sum":"')[0].replace(b'"format":%d' % FORMAT, b'"format":%d' % (FORMAT + 1))
    line = body + b',"sum":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'
    with pytest.raises(FormatTooNew):
        decode(line)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_decode_without_a_crash(data: bytes) -> None:
    assert decode(data).events == ()


@pytest.mark.parametrize("body", [b"[1", b"{", b'{"format":"x"', b'{"format":1', b"[" * 100_000, b'{"format":1,"kind":1,"data":[[]]'])
def test_a_checksummed_line_that_is_no_event_is_damaged(body: bytes) -> None:
    import xxhash

    line = body + b',"sum":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'
    assert decode(line).damaged_lines == (1,)


def open_journal(path: Path, *, role: str = "test", fs: Any = None) -> Journal:
    return Journal(fs or PosixFileSystem(), FakeClock(), str(path), role=role)


def test_two_writers_share_a_journal_without_losing_a_record(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    a, b = open_journal(path, role="a"), open_journal(path, role="b")
    for n in range(20):
        a.append("from.a", n=n)
        b.append("from.b", n=n)
    history = journal.read(PosixFileSystem(), [str(path)])
    assert [e.data["n"] for e in history.of("from.a")] == [e.data["n"] for e in history.of("from.b")] == list(range(20))
    assert not history.damaged_lines


def test_two_processes_write_the_same_journal_without_losing_a_record(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    children = []
    for role in ("a", "b"):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                mine = open_journal(path, role=role)
                for n in range(100):
                    mine.append(f"from.{role}", n=n, text="x" * (n * 40))
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    history = journal.read(PosixFileSystem(), [str(path)])
    assert not history.damaged_lines
    for role in ("a", "b"):
        assert [e.data["n"] for e in history.of(f"from.{role}")] == list(range(100))


def test_a_line_torn_by_a_cut_damages_only_itself_when_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    whole = lines(2)
    for length in range(1, len(whole[1])):
        path.write_bytes(whole[0] + whole[1][:length])
        open_journal(path).append("after.cut")
        history = journal.read(PosixFileSystem(), [str(path)])
        assert [e.kind for e in history.events if e.kind == "after.cut"] == ["after.cut"]
        assert history.events[0].seq == 0
        assert not history.is_tail_torn


class TearAppend(RecordingFileSystem):
    """The nth append writes half of its bytes and then finds the disk full."""

    def __init__(self, *, nth: int) -> None:
        super().__init__(PosixFileSystem())
        self._left = nth

    def append(self, path: str, data: bytes) -> None:
        self._left -= 1
        if self._left == 0:
            super().append(path, data[: len(data) // 2])
            raise StoreFull(detail="ENOSPC on append", path=path)
        super().append(path, data)


def test_a_record_torn_by_a_full_disk_does_not_damage_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    mine = open_journal(path, fs=TearAppend(nth=2))
    mine.append("first")
    with pytest.raises(StoreFull):
        mine.append("torn")
    mine.append("second")
    assert [e.kind for e in journal.read(PosixFileSystem(), [str(path)]).events] == ["first", "second"]


def test_a_record_torn_by_another_process_does_not_damage_ours(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    mine = open_journal(path)
    mine.append("first")
    with path.open("ab") as file:
        file.write(lines(1)[0][:30])
    mine.append("second")
    assert [e.kind for e in journal.read(PosixFileSystem(), [str(path)]).events] == ["first", "second"]


def test_a_failed_append_raises_and_its_number_is_used_again(tmp_path: Path) -> None:
    mine = open_journal(tmp_path / "n.jsonl", fs=ErrorOn(PosixFileSystem(), "append", errno.ENOSPC))
    with pytest.raises(StoreFull):
        mine.append("lost")
    assert mine.append("kept").seq == 0


def test_an_append_is_durable_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    open_journal(tmp_path / "n.jsonl").append("first")
    assert synced == [str(tmp_path / "n.jsonl"), str(tmp_path)]


def test_an_absent_journal_is_an_empty_one(tmp_path: Path) -> None:
    assert journal.read(PosixFileSystem(), [str(tmp_path / "none.jsonl")]).events == ()


def test_the_journal_works_in_a_hostile_directory(hostile_dir: Path) -> None:
    path = hostile_dir / "n.jsonl"
    open_journal(path).append("here", path=str(path))
    assert journal.read(PosixFileSystem(), [str(path)]).events[0].data["path"] == str(path)


@pytest.mark.parametrize("text", ['","sum":"0000000000000000"}', "a\nb\r\n\0", "\u2028\x85", "\udcff", "😀" * 1000, '{"format":99}'])
def test_hostile_text_stays_inside_its_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "n.jsonl"
    mine = open_journal(path)
    mine.append("hostile", text=text, **{"sum": text})
    mine.append("next")
    history = journal.read(PosixFileSystem(), [str(path)])
    assert [e.kind for e in history.events] == ["hostile", "next"]
    assert history.events[0].data == {"text": text, "sum": text}


def test_a_diverged_loss_does_not_stop_its_own_record(tmp_path: Path) -> None:
    written = open_journal(tmp_path / "n.jsonl").append("step", loss=float("nan"), nested=[{"x": float("-inf")}])
    assert written.data == {"loss": "nan", "nested": [{"x": "-inf"}]}


def test_secrets_are_redacted_before_they_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-9f8e7d6c")
    path = tmp_path / "n.jsonl"
    error = RuntimeError("login with canary-9f8e7d6c failed")
    open_journal(path).append(
        "x", tail=["… canary-9f8e7d6c …"], error=error, path=Path("/x/canary-9f8e7d6c"), url="https://me:canary-9f8e7d6c@host/", password="canary2"
    )
    text = path.read_text()
    assert "canary" not in text
    assert "<redacted>" in text


def test_the_clock_jumping_back_does_not_reorder_events(tmp_path: Path) -> None:
    import datetime

    clock = FakeClock()
    mine = Journal(PosixFileSystem(), clock, str(tmp_path / "n.jsonl"), role="t")
    mine.append("first")
    clock.set_wall(datetime.datetime(1999, 1, 1, tzinfo=datetime.UTC))
    mine.append("second")
    assert [e.kind for e in journal.read(PosixFileSystem(), [mine.path]).events] == ["first", "second"]


def test_the_writer_protocol_is_what_the_recorder_hands_out(tmp_path: Path) -> None:
    writer: Writer = RecordingFileSystem(PosixFileSystem()).create(str(tmp_path / "f"), 0)
    writer.close()
    writer.close()


@pytest.mark.parametrize(
    ("kinds", "is_cut_short"),
    [((), False), (("work",), True), (("work", "end"), False), (("end", "work", "other"), True), (("other",), False)],
)
def test_last_launch_without_its_end_is_recognised(tmp_path: Path, kinds: tuple[str, ...], is_cut_short: bool) -> None:
    (tmp_path / "run.json").touch()
    (tmp_path / "journal").mkdir()
    made = Journal(PosixFileSystem(), FakeClock(), str(tmp_path / "journal" / "n.jsonl"), role="t")
    for kind in kinds:
        made.append(kind)
    assert made.was_cut_short(frozenset({"work"}), frozenset({"end"})) is is_cut_short


def test_how_the_last_launch_ended_is_not_known_where_the_disk_is_not_mounted(tmp_path: Path) -> None:
    made = Journal(PosixFileSystem(), FakeClock(), str(tmp_path / "journal" / "n.jsonl"), role="t")
    with pytest.raises(FileNotFoundError):
        made.was_cut_short(frozenset({"work"}), frozenset({"end"}))


def test_torn_last_record_hides_no_earlier_one(tmp_path: Path) -> None:
    made = Journal(PosixFileSystem(), FakeClock(), str(tmp_path / "n.jsonl"), role="t")
    made.append("work")
    with open(made.path, "ab") as file:
        file.write(b'{"kind":"end","at"')
    assert made.was_cut_short(frozenset({"work"}), frozenset({"end"}))

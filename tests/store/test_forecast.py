"""How fast a run grows and whether it fills its file system: from what is on record, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.journal import Event
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.forecast import FULL, NEVER, UNKNOWN, forecast, growth
from ridethrough.store.retain import Retention
from ridethrough.testing import RecordingFileSystem, SimpleStore, flip_bit, save_once

KEEP = {"keep_last": 3, "keep_top": 0, "mode": "min", "keep_every": 0}
GIB = 1 << 30


def saved(mono_s: float, save_id: str, size_bytes: int = GIB, *, seq: int = 1, boot: str = "b", **more: Any) -> Event:
    data = {"attempt_seq": seq, "save_id": save_id, "size_bytes": size_bytes, "step": 1, "retention": KEEP, **more}
    return Event(kind="checkpoint.durable", at="2026-01-01T00:00:00Z", mono_s=mono_s, boot=boot, seq=0, writer="w", data=data)


def ask(events: list[Event], *, held_bytes: int = 0, largest_bytes: int = 0, free_bytes: int = 100 * GIB) -> Any:
    return forecast(events, held_bytes=held_bytes, largest_bytes=largest_bytes, free_bytes=free_bytes)


STEADY = [saved(100.0 * i, f"s{i}") for i in range(1, 5)]


def test_the_rate_is_what_was_written_in_the_time_between_the_first_and_the_last_save() -> None:
    found = growth([saved(100, "a", 5 * GIB), saved(200, "b", GIB), saved(400, "c", 2 * GIB)])
    assert (found.saves_count, found.interval_s, found.save_bytes) == (3, 150.0, 5 * GIB)
    assert found.written_bytes_per_s == 3 * GIB / 300


def test_time_in_which_nothing_ran_is_not_counted() -> None:
    found = growth([saved(1, "a"), saved(2, "b"), *(saved(90_000.0 + i, f"n{i}", seq=2) for i in range(3))])
    assert (found.saves_count, found.interval_s) == (3, 1.0)


def test_times_of_different_boots_are_not_compared() -> None:
    assert growth([saved(5000, "a", boot="one"), saved(3, "b", boot="two")]).interval_s is None
    found = growth([saved(5000, "a", boot="one"), saved(3, "b", boot="two"), saved(13, "c", boot="two")])
    assert (found.saves_count, found.interval_s) == (3, 10.0)


def test_of_several_nodes_the_sizes_add_up_and_a_save_is_one_save() -> None:
    mine = [saved(100.0 * i, f"s{i}", 2 * GIB, boot="one") for i in range(3)]
    theirs = [saved(7000 + 100.0 * i, f"s{i}", GIB, boot="two") for i in range(3)]
    found = growth([*mine, *theirs])
    assert (found.saves_count, found.save_bytes, found.interval_s) == (3, 3 * GIB, 100.0)
    assert found.written_bytes_per_s == 3 * GIB / 100


def test_what_retention_keeps_fits_and_it_is_never_full() -> None:
    found = ask(STEADY)
    assert (found.verdict, found.full_in_s) == (NEVER, None)
    assert found.kept_at_most_bytes == (3 + 2 + 2) * GIB


def test_what_retention_keeps_does_not_fit_and_it_is_said_when() -> None:
    found = ask(STEADY, free_bytes=2 * GIB, held_bytes=2 * GIB)
    assert found.verdict == FULL
    assert found.full_in_s == pytest.approx(200.0)


def test_what_lies_there_already_needs_no_room_again() -> None:
    assert ask(STEADY, free_bytes=2 * GIB, held_bytes=5 * GIB).verdict == NEVER
    assert ask(STEADY, free_bytes=2 * GIB, held_bytes=5 * GIB - 1).verdict == FULL


def test_a_checkpoint_that_takes_more_than_was_recorded_counts_as_what_it_takes() -> None:
    assert ask(STEADY, largest_bytes=2 * GIB).kept_at_most_bytes == 14 * GIB


def test_checkpoints_that_are_kept_for_ever_fill_any_disk() -> None:
    events = [saved(100.0 * i, f"s{i}", retention={**KEEP, "keep_every": 1000}) for i in range(1, 5)]
    assert (ask(events).verdict, ask(events).kept_at_most_bytes) == (FULL, None)


def test_the_retention_of_the_newest_attempt_counts() -> None:
    events = [*STEADY, saved(900, "n", seq=2, retention={**KEEP, "keep_last": 10})]
    assert ask(events).keep_last == 10


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ([], UNKNOWN),
        ([saved(1, "a", size_bytes=None)], UNKNOWN),  # type: ignore[arg-type]
        ([saved(1, "a", retention=None), saved(9, "b", retention=None)], UNKNOWN),
        ([saved(1, "a", retention="three")], UNKNOWN),
        ([saved(1, "a")], NEVER),
    ],
    ids=["no save", "no size", "no retention", "strange retention", "one save"],
)
def test_what_is_not_on_record_is_unknown_and_never_made_up(events: list[Event], verdict: str) -> None:
    found = ask(events)
    assert found.verdict == verdict
    assert found.full_in_s is None
    assert found.detail
    assert found.growth.written_bytes_per_s is None or len(events) > 1
    if verdict == UNKNOWN:
        assert found.kept_at_most_bytes is None


def test_that_it_fills_is_said_also_where_the_rate_is_unknown() -> None:
    found = ask([saved(1, "a")], free_bytes=GIB)
    assert (found.verdict, found.full_in_s) == (FULL, None)


values = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        3,
        1 << 40,
        0.5,
        "x",
        [],
        {},
        KEEP,
        {**KEEP, "keep_last": -2},
        {"keep_last": "a", "keep_top": -1},
        {**KEEP, "keep_every": 7},
    ]
)
names = st.sampled_from(["attempt_seq", "save_id", "size_bytes", "retention", "step"])
strange = st.builds(
    lambda data, mono_s, boot: Event(kind="checkpoint.durable", at="", mono_s=mono_s, boot=boot, seq=0, writer="", data=data),
    st.dictionaries(names, values),
    st.floats(-1e9, 1e9),
    st.sampled_from(["a", "b"]),
)


@given(st.lists(strange, max_size=6), st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_whatever_stands_in_a_journal_gives_an_answer_without_nonsense(events: list[Event], held: int, free: int) -> None:
    found = ask(events, held_bytes=held, free_bytes=free).as_json()
    assert found["verdict"] in (NEVER, FULL, UNKNOWN)
    for name in ("save_bytes", "interval_s", "written_bytes_per_s", "kept_at_most_bytes", "full_in_s", "keep_last", "keep_top"):
        assert found[name] is None or found[name] >= 0


def test_a_real_run_with_damaged_saves_never_takes_more_than_was_foretold(tmp_path: Path) -> None:
    run = tmp_path / "run"
    used: list[int] = []

    def measure(call: str, path: str) -> None:
        if call in ("rename", "sync_dir"):
            used.append(sum(p.stat().st_size for place in ("step-*", "quarantine") for d in run.glob(place) for p in d.rglob("*") if p.is_file()))

    fs = RecordingFileSystem(PosixFileSystem(), after=measure)
    store = SimpleStore(fs=fs, run_dir=str(run), part_bytes=20_000)
    store.start()
    store.retention = Retention(keep_last=2)
    events, largest = [], 0

    def spoil(step: int) -> Any:
        def on_stage(stage: str) -> None:
            if stage == "verify" and step % 3 == 0:
                flip_bit(str(next(run.glob(f"step-*{step:09d}-*/replicated~*.safetensors"))), 5000)

        return on_stage

    for step in range(1, 16):
        saves = save_once(store, step, on_stage=spoil(step))
        size = sum(seal.payload_bytes for seal in saves.seals)
        events.append(saved(float(step), saves.seals[0].save_id, size, retention={**KEEP, "keep_last": 2}))
        largest = max(largest, *(sum(p.stat().st_size for p in d.iterdir()) for d in run.glob("step-*")))
    foretold = ask(events, largest_bytes=largest).kept_at_most_bytes
    assert max(used) <= foretold
    assert max(used) > foretold / 2, "a bound that says nothing"

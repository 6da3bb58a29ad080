from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.cli import text

NOW = datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.UTC)


@given(st.text(st.characters()))
def test_safe_text_is_printable_whatever_it_was(value: str) -> None:
    assert text.safe(value).isprintable()


def test_safe_text_that_was_printable_is_unchanged() -> None:
    assert text.safe("日本 é [red]x[/red]") == "日本 é [red]x[/red]"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (102_400, "100 KiB"), (1_048_000, "1.0 MiB"), (1 << 80, "1048576 EiB")],
)
def test_sizes_have_binary_units(count: int | None, shown: str) -> None:
    assert text.human_bytes(count) == shown


@pytest.mark.parametrize(
    ("age_s", "shown"),
    [(None, "unknown"), (0.4, "0s"), (59.9, "59s"), (61, "1m 01s"), (3599, "59m"), (5400, "1h 30m"), (90_000, "1d 01h"), (200 * 86_400, "200d")],
)
def test_ages_have_two_units_at_most(age_s: float | None, shown: str) -> None:
    assert text.human_age(age_s) == shown


def test_an_age_is_never_negative() -> None:
    assert text.age_s("2026-11-29T11:59:00Z", NOW) == 60
    assert text.age_s("2026-11-29T13:59:00+02:00", NOW) == 60
    assert text.age_s("2026-11-29T12:00:01Z", NOW) is None


@pytest.mark.parametrize(("numbers", "shown"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 1, 2, 5, 7, 8), "0-2, 5, 7-8"), ((2, 1, 1), "1-2")])
def test_ranges_are_short_and_complete(numbers: tuple[int, ...], shown: str) -> None:
    assert text.ranges(numbers) == shown


def test_long_lists_say_how_many_more() -> None:
    assert text.listed(["a", "b", "c", "d"]) == "a, b, c, d"
    assert text.listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_numbers_agree_with_their_noun() -> None:
    assert (text.count(1, "copy", "copies"), text.count(2, "copy", "copies"), text.count(0, "part")) == ("1 copy", "2 copies", "0 parts")

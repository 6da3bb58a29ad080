"""Words and figures for people, safe to print whatever a name or a record contains."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Iterable, Sequence

UNKNOWN = "unknown"
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_PLAIN_WORD = re.compile(r"[\w@%+=:,./~-]+")


def safe(value: object) -> str:
    """The text with every character that a terminal would obey, or hide, shown as an escape."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    if 0xDC80 <= ord(char) <= 0xDCFF:  # a byte of a file name that is not UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def quote(path: object) -> str:
    """The path as it can be pasted into a shell, for hints."""
    text = str(path)
    return quote_word(f"./{text}" if text.startswith("-") else text)  # would be read as an option


def quote_word(text: str) -> str:
    """The word as a shell needs it to get it back unchanged."""
    if not text.isprintable():
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"$'{safe(escaped)}'"
    if _PLAIN_WORD.fullmatch(text):
        return text
    return shlex.quote(text)


def human_bytes(count: int | None) -> str:
    """A size with three digits or so, in binary units."""
    if count is None:
        return UNKNOWN
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in _UNITS:
        amount /= 1024
        if amount < 999.5 or unit == _UNITS[-1]:
            return f"{amount:.1f} {unit}" if amount < 99.95 else f"{amount:.0f} {unit}"
    raise AssertionError("unreachable")


def human_age(age_s: float | None) -> str:
    """How long ago, to two units at most; unknown where the clock contradicts it."""
    if age_s is None:
        return UNKNOWN
    seconds = int(age_s)
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02d}s" if minutes < 10 else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h" if days < 100 else f"{days}d"


def parse_at(value: object) -> datetime.datetime | None:
    """A time from a record, aware; None if it is not one."""
    if not isinstance(value, str):
        return None
    try:
        found = datetime.datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def age_s(value: object, now_at: datetime.datetime) -> float | None:
    """Seconds from that time to now; None if it is no time, or lies ahead: then a clock was wrong."""
    found = parse_at(value)
    if found is None:
        return None
    age = (now_at - found).total_seconds()
    return round(age, 1) if age >= 0 else None


def rfc3339(at: datetime.datetime) -> str:
    """The time as JSON has it."""
    return at.astimezone(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """The number and its noun: 1 part, 2 parts, 1 copy, 2 copies."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], *, at_most: int = 3) -> str:
    """The names, or the first few and how many more."""
    if len(names) <= at_most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:at_most])} and {len(names) - at_most} more"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    import difflib  # noqa: PLC0415  only a mistake needs it

    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-7, 9."""
    pieces: list[str] = []
    for number in sorted(set(numbers)):
        first, dash, last = pieces[-1].partition("-") if pieces else ("", "", "")
        if pieces and int(last if dash else first) == number - 1:
            pieces[-1] = f"{first}-{number}"
        else:
            pieces.append(str(number))
    return ", ".join(pieces)

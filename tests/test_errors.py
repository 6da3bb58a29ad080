"""Every error says what happened, which code it has and what to do next."""

from __future__ import annotations

import pickle
import re
import string
import subprocess
import sys

import pytest

from ridethrough import errors
from ridethrough.errors import RideThroughError, all_errors

KINDS = all_errors()
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def fields_of(kind: type[RideThroughError]) -> dict[str, object]:
    """A value for each field of the message and the hint, numbers where the template formats numbers."""
    found: dict[str, object] = {}
    for template in (kind.__doc__ or "", kind.hint):
        for _, name, spec, _ in string.Formatter().parse(template):
            if name:
                found[name] = 12.5 if spec else found.get(name, f"<{name}>")
    return found


def test_no_two_errors_share_a_code() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(codes) == len(set(codes)), sorted(code for code in codes if codes.count(code) > 1)


@every_kind
def test_an_error_has_its_own_code_hint_and_message(kind: type[RideThroughError]) -> None:
    assert "code" in vars(kind)
    assert re.fullmatch(r"RT-\d{3}", kind.code)
    assert kind.hint.strip()
    assert kind.__doc__
    assert 0 < kind.exit_code < 126


@every_kind
def test_an_error_has_a_hint_of_its_own(kind: type[RideThroughError]) -> None:
    assert "hint" in vars(kind)


@every_kind
def test_message_and_hint_can_be_filled_from_the_same_fields(kind: type[RideThroughError]) -> None:
    error = kind(**fields_of(kind))
    for text in (str(error), error.hint_filled):
        assert "{" not in text
        assert text


@every_kind
def test_an_error_survives_pickling_between_processes(kind: type[RideThroughError]) -> None:
    error = kind(**fields_of(kind))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.fields == error.fields
    assert str(again) == str(error)
    assert again.as_dict() == error.as_dict()


@every_kind
def test_a_missing_field_spoils_the_message_not_the_error(kind: type[RideThroughError]) -> None:
    assert str(kind(unexpected="value"))


def test_fields_with_braces_are_not_templates() -> None:
    error = errors.Damaged(path="/runs/{path}{0}", detail="{x!r:>9}")
    assert str(error) == "/runs/{path}{0} is damaged: {x!r:>9}"


def test_every_error_stands_in_the_drawn_tree_with_its_code_and_exit_code() -> None:
    drawn = dict(re.findall(r"(RT-\d{3})\s+(\d+)", errors.__doc__ or ""))
    hidden = {"RT-000", "RT-018"}  # the two roots, never raised for a cause that has a name
    assert {kind.code: str(kind.exit_code) for kind in KINDS if kind.code not in hidden} == drawn


def test_without_docstrings_an_error_still_says_what_it_knows() -> None:
    code = (
        "from ridethrough.errors import all_errors\n"
        "for kind in all_errors():\n"
        "    text = str(kind(path='/runs/x', detail='torn'))\n"
        "    assert kind.__name__ in text and '/runs/x' in text and 'torn' in text, text\n"
        "    raised = True\n"
        "print('ok')\n"
    )
    # -OO strips assert too, so the check is repeated by raising.
    code = code.replace("    assert ", "    if not (").replace(", text\n", "): raise SystemExit(text)\n")
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr

"""How an error is shown: what happened, the next command, and the exit code that says it all.

Imports nothing that draws, because `ridethrough --help` passes through here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import Any

import click

from ridethrough.cli.text import quote, safe
from ridethrough.errors import RideThroughError, UsageError


def fail(error: RideThroughError, *, is_json: bool = False, verbosity: int = 0) -> int:
    """The error is on stderr, for people or as JSON; returns the exit code it has."""
    if is_json:
        _say(json.dumps(as_dict(error)))
    else:
        _say(f"{_paint(f'error[{error.code}]')}: {safe(error)}")
        hint = hint_of(error)
        if hint:
            _say(f"hint: {hint}")
    if verbosity >= 2:
        _say("".join(traceback.format_exception(error)).rstrip())
    return error.exit_code


def as_dict(error: RideThroughError) -> dict[str, Any]:
    """The error contract of `--json`, with the hint that people would see."""
    return {**error.as_dict(), "hint": hint_of(error)}


def hint_of(error: RideThroughError) -> str:
    """The next command to run, ready to paste; a field named `hint` replaces that of the class."""
    if "hint" in error.fields:
        return safe(error.fields["hint"])
    quoted = {name: quote(value) if isinstance(value, str) else value for name, value in error.fields.items()}
    try:
        return safe(type(error).hint.format(**quoted))
    except (KeyError, IndexError, ValueError):
        return safe(error.hint_filled)


def from_click(error: click.ClickException) -> RideThroughError:
    """What click found wrong with the command line, as one of our errors."""
    context = getattr(error, "ctx", None)
    path = context.command_path if isinstance(context, click.Context) else "ridethrough"
    message = error.format_message().strip().rstrip(".")
    return UsageError(detail=message[:1].lower() + message[1:], hint=f"{path} --help")


def _say(line: str) -> None:
    # Data first: in a terminal both streams end up on the same screen.
    with contextlib.suppress(OSError):  # the error that is about to be said may be just this one
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):  # nobody listens; the exit code still tells
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _paint(label: str) -> str:
    is_plain = not sys.stderr.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return label if is_plain else click.style(label, fg="red", bold=True)

"""What a person sees: the same commands under a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import sys
import termios

import pytest
from cli_build import Built, flip, seal_of

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def seen(*args: object, columns: int, typed: str = "", **environment: str) -> str:
    """All that the command writes to a terminal of that width, where somebody types."""
    keeper, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")} | {"TERM": "xterm-256color"} | environment
    words = [sys.executable, "-m", "ridethrough", *map(str, args)]
    child = os.posix_spawn(sys.executable, words, env, file_actions=[(os.POSIX_SPAWN_DUP2, terminal, fd) for fd in (0, 1, 2)])
    os.close(terminal)
    os.write(keeper, typed.encode())
    pieces = []
    try:
        while piece := os.read(keeper, 65536):
            pieces.append(piece)
    except OSError:
        pass  # the last writer has gone
    os.waitpid(child, 0)
    os.close(keeper)
    return b"".join(pieces).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", ["ls", "show", "verify", "du", "prune"])
def test_nothing_is_cut_and_no_line_is_wider_than_the_terminal(verb: str, columns: int, good: Built) -> None:
    good.save(400, parts=("replicated",))
    flip(seal_of(next(good.path.glob("step-*300-*")), "replicated"))
    text = ESCAPE.sub(
        "", seen(verb, os.path.relpath(good.path), *(["--dry-run"] if verb == "prune" else []), columns=columns).rpartition("\x1b[2K")[2]
    )
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("columns", [80, 120])
def test_a_storage_check_fits_the_terminal_and_shows_its_phases(columns: int, good: Built) -> None:
    text = seen("storage", "check", os.path.relpath(good.path), columns=columns)
    assert "exclusive create ━" in ESCAPE.sub("", text)
    answer = ESCAPE.sub("", text.rpartition("\x1b[2K")[2])
    assert "…" not in answer
    assert "exclusive create ━" not in answer
    assert max(map(len, answer.splitlines())) <= columns
    assert "(step 300)" in answer


def test_colour_is_for_terminals_and_no_color_takes_it_away(good: Built) -> None:
    assert "\x1b[32mverified" in seen("ls", good.path, columns=80)
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in seen("ls", good.path, columns=80, **environment)
        assert "\x1b" not in seen("ls", good.path / "nowhere", columns=80, **environment)


def test_colour_says_nothing_that_the_text_does_not(good: Built) -> None:
    good.save(400, parts=("replicated",))
    assert ESCAPE.sub("", seen("ls", good.path, columns=80)).split() == seen("ls", good.path, columns=80, NO_COLOR="1").split()


def test_on_a_terminal_too_narrow_for_the_table_nothing_is_cut(good: Built) -> None:
    text = ESCAPE.sub("", seen("ls", good.path, columns=30))
    assert "verified" in text
    assert "ATTEMPT" in text


def test_a_progress_bar_is_gone_when_it_is_done(good: Built) -> None:
    text = seen("verify", good.path, columns=80)
    assert "reading 3 checkpoints" in text
    assert "reading" not in text.rpartition("\x1b[2K")[2]

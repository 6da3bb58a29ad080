"""Everything a verb prints. Data goes to stdout, the rest to stderr.

A verb looks like this::

    @click.command(epilog=output.help_end(("ridethrough ls runs/exp001",), {0: "listed", 10: "no run"}))
    @click.argument("run")
    @output.json_option
    @output.verbosity_option
    def command(run: str, is_json: bool) -> None:
        '''First line: the same words as in `cli.VERBS`.'''
        ...
        if is_json:
            output.emit("ridethrough.ls", {"run": …}, now_at=clock.now_at())
        else:
            output.table((Column("STEP", is_right=True), Column("WHY", folds=True)), rows)
        output.note("what is worth saying beside the data")
        output.end(1)

and may use:

- `emit` one JSON document in the envelope (schema, generated_at, payload), `emit_line` one object
  of a stream (one a line, each with a `type`);
- `table` rows under headings, `fields` names and values, `line` one line: all for people, on
  stdout, plain when stdout is no terminal, never truncated; cells are `str` or `Styled`;
- `note` a line on stderr, `progress` a bar of bytes on stderr and `phases` one of phases, on a terminal only;
- `end` stop with an exit code that is no error (1: the answer is no). An error is *raised*
  (`errors.RideThroughError`) and shown by `cli.main`; a field `hint=…` replaces its hint;
  `fail` shows one without ending, and returns its exit code;
- `json_option`, `verbosity_option`, `help_end` from `options`; `safe`, `quote`, `human_bytes`,
  `human_age`, `age_s`, `rfc3339`, `count`, `listed` from `text`.

Everything passed in may be hostile: control characters are shown as escapes here, and nothing is
read as rich markup. The JSON is ASCII, so a lone byte of a file name survives as an escape.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ridethrough.cli.failure import as_dict, fail
from ridethrough.cli.options import help_end, json_option, verbosity_option
from ridethrough.cli.text import UNKNOWN, age_s, count, human_age, human_bytes, listed, quote, quote_word, ranges, rfc3339, safe

__all__ = [
    "UNKNOWN", "Cell", "Column", "Styled", "age_s", "as_dict", "count", "document", "emit", "emit_line", "end", "fail", "fields", "help_end",
    "human_age", "human_bytes", "json_option", "line", "listed", "note", "phases", "progress", "quote", "quote_word", "ranges", "rfc3339", "safe",
    "table", "verbosity_option",
]  # fmt: skip

# Off-terminal there is nothing to fit into: a cut or folded cell would be lost to whoever reads the file.
_UNBOUNDED_COLUMNS = 1 << 16
_GUTTER = (0, 2, 0, 0)
_LEAST_FOLD = 16
"""A folding column narrower than this is harder to read than a wrapped row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Styled:
    """A cell with a rich style. The style repeats what the text says: without colour nothing is lost."""

    text: str
    style: str


Cell = str | Styled


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    heading: str
    is_right: bool = False
    folds: bool = False
    """Takes the room that is left on a terminal, and wraps there."""


def emit(name: str, payload: Mapping[str, Any], *, now_at: datetime.datetime, version: int = 1) -> None:
    """The JSON document of a verb is on stdout."""
    sys.stdout.write(document(name, payload, now_at=now_at, version=version))


def document(name: str, payload: Mapping[str, Any], *, now_at: datetime.datetime, version: int = 1) -> str:
    """The JSON document of a verb in its envelope."""
    envelope = {"schema": {"name": name, "version": version}, "generated_at": rfc3339(now_at), **payload}
    return json.dumps(envelope, indent=2, allow_nan=False) + "\n"


def emit_line(kind: str, payload: Mapping[str, Any], *, now_at: datetime.datetime) -> None:
    """One object of a stream is on stdout, at once."""
    sys.stdout.write(json.dumps({"type": kind, "at": rfc3339(now_at), **payload}, allow_nan=False) + "\n")
    sys.stdout.flush()


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
    """The rows are on stdout under their headings."""
    texts = [[_text(cell) for cell in row] for row in rows]
    drawn = Table(box=None, pad_edge=False, padding=_GUTTER, header_style="bold", show_edge=False)
    for column in columns:
        drawn.add_column(Text(column.heading), justify="right" if column.is_right else "left", no_wrap=not column.folds, overflow="fold")
    for row in texts:
        drawn.add_row(*row)
    _print(drawn, least_columns=_least_columns(columns, texts))


def _least_columns(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> int:
    """Width below which something would be cut off."""
    widest = [max((row[i].cell_len for row in rows), default=0) for i in range(len(columns))]
    return sum(_LEAST_FOLD if column.folds else max(width, len(column.heading)) + _GUTTER[1] for column, width in zip(columns, widest, strict=True))


def fields(pairs: Iterable[tuple[str, Cell]], *, width: int = 0) -> None:
    """Names and their values are on stdout, one a line; `width` lines up several such blocks."""
    drawn = Table.grid(padding=_GUTTER, pad_edge=False)
    drawn.add_column(no_wrap=True, min_width=width or None)
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        drawn.add_row(_text(name), _text(value))
    _print(drawn)


def line(text: Cell = "") -> None:
    """The line is on stdout."""
    _print(_text(text))


def note(text: str) -> None:
    """The line is on stderr: worth knowing, but not the answer."""
    with contextlib.suppress(BrokenPipeError):  # the data still goes to whoever reads it
        sys.stdout.flush()  # in a terminal the note belongs after what it is about
        sys.stderr.write(safe(text) + "\n")


def end(code: int) -> NoReturn:
    """The verb has answered; the process ends with this code."""
    raise click.exceptions.Exit(code)


@contextlib.contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the block runs, if stderr is a terminal; yields what to call with each number of bytes done."""
    if not _is_terminal(sys.stderr) or not total_bytes:
        yield lambda _: None
        return
    # Of all verbs only those that read much need it, and it takes as long to import as the rest of rich.
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=_console(sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(safe(label), total=total_bytes)
        yield lambda done: bar.update(task, advance=done)


@contextlib.contextmanager
def phases(names: Sequence[str]) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Which phase is running is on stderr, if stderr is a terminal.

    Args:
        names: All phases, in order.

    Yields:
        What to call with the name of a phase as it begins, and what to call now and then so that the time moves on.
    """
    if not _is_terminal(sys.stderr):
        yield lambda _: None, lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=_console(sys.stderr),
        transient=True,
        auto_refresh=False,  # by a thread, and whoever measures in forked children must have none
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task("", total=len(names))

        def enter(name: str) -> None:
            bar.update(task, description=safe(name), completed=names.index(name), refresh=True)

        yield enter, bar.refresh


def _text(cell: Cell) -> Text:
    return Text(safe(cell.text), style=cell.style) if isinstance(cell, Styled) else Text(safe(cell))


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _console(stream: TextIO) -> Console:
    is_terminal = _is_terminal(stream)
    has_colour = is_terminal and not os.environ.get("NO_COLOR")
    return Console(
        file=stream,
        force_terminal=is_terminal,  # and not FORCE_COLOR: what goes into a file has no escapes
        color_system="auto" if has_colour else None,
        width=None if is_terminal else _UNBOUNDED_COLUMNS,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _print(what: RenderableType, *, least_columns: int = 0) -> None:
    console = _console(sys.stdout)
    if console.width < least_columns:
        console.width = _UNBOUNDED_COLUMNS  # the terminal wraps the rows: ugly, but nothing is lost
    with console.capture() as captured:
        console.print(what)
    for row in captured.get().splitlines():
        # rich fills every cell up to its width; blanks at the end would wrap on a narrower screen.
        sys.stdout.write(row.rstrip() + "\n")

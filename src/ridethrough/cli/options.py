"""What every verb has: `--json`, `-v`, and a `--help` that ends with examples and exit codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
_VERBOSITY = "ridethrough.verbosity"


def json_option(function: Decorated) -> Decorated:
    """The command has `--json` and gets it as `is_json`."""
    return click.option("--json", "is_json", is_flag=True, help="Print JSON: the answer on stdout, an error on stderr.")(function)


def verbosity_option(function: Decorated) -> Decorated:
    """The command takes `-v`, before or after the verb; `verbosity` tells how often it was given."""

    def remember(context: click.Context, _: click.Parameter, value: int) -> None:
        root = context.find_root()
        root.meta[_VERBOSITY] = int(root.meta.get(_VERBOSITY, 0)) + value

    return click.option("-v", "--verbose", count=True, expose_value=False, callback=remember, help="-vv shows the traceback of an error.")(function)


def verbosity(context: click.Context | None) -> int:
    """How often `-v` was given on this command line."""
    return 0 if context is None else int(context.find_root().meta.get(_VERBOSITY, 0))


def wants_json(args: Sequence[str]) -> bool:
    """The command line asks for JSON; what follows `--` belongs to somebody else.

    Read from the words themselves, since an error may come before any option is parsed.
    """
    ours = args[: args.index("--")] if "--" in args else args
    return "--json" in ours


def help_end(examples: Sequence[str], exit_codes: Mapping[int, str]) -> str:
    """The last lines of a verb's `--help`, for `click.command(epilog=…)`."""
    # \b keeps click from joining the lines of a paragraph.
    lines = ["\b", "Examples:", *(f"  {example}" for example in examples), "", "\b", "Exit codes:"]
    width = max(len(str(code)) for code in exit_codes)
    return "\n".join([*lines, *(f"  {code:>{width}}  {meaning}" for code, meaning in sorted(exit_codes.items()))])

"""The command line: one module a verb, each with a click command named `command`.

A verb's module is imported only when the verb is called, so that `ridethrough --help` and the
verbs that only read start at once and without torch. What all verbs share:

- `output`: everything a verb prints; also passes on the next two.
- `options`: the options and the end of `--help` that every verb has.
- `failure`: how an error is shown, and the exit code it has.
- `target`: from what the user typed to a run or a checkpoint.
- `overview`: what is to be said about the checkpoints of a run.
- `text`: words and figures for people, safe to print.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TextIO

import click

from ridethrough.cli import failure
from ridethrough.cli.options import help_end, verbosity, verbosity_option, wants_json
from ridethrough.cli.text import nearest
from ridethrough.errors import Internal, PlatformUnsupported, RideThroughError, StorageError, UsageError

VERBS = {
    "run": "Start a training command and carry it through power loss.",
    "status": "Say how a run is doing, and what a power cut would cost now.",
    "ls": "List the checkpoints of a run, and which one a restart restores.",
    "show": "Show what a checkpoint holds: provenance, state, parts.",
    "verify": "Read every copy back from the disk and check it.",
    "copy": "Put a checkpoint into another place as well.",
    "scrub": "Read every copy of a run back, and repair what is damaged.",
    "restore": "Bring a checkpoint back into RUN from another place.",
    "du": "Say where the bytes of a run are.",
    "prune": "Remove checkpoints that need not stay, each with its reason.",
    "quarantine": "Look at damaged parts that were moved aside, and put them back.",
    "export": "Write a checkpoint for other tools: safetensors, torch, DCP.",
    "storage": "Say whether a place is fit for checkpoints.",
    "plan": "Say what will happen after a power cut, before it happens.",
    "drill": "Cut the power of a small training job and measure what is lost.",
}
"""Every verb, in the order in which a new user meets them, and the first line of its help."""

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""What a program that a signal ended has: 128 + SIGINT, 128 + SIGPIPE."""


class Verbs(click.Group):
    """The group of all verbs; a verb's module is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        try:
            module = importlib.import_module(f"ridethrough.cli.{cmd_name}")
        except ImportError as error:
            # Outside Linux parts of the standard library are absent; anywhere else this is our bug.
            if sys.platform == "linux":
                raise
            raise PlatformUnsupported(what=f"ridethrough {cmd_name}", platform=sys.platform) from error
        found = module.command
        assert isinstance(found, click.Command)
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            near = nearest(name, VERBS)
            raise UsageError(detail=f"there is no verb {name!r}", hint=f"ridethrough {near or '--help'}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table and not from the commands, which would all have to be imported.
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=help_end(
        ("ridethrough run -- torchrun --nproc-per-node=8 train.py", "ridethrough ls runs/exp001"),
        {0: "success", 1: "the answer is no", 2: "usage", 70: "a bug in ridethrough; each verb's --help lists its own"},
    ),
)
@click.version_option(None, "--version", "-V", package_name="ridethrough", message="%(package)s %(version)s")
@verbosity_option
@click.pass_context
def group(ctx: click.Context) -> None:
    """Training that rides through power loss."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """The command has run, its errors are on stderr; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal in an old locale gets escapes for what it cannot show, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if "_RIDETHROUGH_COMPLETE" in os.environ:
        group.main(args, prog_name="ridethrough")  # the shell asks for completions; click answers and exits
    code = _run(args)
    with contextlib.suppress(OSError, ValueError):  # nobody is left to read it
        sys.stderr.flush()
    return code


def _run(args: list[str]) -> int:
    context: click.Context | None = None
    is_json = wants_json(args)
    code = 0
    try:
        try:
            # Not `group.main`: it answers a closed pipe with exit 1, which here means "the answer is no".
            with group.make_context("ridethrough", list(args)) as context:
                group.invoke(context)
        except click.exceptions.Exit as ending:
            code = ending.exit_code
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)  # quiet, as every Unix tool is when `head` has seen enough
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return failure.fail(failure.from_click(error), is_json=is_json)
    except RideThroughError as error:
        return failure.fail(error, is_json=is_json, verbosity=verbosity(context))
    except Exception as error:  # noqa: BLE001  the top: whatever comes here is our bug, shown in one line
        return failure.fail(_explained(error), is_json=is_json, verbosity=verbosity(context))
    return code


def _explained(error: Exception) -> RideThroughError:
    """What nobody below made an error of ours: output that cannot be written, or a bug."""
    found: RideThroughError
    if isinstance(error, OSError) and error.errno and error.filename is None:  # a write to an open stream names no file
        _discard(sys.stdout)
        found = StorageError(detail=f"cannot be written ({error.strerror})", path="the output", hint="look at where the output goes: a full disk?")
    else:
        found = Internal(detail=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    found.__cause__ = error
    return found


def _discard(stream: TextIO) -> None:
    # Python flushes once more at exit and would complain then.
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)

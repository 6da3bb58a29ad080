"""`ridethrough storage`: what a place for checkpoints is worth."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import asdict
from typing import Any

import click

from ridethrough import config as configuration
from ridethrough.cli import output
from ridethrough.cli.output import Column, Styled
from ridethrough.errors import UsageError
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.process import require_linux
from ridethrough.store.assess import see as seeing
from ridethrough.store.assess.findings import Findings
from ridethrough.store.assess.judge import Assessment, Fact, State, Verdict, human_s, judge
from ridethrough.store.assess.measure import PHASES, Request, measure

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_EXIT_CODES = {Verdict.FIT: 0, Verdict.REMARKS: 0, Verdict.UNFIT: 1}
_VERDICT_STYLES = {Verdict.FIT: "green", Verdict.REMARKS: "yellow", Verdict.UNFIT: "red"}
_STATE_STYLES = {State.MEASURED: "", State.CONFIGURED: "cyan", State.UNKNOWN: "yellow"}
_HELP_END = output.help_end(
    ("ridethrough storage check /ckpt", "ridethrough storage check /ckpt --peers n1,n2 --size 8GiB --json"),
    {0: "fit for checkpoints, perhaps with remarks", 1: "not fit", 2: "usage, or the configuration is wrong", 10: "no such directory",
     13: "it cannot be reached, or may not be written", 14: "full or read-only"},
)  # fmt: skip


@click.group(invoke_without_command=True, subcommand_metavar="WHAT", epilog=_HELP_END)
@output.verbosity_option
@click.pass_context
def command(context: click.Context) -> None:
    """Say whether a place is fit for checkpoints."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command(epilog=_HELP_END)
@click.argument("path")
@click.option("--peers", metavar="HOST,...", multiple=True, help="Other nodes, by ssh: when do they see what is made here?")
@click.option("--size", metavar="BYTES", help="Of the file that is written and read: 8GiB, 500MiB. Default: what takes seconds.")
@click.option("--ssh", "ssh", metavar="COMMAND", default="ssh -o BatchMode=yes -o ConnectTimeout=10", help="How to reach the peers. Default: ssh.")
@click.option("--remote", metavar="COMMAND", default="ridethrough", help="How this program is called there. Default: ridethrough.")
@click.option("--config", "config_path", metavar="FILE", help="The configuration; default ridethrough.toml, or [tool.ridethrough] of pyproject.toml.")
@output.json_option
@output.verbosity_option
def check(path: str, peers: tuple[str, ...], size: str | None, ssh: str, remote: str, config_path: str | None, is_json: bool) -> None:
    """Measure a directory that is to hold checkpoints.

    In about 20 seconds: which file system it is, what fsync costs there,
    whether rename and exclusive create do what a commit needs, bandwidth and
    the time of a save that follows from it, many processes creating files.
    What software cannot tell is said to be unknown. Writes only in a directory
    of its own below PATH, and removes it.
    """
    require_linux("ridethrough storage check")
    if not path:
        raise UsageError(detail="storage check got an empty path (an unset variable?)", hint="ridethrough storage check --help")
    hosts = tuple(dict.fromkeys(host.strip() for text in peers for host in text.split(",") if host.strip()))
    request = Request(
        path=os.path.abspath(path),
        size_bytes=None if size is None else _parse_size(size),
        peers=hosts,
        ssh=_words(ssh, "--ssh"),
        remote=_words(remote, "--remote"),
    )
    settings = configuration.load(config_path, os.environ, {})
    with output.phases(PHASES) as (enter, tick):
        found = measure(request, enter=enter, tick=tick)
    answer = judge(found, settings.facts_of(found.path))
    if is_json:
        output.emit("ridethrough.storage-check", _payload(found, answer), now_at=SystemClock().now_at())
    else:
        _print(path, found, answer)
    output.end(_EXIT_CODES[answer.verdict])


@command.command(hidden=True)
@click.argument("directory")
def see(directory: str) -> None:
    """Answer what another node's `storage check --peers` asks about its directory."""

    def say(answer: dict[str, Any]) -> None:
        click.echo(json.dumps(answer))
        sys.stdout.flush()

    seeing.answer(directory, sys.stdin, say)


def _words(text: str, option: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(detail=f"{option} {text!r}: {error}", hint="ridethrough storage check --help") from error
    if not words:
        raise UsageError(detail=f"{option} is empty", hint="ridethrough storage check --help")
    return words


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,15})\s*([KMGT]?)(?:iB)?", text)
    if not found or not int(found.group(1)):
        raise UsageError(detail=f"--size {text!r} is not a size", hint="--size 8GiB   (units are KiB, MiB, GiB, TiB)")
    return int(found.group(1)) * _UNITS[found.group(2)]


def _payload(found: Findings, answer: Assessment) -> dict[str, Any]:
    return {
        "path": found.path,
        "verdict": answer.verdict,
        "reason": answer.reason,
        "exit_code": _EXIT_CODES[answer.verdict],
        "objections": list(answer.objections),
        "remarks": list(answer.remarks),
        "facts": [{**asdict(fact), "figures": dict(fact.figures)} for fact in answer.facts],
        "saves": [asdict(save) for save in answer.saves],
        "total_bytes": found.total_bytes,
        "free_bytes": found.free_bytes,
    }


def _print(path: str, found: Findings, answer: Assessment) -> None:
    output.line(f"{path}, {output.human_bytes(found.free_bytes)} of {output.human_bytes(found.total_bytes)} free")
    output.line()
    output.table((Column("WHAT"), Column("STATE"), Column("FOUND (HOW)", folds=True)), [_row(fact) for fact in answer.facts])
    if answer.saves:
        output.line()
        durations = [Column(heading, is_right=True) for heading in ("DURABLE AFTER", "AT MOST EVERY", "LOST AT WORST")]
        output.table((Column("A SAVE OF"), *durations), [
            (
                output.human_bytes(save.size_bytes) + (f" (step {save.step})" if save.step is not None else ""),
                human_s(save.durable_s), human_s(save.interval_s), human_s(save.lost_s),
            )
            for save in answer.saves
        ])  # fmt: skip
        output.line("One node writing alone. LOST AT WORST: by a cut, with saves as often as possible.")
    notes = [*(f"not fit: {text}" for text in answer.objections), *(f"remark: {text}" for text in answer.remarks)]
    if notes:
        output.line()
        output.fields([(" !", text) for text in notes])
    output.line()
    output.line(Styled(text=answer.reason, style=_VERDICT_STYLES[answer.verdict]))


def _row(fact: Fact) -> tuple[output.Cell, ...]:
    return fact.name, Styled(text=fact.state, style=_STATE_STYLES[fact.state]), f"{fact.text} ({fact.how})"

"""`ridethrough plan`: what will happen after a power cut, before it happens."""

from __future__ import annotations

import os

import click

from ridethrough import config as configuration
from ridethrough.cli import output
from ridethrough.cli.output import Styled
from ridethrough.config import Config
from ridethrough.seam.clock import SystemClock
from ridethrough.supervisor.runbook import Course, Question, Runbook, runbook

EXAMPLE = """\
run = "/ckpt/exp1"            # where the step is recorded
storage = "shared"            # every node sees it; or "node-local"

# Every node, named as `hostname` does. The first living one hosts
# the rendezvous. A domain is what loses power together.
[nodes.n0]
address = "10.0.0.1"
domain = "rack-a"
[nodes.n1]
address = "10.0.0.2"
domain = "rack-a"
[nodes.n2]
address = "10.0.0.3"
domain = "rack-b"

[recovery]
paths = ["/data"]             # what every node must reach as well
wait_for_nodes = "10m"        # how long for missing nodes, and then:
then = "shrink"               # go on with the ready ones; or "stop"
min_nodes = 2
resume = "continue"           # from the newest step; or "roll-back"
"""
"""A first `ridethrough.toml`, for three nodes in two racks."""

_HELP_END = output.help_end(
    ("ridethrough plan recovery", "ridethrough plan recovery --config /etc/ridethrough.toml --json"),
    {0: "the plan is printed, warnings included", 2: "usage, or the configuration is wrong"},
)


@click.group(invoke_without_command=True, subcommand_metavar="WHAT", epilog=_HELP_END)
@output.verbosity_option
@click.pass_context
def command(context: click.Context) -> None:
    """Say what will happen after a power cut, before it happens."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command(epilog=_HELP_END)
@click.option("--config", "config_path", metavar="FILE", help="The configuration; default ridethrough.toml, or [tool.ridethrough] of pyproject.toml.")
@click.option("--run", "run_dir", metavar="DIR", help="Directory of the run, if the configuration does not say it.")
@output.json_option
@output.verbosity_option
def recovery(config_path: str | None, run_dir: str | None, is_json: bool) -> None:
    """Print the recovery strategy as a runbook.

    The five questions (where the step is recorded, which paths must be
    reached, start order, how long to wait for missing nodes and then what,
    continue or roll back), each with its answer, where that came from and what
    it means; what happens step by step when nodes go dark; what to type.
    Reads only the configuration: it works when nothing else does.
    """
    found = configuration.load(config_path, os.environ, {"run": run_dir})
    plan = runbook(found, run=output.quote(found.run) if found.run else "RUN", command=_run_command(found))
    if is_json:
        output.emit("ridethrough.plan.recovery", _payload(found, plan), now_at=SystemClock().now_at())
    else:
        _show(found, plan)


def _run_command(found: Config) -> str:
    """What is typed on every node. The file is named where a person could be in another directory."""
    named = f" --config {output.quote(os.path.abspath(found.file))}" if found.file else ""
    if found.run and found.origin("run") != f"file {found.file}":
        named += f" --run {output.quote(found.run)}"
    return f"ridethrough run{named} -- CMD"


def _payload(found: Config, plan: Runbook) -> dict[str, object]:
    return {
        "config": {"file": os.path.abspath(found.file) if found.file else None},
        "run": {"path": found.run} if found.run else None,
        "nodes": [{"name": node.name, "address": node.address, "domain": node.domain} for node in found.nodes],
        "start_order": list(found.recovery.start_order),
        "suspect_s": found.peers.suspect_s,
        "dead_s": found.peers.dead_s,
        "wait_for_nodes_s": found.recovery.wait_for_nodes_s,
        "then": found.recovery.then,
        "min_nodes": found.recovery.min_nodes,
        "resume": found.recovery.resume,
        **plan.as_json(),
        "example": None if found.file else EXAMPLE,
    }


def _show(found: Config, plan: Runbook) -> None:
    where = f"of {output.safe(found.run)} " if found.run else ""
    on = output.count(len(found.nodes), "node") if found.nodes else "this node alone"
    output.line(Styled(text=f"RECOVERY {where}on {on}", style="bold"))
    output.line(f"from {found.file}" if found.file else "no configuration found: these are the defaults")
    output.line()
    where_to = "on every node where it is not running" if len(found.nodes) > 1 else ""
    output.line(f"IN SHORT: power is back: give the same command again{' ' + where_to if where_to else ''}, and wait:")
    output.line(f"   {_run_command(found)}")
    width = max(len(setting.key.rpartition(".")[2]) for question in plan.questions for setting in question.settings) + 3
    for question in plan.questions:
        _show_question(question, width)
    for course in plan.courses:
        _show_course(course)
    output.line()
    output.line(Styled(text="TO TYPE", style="bold"))
    if not found.run:
        output.line("   RUN: the directory that the script's Checkpointer names")
    for each in plan.commands:
        # On a line of its own, so that it can be copied whole.
        output.line(f"   {each.command}")
        output.line(f"      {each.purpose}")
    if plan.warnings:
        output.line()
        output.line(Styled(text="WARNINGS", style="bold"))
        output.fields([(" !", remark.text) for remark in plan.warnings], width=3)
    if not found.file:
        _show_example()


def _show_question(question: Question, width: int) -> None:
    output.line()
    output.line(Styled(text=f"{question.number}. {question.question}", style="bold"))
    pairs: list[tuple[str, output.Cell]] = [(f"   {s.key.rpartition('.')[2]}", f"{s.value}  ({s.origin})") for s in question.settings]
    output.fields([*pairs, *(("   means" if number == 0 else "", text) for number, text in enumerate(question.meaning))], width=width)


def _show_course(course: Course) -> None:
    output.line()
    output.line(Styled(text=course.title, style="bold"))
    width = max(len(step.when) for step in course.steps)
    pairs: list[tuple[str, output.Cell]] = [(f"   {number}. {step.when:<{width}}", step.what) for number, step in enumerate(course.steps, start=1)]
    output.fields(pairs)


def _show_example() -> None:
    output.line()
    output.line(Styled(text="A FIRST ridethrough.toml", style="bold"))
    output.line("Put a file like this where the command is given, the same on every node:")
    output.line()
    for row in EXAMPLE.splitlines():
        output.line(f"   {row}" if row else "")

"""`ridethrough drill`: cut the power of a small training job and measure what is lost."""

from __future__ import annotations

import os
import re
import signal
import sys

import click

from ridethrough.cli import output
from ridethrough.cli.output import Column
from ridethrough.errors import DrillFailed, UsageError
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.types import StateClass

_COLUMNS = (
    Column("CUT"),
    Column("NODES"),
    Column("PERSISTER"),
    Column("AT STEP", is_right=True),
    Column("RESTORED", is_right=True),
    Column("RPO", is_right=True),
    Column("RTO", is_right=True),
    Column("DETECT", is_right=True),
    Column("NODE", is_right=True),
    Column("LAUNCH", is_right=True),
    Column("VERIFY", is_right=True),
    Column("LOAD", is_right=True),
    Column("STEP 1", is_right=True),
)


@click.command(
    epilog=output.help_end(
        ("ridethrough drill", "ridethrough drill two-nodes --json --target-rto 60s"),
        {0: "identical, targets met", 1: "a difference, a lost save, or a target missed", 2: "usage", 13: "no place for the node's disk"},
    )
)
@click.argument("scenario", default="power-cut")
@click.option("--target-rto", "target_rto", metavar="DURATION", help="Fail if any resume takes longer (180s, 3m).")
@click.option("--target-rpo-steps", "target_rpo_steps", type=int, metavar="N", help="Fail if any cut loses more steps.")
@click.option("--sabotage", type=click.Choice([c.value for c in StateClass]), help="Break one class of state on purpose: the drill must notice.")
@click.option("--seed", type=int, default=None, help="Instants of the cuts within a step; printed, random if not given.")
@click.option("--history", "history_dir", default="runs/drill", show_default=True, metavar="DIR", help="Directory whose journal keeps every drill.")
@click.option("--output", "output_path", metavar="FILE", help="Also write the JSON document to this file.")
@output.json_option
@output.verbosity_option
def command(
    scenario: str,
    target_rto: str | None,
    target_rpo_steps: int | None,
    sabotage: str | None,
    seed: int | None,
    history_dir: str,
    output_path: str | None,
    is_json: bool,
) -> None:
    r"""Cut the power of a small training job and measure what is lost.

    Virtual nodes (namespaces, an ext4 disk each) train a small GPT under
    `ridethrough run`; their power or links are cut and come back, the same
    command is given again. Every step of every rank is compared with a run
    that was never cut. Nothing outside the drill's own temporary files is
    touched. As root the cut is real (the file system loses what was not
    synced); otherwise there is one node, of which only processes are killed,
    and the result says so.

    \b
    One node:     power-cut (default), mid-step, mid-save, twice
    Nodes:        two-nodes, node, rendezvous, room, one-never, survivors, sag
    File server:  storage-late, storage-down
    Network:      partition, blip
    """
    from ridethrough.drill import conduct, machine  # noqa: PLC0415  Linux only; --help works everywhere
    from ridethrough.drill import scenario as scenarios  # noqa: PLC0415

    wanted = scenarios.find(scenario)
    # Mounts, namespaces and processes are taken down on the way out, so a request to stop must come as an exception.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    limit_s = _seconds(target_rto)
    clock = SystemClock()
    chosen = seed if seed is not None else int.from_bytes(os.urandom(3), "big")
    why = machine.missing()
    if why is not None and wanted.nodes == 1:
        output.note(f"processes only, the disk keeps its cache: {why}")
    began_s = clock.monotonic_s()

    def say(text: str) -> None:
        output.note(f"{clock.monotonic_s() - began_s:6.1f} s  {text}")

    report = conduct.conduct(wanted, reference=conduct.train_reference(wanted, say), sabotage=sabotage, seed=chosen, say=say)
    missed = _missed(report, limit_s, target_rpo_steps)
    found = {**report.as_dict(), "targets": {"rto_s": limit_s, "rpo_steps": target_rpo_steps}, "missed": missed}
    _keep_history(history_dir, found)
    if output_path is not None:
        with open(output_path, "w", encoding="utf-8") as file:
            file.write(output.document("ridethrough.drill", found, now_at=clock.now_at()))
    if is_json:
        output.emit("ridethrough.drill", found, now_at=clock.now_at())
    else:
        _show(report, missed)
    if not report.is_identical or missed:
        output.end(DrillFailed.exit_code)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m)", text)
    if parsed is None:
        raise UsageError(detail=f"{text!r} is not a duration: write 180s or 3m")
    return float(parsed.group(1)) * (60.0 if parsed.group(2) == "m" else 1.0)


def _missed(report: object, limit_s: float | None, limit_steps: int | None) -> list[str]:
    from ridethrough.drill.conduct import DrillReport  # noqa: PLC0415

    assert isinstance(report, DrillReport)
    missed = [f"{c.kind} at step {c.at_step}: RTO {c.rto_s:.1f} s" for c in report.cuts if limit_s is not None and c.rto_s > limit_s]
    for cut in report.cuts:
        limits = [limit for limit in (limit_steps, cut.rpo_limit_steps) if limit is not None]
        if limits and cut.rpo_steps > min(limits):
            missed.append(f"{cut.kind} at step {cut.at_step}: RPO {cut.rpo_steps} steps, at most {min(limits)} promised")
    return missed


def _keep_history(history_dir: str, found: dict[str, object]) -> None:
    from ridethrough.format.layout import journal_path  # noqa: PLC0415
    from ridethrough.journal import Journal  # noqa: PLC0415
    from ridethrough.seam.process import node_name  # noqa: PLC0415
    from ridethrough.store.commit import ensure_dir  # noqa: PLC0415

    fs = PosixFileSystem()
    path = journal_path(os.path.abspath(history_dir), node_name())
    ensure_dir(fs, os.path.dirname(path))
    Journal(fs, SystemClock(), path, role="drill").append("drill.finished", **found)


def _show(report: object, missed: list[str]) -> None:
    from ridethrough.drill.conduct import DrillReport  # noqa: PLC0415

    assert isinstance(report, DrillReport)
    rows = []
    for cut in report.cuts:
        p = cut.rto_phases_s
        rows.append(
            (
                cut.kind,
                cut.nodes,
                cut.phase,
                str(cut.at_step),
                "goes on" if cut.restored_step is None else str(cut.restored_step),
                f"{cut.rpo_steps} steps",
                f"{cut.rto_s:.1f} s",
                f"{p['detect'] + p['classify']:.1f} s",
                f"{p['node_ready']:.1f} s",
                f"{p['launch']:.1f} s",
                f"{p['select_verify']:.2f} s",
                f"{p['load']:.2f} s",
                f"{p['first_step']:.2f} s",
            )
        )
    output.table(_COLUMNS, rows)
    output.line("")
    output.line(f"realism: {report.realism}   seed: {report.seed}   compared: {report.compared_lines} steps of ranks   wall: {report.wall_s:.0f} s")
    for incident in report.incidents:
        output.line(f"incident: {incident.get('outcome')}, {incident.get('cause')}")
    for failure in report.invariant_failures:
        output.line(f"failed: {failure}")
    for text in missed:
        output.line(f"target missed: {text}")
    difference = report.difference
    if difference is not None:
        place = "right after the resume" if difference.at_resume else "after the step"
        output.line(f"first difference: {difference.state_class}, rank {difference.rank}, step {difference.step}, {place}")
    output.line(f"identical: {'yes' if report.is_identical else 'no'}")

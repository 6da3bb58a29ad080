"""`ridethrough run`: start a training command and carry it through power loss."""

from __future__ import annotations

import os
import re

import click

from ridethrough import config
from ridethrough.cli import output
from ridethrough.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _duration(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", value)
    if found is None:
        raise UsageError(detail=f"{value!r} is not a duration: write 90s, 5m or 1h")
    return float(found.group(1)) * _UNITS[found.group(2)]


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog=output.help_end(
        (
            "ridethrough run -- torchrun --nproc-per-node=8 train.py",
            "ridethrough run --run runs/exp001 -- python train.py --lr 3e-4",
        ),
        {
            0: "finished",
            11: "another command owns the run",
            12: "checkpoints exist, none can be restored",
            13: "storage unreachable",
            14: "storage full or read-only",
            20: "saved and stopped (SIGTERM, SIGUSR2): start the same command again",
            21: "a person is needed",
            22: "error in the training code: do not retry",
            130: "saved and stopped by Ctrl-C",
        },
    ),
)
@click.option("--run", "run_dir", metavar="DIR", help="Directory of the run; learnt from the script's Checkpointer if not given.")
@click.option("--config", "config_path", metavar="FILE", help="The configuration; default ridethrough.toml here, if there is one.")
@click.option("--fresh", "is_fresh", is_flag=True, help="Start at step 0 even where checkpoints exist.")
@click.option("--hang", "hang_s", default="60s", show_default=True, callback=_duration, help="Steps overdue by this (or 10 x p99) are a hang.")
@click.option("--grace", "grace_s", default="30s", show_default=True, callback=_duration, help="Time to save and stop when asked to stop.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD…")
@output.verbosity_option
def command(run_dir: str | None, config_path: str | None, is_fresh: bool, hang_s: float, grace_s: float, argv: tuple[str, ...]) -> None:
    """Start a training command and carry it through power loss.

    CMD is your own launcher, unchanged. If it crashes or hangs it is started
    again and resumes from the newest intact checkpoint; after a power cut
    give the same command again. A job of several nodes is started by the same
    command on each; its nodes are in the configuration (`ridethrough plan
    recovery` shows how).
    """
    from ridethrough.seam import process  # noqa: PLC0415  Linux only; --help works everywhere

    process.require_linux("ridethrough run")
    from ridethrough.snapshot.address import new_socket_path, real_path, remember_alias  # noqa: PLC0415
    from ridethrough.supervisor.settings import Settings  # noqa: PLC0415
    from ridethrough.supervisor.start import keep  # noqa: PLC0415

    loaded = config.load(config_path, os.environ, {"run": run_dir})
    loaded.require_node(process.node_name())
    loaded.require_common_key()
    run_dir = loaded.run
    settings = Settings(argv=argv, is_fresh=is_fresh, hang_s=hang_s, grace_s=grace_s, config=loaded)
    real = real_path(run_dir, limit_s=loaded.recovery.wait_for_nodes_s) if run_dir else None
    if run_dir and real:
        remember_alias(run_dir, real)
    code = keep(settings, run_dir=real, socket_path=new_socket_path())
    raise SystemExit(code)

"""`ridethrough export`: a checkpoint for other tools."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from ridethrough.cli import output, overview, target
from ridethrough.errors import Damaged, StoreMissing, UsageError
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store import export
from ridethrough.store.export import Loaded, Written

SAFETENSORS, TORCH, DCP = "safetensors", "torch", "dcp"
_READ_WITH = {
    SAFETENSORS: "safetensors.torch.load_file",
    TORCH: "torch.load(..., weights_only=True)",
    DCP: "torch.distributed.checkpoint.load",
}


@click.command(
    epilog=output.help_end(
        ("ridethrough export runs/exp001 --to torch exp001.pt", "ridethrough export runs/exp001@24000 --to safetensors model.safetensors"),
        {0: "written, durably", 1: "a part of it is damaged: nothing is written", 2: "usage, OUT exists, or torch is not installed",
         10: "no such run, or no complete checkpoint of that name", 12: "checkpoints exist, none is restorable", 13: "storage unreachable",
         14: "storage full or read-only", 21: "two attempts claim to be the newest"},
    )
)  # fmt: skip
@click.argument("ckpt")
@click.option("--to", "kind", type=click.Choice([SAFETENSORS, TORCH, DCP]), required=True, help="What to write.")
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Whose private state (buffers, say) where ranks differ."
)
@click.argument("out")
@output.json_option
@output.verbosity_option
def command(ckpt: str, kind: str, rank: int, out: str, is_json: bool) -> None:
    """Write a checkpoint for other tools: safetensors, torch, DCP.

    CKPT is a step directory, RUN@STEP, or a run: then the checkpoint that a
    restart restores. Every byte is verified while it is read. OUT appears when it
    is whole and durable, and replaces nothing.

    safetensors is one file with the tensors of models and optimizers; torch is
    one file with the state dicts of what was tracked, for
    torch.load(weights_only=True); dcp is a directory with the same, for
    torch.distributed.checkpoint.load.
    """
    fs, now_at = PosixFileSystem(), SystemClock().now_at()
    path = os.path.abspath(out)
    wanted = target.find(fs, ckpt, verb="export")
    export.require_free(path)
    write = _writer_of(kind)
    catalog = target.load(fs, wanted)
    view = overview.survey(catalog, overview.read_proofs(fs, wanted.run_dir), run_dir=wanted.shown, now_at=now_at)
    chosen = target.pick(fs, wanted, catalog, view)
    row = next(row for row in view.rows if row.checkpoint is chosen)
    try:
        names = export.parts_of(chosen, rank)
        total = sum({seal.part: seal.payload_bytes for seal in chosen.seals if seal.part in names}.values())
        with output.progress(f"reading step {chosen.step}", total) as advance:
            parts = export.read(fs, wanted.run_dir, chosen, names, progress=advance)
        written = write(fs, path, parts)
    except Damaged as error:
        raise Damaged(
            **{**error.fields, "hint": f"ridethrough verify {output.quote(wanted.shown)}   (and export what is intact: RUN@STEP)"}
        ) from error
    except StoreMissing as error:
        raise StoreMissing(**{**error.fields, "hint": f"ridethrough ls {output.quote(wanted.shown)}"}) from error
    size = _size_bytes(fs, path)
    count = sum(number for _, number in written.objects)
    if is_json:
        payload: dict[str, Any] = {
            "run": overview.run_as_json(catalog, wanted.run_dir),
            "checkpoint": row.as_json(),
            "to": kind,
            "path": path,
            "rank": rank,
            "size_bytes": size,
            "tensors_count": count,
            "objects": [{"name": name, "tensors_count": number} for name, number in written.objects],
            "left_out": [{"name": name, "why": why} for name, why in written.left_out],
        }
        output.emit("ridethrough.export", payload, now_at=SystemClock().now_at())
        return
    output.fields(
        [
            ("exported", f"step {chosen.step} of {wanted.shown}"),
            ("to", f"{out} ({kind}, {output.human_bytes(size)})"),
            ("holds", ", ".join(f"{name} ({output.count(number, 'tensor')})" for name, number in written.objects)),
            ("read with", _READ_WITH[kind]),
        ]
    )
    for _, why in written.left_out:
        output.note(f"left out: {why}")
    if chosen.roster is not None and chosen.roster.world_size > 1:
        output.note(f"of {chosen.roster.world_size} ranks; what each has for itself (buffers, say) is that of rank {rank}")


def _writer_of(kind: str) -> Callable[[FileSystem, str, tuple[Loaded, ...]], Written]:
    if kind == SAFETENSORS:
        return export.write_safetensors
    try:
        from ridethrough.train import export as with_torch  # noqa: PLC0415  only this verb needs torch, and only for these
    except ImportError as error:
        if error.name not in ("torch", "numpy"):
            raise
        raise UsageError(detail=f"--to {kind} needs PyTorch ({error})", hint='pip install "ridethrough[torch]"') from error
    return with_torch.write_torch if kind == TORCH else with_torch.write_dcp


def _size_bytes(fs: FileSystem, path: str) -> int:
    found = fs.stat(path)
    return sum(fs.stat(os.path.join(path, name)).size_bytes for name in fs.list_dir(path)) if found.is_dir else found.size_bytes

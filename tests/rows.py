"""Figures that a test has measured, for the make target that asked for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def record(*rows: dict[str, Any]) -> None:
    """The rows are in the file that RIDETHROUGH_ROWS names; without it nobody wants them."""
    target = os.environ.get("RIDETHROUGH_ROWS")
    if target:
        path = Path(target)
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        path.write_text(json.dumps([*known, *rows], indent=2) + "\n", encoding="utf-8")


def crash_rows(layer: str, medium: str, *, instants: int, target: int, unit: str, damaged: int, lost: int, killed: int, mutants: int) -> None:
    """The four figures of one layer of crash tests on one file system (or model) are in the rows, for the table of `make crash`.

    Args:
        layer: How the instants are cut: "model", "blocks" or "live".
        medium: On what.
        instants: How many were tried.
        target: How many there should be.
        unit: What an instant is there.
        damaged: At how many of them something damaged was accepted.
        lost: At how many something durable was gone.
        killed: How many deliberately broken stores were found out.
        mutants: How many there are.
    """

    record(
        crash_row(layer, medium, "instants tried", instants, unit, target, met=instants >= target),
        crash_row(layer, medium, "damaged accepted", damaged, unit, 0, met=damaged == 0),
        crash_row(layer, medium, "durable lost", lost, unit, 0, met=lost == 0),
        crash_row(layer, medium, "mutants killed", killed, "mutants", mutants, met=killed == mutants),
    )


def crash_row(layer: str, medium: str, figure: str, value: int, unit: str, target: int, *, met: bool) -> dict[str, Any]:
    """One of the four."""
    name = f"{layer}, {medium}: {figure}"
    return {"layer": layer, "medium": medium, "figure": figure, "name": name, "value": value, "unit": unit, "target": target, "met": met}

"""Writes `build/TARGET.json` in the one shape that all measuring targets share.

``{"commit", "machine", "at", "rows": [{"name", "value", "unit", "floor" or "peer", "ratio", "target", "met"}]}``.
A row that could not be measured is there with its reason.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def write(target: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    """The figures are in build/TARGET.json."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip() or None
    document = {
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
        "at": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "rows": rows,
        **more,
    }
    path = Path("build", f"{target}.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def demo(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a drill's report."""
    rows = []
    for number, cut in enumerate(report["cuts"], start=1):
        name = f"{number} {cut['nodes']}, {cut['kind']}"
        rto = report["targets"]["rto_s"]
        rpo = min((limit for limit in (report["targets"]["rpo_steps"], cut["rpo_limit_steps"]) if limit is not None), default=None)
        rows.append({"name": f"{name}: RTO", "value": cut["rto_s"], "unit": "s", "target": rto, "met": rto is None or cut["rto_s"] <= rto})
        rows.append(
            {"name": f"{name}: RPO", "value": cut["rpo_steps"], "unit": "steps", "target": rpo, "met": rpo is None or cut["rpo_steps"] <= rpo}
        )
    rows.append(
        {"name": "identical to the uninterrupted run", "value": report["identical"], "unit": "yes/no", "target": True, "met": report["identical"]}
    )
    return rows


def crash(rows: list[dict[str, Any]]) -> str:
    """The four figures of each layer and medium as a table, for people; then what missed its target."""
    figures = ("instants tried", "damaged accepted", "durable lost", "mutants killed")
    places = list(dict.fromkeys((row["layer"], row["medium"]) for row in rows if "layer" in row))
    by_name = {(row["layer"], row["medium"], row["figure"]): row for row in rows if "layer" in row}
    lines = [f"{'layer':8}{'on':38}" + "".join(f"{figure:>18}" for figure in figures)]
    totals = dict.fromkeys(figures, 0)
    for layer, medium in places:
        cells = []
        for figure in figures:
            row = by_name.get((layer, medium, figure))
            text = "" if row is None else f"{row['value']} of {row['target']}" if figure == "mutants killed" else f"{row['value']:,}"
            totals[figure] += row["value"] if row is not None else 0
            cells.append(f"{text:>18}")
        lines.append(f"{layer:8}{medium:38}" + "".join(cells))
    if places:
        lines.append(f"{'total':46}" + "".join(f"{totals[figure]:>18,}" for figure in figures))
    lines += [f"NOT MET  {row['name']}: {row['value']} {row['unit']}, target {row['target']}" for row in rows if not row["met"]]
    return "\n".join(lines)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    written = write(sys.argv[1], demo(found), drill=found) if sys.argv[1] == "demo" else write(sys.argv[1], found)
    if sys.argv[1] == "crash":
        print(crash(found))
    print(f"figures: {written}")

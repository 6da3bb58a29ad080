"""Power cuts of nodes, in every phase and order of return, on three virtual nodes; and what else can go dark.

    python bench/matrix.py [--seed N] [--runs 8] [--only NAME,…] [--again]

Eight runs of five cuts each and the named drills of several nodes, every step compared with a run that was never cut.
Ends with a table, build/matrix.json and build/matrix.md. Each drill's report and the logs of its nodes are kept under
build/matrix/: what the same code has already gone through with this seed is not repeated (`--again` repeats it). A drill
that could not be carried out is a row with its reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import figures

import ridethrough
from ridethrough.drill import machine
from ridethrough.drill.conduct import Trace, conduct, train_reference
from ridethrough.drill.scenario import SCENARIOS, SERVER, Scenario, matrix
from ridethrough.errors import RideThroughError

KEPT = Path("build", "matrix")
RTO_TARGET_S = 180.0
BEGAN_S = time.monotonic()


def named() -> list[Scenario]:
    """The drills of several nodes; where the drill for people is compressed, with the full times."""
    found = {name: scenario for name, scenario in SCENARIOS.items() if scenario.nodes > 1}
    room, late = found["room"], found["storage-late"]
    found["room-90s"] = dataclasses.replace(
        room,
        name="room-90s",
        cuts=(dataclasses.replace(room.cuts[0], back_s={"n0": 55.0, "n1": 90.0, "n2": 10.0}),),
        recovery={"wait_for_nodes": "5m"},
    )
    found["storage-late-60s"] = dataclasses.replace(
        late, name="storage-late-60s", cuts=(dataclasses.replace(late.cuts[0], back_s={SERVER: 60.0}),), recovery={"wait_for_nodes": "5m"}
    )
    for name in ("room", "storage-late", "two-nodes"):
        del found[name]
    return list(found.values())


def code() -> str:
    """A name for the package as it is now, committed or not."""
    total = hashlib.sha256()
    for path in sorted(Path(ridethrough.__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN_S:7.1f} s  {text}", file=sys.stderr, flush=True)


def drill(scenario: Scenario, seed: int, references: dict[Any, Trace]) -> dict[str, Any]:
    """The drill's report, or why there is none."""
    try:
        if scenario.course not in references:
            references[scenario.course] = train_reference(scenario, say)
        logs_dir = KEPT / scenario.name
        shutil.rmtree(logs_dir, ignore_errors=True)
        reference = references[scenario.course]
        return conduct(scenario, reference=reference, sabotage=None, seed=seed, say=say, logs_dir=logs_dir).as_dict()
    except RideThroughError as error:
        return {
            "scenario": scenario.name,
            "nodes": scenario.nodes,
            "storage": scenario.storage.value,
            "cuts": [],
            "identical": None,
            "error": str(error),
        }


def kept(scenario: Scenario, seed: int, version: str, *, again: bool, references: dict[Any, Trace]) -> dict[str, Any]:
    """The report, from an earlier call if that was of this commit and seed."""
    path = KEPT / f"{scenario.name}.json"
    if path.exists() and not again:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["code"] == version and found["seed"] == seed and found["report"].get("error") is None:
            return dict(found["report"])
    report = drill(scenario, seed, references)
    path.write_text(json.dumps({"code": version, "seed": seed, "report": report}, indent=2) + "\n", encoding="utf-8")
    return report


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of one drill: RTO and RPO of each fault, and whether it is the run that was never cut."""
    rows = []
    for number, cut in enumerate(report["cuts"], start=1):
        name = f"{report['scenario']} {number}: {cut['nodes']}, {cut['kind']}"
        rows.append({"name": f"{name}: RTO", "value": cut["rto_s"], "unit": "s", "target": RTO_TARGET_S, "met": cut["rto_s"] <= RTO_TARGET_S})
        limit = cut["rpo_limit_steps"]
        rows.append(
            {"name": f"{name}: RPO", "value": cut["rpo_steps"], "unit": "steps", "target": limit, "met": limit is None or cut["rpo_steps"] <= limit}
        )
    recovered = sum(incident.get("outcome") == "recovered" for incident in report.get("incidents", []))
    felt = sum(cut["restored_step"] is not None for cut in report["cuts"])
    name = f"{report['scenario']}: incidents on record as recovered"
    rows.append({"name": name, "value": recovered, "unit": "incidents", "target": felt, "met": recovered == felt})
    what = "every sample once an epoch" if report.get("shrunk") else "identical"
    reason = report.get("error") or "; ".join(report.get("invariant_failures", [])) or None
    rows.append(
        {
            "name": f"{report['scenario']}: {what}",
            "value": report["identical"],
            "unit": "yes/no",
            "target": True,
            "met": report["identical"],
            "reason": reason,
        }
    )
    return rows


COLUMNS = ("drill", "storage", "cut", "when", "persister", "back after", "at step", "restored", "RPO", "at most", "RTO", "sure after")


def table(reports: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One line a fault."""
    lines = []
    for report in reports:
        for cut in report["cuts"]:
            lines.append(
                (
                    report["scenario"],
                    report["storage"],
                    cut["nodes"],
                    cut["kind"],
                    cut["phase"],
                    cut["returns"],
                    str(cut["at_step"]),
                    "goes on" if cut["restored_step"] is None else str(cut["restored_step"]),
                    str(cut["rpo_steps"]),
                    "-" if cut["rpo_limit_steps"] is None else str(cut["rpo_limit_steps"]),
                    f"{cut['rto_s']:.1f} s",
                    "-" if cut["convicted_s"] is None else f"{cut['convicted_s']:.1f} s",
                )
            )
        verdict = {True: "yes", False: "NO", None: "not carried out"}[report["identical"]]
        reason = report.get("error") or "; ".join(report.get("invariant_failures", []))
        label = "every sample once" if report.get("shrunk") else "identical"
        lines.append((report["scenario"], report["storage"], f"{label}: {verdict}{': ' + reason[:200] if reason else ''}"))
    return lines


def show(lines: list[tuple[str, ...]]) -> str:
    """As text for people."""
    full = [COLUMNS, *(line for line in lines if len(line) == len(COLUMNS))]
    widths = [max(len(line[n]) for line in full) for n in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in (COLUMNS, *lines))


def markdown(lines: list[tuple[str, ...]]) -> str:
    """For the docs."""
    padded = [(*line, *[""] * (len(COLUMNS) - len(line))) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (COLUMNS, tuple("---" for _ in COLUMNS), *padded)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=20261103)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--only", default="", help="names, comma separated")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    why = machine.missing(has_server=True)
    if why is not None:
        raise SystemExit(f"the matrix cuts the power of several virtual nodes: {why}")
    KEPT.mkdir(parents=True, exist_ok=True)
    version = code()
    scenarios = [*matrix(arguments.seed, arguments.runs), *named()]
    if arguments.only:
        scenarios = [s for s in scenarios if s.name in arguments.only.split(",")]
    references: dict[Any, Trace] = {}
    reports = []
    for scenario in scenarios:
        reports.append(kept(scenario, arguments.seed, version, again=arguments.again, references=references))
        lines = table(reports)
        # After each: whoever stops this has what was found so far.
        path = figures.write("matrix", [row for report in reports for row in rows_of(report)], seed=arguments.seed, drills=reports)
        Path("build", "matrix.md").write_text(markdown(lines), encoding="utf-8")
    print(show(lines))
    count = sum(len(scenario.cuts) for scenario in scenarios)
    failed = [row["name"] for report in reports for row in rows_of(report) if not row["met"]]
    print(f"\n{count} faults, seed {arguments.seed}, {time.monotonic() - BEGAN_S:.0f} s; not met: {', '.join(failed) or 'none'}\nfigures: {path}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""The same power cuts on other people's checkpoints, and on ours.

    python bench/survival.py [--seed N] [--cuts 20] [--only NAME;…] [--again]

Each engine trains a model with 4 MiB of state, saves every 5 steps and acknowledges once its own save call has returned
(or its documented completion has come). Something else fsyncs a log on the same disk. At a random instant the file
system of that disk is shut down; it is mounted again, the engine loads its newest checkpoint by its own means in a new
process, and what it loads is compared bit for bit with what was saved at that step. docs/survival.md says how to read it.

Ends with a table, build/survival.json and build/survival.md. What an engine went through is kept under build/survival/
and not repeated with the same code, versions and seed (`--again` repeats it). An engine that is not installed is a row
with its reason.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import figures
from survival_engines import ENGINES
from survival_run import possible_variants

import ridethrough
from ridethrough.testing.disk import missing_for_disks

KEPT = Path("build", "survival")
OURS = "ridethrough"
OUTCOMES = ("kept", "older", "refused", "nothing", "wrong")
COLUMNS = ("engine", "version", "cuts", "in a save", "kept", "older", "refused", "nothing", "wrong", "bit flip")
ENGINE_S = 3600.0


def code(name: str) -> str:
    """A name for what this engine's figures depend on."""
    total = hashlib.sha256(sys.version.encode())
    sources = [*Path(__file__).parent.glob("survival*")]
    if name == OURS:
        sources += Path(ridethrough.__file__).parent.rglob("*.py")
    for path in sorted(sources):
        total.update(path.read_bytes() if path.is_file() else b"")
    return total.hexdigest()


def clean(work: Path) -> None:
    """Nothing of this engine is left, also when its process was killed: its mounts went with their namespace."""
    listed = subprocess.run(["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        device, _, image = line.strip().partition(" ")
        if image.strip().startswith(str(work)):
            subprocess.run(["losetup", "--detach", device], check=False)
    shutil.rmtree(work, ignore_errors=True)


def measure(name: str, seed: int, cuts: int) -> dict[str, Any]:
    """What became of one engine."""
    found: dict[str, Any] = {"engine": name, "at": datetime.date.today().isoformat(), "cuts": []}  # noqa: DTZ011  the day here
    work = Path(tempfile.mkdtemp(prefix="survival-"))
    errors = KEPT / f"{name}.log"
    try:
        with open(errors, "w", encoding="utf-8") as log:
            done = subprocess.run(
                # Elsewhere a new mount namespace (a container, a drill) would copy a mount and hold the file system that was
                # shut down: mounted again it would be the same dead one.
                ["unshare", "--mount", sys.executable, str(Path(__file__).with_name("survival_run.py")), name, str(work), str(seed), str(cuts)],
                stdout=subprocess.PIPE, stderr=log, text=True, timeout=ENGINE_S, check=False,
            )  # fmt: skip
        output, code_ = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code_ = (late.stdout or b"").decode(), 124
    finally:
        clean(work)
    for line in output.splitlines():
        said = json.loads(line)
        if "outcome" in said:
            found["cuts"].append(said)
        else:
            found.update(said)
    if code_:
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        found["reason"] = lines[-1][:300] if lines else f"its process ended with {code_}"
    return found


def kept(name: str, seed: int, cuts: int, *, again: bool) -> dict[str, Any]:
    path = KEPT / f"{name}.json"
    key = f"{code(name)} {seed} {cuts} {possible_variants()}"
    if path.exists() and not again:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] == key and "reason" not in found:
            return found
    found = {"key": key, **measure(name, seed, cuts)}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def line_of(name: str, found: dict[str, Any], cuts: list[dict[str, Any]]) -> tuple[str, ...]:
    counts = Counter(cut["outcome"] for cut in cuts)
    in_save = sum(cut["in_save"] for cut in cuts)
    return (name, found.get("version", "-"), str(len(cuts)), str(in_save), *(str(counts[o]) for o in OUTCOMES), found.get("flip", "-"))


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a variant, and one for the flipped bit; only ours have a target."""
    name, engine = found["engine"], ENGINES[found["engine"]]
    said = {"version": found.get("version"), "date": found["at"], "settings": engine.settings, "reason": found.get("reason")}
    rows = []
    for variant in possible_variants():
        cuts = [cut for cut in found["cuts"] if cut["variant"] == variant]
        counts = Counter(cut["outcome"] for cut in cuts)
        row = {"name": f"{name}, {variant}: acknowledged work kept", "value": counts["kept"] if cuts else None, "unit": f"of {len(cuts)} cuts"}
        if name == OURS:
            row |= {"target": len(cuts), "met": bool(cuts) and counts["kept"] == len(cuts)}
        rows.append(row | said | {outcome: counts[outcome] for outcome in OUTCOMES} | {"in_save": sum(cut["in_save"] for cut in cuts)})
    row = {"name": f"{name}: one flipped bit", "value": found.get("flip"), "unit": "outcome"}
    if name == OURS:
        row |= {"target": "noticed", "met": found.get("flip") in ("refused", "an older one loaded")}
    return [*rows, row | said]


def show(lines: list[tuple[str, ...]]) -> str:
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def markdown(lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], tuple("---" for _ in lines[0]), *lines[1:])) + "\n"


def tables(results: list[dict[str, Any]]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]], list[tuple[str, ...]]]:
    """All cuts of an engine in one line; what each variant left; the settings."""
    whole, parts = [COLUMNS], [("engine", *possible_variants())]
    settings = [("engine", "version", "date", "settings", "finds the newest by", "documented at")]
    for found in results:
        name, engine = found["engine"], ENGINES[found["engine"]]
        whole.append(line_of(name, found, found["cuts"]))
        cells = []
        for variant in possible_variants():
            counts = Counter(cut["outcome"] for cut in found["cuts"] if cut["variant"] == variant)
            cells.append(" / ".join(str(counts[outcome]) for outcome in OUTCOMES) if counts else "-")
        parts.append((name, *cells))
        settings.append((name, found.get("version", f"none: {found.get('reason', '')}"), found["at"], engine.settings, engine.finds, engine.source))
    return whole, parts, settings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--cuts", type=int, default=20, help="of each engine and variant")
    parser.add_argument("--only", default="", help="names, separated by ;")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    why = missing_for_disks()
    if why is not None:
        raise SystemExit(f"this cuts the power of a file system: {why}")
    KEPT.mkdir(parents=True, exist_ok=True)
    names = arguments.only.split(";") if arguments.only else list(ENGINES)
    results = []
    for name in names:
        results.append(kept(name, arguments.seed, arguments.cuts, again=arguments.again))
        print(show([line_of(name, results[-1], results[-1]["cuts"])]), file=sys.stderr, flush=True)
        # After each: whoever stops this has what was found so far.
        rows = [row for found in results for row in rows_of(found)]
        path = figures.write("survival", rows, seed=arguments.seed, cuts=[{k: v for k, v in found.items() if k != "key"} for found in results])
        Path("build", "survival.md").write_text("\n".join(markdown(lines) for lines in tables(results)), encoding="utf-8")
    whole, parts, settings = tables(results)
    print(show(whole), show([(p[0], *(c for c in p[1:])) for p in parts]), sep=f"\n\neach: {' / '.join(OUTCOMES)}\n")
    print("", show(settings), sep="\n")
    for found in results:
        if "reason" in found:
            print(f"{found['engine']}: {found['reason']}")
    print(f"\nseed {arguments.seed}; figures: {path}")
    raise SystemExit(0 if all(row["met"] for row in rows if "met" in row) else 1)


if __name__ == "__main__":
    main()

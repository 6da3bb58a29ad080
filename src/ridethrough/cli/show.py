"""`ridethrough show`: what one checkpoint holds."""

from __future__ import annotations

import json
from typing import Any

import click

from ridethrough.cli import explain, output, overview, target
from ridethrough.cli.output import Column, Styled
from ridethrough.cli.overview import Row
from ridethrough.format.seal import Seal
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import Catalog, Checkpoint
from ridethrough.types import Presence, StateClass

PROVENANCE = ("experiment", "git_commit", "git_dirty", "start_command", "data_version", "step", "saved_at", "dependencies", "config_hash")
"""Fields that every meta.json has, in the order in which people ask for them."""
_OWN_PLACE = {"classes"}
_STYLES = {Presence.PRESENT: "green", Presence.MISSING: "red", Presence.UNPROTECTABLE: "yellow"}
_WORST_FIRST = (Presence.MISSING, Presence.UNPROTECTABLE, Presence.PRESENT)


@click.command(
    epilog=output.help_end(
        ("ridethrough show runs/exp001@24000 --json", "ridethrough show runs/exp001 --explain"),
        {0: "shown", 1: "run.json is damaged", 2: "usage, or the configuration is wrong", 10: "no such run or checkpoint",
         12: "checkpoints exist, none is restorable", 13: "storage unreachable", 21: "two attempts claim to be the newest"},
    )
)  # fmt: skip
@click.argument("ckpt")
@click.option("--explain", "explains", is_flag=True, help="Compare what made it with what is here: what a start would warn of or refuse.")
@output.json_option
@output.verbosity_option
def command(ckpt: str, explains: bool, is_json: bool) -> None:
    """Show what a checkpoint holds: provenance, state, parts.

    CKPT is a step directory, RUN@STEP, or a run: then the checkpoint that a
    restart restores is shown. A class of state that was not saved is named.

    With --explain: the provenance beside the git state of this directory and
    the packages of this environment, and what [resume] says of each.
    """
    fs, now_at = PosixFileSystem(), SystemClock().now_at()
    wanted = target.find(fs, ckpt, verb="show")
    catalog = target.load(fs, wanted)
    view = overview.survey(catalog, overview.read_proofs(fs, wanted.run_dir), run_dir=wanted.shown, now_at=now_at)
    chosen = target.pick(fs, wanted, catalog, view)
    row = next(row for row in view.rows if row.checkpoint is chosen)
    found = explain.findings(chosen) if explains else None
    explained = explain.as_json(found) if found is not None else None
    if is_json:
        output.emit("ridethrough.show", {**_payload(catalog, row, wanted.run_dir), "explain": explained}, now_at=now_at)
        return
    if found is not None:
        output.fields(_name(row, wanted.shown))
        output.line()
        explain.show(found)
        return
    _print_head(row, wanted.shown)
    output.line()
    output.table((Column("CLASS"), Column("STATE"), Column("DETAIL", folds=True)), [_class_cells(c) for c in classes(chosen)])
    held = parts(chosen)
    if held:
        output.line()
        columns = (Column("PART"), Column("RANKS"), Column("COPIES", is_right=True), Column("TENSORS", is_right=True), Column("SIZE", is_right=True))
        output.table((*columns, Column("ON", folds=True)), [_part_cells(part) for part in held])
    for problem in chosen.problems:
        output.note(f"unusable {problem.path}: {overview.detail_of(problem)}")
    if meta_differs(chosen):
        output.note("the seals of this checkpoint do not agree about its provenance; that of the first one is shown")


def classes(checkpoint: Checkpoint) -> list[dict[str, str | None]]:
    """The six classes of state; what a seal does not name is missing, and the worst any seal says counts."""
    found = []
    for kind in StateClass:
        said = [_class_of(seal, kind) for seal in checkpoint.seals] or [(Presence.MISSING, "no seal is left to tell")]
        presence, detail = min(said, key=lambda item: _WORST_FIRST.index(item[0]))
        found.append({"class": kind.value, "presence": presence.value, "detail": detail})
    return found


def _class_of(seal: Seal, kind: StateClass) -> tuple[Presence, str | None]:
    listed = seal.meta.get("classes")
    entry = listed.get(kind.value) if isinstance(listed, dict) else None
    if not isinstance(entry, dict):
        return Presence.MISSING, None
    detail = entry.get("detail")
    try:
        presence = Presence(str(entry.get("presence")))
    except ValueError:
        return Presence.MISSING, f"the seal says {entry.get('presence')!r}"
    return presence, str(detail) if detail else None


def parts(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Every part of the roster, or of the seals where the roster is lost."""
    holders = {part.name: list(part.holders) for part in checkpoint.roster.parts} if checkpoint.roster else {}
    names = list(holders) + sorted({seal.part for seal in checkpoint.seals} - set(holders))
    found = []
    for name in names:
        copies = [seal for seal in checkpoint.seals if seal.part == name]
        found.append(
            {
                "part": name,
                "holders": holders.get(name),
                "is_sealed": bool(copies),
                "tensors_count": len(copies[0].tensors) if copies else None,
                "size_bytes": copies[0].payload_bytes if copies else None,
                "copies": [{"node": s.node, "payload": s.payload_name, "size_bytes": s.payload_bytes, "digest": s.payload_digest} for s in copies],
            }
        )
    return found


def meta_differs(checkpoint: Checkpoint) -> bool:
    """The seals do not carry the same provenance."""
    return any(seal.meta != checkpoint.meta for seal in checkpoint.seals)


def _payload(catalog: Catalog, row: Row, run_dir: str) -> dict[str, Any]:
    c = row.checkpoint
    world = c.roster.world_size if c.roster else None
    return {
        "run": overview.run_as_json(catalog, run_dir),
        "checkpoint": row.as_json(),
        "world_size": world,
        "parent": {"attempt": c.parent.attempt.label, "step": c.parent.step} if c.parent else None,
        "meta": c.meta or None,
        "meta_differs": meta_differs(c),
        "classes": classes(c),
        "parts": parts(c),
        "problems": [overview.problem_as_json(problem) for problem in c.problems],
    }


def _print_head(row: Row, shown: str) -> None:
    c = row.checkpoint
    head: list[tuple[str, output.Cell]] = [
        *_name(row, shown),
        ("attempt", _came_from(row)),
        ("size", output.human_bytes(c.size_bytes)),
    ]
    known = [(name, _value(c.meta.get(name))) for name in PROVENANCE if name != "saved_at"]
    known.insert(PROVENANCE.index("saved_at"), ("saved_at", _saved(row)))
    # Without a seal there is no provenance: the step then comes from the name of the directory alone.
    known = [(name, str(c.step) if name == "step" and not c.meta else value) for name, value in known]
    extra = [(str(name), _value(value)) for name, value in sorted(c.meta.items()) if name not in PROVENANCE and name not in _OWN_PLACE]
    output.fields([*head, *known, *extra])


def _name(row: Row, shown: str) -> list[tuple[str, output.Cell]]:
    """Which checkpoint, what it is, and whether it is the one that matters."""
    state = f"{row.word} ({row.why})" if row.why else row.word
    return [
        ("checkpoint", f"{shown}/{row.checkpoint.dir_name}"),
        ("state", Styled(text=state, style="green" if row.is_complete else "yellow")),
        ("restart", "restores this one" if row.is_restart else "does not restore this one"),
    ]


def _came_from(row: Row) -> str:
    parent = row.checkpoint.parent
    origin = f", resumed from step {parent.step} of {parent.attempt.label}" if parent else ""
    return f"{row.attempt or output.UNKNOWN}{origin}"


def _saved(row: Row) -> str:
    text = _value(row.checkpoint.meta.get("saved_at"))
    return text if row.age_s is None else f"{text} ({output.human_age(row.age_s)} ago)"


def _value(value: Any) -> str:
    if value is None:
        return output.UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(output.quote_word(item) for item in value)
    if isinstance(value, dict) and value and all(isinstance(item, (str, int, float, type(None))) for item in value.values()):
        return ", ".join(f"{name} {output.UNKNOWN if item is None else item}" for name, item in sorted(value.items()))
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _class_cells(entry: dict[str, str | None]) -> tuple[output.Cell, ...]:
    presence = Presence(str(entry["presence"]))
    return str(entry["class"]), Styled(text=presence.value, style=_STYLES[presence]), entry["detail"] or ""


def _part_cells(part: dict[str, Any]) -> tuple[output.Cell, ...]:
    copies = part["copies"]
    return (
        part["part"],
        output.UNKNOWN if part["holders"] is None else output.ranges(part["holders"]),
        Styled(text=str(len(copies)), style="" if copies else "red"),
        "-" if part["tensors_count"] is None else str(part["tensors_count"]),
        "-" if part["size_bytes"] is None else output.human_bytes(part["size_bytes"]),
        output.listed([copy["node"] for copy in copies]) if copies else "missing",
    )

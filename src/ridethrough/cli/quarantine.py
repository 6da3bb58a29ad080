"""`ridethrough quarantine`: damaged parts that were moved aside, looked at and moved back."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import click

from ridethrough import journal
from ridethrough.cli import output, overview, owner, target
from ridethrough.cli.output import Column, Styled
from ridethrough.cli.text import parse_at
from ridethrough.errors import Damaged, ForeignRecord, FormatTooNew, RideThroughError, StorageError, StoreMissing, UsageError
from ridethrough.format import layout
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store import quarantine
from ridethrough.store.catalog import Catalog
from ridethrough.store.quarantine import Held

OK, DAMAGED, UNREADABLE = "ok", "damaged", "unreadable"
_STYLES = {OK: "green", DAMAGED: "red", UNREADABLE: "yellow"}
_HELP_END = output.help_end(
    ("ridethrough quarantine list runs/e1", "ridethrough quarantine release runs/e1 step-000000200-0123abcd/replicated"),
    {0: "listed, shown or released", 1: "not released: its bytes are wrong", 2: "usage", 10: "no such run, or nothing of that name in quarantine",
     11: "not released: a job owns the run", 13: "storage unreachable", 14: "storage full or read-only"},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One copy in quarantine and everything to be said about it."""

    held: Held
    name: str
    """What `show` and `release` call it: unambiguous, as short as possible."""
    since_at: datetime.datetime | None
    """When the journal says it was moved there."""
    result: str | None = None
    detail: str | None = None
    is_released: bool = False

    def as_json(self, now_at: datetime.datetime) -> dict[str, Any]:
        """As JSON has it."""
        held = self.held
        since = output.rfc3339(self.since_at) if self.since_at else None
        return {
            "dir_name": held.dir_name,
            "step": (layout.parse_step_dir(held.dir_name) or (0, ""))[0],
            "part": held.file.part,
            "node": held.file.node,
            "name": self.name,
            "size_bytes": held.size_bytes,
            "payload_at": None if held.payload_dir is None else f"{held.payload_dir}/{held.file.stem}.safetensors",
            "is_sealed": held.seal is not None,
            "reason": held.reason,
            "since_at": since,
            "age_s": output.age_s(since, now_at),
            "result": self.result,
            "detail": self.detail,
            "is_released": self.is_released,
        }


@click.group(invoke_without_command=True, subcommand_metavar="WHAT", epilog=_HELP_END)
@output.verbosity_option
@click.pass_context
def command(context: click.Context) -> None:
    """Look at damaged parts that were moved aside, and put them back."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command("list", epilog=_HELP_END)
@click.argument("run")
@output.json_option
@output.verbosity_option
def list_(run: str, is_json: bool) -> None:
    """List what is in quarantine: reason, size, since when. Reads no payload."""
    fs, now_at = PosixFileSystem(), SystemClock().now_at()
    wanted = target.find(fs, run, verb="quarantine list")
    catalog = target.load(fs, wanted)
    entries = survey(fs, wanted)
    if is_json:
        _emit(catalog, wanted, entries)
    elif entries:
        output.table(
            (Column("PART"), Column("NODE"), Column("SIZE", is_right=True), Column("SINCE", is_right=True), Column("REASON", folds=True)),
            [(e.name, e.held.file.node, output.human_bytes(e.held.size_bytes), _since(e, now_at), _reason(e)) for e in entries],
        )
    else:
        output.note("nothing is in quarantine")


@command.command(epilog=_HELP_END)
@click.argument("run")
@click.argument("part", metavar="[DIR/PART]", required=False)
@output.json_option
@output.verbosity_option
def show(run: str, part: str | None, is_json: bool) -> None:
    """Show why a part is in quarantine, and whether its bytes are right now.

    Without DIR/PART everything in quarantine is read. Changes nothing.
    """
    fs, now_at = PosixFileSystem(), SystemClock().now_at()
    wanted = target.find(fs, run, verb="quarantine show")
    catalog = target.load(fs, wanted)
    entries = survey(fs, wanted)
    chosen = entries if part is None else (pick(entries, wanted, part),)
    checked = [check(fs, wanted, catalog, entry)[0] for entry in chosen]
    if is_json:
        _emit(catalog, wanted, checked)
        return
    for number, entry in enumerate(checked):
        if number:
            output.line()
        _print(entry, wanted, now_at)
    if not checked:
        output.note("nothing is in quarantine")


@command.command(epilog=_HELP_END)
@click.argument("run")
@click.argument("part", metavar="DIR/PART")
@output.json_option
@output.verbosity_option
def release(run: str, part: str, is_json: bool) -> None:
    """Put a part back, if its bytes are right now; otherwise say what is wrong.

    For bytes that were never wrong: a cable, a controller, memory that was. Two
    reads past the page cache must both match the seal. The part then counts
    again, and a restart may restore its checkpoint.
    """
    fs, clock = PosixFileSystem(), SystemClock()
    wanted = target.find(fs, run, verb="quarantine release")
    with owner.owning(wanted.run_dir, shown=wanted.shown):
        catalog = target.load(fs, wanted)
        owner.require_marker(catalog)
        entry = pick(survey(fs, wanted), wanted, part)
        checked, error = check(fs, wanted, catalog, entry)
        if error is not None:
            raise error
        held = checked.held
        assert held.seal is not None, "proven"
        # On record before it counts again: after a cut in the middle the journal says what was going on.
        owner.record(fs, clock, wanted, "quarantine").append(
            "part.released", dir_name=held.dir_name, part=held.file.part, payload=held.seal.payload_name
        )
        quarantine.release_part(fs, wanted.run_dir, held, held.seal)
        catalog = target.load(fs, wanted)
    released = Entry(**{**{name: getattr(checked, name) for name in Entry.__slots__}, "is_released": True})
    if is_json:
        _emit(catalog, wanted, [released])
        return
    output.line(f"released {checked.name}")
    view = overview.survey(catalog, overview.read_proofs(fs, wanted.run_dir), run_dir=wanted.shown, now_at=clock.now_at())
    if view.restart is not None:
        output.note(f"a restart restores step {view.restart.checkpoint.step}")


def survey(fs: FileSystem, wanted: target.Target) -> tuple[Entry, ...]:
    """Everything in quarantine."""
    held = quarantine.holdings(fs, wanted.run_dir)
    since = _since_when(fs, wanted.run_dir)
    short = [f"{h.dir_name}/{h.file.part}" for h in held]
    names = [name if short.count(name) == 1 else f"{h.dir_name}/{h.file.stem}" for name, h in zip(short, held, strict=True)]
    return tuple(
        Entry(held=h, name=name, since_at=since.get((h.dir_name, f"{h.file.stem}.safetensors"))) for h, name in zip(held, names, strict=True)
    )


def _since_when(fs: FileSystem, run_dir: str) -> dict[tuple[str, str], datetime.datetime | None]:
    """When each payload was last moved there, as far as the journals can be read and say so."""
    directory = os.path.join(run_dir, layout.JOURNAL)
    try:
        history = journal.read(fs, [os.path.join(directory, name) for name in fs.list_dir(directory) if name.endswith(".jsonl")])
    except (FormatTooNew, StorageError, OSError):
        return {}  # shown as unknown
    moved = history.of("part.quarantined")
    return {(str(event.data.get("dir_name")), str(event.data.get("payload"))): parse_at(event.at) for event in moved}


def pick(entries: tuple[Entry, ...], wanted: target.Target, name: str) -> Entry:
    """The one that the user named: as DIR/PART, or with the whole name of one of its files.

    Raises:
        StoreMissing: There is none.
        UsageError: There are several; names them.
    """
    dir_name, _, rest = name.removeprefix(f"{layout.QUARANTINE}/").rpartition("/")
    stem = rest.removesuffix(".safetensors").removesuffix(".seal").removesuffix(".reason.json")
    found = [e for e in entries if e.held.dir_name == dir_name and (e.held.file.part == rest or e.held.file.stem == stem)]
    listing = f"ridethrough quarantine list {output.quote(wanted.shown)}"
    if not found:
        raise StoreMissing(detail=f"nothing in quarantine is called {name}", path=wanted.shown, hint=listing)
    if len(found) > 1:
        raise UsageError(detail=f"{name} may be {output.listed([e.name for e in found])}: which one?", hint=listing)
    return found[0]


def check(fs: FileSystem, wanted: target.Target, catalog: Catalog, entry: Entry) -> tuple[Entry, RideThroughError | None]:
    """The copy has been read twice past the page cache; what came of it, and the error if it is not right."""
    result, detail = OK, None
    error: RideThroughError | None = None
    try:
        quarantine.prove(fs, wanted.run_dir, entry.held, run_uid=catalog.run.run_uid)
    except (Damaged, ForeignRecord) as found:
        result, detail = DAMAGED, str(found.fields["detail"])
        again = f"ridethrough quarantine show {output.quote(wanted.shown)} {output.quote(entry.name)}"
        error = type(found)(**{**found.fields, "hint": f"leave it there; to look again: {again}"})
    except StorageError as found:
        result, detail, error = UNREADABLE, str(found.fields.get("detail") or found), found
    return Entry(held=entry.held, name=entry.name, since_at=entry.since_at, result=result, detail=detail), error


def _emit(catalog: Catalog, wanted: target.Target, entries: Any) -> None:
    now_at = SystemClock().now_at()
    payload = {"run": overview.run_as_json(catalog, wanted.run_dir), "parts": [entry.as_json(now_at) for entry in entries]}
    output.emit("ridethrough.quarantine", payload, now_at=now_at)


def _since(entry: Entry, now_at: datetime.datetime) -> str:
    return output.human_age(output.age_s(output.rfc3339(entry.since_at), now_at)) if entry.since_at else output.UNKNOWN


def _reason(entry: Entry) -> str:
    notes = [entry.held.reason or "no reason on record: the move was cut"]
    if entry.held.seal is None:
        notes.append("no usable seal")
    if entry.held.payload_dir is None:
        notes.append("no payload")
    elif entry.held.payload_dir != entry.held.place:
        notes.append("its payload is in the step's directory: a move was cut")
    return "; ".join(notes)


def _print(entry: Entry, wanted: target.Target, now_at: datetime.datetime) -> None:
    held = entry.held
    since = f"{output.rfc3339(entry.since_at)} ({_since(entry, now_at)} ago)" if entry.since_at else output.UNKNOWN
    result = entry.result or output.UNKNOWN
    text = f"{result}: both reads match the seal" if result == OK else f"{result}: {entry.detail}"
    rows: list[tuple[str, output.Cell]] = [
        ("part", entry.name),
        ("node", held.file.node),
        ("files", " ".join(held.names)),
        ("size", output.human_bytes(held.size_bytes)),
        ("since", since),
        ("reason", _reason(entry)),
        ("now", Styled(text=text, style=_STYLES.get(result, ""))),
    ]
    output.fields(rows)
    if result == OK:
        output.note(f"hint: ridethrough quarantine release {output.quote(wanted.shown)} {output.quote(entry.name)}")

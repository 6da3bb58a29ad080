"""All copies of a run, wherever they are: read back, compared, and what is damaged in one place made good from another."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridethrough.errors import Damaged, ForeignRecord, FormatTooNew, RideThroughError, StorageError
from ridethrough.format import layout, record
from ridethrough.format.seal import Seal
from ridethrough.store.catalog import Catalog, Checkpoint, candidates, read_catalog
from ridethrough.store.copy import copy_part, copy_records
from ridethrough.store.place import Place
from ridethrough.store.quarantine import quarantine_part
from ridethrough.store.verify import check_part, is_surely_damaged

OK, DAMAGED, MISSING, UNREADABLE, DIVERGED, REPAIRED = "ok", "damaged", "missing", "unreadable", "diverged", "repaired"
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part of one checkpoint in one place."""

    place: str
    dir_name: str
    step: int
    part: str
    result: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Held:
    """What a place has of a part."""

    intact: tuple[Seal, ...]
    bad: tuple[Seal, ...]
    """Sealed, and their bytes are not what was sealed."""
    error: RideThroughError | None
    """The first thing that is wrong."""
    is_absent: bool = False
    """There is no trace of it, not even a damaged one."""


def scrub(places: Sequence[Place], *, is_repairing: bool, advance: Advance = lambda _: None) -> tuple[Finding, ...]:
    """Every copy of every complete checkpoint was read past the cache; what could be made good is, if `is_repairing`.

    A checkpoint that a place has nothing of is not put there: that is what copying is for.

    Args:
        places: The run and its copies; the first one that is intact is what others are repaired from.
        is_repairing: Whether damaged and missing parts are replaced. The caller owns the run on this node.
        advance: Told how many bytes were read.

    Raises:
        ForeignRecord: The places hold different runs.
        StorageError: A place cannot be read at all.
    """
    catalogs = [read_catalog(place.fs, place.run_dir) for place in places]
    for place, catalog in zip(places, catalogs, strict=True):
        if catalog.run.run_uid != catalogs[0].run.run_uid:
            raise ForeignRecord(
                path=place.shown, detail=f"it holds run {catalog.run.run_uid[:8]}, not {catalogs[0].run.run_uid[:8]} of {places[0].shown}"
            )
    findings: list[Finding] = []
    for dir_name, wanted in _wanted(catalogs).items():
        here = [next((c for c in catalog.checkpoints if c.dir_name == dir_name), None) for catalog in catalogs]
        findings += _scrub_one(places, here, wanted, is_repairing=is_repairing, advance=advance)
    return tuple(findings)


def _wanted(catalogs: Sequence[Catalog]) -> dict[str, frozenset[str]]:
    """Parts by checkpoint, for those that are complete in some place, oldest first."""
    whole = [c for catalog in catalogs for c in candidates(catalog)]
    return {c.dir_name: frozenset(c.roster.part_names) for c in sorted(whole, key=lambda c: (c.attempt.seq, c.step)) if c.roster is not None}


def _scrub_one(
    places: Sequence[Place],
    here: Sequence[Checkpoint | None],
    wanted: frozenset[str],
    *,
    is_repairing: bool,
    advance: Advance,
) -> list[Finding]:
    """Of one checkpoint, as each place has it; None where it has nothing of it."""
    dir_name, step = next((c.dir_name, c.step) for c in here if c is not None)
    findings: list[Finding] = []
    for part in sorted(wanted):
        held = {number: _look(places[number], c, part, advance) for number, c in enumerate(here) if c is not None}
        digests = {seal.payload_digest for found in held.values() for seal in found.intact}
        for number, found in held.items():

            def say(result: str, detail: str = "", number: int = number, part: str = part) -> Finding:
                return Finding(place=places[number].shown, dir_name=dir_name, step=step, part=part, result=result, detail=detail)

            if len(digests) > 1:
                findings.append(say(DIVERGED, f"{len(digests)} contents have valid seals: silent divergence between replicas"))
            elif found.error is None:
                findings.append(say(OK))
            elif isinstance(found.error, StorageError):
                findings.append(say(UNREADABLE, _detail(found.error)))
            else:
                good = [(places[other], held[other].intact[0]) for other in held if other != number and held[other].intact]
                result = MISSING if found.is_absent else DAMAGED
                if is_repairing and (good or found.intact):
                    findings.append(say(REPAIRED, _repair(places[number], dir_name, found, good)))
                else:
                    findings.append(say(result, _detail(found.error)))
    return findings


def _look(place: Place, checkpoint: Checkpoint, part: str, advance: Advance) -> _Held:
    intact: list[Seal] = []
    bad: list[Seal] = []
    error: RideThroughError | None = None
    for seal in checkpoint.seals:
        if seal.part != part:
            continue
        try:
            check_part(place.fs, place.run_dir, checkpoint.dir_name, seal, progress=advance)
            intact.append(seal)
        except Damaged as found:
            # Once is not enough: a bad cable is not a bad disk.
            if is_surely_damaged(place.fs, place.run_dir, checkpoint.dir_name, seal):
                bad.append(seal)
                error = error or found
            else:
                error = error or StorageError(path=place.shown, detail=f"reads differ: {_detail(found)}")
        except (FormatTooNew, StorageError) as found:
            error = error or found
    for problem in checkpoint.problems:
        parsed = layout.parse_part_file(os.path.basename(problem.path))
        if parsed is not None and parsed.part == part:
            is_sure = _reads_the_same(place, problem.path)
            error = error or (problem.error if is_sure else StorageError(path=place.shown, detail=f"reads differ: {_detail(problem.error)}"))
    if not intact and error is None:
        return _Held((), (), Damaged(path=checkpoint.dir_name, detail=f"there is nothing of it in {place.shown}"), is_absent=True)
    return _Held(tuple(intact), tuple(bad), error)


def _reads_the_same(place: Place, name: str) -> bool:
    """Of a seal: of a payload that is missing or too short nothing need be read."""
    if not name.endswith(".seal"):
        return True
    try:
        first, second = (place.fs.read(place.path(name), max_bytes=record.MAX_BYTES, past_cache=True) for _ in range(2))
    except FileNotFoundError:
        return True
    return first == second


def _repair(place: Place, dir_name: str, found: _Held, good: Sequence[tuple[Place, Seal]]) -> str:
    """An intact copy is in the place; returns where it came from. What was damaged is set aside there, or removed where nothing can be renamed."""
    for seal in found.bad:
        if place.is_mounted:
            quarantine_part(place.fs, place.run_dir, dir_name, seal, reason="scrub: two reads past the cache found wrong bytes")
        else:
            # The seal first: it must not vouch for a payload that is gone.
            place.fs.remove(place.path(dir_name, layout.seal_name(seal.payload_name)))
            place.fs.remove(place.path(dir_name, seal.payload_name))
    if found.intact:
        return f"another copy of it in {place.shown} is intact"
    source, seal = good[0]
    copy_records(source, place)
    copy_part(source, place, dir_name, seal)
    return f"copied from {source.shown}"


def _detail(error: RideThroughError) -> str:
    return str(error.fields.get("detail") or error)

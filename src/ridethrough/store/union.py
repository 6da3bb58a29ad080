"""What several nodes have on disks of their own, seen as one place. Pure.

A checkpoint exists when every part of its roster has a seal on some node. Which node has which
copy is kept beside the catalog: a file is where it was found, whatever name its writer had.

What nodes tell each other are outlines: who has a copy of which part. Whoever needs the part reads
its seal again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridethrough.errors import TwoHeads
from ridethrough.format import layout
from ridethrough.format.attempt import Roster
from ridethrough.format.seal import Seal
from ridethrough.store import catalog as catalogs
from ridethrough.store.catalog import Catalog, Checkpoint, Problem
from ridethrough.types import AttemptRef, Parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Union:
    """The catalogs of several nodes in one."""

    catalog: Catalog
    holders: dict[str, dict[str, tuple[str, ...]]]
    """By directory of a checkpoint and name of a payload: the nodes that have it."""
    makers: dict[AttemptRef, tuple[str, ...]]
    """The nodes that know of an attempt."""


def outline(catalog: Catalog, outline_tree: Callable[[Any], Any]) -> Catalog:
    """The catalog without what grows with the state, and without rosters, of which all nodes have the same.

    Args:
        catalog: As it was read.
        outline_tree: What remains of the tree of a private part.
    """
    same = _Interned()

    def outlined(seal: Seal) -> Seal:
        tree = {} if seal.part == layout.REPLICATED else outline_tree(seal.tree)
        return dataclasses.replace(same.intern(seal), chunks=(), tensors=(), tree=tree, meta={})

    checkpoints = tuple(
        dataclasses.replace(checkpoint, roster=None, seals=tuple(outlined(seal) for seal in checkpoint.seals), meta={})
        for checkpoint in catalog.checkpoints
    )
    return dataclasses.replace(catalog, checkpoints=checkpoints, rosters={})


def merge(found: Mapping[str, Catalog]) -> Union:
    """One catalog from those of the nodes, all of the same run; nodes in the given order.

    Raises:
        ValueError: There is none, or they are of different runs: somebody should have looked before.
    """
    runs = {catalog.run.run_uid: catalog.run for catalog in found.values()}
    if len(runs) != 1:
        raise ValueError(f"catalogs of runs {sorted(runs)}")
    attempts: dict[AttemptRef, Parent | None] = {}
    makers: dict[AttemptRef, tuple[str, ...]] = {}
    rosters: dict[str, Roster] = {}
    by_dir: dict[str, list[tuple[str, Checkpoint]]] = {}
    problems: list[Problem] = []
    for node, catalog in found.items():
        for ref, parent in catalog.attempts:
            attempts.setdefault(ref, parent)
            makers[ref] = (*makers.get(ref, ()), node)
        rosters.update((digest, roster) for digest, roster in catalog.rosters.items() if digest not in rosters)
        for checkpoint in catalog.checkpoints:
            by_dir.setdefault(checkpoint.dir_name, []).append((node, checkpoint))
        problems.extend(_on(node, catalog.problems))
    checkpoints = [_join(copies, rosters) for copies in by_dir.values()]
    holders: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in by_dir}
    for name, copies in by_dir.items():
        for node, checkpoint in copies:
            for seal in checkpoint.seals:
                holders[name][seal.payload_name] = (*holders[name].get(seal.payload_name, ()), node)
    merged = Catalog(
        run=next(iter(runs.values())),
        attempts=tuple(sorted(attempts.items(), key=lambda item: (item[0].seq, item[0].nonce))),
        checkpoints=tuple(sorted(checkpoints, key=lambda c: (c.attempt.seq, c.step))),
        problems=tuple(problems),
        next_seq=max(catalog.next_seq for catalog in found.values()),
        rosters=rosters,
    )
    return Union(catalog=merged, holders=holders, makers=makers)


def _on(node: str, problems: tuple[Problem, ...]) -> list[Problem]:
    return [Problem(path=f"{node}:{problem.path}", error=problem.error) for problem in problems]


def _join(copies: list[tuple[str, Checkpoint]], rosters: Mapping[str, Roster]) -> Checkpoint:
    """The seals of one save id from all nodes: its parts may be spread over them."""
    sealed = [checkpoint for _, checkpoint in copies if checkpoint.seals]
    first = sealed[0] if sealed else copies[0][1]
    digest = first.seals[0].roster_digest if first.seals else ""
    seals: dict[str, Seal] = {}
    same = _Interned()
    for checkpoint in sealed:
        for seal in checkpoint.seals:
            # The directory's name has only the first digits of the save id.
            if seal.save_id == first.save_id and seal.roster_digest == digest:
                seals.setdefault(seal.payload_name, same.intern(seal))
    return dataclasses.replace(
        first,
        roster=rosters.get(digest),
        seals=tuple(seals.values()),
        problems=tuple(problem for node, checkpoint in copies for problem in _on(node, checkpoint.problems)),
        size_bytes=sum(checkpoint.size_bytes for _, checkpoint in copies),
    )


class _Interned:
    """Seals share in memory, and on their way to other ranks, the names that they have in common."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def intern(self, seal: Seal) -> Seal:
        names = ("run_uid", "attempt", "parent", "save_id", "part", "node", "roster_digest")
        return dataclasses.replace(seal, **{name: self._one(getattr(seal, name)) for name in names})

    def _one(self, value: Any) -> Any:
        return self._values.setdefault(value, value)


def candidates(union: Union) -> tuple[Checkpoint, ...]:
    """Checkpoints that are complete over all nodes and may be restored, the best first.

    Raises:
        TwoHeads: It cannot be said which attempt is the newest; names both and where they are.
    """
    try:
        return catalogs.candidates(union.catalog)
    except TwoHeads as error:
        where = {ref.label: ", ".join(nodes) for ref, nodes in union.makers.items()}
        first, second = (f"{label} (on {where[label]})" for label in (error.fields["first"], error.fields["second"]))
        raise TwoHeads(**{**error.fields, "first": first, "second": second}) from error

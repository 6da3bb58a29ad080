"""Which step is to become durable, and when it is. Pure: decided by the lead from what every node says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ridethrough.errors import SaveFailed
from ridethrough.snapshot.plan import first_save
from ridethrough.supervisor import policy
from ridethrough.supervisor.directive import Directive
from ridethrough.supervisor.view import NodeView

ReplicaNodes = Callable[[str], tuple[str, ...]]
"""The nodes that hold the private parts of a node."""
IsCovered = Callable[[Collection[str]], bool]
"""Every part has a node to write it while those nodes are dark."""


def complete_steps(living: Mapping[str, NodeView], dark: Collection[str], replica_nodes: ReplicaNodes, *, is_shared: bool) -> set[int]:
    """Steps of which the memory of the living nodes has every part, those of the dark nodes as replicas of whoever is to write them."""
    if not living:
        return set()
    found = set.intersection(*(set(view.posted) for view in living.values()))
    for owner in dark:
        found &= _held(owner, living, replica_nodes, is_shared=is_shared)
    return found


def _held(owner: str, living: Mapping[str, NodeView], replica_nodes: ReplicaNodes, *, is_shared: bool) -> set[int]:
    """Steps of a dark node that every node which is to write its parts has: on a shared tier that is the first holder alone."""
    holders = [holder for holder in replica_nodes(owner) if holder in living]
    writers = holders[:1] if is_shared else holders
    return set.intersection(*(set(living[holder].replicas.get(owner, ())) for holder in writers)) if writers else set()


def surviving_step(living: Mapping[str, NodeView], groups: Iterable[Collection[str]], replica_nodes: ReplicaNodes, *, is_shared: bool) -> int:
    """The newest step that memory would still have whole after losing any one of these groups of nodes; -1 if none.

    A lower bound: a step is counted only if all living nodes have it, though the lost ones need not.
    """
    if not living:
        return -1
    common = set.intersection(*(set(view.posted) for view in living.values()))
    worst: int | None = None
    for group in groups:
        left = set(common)
        rest = {n: v for n, v in living.items() if n not in group} if len(group) > 1 else living  # nobody holds a replica of its own
        for owner in group:
            left &= _held(owner, rest, replica_nodes, is_shared=is_shared)
        step = max(left, default=-1)
        worst = step if worst is None else min(worst, step)
    return -1 if worst is None else worst


class Whole(NamedTuple):
    """A save whose every part is sealed."""

    step: int
    is_verified: bool
    """All were read back."""
    dark: tuple[str, ...]
    """Nodes that have no share in it."""


def sealed_by_all(members: Collection[str], views: Mapping[str, NodeView], is_covered: IsCovered, *, least_step: int = -1) -> Whole | None:
    """The newest step whose every part is sealed; None if there is none.

    A save was made for one set of dark nodes: only nodes that mean the same set add up to a whole, and only if
    every part of the dark ones was somebody's to write.

    Args:
        members: Nodes of the launch.
        views: Of those that are heard.
        is_covered: Tells whether every part is somebody's to write without those nodes.
        least_step: Older ones are of no interest.
    """
    found: dict[tuple[int, tuple[str, ...]], dict[str, bool]] = {}
    for node, view in views.items():
        for s in view.sealed:
            if s.step >= least_step:
                found.setdefault((s.step, s.dark), {})[node] = s.is_verified
    best: Whole | None = None
    for (step, dark), sealed in sorted(found.items(), reverse=True):
        if best is not None and step < best.step:
            break
        without = frozenset(dark)
        writers = [node for node in members if node not in without]
        if writers and all(node in sealed for node in writers) and is_covered(dark):
            is_verified = all(sealed[node] for node in writers)
            if best is None or is_verified:
                best = Whole(step, is_verified, dark)
    return best


def divergence(members: Collection[str], views: Mapping[str, NodeView], step: int) -> tuple[str, tuple[str, ...]] | None:
    """A part that nodes hold differently at a step, and those that are outvoted, or all: silent divergence."""
    by_part: dict[str, dict[str, str]] = {}
    for node in members:
        for entry in views[node].sealed if node in views else ():
            if entry.step == step:
                for part, digest in entry.digests.items():
                    by_part.setdefault(part, {})[node] = digest
    for part, digests in by_part.items():
        (common, votes), *others = Counter(digests.values()).most_common()
        if others:
            is_clear = votes > others[0][1]
            return part, tuple(node for node, digest in digests.items() if not is_clear or digest != common)
    return None


def announce(
    directive: Directive,
    living: Mapping[str, NodeView],
    *,
    durable_step: int,
    save_interval_steps: int,
    restored_step: int,
    lead_s: float,
    is_whole: bool,
    dark: tuple[str, ...] = (),
) -> Directive:
    """The next save is announced when the previous one is confirmed or has failed; what every rank waits for, at once.

    Args:
        directive: The present word.
        living: Views of the nodes that make saves.
        durable_step: The newest durable step of this attempt, -1 if none.
        save_interval_steps: Steps between saves.
        restored_step: Where the attempt started.
        lead_s: How long it takes until every rank has heard.
        is_whole: No node of the launch is missing.
        dark: Nodes whose parts others are to write.
    """
    current = announced_step(directive, restored_step=restored_step, save_interval_steps=save_interval_steps)
    refusals = [v.refused for v in living.values() if v.refused is not None and v.refused.number >= directive.announcement]
    refused = next((r for r in refusals if r.step >= current), None)
    wanted = {v.wanted for v in living.values()}
    if is_whole and len(wanted) == 1 and None not in wanted:
        target = wanted.pop()
        assert target is not None
        asked_s = min(v.wanted_age_s for v in living.values())
        # A step that was refused before it was asked for (again) is announced anew.
        is_retry = refused is not None and refused.step == target and asked_s < refused.age_s
        if target > durable_step and (current != target or is_retry):
            return _say(directive, target, dark)
        return directive
    if durable_step >= current or refused is not None or is_refused(directive, current):
        newest = max(v.step for v in living.values())
        step_s = max(v.step_s_p99 for v in living.values())
        return _say(
            directive,
            policy.next_announcement(interval_steps=save_interval_steps, newest_step=newest, previous=current, step_s=step_s, lead_s=lead_s),
            dark,
        )
    return directive


def announced_step(directive: Directive, *, restored_step: int, save_interval_steps: int) -> int:
    """The step that is to become durable; the first one of an attempt needs no announcement."""
    return directive.announced if directive.announced is not None else first_save(restored_step, save_interval_steps)


def _say(directive: Directive, step: int, dark: tuple[str, ...]) -> Directive:
    return replace(directive, announced=step, announcement=directive.announcement + 1, dark=dark)


def refuse(directive: Directive, step: int, message: str) -> Directive:
    """The announced save will not be whole: whoever waits for it is told, and the next one can be announced."""
    return replace(directive, refused={"number": directive.announcement, "step": step, "code": SaveFailed.code, "message": message})


def has_answered(view: NodeView, step: int) -> bool:
    """The node has sealed or refused that save or a later one: its storage answers."""
    return any(s.step >= step for s in view.sealed) or (view.refused is not None and view.refused.step >= step)


def is_refused(directive: Directive, step: int) -> bool:
    """The announced save of that step, or of a later one, has failed."""
    refused = directive.refused
    return refused is not None and refused["number"] >= directive.announcement and refused["step"] >= step


def confirm(directive: Directive, members: Collection[str], living: Mapping[str, NodeView], is_covered: IsCovered) -> Directive:
    """The newest whole save is confirmed; from here on it is durable, and verified once all was read back."""
    before = directive.confirmed
    found = sealed_by_all(members, living, is_covered, least_step=before["step"] if before is not None else -1)
    if found is None or (before is not None and (found.step, found.is_verified) <= (before["step"], before["is_verified"])):
        return directive
    return replace(directive, confirmed={"step": found.step, "is_verified": found.is_verified, "dark": list(found.dark)})


def hear_refusal(directive: Directive, living: Mapping[str, NodeView]) -> Directive:
    """One node's failure is everybody's: a save with a part missing does not count, or counts no more."""
    for node, view in living.items():
        refused = view.refused
        if refused is None:
            continue
        is_revoked = _is_revoked(directive, node, view)
        if not is_revoked and refused.number < directive.announcement:
            continue
        before = directive.refused
        if not is_revoked and before is not None and (before["number"], before["step"]) == (refused.number, refused.step):
            return directive  # and others only repeat it
        said = {"number": refused.number, "step": refused.step, "code": refused.code, "message": f"{node}: {refused.message}"}
        return replace(directive, refused=said, confirmed=None if is_revoked else directive.confirmed)
    return directive


def _is_revoked(directive: Directive, node: str, view: NodeView) -> bool:
    """The node has sealed its share of the confirmed save and then read it back wrong: the next ones may be announced since."""
    confirmed, refused = directive.confirmed, view.refused
    if confirmed is None or refused is None or refused.step != confirmed["step"] or node in confirmed["dark"]:
        return False
    return all(sealed.step != refused.step for sealed in view.sealed)

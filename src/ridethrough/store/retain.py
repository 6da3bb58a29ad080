"""What may be deleted, decided purely, and the deletion itself."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from ridethrough.errors import ForeignRecord, FormatTooNew
from ridethrough.format import layout
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import Catalog, Checkpoint, lineage, on_lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What the user wants kept. The newest verified checkpoint is kept whatever stands here."""

    keep_last: int = 3
    keep_top: int = 0
    """Also keep this many with the best metric (`save_top_k`)."""
    mode: str = "min"
    """Whether a smaller ("min") or larger ("max") metric is better."""
    keep_every: int = 0
    """Also keep every complete one of the lineage whose step is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint as retention sees it."""

    dir_name: str
    step: int
    attempt_seq: int
    """0 where no usable seal says which attempt made it."""
    is_complete: bool
    is_verified: bool
    is_on_lineage: bool
    is_ours: bool = True
    """No file in it belongs to another run or to a newer version of this program."""
    metric: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Keep or remove, and why."""

    dir_name: str
    keep: bool
    reason: str


def anchor_of(found: tuple[Found, ...]) -> Found | None:
    """The newest checkpoint that is proven: it alone lets others go."""
    return max((f for f in found if f.is_on_lineage and f.is_complete and f.is_verified), key=lambda f: (f.attempt_seq, f.step), default=None)


def plan(found: tuple[Found, ...], policy: Retention, *, in_progress: str | None, resumed_from: str | None) -> tuple[Verdict, ...]:
    """A verdict for each checkpoint.

    Args:
        found: Everything on the tier that this node holds.
        policy: What the user wants.
        in_progress: Directory that is being written now.
        resumed_from: Directory this attempt came from.

    Invariant:
        A checkpoint goes only if a newer one of the same lineage is complete and verified, and
        never the newest verified one.
    """
    alive = [f for f in found if f.is_on_lineage and f.is_complete]
    anchor = anchor_of(found)
    newest = sorted(alive, key=lambda f: (f.attempt_seq, f.step), reverse=True)[: max(policy.keep_last, 1)]
    rated = sorted((f for f in alive if f.metric is not None), key=lambda f: f.metric or 0.0, reverse=policy.mode == "max")
    best = rated[: max(policy.keep_top, 0)]

    def verdict(f: Found) -> Verdict:
        def say(keep: bool, reason: str) -> Verdict:
            return Verdict(dir_name=f.dir_name, keep=keep, reason=reason)

        if f.dir_name == in_progress:
            return say(True, "is being written")
        if f.dir_name == resumed_from:
            return say(True, "this attempt resumed from it")
        if not f.is_ours:
            return say(True, "holds files of another run or of a newer version")
        if anchor is None:
            return say(True, "nothing on this lineage is verified yet")
        if f is anchor:
            return say(True, "newest verified")
        if f in newest:
            return say(True, f"one of the last {policy.keep_last}")
        if f in best:
            return say(True, f"one of the best {policy.keep_top}")
        if policy.keep_every > 0 and f.step % policy.keep_every == 0 and f.is_on_lineage and f.is_complete:
            return say(True, f"its step is a multiple of {policy.keep_every}")
        if (f.attempt_seq or anchor.attempt_seq, f.step) > (anchor.attempt_seq, anchor.step):
            return say(True, "newer than the newest verified")
        if not f.is_complete:
            return say(False, f"incomplete, and step {anchor.step} is verified")
        if not f.is_on_lineage:
            return say(False, f"abandoned branch, and step {anchor.step} of a later attempt is verified")
        return say(False, f"older than the last {policy.keep_last}, and step {anchor.step} is verified")

    return tuple(verdict(f) for f in found)


def survey(catalog: Catalog, *, verified: frozenset[str], monitor: str | None, own_node: str | None = None) -> tuple[Found, ...]:
    """The checkpoints of a catalog, as `plan` wants them.

    Args:
        catalog: What is on the tier.
        verified: Save ids that were read back intact; with several nodes, all parts on all of them.
        monitor: Name of the metric in `meta["metrics"]`.
        own_node: On a node-local tier the node whose disk it is; None if every part of a checkpoint is here.
    """
    chain = lineage(catalog.attempts)
    rows = []
    for c in catalog.checkpoints:
        metrics = c.meta.get("metrics")
        metric = metrics.get(monitor) if monitor and isinstance(metrics, dict) else None
        rows.append(
            Found(
                dir_name=c.dir_name,
                step=c.step,
                attempt_seq=c.attempt.seq,
                # What the lead has called verified is complete over all nodes; here it still is if our own parts are.
                is_complete=c.is_complete or (own_node is not None and c.save_id in verified and _has_own_parts(c, own_node)),
                is_verified=c.save_id in verified,
                is_on_lineage=on_lineage(c, chain),
                is_ours=not any(isinstance(p.error, (ForeignRecord, FormatTooNew)) for p in c.problems),
                # NaN is no rating: it would sort anywhere.
                metric=float(metric) if isinstance(metric, (int, float)) and math.isfinite(metric) else None,
            )
        )
    return tuple(rows)


def _has_own_parts(checkpoint: Checkpoint, node: str) -> bool:
    """The parts that this node's ranks held are here. By the roster of its own attempt: in a later one ranks may stand elsewhere."""
    if checkpoint.roster is None:
        return False
    own = {p.name for p in checkpoint.roster.parts if any(checkpoint.roster.nodes[rank] == node for rank in p.holders)}
    return own <= {seal.part for seal in checkpoint.seals}


def delete_checkpoint(fs: FileSystem, run_dir: str, dir_name: str) -> None:
    """The checkpoint is gone, and a cut at any instant leaves it whole or without a seal.

    The order is the reverse of the commit: were a payload removed before its seal is durably
    gone, a power cut would leave a seal that vouches for nothing.
    """
    directory = os.path.join(run_dir, dir_name)
    names = fs.list_dir(directory)
    seals = [n for n in names if n.endswith(".seal")]
    first = [n for n in names if n == layout.MANIFEST]
    for group in (first, seals, [n for n in names if n not in first and n not in seals]):
        for name in group:
            fs.remove(os.path.join(directory, name))
        # The next group must not disappear before this one has. Also where no seal is seen: whoever removed it may have been
        # killed before this, and a cut would bring it back.
        fs.sync_dir(directory)
    fs.remove(directory)
    fs.sync_dir(run_dir)

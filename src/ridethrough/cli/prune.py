"""`ridethrough prune`: checkpoints that need not stay are removed, each with its reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import click

from ridethrough.cli import output, overview, owner, target
from ridethrough.cli.output import Column, Styled
from ridethrough.cli.overview import Row
from ridethrough.errors import Damaged, RideThroughError, UsageError
from ridethrough.format import layout
from ridethrough.format.seal import save_id
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store import retain
from ridethrough.store.catalog import Catalog, Checkpoint, lineage
from ridethrough.store.retain import Found, Retention, Verdict
from ridethrough.store.start import require_newest
from ridethrough.store.verify import check_seal, intact_parts, verify_checkpoint

KEEP, REMOVE = "keep", "remove"
_STYLES = {KEEP: "green", REMOVE: "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to go and what stays."""

    catalog: Catalog
    rows: tuple[tuple[Row, Verdict], ...]
    """Every checkpoint, oldest first."""
    anchor: Checkpoint | None
    """The newest that is whole here and verified: it lets others go."""
    newest: Checkpoint | None
    """The newest that is whole here."""

    @property
    def going(self) -> tuple[Row, ...]:
        """What is to be removed."""
        return tuple(row for row, verdict in self.rows if not verdict.keep)


@click.command(
    epilog=output.help_end(
        ("ridethrough prune runs/exp001 --keep-last 2 --dry-run", "ridethrough prune runs/exp001 --keep-every 10000 --yes"),
        {0: "removed, or nothing had to go", 1: "nothing may go: what must stay is not verified, or damaged", 2: "usage",
         10: "no run there", 11: "a job owns the run: it prunes by itself", 13: "storage unreachable", 14: "storage full or read-only",
         21: "two attempts claim to be the newest"},
    )
)  # fmt: skip
@click.argument("run")
@click.option("--keep-last", metavar="N", type=click.IntRange(min=1), default=3, show_default=True, help="Keep the newest N.")
@click.option("--keep-best", metavar="N", type=click.IntRange(min=1), help="Also keep the N with the best metric.")
@click.option("--monitor", metavar="NAME", help="The metric that --keep-best compares, such as loss.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Which metric is the better one.")
@click.option("--keep-every", metavar="STEPS", type=click.IntRange(min=1), help="Also keep every one whose step is a multiple.")
@click.option("--verify", "does_verify", is_flag=True, help="If none is verified, read the newest back first and put that on record.")
@click.option("--dry-run", is_flag=True, help="Only show what would go. Changes nothing, works beside a running job.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@output.json_option
@output.verbosity_option
def command(
    run: str,
    keep_last: int,
    keep_best: int | None,
    monitor: str | None,
    mode: str,
    keep_every: int | None,
    does_verify: bool,
    dry_run: bool,
    yes: bool,
    is_json: bool,
) -> None:
    """Remove checkpoints that need not stay, each with its reason.

    One goes only if a newer one of the same lineage is complete in this
    directory, was verified, and is read back intact now. Whatever is asked, the
    newest verified one stays, and the one that the newest attempt resumed from.
    """
    if keep_best and not monitor:
        raise UsageError(detail="--keep-best needs --monitor NAME: the best by which metric?", hint="ridethrough prune --help")
    if dry_run and does_verify:
        raise UsageError(
            detail="--dry-run changes nothing, and --verify puts its result on record: give one of them", hint="ridethrough prune --help"
        )
    policy = Retention(keep_last=keep_last, keep_top=keep_best or 0, mode=mode, keep_every=keep_every or 0)
    fs = PosixFileSystem()
    wanted = target.find(fs, run, verb="prune")
    if not wanted.is_run:
        raise UsageError(
            detail="prune takes a run, not a checkpoint: what goes is decided over all of them", hint=_again(wanted, Retention(), None, "--dry-run")
        )
    if dry_run:
        decision = decide(fs, wanted, policy, monitor)
        _answer(wanted, decision, policy, monitor, is_json=is_json, is_dry_run=True)
        output.end(0 if decision.anchor or not decision.rows else 1)
    with owner.owning(wanted.run_dir, shown=wanted.shown):
        decision = decide(fs, wanted, policy, monitor)
        owner.require_marker(decision.catalog)
        if does_verify and decision.anchor is None and decision.newest is not None:
            _vouch(fs, wanted, decision.newest, "nothing was removed")
            # On record as what it is: from now on `ls` and the retention of the next job know it too.
            owner.record(fs, SystemClock(), wanted, "prune").append("checkpoint.verified", step=decision.newest.step, save_id=decision.newest.save_id)
            decision = decide(fs, wanted, policy, monitor)
        if not is_json:
            _print(wanted, decision, policy, monitor)
        if decision.going:
            if not yes:
                _ask(decision, _again(wanted, policy, monitor, "--yes"), is_json=is_json)
            remove(fs, wanted, decision)
        if is_json:
            _answer(wanted, decision, policy, monitor, is_json=True, is_dry_run=False)
        elif decision.going:
            output.note(f"removed {output.count(len(decision.going), 'checkpoint')}, {output.human_bytes(_bytes(decision.going))}")
    output.end(0 if decision.anchor or not decision.rows else 1)


def decide(fs: FileSystem, wanted: target.Target, policy: Retention, monitor: str | None) -> Decision:
    """A verdict for each checkpoint, from what is in this directory and what the journals call verified.

    Raises:
        TwoHeads: Nobody can say which attempt is the newest; then nothing may go.
    """
    catalog = target.load(fs, wanted)
    proofs = overview.read_proofs(fs, wanted.run_dir)
    # As everywhere else in the store: raised and not shown as a row, for no verdict can be given.
    chain = lineage(catalog.attempts)
    view = overview.survey(catalog, proofs, run_dir=wanted.shown, now_at=SystemClock().now_at())
    verified = frozenset(c.save_id for c in catalog.checkpoints if c.save_id and proofs.of(c)[1])
    # `own_node` is left out on purpose. On disks of several nodes' own a persister may go by what all nodes have just read back;
    # here only this disk can be read, so only what is whole on it may vouch.
    found = retain.survey(catalog, verified=verified, monitor=monitor)
    if policy.keep_top and found and all(f.metric is None for f in found):
        # A name with a typing error must not cost the best ones.
        known = sorted({str(name) for c in catalog.checkpoints for name in _metrics(c)})
        said = f"there are {output.listed(known)}" if known else "none has any"
        raise UsageError(detail=f"no checkpoint has a metric {monitor!r}: {said}", hint=f"ridethrough show {output.quote(wanted.shown)}")
    resumed = None
    parent = dict(catalog.attempts)[chain[0][0]] if chain else None
    if parent is not None:
        resumed = layout.step_dir(parent.step, save_id(catalog.run.run_uid, parent.attempt.nonce, parent.step))
    verdicts = {v.dir_name: v for v in retain.plan(found, policy, in_progress=None, resumed_from=resumed)}
    whole = [f for f in found if f.is_complete and f.is_on_lineage]
    return Decision(
        catalog=catalog,
        rows=tuple((row, verdicts[row.checkpoint.dir_name]) for row in view.rows),
        anchor=_checkpoint_of(catalog, retain.anchor_of(found)),
        newest=_checkpoint_of(catalog, max(whole, key=lambda f: (f.attempt_seq, f.step), default=None)),
    )


def _metrics(checkpoint: Checkpoint) -> dict[str, Any]:
    found = checkpoint.meta.get("metrics")
    return found if isinstance(found, dict) else {}


def _checkpoint_of(catalog: Catalog, found: Found | None) -> Checkpoint | None:
    return next((c for c in catalog.checkpoints if found is not None and c.dir_name == found.dir_name), None)


def remove(fs: FileSystem, wanted: target.Target, decision: Decision) -> None:
    """What was decided to go is gone, each removal on record before its bytes went.

    Raises:
        Damaged: The checkpoint that lets the others go does not read back; nothing was removed.
        Fenced: A newer attempt has begun meanwhile; it decides from now on.
    """
    assert decision.anchor is not None, "nothing goes without one"
    _vouch(fs, wanted, decision.anchor, "nothing was removed")
    head = lineage(decision.catalog.attempts)[0][0]
    book = owner.record(fs, SystemClock(), wanted, "prune")
    reasons = {row.checkpoint.dir_name: verdict.reason for row, verdict in decision.rows}
    for row in decision.going:
        # A job on another node may have started since, and resume from what we are about to remove.
        require_newest(fs, wanted.run_dir, head)
        name = row.checkpoint.dir_name
        book.append("checkpoint.removed", dir_name=name, reason=reasons[name])
        retain.delete_checkpoint(fs, wanted.run_dir, name)


def _vouch(fs: FileSystem, wanted: target.Target, checkpoint: Checkpoint, consequence: str) -> None:
    """Every part of the checkpoint has a copy that reads back intact now, past the page cache, seal included."""
    total = sum(seal.payload_bytes for seal in checkpoint.seals)
    with output.progress(f"reading step {checkpoint.step}, which must stay", total) as advance:
        results = verify_checkpoint(fs, wanted.run_dir, checkpoint, progress=advance)
    errors: list[RideThroughError] = [result.error for result in results if result.error is not None]
    intact: set[str] = set()
    for result in results:
        try:
            check_seal(fs, wanted.run_dir, checkpoint.dir_name, result.seal)
            intact |= intact_parts((result,))
        except Damaged as error:
            errors.append(error)
    assert checkpoint.roster is not None
    if not checkpoint.roster.part_names <= intact:
        raise Damaged(
            path=f"{wanted.shown}/{checkpoint.dir_name}",
            detail=f"it was to let older ones go, and does not read back ({errors[0]}); {consequence}",
            hint=f"ridethrough verify {output.quote(wanted.shown)}",
        )


def _ask(decision: Decision, again: str, *, is_json: bool) -> None:
    what = f"{output.count(len(decision.going), 'checkpoint')}, {output.human_bytes(_bytes(decision.going))}"
    if is_json or not sys.stdin.isatty():
        raise UsageError(detail=f"would remove {what}: give --yes where nobody can be asked", hint=again)
    if not click.confirm(f"remove {what}?", err=True):
        raise click.Abort


def _again(wanted: target.Target, policy: Retention, monitor: str | None, option: str) -> str:
    """The same command with one more option, ready to paste."""
    words = ["ridethrough prune", output.quote(wanted.shown)]
    if policy.keep_last != Retention().keep_last:
        words.append(f"--keep-last {policy.keep_last}")
    if policy.keep_top and monitor is not None:
        words.append(f"--keep-best {policy.keep_top} --monitor {output.quote_word(monitor)} --mode {policy.mode}")
    if policy.keep_every:
        words.append(f"--keep-every {policy.keep_every}")
    return " ".join([*words, option])


def _bytes(rows: tuple[Row, ...]) -> int:
    return sum(row.checkpoint.size_bytes for row in rows)


def _answer(wanted: target.Target, decision: Decision, policy: Retention, monitor: str | None, *, is_json: bool, is_dry_run: bool) -> None:
    if not is_json:
        _print(wanted, decision, policy, monitor)
        if decision.going:
            output.note(f"dry run: {output.count(len(decision.going), 'checkpoint')}, {output.human_bytes(_bytes(decision.going))} would go")
        return
    payload: dict[str, Any] = {
        "run": overview.run_as_json(decision.catalog, wanted.run_dir),
        "is_dry_run": is_dry_run,
        "policy": {
            "keep_last": policy.keep_last,
            "keep_best": policy.keep_top,
            "monitor": monitor,
            "mode": policy.mode,
            "keep_every": policy.keep_every or None,
        },
        "vouching": decision.anchor.dir_name if decision.anchor else None,
        "checkpoints": [
            {**row.as_json(), "verdict": KEEP if verdict.keep else REMOVE, "reason": verdict.reason} for row, verdict in decision.rows
        ],
        "removed_count": 0 if is_dry_run else len(decision.going),
        "removed_bytes": 0 if is_dry_run else _bytes(decision.going),
    }  # fmt: skip
    output.emit("ridethrough.prune", payload, now_at=SystemClock().now_at())


def _print(wanted: target.Target, decision: Decision, policy: Retention, monitor: str | None) -> None:
    columns = (Column("STEP", is_right=True), Column("ATTEMPT", is_right=True), Column("STATE"), Column("SIZE", is_right=True), Column("VERDICT"))
    if decision.rows:
        output.table((*columns, Column("REASON", folds=True)), [_cells(row, verdict) for row, verdict in decision.rows])
    else:
        output.note("the run has no checkpoint yet")
    if decision.rows and decision.anchor is None:
        output.note(f"nothing may go: {_why_not(decision)}")
        if decision.newest is not None:
            output.note(f"hint: {_again(wanted, policy, monitor, '--verify')}   (reads step {decision.newest.step} back, on record)")
    elif not decision.going:
        output.note("nothing has to go")


def _why_not(decision: Decision) -> str:
    if decision.newest is not None:
        return "no complete checkpoint of the lineage was verified, as far as the journals in this directory say"
    nodes = {node for row, _ in decision.rows if row.checkpoint.roster for node in row.checkpoint.roster.nodes}
    if len(nodes) > 1:
        return f"no checkpoint is whole in this directory; with a disk on each of {len(nodes)} nodes only the job itself can prune, as it saves"
    return "no checkpoint of the lineage is complete"


def _cells(row: Row, verdict: Verdict) -> tuple[output.Cell, ...]:
    word = KEEP if verdict.keep else REMOVE
    return (
        str(row.checkpoint.step),
        str(row.made_by.seq) if row.made_by else "?",
        row.word,
        output.human_bytes(row.checkpoint.size_bytes),
        Styled(text=word, style=_STYLES[word]),
        verdict.reason,
    )

"""`ridethrough show --explain`: what made a checkpoint, beside what would resume it from here."""

from __future__ import annotations

import os
from typing import Any

from ridethrough import config as configuration
from ridethrough.cli import output
from ridethrough.cli.output import Column, Styled
from ridethrough.store.catalog import Checkpoint
from ridethrough.train import guard, provenance
from ridethrough.train.guard import Action, Finding, Verdict

_OUTSIDE = ("code", "torch", "dependencies")
"""What can be known without the training script: where this command is given, and in which environment."""
_AT_START = "told at the start"
_STYLES = {Verdict.SAME: "green", Verdict.DIFFERS: "yellow", Verdict.UNKNOWN: ""}


def findings(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Every item that a start compares, as far as it can be known here.

    Raises:
        UsageError: The configuration is wrong.
    """
    saved = guard.facts(checkpoint.meta, world_size=checkpoint.roster.world_size if checkpoint.roster else None)
    directory = os.getcwd()
    commit, is_dirty = provenance.git_state(directory)
    here = {
        "git_commit": commit,
        "git_dirty": is_dirty,
        "git_diff": provenance.git_diff(directory) if is_dirty else None,
        "dependencies": provenance.installed(item or field for field, item in saved if field in ("torch", "dependencies")),
    }
    policies = configuration.load(None, os.environ, {}).resume
    return guard.compare(saved, guard.facts(here, world_size=None), policies)


def as_json(found: tuple[Finding, ...]) -> list[dict[str, Any]]:
    """One object an item; `action` is null where only the start will know."""
    return [{**f.as_json(), "policy": f.policy, "action": f.action.value if f.field in _OUTSIDE else None} for f in found]


def show(found: tuple[Finding, ...]) -> None:
    """The table, and what a start from here would say as far as that is known."""
    columns = (Column("FIELD"), Column("ITEM"), Column("CHECKPOINT", folds=True), Column("HERE", folds=True), Column("VERDICT"), Column("POLICY"))
    output.table(columns, [_cells(finding) for finding in found])
    known = [finding for finding in found if finding.field in _OUTSIDE]
    for action, word in ((Action.REFUSE, "refuse"), (Action.WARN, "warn of")):
        named = [finding.label for finding in known if finding.action is action]
        if named:
            output.note(f"a start from here would {word}: {', '.join(named)}")
    output.note("HERE is this directory and this environment; what only the training script tells is compared when it starts")


def _cells(finding: Finding) -> tuple[output.Cell, ...]:
    saved, here = finding.shown
    unknown = output.UNKNOWN if finding.field in _OUTSIDE else _AT_START
    verdict = Styled(text=finding.verdict.value, style=_STYLES[finding.verdict])
    return finding.field, finding.item, saved or output.UNKNOWN, here or unknown, verdict, finding.policy

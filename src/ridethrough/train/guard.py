"""Whether what would go on from a checkpoint is what made it: field by field, with what the site wants done about each.

Pure, and without torch: the start agreement asks it, and so does `ridethrough show --explain`.

Unknown is never equal. It is never a reason to refuse either: what is not known on one side is warned of, and what is
known on neither (no git, no `data_version`) is no news.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from ridethrough.config import ResumeConfig
from ridethrough.errors import ResumeRefused

FIELDS = tuple(field.name for field in fields(ResumeConfig))
"""What is compared, in the order in which it is shown."""
Facts = Mapping[tuple[str, str], str | None]
"""By field and item (a package, a loader; empty for a field of one value): what is known of one side, None if unknown."""

_LABELS = {
    ("code", "commit"): "commit",
    ("code", "tree"): "work tree",
    ("config", ""): "config hash",
    ("data", ""): "data version",
    ("torch", ""): "torch",
    ("command", ""): "start command",
    ("world_size", ""): "world size",
}
_SHOWN_CHARS = 40
_BEFORE_CHARS = 12
"""Of what both sides have in common, as much as tells where they part."""
_HASH = re.compile(r"[0-9a-f]{32,}")
_HASH_CHARS = 12


class Verdict(StrEnum):
    """What the comparison of one item came to."""

    SAME = "same"
    DIFFERS = "differs"
    UNKNOWN = "unknown"
    """On one side or on both."""


class Action(StrEnum):
    """What a start does about one item."""

    NOTHING = "nothing"
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One item on both sides."""

    field: str
    item: str
    saved: str | None
    here: str | None
    policy: str

    @property
    def verdict(self) -> Verdict:
        """Unknown is never equal, not even to unknown."""
        if self.saved is None or self.here is None:
            return Verdict.UNKNOWN
        return Verdict.SAME if self.saved == self.here else Verdict.DIFFERS

    @property
    def action(self) -> Action:
        """Only a difference that is known is refused; what nobody knew before either is no news."""
        if self.policy == "ignore" or self.verdict is Verdict.SAME or self.saved == self.here:
            return Action.NOTHING
        return Action.REFUSE if self.policy == "refuse" and self.verdict is Verdict.DIFFERS else Action.WARN

    @property
    def label(self) -> str:
        """The item in a person's words."""
        return _LABELS.get((self.field, self.item)) or (f"batch size of {self.item}" if self.field == "batch_size" else self.item)

    @property
    def shown(self) -> tuple[str | None, str | None]:
        """Both values short enough for a line, cut so that the first difference can be seen."""
        saved, here = self.saved, self.here
        if saved is None or here is None or saved == here:
            return _cut(_abbreviated(saved), 0), _cut(_abbreviated(here), 0)
        if _abbreviated(saved) != _abbreviated(here):
            saved, here = str(_abbreviated(saved)), str(_abbreviated(here))
        common = next((at for at, (a, b) in enumerate(zip(saved, here, strict=False)) if a != b), min(len(saved), len(here)))
        begin = max(common - _BEFORE_CHARS, 0) if max(len(saved), len(here)) > _SHOWN_CHARS else 0
        return _cut(saved, begin), _cut(here, begin)

    def __str__(self) -> str:
        saved, here = self.shown
        return f"{self.label} {saved or 'unknown'} -> {here or 'unknown'}"

    def as_json(self) -> dict[str, Any]:
        """For machines; a field of one value has no item."""
        return {"field": self.field, "item": self.item or None, "checkpoint": self.saved, "here": self.here, "verdict": self.verdict.value}


def _abbreviated(value: str | None) -> str | None:
    return None if value is None else _HASH.sub(lambda found: found.group()[:_HASH_CHARS], value)


def _cut(value: str | None, begin: int) -> str | None:
    if value is None:
        return None
    end = begin + _SHOWN_CHARS
    return f"{'...' if begin else ''}{value[begin:end]}{'...' if len(value) > end else ''}"


def facts(meta: Mapping[str, Any], *, world_size: int | None) -> Facts:
    """What a provenance (the `meta` of a seal, or of this process) says; whatever is not of the right type is unknown."""
    versions, batches = _table(meta.get("dependencies")), _table(meta.get("batch_size"))
    return {
        ("code", "commit"): _text(meta.get("git_commit")),
        ("code", "tree"): _tree(meta),
        ("config", ""): _text(meta.get("config_hash")),
        ("data", ""): _text(meta.get("data_version")),
        ("torch", ""): _text(versions.get("torch")),
        **{("dependencies", name): _text(version) for name, version in versions.items() if name != "torch"},
        ("command", ""): _text(meta.get("start_command")),
        ("world_size", ""): _text(world_size),
        **{("batch_size", name): _text(size) for name, size in batches.items()},
    }


def _table(value: Any) -> dict[str, Any]:
    return {str(name): value[name] for name in sorted(value, key=str)} if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = shlex.join(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return value if isinstance(value, str) and value else None


def _tree(meta: Mapping[str, Any]) -> str | None:
    """The work tree against its commit; with changes of which no digest was made, nobody knows."""
    if meta.get("git_dirty") is False:
        return "clean"
    digest = _text(meta.get("git_diff"))
    return f"changed {digest}" if meta.get("git_dirty") is True and digest else None


def compare(saved: Facts, here: Facts, policies: ResumeConfig) -> tuple[Finding, ...]:
    """Every item of either side, once, in the order of `FIELDS`."""
    keys = sorted(dict.fromkeys([*saved, *here]), key=lambda key: FIELDS.index(key[0]))
    return tuple(
        Finding(field=field, item=item, saved=saved.get((field, item)), here=here.get((field, item)), policy=getattr(policies, field))
        for field, item in keys
    )


def admit(findings: Iterable[Finding], *, path: str, step: int) -> tuple[Finding, ...]:
    """What is to be warned of.

    Args:
        findings: Of the checkpoint that a start would go on from.
        path: Its run.
        step: Its step.

    Raises:
        ResumeRefused: Something is different of which the site wants that the run is not resumed; names all of it.
    """
    found = tuple(findings)
    refused = [finding for finding in found if finding.action is Action.REFUSE]
    if refused:
        names = dict.fromkeys(finding.field for finding in refused)
        allow = " ".join(f"RIDETHROUGH_RESUME_{name.upper()}=warn" for name in names)
        raise ResumeRefused(path=path, step=step, detail="; ".join(map(str, refused)), allow=allow)
    return tuple(finding for finding in found if finding.action is Action.WARN)


def notice(findings: Iterable[Finding]) -> dict[str, Any]:
    """What the journal is told of a resume with warnings, values shortened; nothing if there are none."""
    found = tuple(findings)
    rows = [{**finding.as_json(), **dict(zip(("checkpoint", "here"), finding.shown, strict=True))} for finding in found]
    return {"detail": "; ".join(map(str, found)), "differences": rows} if found else {}

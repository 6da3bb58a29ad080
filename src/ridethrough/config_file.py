"""What may stand in a configuration, and whether something does so rightly.

The only module that imports pydantic; imported when there is something to check, and only by `config`.
Nothing here knows defaults: what is not given is left out, and `config` has the values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ridethrough.config_rules import bandwidth_bytes_per_s

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = "units are s, m and h"
_MOST_PORT = 65535
_MOST_SHOWN = 4
"""More mistakes at once than anybody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, and what to write instead: a value for that key, or a hint of another kind."""

    key: str
    text: str
    value: str | None = None
    """As TOML."""
    hint: str = ""


class _Wrong(ValueError):
    def __init__(self, text: str, *, value: str | None = None, hint: str = "") -> None:
        super().__init__(text)
        self.text, self.value, self.hint = text, value, hint


def duration_s(value: object) -> float:
    """Seconds of a duration with its unit: `"30s"`, `"1.5s"`, `"10m"`, `"2h"`.

    Raises:
        ValueError: It is not one. A bare number is refused: nobody can see what it counts.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", value)
        if found:
            return float(found.group(1)) * _UNITS_S[found.group(2)]
        number = re.match(r"\d+(?:\.\d+)?", value)
        raise _Wrong(f"{value!r} is not a duration", value=f'"{number.group() if number else "30"}s"', hint=_DURATION)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise _Wrong(f"{value} has no unit", value=f'"{value}s"', hint=_DURATION)
    raise _Wrong(f"{value!r} is not a duration", value='"30s"', hint=_DURATION)


def _text(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise _Wrong("it is empty", hint="leave the key out if nothing is meant")
    return value


def bytes_per_s(value: object) -> float:
    """Bytes per second of a bandwidth with its unit: `"500kB/s"`, `"50MB/s"`, `"1GB/s"`.

    Raises:
        ValueError: It is not one.
    """
    found = bandwidth_bytes_per_s(value) if isinstance(value, str) else None
    if found is None:
        raise _Wrong(f"{value!r} is not a bandwidth", value='"50MB/s"', hint="units are kB/s, MB/s and GB/s")
    return found


Bandwidth = Annotated[float, BeforeValidator(bytes_per_s)]
Duration = Annotated[float, BeforeValidator(duration_s)]
Text = Annotated[str, BeforeValidator(_text)]
"""TOML has no null: None marks a key that was not given, and such keys are left out of the answer."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NodeKeys(_Section):
    """`[nodes.NAME]`: one machine that may take part; the order in the file is the order of the nodes."""

    address: Text | None = Field(None, description="where the other nodes reach it: address or host name. Default: its name")
    domain: Text | None = Field(None, description="what loses power together with it: a rack, a PDU. Default: its name, a domain of its own")


class PeersKeys(_Section):
    """`[peers]`: how the nodes hear of each other."""

    port: int | None = Field(
        None,
        ge=0,
        le=_MOST_PORT,
        description="UDP (heartbeats) and TCP (private parts), open between the nodes. Default 29577; without `[nodes]` 0: any free one, told at the "
        "start agreement",
    )
    interface: Text | None = Field(None, description="name or address of the interface to use. Default: the one with the route to the other nodes")
    key_file: Text | None = Field(
        None,
        description="the nodes' common secret, readable by its owner only (also RIDETHROUGH_KEY_FILE). "
        "Default: `key` in the run directory, if that is declared as shared; nodes with disks of their own need it",
    )
    suspect: Duration | None = Field(
        None, description='silence after which a node is suspected: memory is made durable, nothing is stopped. Default "1.5s"'
    )
    dead: Duration | None = Field(None, description='silence after which it is given up, if no rank makes a step meanwhile. Default "15s"')


class RecoveryKeys(_Section):
    """`[recovery]`: what to do when the power is back."""

    paths: list[Text] | None = Field(
        None, description="what every node must reach before its workers start; the run directory always. Default: nothing else"
    )
    start_order: list[Literal["storage", "network", "rendezvous", "workers"]] | None = Field(
        None, description='gates in the order in which they must open. Default `["storage", "network", "rendezvous", "workers"]`'
    )
    wait_for_nodes: Duration | None = Field(
        None, description='how long to wait for missing nodes: longer than a machine takes to boot. Default "10m"'
    )
    then: Literal["shrink", "stop"] | None = Field(
        None, description='and then: `"shrink"` to the nodes that are ready (needs a shared run directory) or `"stop"` for a person. Default "stop"'
    )
    min_nodes: int | None = Field(None, ge=1, description="the fewest nodes to shrink to. Default 1")
    resume: Literal["continue", "roll-back"] | None = Field(
        None,
        description='`"continue"` from the newest step, in any surviving memory or on storage, or `"roll-back"` to the newest verified checkpoint. '
        'Default "continue"',
    )
    rendezvous_port: int | None = Field(
        None,
        ge=1,
        le=_MOST_PORT - 7,  # all eight must exist
        description="torchrun's port on the rendezvous host; launches take the eight from there in turn, as the last may still be held. "
        "Default 29500",
    )


Policy = Literal["ignore", "warn", "refuse"]


class ResumeKeys(_Section):
    """`[resume]`: what a start does where its checkpoint was made by something else."""

    code: Policy | None = Field(None, description='another git commit, or other uncommitted changes. Default "warn"')
    config: Policy | None = Field(None, description='another `Checkpointer(config=…)`. Default "warn"')
    data: Policy | None = Field(None, description='another `Checkpointer(data_version=…)`. Default "refuse"')
    torch: Policy | None = Field(None, description='another version of torch. Default "warn"')
    dependencies: Policy | None = Field(None, description='another version of Python or of another library that was loaded. Default "warn"')
    command: Policy | None = Field(None, description='another command line of the training process. Default "warn"')
    world_size: Policy | None = Field(None, description='another number of ranks. Default "warn"')
    batch_size: Policy | None = Field(None, description='another batch size of a tracked loader. Default "warn"')


class TierKeys(_Section):
    """`[tiers.NAME]`: another place, into which every verified checkpoint is copied in the background."""

    place: Text = Field(
        description="a run directory there: a path that every node reaches by the same name, `file:///PATH`, `s3://…`, `rsync://…` or `ssh://…`"
    )
    domain: Text | None = Field(None, description="what loses power together with it. Default: its name, a domain of its own")
    bandwidth: Bandwidth | None = Field(None, description='the most that copying takes, of each node: `"50MB/s"`. Default: no bound')
    keep_last: int | None = Field(None, ge=1, description="how many of the newest are kept there. Default 3")
    keep_every: int | None = Field(None, ge=1, description="and every one whose step is a multiple of this. Default: none")


class StorageFactsKeys(_Section):
    """`[storage_facts."PATH"]`: what the one who runs the storage below a path says about it, in free text."""

    replicas: Text | None = Field(None, description="how many copies or which erasure code it keeps, on what. Default: unknown")
    repair: Text | None = Field(None, description="how long it takes until it is whole again after a cut. Default: unknown")
    concurrent_writes: Text | None = Field(None, description="what it promises to several nodes that write at once. Default: unknown")
    one_node_dark: Text | None = Field(None, description="whether it can be written without one of its own nodes. Default: unknown")


class FileKeys(_Section):
    """The top of the file."""

    run: Text | None = Field(
        None,
        description="the run directory: where the step is recorded; needed with several nodes. Default: learnt from the script's `Checkpointer`",
    )
    storage: Literal["detect", "shared", "node-local"] | None = Field(
        None,
        description="whether every node sees the same run directory; what is declared and found otherwise is refused. "
        'Default "detect": found out at the start',
    )
    nodes: dict[str, NodeKeys] | None = Field(None, description="the nodes that may take part, in start order. Default: this one alone")
    tiers: dict[str, TierKeys] | None = Field(None, description="other places for copies. Default: none")
    peers: PeersKeys | None = None
    recovery: RecoveryKeys | None = None
    resume: ResumeKeys | None = None
    storage_facts: dict[str, StorageFactsKeys] | None = Field(
        None, description="by path, what `ridethrough storage check` reports as configured. Default: nothing is known"
    )


SECTIONS: dict[str, type[BaseModel]] = {
    "": FileKeys,
    "nodes.NAME": NodeKeys,
    "tiers.NAME": TierKeys,
    "peers": PeersKeys,
    "recovery": RecoveryKeys,
    "resume": ResumeKeys,
    "storage_facts.PATH": StorageFactsKeys,
}
_NAMED = {"nodes": "nodes.NAME", "tiers": "tiers.NAME", "storage_facts": "storage_facts.PATH"}
"""Tables of tables, each with a name of the user's."""
LISTS = {"recovery.paths", "recovery.start_order"}
NUMBERS = {"peers.port", "recovery.min_nodes", "recovery.rendezvous_port"}


def scalar_keys() -> tuple[str, ...]:
    """Every key that has one value, by its dotted name: what an environment variable may set."""
    names = [name for name in FileKeys.model_fields if name not in (*_NAMED, *SECTIONS)]
    for section in ("peers", "recovery", "resume"):
        names += [f"{section}.{name}" for name in SECTIONS[section].model_fields]
    return tuple(names)


def from_text(key: str, text: str) -> Any:
    """The value that a text from the environment stands for; one that is none is left to `check`."""
    if key in LISTS:
        return [item.strip() for item in text.split(",") if item.strip()]
    if key in NUMBERS and re.fullmatch(r"\d{1,9}", text):
        return int(text)
    return text


def check(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """The values that were given, durations in seconds; or everything that is wrong with them."""
    try:
        found = FileKeys.model_validate(dict(raw))
    except ValidationError as error:
        # What is missing comes last: as a rule it stands there under another name.
        errors = sorted(error.errors(), key=lambda e: e["type"] == "missing")
        return {}, tuple(_problem(e["type"], e["loc"], e.get("input"), e.get("ctx") or {}, e["msg"]) for e in errors)[:_MOST_SHOWN]
    return found.model_dump(exclude_unset=True), ()


_KINDS = {
    "string_type": "a text in quotes",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}
_EXAMPLES = {"peers.port": "29577", "recovery.min_nodes": "1", "recovery.rendezvous_port": "29500"}


def _problem(kind: str, loc: Sequence[str | int], value: Any, context: Mapping[str, Any], message: str) -> Problem:
    key = ".".join(str(step) for step in loc)
    wrong = context.get("error")
    if isinstance(wrong, _Wrong):
        return Problem(key=key, text=f"{key}: {wrong.text}", value=wrong.value, hint=wrong.hint)
    if kind == "extra_forbidden":
        return _unknown(key, loc, value)
    if kind == "missing":
        return Problem(key=key, text=f"{key} is missing", hint=f"write {loc[-1]} = … in [{'.'.join(map(str, loc[:-1]))}]")
    if kind == "literal_error":
        words = re.findall(r"'([^']+)'", str(context.get("expected", "")))
        near = difflib.get_close_matches(str(value), words, n=1)
        quoted = [f'"{word}"' for word in near or words]
        listed = ", ".join(f'"{word}"' for word in words)
        return Problem(key=key, text=f"{key} is {value!r}; it must be one of {listed}", value=" or ".join(quoted))
    if kind in _KINDS:
        text = f"{key} is {value!r}; it must be {_KINDS[kind]}"
        if kind in ("dict_type", "model_type"):
            table = _NAMED.get(str(loc[0]), key)
            return Problem(key=key, text=text, hint=f"write a table: [{table}] on a line of its own")
        example = {"string_type": f'"{value}"', "list_type": f'["{value}"]'}.get(kind) or _EXAMPLES.get(key)
        return Problem(key=key, text=text, value=example)
    limits = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le")}
    if kind in limits:
        word, limit = limits[kind]
        return Problem(key=key, text=f"{key} is {value}; it must be {word} {context[limit]}", value=_EXAMPLES.get(key))
    return Problem(key=key, text=f"{key}: {message}", hint="see docs/recovery.md")


def _unknown(key: str, loc: Sequence[str | int], value: Any) -> Problem:
    """A key that nobody knows: the nearest one, or the table it would belong to."""
    name = str(loc[-1])
    place = _place(loc[:-1])
    if place in ("nodes.NAME", "tiers.NAME") and isinstance(value, Mapping):
        # TOML reads [nodes.n0.example.com] as tables within tables.
        full = ".".join([*map(str, loc[1:]), *_only_tables(value)])
        kind = place.partition(".")[0].removesuffix("s")
        return Problem(key=key, text=f"{key} is a table within a {kind}: a {kind}'s name with dots needs quotes", hint=f'write [{kind}s."{full}"]')
    known = list(SECTIONS[place].model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    elsewhere = [f"[{s}] {k}" for s, model in SECTIONS.items() for k in model.model_fields if k == name and s not in ("", place)]
    where = "at the top" if not place else f"in [{place}]"
    if near:
        hint = f"did you mean {near[0]}?"
    elif elsewhere:
        hint = f"it belongs to {elsewhere[0]}"
    else:
        hint = f"keys {where}: {', '.join(known)}"
    return Problem(key=key, text=f"{key}: there is no such key", hint=hint)


def _place(loc: Sequence[str | int]) -> str:
    if not loc:
        return ""
    return _NAMED.get(str(loc[0]), str(loc[0]))


def _only_tables(value: Mapping[str, Any]) -> list[str]:
    names = []
    while len(value) == 1:
        name, inner = next(iter(value.items()))
        if not isinstance(inner, Mapping):
            break
        names.append(str(name))
        value = inner
    return names

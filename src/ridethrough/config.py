"""`ridethrough.toml`: what a site decides once, for all nodes of a run.

Precedence: flag, then environment (`RIDETHROUGH_*`), then file, then default; every value remembers where it came
from. What is wrong is refused with its place and with what to write. Without any configuration `Config()` holds.

The core gets the frozen values below. `config_file` (and with it pydantic) is imported only when there is something
to check.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from ridethrough import config_rules
from ridethrough.config_rules import GATES, listed
from ridethrough.errors import UsageError

if TYPE_CHECKING:
    from ridethrough.config_file import Problem

FILE = "ridethrough.toml"
_PROJECT_FILE = "pyproject.toml"
_PEER_PORT = 29577
"""Beside torchrun's 29500 and outside the range that systems hand out by themselves (32768 and up)."""
_VARIABLE = "RIDETHROUGH_"
_ALIASES = {"RIDETHROUGH_KEY_FILE": "peers.key_file"}
_PATHS = ("run", "peers.key_file", "recovery.paths")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One machine that may take part."""

    name: str
    address: str
    """Where the others reach it: an address or a host name."""
    domain: str
    """What loses power together with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Another place, into which verified checkpoints are copied."""

    name: str
    place: str
    domain: str
    """What loses power together with it."""
    bandwidth_bytes_per_s: float | None = None
    keep_last: int = 3
    keep_every: int = 0
    """0: none for their step alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersConfig:
    """How nodes hear of each other."""

    port: int = 0
    """UDP and TCP; 0 is any free one."""
    interface: str | None = None
    key_file: str | None = None
    suspect_s: float = 1.5
    """With the time until a peer has noticed, under the 2 s in which a silent node must be suspected."""
    dead_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """What to do when the power is back."""

    paths: tuple[str, ...] = ()
    start_order: tuple[str, ...] = GATES
    wait_for_nodes_s: float = 600.0
    """Servers with much memory take five minutes and more to boot."""
    then: str = "stop"
    """Shrinking changes the batch and the pace of a run: nobody gets it without asking."""
    min_nodes: int = 1
    resume: str = "continue"
    rendezvous_port: int = 29500
    """torchrun's own default."""


QUESTIONS = ("replicas", "repair", "concurrent_writes", "one_node_dark")
"""What only who runs a storage system can say about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    """What a person knows of the storage below a path, in free text; None: nothing."""

    path: str
    replicas: str | None = None
    repair: str | None = None
    concurrent_writes: str | None = None
    one_node_dark: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """What a start does where its checkpoint was made by something else: `ignore`, `warn` or `refuse`, by field.

    Only other data makes the resumed run surely another run. The rest changes for good reasons as well (a bug is mended, a
    shrunk job adapts its batch), and a refusal in the middle of the night would cost more than a warning.
    """

    code: str = "warn"
    config: str = "warn"
    data: str = "refuse"
    torch: str = "warn"
    dependencies: str = "warn"
    command: str = "warn"
    world_size: str = "warn"
    batch_size: str = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that was decided, and where."""

    run: str | None = None
    """The run directory; None: learnt from the script."""
    storage: str = "detect"
    nodes: tuple[NodeConfig, ...] = ()
    """In start order; empty: this node alone."""
    tiers: tuple[TierConfig, ...] = ()
    peers: PeersConfig = PeersConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    resume: ResumeConfig = ResumeConfig()
    storage_facts: tuple[StorageFacts, ...] = ()
    file: str | None = None
    """Where it was read from."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """By dotted key, for what is not a default: `flag --run`, `env RIDETHROUGH_PEERS_PORT`, `file ridethrough.toml`."""

    def origin(self, key: str) -> str:
        """Where the value of a key such as `peers.port` came from."""
        return self.origins.get(key, "default")

    @property
    def has_gates(self) -> bool:
        """A start waits for what it needs. One node with nothing more to reach than its run directory does not: it says what is missing, and ends."""
        return len(self.nodes) > 1 or bool(self.recovery.paths)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the configured nodes, in start order."""
        return tuple(node.name for node in self.nodes)

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each configured node."""
        return {node.name: node.address for node in self.nodes}

    @property
    def domains(self) -> dict[str, str]:
        """Power domain of each configured node."""
        return {node.name: node.domain for node in self.nodes}

    def facts_of(self, path: str) -> StorageFacts | None:
        """What is known of the storage that holds an absolute path: of the deepest one that is described."""
        above = [told for told in self.storage_facts if path == told.path or path.startswith(f"{told.path.rstrip('/')}/")]
        return max(above, key=lambda told: len(told.path), default=None)

    def require_node(self, name: str) -> NodeConfig:
        """The node of that name; without configured nodes every name is right.

        Raises:
            UsageError: Nodes are configured and it is not among them.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        if not self.nodes:
            return NodeConfig(name=name, address=name, domain=name)
        table = f'"{name}"' if "." in name else name
        raise UsageError(
            detail=f"{self.file}: this node is called {name} and [nodes] has only {listed(self.order)}",
            hint=f"write [nodes.{table}], or set RIDETHROUGH_NODE to the name that it has there",
        )

    def require_common_key(self) -> None:
        """The nodes will find the same key before their ranks could tell it.

        Raises:
            UsageError: Each would make one of its own.
        """
        if len(self.nodes) > 1 and self.storage != "shared" and self.peers.key_file is None:
            raise UsageError(
                detail=f"{self.file}: the nodes need one key to find each other, and no run directory is declared as shared to hold it",
                hint='put the same file (openssl rand -hex 32, mode 600) on every node and write peers.key_file; or storage = "shared" if it is',
            )

    def as_facts(self) -> dict[str, Any]:
        """As JSON."""
        # A row a node and not a table: a thousand of them must fit in a keeper's answer.
        return {
            **asdict(self),
            "nodes": [[node.name, node.address, node.domain] for node in self.nodes],
            "tiers": [asdict(t) for t in self.tiers],
            "origins": dict(self.origins),
        }

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> Config:
        """From JSON."""
        recovery = facts["recovery"]
        return Config(
            run=facts["run"],
            storage=facts["storage"],
            nodes=tuple(NodeConfig(name=name, address=address, domain=domain) for name, address, domain in facts["nodes"]),
            tiers=tuple(TierConfig(**tier) for tier in facts["tiers"]),
            peers=PeersConfig(**facts["peers"]),
            recovery=RecoveryConfig(**{**recovery, "paths": tuple(recovery["paths"]), "start_order": tuple(recovery["start_order"])}),
            resume=ResumeConfig(**facts["resume"]),
            storage_facts=tuple(StorageFacts(**told) for told in facts["storage_facts"]),
            file=facts["file"],
            origins=dict(facts["origins"]),
        )


_SECTIONS: dict[str, type[PeersConfig | RecoveryConfig | ResumeConfig]] = {"peers": PeersConfig, "recovery": RecoveryConfig, "resume": ResumeConfig}
"""Tables whose keys have one value each."""


def keys() -> tuple[str, ...]:
    """Every key that has one value, as the file names it: what an environment variable may set."""
    return ("run", "storage", *(f"{section}.{f.name.removesuffix('_s')}" for section, kind in _SECTIONS.items() for f in fields(kind)))


def load(path: str | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The configuration of this command.

    Args:
        path: File given by `--config`; otherwise `RIDETHROUGH_CONFIG`, `ridethrough.toml` here, or `[tool.ridethrough]`
            of `pyproject.toml` here.
        environ: Environment variables.
        flags: By dotted key, what the command line says and has checked; None for a flag that was not given.

    Raises:
        UsageError: Something in it is wrong; names the file or variable, the key, and what to write.
    """
    file, raw = _find(path, environ)
    texts = _from_environment(environ)
    origins = {key: f"file {file}" for key in _given(raw)} | {key: f"env {name}" for key, (name, _) in texts.items()}
    values = _checked(raw, texts, origins, file)
    for key, value in flags.items():
        if value is not None:
            _put(values, key, value)
            origins[key] = f"flag --{key.rpartition('.')[2].replace('_', '-')}"
    _make_absolute(values, file, origins)
    config = _build(values, file, origins)
    config_rules.check(config, lambda key: _where(key, config.origins, config.file))
    return config


# -- reading -------------------------------------------------------------------------------------------------------------


def _find(path: str | None, environ: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """The file and what stands in it; None where there is none."""
    asked = path or environ.get("RIDETHROUGH_CONFIG")
    if asked:
        by = "--config" if path else "RIDETHROUGH_CONFIG"
        found = _read(asked)
        if found is None:
            raise UsageError(detail=f"there is no file {asked} ({by})", hint="ridethrough plan recovery   (shows how to write one)")
        if os.path.basename(asked) != _PROJECT_FILE:
            return asked, found
        ours = _project_table(found)
        if ours is None:
            raise UsageError(
                detail=f"{asked} has no table [tool.ridethrough] ({by})", hint="write [tool.ridethrough] there, or give a ridethrough.toml"
            )
        return asked, ours
    found = _read(FILE)
    if found is not None:
        return FILE, found
    ours = _project_table(_read(_PROJECT_FILE) or {})
    return (_PROJECT_FILE, ours) if ours is not None else (None, {})


def _project_table(project: Mapping[str, Any]) -> dict[str, Any] | None:
    tool = project.get("tool")
    ours = tool.get("ridethrough") if isinstance(tool, dict) else None
    return ours if isinstance(ours, dict) else None


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(detail=f"{path} cannot be read: {error.strerror}", hint=f"ls -ld {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(detail=f"{path} is not TOML: {error}", hint='texts need quotes: dead = "15s"') from error


def _given(raw: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in raw.items():
        found += [f"{key}.{name}" for name in value] if key in _SECTIONS and isinstance(value, dict) else [key]
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """By key: the variable that sets it, and its text. An empty one sets nothing."""
    known = {_VARIABLE + key.replace(".", "_").upper(): key for key in keys()} | _ALIASES
    found: dict[str, tuple[str, str]] = {}
    for name, text in environ.items():
        if name in known and text:
            earlier = found.get(known[name])
            if earlier is not None and earlier[1] != text:
                raise UsageError(detail=f"{earlier[0]} and {name} both set {known[name]}, differently", hint=f"unset {name}")
            found[known[name]] = (name, text)
        elif name.startswith(tuple(f"{_VARIABLE}{section.upper()}_" for section in _SECTIONS)) and name not in known:
            import difflib  # noqa: PLC0415  only a mistake needs it

            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(detail=f"{name}: there is no such variable", hint=f"did you mean {near[0]}?" if near else "see docs/recovery.md")
    return found


def _checked(raw: Mapping[str, Any], texts: Mapping[str, tuple[str, str]], origins: Mapping[str, str], file: str | None) -> dict[str, Any]:
    if not raw and not texts:
        return {}
    from ridethrough import config_file  # noqa: PLC0415  pydantic takes a quarter of a second to import

    merged: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for key, (_, text) in texts.items():
        _put(merged, key, config_file.from_text(key, text))
    values, problems = config_file.check(merged)
    if problems:
        _refuse_all(problems, origins, file)
    return values


def _refuse_all(problems: tuple[Problem, ...], origins: Mapping[str, str], file: str | None) -> NoReturn:
    first, *others = problems
    place = _where(first.key, origins, file)
    more = f" (also wrong: {'; '.join(problem.text for problem in others)})" if others else ""
    hint = first.hint
    if first.value is not None:
        name = first.key.rpartition(".")[2]
        is_item = name.isdigit()
        # In the environment a value stands without the quotes of TOML.
        assignment = f"{place}={first.value.replace(chr(34), '')}" if place.startswith(_VARIABLE) else f"{name} = {first.value}"
        hint = f"write {first.value if is_item else assignment}" + (f" ({hint})" if hint else "")
    raise UsageError(detail=f"{place}: {first.text}{more}", hint=hint)


def _where(key: str, origins: Mapping[str, str], file: str | None) -> str:
    """The file or variable that a value stands in."""
    origin = origins.get(key) or origins.get(".".join(key.split(".")[:2])) or f"file {file}"
    return origin.partition(" ")[2]


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    if section and not isinstance(values.get(section), dict):
        values[section] = {}
    (values[section] if section else values)[name] = value


def _make_absolute(values: dict[str, Any], file: str | None, origins: Mapping[str, str]) -> None:
    """What the file says is meant from the file's directory, what was typed from this one: every node may start elsewhere."""
    for key in _PATHS:
        section, _, name = key.rpartition(".")
        place = values.get(section, {}) if section else values
        if name in place:
            is_in_file = origins[key].startswith("file ")
            root = os.path.dirname(os.path.abspath(file)) if file and is_in_file else os.getcwd()
            found = place[name]
            place[name] = [_absolute(root, p) for p in found] if isinstance(found, list) else _absolute(root, found)
    for name, tier in (values.get("tiers") or {}).items():
        if "://" not in tier["place"]:
            root = os.path.dirname(os.path.abspath(file)) if file else os.getcwd()
            values["tiers"][name] = {**tier, "place": _absolute(root, tier["place"])}
    if file and "storage_facts" in values:
        values["storage_facts"] = {_absolute(os.path.dirname(os.path.abspath(file)), path): told for path, told in values["storage_facts"].items()}


def _absolute(root: str, path: str) -> str:
    return os.path.normpath(os.path.join(root, os.path.expanduser(path)))


# -- building and checking as a whole --------------------------------------------------------------------------------------


def _build(values: Mapping[str, Any], file: str | None, origins: Mapping[str, str]) -> Config:
    nodes = tuple(
        NodeConfig(name=name, address=given.get("address", name), domain=given.get("domain", name)) for name, given in values.get("nodes", {}).items()
    )
    peers = {_with_unit(PeersConfig, name): value for name, value in values.get("peers", {}).items()}
    if nodes:
        peers.setdefault("port", _PEER_PORT)
    recovery: dict[str, Any] = {_with_unit(RecoveryConfig, name): value for name, value in values.get("recovery", {}).items()}
    for name in ("paths", "start_order"):
        if name in recovery:
            recovery[name] = tuple(recovery[name])
    tiers = tuple(_tier(name, given) for name, given in values.get("tiers", {}).items())
    top = {name: values[name] for name in ("run", "storage") if name in values}
    return Config(
        **top,
        nodes=nodes,
        tiers=tiers,
        peers=PeersConfig(**peers),
        recovery=RecoveryConfig(**recovery),
        resume=ResumeConfig(**values.get("resume", {})),
        storage_facts=tuple(StorageFacts(path=path, **told) for path, told in values.get("storage_facts", {}).items()),
        file=file,
        origins=dict(origins),
    )


def _tier(name: str, given: Mapping[str, Any]) -> TierConfig:
    renamed = {"bandwidth_bytes_per_s" if key == "bandwidth" else key: value for key, value in given.items()}
    return TierConfig(**{"name": name, "domain": name, **renamed})


def _with_unit(kind: type[PeersConfig | RecoveryConfig], name: str) -> str:
    """The field of a key: a duration has its unit in the value there, in the name here."""
    return f"{name}_s" if f"{name}_s" in {f.name for f in fields(kind)} else name

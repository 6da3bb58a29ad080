"""From the objects a script tracks to the parts of a checkpoint, and back.

Which part a tensor goes to: parameters and optimizer state of a DDP model are held identically by
every rank and go to the part `replicated`; everything else (buffers, random generators, loader
position, and all of a model that is not wrapped in DDP) goes to the rank's private part.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ridethrough.errors import Damaged, RideThroughError, StateMismatch, UsageError
from ridethrough.format import layout, part, record, tree
from ridethrough.format.seal import Seal
from ridethrough.format.tensors import Gatherer, is_same, spec_of, view_tensor
from ridethrough.snapshot.post import PartState
from ridethrough.train import data, rng
from ridethrough.types import Presence, StateClass


@dataclass(slots=True)
class Tracked:
    """One object of the script, under the name it was tracked with."""

    name: str
    value: Any
    kind: StateClass
    is_replicated: bool = False
    position: data.Position | None = None


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP and torch.compile, so that names do not depend on the wrapping."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def classify(name: str, value: Any, *, world_size: int, seed: int) -> Tracked:
    """What an object is, by its type; loaders become resumable here.

    Raises:
        UsageError: It has no state_dict and load_state_dict.
    """
    if isinstance(value, torch.nn.Module):
        return Tracked(name=name, value=value, kind=StateClass.MODEL, is_replicated=world_size == 1 or isinstance(value, DistributedDataParallel))
    if isinstance(value, DataLoader) and not hasattr(value, "load_state_dict"):
        return Tracked(name=name, value=value, kind=StateClass.DATA, position=data.make_resumable(value, seed=seed))
    if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
        raise UsageError(detail=f"track({name}=…): {type(value).__name__} has no state_dict() and load_state_dict()")
    if isinstance(value, torch.optim.Optimizer):
        return Tracked(name=name, value=value, kind=StateClass.OPTIMIZER)
    if isinstance(value, torch.amp.GradScaler):
        return Tracked(name=name, value=value, kind=StateClass.OPTIMIZER)
    if isinstance(value, LRScheduler):
        return Tracked(name=name, value=value, kind=StateClass.SCHEDULER)
    if isinstance(value, DataLoader) or name in ("data", "sampler", "loader"):
        return Tracked(name=name, value=value, kind=StateClass.DATA)
    return Tracked(name=name, value=value, kind=StateClass.METRICS)


def mark_replicated(tracked: Iterable[Tracked], *, world_size: int) -> None:
    """Optimizers all of whose parameters belong to replicated models are replicated too."""
    items = list(tracked)
    shared = {id(p) for t in items if t.kind is StateClass.MODEL and t.is_replicated for p in t.value.parameters()}
    for item in items:
        if isinstance(item.value, torch.optim.Optimizer):
            mine = [p for group in item.value.param_groups for p in group["params"]]
            item.is_replicated = world_size == 1 or (bool(mine) and all(id(p) in shared for p in mine))


def structure(tracked: Iterable[Tracked]) -> dict[str, str]:
    """A digest of each model's shape and of the order in which an optimizer holds its parameters.

    An optimizer's state is keyed by position: with the same parameters in another order it would
    load without complaint into the wrong ones.
    """
    items = list(tracked)
    names: dict[int, str] = {}
    found = {}
    for item in items:
        if item.kind is StateClass.MODEL:
            module = unwrap(item.value)
            rows = []
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), f"{item.name}.{name}")
                rows.append([name, list(parameter.shape), str(parameter.dtype)])
            found[item.name] = record.digest([[n, type(m).__qualname__] for n, m in module.named_modules()] + rows)
    for item in items:
        if isinstance(item.value, torch.optim.Optimizer):
            order = [[names.get(id(p), f"{tuple(p.shape)}") for p in group["params"]] for group in item.value.param_groups]
            found[item.name] = record.digest([type(item.value).__qualname__, order])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a rank adds of its own to its private part."""

    rank: int
    local_rank: int
    world_size: int
    node: str
    step: int
    epoch: int
    loss: float | None
    metrics: Mapping[str, float]
    config_hash: str | None
    start_command: str
    structure: Mapping[str, str]


def capture(tracked: Iterable[Tracked], context: Context) -> tuple[PartState, ...]:
    """Every part this rank holds, at a step boundary. Draws no random numbers; copies nothing yet.

    Raises:
        StateNotExpressible: Names the path of a value that has no place.
    """
    items = list(tracked)
    replicated, private = Gatherer(), Gatherer()
    shared_tree: dict[str, Any] = {}
    own_tree: dict[str, Any] = {}
    for item in items:
        state = _state_of(item)
        if item.kind is StateClass.MODEL:
            parameters = {name for name, _ in unwrap(item.value).named_parameters(remove_duplicate=False)}
            shared = {k: v for k, v in state.items() if k in parameters} if item.is_replicated else {}
            own = {k: v for k, v in state.items() if k not in shared}
            if item.is_replicated:
                shared_tree[item.name] = replicated.encode(shared, item.name)
            own_tree[item.name] = private.encode(own, item.name)
        elif item.is_replicated:
            shared_tree[item.name] = replicated.encode(state, item.name)
        else:
            own_tree[item.name] = private.encode(state, item.name)
    own = {
        "objects": own_tree,
        "rng": private.encode(rng.capture(), "rng"),
        "context": {
            "rank": context.rank,
            "local_rank": context.local_rank,
            "world_size": context.world_size,
            "node": context.node,
            "mesh": [context.world_size],
        },
        "progress": private.encode(
            {"step": context.step, "epoch": context.epoch, "loss": context.loss, "metrics": dict(context.metrics)}, "progress"
        ),
        "command": {"start_command": context.start_command, "config_hash": context.config_hash},
        "structure": dict(context.structure),
        "module_versions": {t.name: private.encode(_versions(t.value), t.name) for t in items if t.kind is StateClass.MODEL},
    }
    parts = [_finish(layout.rank_part(context.rank), own, private)]
    if shared_tree:
        parts.insert(0, _finish(layout.REPLICATED, {"objects": shared_tree}, replicated))
    return tuple(parts)


def _state_of(item: Tracked) -> Any:
    if item.kind is StateClass.MODEL:
        return unwrap(item.value).state_dict()
    if item.position is not None:
        state = item.position.state_dict()
        stream = data.stream_state(item.value)
        if stream is not None:
            state["dataset"] = stream.state_dict()
        return state
    return item.value.state_dict()


def _versions(model: torch.nn.Module) -> dict[str, Any]:
    """The format version of each module, as its state_dict carries it beside the tensors."""
    return {name: dict(facts) for name, facts in getattr(unwrap(model).state_dict(), "_metadata", {}).items()}


def _finish(name: str, root: Any, gatherer: Gatherer) -> PartState:
    specs = tuple(spec_of(tensor_name, tensor) for tensor_name, tensor in gatherer.tensors.items())
    return PartState(name=name, tree=root, tensors=gatherer.tensors, layout=_lay_out(specs))


@functools.lru_cache(maxsize=16)
def _lay_out(specs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> part.PartLayout:
    """The layout changes only when the state's shape does, not at every snapshot."""
    return part.lay_out(specs)


def classes(tracked: Iterable[Tracked], *, config_hash: str | None, world_size: int) -> dict[str, dict[str, str]]:
    """For each of the six classes whether it is present, missing or unprotectable, and what it consists of."""
    items = list(tracked)

    def of(kind: StateClass) -> list[str]:
        return [f"{t.name} ({type(t.value).__name__.removeprefix('Resumable')})" for t in items if t.kind is kind]

    def say(presence: Presence, detail: str) -> dict[str, str]:
        return {"presence": presence.value, "detail": detail}

    rows: dict[str, dict[str, str]] = {}
    for kind, hint in (
        (StateClass.MODEL, "track(model=…)"),
        (StateClass.OPTIMIZER, "track(optimizer=…)"),
        (StateClass.SCHEDULER, "track(scheduler=…) if the learning rate changes"),
        (StateClass.DATA, "track(data=loader)"),
    ):
        names = of(kind)
        rows[kind.value] = say(Presence.PRESENT, ", ".join(names)) if names else say(Presence.MISSING, hint)
    for item in items:
        if item.kind is StateClass.DATA:
            presence, detail = data.presence_of(item.value)
            if presence is not Presence.PRESENT:
                rows[StateClass.DATA.value] = say(presence, f"{item.name}: {detail}")
    rebuilds = any(isinstance(t.value, DistributedDataParallel) and world_size > 2 and not t.value.find_unused_parameters for t in items)
    # DDP orders its buckets anew after its first iteration, and with 3 ranks or more the order decides how sums are rounded.
    note = "; DDP over 3 or more ranks: the first step after a resume may round sums differently" if rebuilds else ""
    rows[StateClass.DISTRIBUTED.value] = say(Presence.PRESENT, f"rank, world size, node{note}")
    config = "config hash" if config_hash else "config hash unknown: Checkpointer(config=…)"
    metrics = ["random generators", "command line", config, *of(StateClass.METRICS)]
    rows[StateClass.METRICS.value] = say(Presence.PRESENT, ", ".join(metrics))
    return rows


def batch_sizes(tracked: Iterable[Tracked]) -> dict[str, int | None]:
    """Samples a batch of each tracked loader, on one rank; None where it does not say."""
    found: dict[str, int | None] = {}
    for item in tracked:
        if item.kind is StateClass.DATA:
            said = (getattr(holder, "batch_size", None) for holder in (item.value, getattr(item.value, "batch_sampler", None)))
            found[item.name] = next((size for size in said if isinstance(size, int)), None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """A proven payload in memory and the seal that vouches for it."""

    seal: Seal
    payload: bytearray


def decode(loaded: LoadedPart) -> Any:
    """The tree of a part with its tensors in place (they share the payload's memory).

    Raises:
        Damaged: The tree makes no sense.
    """
    specs, base = part.parse_header(loaded.payload, path=loaded.seal.payload_name)
    by_name = {spec.name: spec for spec in specs}

    def tensor(name: str) -> torch.Tensor:
        return view_tensor(loaded.payload, base, by_name[name])

    found = tree.decode(loaded.seal.tree, tensor, path=loaded.seal.payload_name)
    if not isinstance(found, dict):
        raise Damaged(path=loaded.seal.payload_name, detail="its tree is not an object")
    return found


def join(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The state of every object: what all ranks hold in common, and the private tree of one of them."""
    saved = dict(common)
    for name, state in own["objects"].items():
        saved[name] = {**saved[name], **state} if name in saved else state
    for name, versions in own["module_versions"].items():
        # Modules read the version of their own format from here; without it an old rule could be applied to new state.
        saved[name] = collections.OrderedDict(saved[name])
        saved[name]._metadata = collections.OrderedDict(versions)
    return saved


def apply(tracked: Iterable[Tracked], parts: Iterable[LoadedPart], *, rank: int, world_size: int, seals: Iterable[Seal] = ()) -> dict[str, Any]:
    """Every tracked object has the state of the checkpoint, proven bit for bit; returns the private tree that this rank goes on from.

    Of another number of ranks, rank r takes what they held in common and the private part of rank r
    modulo their number: schedulers, buffers, metrics and other objects of ranks that are no more are
    left behind. What is left of an epoch is dealt anew (`data.take_over`).
    The random generators are not set here: that is the last thing before training goes on.

    Args:
        tracked: What the script tracks.
        parts: This rank's, loaded.
        rank: This rank.
        world_size: Ranks now.
        seals: All of the checkpoint; where the number of ranks has changed they say where every other rank was.

    Raises:
        StateMismatch: An object is missing, does not take the state as it was saved, or cannot be taken over by other ranks.
    """
    items = list(tracked)
    trees = {loaded.seal.part: decode(loaded) for loaded in parts}
    own = next(found for name, found in trees.items() if name != layout.REPLICATED)
    context = own["context"]
    is_moved = context["world_size"] != world_size
    if context["rank"] != rank % context["world_size"]:
        raise StateMismatch(name="the job", detail=f"rank {context['rank']} of {context['world_size']} there, rank {rank} of {world_size} here")
    common = trees.get(layout.REPLICATED, {}).get("objects", {})
    saved = join(common, own)
    here = structure(items)
    for item in items:
        if item.name not in saved:
            raise StateMismatch(name=item.name, detail="it was not tracked when this checkpoint was made")
        was = own["structure"].get(item.name)
        if was is not None and was != here.get(item.name):
            raise StateMismatch(name=item.name, detail="its structure has changed (modules, shapes or order of parameters)")
        if is_moved:
            _require_common(item, common, context["world_size"], world_size)
    untracked = sorted(set(saved) - {item.name for item in items})
    if untracked:
        raise StateMismatch(name=", ".join(untracked), detail="in the checkpoint but not tracked here: its state would be lost")
    for item in items:
        if is_moved and item.position is not None:
            _take_over(item, saved[item.name], seals, keeps_seed=rank >= context["world_size"])
        else:
            _load(item, saved[item.name])
    _prove([item for item in items if item.position is None or not is_moved], saved)
    return own  # type: ignore[no-any-return]


def _require_common(item: Tracked, common: Mapping[str, Any], saved_world_size: int, world_size: int) -> None:
    """A model that was each rank's own would be lost with its rank, and a new rank would have none."""
    is_own_model = item.kind is StateClass.MODEL and any(True for _ in unwrap(item.value).parameters())
    if item.name not in common and (is_own_model or isinstance(item.value, torch.optim.Optimizer)):
        raise StateMismatch(
            name=item.name, detail=f"each of {saved_world_size} ranks had its own, not under DDP: {world_size} ranks cannot go on from them"
        )
    if item.kind is StateClass.DATA and item.position is None:
        raise StateMismatch(name=item.name, detail=f"{type(item.value).__name__} says by itself where each of {saved_world_size} ranks was")


def _take_over(item: Tracked, state: Any, seals: Iterable[Seal], *, keeps_seed: bool) -> None:
    assert item.position is not None
    places = [{**seal.tree["objects"].get(item.name, {}), "seed": 0} for seal in seals if seal.part != layout.REPLICATED]
    if "dealt" in state and any(place != places[0] for place in places):
        raise StateMismatch(name=item.name, detail="the ranks were at different places of the epoch: what is left of it is not known")
    why = data.take_over(item.value, item.position, state, keeps_seed=keeps_seed)
    if why is not None:
        raise StateMismatch(name=item.name, detail=why)


def _load(item: Tracked, state: Any) -> None:
    try:
        if item.kind is StateClass.MODEL:
            unwrap(item.value).load_state_dict(state, strict=True)
        elif item.position is not None:
            item.position.load_state_dict(state)
            if "dataset" in state:
                item.value.dataset.load_state_dict(state["dataset"])
        else:
            item.value.load_state_dict(state)
    except RideThroughError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise StateMismatch(name=item.name, detail=f"{type(error).__name__}: {error}"[:500]) from error


def _prove(items: list[Tracked], saved: Mapping[str, Any]) -> None:
    """What was loaded is what is live now: an optimizer that casts its state, say, is found here and not in the loss."""
    for item in items:
        # A state_dict of the user's own may differ at every call (a time in it, say): it proves nothing.
        if item.position is None and item.kind not in (StateClass.MODEL, StateClass.OPTIMIZER, StateClass.SCHEDULER):
            continue
        before, after = Gatherer(), Gatherer()
        live = _state_of(item)
        if item.position is not None:
            # A checkpoint of an earlier version says less of a position.
            live = {name: live[name] for name in saved[item.name] if name in live}
        # As plain dicts: a module's state_dict is an OrderedDict whose order is that of its modules.
        old, new = (g.encode(dict(found), item.name) for g, found in ((before, saved[item.name]), (after, live)))
        for name, tensor in before.tensors.items():
            if name not in after.tensors or not is_same(tensor, after.tensors[name]):
                raise StateMismatch(name=item.name, detail=f"{name} is not what was saved after load_state_dict()")
        if record.canonical(old) != record.canonical(new):
            raise StateMismatch(name=item.name, detail=f"{_first_difference(old, new, item.name)} is not what was saved after load_state_dict()")


def _first_difference(old: Any, new: Any, path: str) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            if record.canonical(old.get(key)) != record.canonical(new.get(key)):
                return _first_difference(old.get(key), new.get(key), f"{path}/{key}")
    return path

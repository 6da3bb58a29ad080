"""From captured parts to loaded ones, without a disk in between."""

from __future__ import annotations

from typing import Any

from lab import as_json

from ridethrough.format.seal import Seal
from ridethrough.format.tensors import view_tensor
from ridethrough.snapshot.post import PartState
from ridethrough.train import state
from ridethrough.types import AttemptRef

CONTEXT = state.Context(
    rank=0, local_rank=0, world_size=1, node="node-0", step=7, epoch=1, loss=0.5, metrics={}, config_hash=None, start_command="", structure={}
)


class Holder:
    """Anything with a state."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.value = found["value"]


def classify(objects: dict[str, Any]) -> list[state.Tracked]:
    tracked = [state.classify(name, value, world_size=1, seed=1) for name, value in objects.items()]
    state.mark_replicated(tracked, world_size=1)
    return tracked


def capture(objects: dict[str, Any]) -> tuple[PartState, ...]:
    tracked = classify(objects)
    context = state.Context(**{name: getattr(CONTEXT, name) for name in state.Context.__slots__} | {"structure": state.structure(tracked)})
    return state.capture(tracked, context)


def load(parts: tuple[PartState, ...]) -> list[state.LoadedPart]:
    """As if each part had been written, sealed and read."""
    loaded = []
    for part in parts:
        payload = bytearray(part.layout.size_bytes)
        payload[: len(part.layout.header)] = part.layout.header
        for spec in part.layout.tensors:
            view_tensor(payload, len(part.layout.header), spec).copy_(part.tensors[spec.name])
        seal = Seal(
            run_uid="u",
            attempt=AttemptRef(seq=1, nonce="n"),
            parent=None,
            step=7,
            save_id="s",
            part=part.name,
            node="node-0",
            roster_digest="d",
            payload_name=f"{part.name}.safetensors",
            payload_bytes=len(payload),
            chunk_bytes=1 << 24,
            chunks=(),
            tensors=part.layout.tensors,
            tree=as_json(part.tree),
            meta={},
        )
        loaded.append(state.LoadedPart(seal=seal, payload=payload))
    return loaded


def restore(saved: dict[str, Any], fresh: dict[str, Any], *, world_size: int = 1, rank: int = 0) -> dict[str, Any]:
    """The state of `saved` goes to `fresh` the way a checkpoint does."""
    return state.apply(classify(fresh), load(capture(saved)), rank=rank, world_size=world_size)

"""A checkpoint as state dicts, in files that torch itself reads: `torch.load` and `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ridethrough.errors import Damaged
from ridethrough.format import layout
from ridethrough.seam.fs import FileSystem, Writer
from ridethrough.store import export
from ridethrough.store.export import Loaded, Written
from ridethrough.train import state

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)
"""What `torch.load(weights_only=True)` builds; also lists, tuples, sets and dicts of it."""


def state_dicts(parts: tuple[Loaded, ...]) -> tuple[dict[str, Any], Written]:
    """The `state_dict()` of every tracked object by its name, without those that only a pickle of any kind could hold.

    The tensors share the memory of the parts.

    Raises:
        Damaged: A tree makes no sense.
    """
    trees = {loaded.seal.part: state.decode(state.LoadedPart(seal=loaded.seal, payload=loaded.payload)) for loaded in parts}
    own_part = parts[-1].seal
    export.models_and_optimizers(trees[own_part.part], path=own_part.payload_name)
    try:
        found = state.join(trees.get(layout.REPLICATED, {}).get("objects", {}), trees[own_part.part])
    except (KeyError, TypeError) as error:
        raise Damaged(path=own_part.payload_name, detail="its tree does not hold the objects of a training process") from error
    strange = {name: why for name, value in found.items() if (why := _strange(value, name)) is not None}
    kept = {name: value for name, value in found.items() if name not in strange}
    return kept, Written(objects=tuple((name, _count(value)) for name, value in kept.items()), left_out=tuple(strange.items()))


def write_torch(fs: FileSystem, path: str, parts: tuple[Loaded, ...]) -> Written:
    """One file that `torch.load(path, weights_only=True)` turns into a dict of state dicts.

    Raises:
        UsageError: The name is taken.
        Damaged: A tree makes no sense.
        StorageError: The disk refuses; nothing has that name.
    """
    found, written = state_dicts(parts)
    with export.new_file(fs, path) as writer:
        torch.save(found, _AsFile(writer))  # type: ignore[arg-type]  # it only writes and flushes
    return written


def write_dcp(fs: FileSystem, path: str, parts: tuple[Loaded, ...]) -> Written:
    """A directory that `torch.distributed.checkpoint.load` reads into a dict of state dicts, on any number of ranks.

    Raises:
        UsageError: The name is taken.
        Damaged: A tree makes no sense.
        StorageError: The disk refuses; nothing has that name.
    """
    found, written = state_dicts(parts)
    with export.new_directory(fs, path) as directory, warnings.catch_warnings():
        # That one process saves is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        save(found, storage_writer=FileSystemWriter(directory), no_dist=True)
    return written


class _AsFile:
    """A `Writer` of ours as what `torch.save` wants."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, data: bytes) -> int:
        self._writer.write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back here; the sync comes when all is written."""


def _strange(value: Any, path: str) -> str | None:
    """Where a value stands that is no plain one, and what it is."""
    if isinstance(value, _PLAIN):
        return None
    if type(value) in (dict, OrderedDict):
        inner = [(key, f"{path}/(key)") for key in value] + [(item, f"{path}/{key}") for key, item in value.items()]
    elif type(value) in (list, tuple, set):
        inner = [(item, f"{path}/{number}") for number, item in enumerate(value)]
    else:
        return f"{path} is a {type(value).__module__}.{type(value).__qualname__}"
    return next((why for item, place in inner if (why := _strange(item, place)) is not None), None)


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, (list, tuple)) else 0

"""A checkpoint's parts, proven, for files that other tools read; and how such a file comes to be.

The tensors alone need no torch: `write_safetensors`. What is more than tensors is `train.export`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ridethrough.errors import Damaged, RideThroughError, StorageError, StoreMissing, UsageError
from ridethrough.format import layout, part
from ridethrough.format.part import TensorSpec
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem, Writer, name_new, sync_tree
from ridethrough.store.catalog import Checkpoint
from ridethrough.store.verify import load_part

_TENSOR_TAGS = ("tensor", "array")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One part in memory, every byte of it checked against its seal."""

    seal: Seal
    payload: bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What an export holds."""

    objects: tuple[tuple[str, int], ...]
    """Names of the tracked objects, and how many tensors of each."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Tracked objects that this kind of file cannot hold, and why."""


def parts_of(checkpoint: Checkpoint, rank: int) -> tuple[str, ...]:
    """The parts that hold the state of one rank.

    Raises:
        StoreMissing: The checkpoint is not complete: it is none.
        UsageError: It has no such rank.
    """
    if checkpoint.roster is None or not checkpoint.is_complete:
        raise StoreMissing(path=checkpoint.dir_name, detail=f"it is not complete, missing {', '.join(checkpoint.missing_parts)}")
    if rank >= checkpoint.roster.world_size:
        raise UsageError(
            detail=f"--rank {rank}: the checkpoint was made by ranks 0 to {checkpoint.roster.world_size - 1}", hint="ridethrough show CKPT"
        )
    return tuple(name for name in (layout.REPLICATED, layout.rank_part(rank)) if name in checkpoint.roster.part_names)


def read(fs: FileSystem, run_dir: str, checkpoint: Checkpoint, names: tuple[str, ...], *, progress: Callable[[int], None]) -> tuple[Loaded, ...]:
    """These parts, each from its first copy that is intact.

    Raises:
        Damaged: A part has no intact copy.
        StorageUnreachable: One cannot be read now.
    """
    found = []
    for name in names:
        problem: Damaged | None = None
        for seal in checkpoint.seals:
            if seal.part == name:
                try:
                    found.append(Loaded(seal=seal, payload=load_part(fs, run_dir, checkpoint.dir_name, seal, progress=progress)))
                    break
                except Damaged as error:
                    problem = error
        else:
            raise problem or Damaged(path=checkpoint.dir_name, detail=f"part {name} is missing")
    return tuple(found)


def models_and_optimizers(own: Any, *, path: str) -> tuple[str, ...]:
    """Names of the tracked models, then of the optimizers, as a private part's tree tells them.

    Raises:
        Damaged: It is not the tree of a training process.
    """
    try:
        models = sorted(own["module_versions"])
        return (*models, *sorted(set(own["structure"]) - set(models)))
    except (KeyError, TypeError) as error:
        raise Damaged(path=path, detail="its tree does not name the objects of a training process") from error


def write_safetensors(fs: FileSystem, path: str, parts: tuple[Loaded, ...]) -> Written:
    """One safetensors file with the tensors of the models and optimizers, under the names that they have in the checkpoint.

    Raises:
        UsageError: The name is taken.
        Damaged: A tree makes no sense.
        StorageError: The disk refuses; nothing has that name.
    """
    own = parts[-1]
    wanted = models_and_optimizers(own.seal.tree, path=own.seal.payload_name)
    chosen: dict[str, tuple[TensorSpec, memoryview]] = {}
    counts = dict.fromkeys(wanted, 0)
    for loaded in parts:
        specs, base = part.parse_header(loaded.payload, path=loaded.seal.payload_name)
        by_name = {spec.name: spec for spec in specs}
        objects = loaded.seal.tree.get("objects", {})
        for name in wanted:
            for tensor in sorted(set(_tensor_names(objects.get(name)))):
                if tensor not in by_name:
                    raise Damaged(path=loaded.seal.payload_name, detail=f"its tree names a tensor {tensor!r} that it does not hold")
                spec = by_name[tensor]
                new = tensor
                while new in chosen:  # as in a part: a key with a slash in it can look like a path
                    new += "'"
                chosen[new] = (spec, memoryview(loaded.payload)[base + spec.begin : base + spec.end])
                counts[name] += 1
    laid = part.lay_out((name, spec.dtype, spec.shape) for name, (spec, _) in chosen.items())
    with new_file(fs, path, laid.size_bytes) as writer:
        writer.write(laid.header)
        for spec in laid.tensors:
            writer.write(chosen[spec.name][1])
    return Written(objects=tuple(counts.items()))


def _tensor_names(value: Any) -> Iterator[str]:
    """Names of the tensors that an encoded state refers to."""
    if isinstance(value, list):
        for item in value:
            yield from _tensor_names(item)
    elif isinstance(value, dict):
        if value.get("~") in _TENSOR_TAGS:
            yield value["v"]
        else:
            for item in value.values():
                yield from _tensor_names(item)


def require_free(path: str) -> None:
    """The name is free, in a directory that exists.

    Raises:
        UsageError: It is not; an export never replaces anything.
    """
    parent = os.path.dirname(path)
    if os.path.lexists(path):
        raise UsageError(detail=f"{path} exists, and an export replaces nothing", hint="give another name, or move that away first")
    if not os.path.isdir(parent):
        raise UsageError(detail=f"there is no directory {parent}", hint=f"mkdir -p {shlex.quote(parent)}")


@contextlib.contextmanager
def new_file(fs: FileSystem, path: str, size_bytes: int = 0) -> Iterator[Writer]:
    """The file has its name, whole and durable, when the block has ended well; otherwise nothing has that name.

    A cut may leave it under its temporary name beside it, with the suffix `.tmp`.

    Raises:
        UsageError: The name is taken.
        StorageError: The disk refuses.
    """
    require_free(path)
    temporary = _temporary(path)
    writer = fs.create(temporary, size_bytes)
    try:
        yield writer
        writer.sync()  # before it has its name: a cut could leave the name with nothing in it
        writer.close()
        _give_name(fs, temporary, path)
    except BaseException:
        with contextlib.suppress(RideThroughError):  # the disk that refused may refuse this too
            writer.close()
        with contextlib.suppress(RideThroughError):
            fs.remove(temporary)
        raise


@contextlib.contextmanager
def new_directory(fs: FileSystem, path: str) -> Iterator[str]:
    """As `new_file`, for a directory that somebody else's code fills; yields where."""
    require_free(path)
    temporary = _temporary(path)
    fs.make_dir(temporary)
    try:
        yield temporary
        sync_tree(temporary)  # whatever that code has synced: see there
        _give_name(fs, temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a leftover under a temporary name at worst
        raise


def _temporary(path: str) -> str:
    return f"{path}.{uuid.uuid4().hex[:8]}{layout.TEMPORARY}"


def _give_name(fs: FileSystem, temporary: str, path: str) -> None:
    try:
        name_new(temporary, path)
    except FileExistsError:
        require_free(path)
        raise StorageError(detail="somebody else has just made it", path=path) from None
    fs.sync_dir(os.path.dirname(path))  # without it a power cut takes the name away again

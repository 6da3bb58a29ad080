"""The payload of a part: a safetensors file, read and laid out without torch.

Tensors lie back to back in order of falling item size, then name, so that each is aligned to
its own type and equal state has equal bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from ridethrough.errors import Damaged, shown

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Data types of the safetensors format and their size."""

CHUNK_BYTES = 16 << 20
"""Unit of the payload checksums: small enough to say where the damage is, large enough to cost nothing."""

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library itself has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor in a part: its place is relative to the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """Header bytes and the place of each tensor."""

    header: bytes
    tensors: tuple[TensorSpec, ...]
    size_bytes: int


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> PartLayout:
    """Where each tensor (name, dtype, shape) goes; equal input has equal bytes."""
    specs: list[TensorSpec] = []
    entries: dict[str, Any] = {}
    at = 0
    for name, dtype, shape in sorted(tensors, key=lambda item: (-ITEM_BYTES[item[1]], item[0])):
        count = 1
        for extent in shape:
            count *= extent
        end = at + count * ITEM_BYTES[dtype]
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(shape), begin=at, end=end))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return PartLayout(header=header, tensors=tuple(specs), size_bytes=len(header) + at)


def parse_header(payload: bytes | bytearray | memoryview, *, path: str) -> tuple[tuple[TensorSpec, ...], int]:
    """The tensors in a payload and the offset where their data begins.

    Raises:
        Damaged: The header is torn or contradicts the size of the payload.
    """
    view = memoryview(payload).cast("B")
    if len(view) < 8:
        raise Damaged(path=path, detail="too short for a safetensors file")
    (length,) = struct.unpack_from("<Q", view)
    if length > MAX_HEADER_BYTES or 8 + length > len(view):
        raise Damaged(path=path, detail="its header is longer than the file")
    try:
        entries = json.loads(bytes(view[8 : 8 + length]))
        specs = tuple(_spec(name, entry) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(path=path, detail="its safetensors header makes no sense") from error
    room = len(view) - 8 - length
    for spec in specs:
        if not 0 <= spec.begin <= spec.end <= room or spec.end - spec.begin != _size_bytes(spec, room):
            raise Damaged(path=path, detail=f"tensor {shown(spec.name)} does not lie inside the file")
    at = 0
    for spec in sorted(specs, key=lambda spec: (spec.begin, spec.end)):
        if spec.begin != at:
            raise Damaged(path=path, detail=f"tensor {shown(spec.name)} overlaps another or leaves a gap")
        at = spec.end
    if at != room:
        raise Damaged(path=path, detail=f"{room - at} bytes belong to no tensor")
    return specs, 8 + length


def _size_bytes(spec: TensorSpec, limit_bytes: int) -> int:
    """What a tensor of this shape takes; -1 if that is more than the limit, without working out how much more."""
    if 0 in spec.shape:
        return 0
    size = ITEM_BYTES[spec.dtype]
    for extent in spec.shape:
        size *= extent
        if size > limit_bytes:  # a product of thousands of large numbers takes minutes
            return -1
    return size


def _spec(name: str, entry: Any) -> TensorSpec:
    begin, end = entry["data_offsets"]
    return spec_of(name, entry["dtype"], entry["shape"], begin, end)


def spec_of(name: Any, dtype: Any, shape: Any, begin: Any, end: Any) -> TensorSpec:
    """A tensor's place as it was read.

    Raises:
        ValueError, TypeError: It is none.
    """
    if type(name) is not str or type(shape) is not list or dtype not in ITEM_BYTES:
        raise ValueError("no tensor")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("no place of a tensor")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def checksum_chunks(payload: bytes | memoryview) -> tuple[str, ...]:
    """xxh3-128 of each 16 MiB chunk, in order."""
    view = memoryview(payload).cast("B")
    return tuple(xxhash.xxh3_128_hexdigest(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES))


def differing_tensors(first: memoryview, second: memoryview) -> list[str]:
    """Names of the tensors whose bytes differ between two payloads."""
    specs, base = parse_header(first, path="slot")
    others, other_base = parse_header(second, path="slot")
    by_name = {spec.name: spec for spec in others}
    found = []
    for spec in specs:
        other = by_name.get(spec.name)
        if other is None or first[base + spec.begin : base + spec.end] != second[other_base + other.begin : other_base + other.end]:
            found.append(spec.name)
    return found

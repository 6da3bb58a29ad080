"""The payload is a plain safetensors file, laid out the same way for the same state."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_plain

from ridethrough.errors import Damaged
from ridethrough.format import part

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

inventories = st.dictionaries(
    st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=8,
)


def payload_of(inventory: dict[str, tuple[str, list[int]]]) -> bytes:
    laid = part.lay_out((name, dtype, shape) for name, (dtype, shape) in inventory.items())
    return laid.header + bytes(laid.size_bytes - len(laid.header))


def hostile(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


@settings(max_examples=150, deadline=None)
@given(inventories)
def test_a_payload_opens_with_the_plain_safetensors_library(inventory: dict[str, tuple[str, list[int]]]) -> None:
    found = load_plain(payload_of(inventory))
    assert {name: (TORCH[dtype], tuple(shape)) for name, (dtype, shape) in inventory.items()} == {
        name: (t.dtype, tuple(t.shape)) for name, t in found.items()
    }


@settings(max_examples=150, deadline=None)
@given(inventories)
def test_every_tensor_is_aligned_to_its_own_type(inventory: dict[str, tuple[str, list[int]]]) -> None:
    laid = part.lay_out((name, dtype, shape) for name, (dtype, shape) in inventory.items())
    for spec in laid.tensors:
        assert (len(laid.header) + spec.begin) % part.ITEM_BYTES[spec.dtype] == 0


@settings(max_examples=150, deadline=None)
@given(inventories, st.randoms())
def test_equal_state_has_equal_bytes_in_whatever_order_it_comes(inventory: dict[str, tuple[str, list[int]]], random: Any) -> None:
    shuffled = list(inventory.items())
    random.shuffle(shuffled)
    assert payload_of(inventory) == payload_of(dict(shuffled))


@settings(max_examples=150, deadline=None)
@given(inventories)
def test_the_header_parses_back_to_the_layout(inventory: dict[str, tuple[str, list[int]]]) -> None:
    laid = part.lay_out((name, dtype, shape) for name, (dtype, shape) in inventory.items())
    assert part.parse_header(payload_of(inventory), path="p") == (laid.tensors, len(laid.header))


def test_a_payload_written_by_the_safetensors_library_is_understood() -> None:
    from safetensors.torch import save

    specs, begin = part.parse_header(save({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}, metadata={"k": "v"}), path="p")
    assert {spec.name: spec.shape for spec in specs} == {"a": (3,), "b": (2,)}
    assert begin > 8


F32X2 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "length of 2**63": hostile(b"{}", length=2**63),
    "length of 99 MB": hostile(b"{}", length=99_000_000),
    "length beyond the limit": hostile(b"{}", length=part.MAX_HEADER_BYTES + 1),
    "length past the file": hostile(b"{}", length=3),
    "not JSON": hostile(b"{oops"),
    "not UTF-8": hostile(b'{"\xff\xff": 1}'),
    "nested without end": hostile(b"[" * 200_000),
    "deep object": hostile(b'{"a":' * 200_000),
    "list": hostile([1, 2]),
    "number": hostile(b"1"),
    "endless number": hostile(b"1" * 5000),
    "entry is text": hostile({"a": "b"}),
    "no offsets": hostile({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "one offset": hostile({"a": {**F32X2, "data_offsets": [0]}}, bytes(8)),
    "negative offset": hostile({"a": {**F32X2, "data_offsets": [-8, 0]}}, bytes(8)),
    "backwards": hostile({"a": {**F32X2, "data_offsets": [8, 0]}}, bytes(8)),
    "outside the file": hostile({"a": {**F32X2, "data_offsets": [8, 16]}}, bytes(8)),
    "offset is text": hostile({"a": {**F32X2, "data_offsets": ["0", "8"]}}, bytes(8)),
    "offset is true": hostile({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, bytes(1)),
    "offset is a fraction": hostile({"a": {**F32X2, "data_offsets": [0.0, 8.0]}}, bytes(8)),
    "negative shape": hostile({"a": {**F32X2, "shape": [-1, -2]}}, bytes(8)),
    "shape too large": hostile({"a": {**F32X2, "shape": [2**62, 2]}}, bytes(8)),
    "shape is a number": hostile({"a": {**F32X2, "shape": 2}}, bytes(8)),
    "unknown type": hostile({"a": {**F32X2, "dtype": "F33"}}, bytes(8)),
    "type is a list": hostile({"a": {**F32X2, "dtype": ["F32"]}}, bytes(8)),
    "overlap": hostile({"a": F32X2, "b": {**F32X2, "data_offsets": [4, 12]}}, bytes(12)),
    "same place twice": hostile({"a": F32X2, "b": F32X2}, bytes(8)),
    "gap": hostile({"a": F32X2, "b": {**F32X2, "data_offsets": [12, 20]}}, bytes(20)),
    "bytes of nobody": hostile({"a": F32X2}, bytes(9)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_damaged_and_costs_no_memory(data: bytes) -> None:
    with pytest.raises(Damaged):
        part.parse_header(data, path="p")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_damaged(body: bytes) -> None:
    for data in (body, struct.pack("<Q", len(body)) + body):
        with contextlib.suppress(Damaged):
            part.parse_header(data, path="p")


def test_a_header_flip_that_we_accept_is_one_the_library_accepts_too() -> None:
    data = payload_of({"weight": ("F32", [4]), "bias": ("I64", [2])})
    (length,) = struct.unpack_from("<Q", data)
    for place in range(8 + length):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            try:
                part.parse_header(flipped, path="p")
            except Damaged:
                continue
            try:
                safetensors.deserialize(bytes(flipped))
            except safetensors.SafetensorError as error:
                pytest.fail(f"byte {place} bit {bit}: {error}")


def test_the_checksum_of_each_chunk_covers_exactly_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "CHUNK_BYTES", 16)
    data = bytes(range(50))
    before = part.checksum_chunks(data)
    assert len(before) == 4
    for place in range(50):
        flipped = bytearray(data)
        flipped[place] ^= 1
        differing = [i for i, (a, b) in enumerate(zip(before, part.checksum_chunks(bytes(flipped)), strict=True)) if a != b]
        assert differing == [place // 16]

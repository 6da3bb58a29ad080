"""State survives the way through JSON exactly, and loading it never runs code."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections import OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.errors import Damaged, StateNotExpressible
from ridethrough.format import record, tree


def leaf(path: str, value: Any) -> Any:
    """The scalars that a trainer's adapter writes, in the words of the format."""
    if isinstance(value, numpy.generic):
        return {"~": "numpy", "v": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, torch.dtype):
        return {"~": "torch", "v": ["dtype", str(value).removeprefix("torch.")]}
    if isinstance(value, torch.device):
        return {"~": "torch", "v": ["device", str(value)]}
    if isinstance(value, torch.Size):
        return {"~": "torch", "v": ["size", list(value)]}
    return NotImplemented


def no_tensor(name: str) -> Any:
    raise KeyError(name)


def through_json(value: Any) -> Any:
    return tree.decode(record.decode("t", record.encode("t", {"v": tree.encode(value, "state", leaf)}), path="x")["v"], no_tensor, path="x.seal")


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, order and sign of zero; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, numpy.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


keys = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False) | st.tuples(st.integers(), st.text(max_size=3))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.builds(pathlib.Path, st.text("abc/ .é", max_size=8))
    | st.sampled_from([numpy.float32(0.1), numpy.float64("nan"), numpy.int64(-(2**63)), numpy.uint8(255), numpy.bool_(True), numpy.float16(-0.0)])
    | st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0, 3]), torch.Size([])])
)
values = st.recursive(
    scalars | st.sets(st.integers()) | st.frozensets(st.text(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.just("~"), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(values)
def test_every_supported_value_survives_json_exactly(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 2**53 + 1, -(2**4000)])
def test_numbers_at_the_edge_survive_json_exactly(value: Any) -> None:
    assert same(through_json(value), value)


def test_nan_survives_json() -> None:
    assert math.isnan(through_json({"loss": math.nan})["loss"])


def test_a_defaultdict_comes_back_as_a_plain_dict() -> None:
    assert same(through_json(defaultdict(int, {1: 2})), {1: 2})


def test_a_dict_that_looks_like_our_tags_comes_back_unchanged() -> None:
    fake = {"~": "tensor", "v": "weights"}
    assert same(through_json({"a": fake}), {"a": fake})


def test_text_with_lone_surrogates_survives() -> None:
    assert through_json(["\udcff"]) == ["\udcff"]


class Opaque:
    """Something only pickle could write."""


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Opaque(), "state"),
        ({"a": [1, Opaque()]}, "state/a/1"),
        ({"hooks": {"f": lambda: None}}, "state/hooks/f"),
        ((1, {2: Opaque}), "state/1/2"),
        ({Opaque(): 1}, "state/(key)"),
        ({"s": {1, "a"}}, "state/s"),
        ({"n": 10**5000}, "state/n"),
        ({"g": (i for i in ())}, "state/g"),
    ],
    ids=["object", "in list", "lambda", "class", "key", "unordered set", "endless integer", "generator"],
)
def test_state_that_has_no_place_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(StateNotExpressible) as caught:
        tree.encode(value, "state", leaf)
    assert caught.value.fields["path"] == path


def test_a_structure_that_contains_itself_is_refused_not_a_crash() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(StateNotExpressible, match="contains itself"):
        tree.encode(loop, "state", leaf)


def test_the_deepest_state_that_is_taken_fits_into_a_record() -> None:
    value: Any = 1
    for level in range(tree._MAX_DEPTH):
        value = {level: value}  # a key that is no string: three levels of JSON
    encoded = tree.encode(value, "state", leaf)
    found = record.decode("run", record.encode("run", {"tree": {"objects": {"x": encoded}}}), path="x")
    assert tree.decode(found["tree"]["objects"]["x"], no_tensor, path="x") == value
    with pytest.raises(StateNotExpressible):
        tree.encode({0: value}, "state", leaf)


HOSTILE: list[Any] = [
    {"~": "pickle", "v": "gASVFAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOU"},
    {"~": "unknown", "v": 1},
    {"~": "tuple"},
    {"~": None, "v": 1},
    {"~": ["tuple"], "v": []},
    {"~": {"a": 1}, "v": []},
    {"~": "tuple", "v": 3},
    {"~": "dict", "v": [[1]]},
    {"~": "dict", "v": [[[1], 2]]},
    {"~": "set", "v": [[1]]},
    {"~": "float", "v": "1e5"},
    {"~": "float", "v": []},
    {"~": "bytes", "v": "!!"},
    {"~": "bytes", "v": 5},
    {"~": "complex", "v": ["0x1p999999999999", "0"]},
    {"~": "complex", "v": ["x"]},
    {"~": "path", "v": 3},
    {"~": "numpy", "v": ["O", "00" * 8]},
    {"~": "numpy", "v": ["|O8", "00" * 8]},
    {"~": "numpy", "v": [[["a", "O"]], "00" * 8]},
    {"~": "numpy", "v": ["f8", "00"]},
    {"~": "numpy", "v": ["f8", ""]},
    {"~": "numpy", "v": ["f8", "zz"]},
    {"~": "numpy", "v": ["(1,2", "00"]},
    {"~": "numpy", "v": ["S99999999999999999999", "00"]},
    {"~": "numpy", "v": ["__import__('os').system('false')", "00"]},
    {"~": "torch", "v": ["dtype", "load"]},
    {"~": "torch", "v": ["dtype", "_dynamo"]},
    {"~": "torch", "v": ["dtype", "__class__"]},
    {"~": "torch", "v": ["dtype", []]},
    {"~": "torch", "v": ["device", "nonsense:9"]},
    {"~": "torch", "v": ["device", {"a": 1}]},
    {"~": "torch", "v": ["size", ["a"]]},
    {"~": "torch", "v": ["size", 5]},
    {"~": "torch", "v": ["load", "x"]},
    {"~": "torch", "v": []},
    {"~": "tensor", "v": "absent"},
    {"~": "tensor", "v": ["absent"]},
    {"~": "array", "v": None},
]


@pytest.mark.parametrize("value", HOSTILE, ids=json.dumps)
def test_a_hostile_tree_is_damaged_and_runs_nothing(value: Any) -> None:
    def tensor(name: Any) -> Any:
        return {"known": 1}[name]

    with pytest.raises(Damaged):
        tree.decode({"a": [value]}, tensor, path="x.seal")


def test_a_tree_nested_without_end_is_damaged() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(Damaged):
        tree.decode(value, no_tensor, path="x.seal")
    while isinstance(value, list):  # take it apart by hand, or freeing it recurses
        value = value.pop()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "~": st.sampled_from(
                    ["tuple", "dict", "odict", "float", "bytes", "set", "fset", "complex", "tensor", "array", "numpy", "torch", "path"]
                ),
                "v": inner,
            }
        )
    ),
    max_leaves=10,
)


@settings(max_examples=400, deadline=None)
@given(json_values)
def test_any_json_decodes_to_a_value_or_is_damaged(value: Any) -> None:
    with contextlib.suppress(Damaged):
        tree.decode(value, no_tensor, path="x.seal")

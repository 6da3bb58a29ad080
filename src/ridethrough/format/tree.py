"""State as JSON with tags, so that loading never runs code.

Plain JSON values stand for themselves. Everything else is ``{"~": tag, "v": value}``:

======== =============================================================
tuple    list of items
dict     list of ``[key, value]`` (keys that are not strings, or "~")
odict    the same, an ``OrderedDict``
float    "nan", "inf", "-inf"
bytes    base64
set      sorted list of items (``fset`` for a frozenset)
complex  ``[real, imaginary]``
tensor   name of a tensor in the part
array    name of a tensor in the part, a NumPy array
numpy    ``[dtype, hex of the bytes]``, a NumPy scalar
torch    ``["dtype" | "device" | "size", text]``
path     a ``pathlib`` path as text
======== =============================================================
"""

from __future__ import annotations

import base64
import binascii
import math
import pathlib
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from ridethrough.errors import Damaged, StateNotExpressible, shown

Leaf = Callable[[str, Any], Any]
"""Turns a value that JSON cannot hold into an encoded one; NotImplemented if it cannot either."""

_NUMPY_SCALAR = re.compile(r"[<>=|][biufc][0-9]{1,2}")
_FEW = 1000
_MAX_DEPTH = 200
"""A mapping whose keys are no strings takes three levels of JSON: within `record.MAX_DEPTH`."""
_MAX_INT_BITS = 8192
"""Python itself refuses to read decimal numbers of more than 4300 digits (14,284 bits)."""


def encode(value: Any, path: str, leaf: Leaf) -> Any:
    """The value as JSON.

    Args:
        value: Any nesting of the types above.
        path: Where the value stands, for the error message and for tensor names.
        leaf: Called for values of other types.

    Raises:
        StateNotExpressible: Names the path of the value that has no place.
    """
    return _encode(value, path, leaf, 0)


def _encode(value: Any, path: str, leaf: Leaf, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise StateNotExpressible(path=path, detail=f"nested more than {_MAX_DEPTH} deep, or it contains itself")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise StateNotExpressible(path=path, detail=f"an integer of more than {_MAX_INT_BITS} bits")
        return value
    if kind is float:
        return value if math.isfinite(value) else {"~": "float", "v": repr(value)}
    if kind is list:
        return [_encode(item, f"{path}/{i}", leaf, depth + 1) for i, item in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return _encode_sequence(value, path, leaf, depth)
    if kind in (dict, OrderedDict, defaultdict):
        return _encode_mapping(value, path, leaf, depth)
    if kind in (bytes, bytearray):
        return {"~": "bytes", "v": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"~": "complex", "v": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, pathlib.PurePath):
        return {"~": "path", "v": str(value)}
    encoded = leaf(path, value)
    if encoded is NotImplemented:
        raise StateNotExpressible(path=path, detail=f"a {kind.__module__}.{kind.__qualname__}")
    return encoded


def _encode_sequence(value: Any, path: str, leaf: Leaf, depth: int) -> Any:
    items: Any = value
    tag = "tuple" if type(value) is tuple else "set" if type(value) is set else "fset"
    if tag in ("set", "fset"):
        try:
            items = sorted(value)
        except TypeError as error:
            raise StateNotExpressible(path=path, detail="a set whose items have no order") from error
    return {"~": tag, "v": [_encode(item, f"{path}/{i}", leaf, depth + 1) for i, item in enumerate(items)]}


def _encode_mapping(value: Any, path: str, leaf: Leaf, depth: int) -> Any:
    if type(value) is not OrderedDict and all(type(key) is str for key in value) and "~" not in value:
        return {key: _encode(item, f"{path}/{key}", leaf, depth + 1) for key, item in value.items()}
    pairs = [[_encode(key, f"{path}/(key)", leaf, depth + 1), _encode(item, f"{path}/{key}", leaf, depth + 1)] for key, item in value.items()]
    return {"~": "odict" if type(value) is OrderedDict else "dict", "v": pairs}


def decode(value: Any, tensor: Callable[[str], Any], *, path: str) -> Any:
    """The value that `encode` was given; runs no code of the checkpoint.

    Args:
        value: The JSON.
        tensor: Returns the tensor of that name.
        path: The file it came from, for messages.

    Raises:
        Damaged: A tag is unknown or its value makes no sense.
    """
    try:
        return _decode(value, tensor)
    # RuntimeError: torch's way to refuse; SyntaxError: NumPy's, for a data type's name.
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, RuntimeError, SyntaxError, binascii.Error) as error:
        raise Damaged(path=path, detail=f"the state tree makes no sense ({shown(str(error))})") from error


def _decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "~" not in value:
        return {key: _decode(item, tensor) for key, item in value.items()}
    tag, inner = value["~"], value["v"]
    if tag == "tensor":
        return tensor(inner)
    if tag == "array":
        return tensor(inner).numpy()
    if tag == "tuple":
        return tuple(_decode(item, tensor) for item in inner)
    if tag in ("set", "fset"):
        items = [_decode(item, tensor) for item in inner]
        _require_spread(items)
        return set(items) if tag == "set" else frozenset(items)
    if tag in ("dict", "odict"):
        pairs = [(_decode(key, tensor), _decode(item, tensor)) for key, item in inner]
        _require_spread([key for key, _ in pairs])
        return dict(pairs) if tag == "dict" else OrderedDict(pairs)
    return _decode_scalar(tag, inner)


def _require_spread(keys: list[Any]) -> None:
    """The keys have hashes of their own: those of numbers can be chosen, and a table of equal ones takes hours to fill."""
    if len(keys) > _FEW and 2 * len(set(map(hash, keys))) < len(keys):
        raise ValueError("keys whose hashes are equal")


def _decode_scalar(tag: str, inner: Any) -> Any:
    if tag == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if tag == "bytes":
        return base64.b64decode(inner, validate=True)
    if tag == "complex":
        return complex(float.fromhex(inner[0]), float.fromhex(inner[1]))
    if tag == "path":
        return pathlib.Path(inner)
    if tag == "numpy":
        # What `encode` writes and nothing else: NumPy's own parser of such texts evaluates parts of them.
        if type(inner[0]) is not str or not _NUMPY_SCALAR.fullmatch(inner[0]):
            raise ValueError("not a scalar of NumPy")
        import numpy  # noqa: PLC0415  only a checkpoint that holds NumPy scalars needs it

        return numpy.frombuffer(bytes.fromhex(inner[1]), dtype=numpy.dtype(inner[0]))[0]
    if tag == "torch":
        return _decode_torch(inner[0], inner[1])
    raise ValueError(f"unknown tag {shown(tag)}")


def _decode_torch(kind: str, text: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return text  # a reader without torch (show, verify) only displays it
    if kind == "dtype":
        found = vars(torch)[text]  # not getattr: torch imports modules for some names
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{shown(text)} is not a dtype")
        return found
    if kind == "device":
        if type(text) is not str:  # a number would start up an accelerator
            raise TypeError("not a device")
        return torch.device(text)
    if kind == "size":
        return torch.Size(text)
    raise ValueError(f"unknown torch value {shown(kind)}")

"""Small self-checksummed JSON files: run, attempt, roster, seal, manifest.

A file is two lines and valid JSON as a whole::

    {"record": {…JSON…},
    "sha256": "…over the bytes of the record…"}

so any JSON tool can read it, and a flipped bit anywhere is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from ridethrough.errors import Damaged, ForeignRecord, FormatTooNew, shown
from ridethrough.types import FORMAT

_HEAD = b'{"record": '
_MIDDLE = b',\n"sha256": "'
_TAIL = b'"}\n'
_SURROGATE = re.compile("[\ud800-\udfff]")
_IDENTITY = re.compile(r"[ -~]{0,128}")
_FORMAT_LIMIT = 1 << 31
MAX_BYTES = 256 << 20
"""No record of a run of 131,072 ranks comes near; a larger file is not one of ours."""


MAX_DEPTH = 640
"""Levels of lists and objects in a record. Python reads about 1,000, but then cannot write them again."""


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, no NaN, so that equal values have equal digests."""
    return _compact(value, sort_keys=True)


def _compact(value: Any, *, sort_keys: bool = False) -> bytes:
    text = json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # Bytes of a command line or path that are not UTF-8 reach us as lone surrogates, which only an escape can carry.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text).encode("utf-8")


def digest(value: Any) -> str:
    """sha256 of the canonical text."""
    return hashlib.sha256(canonical(value)).hexdigest()


def encode(kind: str, fields: dict[str, Any]) -> bytes:
    """The file for a record of this kind."""
    # Not sorted: the order of a dict in a state tree is part of the state.
    body = _compact({"format": FORMAT, "kind": kind, **fields})
    return _HEAD + body + _MIDDLE + hashlib.sha256(body).hexdigest().encode() + _TAIL


def decode(kind: str, data: bytes, *, path: str) -> dict[str, Any]:
    """The fields of a record whose checksum holds.

    Raises:
        Damaged: Torn, truncated, flipped or not a record at all.
        FormatTooNew: Intact, but of a later format.
        ForeignRecord: Intact, but of another kind.
    """
    if not data:
        raise Damaged(path=path, detail="the file is empty")
    end = len(data) - len(_TAIL) - 64 - len(_MIDDLE)
    if end < len(_HEAD) or not data.startswith(_HEAD) or not data.endswith(_TAIL) or data[end : end + len(_MIDDLE)] != _MIDDLE:
        raise Damaged(path=path, detail="not a whole record (torn or overwritten)")
    body = data[len(_HEAD) : end]
    if hashlib.sha256(body).hexdigest().encode() != data[end + len(_MIDDLE) : end + len(_MIDDLE) + 64]:
        raise Damaged(path=path, detail="its own checksum does not match")
    try:
        fields = json.loads(body, parse_constant=refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Damaged(path=path, detail="the record is not JSON") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(fields, MAX_DEPTH):
        raise Damaged(path=path, detail=f"the record is nested more than {MAX_DEPTH} deep")
    if not isinstance(fields, dict) or type(fields.get("format")) is not int or not 1 <= fields["format"] < _FORMAT_LIMIT:
        raise Damaged(path=path, detail="the record has no format")
    if fields["format"] > FORMAT:
        raise FormatTooNew(path=path, found=fields["format"], known=FORMAT)
    if fields.get("kind") != kind:
        raise ForeignRecord(path=path, detail=f"it is a {shown(fields.get('kind'))}, not a {kind!r}")
    return fields


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # 1e999 would come back as infinity, which JSON does not have
        raise ValueError(f"{text} is no number")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in (outer.values() if type(outer) is dict else outer) if type(inner) in (dict, list)]
        if not level:
            return False
    return True


def field(fields: dict[str, Any], name: str, kind: type | tuple[type, ...], *, path: str) -> Any:
    """One field of the type it must have.

    Raises:
        Damaged: It is absent or of another type (a record made by something else).
    """
    value = fields.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise Damaged(path=path, detail=f"field {name!r} is {shown(value)}")
    return value


def identity(fields: dict[str, Any], name: str, *, path: str) -> str:
    """One field that names something: digits and letters, so that it can be hashed, compared and printed.

    Raises:
        Damaged: It is absent or no such text.
    """
    value: str = field(fields, name, str, path=path)
    if not _IDENTITY.fullmatch(value):
        raise Damaged(path=path, detail=f"field {name!r} is {shown(value)}")
    return value


def refuse_constant(constant: str) -> None:
    """For `json.loads`, which else takes NaN and Infinity.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{constant} is not JSON")

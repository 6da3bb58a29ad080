"""What values another node may say. Pure.

Whoever has the key says what it wants, and another version says it otherwise: a word that is no number where a number
belongs is refused when it is heard, and not where it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ridethrough.errors import shown

Check = Callable[[Any], bool]
Shape = type | Check
"""A type, which is looked at without a call (a lead hears thousands of values in each round), or a check."""
_LIMIT = 1 << 63
_LISTS = (list, tuple)


def is_number(value: Any) -> bool:
    """A number that can be added to a time; neither NaN nor infinity."""
    return type(value) in (int, float) and -_LIMIT <= value < _LIMIT


def is_whole(value: Any) -> bool:
    """A whole number that a clock's time can be compared with: JSON has larger ones, which no float can hold."""
    return type(value) is int and -_LIMIT <= value < _LIMIT


def is_signal(value: Any) -> bool:
    """The number of a signal, or 0."""
    return type(value) is int and 0 <= value <= 64


def is_texts(value: Any) -> bool:
    """Strings."""
    return type(value) in _LISTS and set(map(type, value)) <= {str}


def is_counts(value: Any) -> bool:
    """Whole numbers."""
    return type(value) in _LISTS and set(map(type, value)) <= {int} and (not value or (min(value) >= -_LIMIT and max(value) < _LIMIT))


def is_facts(value: Any) -> bool:
    """An object, of which what everybody knows has the type it must have."""
    return isinstance(value, dict) and all(name not in _FACTS or _is(inner, _FACTS[name]) for name, inner in value.items())


def optional(shape: Shape) -> Check:
    """That, or None."""
    return lambda value: value is None or _is(value, shape)


def by_name(shape: Shape) -> Check:
    """An object whose values are all that."""
    return lambda value: type(value) is dict and all([_is(inner, shape) for inner in value.values()])


def _is(value: Any, shape: Shape) -> bool:
    return type(value) is shape or (type(shape) is not type and bool(shape(value)))


_FACTS: dict[str, Shape] = {
    "id": is_whole,
    "number": is_whole,
    "step": is_whole,
    "since_s": is_number,
    "term_s": is_number,
    "is_verified": bool,
    "dark": is_texts,
    "state": str,
    "reason": str,
    "code": str,
    "message": str,
    "of": str,
}
"""Of a flush, a stop, a save that is confirmed or refused."""


def require(values: Any, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The values, each of which may be said.

    Raises:
        TypeError: One may not, or they are no object.
    """
    if type(values) is not dict:
        raise TypeError(f"{shown(values)} has no fields")
    for name, value in values.items():
        shape = shapes.get(name)
        # Not by way of `_is`: this is most of what hearing a thousand nodes costs.
        if shape is not None and type(value) is not shape and (type(shape) is type or not shape(value)):
            raise TypeError(f"{name} is {shown(value)}")
    return values

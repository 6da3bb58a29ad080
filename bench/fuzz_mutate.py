"""Damaged and hostile bytes, made of good ones. Everything follows from the random generator that is handed in.

A `Shape` knows where JSON lies in the bytes of a format and how to close them again under a valid checksum, so that the
code behind the checksum is reached.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

EXTREMES = (
    b"-1", b"0", b"1", b"true", b"null", b"0.5", b"-0.0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"1e308", b"5e-324",
    b"2147483648", b"4294967296", b"9007199254740993", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808",
    b"18446744073709551616", b"999999999999999999", b"1000000000000000000", b"9" * 400, b"9" * 4300, b"-" + b"9" * 4300, b"9" * 4301, b"9" * 100_000,
)  # fmt: skip
"""Numbers, and what stands for them: Python reads decimal integers of at most 4300 digits, and one more makes 4301 of them."""
STRINGS = (
    '""', '"a"', r'"\ud800"', r'"\udcff\u0000"', r'"\u0000"', '"../../../../etc/passwd"', '"/dev/zero"', '"000001-../../x"', '"é日本🂡"', r'"a\nb"',
    '"__import__(\'os\').system(\'true\')"', '"' + "A" * 300 + '"', '"' + "A" * 70_000 + '"', '"' + "🂡" * 20_000 + '"', '"9e999"', '"nan"',
    '"' + "9" * 5000 + '"', '"-1"', '"0x10"', '"٣"',
)  # fmt: skip
BAD_UTF8 = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\0\0\0")
OTHER_JSON = (b"[]", b"{}", b"[[]]", b"[{}]", b'{"":[]}', b"[1,2]", b'["a","b"]', b'{"a":{"b":[1]}}', b"[null]")
BINARY = (
    *(struct.pack(form, value) for form in ("<Q", ">Q", "<I", ">I", ">H") for value in (0, 1, 7, 255, 0x7FFF, 0xFFFF)),
    b"\xff" * 8, b"\xff" * 4, b"\x7f" + b"\xff" * 7, struct.pack("<Q", 1 << 40), struct.pack("<Q", 100_000_000), struct.pack(">I", 1 << 30),
)  # fmt: skip
MANY = (2, 3, 30, 1000, 20_000)
_MOST_BYTES = 300_000
_PLACES = 3000
_REWRITTEN_BYTES = 20_000
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")


class Raw:
    """A piece of JSON text that no JSON library would write."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text

    def __repr__(self) -> str:  # without an address: inputs are made of it
        return f"Raw({self.text!r})"


class Pairs(list[list[Any]]):
    """A JSON object whose keys may come twice and in any order."""


def parse(text: bytes) -> Any:
    """JSON, with objects as pairs."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs))


def dump(value: Any) -> bytes:
    """The text again, without blanks."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        return b"{" + b",".join(dump(key) + b":" + dump(inner) for key, inner in value) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(dump, value)) + b"]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=value.isascii() or not value.isprintable()).encode("utf-8", "surrogatepass")
    return json.dumps(value).encode()


def nested(rng: random.Random) -> bytes:
    """Something deep; most often near the depth at which Python gives up."""
    depth = rng.choice((3, 150, 199, 201, rng.randrange(850, 1010), rng.randrange(940, 1000), 5000, 60_000))
    begin, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"~":"tuple","v":[', b"]}")))
    return begin * depth + rng.choice((b"1", b"[]", b'"a"')) + (end * depth if rng.random() < 0.9 else b"")


def scalar(rng: random.Random) -> bytes:
    """A number or a string that somebody may not have thought of."""
    return rng.choice(EXTREMES) if rng.random() < 0.6 else rng.choice(STRINGS).encode()


# -- shapes ----------------------------------------------------------------------------------------------------------------

Fix = Callable[[Any, random.Random], None]
"""Makes what was changed consistent again in some respect."""


class Shape:
    """Bytes without JSON in them."""

    def open(self, data: bytes) -> list[bytes]:
        """The JSON texts in the bytes; none if they have another shape."""
        return []

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        """The bytes with another text, and with checksums that hold."""
        return data

    def reclose(self, data: bytes, rng: random.Random) -> bytes:
        """The same bytes; where they have been damaged, the checksums hold again."""
        texts = self.open(data)
        return self.close(data, number, texts[number], rng) if texts and (number := rng.randrange(len(texts))) is not None else data


class Json(Shape):
    """Nothing but JSON."""

    def open(self, data: bytes) -> list[bytes]:
        return [data]

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        return text


class Record(Shape):
    """Two lines: the record and its sha256."""

    _FORM = re.compile(rb'\{"record": (.*),\n"sha256": ".{64}"\}\n', re.DOTALL)

    def open(self, data: bytes) -> list[bytes]:
        found = self._FORM.fullmatch(data)
        return [found.group(1)] if found else []

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        return b'{"record": ' + text + b',\n"sha256": "' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'

    def is_intact(self, data: bytes) -> bool:
        """The checksum holds, told without the code that is tested."""
        texts = self.open(data)
        return bool(texts) and self.close(data, 0, texts[0], random.Random()) == data


class Journal(Shape):
    """Lines, each with its checksum."""

    def open(self, data: bytes) -> list[bytes]:
        return [line.rpartition(b',"sum":"')[0] + b"}" for line in data.split(b"\n")]

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        lines = data.split(b"\n")
        body = text.removesuffix(b"}")
        lines[number] = body + b',"sum":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'
        return b"\n".join(lines)

    @staticmethod
    def intact_count(data: bytes) -> int:
        """So many lines have checksums that hold."""
        cut = (line.rpartition(b',"sum":"') for line in data.split(b"\n"))
        return sum(tail == xxhash.xxh3_64_hexdigest(body).encode() + b'"}' for body, _, tail in cut)


class Payload(Shape):
    """A safetensors file: length, header, tensors."""

    def open(self, data: bytes) -> list[bytes]:
        length = int.from_bytes(data[:8], "little")
        return [data[8 : 8 + length]] if 8 + length <= len(data) else []

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        body = data[8 + int.from_bytes(data[:8], "little") :]
        ends = [int(end) for end in re.findall(rb",([0-9]{1,6})\]", text)]
        if ends and rng.random() < 0.5:
            body = (body + bytes(max(ends)))[: max(ends)]
        return struct.pack("<Q", len(text)) + text + body


# -- mutation --------------------------------------------------------------------------------------------------------------


class Mutator:
    """Makes one input out of others.

    Args:
        rng: Decides everything.
        shape: What the inputs look like.
        fix: Applied to most changed JSON.
        hints: Pieces of JSON that mean something to the reader.
    """

    def __init__(self, rng: random.Random, shape: Shape, fix: Fix | None = None, hints: Sequence[bytes] = ()) -> None:
        self._rng, self._shape, self._fix, self._hints = rng, shape, fix, hints

    def make(self, pool: Sequence[bytes], limit_bytes: int) -> bytes:
        """Another input, at most so long."""
        rng = self._rng
        data = rng.choice(pool)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 6))):
            data = self._change(data, rng.choice(pool))[: 2 * _MOST_BYTES]  # several of them multiply
        return data[: min(limit_bytes, _MOST_BYTES)]

    def _change(self, data: bytes, other: bytes) -> bytes:
        rng, shape = self._rng, self._shape
        kind = rng.random()
        if kind < 0.15:
            return self._spoil(data, other)
        texts = shape.open(data)
        if not texts:
            return self._spoil(data, other)
        number = rng.randrange(len(texts))
        others = shape.open(other) or texts
        if kind < 0.3:
            text = self._spoil(texts[number], rng.choice(others))
        else:
            try:
                if len(texts[number]) > _REWRITTEN_BYTES:
                    raise ValueError("too large to be taken apart")
                text = self._rewrite(texts[number], rng.choice(others))
            except (ValueError, RecursionError):
                text = self._spoil(texts[number], rng.choice(others))
        return shape.close(data, number, text, rng)

    def _spoil(self, data: bytes, other: bytes) -> bytes:
        """Bytes changed without a thought for what they mean."""
        rng = self._rng
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        if rng.random() < 0.7:
            end = min(end, at + rng.randrange(1, 24))
        kind = rng.randrange(12)
        if kind == 0:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8)) if changed else 0):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        if kind == 1:
            return data[:at] if rng.random() < 0.8 else data[at:]
        if kind == 2:
            return data[:at] + data[end:]
        if kind == 3:
            return data[:end] + data[at:end] * rng.choice(MANY[:3]) + data[end:]
        if kind == 4:
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        if kind == 5:
            return data[:at] + rng.choice(BAD_UTF8) + data[end if rng.random() < 0.5 else at :]
        if kind == 6:
            piece = rng.choice(BINARY)
            at = rng.choice((at, 0, max(len(data) - len(piece), 0)))
            return data[:at] + piece + data[at + len(piece) :]
        if kind == 7:
            lines = data.split(b"\n")
            if rng.random() < 0.5:
                rng.shuffle(lines)
            else:
                lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines if rng.random() < 0.5 else other.split(b"\n")))
                del lines[rng.randrange(len(lines)) : rng.randrange(len(lines) + 1)]
            return b"\n".join(lines)
        numbers = list(_NUMBER.finditer(data, 0, 20_000))
        if kind in (8, 9) and numbers:
            found = rng.choice(numbers)
            return data[: found.start()] + scalar(rng) + data[found.end() :]
        if kind == 10:
            return data[:at] + nested(rng) + data[end:]
        return data[:at] + rng.randbytes(rng.choice((1, 4, 64))) + data[end:]

    def _rewrite(self, text: bytes, other: bytes) -> bytes:
        """Valid JSON, mostly, that says something else."""
        rng = self._rng
        tree = [parse(text)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            places = list(_places(tree))
            holder, at = rng.choice(places)
            kind = rng.randrange(14)
            if kind <= 3:
                holder[at] = Raw(scalar(rng))
            elif kind == 4:
                holder[at] = Raw(rng.choice(OTHER_JSON))
            elif kind == 5:
                holder[at] = Raw(nested(rng))
            elif kind == 6 and self._hints:
                holder[at] = Raw(rng.choice(self._hints))
            elif kind == 7:
                source, index = rng.choice(places)
                # As text: a value that stands inside itself has no end.
                mine, theirs = Raw(dump(holder[at])), Raw(dump(source[index]))
                holder[at] = theirs
                if rng.random() < 0.5:
                    source[index] = mine
            elif kind == 8:
                source, index = rng.choice(list(_places([parse(other)])))
                holder[at] = Raw(dump(source[index]))
            elif kind == 9:
                holder[at] = [holder[at]] if rng.random() < 0.5 else Pairs([["~" if rng.random() < 0.5 else "a", holder[at]], ["v", 1]])
            elif kind in (10, 11, 12):
                lists = [inner[index] for inner, index in places if isinstance(inner[index], list) and inner[index]]
                if lists:
                    self._reorder(rng.choice(lists))
            elif isinstance(holder[at], str) and holder[at]:
                old = holder[at]
                cut = rng.randrange(len(old))
                strange = chr(rng.choice((0, 32, 0xD800, 0x1F0A1)))
                holder[at] = rng.choice((old[:cut], old[cut:], old + old, old.upper(), old[:cut] + strange + old[cut:]))
            elif type(holder[at]) is int:
                holder[at] += rng.choice((-1, 1, 1000))
        value = tree[0]
        if self._fix is not None and rng.random() < 0.8:
            self._fix(value, rng)
        return dump(value)

    def _reorder(self, items: list[Any]) -> None:
        """Items of a list, or keys of an object, come twice, not at all, or elsewhere."""
        rng = self._rng
        at = rng.randrange(len(items))
        kind = rng.randrange(5)
        if kind == 0:
            del items[at]
        elif kind == 1:
            items.append(list(items[at]) if isinstance(items, Pairs) else items[at])
        elif kind == 2:
            size = len(dump(items[at] if not isinstance(items, Pairs) else items[at][1])) + 2
            count = min(rng.choice(MANY), max(_MOST_BYTES // 2 // size, 1))
            if isinstance(items, Pairs):
                value = Raw(dump(items[at][1]))
                items.extend([f"{items[at][0]}{number}", value] for number in range(min(count, 4000)))
            else:
                items.append(Raw(b",".join([dump(items[at])] * count)))
        elif kind == 3:
            rng.shuffle(items)
        elif isinstance(items, Pairs):
            items[at] = [rng.choice(items)[0] if rng.random() < 0.5 else rng.choice(("", "~", "v", "format", "\ud800", "A" * 5000)), items[at][1]]
        else:
            items.insert(at, Raw(scalar(rng)))


def _places(tree: list[Any]) -> Any:
    """Every value in the tree, as where it stands."""
    todo: list[tuple[list[Any], int]] = [(tree, 0)]
    for _ in range(_PLACES):
        if not todo:
            return
        holder, at = todo.pop()
        yield holder, at
        value = holder[at]
        if isinstance(value, Pairs):
            todo.extend((pair, 1) for pair in value[:200])
        elif isinstance(value, list):
            todo.extend((value, index) for index in range(min(len(value), 200)))

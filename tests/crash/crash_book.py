"""What was said about a run before its power was cut, what a reader finds afterwards, and what may therefore never be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Mark = tuple[Any, ...]


@dataclass(slots=True)
class Book:
    """What was said before a cut, and what therefore must be true after it."""

    run_uid: str | None = None
    attempts: set[tuple[int, str]] = field(default_factory=set)
    durable: dict[str, tuple[int, int]] = field(default_factory=dict)
    verified: dict[str, tuple[int, int]] = field(default_factory=dict)
    removing: set[str] = field(default_factory=set)
    spoiled: set[tuple[str, str]] = field(default_factory=set)
    claims: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def hear(self, mark: Mark) -> None:
        kind, *data = mark
        if kind == "started":
            self.run_uid = data[0]
            self.attempts.add((data[1], data[2]))
            self._claim(data[1], data[2])
        elif kind == "claimed":
            self._claim(*data)
        elif kind == "durable":
            self.durable[data[0]] = (data[1], data[2])
        elif kind == "verified":
            self.verified[data[0]] = (data[1], data[2])
        elif kind == "spoiled":
            self.spoiled.add((data[0], data[1]))
        elif kind == "released":
            self.spoiled.discard((data[0], data[1]))
        elif kind == "removing":
            self._remove(data[0])

    def _claim(self, seq: int, nonce: str) -> None:
        if self.claims.setdefault(seq, nonce) != nonce:
            self.wrong.append(f"number {seq} was given to {self.claims[seq][:8]} and to {nonce[:8]}")

    def _remove(self, dir_name: str) -> None:
        own = self.durable.get(dir_name)
        if own is not None and not any(place > own for place in self.proven().values()):
            self.wrong.append(f"{dir_name} is being removed and no newer one is verified")
        self.removing.add(dir_name)

    def proven(self) -> dict[str, tuple[int, int]]:
        damaged = {dir_name for dir_name, _ in self.spoiled}
        return {name: place for name, place in self.verified.items() if name not in damaged}

    def owed(self) -> dict[str, tuple[int, int]]:
        """What must be restorable: everything durable that was neither damaged by us nor given up for a newer one."""
        damaged = {dir_name for dir_name, _ in self.spoiled}
        owed = {name: place for name, place in self.durable.items() if name not in damaged and name not in self.removing}
        proven = self.proven()
        if proven:
            newest = max(proven, key=lambda name: proven[name])
            owed[newest] = proven[newest]
        return owed


def book_of(marks: tuple[Mark, ...]) -> Book:
    book = Book()
    for mark in marks:
        book.hear(mark)
    return book


@dataclass(slots=True)
class Seen:
    """What the readers found on one state of the disk."""

    wrong: list[str] = field(default_factory=list)
    is_missing: bool = False
    run_uid: str = ""
    attempts: frozenset[tuple[int, str]] = frozenset()
    next_seq: int = 0
    loaded: tuple[int, int] | None = None
    loaded_dir: str = ""
    steps: dict[int, str | None] = field(default_factory=dict)
    broken: set[tuple[str, str]] = field(default_factory=set)
    claims: dict[int, str] = field(default_factory=dict)


def judge(book: Book, seen: Seen) -> list[str]:
    """What must not be, given what was said."""
    wrong = [*book.wrong, *seen.wrong]
    if seen.is_missing:
        return [*wrong, *(["the run is gone"] if book.run_uid else [])]
    if seen.wrong and not seen.run_uid:
        return wrong
    if book.run_uid is not None and seen.run_uid != book.run_uid:
        wrong.append("it is another run")
    wrong.extend(f"attempt {seq} was started and its record is gone" for seq, nonce in book.attempts if (seq, nonce) not in seen.attempts)
    for seq, nonce in book.claims.items():
        if seen.claims.get(seq) != nonce:
            wrong.append(f"number {seq} was claimed by {nonce[:8]}, and its claim says {seen.claims.get(seq, 'nothing')[:8] or 'torn'}")
        if seen.next_seq <= seq:
            wrong.append(f"number {seq} would be given a second time")
    wrong.extend(f"{name}/{part} is sealed and damaged" for name, part in seen.broken - book.spoiled)
    owed = book.owed()
    for name, (_, step) in owed.items():
        if step not in seen.steps:
            wrong.append(f"{name} was durable and is gone")
        elif seen.steps[step] is not None:
            wrong.append(f"{name} was durable and is damaged: {seen.steps[step]}")
    newest = max(owed.values(), default=None)
    if newest is not None and (seen.loaded is None or seen.loaded < newest):
        wrong.append(f"step {newest[1]} of attempt {newest[0]} was durable, loaded is {seen.loaded}")
    return wrong

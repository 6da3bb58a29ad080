"""What a power cut may leave on a disk: what is durable, what is pending, and which parts of that may have landed. Pure.

Entries and inodes are separate: a file can be there without a name, and a name can point to an
empty file. An operation that promises nothing yet leaves *changes* pending, each of which lands
or is lost by itself. The assumptions are those that SQLite states: bytes outside a written range
never change, a page is written whole or not at all, and a sync that returns has told the truth.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Profile = Literal["posix", "journal"]
"""What a file system promises about pending changes.

``posix``: nothing at all, any of them may land. ``journal``: entry changes land in their order, and the sync of a new
file keeps its name too, as on ext4 and XFS; says which failures of a store are real today.
"""

EXHAUSTIVE_STATES = 1 << 10
"""Up to so many sets of landed changes every one is tried; beyond, those of `sampled`."""


class Image(NamedTuple):
    """Everything on a disk, by inode number. Never changed in place: images share what they have in common."""

    root: int
    dirs: dict[int, dict[str, int]]
    files: dict[int, bytes]

    def key(self) -> int:
        """Equal for images that no reader can tell apart."""
        dirs, files = self.dirs, self.files

        def of(inode: int) -> int:
            entries = dirs.get(inode)
            if entries is None:
                return hash(files[inode])
            return hash(frozenset((name, of(child)) for name, child in entries.items()))

        return of(self.root)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a file is as it was after this write."""

    serial: int
    file: int
    index: int
    data: bytes

    def __str__(self) -> str:
        return f"page {self.index}"


@dataclass(frozen=True, slots=True)
class Size:
    """The file has this length: without its pages it is zeros, and its pages without it are cut short."""

    serial: int
    file: int
    size_bytes: int

    def __str__(self) -> str:
        return f"size {self.size_bytes}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A name is gone, a name is made, or both at once (rename: never neither)."""

    serial: int
    gone: tuple[int, str, int] | None
    """Directory, name and the inode that had it."""
    made: tuple[int, str, int] | None
    """Directory, name and the inode that has it."""

    def __str__(self) -> str:
        return "entry"


Change = Page | Size | Entry


class Call(NamedTuple):
    """One call, in the order in which the disks saw them."""

    disk: str
    name: str
    path: str
    changes: tuple[Change, ...] = ()
    """What it left pending."""
    synced: int = 0
    """The inode that it made durable."""
    new_dir: int = 0
    new_file: int = 0
    flipped: bytes | None = None
    """What the medium now holds of the synced file."""
    said: Any = None
    """For a mark: what somebody was told by then."""


@dataclass(slots=True)
class Medium:
    """One disk while its calls are played back: what is durable, and what is pending in order."""

    profile: Profile
    root: int
    dirs: dict[int, dict[str, int]]
    files: dict[int, bytes]
    page_bytes: int
    pending: list[Change] = field(default_factory=list)
    _contents: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    def apply(self, call: Call) -> None:
        """The call has been made."""
        if call.new_dir:
            self.dirs[call.new_dir] = {}
        if call.new_file:
            self.files[call.new_file] = b""
        self.pending.extend(call.changes)
        if call.flipped is not None:
            self.files[call.synced] = call.flipped
        elif call.synced:
            self._sync(call.synced)

    def _sync(self, inode: int) -> None:
        if self.profile == "journal":
            # Committing the journal for one name commits every earlier entry change with it.
            named = [place for place, change in enumerate(self.pending) if isinstance(change, Entry) and _touches(change, inode)]
            if named:
                head = self.pending[: named[-1] + 1]
                self._land([change for change in head if isinstance(change, Entry)])
        if inode in self.dirs:
            for change in [c for c in self.pending if isinstance(c, Entry) and _is_in(c, inode)]:
                self._sync_entry(change, inode)
        else:
            self._land([change for change in self.pending if not isinstance(change, Entry) and change.file == inode])
        self._contents.clear()

    def _sync_entry(self, change: Entry, directory: int) -> None:
        if change.gone is None or change.made is None or change.gone[0] == change.made[0]:
            self._land([change])
        elif change.made[0] == directory:
            # Across directories: the new name is durable, the old one may still be there too.
            place = self.pending.index(change)
            self._land([change])
            self.dirs[change.gone[0]] = {**self.dirs[change.gone[0]], change.gone[1]: change.gone[2]}
            self.pending.insert(place, Entry(change.serial, change.gone, None))
        # The old directory alone: were only its half durable, a cut could leave neither name.

    def _land(self, changes: list[Change] | list[Entry] | list[Page | Size]) -> None:
        image = self.image(changes)
        self.dirs, self.files = image.dirs, image.files
        landed = {change.serial for change in changes}
        self.pending = [change for change in self.pending if change.serial not in landed]

    def image(self, landed: Sequence[Change]) -> Image:
        """The disk after a cut at which these pending changes had landed."""
        dirs, files = dict(self.dirs), dict(self.files)
        own: set[int] = set()
        data: dict[int, list[Page | Size]] = {}
        for change in landed:
            if not isinstance(change, Entry):
                data.setdefault(change.file, []).append(change)
                continue
            for half in (change.gone, change.made):
                if half is not None and half[0] not in own:
                    own.add(half[0])
                    dirs[half[0]] = dict(dirs[half[0]])
            # A removal means the name; a rename takes only its own file away from it.
            if change.gone is not None and (change.made is None or dirs[change.gone[0]].get(change.gone[1]) == change.gone[2]):
                dirs[change.gone[0]].pop(change.gone[1], None)
            if change.made is not None:
                dirs[change.made[0]][change.made[1]] = change.made[2]
        for file, changes in data.items():
            files[file] = self._content(file, changes)
        return Image(self.root, dirs, files)

    def _content(self, file: int, changes: list[Page | Size]) -> bytes:
        key = tuple(change.serial for change in changes)
        known = self._contents.get(key)
        if known is None:
            content = bytearray(self.files[file])
            size = len(content)
            for change in changes:
                if isinstance(change, Size):
                    size = change.size_bytes
                else:
                    begin = change.index * self.page_bytes
                    content.extend(bytes(max(0, begin - len(content))))
                    content[begin : begin + len(change.data)] = change.data
            content.extend(bytes(max(0, size - len(content))))
            known = self._contents[key] = bytes(content[:size])
        return known


def _is_in(change: Entry, directory: int) -> bool:
    return any(half is not None and half[0] == directory for half in (change.gone, change.made))


def _touches(change: Entry, inode: int) -> bool:
    return any(half is not None and inode in (half[0], half[2]) for half in (change.gone, change.made))


def landings(pending: Sequence[Change], *, profile: Profile, limit: int, random_count: int, chance: random.Random) -> Iterator[tuple[Change, ...]]:
    """Sets of pending changes that may have landed at a cut: every legal one up to `limit` of them, else those of `sampled`."""
    if profile == "journal":
        entries = [change for change in pending if isinstance(change, Entry)]
        others = len(pending) - len(entries)
        if (len(entries) + 1) << others <= limit:
            for kept in range(len(entries) + 1):
                lost = {change.serial for change in entries[kept:]}
                rest = [change for change in pending if change.serial not in lost]
                yield from _subsets(rest, [not isinstance(change, Entry) for change in rest])
            return
    elif 1 << len(pending) <= limit:
        yield from _subsets(pending, [True] * len(pending))
        return
    seen = set()
    for wanted in sampled(pending, random_count=random_count, chance=chance):
        landed = in_order(wanted, pending) if profile == "journal" else wanted
        key = tuple(change.serial for change in landed)
        if key not in seen:
            seen.add(key)
            yield landed


def _subsets(changes: Sequence[Change], is_free: list[bool]) -> Iterator[tuple[Change, ...]]:
    for picks in itertools.product(*([(False, True) if free else (True,) for free in is_free])):
        yield tuple(itertools.compress(changes, picks))


def in_order(landed: Sequence[Change], pending: Sequence[Change]) -> tuple[Change, ...]:
    """Without the entry changes that came after one that was lost."""
    have = {change.serial for change in landed}
    lost = next((change.serial for change in pending if isinstance(change, Entry) and change.serial not in have), None)
    return tuple(change for change in landed if lost is None or not isinstance(change, Entry) or change.serial < lost)


def sampled(pending: Sequence[Change], *, random_count: int, chance: random.Random) -> Iterator[tuple[Change, ...]]:
    """None, all, each prefix, each alone, all but each, names without data, data without names, the last write torn, some at random."""
    yield ()
    for end in range(1, len(pending) + 1):
        yield tuple(pending[:end])
    for change in pending:
        yield (change,)
        yield tuple(other for other in pending if other is not change)
    yield tuple(change for change in pending if isinstance(change, Entry))
    yield tuple(change for change in pending if not isinstance(change, Entry))
    pages = [change for change in pending if isinstance(change, Page)]
    if pages:
        last = [page for page in pages if page.file == pages[-1].file]
        for kept in {1, len(last) // 2, len(last) - 1}:
            torn = {page.serial for page in last[kept:]}
            yield tuple(change for change in pending if change.serial not in torn)
    for _ in range(random_count):
        rate = chance.random()
        yield tuple(change for change in pending if chance.random() < rate)

"""What the measurements of a place came to. None everywhere means: not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridethrough.seam.place import Block, Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """How long one call took, over many."""

    count: int
    median_s: float
    p99_s: float
    slowest_s: float


def timed(durations_s: Sequence[float]) -> Timed:
    """Median, p99 (nearest rank: the slowest of fewer than 101) and slowest of one duration or more."""
    ordered = sorted(durations_s)
    last = len(ordered) - 1
    return Timed(count=len(ordered), median_s=ordered[last // 2], p99_s=ordered[min(last, int(len(ordered) * 0.99))], slowest_s=ordered[last])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Small writes with and without fsync."""

    refused: str | None
    """What fsync answered instead of yes."""
    write: Timed | None
    """4 KiB without fsync."""
    synced: Timed | None
    """4 KiB and fsync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirSync:
    """Fsync of a directory after a rename in it."""

    refused: str | None
    took: Timed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """One process replaces a file by rename, another one reads it all the while."""

    renames_count: int
    reads_count: int
    missing_count: int
    torn_count: int
    """Reads that were neither the old file nor the new one."""
    unreadable_count: int
    """Reads that failed otherwise, as with ESTALE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusive:
    """Several processes create the same new name, again and again."""

    processes_count: int
    races_count: int
    won_by_none_count: int
    won_by_several_count: int
    refused: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls that some places do not have."""

    has_links: bool
    reads_past_cache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Creates:
    """So many processes create files in one directory at the same time."""

    processes_count: int
    created_count: int
    took_s: float
    median_s: float
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """One large file, written with fsync as a save writes it, and read back past the cache."""

    size_bytes: int
    write_s: float
    read_bytes: int
    read_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What another node saw of what this one made; None where it was not seen while it was waited for."""

    host: str
    error: str | None
    """Why it could not be asked."""
    mount: str | None = None
    """File system and source there."""
    watched_s: float | None = None
    """A new file that it was looking for before it was there."""
    fresh_s: float | None = None
    """A new file that it had not looked for before."""
    listed_s: float | None = None
    """A new file, in a listing that had been read before."""
    replaced_s: float | None = None
    """A file it had read, replaced by rename."""
    torn_count: int | None = None
    """Reads that gave neither the old content nor the new one."""
    won_by_none_count: int | None = None
    won_by_several_count: int | None = None
    """Races of this node with it for the same new names."""
    races_count: int | None = None
    race_refused: str | None = None
    """What a create in such a race answered that neither won nor lost."""
    answer_s: float | None = None
    """One question and its answer: figures below that mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest checkpoint of a run that is at the place."""

    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything about a place."""

    path: str
    mount: Mount | None
    block: Block | None
    below: Mount | None
    """What holds the upper directory of an overlay."""
    total_bytes: int
    free_bytes: int
    sync: Sync | None
    dir_sync: DirSync | None
    rename: Rename | None
    exclusive: Exclusive | None
    calls: Calls | None
    bandwidth: Bandwidth | None
    creates: tuple[Creates, ...]
    seen: tuple[Seen, ...]
    newest: Newest | None
    waited_s: float
    """How long a peer was given to see something."""
    not_removed: tuple[str, ...] = ()
    """What earlier checks left and this one may not remove."""

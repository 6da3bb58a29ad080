"""From findings to facts, save times, remarks and a verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ridethrough.config import QUESTIONS, StorageFacts
from ridethrough.seam.place import Mount
from ridethrough.store.assess.findings import Creates, Findings, Rename, Seen, Sync, Timed

_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "beegfs_nodev", "afs", "orangefs", "pvfs2", "gfs2", "ocfs2", "9p", "virtiofs",
    "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.cephfs", "fuse.ceph-fuse", "fuse.juicefs", "fuse.JuiceFS", "fuse.s3fs", "fuse.gcsfuse",
    "fuse.rclone", "fuse.mountpoint-s3", "fuse.goofys", "fuse.blobfuse2", "fuse.beegfs", "fuse.weka",
}  # fmt: skip
_PROVEN = {"ext4", "xfs", "btrfs"}
_NO_FLUSH = ("nobarrier", "barrier=0")
_SUSPICIOUS_RATIO = 3.0
"""A write of 4 KiB takes microseconds, what makes it last takes at least tens of them, also on flash with protected memory."""
_SUSPICIOUS_ROTATING_S = 0.001
"""Half a turn at 15,000 a minute takes twice as long."""
_SLOW_CREATE_S = 1.0
_LATE_S = 1.0
GIB = 1 << 30
SAVE_SIZES_BYTES = (GIB, 10 * GIB, 100 * GIB)


class State(StrEnum):
    """Where a fact comes from."""

    MEASURED = "measured"
    CONFIGURED = "configured"
    UNKNOWN = "unknown"


class Verdict(StrEnum):
    """Whether checkpoints may go there."""

    FIT = "fit"
    REMARKS = "fit-with-remarks"
    UNFIT = "not-fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing about the place."""

    name: str
    state: State
    text: str
    how: str
    """How it was found; for what is unknown, how to find it."""
    figures: Mapping[str, float | int | bool | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What a save of one node takes there, alone."""

    size_bytes: int
    step: int | None
    """Of the checkpoint of that size; None for an example."""
    durable_s: float
    interval_s: float
    """Saves can be made at most this often: one is written and read back before the next."""
    lost_s: float
    """The RPO floor: what a cut just before a save is durable costs, with saves as often as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The answer."""

    verdict: Verdict
    reason: str
    """In one line."""
    objections: tuple[str, ...]
    """What makes it not fit."""
    remarks: tuple[str, ...]
    facts: tuple[Fact, ...]
    saves: tuple[Save, ...]
    """Empty where the place is not fit, or bandwidth was not measured."""


def judge(found: Findings, told: StorageFacts | None) -> Assessment:
    """What the findings mean.

    Args:
        found: What was measured.
        told: What a person wrote about the place.
    """
    notes = _Notes()
    facts = [
        *_of_mount(found, notes), *_of_sync(found, notes), *_of_names(found, notes), *_of_bandwidth(found, notes),
        *_of_creates(found, notes), *_of_peers(found, notes), *_of_questions(found, told),
    ]  # fmt: skip
    notes.remarks += [f"{name} of an earlier check is left: remove it as its owner" for name in found.not_removed]
    objections, remarks = tuple(notes.objections), tuple(notes.remarks)
    if objections:
        verdict, reason = Verdict.UNFIT, f"not fit for checkpoints: {objections[0]}"
    elif remarks:
        verdict, reason = Verdict.REMARKS, f"fit for checkpoints, with {len(remarks)} remark{'s' if len(remarks) > 1 else ''}"
    else:
        verdict, reason = Verdict.FIT, "fit for checkpoints, as far as software can tell"
    # Nothing is called durable, not even in a table of examples, where it would not be.
    saves = () if objections else _saves(found)
    return Assessment(verdict=verdict, reason=reason, objections=objections, remarks=remarks, facts=tuple(facts), saves=saves)


@dataclass(slots=True)
class _Notes:
    objections: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def kind_of(mount: Mount) -> str:
    """What sort of file system it is: local disk, memory, network, overlay, or a program (FUSE)."""
    name = mount.file_system
    if name in _MEMORY:
        return "memory"
    if name in _NETWORK:
        return "network"
    if name == "overlay":
        return "overlay"
    return "program" if name.startswith("fuse") and name != "fuseblk" else "local"


def _of_mount(found: Findings, notes: _Notes) -> list[Fact]:
    mount, how = found.mount, "/proc/self/mountinfo"
    if mount is None:
        return [Fact(name="file system", state=State.UNKNOWN, text="not found", how=how)]
    kind = kind_of(mount)
    _judge_kind(found, mount, kind, notes)
    words = {
        "memory": "memory", "network": "a network file system", "overlay": "an overlay", "program": "served by a program (FUSE)",
        "local": "local" if found.block else "on no disk that the kernel names",
    }  # fmt: skip
    disk = f" on {found.block.name}" if found.block else ""
    facts = [
        Fact(
            name="file system",
            state=State.MEASURED,
            text=f"{mount.file_system} from {mount.source}{disk}, {words[kind]}",
            how=how,
            figures={"file_system": mount.file_system, "source": mount.source, "kind": kind, "disk": found.block.name if found.block else None},
        ),
        Fact(name="mount options", state=State.CONFIGURED, text=",".join(mount.options), how=how),
    ]
    if found.block is None:
        return facts
    cache, name = found.block.write_cache, f"/sys/block/{found.block.name}/queue/write_cache"
    if cache is None:
        return [*facts, Fact(name="drive's cache", state=State.UNKNOWN, text="the kernel does not say", how=name)]
    meaning = {"write back": "volatile, flushed at each fsync", "write through": "none that it admits to: fsync sends no flush"}.get(cache, "")
    facts.append(Fact(name="drive's cache", state=State.MEASURED, text=f"{cache}: {meaning}", how=name, figures={"write_cache": cache}))
    return facts


def _judge_kind(found: Findings, mount: Mount, kind: str, notes: _Notes) -> None:
    if kind == "memory":
        notes.objections.append(f"{mount.file_system} is memory, gone with the power")
    elif kind == "overlay":
        below = found.below
        if mount.option("volatile") is not None or mount.option("fsync") == "volatile":
            notes.objections.append("overlay mounted volatile: fsync does nothing")
        elif below is not None and kind_of(below) == "memory":
            notes.objections.append(f"the overlay's upper directory is on {below.file_system}, gone with the power")
        else:
            where = f"on {below.file_system}" if below is not None else "on a disk that is not seen from here"
            notes.remarks.append(f"an overlay, its upper directory {where}; if that is a container's own layer, it goes with the container")
    elif kind == "network":
        notes.remarks.append(f"{mount.file_system}: whether the server keeps what it acknowledges when its power fails cannot be told from here")
    elif kind == "program":
        notes.remarks.append(f"{mount.file_system}: what fsync does is up to the program that serves it")
    elif mount.file_system not in _PROVEN:
        notes.remarks.append(f"{mount.file_system}: no power cut has been tested on it")
    is_volatile = found.block is None or found.block.write_cache != "write through"
    off = next((option for option in _NO_FLUSH if option in mount.options), None)
    if off and is_volatile:
        notes.objections.append(f"mounted with {off}: the drive's cache is not flushed")
    if found.block is not None and found.block.backing_file is not None:
        notes.remarks.append(f"{found.block.name} is the file {found.block.backing_file}: not safer than the disk that holds it")


def _of_sync(found: Findings, notes: _Notes) -> list[Fact]:
    sync = found.sync
    if sync is None:
        return []
    if sync.refused is not None or sync.synced is None or sync.write is None:
        notes.objections.append(f"fsync is refused ({sync.refused})")
        return [Fact(name="fsync", state=State.MEASURED, text=f"refused: {sync.refused}", how="4 KiB and fsync")]
    ratio = sync.synced.median_s / max(sync.write.median_s, 1e-9)
    _judge_sync(found, sync.synced, ratio, notes)
    facts = [
        Fact(
            name="fsync",
            state=State.MEASURED,
            text=_took(sync.synced),
            how=f"{sync.synced.count} times 4 KiB and fsync",
            figures=_figures(sync.synced),
        ),
        _ratio(sync, sync.write, ratio),
        Fact(
            name="what it reaches",
            state=State.UNKNOWN,
            text="whether fsync reaches the medium",
            how="no software can tell: cut the power during a save, then ridethrough verify",
        ),
    ]
    directory = found.dir_sync
    if directory is not None and directory.took is None:
        notes.objections.append(f"fsync of a directory is refused ({directory.refused}): a rename may be undone by a power cut")
        facts.append(Fact(name="directory fsync", state=State.MEASURED, text=f"refused: {directory.refused}", how="after a rename"))
    elif directory is not None and directory.took is not None:
        how = f"after each of {directory.took.count} renames"
        facts.append(Fact(name="directory fsync", state=State.MEASURED, text=_took(directory.took), how=how, figures=_figures(directory.took)))
    return facts


def _ratio(sync: Sync, write: Timed, ratio: float) -> Fact:
    return Fact(
        name="cost of fsync",
        state=State.MEASURED,
        text=f"{ratio:.1f} times a write alone",
        how=f"medians; {write.count} times 4 KiB without fsync: {human_s(write.median_s)}",
        figures={"ratio": ratio, "write_median_s": write.median_s},
    )


def _judge_sync(found: Findings, synced: Timed, ratio: float, notes: _Notes) -> None:
    if found.mount is not None and kind_of(found.mount) == "memory":
        return  # cheap for a reason, and objected to already
    if ratio < _SUSPICIOUS_RATIO:
        notes.remarks.append(f"suspicious, no proof: fsync costs hardly more than the write ({ratio:.1f} times). Somebody may acknowledge early")
    elif found.block is not None and found.block.is_rotational and synced.median_s < _SUSPICIOUS_ROTATING_S:
        notes.remarks.append(
            f"suspicious, no proof: {found.block.name} says that it rotates, and fsync takes {human_s(synced.median_s)}. "
            "A virtual disk or a controller with memory of its own: is that protected?"
        )


def _of_names(found: Findings, notes: _Notes) -> list[Fact]:
    facts = []
    rename, race, calls = found.rename, found.exclusive, found.calls
    if rename is not None:
        facts.append(_of_rename(rename, notes))
    if race is not None:
        facts.append(_of_races(found, notes))
    if calls is not None:
        text = "work" if calls.has_links else "none (nothing here needs them)"
        facts.append(Fact(name="hard links", state=State.MEASURED, text=text, how="link()", figures={"has_links": calls.has_links}))
        text = "works" if calls.reads_past_cache else "refused"
        facts.append(
            Fact(name="O_DIRECT", state=State.MEASURED, text=text, how="open() and read()", figures={"reads_past_cache": calls.reads_past_cache})
        )
        if not calls.reads_past_cache:
            notes.remarks.append("no O_DIRECT: 'verified' rests on a hint that the kernel may ignore")
    return facts


def _of_rename(rename: Rename, notes: _Notes) -> Fact:
    counted = f"{rename.reads_count} reads in {rename.renames_count} renames, {rename.missing_count} no file, {rename.torn_count} torn"
    text = "atomic, replaces"
    if rename.missing_count or rename.unreadable_count:
        text = "replaces, not atomic for a reader"
        # A seal, which decides whether a checkpoint exists, always gets a new name.
        notes.remarks.append(f"a reader may fail while a file is replaced ({counted}); no file that a resume rests on is ever replaced")
    if rename.torn_count:
        text = "not atomic"
        notes.objections.append(f"rename is not atomic for a reader ({counted})")
    figures = {name: getattr(rename, name) for name in ("renames_count", "reads_count", "missing_count", "torn_count", "unreadable_count")}
    how = f"two processes of this node; {counted}"
    return Fact(name="rename", state=State.MEASURED, text=text, how=how, figures=figures)


def _of_races(found: Findings, notes: _Notes) -> Fact:
    race = found.exclusive
    assert race is not None
    how = f"{race.processes_count} processes of this node, {race.races_count} names"
    figures = {name: getattr(race, name) for name in ("processes_count", "races_count", "won_by_none_count", "won_by_several_count")}
    if race.refused is not None:
        notes.objections.append(f"exclusive create is refused ({race.refused})")
        return Fact(name="exclusive create", state=State.MEASURED, text=f"refused: {race.refused}", how=how, figures=figures)
    if race.won_by_several_count:
        notes.objections.append(f"exclusive create has several winners ({race.won_by_several_count} of {race.races_count} races)")
    if race.won_by_none_count:
        notes.remarks.append(f"exclusive create had no winner in {race.won_by_none_count} of {race.races_count} races")
    is_good = not race.won_by_several_count and not race.won_by_none_count
    text = "one winner each time" if is_good else f"{race.won_by_several_count} with several winners, {race.won_by_none_count} with none"
    return Fact(name="exclusive create", state=State.MEASURED, text=text, how=how, figures=figures)


def _of_bandwidth(found: Findings, notes: _Notes) -> list[Fact]:
    moved = found.bandwidth
    if moved is None:
        if found.sync is not None and found.sync.refused is None:
            notes.remarks.append("too little space is free to measure bandwidth")
        return [Fact(name="bandwidth", state=State.UNKNOWN, text="not measured", how="--size BYTES, with space for it")]
    write, read = moved.size_bytes / moved.write_s, moved.read_bytes / moved.read_s
    is_past = found.calls is not None and found.calls.reads_past_cache
    where = "past the page cache; drive or server may have it in memory" if is_past else "perhaps from the page cache"
    return [
        Fact(
            name="write",
            state=State.MEASURED,
            text=f"{_rate(write)}",
            how=f"{_size(moved.size_bytes)} in one file, fsync included",
            figures={"write_bytes_per_s": write, "size_bytes": moved.size_bytes, "took_s": moved.write_s},
        ),
        Fact(
            name="read",
            state=State.MEASURED,
            text=f"{_rate(read)}",
            how=f"{_size(moved.read_bytes)}, {where}",
            figures={"read_bytes_per_s": read, "size_bytes": moved.read_bytes, "took_s": moved.read_s},
        ),
    ]


def _of_creates(found: Findings, notes: _Notes) -> list[Fact]:
    facts = []
    for row in found.creates:
        facts.append(_of_create(row))
        if row.slowest_s > _SLOW_CREATE_S:
            notes.remarks.append(f"with {row.processes_count} processes creating files the slowest waited {human_s(row.slowest_s)}")
    return facts


def _of_create(row: Creates) -> Fact:
    per_s = row.created_count / max(row.took_s, 1e-9)
    return Fact(
        name=f"creates, {row.processes_count} at once",
        state=State.MEASURED,
        text=f"{per_s:,.0f}/s, median {human_s(row.median_s)}, slowest {human_s(row.slowest_s)}",
        how=f"{row.created_count} files in one directory",
        figures={"processes_count": row.processes_count, "creates_per_s": per_s, "median_s": row.median_s, "slowest_s": row.slowest_s},
    )


def _of_peers(found: Findings, notes: _Notes) -> list[Fact]:
    if not found.seen:
        how = "ridethrough storage check PATH --peers HOST,HOST"
        return [Fact(name="seen by others", state=State.UNKNOWN, text="no other node was asked", how=how)]
    return [_of_peer(seen, found.waited_s, notes) for seen in found.seen]


def _of_peer(seen: Seen, waited_s: float, notes: _Notes) -> Fact:
    name = f"seen by {seen.host}"
    if seen.error is not None:
        notes.remarks.append(f"{seen.host} was not asked: {seen.error}")
        return Fact(name=name, state=State.UNKNOWN, text="not asked", how=seen.error)
    sights = {"new file": seen.fresh_s, "one waited for": seen.watched_s, "in a listing": seen.listed_s, "one replaced": seen.replaced_s}
    figures = {key: getattr(seen, key) for key in (
        "answer_s", "fresh_s", "watched_s", "listed_s", "replaced_s", "torn_count", "races_count", "won_by_none_count", "won_by_several_count",
    )}  # fmt: skip
    how = f"{seen.mount or 'unknown'} there; an answer takes {human_s(seen.answer_s or 0.0)}"
    if seen.fresh_s is None:
        notes.objections.append(f"{seen.host} does not see what is made here (within {waited_s:.0f} s): another directory there?")
        return Fact(name=name, state=State.MEASURED, text="never", how=how, figures=figures)
    late = [f"{what} {'not within ' + human_s(waited_s) if s is None else human_s(s)}" for what, s in sights.items()]
    slow = [text for text, s in zip(late, sights.values(), strict=True) if s is None or s > _LATE_S]
    if slow:
        notes.remarks.append(f"{seen.host} sees late: {', '.join(slow)}. Caching of its mount")
    if seen.race_refused:
        notes.remarks.append(f"exclusive create against {seen.host} failed ({seen.race_refused}): a start may fail and must be tried again")
    if seen.torn_count:
        notes.objections.append(f"{seen.host} read files that were neither old nor new ({seen.torn_count} times)")
    if seen.won_by_several_count:
        notes.objections.append(f"this node and {seen.host} both won exclusive creates ({seen.won_by_several_count} of {seen.races_count})")
    if seen.won_by_none_count:
        notes.remarks.append(f"neither this node nor {seen.host} won {seen.won_by_none_count} of {seen.races_count} exclusive creates")
    return Fact(name=name, state=State.MEASURED, text=f"{', '.join(late)}", how=how, figures=figures)


_ASKED = {
    "replicas": ("copies", "replicas or erasure coding"),
    "repair": ("repair", "time until it is whole again after a cut"),
    "concurrent_writes": ("concurrent writes", "what it promises to several writers"),
    "one_node_dark": ("one node dark", "whether it stays available without one of its storage nodes"),
}
assert tuple(_ASKED) == QUESTIONS


def _of_questions(found: Findings, told: StorageFacts | None) -> list[Fact]:
    facts = []
    raced = [seen for seen in found.seen if seen.races_count is not None]
    for key, (name, question) in _ASKED.items():
        text = getattr(told, key) if told is not None else None
        if told is not None and text:
            facts.append(Fact(name=name, state=State.CONFIGURED, text=text, how=f'[storage_facts."{told.path}"] {key}'))
        elif key == "concurrent_writes" and raced:
            several = sum(seen.won_by_several_count or 0 for seen in raced)
            races = sum(seen.races_count or 0 for seen in raced)
            text = f"{several} of {races} exclusive creates had two winners, {sum(seen.torn_count or 0 for seen in raced)} reads were torn"
            facts.append(Fact(name=name, state=State.MEASURED, text=text, how=f"with {', '.join(seen.host for seen in raced)}"))
        else:
            how = f"ask who runs it; then storage_facts.PATH.{key} in ridethrough.toml"
            facts.append(Fact(name=name, state=State.UNKNOWN, text=question, how=how))
    return facts


def _saves(found: Findings) -> tuple[Save, ...]:
    moved, synced = found.bandwidth, found.sync.synced if found.sync else None
    took = found.dir_sync.took if found.dir_sync else None
    if moved is None or synced is None or took is None:
        return ()
    # Beside the payload's own: seal written, renamed, and its directory's name made to last (docs/format.md, order of writes).
    records_s = synced.median_s + 2 * took.median_s

    def save(size_bytes: int, step: int | None) -> Save:
        durable_s = size_bytes * moved.write_s / moved.size_bytes + records_s
        interval_s = durable_s + size_bytes * moved.read_s / moved.read_bytes
        return Save(size_bytes=size_bytes, step=step, durable_s=durable_s, interval_s=interval_s, lost_s=interval_s + durable_s)

    newest = (save(found.newest.size_bytes, found.newest.step),) if found.newest else ()
    return (*newest, *(save(size_bytes, None) for size_bytes in SAVE_SIZES_BYTES))


def _took(timed: Timed) -> str:
    return f"median {human_s(timed.median_s)}, p99 {human_s(timed.p99_s)}"


def _figures(timed: Timed) -> dict[str, float | int | bool | str | None]:
    return {"count": timed.count, "median_s": timed.median_s, "p99_s": timed.p99_s, "slowest_s": timed.slowest_s}


def human_s(duration_s: float) -> str:
    """A short or long duration with two digits or three."""
    steps: tuple[tuple[float, float, str], ...] = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (100.0, 1.0, "s"))
    for below_s, factor, unit in steps:
        if duration_s < below_s:
            amount = duration_s * factor
            return f"{amount:.2g} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    minutes = duration_s / 60
    return f"{minutes:.1f} min" if minutes < 10 else f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / (1 << 20):,.0f} MiB/s" if bytes_per_s >= 10 << 20 else f"{bytes_per_s / (1 << 20):.1f} MiB/s"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"

"""The measurements of a directory, one phase after the other, each in child processes.

Nothing is written outside one directory below the place. It is removed at the end, whatever happened; what a kill or a
power cut leaves of it is removed by the next check.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ridethrough.errors import RideThroughError, StorageDenied, StorageError, StoreFull, StoreMissing
from ridethrough.format import layout
from ridethrough.seam import children, place
from ridethrough.seam.clock import SystemClock, boot_id
from ridethrough.seam.fs import FileSystem, PosixFileSystem, Writer
from ridethrough.seam.process import is_alive, node_name, start_time
from ridethrough.store.assess import see
from ridethrough.store.assess.findings import Bandwidth, Calls, Creates, DirSync, Exclusive, Findings, Newest, Rename, Seen, Sync, Timed, timed
from ridethrough.store.catalog import candidates, read_catalog

PHASES = (
    "looking", "small writes", "directory fsync", "rename", "exclusive create", "1 process creating", "4 processes creating",
    "16 processes creating", "bandwidth", "other nodes",
)  # fmt: skip
DEFAULT_SIZE_BYTES = 256 << 20
_SMALL_BYTES = 4096
_BLOCK_BYTES = 4 << 20
_READ_BYTES = 16 << 20
"""A chunk of payload, which is what is read at once when a checkpoint is verified."""
_ENOUGH_COUNT = 200
_SYNC_S = 1.5
_DIR_SYNC_S = 1.0
_RENAME_S = 1.0
_RACERS_COUNT = 8
_RACES_COUNT = 40
_RACE_S = 0.01
"""From one race to the next, so that all start it together."""
_CREATE_S = 1.0
_CREATED_COUNT = 4000
"""Of all processes together: what was created must be removed too."""
_BANDWIDTH_S = 3.0
_START_S = 0.2
"""Until the last of several children has been forked."""
_LIMIT_S = 30.0
"""Over what a phase takes: storage that needs longer for a small call does not answer."""
_SLOWEST_BYTES_PER_S = 2_000_000
_OLD_S = 3600.0
"""No check takes as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    path: str
    """Absolute; links in it are followed."""
    size_bytes: int | None
    """Of the large file; None: what takes seconds."""
    peers: tuple[str, ...]
    ssh: tuple[str, ...]
    remote: tuple[str, ...]


Tick = Callable[[], None]


def measure(request: Request, *, enter: Callable[[str], None], tick: Tick) -> Findings:
    """The place has been measured, and is as it was before.

    Args:
        request: What to measure.
        enter: Told the name of each phase as it begins.
        tick: Called ten times a second.

    Raises:
        StoreMissing: There is no such directory.
        StorageDenied, StoreReadOnly, StoreFull, StorageUnreachable: Nothing can be measured there.
    """

    def ask(functions: Sequence[Callable[[], Any]], doing: str, limit_s: float = _LIMIT_S) -> list[Any]:
        return children.ask_children(functions, limit_s=limit_s, doing=doing, path=request.path, tick=tick)

    def one(function: Callable[[], Any], doing: str, limit_s: float = _LIMIT_S) -> Any:
        return ask([function], doing, limit_s)[0]

    fs, clock = PosixFileSystem(), SystemClock()
    enter(PHASES[0])
    looked = one(partial(_look, fs, request), "looking")
    path = str(looked["path"])
    with _own_directory(path, one) as (own, not_removed):
        enter(PHASES[1])
        sync = one(partial(_measure_sync, fs, own), "small writes")
        can_sync = sync["refused"] is None
        enter(PHASES[2])
        dir_sync = one(partial(_measure_dir_sync, fs, own), "fsync of a directory") if can_sync else None
        enter(PHASES[3])
        start_s = clock.monotonic_s() + _START_S
        renames, reads = ask([partial(_replace, fs, own, start_s), partial(_read_on, fs, own, start_s)], "rename")
        enter(PHASES[4])
        start_s = clock.monotonic_s() + _START_S
        racers = ask([partial(_race, fs, own, start_s) for _ in range(_RACERS_COUNT)], "exclusive create")
        calls = one(partial(_try_calls, fs, own), "link")
        creates = []
        for phase, count in zip(PHASES[5:8], (1, 4, 16), strict=True):
            enter(phase)
            start_s = clock.monotonic_s() + _START_S
            creates.append(_added_up(ask([partial(_create, fs, own, start_s, number, count) for number in range(count)], "creating files")))
        enter(PHASES[8])
        bandwidth = None
        size_bytes = affordable_bytes(request.size_bytes, looked["free_bytes"], path=path)
        if can_sync and size_bytes:
            is_asked = request.size_bytes is not None
            limit_s = _LIMIT_S + 2 * size_bytes / _SLOWEST_BYTES_PER_S
            bandwidth = one(partial(_transfer, fs, own, size_bytes, is_asked=is_asked), "writing and reading", limit_s)
        seen: list[Seen] = []
        if request.peers:
            enter(PHASES[9])
            asked = [partial(see.ask_peer, fs, own, host, (*request.ssh, "--", host, *request.remote)) for host in request.peers]
            seen = [Seen(**found) for found in ask(asked, "asking other nodes", see.LIMIT_S)]
    return Findings(
        path=path,
        mount=_mount(looked["mount"]),
        block=place.Block(**looked["block"]) if looked["block"] else None,
        below=_mount(looked["below"]),
        total_bytes=looked["total_bytes"],
        free_bytes=looked["free_bytes"],
        sync=Sync(refused=sync["refused"], write=_timed(sync["write"]), synced=_timed(sync["synced"])),
        dir_sync=DirSync(refused=dir_sync["refused"], took=_timed(dir_sync["took"])) if dir_sync else None,
        rename=Rename(renames_count=renames, **reads),
        exclusive=_judged(racers),
        calls=Calls(**calls),
        bandwidth=Bandwidth(**bandwidth) if bandwidth else None,
        creates=tuple(creates),
        seen=tuple(seen),
        newest=Newest(**looked["newest"]) if looked["newest"] else None,
        waited_s=see.WAIT_S,
        not_removed=tuple(not_removed),
    )


def _mount(found: dict[str, Any] | None) -> place.Mount | None:
    return place.Mount(**{**found, "options": tuple(found["options"])}) if found else None


def _timed(found: dict[str, Any] | None) -> Timed | None:
    return Timed(**found) if found else None


def affordable_bytes(asked_bytes: int | None, free_bytes: int, *, path: str) -> int:
    """How large the large file may be: a quarter of what is free at most, 0 if even a small one would crowd the place.

    Raises:
        StoreFull: More was asked for than fits.
    """
    if asked_bytes is None:
        found = min(DEFAULT_SIZE_BYTES, free_bytes // 4)
        return found if found >= _BLOCK_BYTES else 0
    if asked_bytes > free_bytes:
        detail = f"--size is {asked_bytes} bytes and {free_bytes} are free"
        raise StoreFull(detail=detail, path=path, hint=f"--size {free_bytes // 4} or less")
    return asked_bytes


# -- looking -------------------------------------------------------------------------------------------------------------


def _look(fs: FileSystem, request: Request) -> dict[str, Any]:
    path = request.path
    try:
        if not fs.stat(path).is_dir:
            raise StoreMissing(
                detail="not a directory, but a file", path=path, hint=f"ridethrough storage check {shlex.quote(os.path.dirname(path))}"
            )
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = f"mkdir -p {shlex.quote(path)}   (or mount what should be there)"
        raise StoreMissing(detail="there is no such directory", path=path, hint=hint) from error
    path = os.path.realpath(path)  # in this child: also this asks the storage
    mount = place.mount_of(path)
    block = place.block_of(mount) if mount else None
    upper = mount.option("upperdir") if mount and mount.file_system == "overlay" else None
    # Of a container's layers this mount namespace often sees nothing: then only the overlay itself is known.
    below = place.mount_of(upper) if upper and os.path.isdir(upper) else None
    usage = fs.usage(path)
    affordable_bytes(request.size_bytes, usage.free_bytes, path=path)
    return {
        "path": path,
        "mount": asdict(mount) if mount else None,
        "block": asdict(block) if block else None,
        "below": asdict(below) if below else None,
        "total_bytes": usage.total_bytes,
        "free_bytes": usage.free_bytes,
        "newest": _newest(fs, path),
    }


def _newest(fs: FileSystem, path: str) -> dict[str, int] | None:
    try:
        found = candidates(read_catalog(fs, path))
    except RideThroughError:
        return None  # no run, or one that `ridethrough ls` has more to say about; only a line of a table is lost
    if not found:
        return None
    sizes = {seal.part: seal.payload_bytes for seal in found[0].seals}
    return {"step": found[0].step, "size_bytes": sum(sizes.values())}


# -- a directory of our own ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_directory(path: str, one: Callable[..., Any]) -> Iterator[tuple[str, list[str]]]:
    """A directory below the place for this check alone; nothing of it is there afterwards."""
    own = os.path.join(path, own_name())
    remove = partial(one, partial(place.remove_tree, own), "removing what was written")
    try:
        yield own, one(partial(_begin, own), "making a directory")
    except BaseException:
        with contextlib.suppress(StorageError):  # storage that failed before fails again; the first error tells more
            remove()
        raise
    remove()


def own_name() -> str:
    """What this process calls its directory, so that another one can tell whether it is still needed."""
    pid = os.getpid()
    return layout.check_name(node_name(), boot_id().replace("-", "")[:12], place.process_space(), pid, start_time(pid) or 0)


def _begin(own: str) -> list[str]:
    """Our directory is there and those of checks that were killed are not; returns which may not be removed."""
    fs, not_removed = PosixFileSystem(), []
    path, me = os.path.split(own)
    fs.make_dir(own)  # made to last for this check only: no fsync
    # The place's own clock: that of a server may differ from ours by more than a check takes.
    now_s = fs.stat(own).modified_s
    for name in fs.list_dir(path):
        whole = os.path.join(path, name)
        if name == me or not layout.parse_check(name) or os.path.islink(whole):
            continue
        try:
            if is_leftover(name, me, age_s=now_s - fs.stat(whole).modified_s, is_alive=is_alive):
                place.remove_tree(whole)
        except FileNotFoundError:
            continue  # its own check, or another one, has just removed it
        except StorageDenied:
            not_removed.append(name)
    return not_removed


def is_leftover(name: str, me: str, *, age_s: float, is_alive: Callable[[int, int], bool]) -> bool:
    """The check that made this directory is over.

    Args:
        name: Of the directory.
        me: The name that this process would use.
        age_s: Since the directory was last changed.
        is_alive: Whether a process of this machine still runs.
    """
    theirs, mine = layout.parse_check(name), layout.parse_check(me)
    if theirs is None or mine is None:
        return False
    if age_s > _OLD_S:
        return True
    if theirs.node != mine.node:
        return False
    if theirs.boot != mine.boot:
        return True  # this node has started anew since
    return theirs.space == mine.space and not is_alive(theirs.pid, theirs.started)


# -- the phases, each in a child -----------------------------------------------------------------------------------------


def _refusal(error: StorageError) -> str:
    """What the call answered; a full place is no property of it."""
    if isinstance(error, StoreFull):
        raise error
    return str(error.fields["detail"])


def _measure_sync(fs: FileSystem, own: str) -> dict[str, Any]:
    clock = SystemClock()
    data = os.urandom(_SMALL_BYTES)

    def durations_s(name: str, finish: Callable[[Writer], None]) -> list[float]:
        found: list[float] = []
        with contextlib.closing(fs.create(os.path.join(own, name), 0)) as writer:
            end_s = clock.monotonic_s() + _SYNC_S
            while len(found) < _ENOUGH_COUNT and (not found or clock.monotonic_s() < end_s):
                before_s = clock.monotonic_s()
                writer.write(data)
                finish(writer)
                found.append(clock.monotonic_s() - before_s)
        return found

    plain = timed(durations_s("plain", lambda _: None))
    try:
        synced = timed(durations_s("synced", _sync))
    except _RefusedError as error:
        return {"refused": error.detail, "write": asdict(plain), "synced": None}
    return {"refused": None, "write": asdict(plain), "synced": asdict(synced)}


class _RefusedError(Exception):
    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


def _sync(writer: Writer) -> None:
    try:
        writer.sync()  # the call that is asked about; what was written has no other purpose
    except StorageError as error:
        raise _RefusedError(_refusal(error)) from error


def _measure_dir_sync(fs: FileSystem, own: str) -> dict[str, Any]:
    clock = SystemClock()
    data = os.urandom(_SMALL_BYTES)
    found: list[float] = []
    end_s = clock.monotonic_s() + _DIR_SYNC_S
    while len(found) < _ENOUGH_COUNT and (not found or clock.monotonic_s() < end_s):
        source, target = os.path.join(own, f"seal{len(found)}.new"), os.path.join(own, f"seal{len(found)}")
        with contextlib.closing(fs.create(source, 0)) as writer:
            writer.write(data)
            # As a save does it: otherwise the fsync of the directory would be charged for the data of the file as well.
            writer.sync()
        fs.rename(source, target)  # not kept: only the cost of making it last is asked for
        before_s = clock.monotonic_s()
        try:
            fs.sync_dir(own)  # the call that is asked about
        except StorageError as error:
            return {"refused": _refusal(error), "took": None}
        found.append(clock.monotonic_s() - before_s)
    return {"refused": None, "took": asdict(timed(found))}


_VERSION_BYTES = 8192


def _replace(fs: FileSystem, own: str, start_s: float) -> int:
    clock = SystemClock()
    target, source = os.path.join(own, "replaced"), os.path.join(own, "replaced.new")
    for done in itertools.count():
        with contextlib.closing(fs.create(source, 0)) as writer:
            writer.write(bytes([done % 2]) * _VERSION_BYTES)
        fs.rename(source, target)  # what another process sees meanwhile is asked for, not what a power cut leaves
        if clock.monotonic_s() > start_s + _RENAME_S:
            return done + 1
    raise AssertionError("unreachable")


def _read_on(fs: FileSystem, own: str, start_s: float) -> dict[str, int]:
    clock = SystemClock()
    target = os.path.join(own, "replaced")
    counts = {"reads_count": 0, "missing_count": 0, "torn_count": 0, "unreadable_count": 0}
    versions = {bytes([n]) * _VERSION_BYTES for n in (0, 1)}
    # One byte more than there is, so that a file that is too long is noticed too.
    buffer = bytearray(_VERSION_BYTES + 1)
    while clock.monotonic_s() < start_s + _RENAME_S:
        try:
            got = fs.read_into(target, memoryview(buffer))
        except FileNotFoundError:
            counts["missing_count"] += bool(counts["reads_count"])  # before the first one it had not been made yet
            continue
        except StorageError:
            counts["unreadable_count"] += 1
            continue
        counts["reads_count"] += 1
        counts["torn_count"] += bytes(buffer[:got]) not in versions
    return counts


def _race(fs: FileSystem, own: str, start_s: float) -> dict[str, Any]:
    clock = SystemClock()
    won: list[int] = []
    for race in range(_RACES_COUNT):
        clock.sleep(max(0.0, start_s + race * _RACE_S - clock.monotonic_s()))
        try:
            fs.create(os.path.join(own, f"race{race}"), 0).close()
        except FileExistsError:
            continue
        except StorageError as error:
            return {"won": won, "refused": _refusal(error)}
        won.append(race)
    return {"won": won, "refused": None}


def _judged(racers: Sequence[dict[str, Any]]) -> Exclusive:
    winners = [sum(race in racer["won"] for racer in racers) for race in range(_RACES_COUNT)]
    return Exclusive(
        processes_count=len(racers),
        races_count=_RACES_COUNT,
        won_by_none_count=winners.count(0),
        won_by_several_count=sum(count > 1 for count in winners),
        refused=next((racer["refused"] for racer in racers if racer["refused"]), None),
    )


def _try_calls(fs: FileSystem, own: str) -> dict[str, bool]:
    path = os.path.join(own, "called")
    with contextlib.closing(fs.create(path, 0)) as writer:
        writer.write(bytes(_SMALL_BYTES))
    return {"has_links": place.links(path, os.path.join(own, "linked")), "reads_past_cache": place.reads_past_cache(path)}


def _create(fs: FileSystem, own: str, start_s: float, number: int, of: int) -> dict[str, Any]:
    clock = SystemClock()
    clock.sleep(max(0.0, start_s - clock.monotonic_s()))
    begin_s = now_s = clock.monotonic_s()
    found: list[float] = []
    while len(found) < _CREATED_COUNT // of and (not found or now_s < start_s + _CREATE_S):
        fs.create(os.path.join(own, f"file{of}-{number}-{len(found)}"), 0).close()
        found.append(clock.monotonic_s() - now_s)
        now_s += found[-1]
    for index in range(len(found)):
        fs.remove(os.path.join(own, f"file{of}-{number}-{index}"))
    whole = timed(found)
    return {"begin_s": begin_s, "end_s": now_s, "created": whole.count, "median_s": whole.median_s, "slowest_s": whole.slowest_s}


def _added_up(parts: Sequence[dict[str, Any]]) -> Creates:
    return Creates(
        processes_count=len(parts),
        created_count=sum(part["created"] for part in parts),
        took_s=max(part["end_s"] for part in parts) - min(part["begin_s"] for part in parts),
        median_s=sorted(part["median_s"] for part in parts)[len(parts) // 2],
        slowest_s=max(part["slowest_s"] for part in parts),
    )


def _transfer(fs: FileSystem, own: str, size_bytes: int, *, is_asked: bool) -> dict[str, Any]:
    """A file as large as asked for, or as what takes some seconds here, is written and read back."""
    clock = SystemClock()
    # Random, and different in each block: a place that compresses or finds equal blocks would be flattered.
    block = bytearray(os.urandom(min(_BLOCK_BYTES, size_bytes)))

    def write(name: str, count_bytes: int) -> float:
        before_s = clock.monotonic_s()
        with contextlib.closing(fs.create(os.path.join(own, name), count_bytes)) as writer:
            for offset in range(0, count_bytes, len(block)):
                block[:8] = offset.to_bytes(8, "little")
                writer.write(memoryview(block)[: count_bytes - offset])
            writer.sync()  # until then nothing has been written that a power cut would leave
        return clock.monotonic_s() - before_s

    if not is_asked:
        pilot_bytes = len(block)
        size_bytes = max(pilot_bytes, min(size_bytes, int(pilot_bytes / max(write("pilot", pilot_bytes), 1e-6) * _BANDWIDTH_S)))
    write_s = write("large", size_bytes)
    buffer = memoryview(bytearray(min(_READ_BYTES, size_bytes)))
    read_bytes, begin_s = 0, clock.monotonic_s()
    while read_bytes < size_bytes and (is_asked or clock.monotonic_s() < begin_s + _BANDWIDTH_S):
        got = fs.read_into(os.path.join(own, "large"), buffer, offset=read_bytes, past_cache=True)
        if not got:
            raise StorageError(detail=f"short read, {read_bytes} of {size_bytes} bytes", path=own)
        read_bytes += got
    return {"size_bytes": size_bytes, "write_s": write_s, "read_bytes": read_bytes, "read_s": clock.monotonic_s() - begin_s}

"""Copies of checkpoints in other places: another disk, another room, an object store.

A copy is a run directory like the first one. Per part: the payload is read, checked chunk by chunk and written; it is
read back at the far end; only then its seal is put beside it. So a seal there vouches for bytes that were there, a cut
of either side at any instant leaves what was whole before, and what a later attempt finds sealed it need not copy again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from ridethrough.errors import Damaged, ForeignRecord, NothingRestorable, RideThroughError, StorageError, StorageUnreachable, StoreMissing
from ridethrough.format import layout, record
from ridethrough.format.seal import Seal
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import names_in
from ridethrough.store.catalog import Checkpoint, read_catalog, read_run, read_seals
from ridethrough.store.commit import ensure_dir, publish, publish_stream
from ridethrough.store.place import Place
from ridethrough.store.start import adopt_run
from ridethrough.store.verify import check_part

_PIECE_BYTES = 8 << 20
Advance = Callable[[int], None]
"""Told how many bytes have gone on; may wait, which bounds the bandwidth."""


def _no_advance(_: int) -> None:
    return


def paced(clock: Clock, advance: Advance, bytes_per_s: float | None) -> Advance:
    """As `advance`, and waits so that no more than so many bytes a second go on."""
    if bytes_per_s is None:
        return advance
    began_s, sent_bytes = clock.monotonic_s(), 0

    def wait(count: int) -> None:
        nonlocal sent_bytes
        sent_bytes += count
        advance(count)
        ahead_s = sent_bytes / bytes_per_s - (clock.monotonic_s() - began_s)
        if ahead_s > 0:
            clock.sleep(ahead_s)

    return wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What became of one checkpoint."""

    dir_name: str
    step: int
    parts_count: int
    """Parts that are there now."""
    copied_bytes: int
    """Of those that were not there before."""
    damaged: tuple[RideThroughError, ...] = ()
    """Copies at the source that turned out to be damaged; others were taken."""


def copy_checkpoint(source: Place, target: Place, checkpoint: Checkpoint, *, advance: Advance = _no_advance) -> Copied:
    """Every part of the checkpoint is at the target, verified there, and survives its loss of power.

    Args:
        source: Where it is.
        target: Where it is to be; made if there is nothing.
        checkpoint: From a catalog of the source; it is complete.
        advance: See `Advance`; what has been written counts, not what was there already.

    Raises:
        ForeignRecord: The target holds another run.
        NothingRestorable: No copy of some part at the source is intact; nothing of the checkpoint counts at the target.
        StorageError: One side refuses. What is sealed stays, and the same call goes on from there.
    """
    copy_records(source, target)
    directory = target.path(checkpoint.dir_name)
    ensure_dir(target.fs, directory)
    there = {seal.part for seal in _usable_seals(target, checkpoint.dir_name)}
    copied_bytes = 0
    damaged: list[RideThroughError] = []
    by_part: dict[str, list[Seal]] = {}
    for seal in checkpoint.seals:
        by_part.setdefault(seal.part, []).append(seal)
    for name, copies in by_part.items():
        if name not in there:
            copied_bytes += _copy_any(source, target, checkpoint.dir_name, copies, damaged, advance)
    for name in (layout.META, layout.MANIFEST):
        with contextlib.suppress(FileNotFoundError, Damaged, ForeignRecord):  # for people; the seals say the same
            data = source.fs.read(source.path(checkpoint.dir_name, name), max_bytes=record.MAX_BYTES)
            publish(target.fs, os.path.join(directory, name), data)
    return Copied(dir_name=checkpoint.dir_name, step=checkpoint.step, parts_count=len(by_part), copied_bytes=copied_bytes, damaged=tuple(damaged))


def _copy_any(source: Place, target: Place, dir_name: str, copies: list[Seal], damaged: list[RideThroughError], advance: Advance) -> int:
    for seal in copies:
        try:
            copy_part(source, target, dir_name, seal, advance=advance)
        except Damaged as error:
            damaged.append(error)
        else:
            return seal.payload_bytes
    raise NothingRestorable(path=source.shown, detail=f"no copy of {copies[0].part} of {dir_name} is intact: {damaged[-1]}")


def copy_part(source: Place, target: Place, dir_name: str, seal: Seal, *, advance: Advance = _no_advance) -> None:
    """The part is at the target under the same names, verified there and sealed.

    Raises:
        Damaged: What the source has is not what was sealed; nothing is sealed at the target.
        StorageError: One side refuses, or what was written does not read back.
    """
    seal_name = layout.seal_name(seal.payload_name)
    text = _sealed_text(source, dir_name, seal)
    directory = target.path(dir_name)
    publish_stream(target.fs, os.path.join(directory, seal.payload_name), seal.payload_bytes, _proven_pieces(source, dir_name, seal, advance))
    try:
        check_part(target.fs, target.run_dir, dir_name, seal)
    except Damaged as error:
        raise StorageError(path=target.shown, detail=f"what was written does not read back: {error}") from error
    # After the payload is known to be there: a seal is all that a reader trusts.
    publish(target.fs, os.path.join(directory, seal_name), text)


def _sealed_text(source: Place, dir_name: str, seal: Seal) -> bytes:
    """The seal's file as it is: a later version may know more of it than this one."""
    path = source.path(dir_name, layout.seal_name(seal.payload_name))
    try:
        return source.fs.read(path, max_bytes=record.MAX_BYTES)
    except FileNotFoundError:
        raise Damaged(path=path, detail="the seal is missing") from None


def _proven_pieces(source: Place, dir_name: str, seal: Seal, advance: Advance) -> Iterator[memoryview]:
    path = source.path(dir_name, seal.payload_name)
    buffer = memoryview(bytearray(min(seal.chunk_bytes, max(seal.payload_bytes, 1))))
    for index, expected in enumerate(seal.chunks):
        begin = index * seal.chunk_bytes
        chunk = buffer[: min(seal.chunk_bytes, seal.payload_bytes - begin)]
        try:
            got = source.fs.read_into(path, chunk, offset=begin)
        except FileNotFoundError:
            raise Damaged(path=path, detail="the payload is missing") from None
        if got < len(chunk) and source.fs.stat(path).size_bytes >= begin + len(chunk):
            raise StorageUnreachable(path=path, detail=f"short read, {got} of {len(chunk)} bytes")
        found = xxhash.xxh3_128_hexdigest(chunk) if got == len(chunk) else f"of {got} bytes only"
        if found != expected:
            raise Damaged(path=path, detail=f"checksum of bytes {begin} to {begin + len(chunk) - 1} is {found}, not {expected}")
        for at in range(0, len(chunk), _PIECE_BYTES):
            piece = chunk[at : at + _PIECE_BYTES]
            yield piece
            advance(len(piece))


def _usable_seals(place: Place, dir_name: str) -> tuple[Seal, ...]:
    """Seals whose payload has its length there."""
    found = []
    try:
        seals = read_seals(place.fs, place.run_dir, dir_name)
    except FileNotFoundError:  # in an object store a directory without files is none
        return ()
    for seal in seals:
        with contextlib.suppress(FileNotFoundError):
            if place.fs.stat(place.path(dir_name, seal.payload_name)).size_bytes == seal.payload_bytes:
                found.append(seal)
    return tuple(found)


def copy_records(source: Place, target: Place) -> None:
    """The target is a copy of this run: it has its marker and the records of all its attempts.

    Raises:
        ForeignRecord: The target holds another run.
    """
    ours = read_catalog(source.fs, source.run_dir).run
    try:
        theirs = read_run(target.fs, target.run_dir)
    except StoreMissing:
        theirs = None
    if theirs is not None and theirs.run_uid != ours.run_uid:
        raise ForeignRecord(path=target.shown, detail=f"it holds run {theirs.run_uid[:8]}, not {ours.run_uid[:8]} of {source.shown}")
    if theirs is None:
        adopt_run(target.fs, target.run_dir, ours)
    have = set(names_in(target.fs, target.path(layout.ATTEMPTS)))
    for label in (name for name in names_in(source.fs, source.path(layout.ATTEMPTS)) if layout.parse_attempt_dir(name)):
        # The roster first, as where it was made: an attempt without one could not be counted.
        for name in (layout.ROSTER, layout.ATTEMPT):
            _copy_record(source, target, os.path.join(layout.ATTEMPTS, label, name), is_new=label not in have)


def _copy_record(source: Place, target: Place, name: str, *, is_new: bool) -> None:
    if not is_new:
        with contextlib.suppress(FileNotFoundError):
            target.fs.stat(target.path(name))
            return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # cut while it was made; nothing was ever saved under it
        data = source.fs.read(source.path(name), max_bytes=record.MAX_BYTES)
        ensure_dir(target.fs, os.path.dirname(target.path(name)))
        publish(target.fs, target.path(name), data)

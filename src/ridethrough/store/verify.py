"""Proving that the bytes on a tier are the bytes that were sealed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from ridethrough.errors import Damaged, RideThroughError, StorageUnreachable
from ridethrough.format import layout, part
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem
from ridethrough.store.catalog import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """What one copy of a part turned out to be; `error` is None if it is intact."""

    seal: Seal
    error: RideThroughError | None


def load_part(
    fs: FileSystem, run_dir: str, dir_name: str, seal: Seal, *, past_cache: bool = False, progress: Callable[[int], None] | None = None
) -> bytearray:
    """The payload in memory, proven chunk by chunk: what was checked is what is returned.

    Raises:
        Damaged: A chunk differs; says which.
        StorageUnreachable: It cannot be read now, or a read came back short although the file has its length.
    """
    payload = bytearray(seal.payload_bytes)
    check_part(fs, run_dir, dir_name, seal, buffer=memoryview(payload), past_cache=past_cache, progress=progress)
    specs, _ = part.parse_header(payload, path=os.path.join(dir_name, seal.payload_name))
    if specs != seal.tensors:
        raise Damaged(path=os.path.join(dir_name, seal.payload_name), detail="its tensors are not those that its seal lists")
    return payload


def check_part(
    fs: FileSystem,
    run_dir: str,
    dir_name: str,
    seal: Seal,
    *,
    buffer: memoryview | None = None,
    past_cache: bool = True,
    progress: Callable[[int], None] | None = None,
) -> None:
    """The payload matches its seal; `buffer`, if given, now holds it.

    Raises:
        ValueError: The seal is an outline, which proves nothing.
        Damaged: It does not; says where.
        StorageUnreachable: It cannot be read now.
    """
    shown = os.path.join(dir_name, seal.payload_name)
    if len(seal.chunks) * seal.chunk_bytes < seal.payload_bytes:
        raise ValueError(f"{shown}: {len(seal.chunks)} checksums do not cover {seal.payload_bytes} bytes")
    path = os.path.join(run_dir, shown)
    scratch = None if buffer is not None else memoryview(bytearray(min(seal.chunk_bytes, max(seal.payload_bytes, 1))))
    for index, expected in enumerate(seal.chunks):
        begin = index * seal.chunk_bytes
        length = min(seal.chunk_bytes, seal.payload_bytes - begin)
        target = buffer[begin : begin + length] if buffer is not None else scratch[:length]  # type: ignore[index]
        try:
            got = fs.read_into(path, target, offset=begin, past_cache=past_cache)
            if got < length and fs.stat(path).size_bytes >= begin + length:
                raise StorageUnreachable(path=path, detail=f"short read, {got} of {length} bytes")
        except FileNotFoundError:
            raise Damaged(path=shown, detail="the payload is missing") from None
        if got < length:
            raise Damaged(path=shown, detail=f"cut short at {begin + got} of {seal.payload_bytes} bytes")
        found = xxhash.xxh3_128_hexdigest(target)
        if found != expected:
            # What was found is part of the message: `is_surely_damaged` compares it between two reads.
            raise Damaged(path=shown, detail=f"checksum of bytes {begin} to {begin + length - 1} is {found}, not {expected}")
        if progress is not None:
            progress(length)


def check_seal(fs: FileSystem, run_dir: str, dir_name: str, seal: Seal) -> None:
    """The seal on the medium is the seal that was committed.

    Raises:
        Damaged: It is not.
        StorageUnreachable: It cannot be read now.
    """
    shown = os.path.join(dir_name, layout.seal_name(seal.payload_name))
    expected = seal.encode()
    try:
        found = fs.read(os.path.join(run_dir, shown), max_bytes=2 * len(expected), past_cache=True)
    except FileNotFoundError:
        raise Damaged(path=shown, detail="the seal is missing") from None
    if found != expected:
        raise Damaged(path=shown, detail="it does not read back as it was written")


def verify_checkpoint(
    fs: FileSystem, run_dir: str, checkpoint: Checkpoint, *, progress: Callable[[int], None] | None = None
) -> tuple[PartResult, ...]:
    """Every copy of every part, read past the page cache.

    Raises:
        StorageUnreachable: Something cannot be read now, so nothing can be said.
    """
    results = []
    for seal in checkpoint.seals:
        try:
            check_part(fs, run_dir, checkpoint.dir_name, seal, progress=progress)
            results.append(PartResult(seal=seal, error=None))
        except Damaged as error:
            results.append(PartResult(seal=seal, error=error))
    return tuple(results)


def intact_parts(results: tuple[PartResult, ...]) -> frozenset[str]:
    """Parts of which at least one copy is intact."""
    return frozenset(result.seal.part for result in results if result.error is None)


def is_surely_damaged(fs: FileSystem, run_dir: str, dir_name: str, seal: Seal) -> bool:
    """Two reads past the cache both failed the same way: the medium, and not the path to it, is wrong.

    Raises:
        StorageUnreachable: It cannot be read now.
    """
    found = []
    for _ in range(2):
        try:
            check_part(fs, run_dir, dir_name, seal)
            return False
        except Damaged as error:
            found.append(str(error))
    return found[0] == found[1]

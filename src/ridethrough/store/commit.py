"""The one way bytes become durable here."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ridethrough.errors import RideThroughError, StorageDenied
from ridethrough.format import layout, part, record
from ridethrough.format.attempt import Roster
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem
from ridethrough.types import AttemptRef, Parent

_WRITE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSave:
    """One part as it stands in memory, with everything its seal will say."""

    run_uid: str
    attempt: AttemptRef
    parent: Parent | None
    step: int
    save_id: str
    part: str
    node: str
    roster_digest: str
    payload: memoryview
    tree: Any
    meta: dict[str, Any]


def ensure_dir(fs: FileSystem, path: str) -> None:
    """The directory and all its parents exist and survive power loss."""
    missing = []
    probe = path
    while True:
        try:
            fs.stat(probe)
            break
        except FileNotFoundError:
            missing.append(probe)
            parent = os.path.dirname(probe)
            if parent == probe:
                break
            probe = parent
    # The deepest directory there is may have been made by a process that was killed before it synced the parent.
    with contextlib.suppress(StorageDenied):  # a parent we may not read is not one we made entries in
        fs.sync_dir(os.path.dirname(probe))
    for directory in reversed(missing):
        fs.make_dir(directory)
        # Without it a power cut can take the new directory, and everything durable inside it, away.
        fs.sync_dir(os.path.dirname(directory))


def publish(fs: FileSystem, path: str, data: bytes) -> None:
    """The file has this content for every reader and survives power loss; or it is as it was before.

    Durability:
        A cut at any instant leaves the old content, the new content, or a leftover with the
        suffix `.tmp` that no reader looks at.
    """
    publish_stream(fs, path, len(data), pieces_of(memoryview(data)))


def publish_stream(fs: FileSystem, path: str, size_bytes: int, pieces: Iterable[memoryview]) -> None:
    """As `publish`, for what is too large to be held in memory.

    Args:
        fs: The tier.
        path: The file.
        size_bytes: Bytes of all pieces together.
        pieces: The content, front to back; what it raises leaves the file as it was before.
    """
    if fs.publishes_whole:
        _write_file(fs, path, size_bytes, pieces)
        return
    temporary = f"{path}.{uuid.uuid4().hex[:8]}{layout.TEMPORARY}"
    try:
        _write_file(fs, temporary, size_bytes, pieces)
        # After the data is durable: a rename that overtakes its data would publish an empty file.
        fs.rename(temporary, path)
    except BaseException:
        _discard(fs, temporary)
        raise
    # Without it the rename itself may be undone by a power cut although we said it was done.
    fs.sync_dir(os.path.dirname(path))


def pieces_of(data: memoryview) -> Iterator[memoryview]:
    """The data in pieces that one call writes."""
    for at in range(0, len(data), _WRITE_BYTES):
        yield data[at : at + _WRITE_BYTES]


def _write_file(fs: FileSystem, path: str, size_bytes: int, pieces: Iterable[memoryview]) -> None:
    writer = fs.create(path, size_bytes)
    try:
        for piece in pieces:
            writer.write(piece)
        writer.sync()  # before the name means anything to a reader
    finally:
        writer.close()


def _discard(fs: FileSystem, path: str) -> None:
    # The disk that made the write fail may refuse this too; retention removes what stays behind.
    with contextlib.suppress(RideThroughError):
        fs.remove(path)


def commit_part(fs: FileSystem, run_dir: str, save: PartSave) -> Seal:
    """The part is sealed and survives power loss of this tier; or nothing refers to it.

    Args:
        fs: The tier.
        run_dir: Directory of the run on the tier; it exists.
        save: The part.

    Returns:
        Its seal, as it now stands on disk.

    Raises:
        StoreFull: No room; raised while reserving, before the payload is written.
        StorageError: Any other refusal. The same save may be tried again: it gets a new name,
            because after a failed fsync the old file's pages may be lost yet look written.

    Durability:
        A cut during the call leaves a payload without a seal, which no reader looks at.
    """
    directory = os.path.join(run_dir, layout.step_dir(save.step, save.save_id))
    stem = layout.part_stem(save.part, save.node, uuid.uuid4().hex)
    tensors, _ = part.parse_header(save.payload, path=stem)
    seal = Seal(
        run_uid=save.run_uid,
        attempt=save.attempt,
        parent=save.parent,
        step=save.step,
        save_id=save.save_id,
        part=save.part,
        node=save.node,
        roster_digest=save.roster_digest,
        payload_name=f"{stem}.safetensors",
        payload_bytes=len(save.payload),
        chunk_bytes=part.CHUNK_BYTES,
        chunks=part.checksum_chunks(save.payload),
        tensors=tensors,
        tree=save.tree,
        meta=save.meta,
    )
    ensure_dir(fs, directory)
    payload_path = os.path.join(directory, seal.payload_name)
    seal_path = os.path.join(directory, f"{stem}.seal")
    try:
        _write_file(fs, payload_path, len(save.payload), pieces_of(save.payload))
        # Without it a cut may keep the seal's name and lose the payload's: POSIX lets entries of a directory overtake each other.
        fs.sync_dir(directory)
        publish(fs, seal_path, seal.encode())
    except BaseException:
        # The seal may already have its name. It must be durably gone before its payload goes.
        with contextlib.suppress(RideThroughError):
            fs.remove(seal_path)
            fs.sync_dir(directory)
            fs.remove(payload_path)
        raise
    return seal


def write_meta(fs: FileSystem, run_dir: str, seal: Seal) -> None:
    """`meta.json` beside the parts, for people; readers trust only the copy in the seals."""
    directory = os.path.join(run_dir, layout.step_dir(seal.step, seal.save_id))
    publish(fs, os.path.join(directory, layout.META), record.canonical(seal.meta) + b"\n")


def write_manifest(fs: FileSystem, run_dir: str, seals: tuple[Seal, ...], roster: Roster) -> None:
    """The manifest: a summary of the seals, and a second copy of the roster. Never trusted alone."""
    first = seals[0]
    directory = os.path.join(run_dir, layout.step_dir(first.step, first.save_id))
    fields = {
        "step": first.step,
        "save_id": first.save_id,
        "roster": roster.fields(),
        "parts": [
            {"part": s.part, "node": s.node, "payload": s.payload_name, "size_bytes": s.payload_bytes, "digest": s.payload_digest} for s in seals
        ],
    }
    publish(fs, os.path.join(directory, layout.MANIFEST), record.encode("manifest", fields))

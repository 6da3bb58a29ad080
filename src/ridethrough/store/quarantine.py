"""Damaged parts are moved aside, with the reason, and bounded in bytes; and back, if they turn out to be right.

Only the process that owns the run's lock on its node does either. Aside goes what two reads past
the cache found wrong (`verify.is_surely_damaged`), back goes what two find right (`prove`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from ridethrough.errors import Damaged, ForeignRecord, StorageError
from ridethrough.format import layout, record
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem, names_in
from ridethrough.store.catalog import read_seals
from ridethrough.store.commit import ensure_dir, publish
from ridethrough.store.verify import check_part, check_seal

_REASON = ".reason.json"
_REASON_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One copy of a part as it is in quarantine."""

    dir_name: str
    """The checkpoint it was taken out of."""
    file: layout.PartFile
    names: tuple[str, ...]
    """Its files in quarantine."""
    size_bytes: int
    """Of these files."""
    seal: Seal | None
    """None if it is missing or damaged: then nothing can say what the bytes should be."""
    payload_dir: str | None
    """Where its payload is, within the run: in quarantine, or in the step's directory after a move that was cut."""
    reason: str | None
    """None if there is none on record: the move was cut."""

    @property
    def place(self) -> str:
        """Its directory within the run."""
        return os.path.join(layout.QUARANTINE, self.dir_name)


def quarantine_part(fs: FileSystem, run_dir: str, dir_name: str, seal: Seal, *, reason: str) -> str:
    """The copy of the part no longer counts; its bytes are under `quarantine/` for a person to look at.

    Returns:
        The directory it is in now.
    """
    target = os.path.join(run_dir, layout.QUARANTINE, dir_name)
    source = os.path.join(run_dir, dir_name)
    ensure_dir(fs, target)
    stem = seal.payload_name.removesuffix(".safetensors")
    # The seal first: were the payload moved first, a cut would leave a seal without its payload.
    for name in (f"{stem}.seal", seal.payload_name):
        try:
            fs.rename(os.path.join(source, name), os.path.join(target, name))
        except FileNotFoundError:
            continue
        # A rename across directories is durable only when both are synced.
        fs.sync_dir(target)
        fs.sync_dir(source)
    publish(fs, os.path.join(target, f"{stem}{_REASON}"), record.canonical({"reason": reason, "step": seal.step, "part": seal.part}) + b"\n")
    return target


def holdings(fs: FileSystem, run_dir: str) -> tuple[Held, ...]:
    """Everything of ours in quarantine, by step, then name.

    Raises:
        StorageError: It cannot be read now.
    """
    root = os.path.join(run_dir, layout.QUARANTINE)
    found = []
    for dir_name in names_in(fs, root):
        if layout.parse_step_dir(dir_name) is None:
            continue
        directory = os.path.join(root, dir_name)
        files: dict[str, list[str]] = {}
        for name in names_in(fs, directory):
            # The reason has the name of its payload, with another end.
            parsed = layout.parse_part_file(name.removesuffix(_REASON) + ".safetensors" if name.endswith(_REASON) else name)
            if parsed is not None:
                files.setdefault(parsed.stem, []).append(name)
        if not files:
            continue
        seals = {seal.payload_name: seal for seal in read_seals(fs, run_dir, os.path.join(layout.QUARANTINE, dir_name))}
        beside = names_in(fs, os.path.join(run_dir, dir_name))
        for stem, names in files.items():
            found.append(_held(fs, directory, dir_name, stem, names, seals, beside))
    return tuple(found)


def _held(fs: FileSystem, directory: str, dir_name: str, stem: str, names: list[str], seals: dict[str, Seal], beside: list[str]) -> Held:
    payload = f"{stem}.safetensors"
    parsed = layout.parse_part_file(payload)
    assert parsed is not None
    payload_dir = dir_name if payload in beside else os.path.join(layout.QUARANTINE, dir_name) if payload in names else None
    return Held(
        dir_name=dir_name,
        file=parsed,
        names=tuple(names),
        size_bytes=sum(fs.stat(os.path.join(directory, name)).size_bytes for name in names),
        seal=seals.get(payload),
        payload_dir=payload_dir,
        reason=_read_reason(fs, os.path.join(directory, f"{stem}{_REASON}")) if f"{stem}{_REASON}" in names else None,
    )


def _read_reason(fs: FileSystem, path: str) -> str | None:
    try:
        found = json.loads(fs.read(path, max_bytes=_REASON_BYTES))
    except (ValueError, RecursionError, OSError):
        return None
    except StorageError as error:
        if error.__cause__ is None:  # longer than any reason of ours: not a refusal of the storage
            return None
        raise
    reason = found.get("reason") if isinstance(found, dict) else None
    return reason if isinstance(reason, str) else None


def prove(fs: FileSystem, run_dir: str, held: Held, *, run_uid: str) -> Seal:
    """Two reads past the cache have both found the seal and the payload right; returns the seal.

    Two, as for the way into quarantine: what reads right only sometimes is no copy to rely on.

    Raises:
        Damaged: One of them is not.
        ForeignRecord: It is a part of another run.
        StorageUnreachable: It cannot be read now.
    """
    where = os.path.join(held.place, held.file.stem)
    if held.seal is None:
        raise Damaged(path=f"{where}.seal", detail="the seal is missing or damaged, so that nothing says what the bytes should be")
    if held.seal.run_uid != run_uid:
        raise ForeignRecord(path=f"{where}.seal", detail=f"run {held.seal.run_uid[:8]}, not {run_uid[:8]}")
    if held.payload_dir is None:
        raise Damaged(path=f"{where}.safetensors", detail="the payload is missing")
    for _ in range(2):
        check_seal(fs, run_dir, held.place, held.seal)
        check_part(fs, run_dir, held.payload_dir, held.seal)
    return held.seal


def release_part(fs: FileSystem, run_dir: str, held: Held, seal: Seal) -> None:
    """The copy counts again, durably; nothing of it is left in quarantine. Give only what `prove` has just returned.

    May be repeated after a cut at any instant, which leaves the copy in quarantine, back in its
    place, or its payload back and not yet sealed.
    """
    target, source = os.path.join(run_dir, held.dir_name), os.path.join(run_dir, held.place)
    seal_name = layout.seal_name(seal.payload_name)
    # Retention may have removed the directory meanwhile.
    ensure_dir(fs, target)
    # The payload first: were the seal moved first, a cut would leave a seal without its payload.
    if held.payload_dir == held.place:
        fs.rename(os.path.join(source, seal.payload_name), os.path.join(target, seal.payload_name))
    # Also where the payload has its name already: whoever moved it may have been killed before this. Without it a cut may keep
    # the seal's name here and lose the payload's. Where it comes from is synced after: the other way round it could lose both.
    fs.sync_dir(target)
    fs.sync_dir(source)
    fs.rename(os.path.join(source, seal_name), os.path.join(target, seal_name))
    fs.sync_dir(target)  # without it a cut may take back what we are about to call released
    fs.sync_dir(source)
    # The reason, and names that a cut of an earlier release has left beside those in the checkpoint: they are the same files.
    for name in held.names:
        fs.remove(os.path.join(source, name))
    fs.sync_dir(source)  # without it `list` could show after a cut what is no longer held
    if not fs.list_dir(source):
        fs.remove(source)


def bound(fs: FileSystem, run_dir: str, *, budget_bytes: int) -> tuple[str, ...]:
    """The quarantine holds at most `budget_bytes`, the newest step always; returns what was removed."""
    root = os.path.join(run_dir, layout.QUARANTINE)
    try:
        names = sorted((name for name in fs.list_dir(root) if layout.parse_step_dir(name)), key=lambda name: layout.parse_step_dir(name) or (0, ""))
    except FileNotFoundError:
        return ()
    sizes = {name: sum(fs.stat(os.path.join(root, name, entry)).size_bytes for entry in fs.list_dir(os.path.join(root, name))) for name in names}
    removed = []
    for name in names[:-1]:
        if sum(sizes.values()) <= budget_bytes:
            break
        for entry in fs.list_dir(os.path.join(root, name)):
            fs.remove(os.path.join(root, name, entry))
        fs.remove(os.path.join(root, name))
        fs.sync_dir(root)
        del sizes[name]
        removed.append(name)
    return tuple(removed)

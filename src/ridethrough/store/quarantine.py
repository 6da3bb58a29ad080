"""Damaged parts are moved aside, with the reason, and bounded in bytes.

Only the process that owns the run's lock on its node does this, and only for bytes that two
reads past the cache found wrong (`verify.is_surely_damaged`).
"""

from __future__ import annotations

import os

from ridethrough.format import layout, record
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem
from ridethrough.store.commit import ensure_dir, publish


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
    publish(fs, os.path.join(target, f"{stem}.reason.json"), record.canonical({"reason": reason, "step": seal.step, "part": seal.part}) + b"\n")
    return target


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

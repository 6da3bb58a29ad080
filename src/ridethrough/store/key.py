"""The run's secret, with which its nodes prove to each other who they are.

It lies in the run directory, or where the user has put it, as 64 hexadecimal digits, and can be
read by its owner only: whoever has it can tell supervisors what to do.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import uuid

from ridethrough.errors import UsageError
from ridethrough.format import layout
from ridethrough.seam.fs import NO_LINKS, FileSystem, translated

_KEY = re.compile(r"[0-9a-f]{64}")
_OTHERS = 0o077
_MAX_BYTES = 4096


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_hex(32)


def read_key(fs: FileSystem, path: str) -> str:
    """The key in a file.

    Raises:
        UsageError: It can be read by others, or it is not a key.
        FileNotFoundError: There is none.
    """
    with translated(path, "stat"):
        mode = os.stat(path).st_mode
    if mode & _OTHERS:
        raise UsageError(detail=f"key file {path} is open to other users (mode {mode & 0o777:o}): chmod 600 it, or set RIDETHROUGH_KEY_FILE")
    text = fs.read(path, max_bytes=_MAX_BYTES).decode("ascii", "replace").strip().lower()
    if not _KEY.fullmatch(text):
        raise UsageError(detail=f"key file {path} does not hold a key of 64 hexadecimal digits: openssl rand -hex 32")
    return text


def kept_key(fs: FileSystem, run_dir: str) -> str | None:
    """The key that lies in the run directory; None if there is none.

    Raises:
        UsageError: It can be read by others, or it is not a key.
    """
    try:
        return read_key(fs, os.path.join(run_dir, layout.KEY))
    except FileNotFoundError:
        return None


def keep_key(fs: FileSystem, run_dir: str, key: str) -> None:
    """The run directory holds this key, durably, for its owner only.

    Durability:
        A cut at any instant leaves the old key, none, or the new one.
    """
    path = os.path.join(run_dir, layout.KEY)
    if kept_key(fs, run_dir) == key:
        return
    temporary = f"{path}.{uuid.uuid4().hex[:8]}{layout.TEMPORARY}"
    with translated(temporary, "create"):
        # Before there is anything in it: others must not get hold of a descriptor.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        fs.append(temporary, key.encode() + b"\n")
        fs.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fs.sync_dir(run_dir)  # without it a power cut may take the name away


def ensure_key(fs: FileSystem, run_dir: str) -> str:
    """The key that lies in the run directory; made if there is none, by exactly one of several nodes that look at once.

    Raises:
        UsageError: It can be read by others, it is not a key, or one cannot be made here.
        StorageError: The storage refuses; the same call may be tried again.
    """
    found = kept_key(fs, run_dir)
    if found is not None:
        return found
    path = os.path.join(run_dir, layout.KEY)
    temporary = f"{path}.{uuid.uuid4().hex[:8]}{layout.TEMPORARY}"
    with translated(temporary, "create"):
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    refusal: OSError | None = None
    try:
        fs.append(temporary, new_key().encode() + b"\n")
        # A link and not a rename: of two nodes that do this at once the second must take the first one's key.
        os.link(temporary, path)
    except OSError as error:
        refusal = error  # for a name that is taken, file systems have several; whether there is a key tells
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    fs.sync_dir(run_dir)  # without it a power cut may take the name away
    key = kept_key(fs, run_dir)
    if key is None and refusal is not None and refusal.errno not in NO_LINKS:
        with translated(path, "link"):
            raise refusal
    if key is None:
        raise UsageError(
            detail=f"{path} cannot be made here (no hard links?): make it once with `(umask 077; openssl rand -hex 32 > FILE)` "
            "and set peers.key_file or RIDETHROUGH_KEY_FILE"
        )
    return key

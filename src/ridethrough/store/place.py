"""Where a run or a copy of it is: a directory, a prefix in an object store, or a directory that rsync reaches."""

from __future__ import annotations

import os
import re
import urllib.parse
from dataclasses import dataclass

from ridethrough.errors import UsageError
from ridethrough.redact import redact_text
from ridethrough.seam.fs import FileSystem, PosixFileSystem

_FORMS = "a directory, file:///PATH, s3://BUCKET/PREFIX, rsync://HOST/MODULE/PATH or ssh://HOST/PATH"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A run directory on some storage; everything that reads or writes one works with both fields."""

    fs: FileSystem
    run_dir: str
    shown: str
    """As the user wrote it, without secrets."""
    is_mounted: bool
    """A directory on this machine."""

    def path(self, *names: str) -> str:
        """Of a file in it."""
        return os.path.join(self.run_dir, *names)


def open_place(where: str, *, bytes_per_s: float | None = None) -> Place:
    """The place that a path or URL names; nothing is read or made there.

    Args:
        where: Path or URL.
        bytes_per_s: The most that may go over the wire, for places whose transfer does not go through `store.copy.paced`.

    Raises:
        UsageError: Nobody knows how to get there.
    """
    if not where:
        raise UsageError(detail="an empty path (an unset variable?)", hint=f"name {_FORMS}")
    if not _URL.match(where):
        return Place(fs=PosixFileSystem(), run_dir=os.path.abspath(where), shown=where, is_mounted=True)
    scheme, _, rest = where.partition("://")
    scheme = scheme.lower()
    if scheme == "file":
        if not rest.startswith("/"):
            raise UsageError(detail=f"{where}: a file URL has three slashes", hint=f"write file:///{rest}")
        return Place(fs=PosixFileSystem(), run_dir=os.path.normpath(urllib.parse.unquote(rest)), shown=where, is_mounted=True)
    from ridethrough.seam.objects import SCHEMES, ObjectFileSystem  # noqa: PLC0415  most runs have no object store

    if scheme in SCHEMES:
        return Place(fs=ObjectFileSystem(where), run_dir="/", shown=redact_text(where), is_mounted=False)
    from ridethrough.seam import rsync  # noqa: PLC0415  nor another machine

    if scheme in rsync.SCHEMES:
        fs = rsync.RsyncFileSystem(where, bytes_per_s=bytes_per_s)
        return Place(fs=fs, run_dir="/", shown=fs.url, is_mounted=False)
    raise UsageError(detail=f"{redact_text(where)}: there is no kind of place called {scheme}://", hint=f"name {_FORMS}")

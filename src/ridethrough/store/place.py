"""Where a run or a copy of it is: a directory, or a prefix in an object store."""

from __future__ import annotations

import os
import re
import urllib.parse
from dataclasses import dataclass

from ridethrough.errors import UsageError
from ridethrough.redact import redact_text
from ridethrough.seam.fs import FileSystem, PosixFileSystem

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


def open_place(where: str) -> Place:
    """The place that a path or URL names; nothing is read or made there.

    Raises:
        UsageError: Nobody knows how to get there.
    """
    if not where:
        raise UsageError(detail="an empty path (an unset variable?)", hint="name a directory, file:///PATH or s3://BUCKET/PREFIX")
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
    raise UsageError(detail=f"{redact_text(where)}: there is no kind of place called {scheme}://", hint="file:///PATH, s3://BUCKET/PREFIX, or a path")

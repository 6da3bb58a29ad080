"""Object stores as a file system: S3, and what else obstore speaks with.

Directories are only prefixes, a name stands for a whole object, and whatever was acknowledged is durable: there is
nothing to sync and nothing to rename. Credentials and endpoints come from where their own tools look (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL …), never from a configuration of ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import urllib.parse
from collections.abc import Iterator
from typing import Any

from ridethrough.errors import StorageDenied, StorageError, StorageUnreachable, UsageError
from ridethrough.seam.fs import FileStat, Usage, Writer, read_whole

SCHEMES = ("s3", "gs", "az")
_PIECE_BYTES = 8 << 20
_DENIED = ("403 Forbidden", "401 Unauthorized", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_HINT = "check the AWS_ variables (keys, region, endpoint), then what the bucket allows"
_TIMEOUT = "60s"
_CONNECT_TIMEOUT = "10s"


class ObjectFileSystem:
    """One bucket, or a prefix in it, as a `FileSystem`; paths begin with "/".

    Args:
        url: Such as ``s3://bucket/prefix``.

    Raises:
        UsageError: obstore is not installed, or it is no such URL.
    """

    publishes_whole = True

    def __init__(self, url: str) -> None:
        try:
            import obstore  # noqa: PLC0415  an extra, needed for object stores only
            from obstore import store as stores  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(detail=f"{url}: object stores need obstore", hint="pip install 'ridethrough[objects]'") from error
        if not urllib.parse.urlsplit(url).netloc:
            raise UsageError(detail=f"{url}: names no bucket", hint="write s3://BUCKET/PREFIX")
        self._obstore: Any = obstore
        self._url = url.rstrip("/")
        # Buckets in the path and not in the host name: what every store but the largest ones needs.
        options: dict[str, Any] = {"virtual_hosted_style_request": False} if url.startswith("s3:") else {}
        client = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        if endpoint.startswith("http://"):
            client["allow_http"] = "true"
        try:
            self._store = stores.from_url(url, client_options=client, **options)  # type: ignore[call-overload]
        except Exception as error:
            raise UsageError(detail=f"{url}: {_first_line(error)}") from error

    def _key(self, path: str) -> str:
        return path.strip("/")

    @contextlib.contextmanager
    def _translated(self, path: str, doing: str) -> Iterator[None]:
        shown = f"{self._url}/{self._key(path)}"
        kinds = self._obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:  # obstore's NotFoundError is one, too
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), shown) from error
        except (kinds.BaseError, OSError) as error:  # its writer raises the latter, with the same text
            text = _first_line(error)
            kind = StorageDenied if any(word in text for word in _DENIED) else StorageUnreachable
            raise kind(
                path=shown, detail=f"{doing}: {text}", hint="check the AWS_ variables: keys, region, endpoint; then the bucket's own rules"
            ) from error

    def create(self, path: str, size_bytes: int) -> Writer:
        return _ObjectWriter(self, path)

    def append(self, path: str, data: bytes) -> None:
        raise StorageError(path=f"{self._url}/{self._key(path)}", detail="an object cannot be appended to")

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        return read_whole(self, path, max_bytes=max_bytes, past_cache=past_cache)

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        length = min(len(buffer), max(self.stat(path).size_bytes - offset, 0))
        if not length:
            return 0
        with self._translated(path, "read"):
            found = self._obstore.get_range(self._store, self._key(path), start=offset, length=length)
            data = memoryview(found)
            buffer[: len(data)] = data
            return len(data)

    def stat(self, path: str) -> FileStat:
        key = self._key(path)
        if key:
            try:
                with self._translated(path, "look up"):
                    found = self._obstore.head(self._store, key)
                return FileStat(size_bytes=found["size"], is_dir=False, modified_s=found["last_modified"].timestamp())
            except FileNotFoundError:
                if not self._listing(path)[1]:
                    raise
        return FileStat(size_bytes=0, is_dir=True, modified_s=0.0)

    def list_dir(self, path: str) -> list[str]:
        names, is_there = self._listing(path)
        if not is_there and self._key(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self._url}/{self._key(path)}")
        return names

    def _listing(self, path: str) -> tuple[list[str], bool]:
        key = self._key(path)
        with self._translated(path, "list"):
            found = self._obstore.list_with_delimiter(self._store, prefix=key or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        names = sorted({name.rstrip("/").removeprefix(key).strip("/").split("/")[0] for name in paths} - {""})
        return names, bool(names)

    def make_dir(self, path: str) -> bool:
        return True

    def rename(self, source: str, target: str) -> None:
        raise StorageError(path=f"{self._url}/{self._key(source)}", detail="an object cannot be renamed")

    def remove(self, path: str) -> None:
        key = self._key(path)
        with contextlib.suppress(FileNotFoundError), self._translated(path, "remove"):
            if key:
                self._obstore.delete(self._store, key)

    def sync_dir(self, path: str) -> None:
        return  # what was acknowledged is durable, name included

    def usage(self, path: str) -> Usage:
        raise StorageError(path=self._url, detail="an object store does not say how much room is left")

    def begin(self, path: str) -> Any:
        """Obstore's writer of a new object: small ones in one request, large ones in parts."""
        with self._translated(path, "create"):
            return self._obstore.open_writer(self._store, self._key(path), buffer_size=_PIECE_BYTES, max_concurrency=4)


class _ObjectWriter:
    """Nothing is visible under the name before `sync` has returned; then all of it is."""

    def __init__(self, fs: ObjectFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._inner: Any = fs.begin(path)

    def write(self, data: bytes | memoryview) -> None:
        with self._fs._translated(self._path, "write"):
            self._inner.write(bytes(data))

    def sync(self) -> None:
        with self._fs._translated(self._path, "finish the upload"):
            self._inner.close()
        self._inner = None

    def close(self) -> None:
        self._inner = None  # parts of an upload that was never finished are no object


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]

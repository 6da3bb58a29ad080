"""What made a run: code, command, data, dependencies, configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ridethrough.errors import UsageError
from ridethrough.format import record
from ridethrough.redact import redact
from ridethrough.seam.process import run_captured, shown_command

_WATCHED = (
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "datasets",
    "torchdata",
    "torchvision",
    "deepspeed",
)
_GIT_S = 5.0
_FINGERPRINT_BYTES = 1 << 20
_VERSION_LINE = re.compile(r"""^__version__\s*(?::[^=]+)?=\s*['"]([^'"]+)['"]""", re.M)
_VERSION_BYTES = 1 << 14


def git_state(directory: str) -> tuple[str | None, bool | None]:
    """Commit and whether the work tree differs from it; None where there is no repository or no git."""
    code, commit = run_captured(["git", "rev-parse", "HEAD"], timeout_s=_GIT_S, cwd=directory)
    if code:
        return None, None
    code, changed = run_captured(["git", "status", "--porcelain", "--untracked-files=no"], timeout_s=_GIT_S, cwd=directory)
    return commit.strip(), bool(changed.strip()) if not code else None


def git_diff(directory: str) -> str | None:
    """Names the uncommitted changes of the work tree that `git_state` sees; None where git cannot tell."""
    # Plumbing: what it prints does not depend on the user's settings for `git diff`, on external and text converters neither.
    code, patch = run_captured(["git", "diff-index", "--patch", "--full-index", "HEAD"], timeout_s=_GIT_S, cwd=directory)
    return hashlib.sha256(patch.encode()).hexdigest()[:32] if not code else None


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of these packages as they would be imported here, without importing them; what is not installed is left out."""
    own = {"python": platform.python_version(), "ridethrough": importlib.metadata.version("ridethrough")}
    found = {}
    for name in names:
        version = own.get(name) or _version_of(name)
        if version is not None:
            found[name] = version
    return found


def _version_of(name: str) -> str | None:
    """As the package itself would say it: that of torch names the build, that of its metadata may not."""
    if name not in _WATCHED:
        return None  # a name out of a checkpoint is not looked for on the disk
    spec = importlib.util.find_spec(name)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        with contextlib.suppress(OSError, UnicodeDecodeError), open(os.path.join(place, "version.py"), encoding="utf-8") as file:
            said = _VERSION_LINE.search(file.read(_VERSION_BYTES))
            if said:
                return said.group(1)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def dependencies() -> dict[str, str]:
    """Versions of what can change numbers: Python, and the training libraries that are loaded."""
    found = {"python": platform.python_version(), "ridethrough": importlib.metadata.version("ridethrough")}
    for name in _WATCHED:
        if name in sys.modules:
            version = getattr(sys.modules[name], "__version__", None)
            if version is not None:
                found[name] = str(version)
    return found


def describe(*, experiment: str, config: Mapping[str, Any] | None, data_version: str | None) -> dict[str, Any]:
    """The part of `meta.json` that does not change during an attempt; null is unknown."""
    script = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else os.getcwd()
    directory = script if os.path.isdir(script) else os.getcwd()
    commit, is_dirty = git_state(directory)
    described = {
        "experiment": experiment,
        "git_commit": commit,
        "git_dirty": is_dirty,
        "start_command": shown_command([sys.executable, *sys.argv]),
        "data_version": data_version,
        "dependencies": dependencies(),
        "config_hash": record.digest(_plain(config)) if config is not None else None,
    }
    if is_dirty:
        described["git_diff"] = git_diff(directory)
    cleaned = redact(described)
    assert isinstance(cleaned, dict)
    return cleaned


def _plain(value: Any) -> Any:
    """A configuration as JSON; what JSON does not know counts by its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


def data_fingerprint(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> str:
    """A version for data that has none: equal as long as no file's name, size, head or tail changes.

    Reads at most 2 MiB a file, so that terabytes are named in seconds; a change in the middle of a
    file that keeps its size is not noticed. Use your data set's own version where there is one.

    Args:
        paths: Files or directories (walked in name order).

    Raises:
        UsageError: A path does not exist.
    """
    several: Iterable[str | os.PathLike[str]] = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    roots = sorted(os.fspath(path) for path in several)
    total = hashlib.sha256()
    for root in roots:
        if not os.path.exists(root):
            raise UsageError(detail=f"data path {root} does not exist")
        files = [root] if os.path.isfile(root) else sorted(os.path.join(d, name) for d, _, names in os.walk(root) for name in names)
        for path in files:
            size = os.path.getsize(path)
            total.update(f"{os.path.relpath(path, os.path.dirname(root))}\0{size}\0".encode())
            with open(path, "rb") as file:
                total.update(file.read(_FINGERPRINT_BYTES))
                if size > _FINGERPRINT_BYTES:
                    file.seek(max(size - _FINGERPRINT_BYTES, _FINGERPRINT_BYTES))
                    total.update(file.read(_FINGERPRINT_BYTES))
    return f"fingerprint:{total.hexdigest()[:32]}"

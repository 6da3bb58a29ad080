"""Another machine's directory as a file system, by the rsync program: a daemon's module (rsync://) or rsync over ssh (ssh://).

Files travel whole. What is written is collected in a private directory here and sent at `Writer.sync`: the far rsync
writes it under a name of its own, syncs it (``--fsync``) and only then renames it, so a transfer that is cut leaves
nothing under the name. Over ssh the far file system is synced afterwards, so that the name is durable, too. A daemon
offers no way to ask for that: the name becomes durable with the far file system's own next commit, a few seconds later.

What is read back comes through the page cache of the far machine. Nobody can ask it past that.

Passwords and keys come from where rsync and ssh look themselves: RSYNC_PASSWORD, ~/.ssh, the agent, RSYNC_RSH.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from ridethrough.errors import StorageDenied, StorageError, StorageUnreachable, StoreFull, StoreReadOnly, UsageError
from ridethrough.redact import redact_text
from ridethrough.seam.fs import FileStat, PosixFileSystem, Usage, Writer
from ridethrough.seam.staging import Staging

SCHEMES = ("rsync", "ssh")
_OLDEST = (3, 2, 4)
"""The first rsync with --fsync (2022)."""
_CONNECT_S = 10
_ANSWER_S = 60
# The far side is silent while it syncs what it has received: gigabytes on a slow disk take minutes.
_SYNC_S = 600
# Takes the first of an option's values: what a user sets in RSYNC_RSH comes before these.
_SSH_OPTIONS = (
    *("BatchMode=yes", f"ConnectTimeout={_CONNECT_S}", "ServerAliveInterval=15", "ServerAliveCountMax=4"),
    # A new connection for each file would take longer than the file. The path is relative because a socket's may not be long.
    *("ControlMaster=auto", "ControlPath=ssh", "ControlPersist=10"),
)
# Numbers as they are, names as they are (also not ASCII), paths not through a far shell, no message of the day.
_COMMON = ("--no-h", "-8", "-s", "--no-motd")
# rsync leaves a file alone that has the same size and time; a record that is replaced within a second has.
_WHOLE = ("--ignore-times", "--whole-file")
# A far rsync expands these in every path, also in the one it deletes in, and has no way of quoting them that always holds.
_PATTERN = re.compile(r"[*?\[]")
_LISTED = re.compile(rb"(\S)\S{9}\S*\s+([\d.,]+)\s+(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) (.*)")
_ESCAPED = re.compile(rb"\\#(\d{3})")
_SOURCE_LINE = re.compile(r" at \S+\(\d+\) \[.*\]$")

# The sender of a file, or ssh's sync, looked for it; a receiver that finds no room for it says so in other words.
_LOOKED_FOR = re.compile(r'(?:link_stat|change_dir) "|^sync: ')
_ABSENT = {"No such file or directory": (errno.ENOENT, FileNotFoundError), "Not a directory": (errno.ENOTDIR, NotADirectoryError)}
_KINDS: tuple[tuple[type[StorageError], tuple[str, ...]], ...] = (
    (
        StorageDenied,
        ("auth failed", "Permission denied", "Operation not permitted", "access denied", "configured to refuse", "Host key verification failed"),
    ),
    (StoreFull, ("No space left on device", "Disk quota exceeded", "File too large")),
    (StoreReadOnly, ("module is read only", "Read-only file system")),
    (StorageError, ("Unknown module", "unknown option", "command not found", "module is write only")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What an rsync:// or ssh:// URL says."""

    is_ssh: bool
    user: str
    host: str
    """IPv6 in brackets."""
    port: int | None
    root: str
    """Absolute on the far machine (ssh), or below the host and beginning with the module (rsync)."""

    @property
    def login(self) -> str:
        """USER@HOST, or HOST alone."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def shown(self) -> str:
        """The URL."""
        port = f":{self.port}" if self.port else ""
        return f"{'ssh' if self.is_ssh else 'rsync'}://{self.login}{port}{self.root}"

    def remote(self, path: str, *, inside: bool = False) -> str:
        """What rsync calls the path there; `inside` means what lies in the directory."""
        full = f"{self.root}/{path.strip('/')}".rstrip("/") + ("/" if inside else "")
        if self.is_ssh:
            return f"{self.login}:{full}"
        return f"rsync://{self.login}{f':{self.port}' if self.port else ''}{full}"


def parse_url(url: str) -> Address:
    """The address that the URL names.

    Raises:
        UsageError: It names none, or holds a password.
    """
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    user, _, place = authority.rpartition("@")
    is_ssh = scheme.lower() == "ssh"
    form = "ssh://[USER@]HOST[:PORT]/PATH" if is_ssh else "rsync://[USER@]HOST[:PORT]/MODULE/PATH"
    if ":" in user:
        how = "use a key: ssh-copy-id HOST" if is_ssh else "set RSYNC_PASSWORD in the environment"
        raise UsageError(detail=f"{redact_text(url)}: a password does not belong in a URL", hint=how)
    found = re.fullmatch(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?", place)
    root = "/" + urllib.parse.unquote(path).strip("/")
    # A host or user that begins with a dash would be an option to ssh.
    if found is None or found["host"].startswith("-") or (user and not re.fullmatch(r"\w[\w.+-]*", user)):
        raise UsageError(detail=f"{redact_text(url)}: names no host", hint=f"write {form}")
    if root == "/":
        raise UsageError(detail=f"{redact_text(url)}: names no {'path' if is_ssh else 'module'}", hint=f"write {form}")
    if _PATTERN.search(root):
        raise UsageError(detail=f"{redact_text(url)}: rsync would take *, ? and [ as patterns", hint="choose a path without them")
    return Address(is_ssh=is_ssh, user=user, host=found["host"], port=int(found["port"]) if found["port"] else None, root=root)


class RsyncFileSystem:
    """A directory on another machine as a `FileSystem`; paths begin with "/".

    Each call is an rsync of its own: tens of milliseconds near by. Over ssh they share a connection, which stays for 10 s
    after the last one.

    Args:
        url: ``rsync://[USER@]HOST[:PORT]/MODULE/PATH`` or ``ssh://[USER@]HOST[:PORT]/PATH``; the path need not exist yet.

    Raises:
        UsageError: It is no such URL, or a program is missing here or too old.

    Durability:
        When `Writer.sync` returns the content is durable there; over ssh the name, too. A daemon's file system makes the
        name durable with its own next commit: until then a cut there leaves the file whole or absent, never in part.
    """

    publishes_whole = True

    def __init__(self, url: str, *, bytes_per_s: float | None = None) -> None:
        # The staged file goes on in one breath: whoever bounds what is staged has not bounded that. In KiB, at least one.
        self._bound = (f"--bwlimit={max(int(bytes_per_s / 1024), 1)}",) if bytes_per_s else ()
        self._address = parse_url(url)
        _require_rsync()
        self._ssh = (*shlex.split(os.environ.get("RSYNC_RSH") or "ssh"), *(word for option in _SSH_OPTIONS for word in ("-o", option)))
        if self._address.is_ssh and shutil.which(self._ssh[0]) is None:
            raise UsageError(detail=f"{self._ssh[0]} is not installed here", hint="install the OpenSSH client (apt install openssh-client)")
        if self._address.port:
            self._ssh = (*self._ssh, "-p", str(self._address.port))
        self._staging = Staging("rsync")
        self._lock = threading.Lock()
        self._kept: tuple[str, str] | None = None
        """Path and local file of what was read last and not yet to its end."""

    @property
    def url(self) -> str:
        """As it was given; there is no secret in it."""
        return self._address.shown

    # -- writing ------------------------------------------------------------------------------------------------------

    def create(self, path: str, size_bytes: int) -> Writer:
        self._require_plain(path)
        return _RsyncWriter(self, path, size_bytes, self._staging)

    def push(self, path: str, file: str) -> None:
        """The local file is there under the name, as the class says; or nothing new is."""
        self._drop(path)
        # --mkpath: directories there are made with what lies in them. Never --inplace: the name must stand for all of it.
        self._rsync(path, "write", "--fsync", "--mkpath", *_WHOLE, "--", file, self._address.remote(path), timeout_s=_SYNC_S)
        self.sync_dir(os.path.dirname(path))  # without it a cut there takes the new name away again

    def append(self, path: str, data: bytes) -> None:
        raise StorageError(path=self._shown(path), detail="rsync cannot append to a file")

    def make_dir(self, path: str) -> bool:
        return True

    def rename(self, source: str, target: str) -> None:
        raise StorageError(path=self._shown(source), detail="rsync cannot rename a file")

    def remove(self, path: str) -> None:
        self._require_plain(path)
        self._drop(path)
        try:
            # Asked for first, because what follows would make a parent that is not there.
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        parent, name = os.path.split(path.rstrip("/"))
        with self._staging.room() as empty:
            only_it = ("--dirs", "--delete", f"--include=/{name}", "--exclude=*", "--itemize-changes")
            told = self._rsync(path, "remove", *only_it, "--", f"{empty}/", self._address.remote(parent, inside=True))
        if b"*deleting" not in told:  # rsync's exit code is 0 also where a directory was not empty
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self.stat(path)
                text = told.decode("utf-8", "replace").strip().split("\n")[0] or "it is still there"
                raise StorageError(path=self._shown(path), detail=f"remove: {text}")

    def sync_dir(self, path: str) -> None:
        if not self._address.is_ssh:
            return  # nothing in the protocol asks for it
        directory = f"{self._address.root}/{path.strip('/')}".rstrip("/")
        command = [*self._ssh, "--", self._address.login.replace("[", "").replace("]", ""), f"sync -f {shlex.quote(directory)}"]
        # A directory that nothing was written in yet is not there, and nothing in it can be lost.
        with contextlib.suppress(FileNotFoundError):
            self._run(path, "sync", command)

    def usage(self, path: str) -> Usage:
        raise StorageError(path=self._address.shown, detail="rsync does not say how much room is left")

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        with self._staging.room() as room:
            file = os.path.join(room, "file")
            self._fetch(path, file, max_bytes=max_bytes)
            return PosixFileSystem().read(file, max_bytes=max_bytes)

    def read_into(self, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        with self._lock:
            if self._kept is None or self._kept[0] != path or (past_cache and not offset) or not os.path.exists(self._kept[1]):
                self._forget()
                room = self._staging.make_room()
                self._kept = (path, os.path.join(room, "file"))
                try:
                    self._fetch(path, self._kept[1])
                except BaseException:
                    self._forget()
                    raise
            file = self._kept[1]
            got = PosixFileSystem().read_into(file, buffer, offset=offset)
            # Nobody reads on behind the end, and it may be gigabytes.
            if offset + got >= os.stat(file).st_size:
                self._forget()
            return got

    def stat(self, path: str) -> FileStat:
        entries = self._list(path, "look up", "--copy-links", "--", self._address.remote(path))
        if not entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._shown(path))
        # The root of a module is listed with what lies in it; it comes first.
        kind, size_bytes, modified_s, _ = entries[0]
        return FileStat(size_bytes=0 if kind == "d" else size_bytes, is_dir=kind == "d", modified_s=modified_s)

    def list_dir(self, path: str) -> list[str]:
        entries = self._list(path, "list", "--", self._address.remote(path, inside=True))
        return sorted(name for *_, name in entries if name != ".")

    def _list(self, path: str, doing: str, *argv: str) -> list[tuple[str, int, float, str]]:
        self._require_plain(path)
        return parse_listing(self._rsync(path, doing, "--dirs", "--list-only", *argv, is_short=True))

    def _fetch(self, path: str, file: str, *, max_bytes: int | None = None) -> None:
        self._require_plain(path)
        limit = () if max_bytes is None else (f"--max-size={max_bytes}",)
        self._rsync(path, "read", "--copy-links", *_WHOLE, *limit, "--", self._address.remote(path), file, is_local=True)
        if os.path.lexists(file):
            return
        found = self.stat(path)  # it was passed over, which is no error to rsync
        if max_bytes is not None and not found.is_dir and found.size_bytes > max_bytes:
            raise StorageError(detail=f"{found.size_bytes} bytes where at most {max_bytes} make sense", path=self._shown(path))
        raise IsADirectoryError(errno.EISDIR, "not a regular file", self._shown(path))

    def _drop(self, path: str) -> None:
        with self._lock:
            if self._kept is not None and self._kept[0] == path:
                self._forget()

    def _forget(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            self._staging.remove_room(os.path.dirname(kept[1]))

    # -- programs -----------------------------------------------------------------------------------------------------

    def _shown(self, path: str) -> str:
        return f"{self._address.shown}/{path.strip('/')}".rstrip("/")

    def _require_plain(self, path: str) -> None:
        if _PATTERN.search(path):
            raise StorageError(path=self._shown(path), detail="rsync would take *, ? and [ as patterns")

    def _rsync(self, path: str, doing: str, *argv: str, timeout_s: int | None = None, is_local: bool = False, is_short: bool = False) -> bytes:
        timeout_s = timeout_s or _ANSWER_S
        way = ("-e", shlex.join(self._ssh)) if self._address.is_ssh else (f"--contimeout={_CONNECT_S}",)
        return self._run(
            path,
            doing,
            ["rsync", *_COMMON, *self._bound, *way, f"--timeout={timeout_s}", *argv],
            is_local=is_local,
            limit_s=2 * timeout_s if is_short else None,
        )

    def _run(self, path: str, doing: str, argv: Sequence[str], *, is_local: bool = False, limit_s: float | None = None) -> bytes:
        try:
            code, out, err = _run_whole([*_dying_with_us(), *argv], cwd=self._staging.directory, limit_s=limit_s)
        except subprocess.TimeoutExpired as error:  # rsync's own --timeout does not count before a daemon has greeted it
            raise StorageUnreachable(path=self._shown(path), detail=f"{doing}: no answer within {limit_s:.0f} s") from error
        if code:
            raise failure(code, err, path=self._shown(path), doing=doing, local=self._staging.directory if is_local else None) from (
                subprocess.CalledProcessError(code, argv[0])
            )
        return out


class _RsyncWriter:
    """Nothing is there under the name before `sync` has returned; then all of it is."""

    def __init__(self, fs: RsyncFileSystem, path: str, size_bytes: int, staging: Staging) -> None:
        self._fs = fs
        self._path = path
        self._staging = staging
        self._room: str | None = staging.make_room()
        self._file = os.path.join(self._room, "file")
        try:
            self._inner = PosixFileSystem().create(self._file, size_bytes)
        except BaseException:
            staging.remove_room(self._room)
            raise

    def write(self, data: bytes | memoryview) -> None:
        self._inner.write(data)

    def sync(self) -> None:
        self._inner.close()
        self._fs.push(self._path, self._file)

    def close(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            self._inner.close()
            self._staging.remove_room(room)


def parse_listing(text: bytes) -> list[tuple[str, int, float, str]]:
    """Kind ("-", "d", "l" …), bytes, time and name of each line of ``rsync --list-only``; other lines are nobody's files."""
    found = []
    for line in text.split(b"\n"):
        match = _LISTED.fullmatch(line)
        if match is not None:
            kind, size, date, name = match.groups()
            at = datetime.datetime.strptime(date.decode(), "%Y/%m/%d %H:%M:%S").replace(tzinfo=datetime.UTC)
            plain = _ESCAPED.sub(lambda escape: bytes([int(escape[1], 8) & 0xFF]), name)
            found.append((kind.decode("ascii", "replace"), int(re.sub(rb"[.,]", b"", size)), at.timestamp(), os.fsdecode(plain)))
    return found


def failure(code: int, err: str, *, path: str, doing: str, local: str | None = None) -> Exception:
    """What an exit code other than 0 and the text with it mean.

    Args:
        code: Of rsync, or of ssh.
        err: What it said.
        path: Of the file, as a user knows it.
        doing: What was attempted.
        local: The directory here that was written to, if there was one: then it is what is full.
    """
    lines = [line.strip() for line in err.split("\n") if line.strip()]
    for kind, words in _KINDS:
        line = next((line for line in lines if any(word in line for word in words)), None)
        if line is not None:
            hint = f" (the rsync there is older than {'.'.join(map(str, _OLDEST))})" if "unknown option" in line else ""
            # For a file here `ls -ld` would tell; for one there who we are does.
            next_step = {"hint": "check RSYNC_PASSWORD or the ssh key, then what the far side allows"} if kind is StorageDenied else {}
            return kind(path=local if local and kind is StoreFull else path, detail=f"{doing}: {_one_line(line)}{hint}", **next_step)
    for text, (number, absent) in _ABSENT.items():
        if doing != "write" and any(text in line and _LOOKED_FOR.search(line) and not (local and local in line) for line in lines):
            return absent(number, os.strerror(number), path)
    # What went wrong comes first; what rsync concludes from it, last.
    said = [line for line in lines if not line.startswith(("Warning: Permanently added", "rsync error:"))] or lines
    return StorageUnreachable(path=path, detail=f"{doing}: {_one_line(said[0]) if said else f'exit code {code}'}")


def _one_line(line: str) -> str:
    return redact_text(_SOURCE_LINE.sub("", line))[:300]


def _run_whole(argv: Sequence[str], *, cwd: str | None = None, limit_s: float | None = None) -> tuple[int, bytes, str]:
    """Exit code, output and errors of a program that is not left behind, whatever ends this call."""
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC0"}
    # In a session of its own it has no terminal to ask for a password on, and its ssh can be ended with it.
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=cwd, start_new_session=True
    )
    with child:
        try:
            out, err = child.communicate(timeout=limit_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return child.returncode, out, err.decode("utf-8", "replace")


@functools.cache
def _dying_with_us() -> tuple[str, ...]:
    """What makes a program end when we are killed; nothing where util-linux is not there: then it finishes its one file."""
    prefix = ("setpriv", "--pdeathsig", "KILL", "--")
    try:
        return prefix if _run_whole([*prefix, "true"])[0] == 0 else ()
    except OSError:
        return ()


@functools.cache
def _require_rsync() -> None:
    oldest = ".".join(map(str, _OLDEST))
    try:
        _, out, _ = _run_whole(["rsync", "--version"])
    except OSError:
        raise UsageError(detail="rsync is not installed here", hint=f"install rsync {oldest} or later (apt install rsync)") from None
    found = re.search(rb"version v?(\d+)\.(\d+)\.(\d+)", out)
    if found is None or tuple(map(int, found.groups())) < _OLDEST:
        text = out.split(b"\n")[0].decode("utf-8", "replace").strip()
        raise UsageError(detail=f"the rsync here cannot sync what it has written ({text})", hint=f"install rsync {oldest} or later")

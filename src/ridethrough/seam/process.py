"""The only door to other processes, to shared memory and to this machine's facts."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import resource
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ridethrough.errors import KeeperGone, PlatformUnsupported, StoreLocked
from ridethrough.redact import redact_argv, redact_text
from ridethrough.seam.clock import boot_id

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_BLOCKED_STATES = {"Z", "X"}
PATH_BYTES = 8192


def require_linux(what: str) -> None:
    """This is Linux.

    Raises:
        PlatformUnsupported: It is not; reading still works.
    """
    if sys.platform != "linux":
        raise PlatformUnsupported(what=what, platform=platform.system())


def _prctl(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def die_with_parent(expected_parent: int | None = None) -> None:
    """The kernel kills this process when the thread that started it ends, even if it is stopped."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above: nobody would then ever send the signal.
    if expected_parent is not None and os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent dies become our children, so that none can be lost sight of."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """`ps` and `top` show this process under the name (15 characters)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def start_time(pid: int) -> int | None:
    """Ticks since boot when the process started, None if it is gone; with the pid it names a process for good."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in _BLOCKED_STATES else int(fields[19])


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except OSError:
        return None  # the process has ended
    return text[text.rindex(")") + 2 :].split()


def is_alive(pid: int, started: int | None = None) -> bool:
    """The process runs, and is the one that started then."""
    found = start_time(pid)
    return found is not None and (started is None or found == started)


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, of a running process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat_fields(int(entry))
            if fields is not None and fields[0] not in _BLOCKED_STATES:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def processes_with_environment(name: str, value: str) -> list[int]:
    """Running processes of ours whose environment at start held `name=value`."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue  # another user's process, or one that has just ended
            if wanted in environment.split(b"\0"):
                found.append(int(entry))
    return found


def send_signal(pids: Iterable[int], number: int) -> None:
    """Each process that still runs has the signal."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or became someone else's
            os.kill(pid, number)


def memory_file(name: str, size_bytes: int) -> int:
    """A descriptor of anonymous memory that lives as long as somebody holds it."""
    descriptor = os.memfd_create(f"ridethrough-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    # Nobody may change the size under a process that has it mapped: it would die of SIGBUS.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def reopen(descriptor: int) -> int:
    """A second, independent open of the same memory, so that locks on it are this process's own."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def available_memory_bytes() -> int:
    """Memory that can be used without swapping: the smaller of the machine's and the cgroup's."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.M)
    available = int(found.group(1)) * 1024 if found else 1 << 62
    with contextlib.suppress(OSError, IndexError):  # no cgroup v2
        relative = Path("/proc/self/cgroup").read_text(encoding="utf-8").split("::", 1)[1].strip()
        root = Path("/sys/fs/cgroup")
        group = root / relative.lstrip("/")
        while group != root and root in group.parents:
            available = min(available, _group_memory_bytes(group))
            group = group.parent  # a job's or a slice's limit stands further up
    return max(available, 0)


def _group_memory_bytes(group: Path) -> int:
    """What the cgroup's limit leaves, its reclaimable page cache included; no limit is a very large number."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return 1 << 62
    # Shared memory counts as file there, and our slots are just that: nobody can reclaim it.
    return limit - used + int(stat.get("file", 0)) - int(stat.get("shmem", 0))


def node_name() -> str:
    """This machine's name, made safe for file names; RIDETHROUGH_NODE overrides it."""
    name = os.environ.get("RIDETHROUGH_NODE") or socket.gethostname()
    return re.sub(r"[^a-z0-9.-]", "-", name.lower()).strip(".-")[:63] or "node"


def state_dir() -> str:
    """The directory on local disk for locks, sockets and what this node knows of its runs."""
    explicit = os.environ.get("RIDETHROUGH_STATE_DIR")
    if explicit:
        return os.path.abspath(explicit)
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(os.path.abspath(base), "ridethrough")


class FileLock:
    """An exclusive lock on a local file, held until `release` or until this process ends.

    The kernel drops it with the process, so a lock left by a power cut or a SIGKILL never blocks.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1

    def acquire(self, *, run: str, note: str | None) -> str:
        """This process owns the lock, and `note` stands in the file for whoever wants to find it.

        Args:
            run: What it is about, for the message.
            note: None leaves what the previous owner had left: whoever only borrows the lock must not make the next
                keeper forget which trainers the last one has left behind.

        Returns:
            What the previous owner had left there.

        Raises:
            StoreLocked: Another one does; names it.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Without it two keepers would both write and prune the same run.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).split(b"\n")[0].decode("ascii", "replace") or "unknown"
            os.close(descriptor)
            raise StoreLocked(path=run, holder=f"process {holder}") from None
        previous = os.pread(descriptor, PATH_BYTES, 0).decode("utf-8", "replace")
        if note is None:
            note = "".join(previous.split("\n")[1:2])
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n{note}\n{start_time(os.getpid())} {boot_id()}\n".encode(), 0)
        self._descriptor = descriptor
        return previous

    def release(self) -> None:
        """The lock is free. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def run_captured(argv: Sequence[str], *, timeout_s: float, cwd: str | None = None) -> tuple[int, str]:
    """Exit code and standard output of a short helper command; 127 if it is not installed, 124 if it hangs."""
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, errors="replace", timeout=timeout_s, cwd=cwd, stdin=subprocess.DEVNULL, check=False
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return 127, ""
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout


def fork_function(function: Callable[[], None], *, name: str) -> int:
    """A child process that runs `function` and nothing of ours after it; dies with this process.

    Forked and not executed anew: the code is already in memory, so the child starts even when the
    package or its disk has vanished meanwhile. Call only where no other thread runs.

    Returns:
        The child's pid.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        die_with_parent(parent)
        set_name(name)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the keeper decides what a signal means
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A copy kept here would hide the keeper's death, hold memory it has freed, or hold the run's lock after it.
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        function()
        code = 0
    except KeeperGone:
        code = 0  # our parent has ended; so do we
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        with contextlib.suppress(OSError, ValueError):  # a dead terminal must not keep the child from ending here
            sys.stderr.flush()
        os._exit(code)


def fork_command(argv: Sequence[str], *, environment: Mapping[str, str], stderr: int | None) -> int:
    """The command runs in a session of its own and dies with this process.

    Args:
        argv: The command; found by PATH.
        environment: All of its environment.
        stderr: Descriptor for its standard error, None for ours.

    Returns:
        Its pid. A command that cannot be started ends with 127, as in a shell.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if stderr is not None:
            os.dup2(stderr, 2)
        os.execvpe(argv[0], list(argv), dict(environment))  # noqa: S606  the point: no shell between us and the command
    except OSError as error:
        os.write(2, f"ridethrough: cannot start {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def start_detached(argv: Sequence[str], *, log_path: str) -> None:
    """The program runs on its own, whatever happens to this process; its output goes to the log."""
    with open(log_path, "ab") as log:
        subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True)


def widen_pipe(descriptor: int) -> None:
    """The pipe holds as much as an unprivileged process may ask for (1 MiB by default)."""
    with contextlib.suppress(OSError):  # a lower system limit: the default size has to do
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)


def shown_command(argv: Sequence[str]) -> str:
    """The command line as a person would type it, without secrets."""
    return shlex.join(redact_argv(argv))


def shown_tail(lines: Sequence[str]) -> str:
    """The last lines of some output on one line, without secrets."""
    return redact_text(" | ".join(line.strip() for line in lines if line.strip()))


def run_abandoning(argv: Sequence[str], *, timeout_s: float) -> tuple[int, str] | None:
    """Exit code and output of a helper that reads storage; None if it did not end in time.

    A process stuck in a dead mount cannot be killed and waiting for it would hang us too: it is
    left to the kernel.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.returncode = -signal.SIGKILL  # it is not ours to wait for any more
            return None
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")


FS_IOC_SHUTDOWN = 0x8004587D
"""``_IOR('X', 125, __u32)``: linux/fs.h; the same number for ext4, XFS and F2FS."""
NOLOGFLUSH, LOGFLUSH = 2, 1


def cut_power_of(mount_point: str, flag: int = NOLOGFLUSH) -> None:
    """The file system has stopped: what was not synced is gone, and every call on it fails with EIO.

    Args:
        mount_point: Where it is mounted.
        flag: NOLOGFLUSH drops data and journal, as a power cut does; LOGFLUSH writes the journal but
            not the data, so that files renamed without fsync are there with 0 bytes.
    """
    descriptor = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, struct.pack("I", flag))
    finally:
        os.close(descriptor)

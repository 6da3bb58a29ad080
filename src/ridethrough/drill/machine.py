"""One virtual node: namespaces, an ext4 disk on a loop device, and the processes in them.

All of it hangs on one process, the first of a PID namespace. The disk is mounted in its mount namespace
only, at the same path on every node, and the network is its own. When that process is killed the kernel
ends every process of the node at once and takes mount, loop device and network down by itself: also when
the drill is killed. A node that boots has a new boot id and its own host name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ridethrough.drill import fileserver
from ridethrough.errors import DrillFailed
from ridethrough.seam import process

DISK_BYTES = 512 << 20
PROGRAMS = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mkfs.ext4": "e2fsprogs",
    "losetup": "mount",
    "mount": "mount",
}
"""What a virtual node needs, and the Debian package that has it."""
_WAIT_S = 30.0
_STARTED = "started"

# $1 name, $2 image, $3 mount options, $4 mount point, $5 work directory; the rest, if any, is the command that mounts the file server.
# It is given for ever, as an automounter does: the file server may come back later than we.
# What others have mounted from loop devices is let go first: where mounts are private to their namespaces, our copies would keep
# disks in use that they unmount meanwhile (other drills, crash tests). Programs may come from squashfs (snaps): that stays.
# An ignored SIGCHLD survives exec: the first process reaps orphans without being able to do anything.
_BOOT = f"""
set -e
echo "$1" > /proc/sys/kernel/hostname
mounts=$(cat /proc/self/mounts)
while read -r device at type _; do
  case "$device $type" in /dev/loop*squashfs) ;; /dev/loop*) umount -l "$(printf '%b' "$at")" || : ;; esac
done <<EOF
$mounts
EOF
mount -t ext4 -o "loop,$3" "$2" "$4"
mkdir -p "$4/tmp"
mount --bind "$5/hosts" /etc/hosts
mount --bind "$5/boot-$1" /proc/sys/kernel/random/boot_id
echo 1 > /proc/sys/net/ipv4/tcp_syn_retries
ip link set lo up
echo {_STARTED}
read -r _
shift 5
if [ $# -gt 0 ]; then (while :; do "$@" || :; sleep 0.3; done) & fi
trap '' CHLD
exec sleep infinity
"""


class Machine:
    """A node that can be switched on and cut; off at first.

    Args:
        name: Its host name.
        work: Directory of the cluster, outside every node.
        options: Mount options of its disk.
    """

    def __init__(self, name: str, work: str, *, options: str = "rw") -> None:
        self.name = name
        self._work = work
        self._options = options
        self._image = os.path.join(work, f"{name}.img")
        self.disk = os.path.join(work, "disk")
        self._first: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Of its first process, as seen from outside; 0 if it is off."""
        self._command: subprocess.Popen[bytes] | None = None
        os.makedirs(self.disk, exist_ok=True)
        with open(self._image, "wb") as image:
            image.truncate(DISK_BYTES)
        call("mkfs.ext4", "-q", "-F", "-E", "nodiscard", self._image)

    # -- power -----------------------------------------------------------------------------------------------------

    def boot(self, mount: Sequence[str] = ()) -> None:
        """The node's first process is on its way; `await_disk` waits for it.

        Args:
            mount: The command that mounts the file server and runs while it is mounted.
        """
        Path(self._work, f"boot-{self.name}").write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        # A slave and not private: what this machine unmounts meanwhile must not be kept in use by the node's copy of it.
        namespaces = ("--net", "--mount", "--pid", "--uts", "--propagation", "slave", "--mount-proc")
        arguments = (self.name, self._image, self._options, self.disk, self._work, *mount)
        self._first = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", _BOOT, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._console(),
        )

    def _console(self) -> IO[bytes]:
        return open(os.path.join(self._work, f"console-{self.name}"), "ab")

    def await_disk(self) -> None:
        """The disk is mounted, after the recovery of its file system."""
        assert self._first is not None
        assert self._first.stdout is not None
        if self._first.stdout.readline().decode().strip() != _STARTED:
            raise DrillFailed(detail=f"node {self.name} does not start: {self._last_words()}")
        self.pid = process.descendants(self._first.pid)[0]

    def finish_boot(self) -> None:
        """The network is there: its file server is being mounted."""
        assert self._first is not None
        assert self._first.stdin is not None
        self._first.stdin.write(b"go\n")
        self._first.stdin.flush()

    def _last_words(self) -> str:
        text = Path(self._work, f"console-{self.name}").read_text(encoding="utf-8", errors="replace").splitlines()
        return process.shown_tail(text[-5:])

    @property
    def is_on(self) -> bool:
        """Its first process runs."""
        return self._first is not None and self._first.poll() is None

    def stop_disk(self) -> None:
        """What was not synced is gone, and every call on the disk fails."""
        process.cut_power_of(self.seen(self.disk))

    def kill(self) -> None:
        """Every process of the node has been killed; `await_off` waits until they are gone."""
        if self.is_on and self.pid:
            with contextlib.suppress(ProcessLookupError):  # killed a moment ago
                os.kill(self.pid, signal.SIGKILL)
        elif self._first is not None:
            self._first.kill()

    def await_off(self) -> None:
        """Nothing of the node is left but its disk, which nobody holds."""
        if self._first is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._first.wait(_WAIT_S)
            if self._first.poll() is None:
                raise DrillFailed(detail=f"processes of {self.name} survive SIGKILL")
            for pipe in (self._first.stdin, self._first.stdout):
                if pipe is not None:
                    pipe.close()
        if self._command is not None:
            self._command.wait(_WAIT_S)
        self._first, self.pid = None, 0
        deadline = time.monotonic() + _WAIT_S
        # The kernel may hold the image a moment longer; mounting it twice would damage it.
        while call("losetup", "-j", self._image):
            if time.monotonic() > deadline:
                raise DrillFailed(detail=f"the disk of {self.name} is still in use")
            time.sleep(0.01)

    # -- use -------------------------------------------------------------------------------------------------------

    def seen(self, path: str) -> str:
        """How the drill reaches a file of the node."""
        if not self.is_on:
            raise DrillFailed(detail=f"node {self.name} is off")
        return f"/proc/{self.pid}/root{path}"

    def mounts(self) -> str:
        """What is mounted on the node, as the kernel lists it."""
        return Path(f"/proc/{self.pid}/mounts").read_text(encoding="utf-8")

    def entered(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs a command on the node."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--uts", "--", *argv]

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        """The command runs on the node, its output in the log, which is not on the node."""
        self._command = subprocess.Popen(
            self.entered(argv), env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def has_ended(self) -> int | None:
        """Exit code of the command, None while it runs or if there is none."""
        return self._command.poll() if self._command else None

    def close(self) -> None:
        """Nothing is left. Idempotent."""
        self.kill()
        self.await_off()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._image)


def call(*argv: str, stdin: str | None = None) -> str:
    """Output of a short system command.

    Raises:
        DrillFailed: It failed; with what it said.
    """
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise DrillFailed(detail=f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def missing(*, has_server: bool = False) -> str | None:
    """Why power cannot be cut for real here, None if it can."""
    if os.geteuid() != 0:
        return "not root"
    wanted = {**PROGRAMS, "sshfs": "sshfs"} if has_server else PROGRAMS
    absent = {name: package for name, package in wanted.items() if shutil.which(name) is None}
    if absent:
        return f"not installed: {', '.join(absent)} (packages {', '.join(sorted(set(absent.values())))})"
    if not Path("/dev/loop-control").exists():
        return "no loop devices"
    if has_server and not Path("/dev/fuse").exists():
        return "no /dev/fuse"
    if has_server and fileserver.program() is None:
        return "not installed: sftp-server (package openssh-sftp-server)"
    return None

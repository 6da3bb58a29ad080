"""The file server of a cluster: one directory, served by OpenSSH's sftp-server straight on TCP, mounted by sshfs.

Kernel NFS is not everywhere and cannot be had per namespace; this behaves like it where it matters to us: calls
hang while the server is silent, open files are gone after it has restarted (EIO), no client's cache hides what
another client did. Run by its path and without our package, so that it starts at once::

    python fileserver.py serve ADDRESS PORT
    python fileserver.py mount ADDRESS PORT DIRECTORY MOUNT_POINT

Known differences: the loser of a race for an exclusive create may get EPERM instead of EEXIST (the protocol has no
code for it), and fsync of a directory does nothing, which is why the server mounts its disk with ``dirsync`` (an NFS
export with ``sync`` promises the same).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

MOUNT_OPTIONS = "reconnect,dir_cache=no,attr_timeout=0,entry_timeout=0,negative_timeout=0"
"""Nothing is cached between calls, and a connection that broke is made anew at the next call."""
DISK_OPTIONS = "dirsync"
_PLACES = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server", "/usr/libexec/sftp-server")


def program() -> str | None:
    """Where this system has sftp-server."""
    return next((path for path in _PLACES if os.access(path, os.X_OK)), shutil.which("sftp-server"))


def serve(address: str, port: int) -> None:
    """Serves until it is killed."""
    found = program()
    assert found is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.create_server((address, port)) as server:
        while True:
            connection, _ = server.accept()
            # Small answers would wait 40 ms for the client's delayed acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            subprocess.Popen([found, "-e"], stdin=connection.fileno(), stdout=connection.fileno())
            connection.close()


def mount(address: str, port: int, directory: str, mount_point: str) -> None:
    """Becomes sshfs once the server answers; until then the mount point is an empty directory of this node."""
    while True:
        try:
            socket.create_connection((address, port), timeout=1.0).close()
            break
        except OSError:
            time.sleep(0.2)
    os.execvp("sshfs", ["sshfs", "-f", "-o", f"directport={port},{MOUNT_OPTIONS}", f"{address}:{directory}", mount_point])  # noqa: S606


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        mount(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])

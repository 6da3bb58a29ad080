"""A real rsync daemon and a real sshd on loopback, each a process of its own with a configuration of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lacking import lacking
from ridethrough.seam.process import descendants, send_signal

SSHD = "/usr/sbin/sshd"
PASSWORD = "not-a-word-of-any-message"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A process that listens; `pid` is its main one."""

    def __init__(self, argv: list[str], port: int, log: Path) -> None:
        self.port = port
        self._log = log
        with open(log, "wb") as out:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.pid = self._process.pid

    def wait_until_it_answers(self) -> None:
        deadline_s = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, "the server does not start"
            time.sleep(0.02)

    def kill_children(self) -> int:
        found = descendants(self.pid)
        send_signal(found, 9)
        return len(found)

    def stop(self) -> None:
        self.kill_children()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def rsync_daemon(directory: Path, served: Path, *, extra: str = "") -> Iterator[Server]:
    """Serves the directory as modules ``runs``, ``read-only`` and ``secret`` (user ``mirror``)."""
    lacking(None if shutil.which("rsync") else "rsync is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    secrets = directory / "secrets"
    secrets.write_text(f"mirror:{PASSWORD}\n")
    secrets.chmod(0o600)
    port = free_port()
    owner = f"uid = {os.getuid()}\ngid = {os.getgid()}\n" if os.geteuid() == 0 else ""
    config = directory / "rsyncd.conf"
    config.write_text(
        f"address = 127.0.0.1\nport = {port}\nuse chroot = no\npid file = {directory}/pid\n{owner}{extra}"
        f"[runs]\npath = {served}\nread only = no\n"
        f"[read-only]\npath = {served}\n"
        f"[secret]\npath = {served}\nread only = no\nauth users = mirror\nsecrets file = {secrets}\n"
        f"[keeps-all]\npath = {served}\nread only = no\nrefuse options = delete\n"
    )
    server = Server(["rsync", "--daemon", "--no-detach", f"--config={config}", "--log-file=/dev/stdout"], port, directory / "log")
    try:
        server.wait_until_it_answers()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def ssh_server(directory: Path) -> Iterator[tuple[Server, str]]:
    """The server, and a value of RSYNC_RSH that gets into it."""
    lacking(None if os.access(SSHD, os.X_OK) and shutil.which("rsync") else "openssh-server or rsync is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    shutil.copy(directory / "user.pub", directory / "authorized")
    port = free_port()
    (directory / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\nAuthorizedKeysFile {directory}/authorized\n"
        f"PidFile {directory}/pid\nStrictModes no\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\nAllowUsers {getpass.getuser()}\n"
    )
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where it puts its unprivileged half
    server = Server([SSHD, "-D", "-e", "-f", str(directory / "config")], port, directory / "log")
    way = (
        f"ssh -F none -i {directory}/user -o IdentitiesOnly=yes -o LogLevel=ERROR"
        f" -o StrictHostKeyChecking=accept-new -o UserKnownHostsFile={directory}/known"
    )
    try:
        server.wait_until_it_answers()
        yield server, way
    finally:
        server.stop()


class SlowLink:
    """Forwards to a port at a bounded rate; `forwarded_bytes` is what went towards the server."""

    def __init__(self, port: int, *, bytes_s: int) -> None:
        self._target = port
        self._bytes_s = bytes_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self.forwarded_bytes = 0

    def __enter__(self) -> SlowLink:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            # What waits in the kernel would be as good as arrived.
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._forward, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(far, near, False), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_upward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(8192):
                target.sendall(data)
                if is_upward:
                    self.forwarded_bytes += len(data)
                time.sleep(len(data) / self._bytes_s)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()  # or a peer that only writes would never hear of it

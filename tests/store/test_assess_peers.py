"""`storage check --peers`: real sshd, each in a mount namespace with its own mount of one exported directory, as nodes have it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_assess import Answer, check

from lacking import lacking
from ridethrough.drill import fileserver
from ridethrough.errors import UsageError
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.assess import see

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
ROOT = Path(__file__).parents[2]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Site:
    """A file server, this node's mount of it, and other nodes that ssh reaches."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.export, self.ckpt = work / "export", work / "ckpt"
        self.config = work / "ssh_config"
        self._started: list[subprocess.Popen[bytes]] = []
        for path in (self.export, self.ckpt):
            path.mkdir()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", work / name], check=True)
        self.config.write_text("", encoding="utf-8")
        self.port = _free_port()
        self._start([sys.executable, fileserver.__file__, "serve", "127.0.0.1", str(self.port)])
        self._answers(self.port)
        subprocess.run(["sh", "-c", self.mounting()], check=True)

    def mounting(self, options: str = fileserver.MOUNT_OPTIONS) -> str:
        return f"sshfs -o directport={self.port},{options} 127.0.0.1:{self.export} {self.ckpt}"

    def node(self, name: str, mounting: str) -> None:
        """A host of that name answers ssh, and has at the path what the command mounts there."""
        port = _free_port()
        config = self.work / f"sshd-{name}"
        config.write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {self.work}/host\nAuthorizedKeysFile {self.work}/user.pub\nStrictModes no\n"
            "PidFile none\nUsePAM no\nPermitRootLogin yes\n",
            encoding="utf-8",
        )
        with self.config.open("a", encoding="utf-8") as file:
            file.write(
                f"Host {name}\n HostName 127.0.0.1\n Port {port}\n User root\n IdentityFile {self.work}/user\n IdentitiesOnly yes\n"
                " StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n BatchMode yes\n"
            )
        self._start(["unshare", "--mount", "sh", "-c", f"{mounting} && exec {SSHD} -D -e -f {config}"])
        self._answers(port)

    def check(self, *hosts: str, remote: str = f"env PYTHONPATH={ROOT}/src {sys.executable} -m ridethrough") -> Answer:
        return check(self.ckpt, "--peers", ",".join(hosts), "--ssh", f"ssh -F {self.config}", "--remote", remote)

    def _start(self, argv: list[str]) -> None:
        self._started.append(subprocess.Popen(argv, start_new_session=True, stderr=subprocess.DEVNULL))

    def _answers(self, port: int) -> None:
        deadline_s = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                return
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self.ckpt], check=False, capture_output=True)
        for process in reversed(self._started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    missing = [name for name, path in (("sshd", SSHD), ("sshfs", shutil.which("sshfs")), ("sftp-server", fileserver.program())) if not path]
    lacking(f"{missing[0]} is not installed" if missing else None)
    os.makedirs("/run/sshd", exist_ok=True)  # where sshd separates privileges; gone after each boot
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.mark.root
def test_another_node_says_when_it_sees_what_is_made_here(site: Site) -> None:
    site.node("n1", site.mounting())
    answer = site.check("n1")
    assert answer.code == 0, answer.out + answer.err
    fact = answer.fact("seen by n1")
    assert fact["state"] == "measured"
    assert "fuse.sshfs" in fact["how"]
    for name in ("fresh_s", "watched_s", "listed_s", "replaced_s"):
        assert 0 < fact["figures"][name] < 1, name
    assert fact["figures"]["torn_count"] == 0
    assert fact["figures"]["won_by_several_count"] == fact["figures"]["won_by_none_count"] == 0
    assert answer.fact("file system")["figures"]["kind"] == "network"
    assert answer.fact("concurrent writes")["state"] == "measured"
    assert os.listdir(site.export) == []


@pytest.mark.root
def test_a_node_whose_mount_remembers_what_was_not_there_sees_late_and_it_is_said_how_late(site: Site) -> None:
    site.node("n1", site.mounting("reconnect,dir_cache=no,negative_timeout=2"))
    answer = site.check("n1")
    assert answer.code == 0
    assert answer.fact("seen by n1")["state"] == "measured", answer.json["remarks"]
    assert 1 < answer.fact("seen by n1")["figures"]["watched_s"] < 3.5
    assert any(remark.startswith("n1 sees late: one waited for") for remark in answer.json["remarks"])


@pytest.mark.root
def test_a_node_with_another_directory_at_that_path_makes_the_place_not_fit(site: Site) -> None:
    other = site.work / "other"
    other.mkdir()
    site.node("n1", site.mounting())
    site.node("n2", f"mount --bind {other} {site.ckpt}")
    answer = site.check("n1", "n2")
    assert answer.code == 1
    assert answer.json["objections"] == ["n2 does not see what is made here (within 3 s): another directory there?"]
    assert answer.fact("seen by n1")["text"] != "never"
    assert list(other.iterdir()) == []


@pytest.mark.root
def test_a_node_that_cannot_be_asked_is_unknown_and_says_why(site: Site) -> None:
    site.node("n1", site.mounting())
    answer = site.check("n1", "nowhere.invalid", remote="no-such-program")
    assert answer.code == 0
    assert {answer.fact(f"seen by {name}")["state"] for name in ("n1", "nowhere.invalid")} == {"unknown"}
    assert any("n1 was not asked" in remark and "no-such-program" in remark for remark in answer.json["remarks"])
    assert any("nowhere.invalid was not asked" in remark for remark in answer.json["remarks"])


def test_a_host_that_looks_like_an_option_is_a_host(tmp_path: Path) -> None:
    answer = check(tmp_path, "--peers=-oProxyCommand=touch${IFS}owned", "--ssh", "ssh -F /dev/null")
    assert answer.fact("seen by -oProxyCommand=touch${IFS}owned")["state"] == "unknown"
    assert not Path("owned").exists()


def ask(directory: Path, *questions: dict[str, Any]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    see.answer(str(directory), io.StringIO("".join(json.dumps(question) + "\n" for question in questions)), said.append)
    return said


@pytest.fixture
def of_a_check(tmp_path: Path) -> Path:
    path = tmp_path / layout.check_name("n", "0", "1", 1, 1) / "peer-x"
    path.mkdir(parents=True)
    return path


def test_a_peer_counts_what_is_neither_old_nor_new(of_a_check: Path) -> None:
    (of_a_check / "fresh").write_bytes(b"half of it")
    looking, seen = ask(of_a_check, {"op": "see", "name": "fresh", "digest": "new", "old": "old", "wait_s": 0.1})
    assert looking == {"looking": True}
    assert not seen["is_seen"]
    assert seen["torn_count"] > 1


def test_a_peer_answers_errors_and_goes_on(of_a_check: Path) -> None:
    (of_a_check / "directory").mkdir()
    *_, error, hello = ask(of_a_check, {"op": "see", "name": "directory", "digest": "x", "old": None, "wait_s": 0.1}, {"op": "hello"})
    assert "directory" in error["error"]
    assert hello["mount"]


def test_a_peer_looks_at_nothing_but_the_directory_of_a_check(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not made by a storage check"):
        ask(tmp_path, {"op": "hello"})


def test_a_login_shell_that_prints_is_named_as_the_reason(tmp_path: Path) -> None:
    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\necho Welcome\n", encoding="utf-8")
    program.chmod(0o755)
    found = see.ask_peer(PosixFileSystem(), str(tmp_path), "n1", (str(program),))
    assert found["error"] == "it answered 'Welcome': does its shell print something at login?"

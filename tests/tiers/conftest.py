from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_START_S = 60.0
BUCKET = "checkpoints"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server on loopback, of one process."""
    directory = tmp_path_factory.mktemp("seaweed")
    master, volume, filer, s3 = _low_ports(4)
    log = open(directory / "log", "wb")  # noqa: SIM115  the server's
    server = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("weed")), "server", f"-dir={directory}", "-ip=127.0.0.1", "-s3", f"-s3.port={s3}",
            f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-master.volumeSizeLimitMB=64",
        ],
        stdout=log, stderr=log,
    )  # fmt: skip
    endpoint = f"http://127.0.0.1:{s3}"
    try:
        deadline_s = time.monotonic() + _START_S
        while not _makes_bucket(endpoint, BUCKET):
            assert server.poll() is None, (directory / "log").read_text()[-3000:]
            assert time.monotonic() < deadline_s, "the S3 server does not start"
            time.sleep(0.5)
        yield endpoint
    finally:
        server.kill()
        server.wait()
        log.close()


def _low_ports(count: int) -> list[int]:
    """Free ones to which the server can add the 10,000 that it uses for its own talk."""
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        if port < 55000 and port not in found:
            found.append(port)
    return found


def _makes_bucket(endpoint: str, name: str) -> bool:
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty prefix; the environment is set so that it can be used."""
    for variable in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"

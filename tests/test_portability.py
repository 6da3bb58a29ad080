"""Elsewhere than on Linux the read verbs work, and running and saving say one clear thing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "data" / "format1" / "exp001"

# What macOS does not have, taken away before anything of ours is imported.
ELSEWHERE = """
import errno, os, sys
for name in ("O_DIRECT", "posix_fadvise", "posix_fallocate", "memfd_create", "preadv", "pipe2", "POSIX_FADV_DONTNEED", "O_CLOEXEC"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("EREMOTEIO", "ENOLINK"):
    if hasattr(errno, name):
        delattr(errno, name)
sys.platform = "darwin"
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ELSEWHERE + code], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("verb", ["ls", "show", "verify", "du"])
def test_the_read_verbs_work(verb: str) -> None:
    done = run(f"sys.argv = ['ridethrough', {verb!r}, {str(GOLDEN)!r}]\nfrom ridethrough.cli import main\nsys.exit(main())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_run_says_that_it_needs_linux() -> None:
    done = run("sys.argv = ['ridethrough', 'run', '--', 'true']\nfrom ridethrough.cli import main\nsys.exit(main())")
    assert done.returncode == 2
    assert done.stderr.startswith("error[RT-003]")
    assert "Traceback" not in done.stderr


@pytest.mark.torch
def test_saving_says_that_it_needs_linux(tmp_path: Path) -> None:
    code = f"""
import torch
import ridethrough
try:
    ridethrough.Checkpointer({str(tmp_path)!r})
except ridethrough.RideThroughError as error:
    sys.exit(f"{{error.code}} {{error}}")
"""
    # torch itself needs the real platform, so only the check of ours sees the other one.
    done = subprocess.run(
        [sys.executable, "-c", "import sys, torch\nsys.platform = 'darwin'\n" + code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stderr.strip().splitlines()[-1].startswith("RT-003"), done.stderr

"""Calling the command line in this process, and runs to call it on."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_build import Answer, Built, Call, new_run

from ridethrough.cli import main


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*args: object) -> Answer:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run


@pytest.fixture
def run(tmp_path: Path) -> Built:
    """A run with a started attempt and no checkpoint."""
    return new_run(tmp_path / "runs" / "exp001")


@pytest.fixture
def good(run: Built) -> Built:
    """Three checkpoints: verified, verified with a second copy, durable."""
    run.save(100)
    run.save(200, nodes=("node-a", "node-b"))
    run.save(300, proof="durable")
    return run

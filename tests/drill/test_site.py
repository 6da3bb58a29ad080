"""What a machine allows decides how real a drill is, and the drill says so."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from ridethrough.drill import machine
from ridethrough.drill.site import Processes, make_site
from ridethrough.errors import UsageError
from ridethrough.seam import process


@pytest.fixture
def without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "missing", lambda *, has_server=False: "not root")


@pytest.mark.usefixtures("without_root")
def test_without_root_one_node_is_its_processes_and_says_so() -> None:
    site = make_site(["n0"])
    try:
        assert isinstance(site, Processes)
        assert site.realism == "process"
        assert Path(site.disk).is_dir()
    finally:
        site.close()
    assert not Path(site.disk).exists()


@pytest.mark.usefixtures("without_root")
@pytest.mark.parametrize(("names", "has_server"), [(["n0", "n1"], False), (["n0"], True)])
def test_without_root_several_nodes_are_refused_with_what_they_need(names: list[str], has_server: bool) -> None:
    with pytest.raises(UsageError, match=r"needs root.*not root"):
        make_site(names, has_server=has_server)


@pytest.mark.usefixtures("without_root")
def test_a_cut_without_root_kills_the_command_and_everything_that_it_has_started(tmp_path: Path) -> None:
    site = make_site(["n0"])
    code = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    with (tmp_path / "log").open("wb") as log:
        site.start("n0", [sys.executable, "-S", "-c", code], environment={"PATH": "/usr/bin:/bin"}, log=log)
    try:
        deadline = time.monotonic() + 10
        while not (tmp_path / "log").read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert site.has_ended("n0") is None
        site.cut(["n0"])
        assert site.has_ended("n0") == -9
        assert not process.is_alive(int((tmp_path / "log").read_text()))
    finally:
        site.close()

"""Probes of storage and network: what they say, and that they never make anybody wait."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridethrough.config import Config, NodeConfig, PeersConfig, RecoveryConfig
from ridethrough.errors import UsageError
from ridethrough.format import layout
from ridethrough.seam import process
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.start import remember_run
from ridethrough.supervisor import gates
from ridethrough.supervisor.gates import EVERY_S, PATIENCE_S, Gates, RunDirectory, own_address, reach_path, reach_run_dir
from ridethrough.supervisor.muster import Presence
from ridethrough.testing import FakeClock

READY = Presence(is_ready=True)


def nodes(*names: str) -> tuple[NodeConfig, ...]:
    return tuple(NodeConfig(name=name, address=f"10.0.0.{number}", domain=name) for number, name in enumerate(names, start=1))


def config_of(*paths: str, order: tuple[str, ...] = ("storage", "network", "rendezvous", "workers")) -> Config:
    return Config(nodes=nodes("n0", "n1"), recovery=RecoveryConfig(paths=paths, start_order=order))


class Site:
    """A node whose storage and network do what the test says, and what they were asked."""

    def __init__(self) -> None:
        self.trouble: dict[str, OSError | UsageError] = {}
        self.hangs: dict[str, threading.Event] = {}
        self.asked: list[str] = []

    def __call__(self, what: str) -> str:
        self.asked.append(what)
        if what in self.hangs:
            self.hangs[what].wait(20)
        if what in self.trouble:
            raise self.trouble[what]
        return "10.0.0.9"


@pytest.fixture
def site() -> Site:
    return Site()


def gates_of(site: Site, clock: FakeClock, config: Config, run_dir: str | None = None) -> Gates:
    return Gates(
        clock, config, run_dir, lambda: site("own address"), node="n1", reach=lambda p: void(site, p), reach_run=lambda p: void(site, p), route=site
    )


def void(site: Site, what: str) -> None:
    site(what)


def settle(look: Callable[[], Presence], until: Callable[[Presence], bool]) -> Presence:
    """The answer once the threads behind it have run; the clock of the gates stands still meanwhile."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        found = look()
        if until(found):
            return found
        time.sleep(0.002)
    raise AssertionError(f"still {look()}")


def is_looked_at(found: Presence) -> bool:
    return not any("not looked at yet" in sentence for sentence in found.missing)


def test_a_node_that_reaches_everything_is_ready(site: Site) -> None:
    found = gates_of(site, FakeClock(), config_of("/data", "/scratch"), "/run")
    assert not found.look().is_ready, "nobody is ready before the first answer"
    assert settle(found.look, is_looked_at) == READY
    assert sorted(set(site.asked)) == ["/data", "/run", "/scratch", "10.0.0.1", "own address"]


def test_a_path_that_cannot_be_used_is_named_with_its_reason_and_how_long(site: Site) -> None:
    clock = FakeClock()
    site.trouble["/data"] = OSError(errno.ENOENT, "No such file or directory")
    found = gates_of(site, clock, config_of("/data", "/other"), "/run")
    assert settle(found.look, is_looked_at).missing == ("storage: /data: No such file or directory",)
    for _ in range(130):
        clock.advance(EVERY_S)
        settle(found.look, is_looked_at)
    assert settle(found.look, lambda p: "min" in p.missing[0]).missing == ("storage: /data: No such file or directory (for 2 min)",)


def test_a_path_that_was_back_in_between_is_timed_anew(site: Site) -> None:
    clock = FakeClock()
    down = OSError(errno.EIO, "Input/output error")
    site.trouble["/data"] = down
    found = gates_of(site, clock, config_of("/data"))
    settle(found.look, lambda p: is_looked_at(p) and not p.is_ready)
    site.trouble.clear()
    clock.advance(300)
    settle(found.look, lambda p: p.is_ready)
    site.trouble["/data"] = down
    clock.advance(10)
    assert settle(found.look, lambda p: is_looked_at(p) and not p.is_ready).missing == ("storage: /data: Input/output error",)


def test_a_dead_mount_never_blocks_the_one_who_looks_and_is_named(site: Site) -> None:
    clock = FakeClock()
    site.hangs["/data"] = threading.Event()
    found = gates_of(site, clock, config_of("/data"), "/run")
    begin_s = time.monotonic()
    assert found.look().missing == ("storage: /data: not looked at yet", "storage: /run: not looked at yet")
    clock.advance(PATIENCE_S)
    assert settle(found.look, lambda p: len(p.missing) == 1).missing == ("storage: /data: does not answer",)
    assert time.monotonic() - begin_s < 5, "the looker waited for the mount"
    clock.advance(600)
    assert settle(found.look, lambda p: len(p.missing) == 1).missing == ("storage: /data: does not answer (for 10 min)",)
    assert site.asked.count("/data") == 1, "one process stuck in a dead mount is enough"
    site.hangs.pop("/data").set()
    assert settle(found.look, lambda p: p.is_ready) == READY


def test_a_mount_that_dies_later_shuts_the_gate_again(site: Site) -> None:
    clock = FakeClock()
    found = gates_of(site, clock, config_of("/data"))
    assert settle(found.look, is_looked_at) == READY
    site.hangs["/data"] = threading.Event()
    clock.advance(EVERY_S)
    assert found.look() == READY, "the newest answer counts until the next one is overdue"
    clock.advance(PATIENCE_S)
    assert settle(found.look, lambda p: not p.is_ready).missing == ("storage: /data: does not answer",)
    site.hangs["/data"].set()


def test_an_answer_from_before_the_nodes_were_called_counts_for_nothing(site: Site) -> None:
    clock = FakeClock()
    found = gates_of(site, clock, config_of("/data"))
    assert settle(found.look, is_looked_at) == READY
    site.hangs["/data"] = threading.Event()
    clock.advance(7200)
    assert found.look().missing == ("storage: /data: not looked at yet",)
    clock.advance(PATIENCE_S)
    assert found.look().missing == ("storage: /data: does not answer",)
    site.hangs.pop("/data").set()
    assert settle(found.look, lambda p: p.is_ready) == READY


def test_trouble_is_not_counted_from_a_call_long_over(site: Site) -> None:
    clock = FakeClock()
    site.trouble["/data"] = OSError(errno.EIO, "Input/output error")
    found = gates_of(site, clock, config_of("/data"))
    settle(found.look, is_looked_at)
    clock.advance(7200)
    assert settle(found.look, is_looked_at).missing == ("storage: /data: Input/output error",)


def test_an_open_gate_stays_open_while_a_healthy_answer_takes_long(site: Site) -> None:
    clock = FakeClock()
    found = gates_of(site, clock, config_of("/data"))
    assert settle(found.look, is_looked_at) == READY
    site.hangs["/data"] = threading.Event()
    for _ in range(int((EVERY_S + PATIENCE_S - 0.1) / 0.1)):
        clock.advance(0.1)
        settle(found.look, lambda p: p.is_ready)
    site.hangs.pop("/data").set()
    assert settle(found.look, is_looked_at) == READY


def test_a_real_fifo_that_nobody_feeds_hangs_its_probe_and_nobody_else(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    clock = FakeClock()
    found = Gates(clock, Config(recovery=RecoveryConfig(paths=(str(fifo),))), None, node="n1")
    begin_s = time.monotonic()
    found.look()
    clock.advance(PATIENCE_S)
    assert found.look().missing == (f"storage: {fifo}: does not answer",)
    assert time.monotonic() - begin_s < 2
    with open(fifo, "wb") as feeding:
        feeding.write(b"x")
    assert settle(found.look, lambda p: p.is_ready) == READY


def test_an_answer_is_asked_for_again_every_second_and_not_more_often(site: Site) -> None:
    clock = FakeClock()
    found = gates_of(site, clock, Config(recovery=RecoveryConfig(paths=("/data",))))
    settle(found.look, is_looked_at)
    for _ in range(20):
        found.look()
    assert site.asked.count("/data") == 1
    clock.advance(EVERY_S)
    settle(found.look, lambda _: site.asked.count("/data") == 2)


def test_a_gate_is_looked_at_only_when_those_before_it_are_open(site: Site) -> None:
    clock = FakeClock()
    site.trouble["own address"] = OSError(errno.EADDRNOTAVAIL, "no interface has the address 10.0.0.2")
    found = gates_of(site, clock, config_of("/nfs", order=("network", "storage", "rendezvous", "workers")))
    assert settle(found.look, is_looked_at).missing == ("network: no interface has the address 10.0.0.2",)
    assert "/nfs" not in site.asked
    site.trouble.clear()
    clock.advance(EVERY_S)
    assert settle(found.look, lambda p: p.is_ready) == READY
    assert "/nfs" in site.asked


def test_the_way_to_the_rendezvous_host_is_asked_for_and_another_host_has_a_way_of_its_own(site: Site) -> None:
    clock = FakeClock()
    site.trouble["10.0.0.1"] = UsageError(detail="no address of node '10.0.0.1' is known")
    found = gates_of(site, clock, config_of())
    assert settle(found.look, lambda p: is_looked_at(p) and p.missing[:1] != ()).missing == (
        "rendezvous: n0 at 10.0.0.1: no address of node '10.0.0.1' is known",
    )
    assert settle(lambda: found.look("n1"), is_looked_at) == READY, "the host needs no way to itself"
    assert settle(lambda: found.look("stranger"), is_looked_at) == READY, "of a node without an address nothing can be asked"


def test_one_node_without_paths_waits_for_nothing(site: Site) -> None:
    site.trouble["/run"] = OSError(errno.ENOENT, "not there")
    assert gates_of(site, FakeClock(), Config(run="/run"), "/run").look() == READY
    assert site.asked == []


def test_a_mistake_in_a_probe_is_said_and_not_taken_for_silence(site: Site) -> None:
    def broken(_: str) -> None:
        raise ZeroDivisionError("oops")

    found = Gates(FakeClock(), Config(recovery=RecoveryConfig(paths=("/data",))), None, node="n1", reach=broken)
    assert settle(found.look, is_looked_at).missing == ("storage: /data: ZeroDivisionError: oops",)


# -- the questions themselves ----------------------------------------------------------------------------------------------


def why(ask: Callable[[], Any]) -> str:
    with pytest.raises(OSError, match=r".") as caught:
        ask()
    return str(caught.value.strerror)


def test_a_directory_that_holds_something_a_file_and_a_mount_point_are_reached(hostile_dir: Path) -> None:
    (hostile_dir / "file").write_bytes(b"x")
    reach_path(str(hostile_dir))
    reach_path(str(hostile_dir / "file"))
    reach_path("/proc")


def test_an_empty_directory_is_what_an_unmounted_disk_looks_like(hostile_dir: Path) -> None:
    assert why(lambda: reach_path(str(hostile_dir))) == "is empty and nothing is mounted there"
    assert why(lambda: reach_path(str(hostile_dir / "nowhere"))) == "No such file or directory"


def test_an_empty_disk_that_is_mounted_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates.os.path, "ismount", lambda path: path == str(tmp_path))
    reach_path(str(tmp_path))


def test_a_run_directory_is_written_to_and_nothing_stays(hostile_dir: Path) -> None:
    run_dir = hostile_dir / "run"
    reach_run_dir(str(run_dir))
    assert list(hostile_dir.iterdir()) == [], "a run directory that is not there yet is not made"
    run_dir.mkdir()
    reach_run_dir(str(run_dir))
    assert list(run_dir.iterdir()) == []


def test_what_a_power_cut_leaves_of_the_trial_does_not_add_up(tmp_path: Path) -> None:
    trial = tmp_path / f".ready-{process.node_name()}{layout.TEMPORARY}"
    trial.write_bytes(b"left behind")
    reach_run_dir(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_is_written_to_until_it_could_be_and_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(gates, "reach_run_dir", written.append)
    run_dir, asking = tmp_path / "run", RunDirectory()
    for _ in range(2):
        asking.reach(str(run_dir))
    assert len(written) == 2, "it is not there yet"
    run_dir.mkdir()
    for _ in range(5):
        asking.reach(str(run_dir))
    assert len(written) == 3
    run_dir.rmdir()
    assert why(lambda: asking.reach(str(run_dir))) == "No such file or directory"
    asking.reach(str(run_dir))
    assert len(written) == 4


def test_a_run_that_this_node_remembers_and_does_not_see_is_an_unmounted_disk(tmp_path: Path) -> None:
    run_dir = tmp_path / "mnt" / "run"
    remember_run(PosixFileSystem(), process.state_dir(), str(run_dir), "1234")
    assert why(lambda: reach_run_dir(str(run_dir))) == "No such file or directory"
    run_dir.mkdir(parents=True)
    assert why(lambda: reach_run_dir(str(run_dir))) == "the run was here before and is not there now: not mounted?"
    (run_dir / layout.RUN).write_text("{}", encoding="utf-8")
    reach_run_dir(str(run_dir))


@pytest.mark.parametrize(
    ("number", "is_open"), [(errno.EROFS, False), (errno.EACCES, False), (errno.EIO, False), (errno.ENOSPC, True), (errno.EDQUOT, True)]
)
def test_a_run_directory_that_cannot_be_written_shuts_the_gate_and_a_full_one_does_not(
    number: int, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(gates.os, "open", refuse)
    if is_open:
        reach_run_dir(str(tmp_path / "run"))
    else:
        assert why(lambda: reach_run_dir(str(tmp_path / "run"))) == os.strerror(number)


def test_the_own_address_is_that_of_the_interface_or_of_the_way_to_another_node() -> None:
    assert own_address("lo", ()) == "127.0.0.1"
    assert own_address("127.0.0.1", ("10.0.0.1",)) == "127.0.0.1"
    assert own_address(None, ("localhost",)) in ("127.0.0.1", "::1")
    assert own_address(None, ()) == "127.0.0.1"


def test_an_interface_or_address_that_is_not_there_yet_is_named() -> None:
    with pytest.raises(UsageError, match="no interface 'eth99'"):
        own_address("eth99", ())
    assert why(lambda: own_address("192.0.2.254", ())) == "no interface has the address 192.0.2.254"


def test_the_second_node_shows_the_way_where_the_first_has_none() -> None:
    def route(host: str) -> str:
        if host == "first":
            raise UsageError(detail="no route to first")
        return "10.0.0.9"

    assert own_address(None, ("first", "second"), route) == "10.0.0.9"
    with pytest.raises(UsageError, match="no route to first"):
        own_address(None, ("first",), route)


def test_the_default_probes_answer_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_bytes(b"x")
    config = Config(
        nodes=(NodeConfig(name="n0", address="127.0.0.1", domain="a"), NodeConfig(name="n1", address="127.0.0.2", domain="b")),
        peers=PeersConfig(interface="lo"),
        recovery=RecoveryConfig(paths=(str(tmp_path / "data"),)),
    )
    found = Gates(FakeClock(), config, str(tmp_path / "run"), node="n1")
    assert settle(found.look, is_looked_at) == READY

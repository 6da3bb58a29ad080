"""What nodes tell each other: where they listen, what loses power together, the key."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from room import Room, run_ranks, same_error

from fake_link import FakeLink
from ridethrough.config import Config, NodeConfig, PeersConfig
from ridethrough.errors import KeeperGone, UsageError
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.testing import FakeClock
from ridethrough.train import nodes
from ridethrough.train.group import Group

FS = PosixFileSystem()
NODES = ("a", "a", "b", "c")


def node(name: str, *, address: str | None = None, domain: str | None = None) -> NodeConfig:
    return NodeConfig(name=name, address=address or name, domain=domain or name)


class Keeper(FakeLink):
    """Memory of one node, and what its keeper was configured with."""

    def __init__(self, udp: int, tcp: int) -> None:
        super().__init__()
        self.hello: dict[str, Any] = {}
        self.board(links.CONTROL).write({"peer_port": udp})
        self.board(links.COURIER).write({"port": tcp})
        self.asked: list[str] = []

    def request(self, op: str) -> dict[str, Any]:
        self.asked.append(op)
        return {}


def introduced(config: Config | None = None, *, order: tuple[str, ...] = NODES) -> list[Any]:
    keepers = {name: Keeper(1000 + number, 2000 + number) for number, name in enumerate(dict.fromkeys(order))}
    return run_ranks(order, lambda group: nodes.introduce(group, SystemClock(), keepers[group.node], config or Config()))  # type: ignore[arg-type]


# -- addresses -------------------------------------------------------------------------------------------------------------


def test_one_node_needs_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "reachable_address", lambda towards: pytest.fail("nobody to reach"))
    assert introduced(order=("a", "a"))[0] == nodes.Neighbours(addresses={}, domains={"a": "a"})


def test_every_rank_knows_address_and_ports_of_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = introduced()
    assert {str(answer) for answer in found} == {str(found[0])}
    assert found[0].addresses == {"a": ["127.0.0.1", 1000, 2000], "b": ["127.0.0.1", 1001, 2001], "c": ["127.0.0.1", 1002, 2002]}


def test_configured_addresses_and_domains_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = Config(nodes=(node("a", address="10.0.0.1", domain="rack-1"), node("b", address="fd00::2"), node("c", address="gpu7.site")))
    found = introduced(configured)[0]
    assert [address for address, _, _ in found.addresses.values()] == ["10.0.0.1", "fd00::2", "gpu7.site"]
    assert found.domains == {"a": "rack-1", "b": "b", "c": "c"}


def test_the_rendezvous_host_that_calls_itself_localhost_is_known_by_its_route_to_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def route(towards: str) -> str:
        asked.append(towards)
        return "10.0.0.1" if towards == "10.0.0.2" else "127.0.0.1"

    monkeypatch.setattr(nodes, "reachable_address", route)
    monkeypatch.setattr(nodes, "own_address", lambda config, name, towards: "127.0.0.1" if name == "a" else "10.0.0.2")
    assert [address for address, _, _ in introduced(order=("a", "b"))[1].addresses.values()] == ["10.0.0.1", "10.0.0.2"]
    assert asked == ["10.0.0.2"]


def test_an_interface_goes_before_the_route() -> None:
    config = Config(peers=PeersConfig(interface="192.0.2.9"))
    assert nodes.own_address(config, "a", "127.0.0.1") == "192.0.2.9"


def test_an_interface_goes_before_an_address_that_nobody_wrote() -> None:
    peers = PeersConfig(interface="192.0.2.9")
    assert nodes.own_address(Config(nodes=(node("a"),), peers=peers), "a", "127.0.0.1") == "192.0.2.9"
    assert nodes.own_address(Config(nodes=(node("a", address="10.0.0.1"),), peers=peers), "a", "127.0.0.1") == "10.0.0.1"


def test_the_route_to_the_rendezvous_gives_the_address() -> None:
    assert nodes.own_address(Config(), "a", "127.0.0.1") == "127.0.0.1"


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_the_route_over_ipv6_gives_an_ipv6_address() -> None:
    assert nodes.own_address(Config(), "a", "::1") == "::1"


@pytest.mark.parametrize(
    ("address", "is_so"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("gpu7", False)]
)
def test_addresses_that_mean_everybody_himself_are_known(address: str, is_so: bool) -> None:
    assert nodes.is_loopback(address) is is_so


# -- ports -----------------------------------------------------------------------------------------------------------------


def test_ports_that_come_a_little_later_are_waited_for() -> None:
    keeper = Keeper(0, 0)

    class Later(FakeClock):
        def sleep(self, duration_s: float) -> None:
            super().sleep(duration_s)
            keeper.board(links.CONTROL).write({"peer_port": 7})
            keeper.board(links.COURIER).write({"port": 8})

    assert nodes.own_ports(Later(), keeper, "a") == (7, 8)  # type: ignore[arg-type]


def test_a_keeper_listens_on_the_network_only_when_a_rank_has_found_other_nodes() -> None:
    keeper = Keeper(7, 8)
    nodes.own_ports(FakeClock(), keeper, "a")  # type: ignore[arg-type]
    assert keeper.asked == ["peers"]


@pytest.mark.parametrize(("udp", "tcp", "who"), [(0, 8, "supervisor"), (7, 0, "courier"), (0, 0, "supervisor, courier")])
def test_a_helper_that_tells_no_port_is_named(udp: int, tcp: int, who: str) -> None:
    clock = FakeClock()
    with pytest.raises(KeeperGone, match=rf"\({who} of node a has told no port within 10 s\)"):
        nodes.own_ports(clock, Keeper(udp, tcp), "a")  # type: ignore[arg-type]


def test_a_keeper_without_configuration_has_the_defaults() -> None:
    keeper = Keeper(1, 2)
    assert nodes.config_of(keeper) == Config()  # type: ignore[arg-type]
    keeper.hello["config"] = Config(storage="shared").as_facts()
    assert nodes.config_of(keeper).storage == "shared"  # type: ignore[arg-type]


# -- the key ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["a disk each", "shared"])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Room:
    made = Room(tmp_path, ("a", "b", "c"), is_shared=request.param)
    for path in made.disks.values():
        Path(path).mkdir(parents=True)
    return made


def agreed(room: Room, configs: dict[str, Config] | None = None, *, order: tuple[str, ...] = NODES) -> list[Any]:
    def act(group: Group) -> str:
        config = (configs or {}).get(group.node, Config())
        tier_nodes = group.node_order[:1] if room.is_shared else group.node_order
        return nodes.agree_on_key(group, FS, room.run_dir(group.node), config, tier_nodes=tier_nodes)

    return run_ranks(order, act)


def kept(room: Room) -> set[str]:
    return {Path(path, "key").read_text().strip() for path in room.disks.values()}


def test_all_nodes_get_one_key_that_every_disk_keeps_for_its_owner_only(room: Room) -> None:
    [key] = set(agreed(room))
    assert len(bytes.fromhex(key)) == 32
    assert kept(room) == {key}
    assert {os.stat(os.path.join(path, "key")).st_mode & 0o777 for path in room.disks.values()} == {0o600}


def test_the_key_stays_from_start_to_start(room: Room) -> None:
    assert agreed(room) == agreed(room)


def test_another_run_has_another_key(tmp_path: Path) -> None:
    keys = set()
    for name in ("x", "y"):
        made = Room(tmp_path / name, ("a", "b"))
        for path in made.disks.values():
            Path(path).mkdir(parents=True)
        keys |= set(agreed(made, order=("a", "b")))
    assert len(keys) == 2


def test_an_empty_disk_takes_the_key_of_the_others(tmp_path: Path) -> None:
    room = Room(tmp_path, ("a", "b", "c"))
    for path in room.disks.values():
        Path(path).mkdir(parents=True)
    [key] = set(agreed(room))
    os.unlink(os.path.join(room.run_dir("a"), "key"))
    assert set(agreed(room)) == {key}
    assert kept(room) == {key}


def test_one_node_needs_no_key(room: Room) -> None:
    assert agreed(room, order=("a", "a")) == ["", ""]
    assert not any(os.path.exists(os.path.join(path, "key")) for path in room.disks.values())


def given(path: Path, text: str, mode: int = 0o600) -> Config:
    path.write_text(text)
    path.chmod(mode)
    return Config(peers=PeersConfig(key_file=str(path)))


def test_the_users_own_key_is_taken_and_not_copied(room: Room, tmp_path: Path) -> None:
    config = given(tmp_path / "secret", "AB" * 32 + "\n")
    assert set(agreed(room, dict.fromkeys(room.nodes, config))) == {"ab" * 32}
    assert not any(os.path.exists(os.path.join(path, "key")) for path in room.disks.values())


def test_a_key_file_named_by_the_environment_is_taken(room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(tmp_path / "secret", "cd" * 32)
    monkeypatch.setenv("RIDETHROUGH_KEY_FILE", str(tmp_path / "secret"))
    assert set(agreed(room)) == {"cd" * 32}


def test_a_node_with_another_key_file_is_named(room: Room, tmp_path: Path) -> None:
    configs = {name: given(tmp_path / f"key-{name}", ("ab" if name != "c" else "cd") * 32) for name in room.nodes}
    error = same_error(agreed(room, configs), UsageError)
    assert "c: not the key file of a" in str(error)
    assert "cdcd" not in str(error)


def test_a_node_without_the_key_file_of_the_others_is_named(room: Room, tmp_path: Path) -> None:
    configs = {name: given(tmp_path / f"key-{name}", "ab" * 32) for name in ("a", "c")}
    assert "b: not the key file of a" in str(same_error(agreed(room, configs), UsageError))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_key_file_that_others_can_open_is_refused(room: Room, tmp_path: Path, mode: int) -> None:
    configs = dict.fromkeys(room.nodes, given(tmp_path / "secret", "ab" * 32, mode))
    assert "is open to other users" in str(same_error(agreed(room, configs), UsageError))


def test_a_kept_key_that_others_can_open_is_refused(room: Room) -> None:
    agreed(room)
    os.chmod(os.path.join(room.run_dir("a"), "key"), 0o644)
    assert "is open to other users (mode 644)" in str(same_error(agreed(room), UsageError))


@pytest.mark.parametrize("text", ["", "secret", "ab" * 31, "xy" * 32, "\xff" * 64], ids=["empty", "a word", "short", "no digits", "no text"])
def test_what_is_no_key_is_refused_without_showing_it(room: Room, tmp_path: Path, text: str) -> None:
    configs = dict.fromkeys(room.nodes, given(tmp_path / "keyfile", text))
    error = str(same_error(agreed(room, configs), UsageError))
    assert "does not hold a key of 64 hexadecimal digits" in error
    assert not text or text not in error


def test_a_key_file_that_is_not_there_is_named(room: Room, tmp_path: Path) -> None:
    configs = dict.fromkeys(room.nodes, Config(peers=PeersConfig(key_file=str(tmp_path / "nowhere"))))
    assert "there is no key file" in str(same_error(agreed(room, configs), UsageError))

"""Configuration: precedence, origins, and what is refused with which words."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough import config_file
from ridethrough.config import Config, NodeConfig, PeersConfig, RecoveryConfig, ResumeConfig, keys, load
from ridethrough.config_rules import GATES
from ridethrough.errors import UsageError

ROOT = Path(__file__).parent.parent
THREE = '[nodes.n0]\naddress = "10.0.0.1"\n[nodes.n1]\naddress = "10.0.0.2"\n[nodes.n2]\naddress = "10.0.0.3"\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test stands in an empty directory."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def written(text: str, name: str = "ridethrough.toml") -> Config:
    Path(name).write_text(text, encoding="utf-8")
    return load(None if name == "ridethrough.toml" else name, {}, {})


def refused(text: str, environ: dict[str, str] | None = None, **flags: Any) -> tuple[str, str]:
    """What is said about a configuration that is wrong, and what to write instead."""
    Path("ridethrough.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(None, environ or {}, flags)
    assert caught.value.exit_code == 2
    return str(caught.value), str(caught.value.fields["hint"])


# -- where values come from ------------------------------------------------------------------------------------------------


def test_no_configuration_at_all_is_the_defaults() -> None:
    found = load(None, {}, {})
    assert found == Config()
    assert (found.peers.suspect_s, found.peers.dead_s, found.recovery.wait_for_nodes_s, found.recovery.then) == (1.5, 15.0, 600.0, "stop")
    assert found.origin("peers.port") == "default"


def test_a_flag_beats_the_environment_the_environment_the_file_and_the_file_the_default() -> None:
    text = 'run = "/in/file"\n[peers]\nport = 1001\ndead = "20s"\n'
    environ = {"RIDETHROUGH_RUN": "/in/env", "RIDETHROUGH_PEERS_PORT": "1002"}
    Path("ridethrough.toml").write_text(text, encoding="utf-8")
    found = load(None, environ, {"run": "/in/flag"})
    assert (found.run, found.peers.port, found.peers.dead_s, found.peers.suspect_s) == ("/in/flag", 1002, 20.0, 1.5)
    assert found.origins == {"run": "flag --run", "peers.port": "env RIDETHROUGH_PEERS_PORT", "peers.dead": "file ridethrough.toml"}
    assert found.origin("peers.suspect") == "default"
    assert load(None, environ, {"run": None}).run == "/in/env"
    assert load(None, {}, {}).run == "/in/file"


def test_every_key_with_one_value_can_be_set_by_its_variable() -> None:
    texts = {
        "run": "/r", "storage": "shared",
        "peers.port": "1", "peers.interface": "eth1", "peers.key_file": "/k", "peers.suspect": "2s", "peers.dead": "3m",
        "recovery.paths": "/a,/b", "recovery.start_order": "network,storage,rendezvous,workers", "recovery.wait_for_nodes": "0s",
        "recovery.then": "shrink", "recovery.min_nodes": "1", "recovery.resume": "roll-back", "recovery.rendezvous_port": "30000",
        "resume.code": "refuse", "resume.config": "refuse", "resume.data": "ignore", "resume.torch": "refuse", "resume.dependencies": "ignore",
        "resume.command": "ignore", "resume.world_size": "refuse", "resume.batch_size": "refuse",
    }  # fmt: skip
    assert set(texts) == set(keys())
    found = load(None, {f"RIDETHROUGH_{key.replace('.', '_').upper()}": text for key, text in texts.items()}, {})
    assert found == Config(
        run="/r",
        storage="shared",
        peers=PeersConfig(port=1, interface="eth1", key_file="/k", suspect_s=2.0, dead_s=180.0),
        recovery=RecoveryConfig(
            paths=("/a", "/b"),
            start_order=("network", "storage", "rendezvous", "workers"),
            wait_for_nodes_s=0.0,
            then="shrink",
            resume="roll-back",
            rendezvous_port=30000,
        ),
        resume=ResumeConfig(
            code="refuse",
            config="refuse",
            data="ignore",
            torch="refuse",
            dependencies="ignore",
            command="ignore",
            world_size="refuse",
            batch_size="refuse",
        ),
        origins={key: f"env RIDETHROUGH_{key.replace('.', '_').upper()}" for key in texts},
    )


def test_the_key_file_has_a_short_variable_too_and_two_that_differ_are_refused() -> None:
    assert load(None, {"RIDETHROUGH_KEY_FILE": "/k"}, {}).peers.key_file == "/k"
    assert load(None, {"RIDETHROUGH_KEY_FILE": "/k", "RIDETHROUGH_PEERS_KEY_FILE": "/k"}, {}).peers.key_file == "/k"
    message, hint = refused("", {"RIDETHROUGH_KEY_FILE": "/k", "RIDETHROUGH_PEERS_KEY_FILE": "/other"})
    assert message == "RIDETHROUGH_KEY_FILE and RIDETHROUGH_PEERS_KEY_FILE both set peers.key_file, differently"
    assert hint == "unset RIDETHROUGH_PEERS_KEY_FILE"


def test_an_empty_variable_sets_nothing() -> None:
    assert load(None, {"RIDETHROUGH_PEERS_PORT": "", "RIDETHROUGH_CONFIG": ""}, {}) == Config()


def test_a_given_file_beats_the_variable_and_the_variable_what_lies_here() -> None:
    for name in ("ridethrough.toml", "b.toml", "c.toml"):
        Path(name).write_text(f'run = "/{name}"\n', encoding="utf-8")
    environ = {"RIDETHROUGH_CONFIG": "b.toml"}
    assert load("c.toml", environ, {}).run == "/c.toml"
    assert load(None, environ, {}).run == "/b.toml"
    assert load(None, {}, {}).run == "/ridethrough.toml"
    assert load("c.toml", environ, {}).origins == {"run": "file c.toml"}


def test_a_table_of_pyproject_does_as_well_and_a_project_without_one_is_no_configuration() -> None:
    Path("pyproject.toml").write_text('[project]\nname = "x"\n', encoding="utf-8")
    assert load(None, {}, {}) == Config()
    Path("pyproject.toml").write_text('[tool.ridethrough]\nrun = "/p"\n[tool.ridethrough.peers]\nport = 7\n', encoding="utf-8")
    found = load(None, {}, {})
    assert (found.run, found.peers.port, found.origin("run")) == ("/p", 7, "file pyproject.toml")
    Path("ridethrough.toml").write_text('run = "/r"\n', encoding="utf-8")
    assert load(None, {}, {}).run == "/r"


def test_paths_in_the_file_are_meant_from_its_directory_and_typed_ones_from_here(here: Path) -> None:
    (here / "etc").mkdir()
    (here / "etc/r.toml").write_text('run = "runs/a"\n[peers]\nkey_file = "../key"\n[recovery]\npaths = ["data", "/abs"]\n', encoding="utf-8")
    found = load("etc/r.toml", {}, {})
    assert found.run == str(here / "etc/runs/a")
    assert found.peers.key_file == str(here / "key")
    assert found.recovery.paths == (str(here / "etc/data"), "/abs")
    assert load("etc/r.toml", {}, {"run": "runs/b"}).run == str(here / "runs/b")
    assert load("etc/r.toml", {"RIDETHROUGH_RUN": "runs/c"}, {}).run == str(here / "runs/c")


def test_a_file_with_a_hostile_name_is_read_and_named(hostile_dir: Path) -> None:
    path = hostile_dir / "ridethrough.toml"
    path.write_text('run = "exp"\n', encoding="utf-8")
    found = load(str(path), {}, {})
    assert found.run == str(hostile_dir / "exp")
    assert found.origin("run") == f"file {path}"


# -- nodes -----------------------------------------------------------------------------------------------------------------


def test_nodes_keep_the_order_of_the_file_and_default_to_their_names() -> None:
    found = written('run = "/r"\n[nodes.z]\n[nodes.a]\naddress = "fd00::1"\ndomain = "rack"\n')
    assert found.nodes == (NodeConfig(name="z", address="z", domain="z"), NodeConfig(name="a", address="fd00::1", domain="rack"))
    assert (found.order, found.addresses, found.domains) == (("z", "a"), {"z": "z", "a": "fd00::1"}, {"z": "z", "a": "rack"})
    assert found.origin("nodes") == "file ridethrough.toml"


def test_peers_have_a_fixed_port_only_where_nodes_are_configured() -> None:
    assert written('run = "/r"\n' + THREE).peers.port == 29577
    assert written('run = "/r"\n[peers]\nport = 0\n' + THREE).peers.port == 0
    assert written('run = "/r"\n').peers.port == 0


def test_the_own_node_must_be_among_the_configured_ones() -> None:
    found = written('run = "/r"\n' + THREE)
    assert found.require_node("n1") == found.nodes[1]
    with pytest.raises(UsageError) as caught:
        found.require_node("gpu7.cluster")
    assert str(caught.value) == "ridethrough.toml: this node is called gpu7.cluster and [nodes] has only n0, n1, n2"
    assert caught.value.fields["hint"] == 'write [nodes."gpu7.cluster"], or set RIDETHROUGH_NODE to the name that it has there'
    assert Config().require_node("any") == NodeConfig(name="any", address="any", domain="any")


def test_a_start_waits_where_there_is_something_to_wait_for() -> None:
    assert not Config().has_gates
    assert not written('run = "/r"\n').has_gates
    assert written('[recovery]\npaths = ["/data"]\n').has_gates
    assert written('run = "/r"\n' + THREE).has_gates


# -- other places ----------------------------------------------------------------------------------------------------------


def test_a_tier_is_a_place_a_domain_and_what_is_kept_there(here: Path) -> None:
    found = written(
        'run = "/r"\n[tiers.cloud]\nplace = "s3://bucket/exp001"\nbandwidth = "50MB/s"\nkeep_last = 10\nkeep_every = 1000\n'
        '[tiers.mirror]\nplace = "mirror/exp001"\ndomain = "room-b"\n'
    )
    cloud, mirror = found.tiers
    assert (cloud.place, cloud.domain, cloud.bandwidth_bytes_per_s, cloud.keep_last, cloud.keep_every) == (
        "s3://bucket/exp001",
        "cloud",
        50e6,
        10,
        1000,
    )
    assert (mirror.place, mirror.domain, mirror.bandwidth_bytes_per_s, mirror.keep_last) == (str(here / "mirror/exp001"), "room-b", None, 3)
    assert Config.from_facts(json.loads(json.dumps(found.as_facts()))) == found


@pytest.mark.parametrize(
    ("tiers", "said", "hint"),
    [
        ('[tiers.a]\nplace = "/m"\nbandwidth = "fast"\n', "'fast' is not a bandwidth", 'write bandwidth = "50MB/s"'),
        ('[tiers.a]\nplace = "/m"\nbandwidth = "0MB/s"\n', "is not a bandwidth", ""),
        ('[tiers.a]\nplace = "/m"\nkeep_last = 0\n', "at least 1", ""),
        ('[tiers.a]\ndomain = "x"\n', "tiers.a.place is missing", "write place"),
        ('[tiers.a]\nplace = "/m"\nkeep = 3\n', "there is no such key", "keep_last"),
        ('[tiers.a]\nplace = "/m"\n[tiers.b]\nplace = "/m/"\n', "is the place of a too", "one copy is enough"),
        ('[tiers.a]\nplace = "/r"\n', "is the run directory itself", "another place"),
        ('[tiers."Big One"]\nplace = "/m"\n', "is no name of a tier", "[tiers.mirror]"),
        ('[tiers.a.example.com]\nplace = "/m"\n', "table within a tier", '[tiers."a.example.com"]'),
        ("tiers = 3\n", "must be a table", "[tiers.NAME]"),
    ],
)
def test_what_is_wrong_with_a_tier_is_said_with_what_to_write(tiers: str, said: str, hint: str) -> None:
    found = refused(f'run = "/r"\n{tiers}')
    assert said in found[0]
    assert hint in found[1]


def test_a_tier_without_a_run_is_refused() -> None:
    assert "it must be known which" in refused('[tiers.a]\nplace = "/m"\n')[0]


def test_copies_in_the_only_power_domain_are_refused() -> None:
    nodes = '[nodes.n0]\naddress = "10.0.0.1"\ndomain = "hall"\n'
    assert "one cut takes all of them" in refused(f'run = "/r"\n{nodes}[tiers.a]\nplace = "/m"\ndomain = "hall"\n')[0]
    assert written(f'run = "/r"\n{nodes}[tiers.a]\nplace = "/m"\ndomain = "annex"\n').tiers


def test_what_is_known_of_the_storage_of_a_path_is_that_of_the_deepest_path_described() -> None:
    found = written('[storage_facts."/"]\nrepair = "never"\n[storage_facts."/ckpt"]\nreplicas = "3"\n')
    described = {path: told.path if (told := found.facts_of(path)) else None for path in ("/ckpt", "/ckpt/exp1", "/ckpt2", "/")}
    assert described == {"/ckpt": "/ckpt", "/ckpt/exp1": "/ckpt", "/ckpt2": "/", "/": "/"}
    assert Config().facts_of("/ckpt") is None


# -- as JSON ---------------------------------------------------------------------------------------------------------------


def test_facts_bring_back_the_same_configuration_and_a_thousand_nodes_fit_in_an_answer() -> None:
    nodes = "".join(f'[nodes.gpu{i:04d}]\naddress = "10.0.{i // 250}.{i % 250}"\ndomain = "rack-{i // 8}"\n' for i in range(1024))
    facts = '[storage_facts."/ckpt"]\nreplicas = "3"\n[storage_facts.scratch]\nrepair = "an hour"\n'
    found = written(f'run = "/r"\nstorage = "shared"\n[recovery]\npaths = ["/a"]\nthen = "shrink"\n{nodes}{facts}')
    text = json.dumps(found.as_facts())
    assert len(text) < 100_000
    assert Config.from_facts(json.loads(text)) == found
    assert Config.from_facts(json.loads(json.dumps(Config().as_facts()))) == Config()


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[peers]\nprot = 3\n", "ridethrough.toml: peers.prot: there is no such key", "did you mean port?"),
        ("stroage = 3\n", "ridethrough.toml: stroage: there is no such key", "did you mean storage?"),
        ("[recovery]\nport = 3\n", "ridethrough.toml: recovery.port: there is no such key", "it belongs to [peers] port"),
        ("[recovery]\ninterface = 'x'\n", "ridethrough.toml: recovery.interface: there is no such key", "it belongs to [peers] interface"),
        ("[peers]\nxyzzy = 3\n", "ridethrough.toml: peers.xyzzy: there is no such key", "keys in [peers]: port, interface, key_file, suspect, dead"),
        (
            "[storage_facts.'/ckpt']\nreplica = '3'\n",
            "ridethrough.toml: storage_facts./ckpt.replica: there is no such key",
            "did you mean replicas?",
        ),
        (
            "[storage_facts]\nreplicas = '3'\n",
            "ridethrough.toml: storage_facts.replicas is '3'; it must be a table",
            "write a table: [storage_facts.PATH] on a line of its own",
        ),
        ("[nodes.n0]\nadress = 'x'\n", "ridethrough.toml: nodes.n0.adress: there is no such key", "did you mean address?"),
        ("[peers]\ndead = 15\n", "ridethrough.toml: peers.dead: 15 has no unit", 'write dead = "15s" (units are s, m and h)'),
        ("[peers]\ndead = '15'\n", "ridethrough.toml: peers.dead: '15' is not a duration", 'write dead = "15s" (units are s, m and h)'),
        ("[peers]\ndead = '5 min'\n", "ridethrough.toml: peers.dead: '5 min' is not a duration", 'write dead = "5s" (units are s, m and h)'),
        ("[peers]\ndead = true\n", "ridethrough.toml: peers.dead: True is not a duration", 'write dead = "30s" (units are s, m and h)'),
        ("[peers]\nport = '7'\n", "ridethrough.toml: peers.port is '7'; it must be a whole number", "write port = 29577"),
        ("[peers]\nport = true\n", "ridethrough.toml: peers.port is True; it must be a whole number", "write port = 29577"),
        ("[peers]\nport = 70000\n", "ridethrough.toml: peers.port is 70000; it must be at most 65535", "write port = 29577"),
        ("[peers]\ninterface = ' '\n", "ridethrough.toml: peers.interface: it is empty", "leave the key out if nothing is meant"),
        ("run = 3\n", "ridethrough.toml: run is 3; it must be a text in quotes", 'write run = "3"'),
        ("peers = 3\n", "ridethrough.toml: peers is 3; it must be a table", "write a table: [peers] on a line of its own"),
        ("nodes = ['a']\n", "ridethrough.toml: nodes is ['a']; it must be a table", "write a table: [nodes.NAME] on a line of its own"),
        ("[recovery]\npaths = '/data'\n", "ridethrough.toml: recovery.paths is '/data'; it must be a list", 'write paths = ["/data"]'),
        (
            "[recovery]\nthen = 'shrnk'\n",
            "ridethrough.toml: recovery.then is 'shrnk'; it must be one of \"shrink\", \"stop\"",
            'write then = "shrink"',
        ),
        (
            "[resume]\ndata = 'warm'\n",
            "ridethrough.toml: resume.data is 'warm'; it must be one of \"ignore\", \"warn\", \"refuse\"",
            'write data = "warn"',
        ),
        ("[resume]\ndate = 'warn'\n", "ridethrough.toml: resume.date: there is no such key", "did you mean data?"),
        (
            "storage = 'nfs'\n",
            "ridethrough.toml: storage is 'nfs'; it must be one of \"detect\", \"shared\", \"node-local\"",
            'write storage = "detect" or "shared" or "node-local"',
        ),
        (
            "[nodes.n0.example.com]\ndomain = 'a'\n",
            "ridethrough.toml: nodes.n0.example is a table within a node: a node's name with dots needs quotes",
            'write [nodes."n0.example.com"]',
        ),
        ("run = /a\n", "ridethrough.toml is not TOML: Invalid value (at line 1, column 7)", 'texts need quotes: dead = "15s"'),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place_and_what_to_write(text: str, message: str, hint: str) -> None:
    assert refused(text) == (message, hint)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            f"run = '/r'\n[recovery]\nmin_nodes = 4\n{THREE}",
            "ridethrough.toml: recovery.min_nodes: 4 are more than the 3 that may take part",
            "write min_nodes = 3 or less, or add [nodes.NAME]",
        ),
        (
            "storage = 'node-local'\n[recovery]\nthen = 'shrink'\n",
            'ridethrough.toml: recovery.then: with storage = "node-local" two halves that do not see each other could both go on',
            'write then = "stop"; or storage = "shared" if every node does see the same run directory',
        ),
        (
            "run = '/r'\n[nodes.a]\naddress = 'FD00:0::1'\n[nodes.b]\naddress = 'fd00::1'\n",
            "ridethrough.toml: nodes.b.address: fd00::1 is the address of a too",
            "give b or a another address",
        ),
        (
            "run = '/r'\n[nodes.a]\n[nodes.b]\naddress = 'A'\n",
            "ridethrough.toml: nodes.b.address: A is the address of a too",
            "give b or a another address",
        ),
        (
            "[nodes.Gpu_1]\n",
            "ridethrough.toml: nodes.Gpu_1: 'Gpu_1' is no name of a node: small letters, digits, dots and dashes",
            "write [nodes.gpu-1]",
        ),
        (
            THREE,
            "ridethrough.toml: run: several nodes find each other by the run directory, so it must be known before the script names it",
            'write run = "/path", or give --run',
        ),
        (
            "[peers]\nsuspect = '15s'\ndead = '15s'\n",
            "ridethrough.toml: peers.dead: a node is suspected after 15 s of silence and given up after 15 s",
            "write a suspect above 0 and a longer dead",
        ),
        (
            "[peers]\nport = 29507\n",
            "ridethrough.toml: peers.port: 29507 is one of torchrun's ports, 29500 to 29507",
            "write port = 29508 or another port",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(text: str, message: str, hint: str) -> None:
    assert refused(text) == (message, hint)


@pytest.mark.parametrize("address", ["10.0.0.1:29500", "fe80::1%eth0", "10.0.0", "two words", "user@host"])
def test_an_address_is_a_number_or_a_host_name_and_nothing_more(address: str) -> None:
    message, _ = refused(f"[nodes.a]\naddress = '{address}'\n")
    assert message.startswith(f"ridethrough.toml: nodes.a.address: {address!r} is neither an address nor a host name")


@pytest.mark.parametrize(
    "order",
    [
        ["storage", "network", "rendezvous"],
        ["workers", "storage", "network", "rendezvous"],
        ["storage", "rendezvous", "network", "workers"],
        ["storage", "storage", "network", "rendezvous", "workers"],
        [],
    ],
)
def test_a_start_order_has_each_gate_once_with_workers_last_and_the_network_before_the_rendezvous(order: list[str]) -> None:
    message, hint = refused(f"[recovery]\nstart_order = {order}\n")
    assert message == "ridethrough.toml: recovery.start_order: each of the four gates once, workers last, rendezvous after network"
    assert hint == 'write start_order = ["storage", "network", "rendezvous", "workers"]'


def test_the_network_may_come_before_the_storage() -> None:
    assert written('[recovery]\nstart_order = ["network", "storage", "rendezvous", "workers"]\n').recovery.start_order[0] == "network"


def test_all_mistakes_are_said_at_once_the_first_with_its_remedy() -> None:
    message, hint = refused("storage = 'x'\n[peers]\nprot = 1\ndead = 2\n")
    assert "storage is 'x'" in message
    assert message.endswith("(also wrong: peers.dead: 2 has no unit; peers.prot: there is no such key)")
    assert hint.startswith("write storage = ")


def test_a_mistake_in_a_variable_names_the_variable_and_how_to_set_it() -> None:
    assert refused("", {"RIDETHROUGH_PEERS_DEAD": "15"}) == (
        "RIDETHROUGH_PEERS_DEAD: peers.dead: '15' is not a duration",
        "write RIDETHROUGH_PEERS_DEAD=15s (units are s, m and h)",
    )
    assert refused("", {"RIDETHROUGH_PEERS_PORT": "abc"})[1] == "write RIDETHROUGH_PEERS_PORT=29577"
    assert refused("", {"RIDETHROUGH_PEERS_PROT": "1"}) == (
        "RIDETHROUGH_PEERS_PROT: there is no such variable",
        "did you mean RIDETHROUGH_PEERS_PORT?",
    )
    assert refused("", {"RIDETHROUGH_RESUME_DATE": "warn"})[1] == "did you mean RIDETHROUGH_RESUME_DATA?"
    assert refused("storage = 'node-local'\n", {"RIDETHROUGH_RECOVERY_THEN": "shrink"})[0].startswith("RIDETHROUGH_RECOVERY_THEN: recovery.then: ")


def test_variables_of_other_parts_are_nobodys_business_here() -> None:
    assert load(None, {"RIDETHROUGH_STATE_DIR": "/s", "RIDETHROUGH_NODE": "n", "RIDETHROUGH_SOCKET": "/x"}, {}) == Config()


def test_a_file_that_was_asked_for_and_cannot_be_used_is_named_with_who_asked(here: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no file nowhere\.toml \(--config\)$"):
        load("nowhere.toml", {}, {})
    with pytest.raises(UsageError, match=r"^there is no file nowhere\.toml \(RIDETHROUGH_CONFIG\)$"):
        load(None, {"RIDETHROUGH_CONFIG": "nowhere.toml"}, {})
    with pytest.raises(UsageError, match=r"cannot be read: Is a directory"):
        load(str(here), {}, {})
    Path("pyproject.toml").write_text("[project]\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"^pyproject\.toml has no table \[tool\.ridethrough\] \(--config\)$"):
        load("pyproject.toml", {}, {})
    Path("latin.toml").write_bytes(b'run = "\xe9"\n')
    with pytest.raises(UsageError, match=r"^latin\.toml is not TOML"):
        load("latin.toml", {}, {})


@given(
    st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_whatever_stands_there_is_taken_or_said_to_be_wrong(value: Any) -> None:
    for key in ("run", "storage", "nodes", "peers", "recovery", "resume", "other"):
        values, problems = config_file.check({key: value})
        assert values == {} if problems else set(values) == {key}
        assert all(problem.text and (problem.value or problem.hint) for problem in problems)


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0.0), ("1.5s", 1.5), ("10m", 600.0), ("2h", 7200.0)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert config_file.duration_s(text) == seconds


# -- one source of truth ---------------------------------------------------------------------------------------------------


def test_what_may_stand_in_a_file_is_what_the_core_receives() -> None:
    assert set(config_file.scalar_keys()) == set(keys())
    assert set(config_file.NodeKeys.model_fields) == {"address", "domain"}


def test_the_defaults_that_the_descriptions_name_are_the_real_ones() -> None:
    real: dict[str, Any] = {"storage": Config().storage}
    for section, value in (("peers", PeersConfig()), ("recovery", RecoveryConfig()), ("resume", ResumeConfig())):
        for name in config_file.SECTIONS[section].model_fields:
            real[f"{section}.{name}"] = getattr(value, name, None) if hasattr(value, name) else getattr(value, f"{name}_s")
    named = 0
    for key, default in real.items():
        section, _, name = key.rpartition(".")
        text = str(config_file.SECTIONS[section].model_fields[name].description)
        found = re.search(r'Default (`(?P<list>\[.+\])`|"(?P<text>[^"]+)"|(?P<number>\d+))', text)
        if found is None or key == "peers.port":
            continue
        named += 1
        if found["list"]:
            assert tuple(json.loads(found["list"])) == default
        elif found["number"]:
            assert int(found["number"]) == default
        else:
            assert found["text"] == default or config_file.duration_s(found["text"]) == default
    assert named == 17
    assert RecoveryConfig().start_order == GATES


def test_the_reference_in_the_docs_is_the_one_in_the_code() -> None:
    page = (ROOT / "docs/recovery.md").read_text(encoding="utf-8")
    for section, model in config_file.SECTIONS.items():
        for name, spec in model.model_fields.items():
            if spec.description:
                key = f"{section}.{name}" if section else name
                assert f"| `{key}` | {spec.description} |" in page, key


def test_the_example_in_the_docs_is_a_configuration() -> None:
    page = (ROOT / "docs/recovery.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, re.S)
    assert blocks
    for block in blocks:
        tomllib.loads(block)
    found = written(blocks[0])
    assert found.order == ("n0", "n1", "n2")
    assert found.recovery.then == "shrink"


@pytest.mark.parametrize("storage", ["detect", "node-local"])
def test_nodes_without_a_place_for_one_key_are_refused(storage: str) -> None:
    nodes = (NodeConfig(name="a", address="a", domain="a"), NodeConfig(name="b", address="b", domain="b"))
    with pytest.raises(UsageError, match="one key"):
        Config(run="/r", storage=storage, nodes=nodes).require_common_key()
    Config(run="/r", storage=storage, nodes=nodes, peers=PeersConfig(key_file="/k")).require_common_key()
    Config(run="/r", storage="shared", nodes=nodes).require_common_key()
    Config(run="/r", storage=storage).require_common_key()

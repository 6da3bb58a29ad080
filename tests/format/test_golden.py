"""Bytes written by an earlier version are read by this one, and without it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors import deserialize

from ridethrough import journal
from ridethrough.format import layout, part, tree
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import candidates, read_catalog
from ridethrough.store.verify import load_part
from ridethrough.testing import SimpleStore, flip_bit

GOLDEN = Path(__file__).parents[1] / "data" / "format1" / "exp001"
LOADER = Path(__file__).parents[2] / "docs" / "load_without_ridethrough.py"
FS = PosixFileSystem()

# Tensors of step 200, by part and name. These never change.
SHA256 = {
    "replicated": {
        "optimizer/0/exp_avg": "76d931a400e7940c35d65abe44d54fed7208a719c3f5441bc92c3bfb3dab4cde",
        "empty": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "model/layer.weight": "16d51fd0ec9ec27918c4ff2e9f51569d05eabfb586f172d8f6257c837fad05bf",
        "optimizer/0/step": "2f5283ada077cf6cc5a7da071318c85d4441a5b9a9572cd4b84a35b369140877",
        "model/layer.bias": "bcfe30e9d2b02c4f6a14cd002818ce729edc6f4ad981de07f0556dd1e57d8c31",
        'model/é "quoted"': "03cae1c84e162496ae1a54f76c428c22987d9b00147927d6cf0243ac207aab59",
    },
    "rank-00000": {
        "norm/count": "df4d7d93fe2dd947df4dc18d86afff5a5f79d3c85593aa80042c122b86e2f890",
        "rng/numpy": "0b616470046100c594dc712bb440683e84702bfd3004111319c7f719874aecb4",
        "mask": "96e2f11eaa94ef0007ca59d913fd763b076332a40f24c332f43be9f39667470a",
        "rng/torch": "ad66f69c9f68c47dab4da3b993eb7cf94be2505e52c638cfdef3d8194d851dbf",
    },
    "rank-00001": {
        "norm/count": "0ea4a3e9779d0f4423ae6dc6d0ff85a510e9b8b44ed9f57c359becebfe30f39b",
        "rng/numpy": "ab130944ac773684494df63a2f58d12d8e7c87c03c8d6404e97a1d993a2c2b6d",
        "medium": "db77cb0dd58be130b6c5a6ccd8f4c5076102ee261ee5f38e8a10c99d58368110",
        "rng/torch": "b97e6d62e6def60fd0f6e85b1867f68cb261446c62076299ac9ff14519f06f0b",
        "small": "ba9b6f1e04c04f71b63f33a97fa6e36793a7c8d3d04c12acf9a89be333eccad7",
    },
}


def load(run_dir: Path) -> tuple[int, dict[str, dict[str, bytes]], dict[str, Any]]:
    """Step, tensor bytes and states of the best candidate."""
    best = candidates(read_catalog(FS, str(run_dir)))[0]
    tensors: dict[str, dict[str, bytes]] = {}
    states: dict[str, Any] = {}
    for seal in best.seals:
        data = load_part(FS, str(run_dir), best.dir_name, seal, past_cache=True)
        specs, begin = part.parse_header(data, path=seal.payload_name)
        tensors[seal.part] = {s.name: bytes(data[begin + s.begin : begin + s.end]) for s in specs}
        states[seal.part] = tree.decode(seal.tree, tensors[seal.part].__getitem__, path=seal.payload_name)
    return best.step, tensors, states


def digests(tensors: dict[str, dict[str, bytes]]) -> dict[str, dict[str, str]]:
    return {name: {key: hashlib.sha256(data).hexdigest() for key, data in found.items()} for name, found in tensors.items()}


def test_every_tensor_of_a_format_1_checkpoint_is_read_bit_for_bit() -> None:
    step, tensors, _ = load(GOLDEN)
    assert step == 200
    assert digests(tensors) == SHA256


def test_the_small_state_of_a_format_1_checkpoint_is_read_exactly() -> None:
    _, tensors, states = load(GOLDEN)
    for name, state in states.items():
        assert math.isnan(state.pop("nan"))
        assert math.copysign(1, state.pop("minus_zero")) == -1
        assert list(state["unsorted"]) == ["z", "a"]
        assert state.pop("numpy") == numpy.float32(0.1)
        assert str(state.pop("dtype")).removeprefix("torch.") == "bfloat16"
        assert state.pop("first_tensor") == tensors[name][{"replicated": "model/layer.weight"}.get(name, "rng/torch")]
        assert state == {
            "step": 200,
            "part": name,
            "betas": (0.9, 0.999),
            "lr": 0.1 + 0.2,
            "infinity": -math.inf,
            "big": 2**100,
            "by_number": {0: "zero", (1, "a"): None},
            "unsorted": {"z": 1, "a": 2},
            "tag_like": {"~": "tensor", "v": 1},
            "raw": b"\x00\xff",
            "seen": {1, 2, 3},
            "complex": 1.5 - 2j,
            "text": "é日本\n",
        }


def test_the_lineage_and_rosters_of_a_format_1_run_are_read() -> None:
    catalog = read_catalog(FS, str(GOLDEN))
    assert catalog.problems == ()
    assert [(c.attempt.seq, c.step) for c in candidates(catalog)] == [(2, 200), (1, 100)]
    assert [(ref.label, parent and parent.step) for ref, parent in catalog.attempts] == [("000001-10101010", None), ("000002-20202020", 100)]
    assert all(c.roster is not None and c.roster.nodes == ("golden", "golden") for c in catalog.checkpoints)
    assert catalog.checkpoints[1].meta["start_command"] == ["python", "train.py"]


def test_a_format_1_journal_with_its_torn_tail_is_read() -> None:
    history = journal.read(FS, [layout.journal_path(str(GOLDEN), "golden")])
    assert [e.kind for e in history.events] == ["attempt.started", "checkpoint.durable", "checkpoint.verified"] * 2
    assert [e.data["step"] for e in history.of("checkpoint.durable")] == [100, 200]
    assert (history.is_tail_torn, history.damaged_lines) == (True, ())


@pytest.mark.parametrize("roster_from", ["attempts", "manifest"])
def test_a_format_1_roster_is_found_in_both_its_places(tmp_path: Path, roster_from: str) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "run"))
    if roster_from == "manifest":
        shutil.rmtree(run / "attempts")
    else:
        for path in run.glob("step-*/manifest.json"):
            path.unlink()
    assert digests(load(run)[1]) == SHA256


def test_a_run_of_format_1_goes_on_under_this_version(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "run"))
    store = SimpleStore(fs=FS, run_dir=str(run))
    best = candidates(read_catalog(FS, str(run)))[0]
    from ridethrough.types import Parent

    assert store.start(parent=Parent(attempt=best.attempt, step=best.step)).seq == 3
    store.commit(300)
    assert [c.step for c in candidates(read_catalog(FS, str(run)))] == [300, 200, 100]


def test_every_format_1_payload_opens_with_the_plain_safetensors_library() -> None:
    [directory] = GOLDEN.glob("step-000000200-*")
    for path in directory.glob("*.safetensors"):
        found = {name: hashlib.sha256(bytes(entry["data"])).hexdigest() for name, entry in deserialize(path.read_bytes())}
        assert found == SHA256[path.name.split("~")[0]]


def without_ridethrough(run_dir: Path) -> dict[str, Any]:
    """What the page's script loads in a process that cannot import ridethrough."""
    code = "import runpy, sys; sys.modules['ridethrough'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", code, str(LOADER), str(run_dir)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_script_in_the_docs_loads_a_checkpoint_without_ridethrough() -> None:
    assert without_ridethrough(GOLDEN) == {"step": 200, "parts": SHA256}


def damage_newest(run: Path) -> None:
    [path] = run.glob("step-000000200-*/replicated~*.safetensors")
    flip_bit(str(path), -1)


def lose_newest_seal(run: Path) -> None:
    [path] = run.glob("step-000000200-*/rank-00001~*.seal")
    path.unlink()


def lose_newest_payload(run: Path) -> None:
    [path] = run.glob("step-000000200-*/rank-00001~*.safetensors")
    path.unlink()


def tear_newest_seal(run: Path) -> None:
    [path] = run.glob("step-000000200-*/rank-00000~*.seal")
    os.truncate(path, 300)


@pytest.mark.parametrize("damage", [damage_newest, lose_newest_seal, lose_newest_payload, tear_newest_seal])
def test_the_script_in_the_docs_falls_back_as_we_do(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "run [x]"))
    damage(run)
    assert without_ridethrough(run)["step"] == 100


def test_the_script_in_the_docs_never_follows_an_abandoned_branch(tmp_path: Path) -> None:
    store = SimpleStore(fs=FS, run_dir=str(tmp_path / "run"))
    store.start()
    store.commit(1, 99)
    from ridethrough.types import Parent

    store.start(parent=Parent(attempt=store.attempt, step=1))
    assert without_ridethrough(tmp_path / "run")["step"] == 1


def test_the_script_in_the_docs_fits_on_a_page() -> None:
    assert len(LOADER.read_text().splitlines()) <= 60

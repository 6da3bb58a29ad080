"""Each export, read back by the library it is for, is bit for bit what was saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from lab import Lives, digest, seed_everything
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ridethrough.cli import main
from ridethrough.errors import StoreFull
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem, PosixWriter
from ridethrough.store import export
from ridethrough.testing import flip_bit

KINDS = ["safetensors", "torch", "dcp"]


class Net(nn.Module):
    """Parameters of two types, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))).bfloat16())  # type: ignore[no-any-return]


class Holder:
    """Something tracked whose state only a pickle could hold elsewhere."""

    def state_dict(self) -> dict[str, Any]:
        return {"histogram": np.arange(5)}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        raise NotImplementedError


class Trained:
    """A run with two saves; what was live at the second."""

    def __init__(self, lives: Lives, run_dir: Path) -> None:
        seed_everything(3)
        self.path = run_dir
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)
        ckpt = lives.start(run_dir)
        ckpt.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, histogram=Holder())
        ckpt.restore()
        for _ in range(2):
            for _ in range(3):
                self.optimizer.zero_grad()
                self.model(torch.randn(16, 4)).float().square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                ckpt.step()
            ckpt.save()
        lives.end()

    @property
    def truth(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer by its path."""
        return {name: tensor for name, tensor in flat(self.truth).items() if isinstance(tensor, torch.Tensor)}


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {name: found for key, item in value.items() for name, found in flat(item, f"{path}/{key}" if path else str(key)).items()}
    return {path: value}


def same(found: Any, wanted: Any) -> bool:
    """Equal keys, types and bits, in any order of keys."""
    a, b = flat(found), flat(wanted)
    return a.keys() == b.keys() and all(digest(a[name]) == digest(b[name]) for name in a)


@pytest.fixture
def trained(lives: Lives, tmp_path: Path) -> Trained:
    return Trained(lives, tmp_path / "run")


def test_safetensors_holds_every_tensor_of_model_and_optimizer_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    assert main(["export", str(trained.path), "--to", "safetensors", str(tmp_path / "out")]) == 0
    found, wanted = load_file(tmp_path / "out"), trained.tensors()
    assert {name: digest(t) for name, t in found.items()} == {name: digest(t) for name, t in wanted.items()}
    assert {t.dtype for t in found.values()} >= {torch.bfloat16, torch.float32, torch.int64}
    assert "model/norm.running_var" in found
    assert "optimizer/state/0/exp_avg_sq" in found


def test_torch_load_without_pickle_gives_the_state_dicts_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    assert main(["export", str(trained.path), "--to", "torch", str(tmp_path / "out")]) == 0
    found = torch.load(tmp_path / "out", weights_only=True)
    assert same(found, trained.truth)
    assert isinstance(found["model"], OrderedDict)
    assert found["model"]._metadata == trained.model.state_dict()._metadata  # type: ignore[attr-defined]
    fresh = Net()
    fresh.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(fresh.parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert same(optimizer.state_dict(), trained.optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_into_a_fresh_model_and_optimizer_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    assert main(["export", str(trained.path), "--to", "dcp", str(tmp_path / "out")]) == 0
    fresh = Net()
    optimizer = torch.optim.AdamW(fresh.parameters())
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)  # adds a key to the groups
    fresh(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    state = {"model": fresh.state_dict(), "optimizer": optimizer.state_dict()}
    dcp_load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert same(state, {name: trained.truth[name] for name in state})
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all")
    assert same(torch.load(tmp_path / "all", weights_only=True), trained.truth)


def test_a_named_checkpoint_is_exported_and_not_the_newest(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", f"{trained.path}@3", "--to", "torch", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["step"] == 3
    found = torch.load(tmp_path / "out", weights_only=True)
    assert found["scheduler"]["last_epoch"] == 3
    assert not same(found, trained.truth)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_says_what_is_in_it_and_what_was_left_out(kind: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained.path), "--to", kind, str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads((resources.files("ridethrough.cli") / "schemas" / "export.json").read_text(encoding="utf-8")))
    counts = {entry["name"]: entry["tensors_count"] for entry in found["objects"]}
    assert (counts["model"], counts["optimizer"]) == (9, 18)
    assert found["tensors_count"] == 27
    if kind == "safetensors":
        assert set(counts) == {"model", "optimizer"}
    else:
        assert [entry["name"] for entry in found["left_out"]] == ["histogram"]
        assert "numpy" in found["left_out"][0]["why"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_never_replaced(kind: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    assert main(["export", str(trained.path), "--to", kind, str(out)]) == 2
    assert "exists, and an export replaces nothing" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    assert main(["export", str(trained.path), "--to", kind, str(tmp_path / "nowhere" / "out")]) == 2
    assert "hint: mkdir -p" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_what_somebody_makes_meanwhile_is_not_replaced_either(kind: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    honest = export._give_name

    def late(*args: Any) -> None:
        out.mkdir() if kind == "dcp" else out.write_bytes(b"mine")
        honest(*args)

    monkeypatch.setattr(export, "_give_name", late)
    assert main(["export", str(trained.path), "--to", kind, str(out)]) == 2
    assert list(out.iterdir()) == [] if kind == "dcp" else out.read_bytes() == b"mine"
    assert not list(tmp_path.glob("out.*"))


def test_a_file_that_comes_between_the_look_and_the_name_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_bytes(b"ours")
    theirs.write_bytes(b"theirs")
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    with pytest.raises(FileExistsError):
        export.name_new(str(ours), str(theirs))
    assert theirs.read_bytes() == b"theirs"


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_part_is_named_and_nothing_is_written(kind: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = max(trained.path.glob("step-*"))
    flip_bit(str(next(directory.glob(f"{layout.REPLICATED}~*.safetensors"))), -3)
    assert main(["export", str(trained.path), "--to", kind, str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert layout.REPLICATED in error
    assert f"hint: ridethrough verify {trained.path}" in error
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_full_disk_leaves_nothing(kind: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: PosixWriter, data: bytes | memoryview) -> None:
        raise StoreFull(detail="ENOSPC on write", path="out")

    monkeypatch.setattr(PosixWriter, "write", write)
    assert main(["export", str(trained.path), "--to", kind, str(tmp_path / "out")]) == 14
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_and_its_directory_are_synced_before_the_name_and_the_name_before_it_is_said(
    kind: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    log: list[tuple[str, Any]] = []
    fsync, name_new, sync_dir = os.fsync, export.name_new, PosixFileSystem.sync_dir

    def logged_fsync(descriptor: int) -> None:
        log.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def logged_name(source: str, target: str) -> None:
        name_new(source, target)
        log.append(("named", target))

    def logged_sync(self: PosixFileSystem, path: str) -> None:
        sync_dir(self, path)
        log.append(("sync_dir", path))
        assert not capsys.readouterr().out, "said before it was durable"

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(export, "name_new", logged_name)
    monkeypatch.setattr(PosixFileSystem, "sync_dir", logged_sync)
    assert main(["export", str(trained.path), "--to", kind, str(out)]) == 0
    named = log.index(("named", str(out)))
    inodes = {path.stat().st_ino for path in [out, *out.rglob("*")]}
    assert inodes <= {what for call, what in log[:named] if call == "fsync"}
    assert ("sync_dir", str(tmp_path)) in log[named:]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_time_nothing_stands_under_the_final_name(kind: str, trained: Trained, tmp_path: Path) -> None:
    program = f"""
import sys
from ridethrough.cli import main
from ridethrough.store import export
def name(temporary, path):
    print("ready", flush=True)
    sys.stdin.read()
export.name_new = name
main(["export", {str(trained.path)!r}, "--to", {kind!r}, {str(tmp_path / "out")!r}])
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.communicate()
    assert not (tmp_path / "out").exists()
    assert [path.suffix for path in tmp_path.glob("out.*")] == [".tmp"]
    assert main(["export", str(trained.path), "--to", kind, str(tmp_path / "out")]) == 0


def test_interrupted_by_ctrl_c_it_takes_its_temporary_file_away(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "name_new", interrupted)
    for kind in KINDS:
        assert main(["export", str(trained.path), "--to", kind, str(tmp_path / "out")]) == 130
        assert not list(tmp_path.glob("out*"))


def test_safetensors_needs_no_torch_and_the_others_say_that_they_do(trained: Trained, tmp_path: Path) -> None:
    program = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
from ridethrough.cli import main
sys.exit(main(sys.argv[1:]))
"""

    def run(kind: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", program, "export", str(trained.path), "--to", kind, str(tmp_path / kind)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    assert run("safetensors").returncode == 0
    assert len(load_file(tmp_path / "safetensors")) == 27
    for kind in ("torch", "dcp"):
        done = run(kind)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == 'hint: pip install "ridethrough[torch]"'


def test_a_rank_that_was_not_there_is_refused(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained.path), "--rank", "1", "--to", "torch", str(tmp_path / "out")]) == 2
    assert "ranks 0 to 0" in capsys.readouterr().err


def test_an_incomplete_checkpoint_is_refused_by_name(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = max(trained.path.glob("step-*"))
    next(directory.glob("rank-*.seal")).unlink()
    assert main(["export", str(directory), "--to", "torch", str(tmp_path / "out")]) == 10
    assert "missing rank-00000" in capsys.readouterr().err

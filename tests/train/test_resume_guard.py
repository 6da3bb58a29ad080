"""What a start does about what its checkpoint was made by: the ranks agree, nothing is fenced, the record says it once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import LabLink, Lives, draws_nothing
from room import CLOCK, Disks, Room, run_ranks, same_error
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from ridethrough.config import Config, ResumeConfig
from ridethrough.errors import ResumeRefused
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import candidates, read_catalog
from ridethrough.train import agreement, checkpointer
from ridethrough.train.agreement import Wish
from ridethrough.train.group import Group

NODES = ("a", "a", "b")
FS = PosixFileSystem()
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(TensorDataset(torch.zeros(12, 2)), batch_size=2),
    "batch sampler": lambda: DataLoader(TensorDataset(torch.zeros(12, 2)), batch_sampler=BatchSampler(RandomSampler(range(12)), 3, drop_last=False)),
    "no batches": lambda: DataLoader(TensorDataset(torch.zeros(12, 2)), batch_size=None),
}


# -- the ranks agree -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["a disk each", "shared"])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Room:
    """Step 10 of a run on data v1."""
    made = Room(tmp_path, ("a", "b"), is_shared=request.param)
    disks = Disks(made)
    disks.open()
    disks.start(1, NODES)
    where = {"a": [layout.REPLICATED, "rank-00000", "rank-00001"], "b": ["rank-00002"]}
    disks.save(10, where, data_version="v1", git_commit="aa" * 20)
    return made


def guarded(room: Room, mine: Mapping[int, Mapping[str, Any]], *, is_fresh: bool = False, policies: ResumeConfig | None = None) -> list[Any]:
    def act(group: Group) -> Any:
        node = group.node
        wish = Wish(is_fresh=is_fresh)
        choice = agreement.choose(group, FS, CLOCK, room.run_dir(node), memory=room.memory(node), wish=wish, storage_wait_s=1.0)
        return agreement.guard_resume(group, choice, mine[group.rank], policies or ResumeConfig(), run_dir=room.run_dir(node))

    return run_ranks(NODES, act)


def facts(data_version: str = "v1", commit: str = "aa" * 20) -> dict[str, Any]:
    return {"data_version": data_version, "git_commit": commit}


def test_a_refusal_is_the_same_on_every_rank_and_leaves_no_attempt(room: Room) -> None:
    before = {path: sorted(os.listdir(path)) for path in room.disks.values()}
    error = same_error(guarded(room, dict.fromkeys(range(3), facts("v2"))), ResumeRefused)
    assert "data version v1 -> v2" in str(error)
    assert {path: sorted(os.listdir(path)) for path in room.disks.values()} == before
    assert all(len(read_catalog(FS, path).attempts) == 1 for path in room.disks.values())


def test_what_the_first_rank_finds_counts_for_all(room: Room) -> None:
    same_error(guarded(room, {0: facts("v2"), 1: facts(), 2: facts()}), ResumeRefused)
    assert guarded(room, {0: facts(), 1: facts("v2"), 2: facts("v2")}) == [()] * 3


def test_what_is_only_warned_of_is_the_same_on_every_rank(room: Room) -> None:
    found = guarded(room, dict.fromkeys(range(3), facts(commit="bb" * 20)))
    assert found == [found[0]] * 3
    assert [str(finding) for finding in found[0]] == ["commit aaaaaaaaaaaa -> bbbbbbbbbbbb"]


def test_another_number_of_ranks_is_seen(tmp_path: Path) -> None:
    room = Room(tmp_path, ("a", "b"), is_shared=True)
    disks = Disks(room)
    disks.open()
    disks.start(1, ("a", "a"))
    disks.save(10, {"a": [layout.REPLICATED, "rank-00000", "rank-00001"]}, **facts())
    [finding] = guarded(room, dict.fromkeys(range(3), facts()))[0]
    assert str(finding) == "world size 2 -> 3"


def test_a_start_at_step_0_compares_nothing(room: Room) -> None:
    assert guarded(room, dict.fromkeys(range(3), facts("v2")), is_fresh=True) == [()] * 3


# -- a whole start -----------------------------------------------------------------------------------------------------------


class Job:
    """A model, its optimizer and a loader, restored and trained for a step."""

    def __init__(self, lives: Lives, run_dir: Path, *, batch: int = 2, loader: DataLoader[Any] | None = None, **settings: Any) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = loader or DataLoader(TensorDataset(torch.zeros(12, 2)), batch_size=batch)
        self.ckpt = lives.start(run_dir, **settings)
        self.ckpt.track(model=self.model, optimizer=self.optimizer, data=self.loader)
        self.restored = self.ckpt.restore()

    def save(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.ckpt.step()
        self.ckpt.save()


@pytest.fixture
def start(lives: Lives, tmp_path: Path) -> Callable[..., Job]:
    return lambda **settings: Job(lives, tmp_path / "run", **settings)


def meta(tmp_path: Path) -> dict[str, Any]:
    return candidates(read_catalog(FS, str(tmp_path / "run")))[0].meta


def told(lives: Lives) -> list[str]:
    return [data["detail"] for kind, data in lives.events if kind == "resume.differs"]


def test_a_resume_with_nothing_changed_says_nothing(start: Callable[..., Job], lives: Lives, caplog: pytest.LogCaptureFixture) -> None:
    start(config={"lr": 1}, data_version="v1").save()
    job = start(config={"lr": 1}, data_version="v1")
    job.save()
    assert (job.restored, told(lives), caplog.records) == (1, [], [])


def test_a_changed_configuration_is_warned_of_in_the_journal_and_by_the_script_and_resumed(
    start: Callable[..., Job], lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    start(config={"lr": 1}).save()
    with caplog.at_level(logging.WARNING, logger="ridethrough"):
        job = start(config={"lr": 2}, batch=3)
    job.save()
    assert job.restored == 1
    [detail] = told(lives)
    assert detail.startswith("config hash ")
    assert detail.endswith("; batch size of data 2 -> 3")
    [record] = caplog.records
    assert record.getMessage() == f"ridethrough: went on from step 1; changed since then: {detail}"


def test_other_data_is_refused_before_anything_is_written(start: Callable[..., Job], lives: Lives, tmp_path: Path) -> None:
    start(data_version="v1").save()
    lives.end()
    before = sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ResumeRefused) as caught:
        start(data_version="v2")
    assert "data version v1 -> v2" in str(caught.value)
    assert sorted(str(path) for path in (tmp_path / "run").rglob("*")) == before


def test_a_refused_job_keeps_its_state(lives: Lives, start: Callable[..., Job], tmp_path: Path) -> None:
    start(data_version="v1").save()
    model = nn.Linear(2, 1)
    weight = model.weight.detach().clone()
    ckpt = lives.start(tmp_path / "run", data_version="v2")
    ckpt.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data=LOADERS["plain"]())
    with draws_nothing(), pytest.raises(ResumeRefused):
        ckpt.restore()
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize(("policy", "expected"), [("ignore", []), ("warn", ["data version v1 -> v2"])])
def test_the_configuration_decides(
    policy: str, expected: list[str], start: Callable[..., Job], lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(data_version="v1").save()
    monkeypatch.setattr(LabLink, "hello", {"config": Config(resume=ResumeConfig(data=policy)).as_facts()})
    job = start(data_version="v2")
    job.save()
    assert (job.restored, told(lives)) == (1, expected)


def test_what_goes_on_after_a_warning_is_silent_at_its_next_start(start: Callable[..., Job], lives: Lives) -> None:
    start(config={"lr": 1}).save()
    start(config={"lr": 2}).save()
    start(config={"lr": 2}).save()
    assert told(lives) == []


@pytest.mark.parametrize(("loader", "expected"), [("plain", 2), ("batch sampler", 3), ("no batches", None)])
def test_the_batch_size_of_each_tracked_loader_is_in_the_record(loader: str, expected: int | None, start: Callable[..., Job], tmp_path: Path) -> None:
    start(loader=LOADERS[loader]()).save()
    assert meta(tmp_path)["batch_size"] == {"data": expected}


def test_the_guard_draws_no_random_number(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    start(data_version="v1", config={"lr": 1}).save()
    asked: list[int] = []
    inner = agreement.guard_resume

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        with draws_nothing():
            return inner(*args, **kwargs)

    monkeypatch.setattr(checkpointer.agreement, "guard_resume", watched)
    start(data_version="v1", config={"lr": 2})
    assert asked == [1]

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Lives, digest, draws_nothing, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ridethrough.errors import MemoryTooSmall, StateMismatch, StepOrder, StorageError, UsageError
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import candidates, read_catalog
from ridethrough.testing import restorable_steps
from ridethrough.train import rng
from ridethrough.train.checkpointer import Checkpointer


class Stream(IterableDataset[Any]):
    """Does not say how long it is."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(12, 2))


class Job:
    """A model, its optimizer and a loader of 6 batches, tracked and restored."""

    def __init__(
        self, lives: Lives, run_dir: Any, *, workers: int = 0, model: nn.Module | None = None, is_stream: bool = False, **settings: Any
    ) -> None:
        self._lives = lives
        self.model = model or nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader: DataLoader[Any] = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=2, shuffle=True, num_workers=workers)
        if is_stream:
            self.loader = DataLoader(Stream(), batch_size=2)
        self.ckpt: Checkpointer = lives.start(run_dir, **settings)
        self.ckpt.track(model=self.model, optimizer=self.optimizer, data=self.loader)
        self.restored = self.ckpt.restore()

    def step(self, **metrics: Any) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.ckpt.step(**metrics)

    def save_and_end(self) -> None:
        """Saved, verified, pruned; then the power is cut."""
        self.ckpt.save()
        self._lives.end()

    def steps(self, count: int, **metrics: Any) -> None:
        for _ in range(count):
            self.step(**metrics)


@pytest.fixture
def start(lives: Lives, tmp_path: Path) -> Callable[..., Job]:
    return lambda **settings: Job(lives, tmp_path / "run", **settings)


def saved(tmp_path: Path) -> list[int]:
    return sorted(restorable_steps(PosixFileSystem(), str(tmp_path / "run")))


# -- what is saved and when ----------------------------------------------------------------------------------------------


def test_first_start_restores_step_0(start: Callable[..., Job]) -> None:
    assert start().restored == 0


def test_every_nth_step_becomes_durable_by_itself(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(every_n_train_steps=2)
    job.steps(2)
    job.ckpt.save()
    assert saved(tmp_path) == [2]


def test_save_returns_when_the_step_is_durable(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start()
    job.steps(3)
    assert job.ckpt.save() == 3
    assert saved(tmp_path) == [3]


def test_close_makes_the_last_step_durable(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start()
    job.steps(3)
    job.ckpt.close()
    assert saved(tmp_path) == [3]


def test_context_that_ends_in_an_error_saves_nothing(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start()
    job.step()
    with pytest.raises(KeyError), job.ckpt:
        raise KeyError
    assert saved(tmp_path) == []


def test_end_of_epochs_makes_the_last_step_durable(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start()
    for _ in job.ckpt.epochs(2):
        for _ in job.loader:
            job.step()
    assert saved(tmp_path) == [12]


def test_end_of_epochs_saves_nothing_where_save_last_is_off(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(save_last=False)
    for _ in job.ckpt.epochs(1):
        for _ in job.loader:
            job.step()
    assert saved(tmp_path) == []


def test_saved_state_is_loaded_by_the_next_start(start: Callable[..., Job]) -> None:
    first = start()
    first.steps(3)
    first.ckpt.save()
    second = start()
    assert second.restored == 3
    assert digest([second.model.state_dict(), second.optimizer.state_dict()]) == digest([first.model.state_dict(), first.optimizer.state_dict()])


def test_steps_after_the_last_save_are_not_in_it(start: Callable[..., Job]) -> None:
    first = start()
    first.steps(3)
    first.ckpt.save()
    before = digest(first.model.state_dict())
    first.step()
    assert digest(start().model.state_dict()) == before


def test_fresh_starts_at_step_0_where_a_checkpoint_exists(start: Callable[..., Job]) -> None:
    job = start()
    job.step()
    job.ckpt.save()
    assert start(fresh=True).restored == 0


def test_best_checkpoints_are_kept_beside_the_last(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(keep_last=1, save_top_k=1, monitor="accuracy", mode="max")
    for accuracy in (0.5, 0.9, 0.7, 0.6):
        job.step(accuracy=accuracy)
        job.ckpt.save()
    job.save_and_end()
    catalog = read_catalog(PosixFileSystem(), str(tmp_path / "run"))
    assert sorted(c.step for c in candidates(catalog)) == [2, 4]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), torch.tensor(float("nan"))], ids=str)
def test_loss_that_is_no_number_stops_no_save(start: Callable[..., Job], tmp_path: Path, loss: Any) -> None:
    job = start()
    job.step(loss=loss)
    job.ckpt.save()
    assert saved(tmp_path) == [1]


def test_monitored_loss_that_is_no_number_stops_no_retention(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(keep_last=1, save_top_k=1, monitor="loss")
    for loss in (0.5, float("nan"), 0.7):
        job.step(loss=loss)
        job.ckpt.save()
    job.save_and_end()
    assert saved(tmp_path) == [1, 3]


def test_rank_says_of_which_steps_it_has_snapshots(start: Callable[..., Job], lives: Lives) -> None:
    job = start(every_n_train_steps=2, snapshot_every_n_steps=2)
    job.steps(5)
    assert lives.rank_says["posted_steps"] == [2, 4]


# -- the end of an epoch ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["micro-batches are left over", "a break", "a stream of unknown length"])
def unposted(request: pytest.FixtureRequest, lives: Lives, tmp_path: Path) -> Callable[[], tuple[Job, Callable[[], list[int]]]]:
    """Starts a job in whose epochs the last step is no snapshot step, and one epoch's inner loop: the batches that it was given."""

    def start() -> tuple[Job, Callable[[], list[int]]]:
        job = Job(lives, tmp_path / "run", snapshot_every_n_steps=100, is_stream="stream" in request.param)

        def inner() -> list[int]:
            given = []
            for number, _ in enumerate(job.loader, 1):
                given.append(number)
                if "left over" not in request.param or number == 4:
                    job.step()
                if "break" in request.param and number == 4:
                    break
            return given

        return job, inner

    return start


def test_an_epoch_before_the_end_is_not_trained_again_when_the_run_is_extended(unposted: Any) -> None:
    job, inner = unposted()
    whole = [(epoch, inner()) for epoch in job.ckpt.epochs(2)]
    steps = job.ckpt.global_step
    job, inner = unposted()
    assert job.restored == steps
    assert [(epoch, inner()) for epoch in job.ckpt.epochs(3)] == [(2, whole[0][1])]


def test_a_save_after_the_inner_loop_is_resumed_after_it(unposted: Any) -> None:
    job, inner = unposted()
    for _ in job.ckpt.epochs(1):
        whole = inner()
        job.ckpt.save()
        break
    job, inner = unposted()
    assert [(epoch, inner()) for epoch in job.ckpt.epochs(2)] == [(0, []), (1, whole)]


def test_close_after_epochs_were_left_is_resumed_after_the_inner_loop(unposted: Any) -> None:
    job, inner = unposted()
    for _ in job.ckpt.epochs(9):
        whole = inner()
        break
    job.ckpt.close()
    job, inner = unposted()
    assert [(epoch, inner()) for epoch in job.ckpt.epochs(2)] == [(0, []), (1, whole)]


def test_epochs_called_again_go_on_with_the_next(start: Callable[..., Job]) -> None:
    job = start(save_last=False)
    assert [list(job.ckpt.epochs(2)), list(job.ckpt.epochs(3))] == [[0, 1], [2]]


# -- order of calls ------------------------------------------------------------------------------------------------------


def test_step_without_an_optimizer_step_is_refused(start: Callable[..., Job]) -> None:
    job = start()
    with pytest.raises(StepOrder, match="at step 1: no tracked optimizer has stepped"):
        job.ckpt.step()


def test_second_step_for_one_optimizer_step_is_refused(start: Callable[..., Job]) -> None:
    job = start()
    job.step()
    with pytest.raises(StepOrder, match="at step 2"):
        job.ckpt.step()


def test_refused_step_is_not_counted(start: Callable[..., Job]) -> None:
    job = start()
    with pytest.raises(StepOrder):
        job.ckpt.step()
    assert job.ckpt.global_step == 0


def test_micro_batches_are_not_counted_as_steps(start: Callable[..., Job]) -> None:
    job = start()
    job.ckpt.step(boundary=False)
    job.ckpt.step(boundary=False)
    assert job.ckpt.global_step == 0


def test_step_that_a_grad_scaler_skipped_is_counted(lives: Lives, tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    ckpt = lives.start(tmp_path / "run")
    ckpt.track(model=model, optimizer=optimizer, scaler=scaler)
    ckpt.restore()
    scaler.scale(model(torch.full((1, 1), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    ckpt.step()
    assert ckpt.global_step == 1


@pytest.mark.parametrize("call", [lambda c: c.step(), lambda c: c.save(), lambda c: next(iter(c.epochs(1)))], ids=["step", "save", "epochs"])
def test_call_before_restore_says_what_to_do(lives: Lives, tmp_path: Path, call: Callable[[Checkpointer], Any]) -> None:
    with pytest.raises(UsageError, match=r"call ckpt\.restore\(\) once"):
        call(lives.start(tmp_path / "run"))


def test_track_after_restore_is_refused(start: Callable[..., Job]) -> None:
    with pytest.raises(UsageError, match=r"call ckpt\.track\(\) before ckpt\.restore\(\)"):
        start().ckpt.track(other=nn.Linear(1, 1))


def test_second_restore_is_refused(start: Callable[..., Job]) -> None:
    with pytest.raises(UsageError, match="already called"):
        start().ckpt.restore()


def test_name_that_is_taken_is_refused(lives: Lives, tmp_path: Path) -> None:
    ckpt = lives.start(tmp_path / "run")
    ckpt.track(model=nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"track\(model=…\): the name is taken"):
        ckpt.track(model=nn.Linear(1, 1))


@pytest.mark.parametrize(
    "settings", [{"every_n_train_steps": 0}, {"keep_last": 0}, {"mode": "best"}, {"save_top_k": 1}], ids=lambda found: next(iter(found))
)
def test_setting_that_makes_no_sense_is_refused(lives: Lives, tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        lives.start(tmp_path / "run", **settings)


def test_more_ranks_than_torch_knows_of_are_refused(lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ckpt = lives.start(tmp_path / "run")
    with pytest.raises(UsageError, match="init_process_group"):
        ckpt.track(model=nn.Linear(1, 1))


def test_state_that_does_not_fit_in_memory_is_refused(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.seam.process.available_memory_bytes", lambda: 1000)
    with pytest.raises(MemoryTooSmall):
        start()


def test_refused_start_changes_nothing_for_the_next_one(start: Callable[..., Job]) -> None:
    first = start()
    first.step()
    first.ckpt.save()
    with pytest.raises(StateMismatch):
        start(model=nn.Sequential(nn.Linear(2, 1)))
    assert start().restored == 1


def test_directory_that_cannot_be_a_run_is_an_error_of_ours(lives: Lives, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    ckpt = lives.start(tmp_path / "run", storage_wait_s=0.1)
    ckpt.track(model=nn.Linear(1, 1))
    with pytest.raises(StorageError, match="Not a directory"):
        ckpt.restore()


# -- nothing is drawn ------------------------------------------------------------------------------------------------------


def test_track_and_restore_of_a_first_start_draw_nothing(lives: Lives, tmp_path: Path) -> None:
    seed_everything()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=2, shuffle=True)
    ckpt = lives.start(tmp_path / "run")
    with draws_nothing():
        ckpt.track(model=model, optimizer=optimizer, data=loader)
        ckpt.restore()


def test_step_save_and_close_draw_nothing(start: Callable[..., Job]) -> None:
    job = start(every_n_train_steps=1)
    job.optimizer.step()
    with draws_nothing():
        job.ckpt.step(loss=1.0)
        job.ckpt.save()
        job.ckpt.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_draws_nothing(start: Callable[..., Job], workers: int) -> None:
    job = start(workers=workers)
    with draws_nothing():
        for _ in job.ckpt.epochs(1):
            for _ in job.loader:
                pass


def test_restore_of_a_checkpoint_leaves_the_saved_generators(start: Callable[..., Job]) -> None:
    seed_everything(5)
    job = start()
    job.step()
    job.ckpt.save()
    before = digest(rng.capture())
    torch.rand(100)
    start()
    assert digest(rng.capture()) == before


# -- provenance ------------------------------------------------------------------------------------------------------------


def meta(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next((tmp_path / "run").glob("step-*/meta.json")).read_text())
    return found


def test_meta_names_everything_that_made_the_run(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(config={"lr": 0.1}, data_version="v3")
    job.step()
    job.save_and_end()
    known = {"experiment", "git_commit", "git_dirty", "start_command", "data_version", "step", "saved_at", "dependencies", "config_hash"}
    assert known <= meta(tmp_path).keys()
    assert (meta(tmp_path)["experiment"], meta(tmp_path)["data_version"], meta(tmp_path)["step"]) == ("run", "v3", 1)


def test_data_version_that_nobody_gave_is_null(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start()
    job.step()
    job.save_and_end()
    assert meta(tmp_path)["data_version"] is None


def test_secret_reaches_no_file_of_the_run(start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-4711-hunter2"
    monkeypatch.setattr("sys.argv", ["train.py", "--api-token", canary, f"--data=s3://user:{canary}@host/x", f"--password={canary}"])
    monkeypatch.setenv("HF_TOKEN", canary)
    job = start(config={"wandb_api_key": canary}, data_version=f"https://{canary}@host/data?token={canary}", experiment=f"exp password={canary}")
    job.step()
    job.save_and_end()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [str(path) for path in files if canary.encode() in path.read_bytes()] == []


def test_same_config_has_the_same_hash_in_any_order(start: Callable[..., Job], tmp_path: Path) -> None:
    hashes = []
    for number, config in enumerate([{"a": 1, "b": [2, 3]}, {"b": [2, 3], "a": 1}, {"a": 1, "b": [3, 2]}]):
        job = start(config=config, fresh=True)
        job.steps(number + 1)
        job.save_and_end()
        newest = max((tmp_path / "run").glob("step-*/meta.json"), key=os.path.getmtime)
        hashes.append(json.loads(newest.read_text())["config_hash"])
    assert hashes[0] == hashes[1] != hashes[2]

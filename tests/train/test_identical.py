"""The acceptance test of resuming: step for step the same weights, learning rate, samples, augmentation, loss and generators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lab import Lives
from recipe import LOADERS, SCHEDULERS, STEPS_AN_EPOCH, Recipe, Rows, train

MID_EPOCH = STEPS_AN_EPOCH + 3
LAST_BATCH = 2 * STEPS_AN_EPOCH
_undisturbed: dict[Recipe, Rows] = {}


def differences(straight: Rows, resumed: Rows) -> list[str]:
    """The first step that came out differently, and in what."""
    for step in sorted(resumed):
        wrong = [name for name, value in resumed[step].items() if straight[step][name] != value and name != "number"]
        if wrong:
            return [f"step {step}: {', '.join(wrong)}"]
    return []


def undisturbed(lives: Lives, root: Path, recipe: Recipe) -> Rows:
    """The same training without a cut; made once for each recipe."""
    if recipe not in _undisturbed:
        _undisturbed[recipe] = train(lives, root / "undisturbed", recipe)
    return _undisturbed[recipe]


def check(lives: Lives, root: Path, recipe: Recipe, *cuts: int) -> None:
    """Training that was cut after these steps is the training that was not."""
    straight = undisturbed(lives, root, recipe)
    made: list[int] = []
    for cut in (*cuts, None):
        rows = train(lives, root / "cut", recipe, until=cut)
        assert differences(straight, rows) == []
        made.extend(rows)
    assert made == list(straight), "every step once, in order"


@pytest.mark.parametrize("loader", [name for name in LOADERS if name != "no batches"])
def test_resume_in_mid_epoch_is_identical_with_loader(lives: Lives, tmp_path: Path, loader: str) -> None:
    check(lives, tmp_path, Recipe(loader=loader), MID_EPOCH)


@pytest.mark.parametrize(
    "loader", ["shuffle", "drawing collate", "unknown sampler", "stream", "stream with a state", "2 workers", "2 persistent workers"]
)
def test_resume_at_an_epochs_last_batch_is_identical_with_loader(lives: Lives, tmp_path: Path, loader: str) -> None:
    check(lives, tmp_path, Recipe(loader=loader), LAST_BATCH)


def test_resume_with_a_loader_that_makes_no_batches_is_identical(lives: Lives, tmp_path: Path) -> None:
    check(lives, tmp_path, Recipe(loader="no batches", epochs=2), 40)


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_resume_is_identical_with_scheduler(lives: Lives, tmp_path: Path, scheduler: str) -> None:
    check(lives, tmp_path, Recipe(scheduler=scheduler), MID_EPOCH)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor])
def test_resume_is_identical_with_optimizer(lives: Lives, tmp_path: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    check(lives, tmp_path, Recipe(optimizer=optimizer, scheduler="cosine"), MID_EPOCH)


@pytest.mark.parametrize("cut", [3, 4, 7])
def test_resume_between_accumulated_steps_is_identical(lives: Lives, tmp_path: Path, cut: int) -> None:
    check(lives, tmp_path, Recipe(accumulate=2), cut)


def test_resume_with_a_grad_scaler_is_identical(lives: Lives, tmp_path: Path) -> None:
    check(lives, tmp_path, Recipe(has_scaler=True), MID_EPOCH)


def test_resume_with_two_optimizers_is_identical(lives: Lives, tmp_path: Path) -> None:
    check(lives, tmp_path, Recipe(has_second_optimizer=True), MID_EPOCH)


def test_resume_with_averaged_weights_is_identical(lives: Lives, tmp_path: Path) -> None:
    check(lives, tmp_path, Recipe(has_average=True), MID_EPOCH)


def test_resume_with_everything_at_once_is_identical(lives: Lives, tmp_path: Path) -> None:
    recipe = Recipe(loader="2 workers", accumulate=2, has_scaler=True, has_second_optimizer=True, has_average=True)
    check(lives, tmp_path, recipe, 5)


@pytest.mark.parametrize("loader", ["shuffle", "2 persistent workers"])
def test_two_cuts_in_a_row_are_identical(lives: Lives, tmp_path: Path, loader: str) -> None:
    check(lives, tmp_path, Recipe(loader=loader), MID_EPOCH, MID_EPOCH + 1)


def test_cut_at_every_step_is_identical(lives: Lives, tmp_path: Path) -> None:
    check(lives, tmp_path, Recipe(epochs=2), *range(1, 2 * STEPS_AN_EPOCH))


def test_cut_after_the_first_step_is_identical(lives: Lives, tmp_path: Path) -> None:
    check(lives, tmp_path, Recipe(), 1)


def test_cut_after_the_last_step_leaves_nothing_to_do(lives: Lives, tmp_path: Path) -> None:
    train(lives, tmp_path / "run", Recipe())
    assert train(lives, tmp_path / "run", Recipe()) == {}


def test_order_and_augmentation_do_not_depend_on_the_number_of_workers(lives: Lives, tmp_path: Path) -> None:
    alone = undisturbed(lives, tmp_path / "alone", Recipe(loader="drawing collate"))
    workers = undisturbed(lives, tmp_path / "workers", Recipe(loader="2 workers"))
    assert differences(alone, workers) == []


def test_epochs_are_shuffled_differently(lives: Lives, tmp_path: Path) -> None:
    rows = undisturbed(lives, tmp_path, Recipe())
    first, second = ([i for s in range(e * STEPS_AN_EPOCH, (e + 1) * STEPS_AN_EPOCH) for i in rows[s + 1]["samples"]] for e in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second


def test_augmentation_of_a_sample_differs_between_epochs(lives: Lives, tmp_path: Path) -> None:
    rows = undisturbed(lives, tmp_path, Recipe(loader="in order"))
    assert rows[1]["samples"] == rows[1 + STEPS_AN_EPOCH]["samples"]
    assert rows[1]["batch"] != rows[1 + STEPS_AN_EPOCH]["batch"]


def test_comparison_finds_a_run_that_forgot_its_generators(lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that cannot fail proves nothing."""
    straight = undisturbed(lives, tmp_path, Recipe())
    train(lives, tmp_path / "cut", Recipe(), until=MID_EPOCH)
    monkeypatch.setattr("ridethrough.train.rng.restore", lambda state: None)
    resumed = train(lives, tmp_path / "cut", Recipe())
    assert differences(straight, resumed) == [f"step {MID_EPOCH + 1}: weights, optimizer, loss, rng"]

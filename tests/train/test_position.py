"""Corners of a loader's position."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

from ridethrough.train import data, rng

KNOWN = 6328302084287303292


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def resumed(make: Any, epoch: int, delivered: int) -> list[list[int]]:
    loader = make()
    position = data.make_resumable(loader, seed=3)
    position.load_state_dict({"seed": position.seed, "epoch": epoch, "batches": delivered, "samples": 0, "is_open": True})
    return batches(loader)


def straight(make: Any, epochs: int) -> list[list[list[int]]]:
    loader = make()
    data.make_resumable(loader, seed=3)
    return [batches(loader) for _ in range(epochs)]


class Drawing(BatchSampler):
    """Shuffles the batches with the global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        found = list(super().__iter__())
        random.shuffle(found)
        return iter(found)


def own_generator() -> DataLoader[Any]:
    return DataLoader(range(10), batch_size=2, sampler=SubsetRandomSampler(range(10), generator=torch.Generator().manual_seed(9)))  # type: ignore[arg-type]


def drawing_batches() -> DataLoader[Any]:
    return DataLoader(range(10), batch_sampler=Drawing(RandomSampler(range(10)), 2, drop_last=False))  # type: ignore[arg-type]


def test_a_sampler_with_a_generator_of_its_own_goes_on_in_the_middle_of_an_epoch() -> None:
    assert resumed(own_generator, 1, 2) == straight(own_generator, 2)[1][2:]


def test_a_batch_sampler_that_draws_globally_goes_on_in_the_middle_of_an_epoch() -> None:
    assert resumed(drawing_batches, 1, 2) == straight(drawing_batches, 2)[1][2:]


def test_a_batch_sampler_that_draws_globally_takes_nothing_from_the_training() -> None:
    loader = drawing_batches()
    data.make_resumable(loader, seed=3)
    before = random.getstate()
    batches(loader)
    assert random.getstate() == before


def test_a_look_at_the_first_batch_after_a_resume_changes_nothing() -> None:
    loader = own_generator()
    position = data.make_resumable(loader, seed=3)
    position.load_state_dict({"seed": position.seed, "epoch": 1, "batches": 2, "samples": 4, "is_open": True})
    first = next(iter(loader)).tolist()
    position.start_epoch(1)
    assert batches(loader) == straight(own_generator, 2)[1][2:]
    assert first == straight(own_generator, 2)[1][2]


def test_the_epoch_after_a_resumed_one_is_the_next() -> None:
    loader = own_generator()
    position = data.make_resumable(loader, seed=3)
    position.load_state_dict({"seed": position.seed, "epoch": 0, "batches": 5, "samples": 10, "is_open": True})
    assert batches(loader) == []
    assert batches(loader) == straight(own_generator, 2)[1]


def test_a_loader_without_steps_is_not_the_one_of_the_training_loop() -> None:
    train, validation = own_generator(), own_generator()
    inner, outer = data.make_resumable(validation, seed=1), data.make_resumable(train, seed=1)
    for _ in train:
        outer.confirm()
        inner.confirm()
        assert outer.is_stepped
        assert not inner.is_stepped
    for _ in validation:
        assert not inner.is_stepped
        assert not outer.is_stepped


def test_a_validation_loader_goes_on_with_its_next_epoch_after_a_resume_in_the_middle_of_the_training_epoch() -> None:
    def life(validations: int, state: dict[str, Any] | None) -> tuple[list[list[list[int]]], dict[str, Any]]:
        loader = own_generator()
        position = data.make_resumable(loader, seed=1)
        if state is not None:
            position.load_state_dict(state)
        return [batches(loader) for _ in range(validations)], position.state_dict()

    whole, _ = life(3, None)
    first, state = life(2, None)
    rest, _ = life(1, state)
    assert [*first, *rest] == whole


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Counter(Stream):
    """Knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=2)


def counter() -> DataLoader[Any]:
    return DataLoader(Counter(), batch_size=2)


def trained(make: Any, *, steps: int | None) -> tuple[DataLoader[Any], data.Position]:
    """A loader whose loop was left after so many steps; after all unless given."""
    loader = make()
    position = data.make_resumable(loader, seed=3)
    for number, _ in enumerate(loader, 1):
        position.confirm()
        if number == steps:
            break
    return loader, position


@pytest.mark.parametrize("steps", [3, None])
@pytest.mark.parametrize("make", [own_generator, stream, counter])
def test_an_epoch_whose_training_loop_has_ended_has_no_batch_left_after_a_resume(make: Any, steps: int | None) -> None:
    loader, left = trained(make, steps=steps)
    fresh = make()
    position = data.make_resumable(fresh, seed=3)
    position.load_state_dict(left.state_dict())
    if make is counter:
        fresh.dataset.at = loader.dataset.at  # type: ignore[attr-defined]
    position.start_epoch(0)
    assert batches(fresh) == []
    assert position.state_dict() == left.state_dict()
    position.start_epoch(1)
    left.start_epoch(1)
    assert batches(fresh) == batches(loader) != []


def test_the_loop_of_a_validation_loader_runs_again_after_a_resume() -> None:
    loader = own_generator()
    position = data.make_resumable(loader, seed=3)
    whole = batches(loader)
    fresh = own_generator()
    again = data.make_resumable(fresh, seed=3)
    again.load_state_dict(position.state_dict())
    again.start_epoch(0)
    assert batches(fresh) == whole


def test_an_iterator_that_is_held_beyond_its_epoch_does_not_end_the_next() -> None:
    loader = own_generator()
    position = data.make_resumable(loader, seed=3)
    held = iter(loader)
    next(held)
    position.confirm()
    position.start_epoch(1)
    del held
    assert batches(loader) == straight(own_generator, 2)[1]


def test_a_second_pass_in_the_same_epoch_leaves_the_next_epoch_whole() -> None:
    loader, position = trained(own_generator, steps=None)
    for _ in loader:
        position.confirm()
    position.start_epoch(1)
    assert batches(loader) == straight(own_generator, 2)[1]


def test_text_keys_have_the_same_seed_in_every_process() -> None:
    # A fixed number: hash() would give another one in each process.
    assert data._as_int("image-0001.png") == KNOWN
    assert rng.mix(1, data._as_int("a")) != rng.mix(1, data._as_int("b"))

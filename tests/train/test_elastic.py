"""What another number of ranks takes from a checkpoint, and what it refuses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lab import digest
from parts import Holder, load
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from ridethrough.errors import StateMismatch
from ridethrough.train import rng, state

SAMPLES, BATCH = 24, 2


def tracked(rank: int, ranks: int, *, is_replicated: bool = True, **more: Any) -> list[state.Tracked]:
    """What the script of one rank tracks, its model as under DDP."""
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    sampler: DistributedSampler[Any] = DistributedSampler(range(SAMPLES), num_replicas=ranks, rank=rank)  # type: ignore[arg-type]
    objects = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "data": DataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler),  # type: ignore[arg-type]
        "meter": Holder(rank),
        **more,
    }
    items = [state.classify(name, value, world_size=ranks, seed=1000 + rank) for name, value in objects.items() if value is not None]
    for item in items:
        if item.name == "model":
            item.is_replicated = is_replicated
    state.mark_replicated(items, world_size=ranks)
    return items


def by_name(items: list[state.Tracked]) -> dict[str, Any]:
    return {item.name: item.value for item in items}


def train(items: list[state.Tracked], ranks: int, steps: int) -> list[Any]:
    """Some batches; every rank makes the same steps, so that the common state is common."""
    objects = by_name(items)
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    objects["model"].load_state_dict(made.state_dict())
    iterator = iter(objects["data"])
    for _ in range(steps):
        next(iterator)
        objects["model"](torch.ones(4, 2)).sum().backward()
        objects["optimizer"].step()
        objects["scheduler"].step()
    return [iterator]


def save(items: list[state.Tracked], rank: int, ranks: int) -> list[state.LoadedPart]:
    context = state.Context(
        rank=rank, local_rank=rank, world_size=ranks, node="n", step=7, epoch=0, loss=None, metrics={}, config_hash=None, start_command="",
        structure=state.structure(items),
    )  # fmt: skip
    return load(state.capture(items, context))


@pytest.fixture
def saved() -> list[list[state.LoadedPart]]:
    """What 3 ranks have left after 2 steps, by rank."""
    found = []
    for rank in range(3):
        items = tracked(rank, 3)
        alive = train(items, 3, 2)
        torch.manual_seed(500 + rank)
        found.append(save(items, rank, 3))
        del alive
    return found


def take(saved: list[list[state.LoadedPart]], rank: int, ranks: int, items: list[state.Tracked]) -> dict[str, Any]:
    seals = [part.seal for parts in saved for part in parts]
    return state.apply(items, saved[rank % len(saved)], rank=rank, world_size=ranks, seals=seals)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_every_rank_has_the_common_state(saved: list[list[state.LoadedPart]], ranks: int) -> None:
    original = tracked(0, 3)
    train(original, 3, 2)
    for rank in range(ranks):
        items = tracked(rank, ranks)
        take(saved, rank, ranks, items)
        for name in ("model", "optimizer", "scheduler"):
            assert digest(by_name(items)[name].state_dict()) == digest(by_name(original)[name].state_dict())


def test_private_objects_are_those_of_the_rank_modulo_their_number(saved: list[list[state.LoadedPart]]) -> None:
    meters = []
    for rank in range(5):
        items = tracked(rank, 5)
        take(saved, rank, 5, items)
        meters.append(by_name(items)["meter"].value)
    assert meters == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_what_is_left_of_the_epoch_is_dealt_to_the_new_ranks(saved: list[list[state.LoadedPart]], ranks: int) -> None:
    order = list(DistributedSampler(range(SAMPLES), num_replicas=1, rank=0))  # type: ignore[arg-type,var-annotated]
    left = []
    for rank in range(ranks):
        items = tracked(rank, ranks)
        take(saved, rank, ranks, items)
        left += [index for batch in by_name(items)["data"] for index in batch.tolist()]
    consumed = 3 * 2 * BATCH
    assert sorted(set(left)) == sorted(order[consumed:])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_that_was_over_at_the_saved_step_stays_over(ranks: int) -> None:
    def loader(rank: int, ranks: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(range(SAMPLES), num_replicas=ranks, rank=rank)  # type: ignore[arg-type]
        return DataLoader(range(SAMPLES), batch_size=5, sampler=sampler, drop_last=True)  # type: ignore[arg-type]

    saved = []
    for rank in range(3):
        items = tracked(rank, 3, data=loader(rank, 3))
        alive = train(items, 3, 1)
        saved.append(save(items, rank, 3))
        del alive
    for rank in range(ranks):
        items = tracked(rank, ranks, data=loader(rank, ranks))
        take(saved, rank, ranks, items)
        assert list(by_name(items)["data"]) == []


def test_the_same_number_of_ranks_goes_on_as_before(saved: list[list[state.LoadedPart]]) -> None:
    for rank in range(3):
        items = tracked(rank, 3)
        take(saved, rank, 3, items)
        assert by_name(items)["data"].ridethrough_position.delivered == 2


def test_a_rank_that_is_not_the_source_of_its_part_is_refused(saved: list[list[state.LoadedPart]]) -> None:
    with pytest.raises(StateMismatch, match="rank 1 of 3 there, rank 2 of 4 here"):
        state.apply(tracked(2, 4), saved[1], rank=2, world_size=4)


def test_a_model_of_each_ranks_own_is_refused_by_name() -> None:
    items = tracked(0, 2, is_replicated=False)
    alive = train(items, 2, 1)
    parts = save(items, 0, 2)
    del alive
    with pytest.raises(StateMismatch, match="does not fit model: each of 2 ranks had its own, not under DDP: 3 ranks"):
        state.apply(tracked(0, 3, is_replicated=False), parts, rank=0, world_size=3)


def test_a_second_model_outside_of_ddp_is_refused_by_name() -> None:
    items = tracked(0, 2, average=nn.Linear(1, 1))
    alive = train(items, 2, 1)
    parts = save(items, 0, 2)
    del alive
    with pytest.raises(StateMismatch, match="does not fit average"):
        state.apply(tracked(0, 1, average=nn.Linear(1, 1)), parts, rank=0, world_size=1)


def test_a_module_without_parameters_is_nobodys_own() -> None:
    items = tracked(0, 2, criterion=nn.MSELoss())
    alive = train(items, 2, 1)
    parts = save(items, 0, 2)
    del alive
    state.apply(tracked(0, 1, criterion=nn.MSELoss()), parts, rank=0, world_size=1)


def moved(loader: Any, *, steps: int) -> dict[str, Any]:
    """A loader goes from 2 ranks to 3 after some steps."""
    items = tracked(0, 2, data=loader())
    alive = iter(by_name(items)["data"])
    for _ in range(steps):
        next(alive)
    parts = save(items, 0, 2)
    return state.apply(tracked(0, 3, data=loader()), parts, rank=0, world_size=3, seals=[part.seal for part in parts])


def test_another_sampler_in_the_middle_of_an_epoch_is_refused_by_name() -> None:
    items: Any = range(SAMPLES)
    with pytest.raises(StateMismatch, match="does not fit data: it was in the middle of an epoch, and what RandomSampler gives"):
        moved(lambda: DataLoader(items, batch_size=2, sampler=RandomSampler(items)), steps=1)


def test_another_sampler_before_its_first_batch_goes_on() -> None:
    items: Any = range(SAMPLES)
    assert moved(lambda: DataLoader(items, batch_size=2, sampler=RandomSampler(items)), steps=0)["progress"]["step"] == 7


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(SAMPLES))


class KnowsItsPlace(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Stream, "what Stream gives to each rank cannot be dealt anew"), (KnowsItsPlace, "KnowsItsPlace says by itself where each rank was")],
)
def test_a_stream_is_refused(kind: type[Stream], why: str) -> None:
    with pytest.raises(StateMismatch, match=why):
        moved(lambda: DataLoader(kind(), batch_size=2), steps=1)


def test_a_loader_with_a_state_of_its_own_is_refused() -> None:
    class Own(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"at": 0}

        def load_state_dict(self, found: dict[str, Any]) -> None:
            pass

    items: Any = range(SAMPLES)
    with pytest.raises(StateMismatch, match="does not fit data: Own says by itself where each of 2 ranks was"):
        moved(lambda: Own(items, batch_size=2), steps=0)


def test_ranks_that_were_at_different_places_are_refused(saved: list[list[state.LoadedPart]]) -> None:
    items = tracked(1, 3)
    alive = train(items, 3, 1)
    mixed = [saved[0], save(items, 1, 3), saved[2]]
    del alive
    with pytest.raises(StateMismatch, match="does not fit data: the ranks were at different places of the epoch"):
        take(mixed, 0, 2, tracked(0, 2))


def test_a_position_of_an_earlier_version_goes_on_with_the_same_ranks() -> None:
    items = tracked(0, 2)
    alive = train(items, 2, 2)
    parts = save(items, 0, 2)
    del alive
    del parts[-1].seal.tree["objects"]["data"]["dealt"]
    fresh = tracked(0, 2)
    state.apply(fresh, parts, rank=0, world_size=2)
    assert by_name(fresh)["data"].ridethrough_position.delivered == 2


# -- random generators -----------------------------------------------------------------------------------------------------


def drawn() -> list[Any]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def test_a_new_rank_draws_the_same_numbers_at_each_try_and_not_those_of_its_source() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    source = rng.capture()
    rng.restore(source)
    theirs = drawn()
    found = []
    for rank in (4, 4, 5):
        rng.restore(source)
        rng.branch(rank)
        found.append(drawn())
    assert found[0] == found[1]
    assert not set(found[0]) & set(theirs)
    assert not set(found[0]) & set(found[2])


def test_generators_of_a_gpu_go_to_the_gpu_that_the_process_uses_now() -> None:
    state_of = {"torch": 0, "cuda": ["g0", "g1"]}
    assert rng.moved(state_of, 1, 0)["cuda"] == ["g1", "g1"]
    assert rng.moved(state_of, 0, 3)["cuda"] == ["g0", "g1", "g0", "g0"]
    assert rng.moved(state_of, 1, 1) is state_of
    assert rng.moved({"torch": 0}, 1, 0) == {"torch": 0}
    assert rng.moved({"cuda": ["own"]}, 5, 2) == {"cuda": ["own"]}

"""The order of an epoch, dealt to changing numbers of ranks: every sample exactly once."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from ridethrough.train import data, deal

WORLDS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6)
"""How many ranks make how many steps, one after the other."""


def sampler(count: int, ranks: int, rank: int, *, drop_last: bool = False, epoch: int = 0, shuffle: bool = True) -> DistributedSampler[Any]:
    made: DistributedSampler[Any] = DistributedSampler(range(count), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=3, drop_last=drop_last)  # type: ignore[arg-type]
    made.set_epoch(epoch)
    return made


def in_order(shares: list[list[int]]) -> list[int]:
    """What the ranks have consumed together, in the order in which it was dealt."""
    return [index for row in zip(*shares, strict=True) for index in row]


@given(count=st.integers(1, 40), ranks=st.integers(1, 9), epoch=st.integers(0, 3), drop_last=st.booleans(), shuffle=st.booleans())
@settings(deadline=None)
def test_a_whole_epoch_is_dealt_as_torch_deals_it(count: int, ranks: int, epoch: int, drop_last: bool, shuffle: bool) -> None:
    for rank in range(ranks):
        theirs = sampler(count, ranks, rank, drop_last=drop_last, epoch=epoch, shuffle=shuffle)
        mine, count = deal.share(theirs, 0)
        assert list(mine) == list(theirs)
        assert count == len(theirs)


@given(count=st.integers(1, 40), ranks=st.integers(1, 4), batch=st.integers(1, 7), drop_last=st.booleans())
@settings(deadline=None)
def test_batches_are_those_of_torch(count: int, ranks: int, batch: int, drop_last: bool) -> None:
    theirs = BatchSampler(sampler(count, ranks, 0), batch, drop_last)
    mine, count = deal.share(theirs, 0)
    assert list(mine) == list(theirs)
    assert count == len(theirs)


@given(count=st.integers(1, 60), consumed=st.integers(0, 60), ranks=st.integers(1, 9))
def test_shares_of_what_is_left_are_what_is_left(count: int, consumed: int, ranks: int) -> None:
    order = list(range(count))
    shares = [deal.deal(order, consumed, ranks, rank, drop_last=False) for rank in range(ranks)]
    together = in_order(shares)
    left = order[consumed:]
    assert together[: len(left)] == left
    assert len(together) - len(left) < ranks, "only the last round is filled"
    assert not left or set(together) <= set(order)


@given(count=st.integers(1, 60), consumed=st.integers(0, 60), ranks=st.integers(1, 9))
def test_what_does_not_go_round_is_left_out_where_the_sampler_says_so(count: int, consumed: int, ranks: int) -> None:
    order = list(range(count))
    together = in_order([deal.deal(order, consumed, ranks, rank, drop_last=True) for rank in range(ranks)])
    assert together == order[consumed : consumed + len(together)]
    assert count - consumed - len(together) < ranks or consumed >= count


# -- whole lives of loaders ------------------------------------------------------------------------------------------------


class Job:
    """The loaders of all ranks of one start."""

    def __init__(
        self,
        count: int,
        ranks: int,
        batch: int | None,
        left: list[dict[str, Any]] | None,
        *,
        drop_last: bool = False,
        drop_last_batch: bool = False,
    ) -> None:
        self.loaders: list[DataLoader[Any]] = []
        for rank in range(ranks):
            own = sampler(count, ranks, rank, drop_last=drop_last)
            loader: DataLoader[Any] = DataLoader(range(count), batch_size=batch, sampler=own, drop_last=drop_last_batch)  # type: ignore[arg-type]
            position = data.make_resumable(loader, seed=1)
            if left is not None:
                state = left[rank % len(left)]
                if len(left) == ranks:
                    position.load_state_dict(state)
                else:
                    assert data.take_over(loader, position, state, keeps_seed=rank >= len(left)) is None
            self.loaders.append(loader)
        self.states = left or []
        """At the last step; before the first one, where this start came from."""

    def train(self, steps: int | None) -> list[int]:
        """What the ranks consume in so many steps, in the order in which it was dealt; all that is left if None."""
        iterators = [iter(loader) for loader in self.loaders]
        consumed: list[int] = []
        made = 0
        while steps is None or made < steps:
            batches = [next(iterator, None) for iterator in iterators]
            assert len({batch is None for batch in batches}) == 1, "ranks come to the end of an epoch together"
            if batches[0] is None:
                break
            made += 1
            lists = [batch.tolist() if hasattr(batch, "tolist") else [batch] for batch in batches]  # type: ignore[union-attr]
            consumed += in_order(lists) if len({len(found) for found in lists}) == 1 else list(chain(*lists))
            for loader in self.loaders:
                loader.ridethrough_position.confirm()  # type: ignore[attr-defined]
            # As a snapshot does: at the step, not after the loop.
            self.states = [loader.ridethrough_position.state_dict() for loader in self.loaders]  # type: ignore[attr-defined]
        return consumed


def life(count: int, batch: int | None, worlds: list[tuple[int, int]], *, drop_last: bool = False) -> tuple[list[int], int]:
    """Everything that is consumed in one epoch, and the number of ranks at its end."""
    left: list[dict[str, Any]] | None = None
    consumed: list[int] = []
    for ranks, steps in worlds:
        job = Job(count, ranks, batch, left, drop_last=drop_last)
        consumed += job.train(steps)
        left = job.states or None
    last = worlds[-1][0]
    return consumed + Job(count, last, batch, left, drop_last=drop_last).train(None), last


@given(rounds=st.integers(1, 6), batch=st.integers(1, 4), worlds=WORLDS)
@settings(deadline=None, max_examples=60)
def test_every_sample_is_consumed_exactly_once_where_the_numbers_divide(rounds: int, batch: int, worlds: list[tuple[int, int]]) -> None:
    count = rounds * batch * 60  # of 1, 2, 3, 4 and 5 ranks
    consumed, _ = life(count, batch * 60, [(ranks, steps) for ranks, steps in worlds if 60 % ranks == 0])
    assert sorted(consumed) == list(range(count))


@given(count=st.integers(1, 50), batch=st.integers(1, 5), worlds=WORLDS)
@settings(deadline=None, max_examples=150)
def test_no_sample_is_lost_and_only_the_last_round_repeats_any(count: int, batch: int, worlds: list[tuple[int, int]]) -> None:
    consumed, _ = life(count, batch, worlds)
    assert set(consumed) == set(range(count))
    # Each dealing may fill its own last round, and only one that came to the end of the epoch has one.
    assert len(consumed) - count < max(ranks for ranks, _ in worlds)


@given(count=st.integers(1, 50), batch=st.integers(1, 5), worlds=WORLDS)
@settings(deadline=None, max_examples=60)
def test_no_sample_is_repeated_where_the_last_round_is_dropped(count: int, batch: int, worlds: list[tuple[int, int]]) -> None:
    consumed, _ = life(count, batch, worlds, drop_last=True)
    assert len(set(consumed)) == len(consumed)
    # Of the ranks that came to the end of the epoch, which need not be the last ones.
    assert count - len(consumed) < max(ranks for ranks, _ in worlds)


@given(count=st.integers(1, 30), worlds=WORLDS)
@settings(deadline=None, max_examples=40)
def test_a_loader_without_batches_is_dealt_the_same_way(count: int, worlds: list[tuple[int, int]]) -> None:
    consumed, _ = life(count, None, worlds)
    assert set(consumed) == set(range(count))
    assert len(consumed) - count < max(ranks for ranks, _ in worlds)


def test_the_order_is_that_of_the_run_whose_ranks_never_changed() -> None:
    straight = Job(24, 1, 4, None).train(None)
    changed, _ = life(24, 2, [(2, 2), (4, 1), (1, 3)])
    assert changed == straight


def test_the_epoch_after_a_changed_one_is_whole() -> None:
    first = Job(12, 2, 2, None)
    first.train(1)
    second = Job(12, 3, 2, first.states)
    second.train(None)
    assert sorted(second.train(None)) == list(range(12))


def test_a_second_resume_with_the_same_ranks_goes_on_in_the_changed_epoch() -> None:
    first = Job(26, 2, 2, None)
    done = first.train(2)
    second = Job(26, 3, 2, first.states)
    done += second.train(1)
    third = Job(26, 3, 2, second.states)
    done += third.train(1)
    done += Job(26, 3, 2, third.states).train(None)
    assert sorted(done) == list(range(26))


def test_the_end_of_a_changed_epoch_is_known_at_its_last_batch() -> None:
    first = Job(12, 2, 2, None)
    first.train(1)
    [loader, *_] = Job(12, 4, 2, first.states).loaders
    ends = []
    for _ in loader:
        ends.append(data.is_exhausted(loader, loader.ridethrough_position))  # type: ignore[attr-defined]
    assert ends == [True]


def test_an_epoch_that_was_over_has_no_batch_left_for_other_ranks() -> None:
    first = Job(12, 2, 2, None)
    first.train(3)
    assert Job(12, 3, 2, first.states).train(None) == []


DROPPING: dict[str, tuple[int, int, dict[str, bool]]] = {
    "by the sampler": (10, 1, {"drop_last": True}),
    "by the loader": (120, 8, {"drop_last_batch": True}),
}


@pytest.mark.parametrize("how", DROPPING)
def test_what_was_dropped_at_the_end_of_an_epoch_stays_dropped_for_fewer_ranks(how: str) -> None:
    count, batch, drops = DROPPING[how]
    first = Job(count, 4, batch, None, **drops)
    dropped = count - len(first.train(None))
    assert dropped >= 2 * batch, "enough for a step of fewer ranks"
    second = Job(count, 2, batch, first.states, **drops)
    assert second.train(None) == []
    assert len(second.train(None)) > dropped, "the next epoch is whole"


def test_the_end_of_an_epoch_that_an_earlier_version_saved_is_loaded() -> None:
    """It does not say that the epoch was over: what was dropped is dealt."""
    first = Job(10, 4, 1, None, drop_last=True)
    first.train(None)
    old = [{name: value for name, value in state.items() if name != "is_over"} for state in first.states]
    assert len(Job(10, 2, 1, old, drop_last=True).train(None)) == 2
    assert Job(10, 4, 1, old, drop_last=True).train(None) == []


def test_a_changed_batch_size_loses_no_sample_when_the_ranks_change_too() -> None:
    first = Job(24, 4, 2, None)
    done = first.train(1)
    done += Job(24, 2, 4, first.states).train(None)
    assert sorted(done) == list(range(24))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_deal_the_same(workers: int) -> None:
    first = Job(24, 2, 3, None)
    done = first.train(2)
    for rank in range(3):
        loader: DataLoader[Any] = DataLoader(range(24), batch_size=2, sampler=sampler(24, 3, rank), num_workers=workers)  # type: ignore[arg-type]
        position = data.make_resumable(loader, seed=1)
        data.take_over(loader, position, first.states[rank % 2], keeps_seed=False)
        done += [index for batch in loader for index in batch.tolist()]
    assert sorted(done) == list(range(24))


# -- what cannot be dealt --------------------------------------------------------------------------------------------------


class Sorted(BatchSampler):
    """Somebody else's batches: what all ranks have consumed is no beginning of anything."""


def loaders() -> dict[str, DataLoader[Any]]:
    items: Any = range(12)
    return {
        "random": DataLoader(items, batch_size=2, sampler=RandomSampler(items)),
        "in order": DataLoader(items, batch_size=2),
        "subset": DataLoader(items, batch_size=2, sampler=SubsetRandomSampler(items)),
        "own batches": DataLoader(items, batch_sampler=Sorted(sampler(12, 2, 0), 2, drop_last=False)),
    }


@pytest.mark.parametrize("kind", loaders())
def test_the_middle_of_an_epoch_that_nobody_can_deal_is_refused(kind: str) -> None:
    loader = loaders()[kind]
    position = data.make_resumable(loader, seed=1)
    iterator = iter(loader)
    next(iterator)
    state = position.state_dict()
    fresh = loaders()[kind]
    why = data.take_over(fresh, data.make_resumable(fresh, seed=1), state, keeps_seed=False)
    assert why is not None
    assert "cannot be dealt anew" in why


@pytest.mark.parametrize("kind", loaders())
def test_between_epochs_any_loader_goes_on(kind: str) -> None:
    loader = loaders()[kind]
    position = data.make_resumable(loader, seed=1)
    list(loader)
    fresh = loaders()[kind]
    taken = data.make_resumable(fresh, seed=1)
    assert data.take_over(fresh, taken, position.state_dict(), keeps_seed=False) is None
    assert [batch.tolist() for batch in fresh] == [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", loaders())
def test_an_epoch_that_a_break_has_left_is_over_for_other_ranks(kind: str) -> None:
    loader = loaders()[kind]
    position = data.make_resumable(loader, seed=1)
    for _ in loader:
        position.confirm()
        break
    fresh = loaders()[kind]
    taken = data.make_resumable(fresh, seed=1)
    assert data.take_over(fresh, taken, position.state_dict(), keeps_seed=False) is None
    taken.start_epoch(0)
    assert list(fresh) == []
    assert [batch.tolist() for batch in fresh] == [batch.tolist() for batch in loader]


def test_the_middle_of_an_epoch_of_an_earlier_version_is_refused() -> None:
    """Its position does not say how many samples all ranks had."""
    loader: DataLoader[Any] = DataLoader(range(12), batch_size=2, sampler=sampler(12, 3, 0))  # type: ignore[arg-type]
    position = data.make_resumable(loader, seed=1)
    state = {"seed": 1, "epoch": 0, "batches": 2, "samples": 4, "is_open": True}
    assert data.take_over(loader, position, state, keeps_seed=False) is not None


def test_a_new_rank_keeps_the_seed_that_its_script_gave_it() -> None:
    first = Job(12, 2, 2, None)
    first.train(1)
    loader: DataLoader[Any] = DataLoader(range(12), batch_size=2, sampler=sampler(12, 3, 2))  # type: ignore[arg-type]
    position = data.make_resumable(loader, seed=77)
    data.take_over(loader, position, {**first.states[0], "seed": 5}, keeps_seed=True)
    assert position.seed == 77

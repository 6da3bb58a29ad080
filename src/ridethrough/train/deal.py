"""How the order of an epoch is dealt to the ranks, from any place in it. Draws from nothing but the sampler's own seed.

torch deals in turn: the first sample to rank 0, the next to rank 1, and so on. So whatever number
of batches all ranks have consumed, together it is the beginning of the order, and what is left can
be dealt to another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler


def dealing_sampler(sampler: Any) -> DistributedSampler[Any] | None:
    """The `DistributedSampler` that alone decides the order, in single indices or in plain batches of them; None otherwise."""
    source = sampler.sampler if type(sampler) is BatchSampler else sampler
    return source if type(source) is DistributedSampler else None


def whole_order(sampler: DistributedSampler[Any]) -> list[int]:
    """The order of the sampler's epoch before it is dealt."""
    one: DistributedSampler[Any] = DistributedSampler(sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed)
    one.set_epoch(sampler.epoch)
    return list(one)


def deal(order: list[int], consumed: int, ranks: int, rank: int, *, drop_last: bool) -> list[int]:
    """The share of a rank in what is left of an order, dealt as torch deals a whole one.

    Args:
        order: All of the epoch.
        consumed: Samples at its beginning that are used up.
        ranks: To whom it is dealt.
        rank: Whose share.
        drop_last: What does not go round is left out; otherwise samples of the beginning fill the last round.
    """
    left = order[consumed:] if consumed else order
    over = len(left) % ranks
    if over and drop_last:
        left = left[: len(left) - over]
    elif over:
        filling = order * -(-ranks // len(order))
        left = left + filling[: ranks - over]
    return left[rank::ranks]


def share(sampler: Any, consumed: int) -> tuple[Iterator[Any], int]:
    """What this rank gets of the epoch from there on, and how many: batches of indices if the sampler makes batches, else indices."""
    dealing = dealing_sampler(sampler)
    assert dealing is not None
    mine = deal(whole_order(dealing), consumed, dealing.num_replicas, dealing.rank, drop_last=dealing.drop_last)
    if sampler is dealing:
        return iter(mine), len(mine)
    size = sampler.batch_size
    count = len(mine) // size if sampler.drop_last else -(-len(mine) // size)
    return (mine[at : at + size] for at in range(0, count * size, size)), count

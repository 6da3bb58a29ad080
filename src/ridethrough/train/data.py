"""A DataLoader that goes on exactly where it was, whatever drew random numbers in it.

`make_resumable` changes a plain loader in place:

1. The order of an epoch depends on (seed, epoch) alone: the loader and its sampler get private
   generators, so iterating draws nothing from the training's random numbers.
2. Each sample is fetched under a seed of (seed, epoch, index), each collated batch under one of
   (seed, epoch, batch), with the generators put back afterwards. So augmentation is the same in
   0 and in 8 workers, and after a resume in the middle of an epoch.
3. The position counts batches *delivered* to the training loop, not batches prefetched. Resuming
   skips that many batches of indices, without loading their samples.
4. The order of a `DistributedSampler` is dealt to the ranks by `deal`. With another number of ranks
   what is left of it is dealt anew: no sample is lost or repeated, however often that happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from ridethrough.train import deal, rng
from ridethrough.types import Presence

_ORDER, _WORKERS, _COLLATE = 1, 2, 3


class Position:
    """Where a loader is: seed, epoch, batches and samples delivered in it. Picklable state only."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.delivered = 0
        self.samples = 0
        """Delivered to this rank since the epoch was last dealt."""
        self.dealt_from = 0
        """Samples of the epoch's order that were consumed, over all ranks, before it was last dealt."""
        self.dealt_to = 0
        """Ranks among whom it is dealt; 0 where the sampler is none that deals."""
        self.lengths: deque[int] = deque()
        """Of the dealt batches whose indices were given out and that are not delivered yet."""
        self.total: int | None = None
        """Batches of this rank in what was dealt; None if nothing was. The loader's length is that of a whole epoch."""
        self.is_pending = True
        """The next iteration starts exactly here; otherwise it starts the next epoch."""
        self.is_over = False
        """The training loop has left this epoch: a resume has no batch of it."""
        self.is_iterating = False
        self.is_stepped = False
        """Steps were made while this loader was iterated: it is the one of the training loop."""
        self._loaded: tuple[int, int, int, int] | None = None
        self.on_start: Callable[[], None] | None = None
        """Called when the iterators exist and before the first batch: the last moment to set random generators."""
        self.on_end: Callable[[bool], None] | None = None
        """Called when an iteration is over; told whether it came to its end."""

    def begin(self) -> None:
        """An iteration starts."""
        if self._loaded is not None:
            # Nothing was trained since the checkpoint was loaded: a look at the first batch changes nothing.
            self.epoch, self.delivered, self.samples, self.dealt_from = self._loaded
        elif not self.is_pending:
            self.start_epoch(self.epoch + 1)
        self.lengths.clear()
        self.is_pending = False
        self.is_iterating = True

    def start_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from where it was if a checkpoint says so, else from its beginning."""
        if self._loaded is not None and epoch == self._loaded[0]:
            return
        if epoch != self.epoch or not self.is_pending:
            self.epoch, self.delivered, self.samples, self.dealt_from = epoch, 0, 0, 0
            self.is_over = False
        self._loaded = None
        self.is_pending = True

    def confirm(self) -> None:
        """A step was made: from now on the position is where this process has come to."""
        self._loaded = None
        self.is_stepped = self.is_iterating

    def end(self, *, is_exhausted: bool) -> None:
        """The iteration is over."""
        # A validation loop runs again when its epoch is resumed. Where the next epoch was already started, an iterator that
        # was held too long ends: that says nothing of the next epoch.
        if self.is_stepped and not self.is_pending:
            self.is_over = True
        self.is_iterating = self.is_stepped = False
        if is_exhausted:
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches delivered so far."""
        # At the last batch of what was dealt as well: what was dropped there must not be dealt to fewer ranks.
        is_over = self.is_over or (self.is_iterating and self.total is not None and self.delivered >= self.total)
        state: dict[str, Any] = {
            "seed": self.seed,
            "epoch": self.epoch,
            "batches": self.delivered,
            "samples": self.samples,
            "is_open": self.is_iterating or self.is_pending or is_over,
            "is_over": is_over,
        }
        return {**state, "dealt": [self.dealt_from, self.dealt_to]} if self.dealt_to else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from there; where an epoch was over (a validation loader's, say), with the next one."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        self.delivered, self.samples = state["batches"], state["samples"]
        self.dealt_from = int(state.get("dealt", (0,))[0])
        self.is_pending = bool(state["is_open"])
        self.is_over = bool(state.get("is_over", False))  # an earlier version does not say
        self._loaded = (self.epoch, self.delivered, self.samples, self.dealt_from) if self.is_pending else None

    def deliver(self, batch: Any) -> None:
        """The training loop gets this batch."""
        self.delivered += 1
        # The shape of a batch does not always tell how many samples are in it; the indices do, where there are any.
        self.samples += self.lengths.popleft() if self.lengths else _batch_length(batch)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Indices on their way to the dataset, with what seeds their samples."""

    seed: int
    epoch: int
    number: int
    index: Any


class _SeededDataset:
    """The user's dataset, each sample fetched under its own seed."""

    def __init__(self, inner: Any) -> None:
        self.ridethrough_inner = inner
        self.ridethrough_batch: Keyed | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("ridethrough_", "__")):
            raise AttributeError(name)
        return getattr(self.ridethrough_inner, name)

    def __len__(self) -> int:
        return len(self.ridethrough_inner)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, Keyed):
            return self.ridethrough_inner[key]  # the user asks directly
        self.ridethrough_batch = key
        with rng.preserved():
            rng.seed_all(rng.mix(key.seed, key.epoch, _as_int(key.index)))
            return self.ridethrough_inner[key.index]

    def __getitems__(self, key: Keyed) -> Any:
        self.ridethrough_batch = key
        with rng.preserved():
            whole = getattr(self.ridethrough_inner, "__getitems__", None)
            if whole is not None:
                rng.seed_all(rng.mix(key.seed, key.epoch, key.number, _ORDER))
                return whole(key.index)
            samples = []
            for index in key.index:
                rng.seed_all(rng.mix(key.seed, key.epoch, _as_int(index)))
                samples.append(self.ridethrough_inner[index])
            return samples


def _as_int(index: Any) -> int:
    # Not hash(): for text it is another number in every process.
    return int(index) if hasattr(index, "__index__") else xxhash.xxh64_intdigest(repr(index).encode())


class _SeededCollate:
    """The user's collate function under the batch's own seed (masking and mixing draw there)."""

    def __init__(self, dataset: _SeededDataset, inner: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._inner = inner

    def __call__(self, samples: Any) -> Any:
        key = self._dataset.ridethrough_batch
        if key is None:
            return self._inner(samples)
        with rng.preserved():
            rng.seed_all(rng.mix(key.seed, key.epoch, key.number, _COLLATE))
            return self._inner(samples)


class _PositionedSampler:
    """The user's (batch) sampler, its order a function of (seed, epoch), from the position on."""

    def __init__(self, inner: Any, position: Position) -> None:
        self._inner = inner
        self._position = position

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Keyed]:
        position = self._position
        seed, epoch, skip = position.seed, position.epoch, position.delivered
        source = getattr(self._inner, "sampler", self._inner)
        if isinstance(source, RandomSampler) and source.generator is None:
            source.generator = torch.Generator()
        for holder in (self._inner, source):
            if isinstance(getattr(holder, "generator", None), torch.Generator):
                holder.generator.manual_seed(rng.mix(seed, epoch, _ORDER))
        if isinstance(source, DistributedSampler) and source.epoch != epoch:
            source.set_epoch(epoch)
        # Only samplers known to draw from nothing but their own generator may run as they are.
        is_plain = self._inner is source or type(self._inner) is BatchSampler
        is_dealt = deal.dealing_sampler(self._inner) is not None
        if is_dealt:
            found, position.total = deal.share(self._inner, position.dealt_from)
        elif is_plain and type(source) in (RandomSampler, SequentialSampler):
            found = iter(self._inner)
        else:
            found = _isolated(self._inner, rng.mix(seed, epoch, _ORDER))
        for number, index in enumerate(found):
            if number >= skip:
                if is_dealt:
                    position.lengths.append(len(index) if isinstance(index, list) else 1)
                yield Keyed(seed, epoch, number, index)


def _isolated(sampler: Any, seed: int) -> Iterator[Any]:
    """A sampler we do not know may draw from the global generators: it gets a stream of its own."""
    with rng.preserved():
        rng.seed_all(seed)
        iterator = iter(sampler)
        state = rng.capture()
    while True:
        with rng.preserved():
            rng.restore(state)
            try:
                item = next(iterator)
            except StopIteration:
                return
            state = rng.capture()
        yield item


def _resumable_class(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """The loader's class, iterating from the position. One base only: a live object's class can change to nothing else."""

    def iterate(self: Any) -> Iterator[Any]:
        position: Position = self.ridethrough_position
        position.begin()
        # A stream without a state of its own is read again from the start of the epoch.
        replay = position.delivered if isinstance(self.dataset, IterableDataset) and stream_state(self) is None else 0
        if isinstance(self.generator, torch.Generator):
            self.generator.manual_seed(rng.mix(position.seed, position.epoch, _WORKERS))
        batches: Iterator[Any] = iter(()) if position.is_over else kind.__iter__(self)
        if position.on_start is not None:
            position.on_start()
        is_exhausted = False
        try:
            for batch in batches:
                if replay:
                    replay -= 1  # a stream cannot be skipped without reading it
                    continue
                position.deliver(batch)
                yield batch
            is_exhausted = True
        finally:
            position.end(is_exhausted=is_exhausted)
            if position.on_end is not None:
                position.on_end(is_exhausted)

    return type(f"Resumable{kind.__name__}", (kind,), {"__iter__": iterate, "__module__": __name__})


def _batch_length(batch: Any) -> int:
    """Samples in a batch, as far as its shape tells."""
    while isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    if isinstance(batch, dict) and batch:
        return _batch_length(next(iter(batch.values())))
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    return 1


def make_resumable(loader: DataLoader[Any], *, seed: int) -> Position:
    """The loader, changed in place, goes on from its position; calling it again changes nothing.

    Args:
        loader: A plain DataLoader over a map-style or iterable dataset.
        seed: Seeds order and samples; a generator of the user's own goes before it.
    """
    found = getattr(loader, "ridethrough_position", None)
    if isinstance(found, Position):
        return found
    fields = vars(loader)  # DataLoader forbids changing some of these through attribute assignment
    own = loader.generator or getattr(loader.sampler, "generator", None)
    position = Position(own.initial_seed() & (1 << 62) - 1 if isinstance(own, torch.Generator) else seed)
    if loader.generator is None:
        fields["generator"] = torch.Generator()
    if not isinstance(loader.dataset, IterableDataset):
        dataset = _SeededDataset(loader.dataset)
        fields["dataset"] = dataset
        if loader.collate_fn is not default_collate:
            fields["collate_fn"] = _SeededCollate(dataset, loader.collate_fn)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        inner = getattr(loader, name)
        dealing = deal.dealing_sampler(inner)
        position.dealt_to = dealing.num_replicas if dealing is not None else 0
        fields[name] = _PositionedSampler(inner, position)
    fields["ridethrough_position"] = position
    loader.__class__ = _resumable_class(type(loader))
    return position


def take_over(loader: Any, position: Position, state: dict[str, Any], *, keeps_seed: bool) -> str | None:
    """The loader goes on from the position that another number of ranks has left.

    Between epochs every loader can: the next epoch is iterated by the new ranks, and one that was
    over stays so, whatever was dropped at its end. In the middle of one only what a
    `DistributedSampler` deals can be dealt anew. Anything else (a sampler or batch sampler of
    another kind, a stream, the state of somebody else's loader) has no order over all ranks that
    we know: it is refused, because samples would be lost or trained on twice.

    Args:
        loader: Of this rank.
        position: Its position.
        state: What some rank of the other number has left.
        keeps_seed: This rank did not exist before, and keeps the seed that its script gave it.

    Returns:
        Why it cannot; None if it does.
    """
    if "dataset" in state:
        return f"{type(loader.dataset).__name__} says by itself where each rank was"
    consumed, ranks = state.get("dealt", (0, 0))
    found = {**state, "seed": position.seed if keeps_seed else state["seed"]}
    if state["is_open"] and (state["batches"] or consumed) and not state.get("is_over", False):
        if not ranks or not position.dealt_to:
            return f"it was in the middle of an epoch, and what {_source_of(loader)} gives to each rank cannot be dealt anew; DistributedSampler can"
        found |= {"batches": 0, "samples": 0, "dealt": [consumed + ranks * state["samples"], position.dealt_to]}
    position.load_state_dict(found)
    return None


def _source_of(loader: Any) -> str:
    """What decides the order, by the name of its class."""
    if isinstance(loader.dataset, IterableDataset):
        return type(loader.dataset).__name__
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    inner = getattr(sampler, "_inner", sampler)
    return type(inner.sampler if type(inner) is BatchSampler else inner).__name__


def stream_state(loader: Any) -> Any:
    """An iterable dataset whose own state says where it is: it reads in this process and has state_dict and load_state_dict."""
    dataset = loader.dataset
    has_state = callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))
    return dataset if isinstance(dataset, IterableDataset) and loader.num_workers == 0 and has_state else None


def is_exhausted(loader: Any, position: Position) -> bool:
    """The batch just delivered was the epoch's last, as far as the loader knows its length."""
    try:
        return position.delivered >= (len(loader) if position.total is None else position.total)
    except TypeError:
        return False  # a stream of unknown length


def presence_of(loader: Any) -> tuple[Presence, str]:
    """Whether a loader's position can be saved and restored exactly."""
    if not isinstance(loader, DataLoader):
        return Presence.PRESENT, f"by the state_dict of {type(loader).__name__}"
    if stream_state(loader) is not None:
        return Presence.PRESENT, f"by the state_dict of {type(loader.dataset).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        why = "an iterable dataset without state" if loader.num_workers == 0 else "an iterable dataset that reads in workers"
        return Presence.UNPROTECTABLE, f"{why}: replayed from the start of the epoch, exact only if it is deterministic"
    return Presence.PRESENT, "position, order and per-sample seeds"


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """The sampler of a distributed loader shuffles for this epoch."""
    sampler: Any = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)

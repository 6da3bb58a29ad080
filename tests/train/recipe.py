"""Trainings that differ in what makes resuming hard. `train` makes the same rows for the same step, or the resume was not identical."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lab import Lives, digest, rng_digest, seed_everything
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler, default_collate

SAMPLES, BATCH, EPOCHS = 32, 4, 3
STEPS_AN_EPOCH = SAMPLES // BATCH


class Augmented(Dataset[Any]):
    """Draws from every generator there is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(6) + random.random() + float(np.random.rand())
        return noise + index / SAMPLES, index


def mixing(samples: list[Any]) -> Any:
    """A collate function that draws: mixes the batch with itself."""
    x, index = default_collate(samples)
    return x + 0.1 * x[torch.randperm(len(x))] * random.random(), index


class Shuffled(Sampler[int]):
    """A sampler that nobody knows and that draws from the global generators, also in mid-epoch."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        left = list(range(self._length))
        while left:
            yield left.pop(int(torch.randint(len(left), ()).item()) if random.random() < 0.5 else int(np.random.randint(len(left))))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(SAMPLES):
            yield torch.full((6,), float(index)), index


class Counter(IterableDataset[Any]):
    """A stream that knows where it is, as streams from files do."""

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        while self._at < SAMPLES:
            self._at += 1
            yield torch.full((6,), float(self._at)), self._at
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class Average:
    """Averaged weights, as scripts keep them."""

    def __init__(self, module: nn.Module) -> None:
        self._values = {name: value.detach().clone() for name, value in module.state_dict().items()}

    def update(self, module: nn.Module) -> None:
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self._values[name].lerp_(value.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = {name: value.clone() for name, value in state["values"].items()}


def _shuffled(**more: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True, **more)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": _shuffled,
    "in order": lambda: DataLoader(Augmented(), batch_size=BATCH),
    "own generator": lambda: _shuffled(generator=torch.Generator().manual_seed(5)),
    "drop last": lambda: DataLoader(Augmented(), batch_size=5, shuffle=True, drop_last=True),
    "uneven last batch": lambda: DataLoader(Augmented(), batch_size=5, shuffle=True),
    "drawing collate": lambda: _shuffled(collate_fn=mixing),
    "weighted": lambda: DataLoader(Augmented(), batch_size=BATCH, sampler=WeightedRandomSampler(np.arange(1, SAMPLES + 1).tolist(), SAMPLES)),
    "unknown sampler": lambda: DataLoader(Augmented(), batch_size=BATCH, sampler=Shuffled(SAMPLES)),
    "batch sampler": lambda: DataLoader(Augmented(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=False)),
    "no batches": lambda: DataLoader(Augmented(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "stream with a state": lambda: DataLoader(Counter(), batch_size=BATCH),
    "2 workers": lambda: _shuffled(num_workers=2, collate_fn=mixing),
    "2 persistent workers": lambda: _shuffled(num_workers=2, persistent_workers=True, collate_fn=mixing),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "one cycle": lambda o, n: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=n),
    "cosine": torch.optim.lr_scheduler.CosineAnnealingLR,
    "warm restarts": lambda o, n: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7),
    "sequence": lambda o, n: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=5), torch.optim.lr_scheduler.ExponentialLR(o, 0.95)],
        milestones=[5],
    ),
    "function": lambda o, n: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.97**step),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One kind of training."""

    loader: str = "shuffle"
    scheduler: str = "one cycle"
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    accumulate: int = 1
    has_scaler: bool = False
    has_second_optimizer: bool = False
    has_average: bool = False
    epochs: int = EPOCHS


Rows = dict[int, dict[str, Any]]


def train(lives: Lives, run_dir: Any, recipe: Recipe, *, until: int | None = None) -> Rows:
    """What every step made of this life came to; the power is cut right after step `until` became durable."""
    loader = LOADERS[recipe.loader]()
    try:
        return _train(lives, run_dir, recipe, loader, until)
    finally:
        loader._iterator = None  # persistent workers end with their loader, which nobody would tell them before it is collected


def _train(lives: Lives, run_dir: Any, recipe: Recipe, loader: DataLoader[Any], until: int | None) -> Rows:
    seed_everything()
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    head = nn.Linear(1, 1)
    own = [net] if recipe.has_second_optimizer else [net, head]
    optimizer = recipe.optimizer([p for module in own for p in module.parameters()], lr=0.01)
    total = recipe.epochs * SAMPLES
    scheduler = SCHEDULERS[recipe.scheduler](optimizer, total)
    tracked: dict[str, Any] = {"model": net, "head": head, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    second = torch.optim.SGD(head.parameters(), lr=0.02, momentum=0.9, nesterov=True) if recipe.has_second_optimizer else None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if recipe.has_scaler else None
    average = Average(net) if recipe.has_average else None
    tracked |= {name: value for name, value in (("second", second), ("scaler", scaler), ("average", average)) if value is not None}
    # A fresh process has drawn other numbers before it gets here than the one that saved.
    random.random(), np.random.rand(), torch.rand(3)
    ckpt = lives.start(run_dir)
    ckpt.track(**tracked)
    ckpt.restore()
    rows: Rows = {}
    torch.rand(2)  # scripts draw here as well
    for epoch in ckpt.epochs(recipe.epochs):
        for number, (x, index) in enumerate(loader):
            x, index = (x.unsqueeze(0), torch.tensor([index])) if x.dim() == 1 else (x, index)
            net.train(len(x) > 1)
            loss = head(net(x)).pow(2).mean() / recipe.accumulate + 0.01 * random.random()
            (scaler.scale(loss) if scaler else loss).backward()
            is_boundary = (ckpt_batches(loader) % recipe.accumulate) == 0
            if not is_boundary:
                ckpt.step(loss=loss, boundary=False)
                continue
            for one in (optimizer, second):
                if one is not None:
                    scaler.step(one) if scaler else one.step()
            if scaler:
                scaler.update()
            scheduler.step()
            for one in (optimizer, second):
                if one is not None:
                    one.zero_grad()
            if average:
                average.update(net)
            ckpt.step(loss=loss)
            rows[ckpt.global_step] = {
                "weights": digest([net.state_dict(), head.state_dict()]),
                "optimizer": digest([one.state_dict() for one in (optimizer, second) if one is not None]),
                "lr": scheduler.get_last_lr(),
                "samples": index.tolist(),
                "batch": digest(x),
                "loss": loss.item(),
                "rng": rng_digest(),
                "epoch": epoch,
                "scaler": digest(scaler.state_dict()) if scaler else None,
                "average": digest(average.state_dict()) if average else None,
                "number": number if recipe.accumulate == 1 else None,
            }
            if ckpt.global_step == until:
                ckpt.save()
                return rows
        torch.rand(1), random.random()  # and after each epoch
    lives.end()
    return rows


def ckpt_batches(loader: DataLoader[Any]) -> int:
    """Batches delivered so far in this epoch."""
    return int(loader.ridethrough_position.delivered)  # type: ignore[attr-defined]

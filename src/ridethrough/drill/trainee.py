"""The job that is cut: a small GPT on real text, trained by DDP over gloo, traced step by step.

Run by the drill as ``torchrun … -m ridethrough.drill.trainee``. With ``--sabotage CLASS`` it breaks
one class of state right after each resume, to show that the comparison finds and names it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ridethrough
from ridethrough.train import rng
from ridethrough.types import StateClass

_BLOCK, _WIDTH, _HEADS, _EPOCHS = 32, 64, 2, 3
_BATCH = 12
"""Of each rank: however often 1 to 4 ranks take turns in an epoch, what is left of it goes round among them."""


class Text(Dataset[tuple[torch.Tensor, int]]):
    """Windows of the standard library's own help texts, randomly masked."""

    def __init__(self, count: int) -> None:
        topics = importlib.import_module("pydoc_data.topics").topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode("latin-1", "replace")
        self._bytes = torch.tensor(list(text[: count * _BLOCK + 1]), dtype=torch.int64)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        at = index * _BLOCK % (len(self._bytes) - _BLOCK)  # a long drill reads the text more than once
        window = self._bytes[at : at + _BLOCK + 1].clone()
        window[torch.rand(_BLOCK + 1) < 0.05] = 0
        if random.random() < 0.5:  # noqa: S311  augmentation
            window[random.randrange(_BLOCK)] = 1  # noqa: S311
        return window, index


class Block(nn.Module):
    """Attention and a wide layer with batch normalisation, so that ranks differ in their buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_WIDTH, _HEADS, dropout=0.1, batch_first=True)
        self.wide = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.norm = nn.BatchNorm1d(4 * _WIDTH)
        self.narrow = nn.Linear(4 * _WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The next hidden state; x is (batch, block, width)."""
        attended, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        x = x + attended
        wide = self.norm(self.wide(x).transpose(1, 2)).transpose(1, 2)
        narrowed: torch.Tensor = self.drop(self.narrow(F.gelu(wide)))
        return x + narrowed


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, _WIDTH)
        self.place = nn.Embedding(_BLOCK, _WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(_WIDTH, 256)
        self.register_buffer("mask", torch.triu(torch.full((_BLOCK, _BLOCK), float("-inf")), diagonal=1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, block, 256) for tokens (batch, block)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        mask = self.get_buffer("mask")
        for block in self.blocks:
            x = block(x, mask)
        logits: torch.Tensor = self.head(x)
        return logits


class Meter:
    """A metric with a memory."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, loss: float) -> None:
        """One more loss."""
        self.total, self.count = self.total + loss, self.count + 1

    def state_dict(self) -> dict[str, Any]:
        """As a dict."""
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a dict."""
        self.total, self.count = state["total"], state["count"]


def digest(value: Any) -> str:
    """A name for nested state, equal only for equal bits."""
    total = xxhash.xxh3_128()

    def feed(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            total.update(f"{item.dtype}{tuple(item.shape)}".encode())
            total.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in item:
                total.update(repr(key).encode())
                feed(item[key])
        elif isinstance(item, (list, tuple)):
            for one in item:
                feed(one)
        else:
            total.update(repr(item).encode())

    feed(value)
    return total.hexdigest()


class Job:
    """Everything the trainee trains with."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(11)
        # Otherwise DDP orders its sums anew after its first iteration, and the first step of a resume rounds differently.
        self.model = DistributedDataParallel(GPT(), find_unused_parameters=True)
        rng.seed_all(100 + self.rank)
        data = Text(arguments.steps // _EPOCHS * _BATCH * (arguments.full_world or self.world_size))
        self.sampler: DistributedSampler[Any] = DistributedSampler(data, seed=5)
        self.loader = DataLoader(data, batch_size=_BATCH, sampler=self.sampler, num_workers=arguments.workers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, arguments.steps)
        self.meter = Meter()

    def digests(self) -> dict[str, str]:
        """A digest of each of the six classes as they are now."""
        return {
            StateClass.MODEL: digest(self.model.state_dict()),
            StateClass.OPTIMIZER: digest(self.optimizer.state_dict()["state"]),
            StateClass.SCHEDULER: digest([self.scheduler.state_dict(), [group["lr"] for group in self.optimizer.param_groups]]),
            StateClass.DATA: digest(self.loader.ridethrough_position.state_dict()),  # type: ignore[attr-defined]
            StateClass.DISTRIBUTED: digest([self.rank, self.world_size, self.sampler.rank, self.sampler.num_replicas]),
            StateClass.METRICS: digest([rng.capture(), self.meter.state_dict()]),
        }

    def sabotage(self, kind: str) -> None:
        """One class of state is wrong from now on."""
        if kind == StateClass.MODEL:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] += 1e-3
        elif kind == StateClass.OPTIMIZER:
            next(iter(self.optimizer.state.values()))["exp_avg"].zero_()
        elif kind == StateClass.SCHEDULER:
            self.scheduler.last_epoch += 1
        elif kind == StateClass.DATA:
            self.loader.ridethrough_position.delivered += 1  # type: ignore[attr-defined]
        elif kind == StateClass.DISTRIBUTED:
            self.sampler.rank = (self.sampler.rank + 1) % self.world_size


def main() -> None:
    """Trains to the end, or until the power is cut."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--steps", type=int, required=True, help="of the full world; fewer ranks make more steps of the same samples")
    parser.add_argument("--full-world", type=int, default=0, help="ranks that --steps is meant for; those of this start if 0")
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--pace-s", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--sabotage", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    job = Job(arguments)
    ckpt = ridethrough.Checkpointer(
        arguments.checkpoints, every_n_train_steps=arguments.every, config=vars(arguments), data_version="pydoc_data.topics"
    )
    ckpt.track(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, data=job.loader, metrics=job.meter)
    if arguments.sabotage == StateClass.METRICS:
        rng.restore = lambda state: None
    restored = ckpt.restore()
    if restored and arguments.sabotage:
        job.sabotage(arguments.sabotage)
    train(job, ckpt, arguments, restored)
    dist.destroy_process_group()


def train(job: Job, ckpt: ridethrough.Checkpointer, arguments: argparse.Namespace, restored: int) -> None:
    """The training loop of any user, with a trace beside it."""
    launch = os.environ.get("RIDETHROUGH_LAUNCH", "")
    trace = Path(arguments.trace, f"rank-{job.rank}.jsonl")

    def say(step: int, digests: dict[str, str], *, is_resume: bool, samples: Sequence[int] = ()) -> None:
        line = {"rank": job.rank, "step": step, "launch": launch, "at_s": time.monotonic(), "is_resume": is_resume, "digests": digests}
        if samples:
            # Consumed in this step: that a run with changing ranks has had every sample once is seen from these.
            line["samples"] = list(samples)
        with trace.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    at_resume = job.digests() if restored else None
    for _ in ckpt.epochs(_EPOCHS):
        for window, index in job.loader:
            began_s = time.monotonic()
            if at_resume is not None:
                # Random generators are set last of all, when the loader has started.
                at_resume[StateClass.METRICS] = digest([rng.capture(), job.meter.state_dict()])
                say(ckpt.global_step, at_resume, is_resume=True)
                at_resume = None
            job.optimizer.zero_grad()
            logits = job.model(window[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 256), window[:, 1:].reshape(-1))
            loss.backward()  # type: ignore[no-untyped-call]
            job.optimizer.step()
            job.scheduler.step()
            job.meter.add(float(loss.detach()))
            time.sleep(max(arguments.pace_s - (time.monotonic() - began_s), 0.0))
            # Before the step is counted: one that a cut or a stop makes the last may be durable and is never made again.
            digests = {**job.digests(), "batch": digest([window, index]), "loss": float(loss.detach()).hex()}
            say(ckpt.global_step + 1, digests, is_resume=False, samples=index.tolist())
            ckpt.step(loss=loss)


if __name__ == "__main__":
    main()

"""A training small enough to be killed many times: 2 layers with BatchNorm and dropout, a learning-rate schedule, random augmentation.

Arguments: run directory, directory for what it tells the test. Environment: TRAINEE_STEPS, TRAINEE_EVERY, TRAINEE_STEP_S,
TRAINEE_WAIT_S (patience with storage), TRAINEE_PAUSE_S (before it restores), TRAINEE_FAIL_AT (raises at that step, every time).
TRAINEE_WAIT_S (patience with storage), TRAINEE_DATA_VERSION, TRAINEE_FAIL_AT (raises at that step, every time).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ridethrough

STEPS = int(os.environ.get("TRAINEE_STEPS", "120"))
EVERY = int(os.environ.get("TRAINEE_EVERY", "10"))
STEP_S = float(os.environ.get("TRAINEE_STEP_S", "0.01"))
WAIT_S = float(os.environ.get("TRAINEE_WAIT_S", "30"))
PAUSE_S = float(os.environ.get("TRAINEE_PAUSE_S", "0"))
DATA_VERSION = os.environ.get("TRAINEE_DATA_VERSION")
FAIL_AT = int(os.environ.get("TRAINEE_FAIL_AT", "0"))
STEPS_AN_EPOCH = 25
BATCH = 4


class Noisy(Dataset[Any]):
    """Samples that are different every time they are asked for, as augmentation makes them."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return torch.randn(8) + index / self._samples, torch.tensor([index % 5 / 5])


def digest(module: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> str:
    """Weights, optimizer and learning rate, the batch with its augmentation, and the random numbers to come."""
    total = hashlib.sha256(repr([group["lr"] for group in optimizer.param_groups]).encode())
    total.update(batch.numpy().tobytes() + torch.get_rng_state().numpy().tobytes())
    for value in module.state_dict().values():
        total.update(value.detach().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            total.update(value.numpy().tobytes())
    return total.hexdigest()[:16]


def main() -> None:
    run_dir, tells = sys.argv[1], Path(sys.argv[2])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    (tells / f"pid-{rank}-{os.getpid()}").touch()
    torch.set_num_threads(1)
    torch.manual_seed(7 + rank)
    net: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    if world > 1:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    dataset = Noisy(STEPS_AN_EPOCH * BATCH * world)
    sampler = DistributedSampler(dataset, seed=3) if world > 1 else None
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
    ckpt = ridethrough.Checkpointer(run_dir, every_n_train_steps=EVERY, storage_wait_s=WAIT_S, data_version=DATA_VERSION)
    ckpt.track(model=net, optimizer=optimizer, scheduler=scheduler, data=loader)
    (tells / f"built-{rank}-{os.getpid()}").touch()
    time.sleep(PAUSE_S)
    restored = ckpt.restore()
    steps = open(tells / f"steps-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115  until the process ends
    steps.write(json.dumps({"pid": os.getpid(), "restored": restored}) + "\n")
    for _epoch in ckpt.epochs(STEPS // STEPS_AN_EPOCH + 1):
        for x, y in loader:
            if ckpt.global_step >= STEPS:
                break
            optimizer.zero_grad()
            loss = ((net(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(STEP_S)
            if FAIL_AT and ckpt.global_step + 1 == FAIL_AT:
                raise RuntimeError(f"the data is broken at step {FAIL_AT}")
            # Before the step is counted: the last one before a stop does not come back from `step`.
            inner = net.module if world > 1 else net
            steps.write(json.dumps({"step": ckpt.global_step + 1, "digest": digest(inner, optimizer, x), "loss": loss.item()}) + "\n")
            ckpt.step(loss=loss)
    (tells / f"done-{rank}").touch()


if __name__ == "__main__":
    main()

"""A whole training script that survives power loss. Read it from top to bottom.

    ridethrough run -- torchrun --nproc-per-node=2 examples/train_ddp.py runs/example
    ridethrough status runs/example

Kill it, cut the power, start it again: it goes on where it was.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ridethrough

EPOCHS, BATCH, SAVE_EVERY = 20, 16, 50


class Accuracy:
    """Of the epoch so far. It lives from step to step, so it is tracked like everything else that does."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def add(self, right: int, seen: int) -> None:
        """One more batch."""
        self.right, self.seen = self.right + right, self.seen + seen

    def take(self) -> float:
        """The accuracy so far; the count starts anew."""
        ratio = self.right / max(self.seen, 1)
        self.right = self.seen = 0
        return ratio

    def state_dict(self) -> dict[str, int]:
        """As a dict."""
        return {"right": self.right, "seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """From a dict."""
        self.right, self.seen = state["right"], state["seen"]


def main(run_dir: str) -> None:
    """Trains a small network to tell two noisy spirals apart."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    turn = torch.linspace(0, 12, 2000)
    sign = torch.where(torch.arange(2000) % 2 == 0, 1.0, -1.0)
    points = torch.stack([turn * torch.cos(turn), turn * torch.sin(turn)], dim=1) * sign[:, None] + torch.randn(2000, 2) * 0.3
    data = TensorDataset(points, (sign > 0).long())

    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=1))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))

    ckpt = ridethrough.Checkpointer(run_dir, every_n_train_steps=SAVE_EVERY, config={"epochs": EPOCHS, "batch": BATCH})
    accuracy = Accuracy()
    ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, metrics=accuracy)
    step = ckpt.restore()
    print(f"rank {dist.get_rank()} goes on from step {step}", flush=True)

    for epoch in ckpt.epochs(EPOCHS):
        for batch, label in loader:
            optimizer.zero_grad()
            out = model(batch)
            loss = nn.functional.cross_entropy(out, label)
            loss.backward()
            optimizer.step()
            scheduler.step()
            accuracy.add(int((out.argmax(1) == label).sum()), len(label))
            ckpt.step(loss=loss)
        reached = accuracy.take()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {reached:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/example")

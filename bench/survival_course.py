"""What every engine of `survival.py` has to save, and the record of what it said.

The record lies outside the disk whose power is cut. In it stand, one a line, `saving STEP DIGEST` before the engine is
asked to save and `saved STEP` once it has said that it did.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

SAVE_EVERY = 5
STEP_S = 0.01
KEEP = 3
"""Checkpoints that each engine with a limit of its own is told to keep."""
IN, OUT = 512, 1024
"""Weights and momentum of one such layer are 4 MiB."""


@dataclass(frozen=True)
class Found:
    """What was loaded."""

    step: int
    digest: str


def digest(step: int, tensors: Mapping[str, Any]) -> str:
    """The same for the same bits of that step only."""
    total = hashlib.sha256(str(step).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        array = tensor.detach().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def new_model() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(IN, OUT)


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - torch.randn(output.shape)).square().mean()


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and momentum by name; what has no momentum yet lacks it."""
    found = {}
    for name, value in model.named_parameters():
        found[name] = value.detach()
        momentum = optimizer.state.get(value, {}).get("momentum_buffer")
        if momentum is not None:
            found[f"{name}.momentum"] = momentum
    return found


class Training:
    """A training loop for engines that have none of their own."""

    def __init__(self) -> None:
        self.model = new_model()
        self.optimizer = new_optimizer(self.model)
        self.step = 0

    def make_step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model(torch.randn(8, IN))).backward()
        self.optimizer.step()
        self.step += 1
        time.sleep(STEP_S)

    def save_steps(self) -> Iterator[int]:
        """Trains for ever and stops where a save is due."""
        while True:
            self.make_step()
            if self.step % SAVE_EVERY == 0:
                yield self.step

    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.model, self.optimizer)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> Found:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return self.found()

    def found(self) -> Found:
        return Found(self.step, digest(self.step, self.tensors()))


class Course:
    """One run of the workload on a disk: an adapter says here what it is about to save and what was acknowledged."""

    def __init__(self, root: Path, record: Path, *, stop_after: int = 0) -> None:
        self.root = root
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._disk = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._stop_after = stop_after
        self._count = 0

    def saving(self, step: int, tensors: Mapping[str, Any]) -> None:
        os.write(self._record, f"saving {step} {digest(step, tensors)}\n".encode())
        # Here saves are a fraction of a second apart. With minutes between them the kernel would have written older
        # checkpoints back long ago; without this line a cut would take them too, and look worse than it is.
        if ctypes.CDLL(None).syncfs(self._disk):
            os._exit(3)

    def saved(self, step: int) -> None:
        os.write(self._record, f"saved {step}\n".encode())
        self._count += 1
        if self._count == self._stop_after:
            os._exit(0)


@dataclass
class Record:
    """What a record says."""

    digests: dict[int, str] = field(default_factory=dict)
    acknowledged: list[int] = field(default_factory=list)

    @property
    def is_saving(self) -> bool:
        return max(self.digests, default=0) > max(self.acknowledged, default=0)

    @classmethod
    def read(cls, path: Path) -> Record:
        record = cls()
        for line in path.read_text(encoding="ascii").splitlines() if path.exists() else []:
            what, step, *rest = line.split()
            if what == "saving":
                record.digests[int(step)] = rest[0]
            else:
                record.acknowledged.append(int(step))
        return record


def numbered(directory: Path, pattern: str) -> list[Path]:
    """Entries whose name matches, the highest number first."""
    found = [
        (int(match.group(1)), path) for path in (directory.iterdir() if directory.is_dir() else ()) if (match := re.fullmatch(pattern, path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def keep_newest(paths: list[Path]) -> None:
    """For engines without a limit of their own: of these, newest first, only the first few are left."""
    for path in paths[KEEP:]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

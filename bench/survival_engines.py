"""How each engine of `survival.py` saves, finds its newest checkpoint, and loads it.

An engine is imported when it is made, so that one which is not installed costs only its own row.
"""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from survival_course import IN, KEEP, OUT, SAVE_EVERY, STEP_S, Course, Found, Training, digest, numbered
from survival_files import Dcp, DcpAsync, Engine, Safetensors, TorchSave, TorchSaveReplace, TorchSaveSynced
from survival_trainers import Accelerate, Lightning, Transformers


class Orbax(Engine):
    package = "orbax-checkpoint"
    settings = f"CheckpointManager(max_to_keep={KEEP}), acknowledged after wait_until_finished()"
    finds = "latest_step()"
    source = "https://orbax.readthedocs.io/en/stable/api_reference/checkpoint.checkpoint_manager.html"

    def __init__(self) -> None:
        self.orbax: Any = import_module("orbax.checkpoint")
        self.jax: Any = import_module("jax")

    def manager(self, root: Path) -> Any:
        return self.orbax.CheckpointManager(root / "orbax", options=self.orbax.CheckpointManagerOptions(max_to_keep=KEEP))

    def work(self, course: Course) -> None:
        manager = self.manager(course.root)
        random = np.random.default_rng(1)
        state = {name: self.jax.numpy.asarray(random.normal(size=(OUT, IN)).astype("float32")) for name in ("weight", "weight.momentum")}
        step = 0
        while True:
            step += 1
            state = {name: value * 0.999 + 0.001 * random.normal() for name, value in state.items()}
            self.jax.block_until_ready(state)
            time.sleep(STEP_S)
            if step % SAVE_EVERY == 0:
                course.saving(step, state)
                manager.save(step, args=self.orbax.args.StandardSave(state))
                manager.wait_until_finished()
                course.saved(step)

    def candidates(self, root: Path) -> list[Path]:
        return numbered(root / "orbax", r"(\d+)")

    def load(self, root: Path, path: Path | None) -> Found | None:
        manager = self.manager(root)
        step = manager.latest_step() if path is None else int(path.name)
        if step is None:
            return None
        zeros = self.jax.numpy.zeros((OUT, IN), "float32")
        state = manager.restore(step, args=self.orbax.args.StandardRestore({"weight": zeros, "weight.momentum": zeros}))
        return Found(step, digest(step, state))


class RideThrough(Engine):
    package = "ridethrough"
    settings = f"Checkpointer(every_n_train_steps={SAVE_EVERY}, keep_last={KEEP}), acknowledged when save() returned"
    finds = "restore()"
    source = "README.md"
    can_choose = False

    def __init__(self) -> None:
        self.ridethrough: Any = import_module("ridethrough")
        self.checkpointer: Any = self.ridethrough.Checkpointer

    @property
    def version(self) -> str:
        return str(self.ridethrough.__version__)

    def restored(self, root: Path) -> tuple[Any, Training]:
        training = Training()
        checkpointer = self.checkpointer(root / "run", every_n_train_steps=SAVE_EVERY, keep_last=KEEP)
        checkpointer.track(model=training.model, optimizer=training.optimizer)
        training.step = checkpointer.restore()
        return checkpointer, training

    def work(self, course: Course) -> None:
        checkpointer, training = self.restored(course.root)
        while True:
            training.make_step()
            is_due = training.step % SAVE_EVERY == 0
            if is_due:
                course.saving(training.step, training.tensors())
            checkpointer.step()
            if is_due:
                checkpointer.save()
                course.saved(training.step)

    def candidates(self, root: Path) -> list[Path]:
        return numbered(root / "run", r"step-(\d+)-[0-9a-f]+")

    def load(self, root: Path, path: Path | None) -> Found | None:
        _, training = self.restored(root)
        return training.found() if training.step else None


ENGINES: dict[str, type[Engine]] = {
    "torch.save": TorchSave,
    "torch.save, replace": TorchSaveReplace,
    "torch.save, fsync by hand": TorchSaveSynced,
    "safetensors": Safetensors,
    "DCP save": Dcp,
    "DCP async_save": DcpAsync,
    "Lightning": Lightning,
    "HF Trainer": Transformers,
    "Accelerate": Accelerate,
    "Orbax": Orbax,
    "ridethrough": RideThrough,
}

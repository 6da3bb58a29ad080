"""What an engine of `survival.py` is, and those that only write files: the script has the loop and finds the newest."""

from __future__ import annotations

import os
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from survival_course import SAVE_EVERY, Course, Found, Training, digest, keep_newest, numbered


class Engine:
    """One engine in its settings.

    `work` trains and saves until it is killed. `candidates` are its checkpoints as a person would try them, newest
    first. `load` with None is the engine's own choice; its answer is None where it finds nothing.
    """

    package = "torch"
    settings = ""
    finds = ""
    source = ""
    can_choose = True
    """Whether one can name the checkpoint to load."""

    @property
    def version(self) -> str:
        return metadata.version(self.package)

    def work(self, course: Course) -> None:
        raise NotImplementedError

    def candidates(self, root: Path) -> list[Path]:
        raise NotImplementedError

    def load(self, root: Path, path: Path | None) -> Found | None:
        raise NotImplementedError


class Files(Engine):
    """Engines that only write: the script has the loop."""

    def save(self, root: Path, training: Training) -> None:
        raise NotImplementedError

    def read(self, path: Path) -> Found:
        raise NotImplementedError

    def work(self, course: Course) -> None:
        training = Training()
        for step in training.save_steps():
            course.saving(step, training.tensors())
            self.save(course.root, training)
            course.saved(step)
            keep_newest(self.candidates(course.root))

    def load(self, root: Path, path: Path | None) -> Found | None:
        chosen = path or next(iter(self.candidates(root)), None)
        return None if chosen is None else self.read(chosen)


class TorchSave(Files):
    settings = 'torch.save(state, "checkpoint.pt"), the same name each time'
    finds = "the one name"
    source = "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html"

    def save(self, root: Path, training: Training) -> None:
        torch.save(training.state(), root / "checkpoint.pt")

    def candidates(self, root: Path) -> list[Path]:
        path = root / "checkpoint.pt"
        return [path] if path.exists() else []

    def read(self, path: Path) -> Found:
        return Training().load(torch.load(path, weights_only=True))


class TorchSaveReplace(TorchSave):
    settings = "torch.save to a temporary name, os.replace"

    def save(self, root: Path, training: Training) -> None:
        torch.save(training.state(), root / "checkpoint.pt.tmp")
        os.replace(root / "checkpoint.pt.tmp", root / "checkpoint.pt")


class TorchSaveSynced(TorchSave):
    settings = "torch.save to a temporary name, flush, fsync, os.replace, fsync of the directory: written by hand"

    def save(self, root: Path, training: Training) -> None:
        with open(root / "checkpoint.pt.tmp", "wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(root / "checkpoint.pt.tmp", root / "checkpoint.pt")
        directory = os.open(root, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


class Safetensors(Files):
    package = "safetensors"
    settings = "save_file to a new name each time; the script keeps 3"
    finds = "the highest step (the script)"
    source = "https://huggingface.co/docs/safetensors/api/torch"

    def __init__(self) -> None:
        self.module: Any = import_module("safetensors.torch")

    def save(self, root: Path, training: Training) -> None:
        self.module.save_file(training.tensors(), root / f"step-{training.step}.safetensors", metadata={"step": str(training.step)})

    def candidates(self, root: Path) -> list[Path]:
        return numbered(root, r"step-(\d+)\.safetensors")

    def read(self, path: Path) -> Found:
        with import_module("safetensors").safe_open(path, framework="pt") as file:
            step = int(file.metadata()["step"])
        return Found(step, digest(step, self.module.load_file(path)))


class Dcp(Files):
    settings = "dcp.save(storage_writer=FileSystemWriter(new directory, sync_files=True)); the script keeps 3"
    finds = "the highest step that has a .metadata file, as torchtitan does"
    source = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"

    def __init__(self) -> None:
        self.dcp: Any = import_module("torch.distributed.checkpoint")

    def state(self, training: Training) -> dict[str, Any]:
        return {"step": training.step, **training.tensors()}

    def save(self, root: Path, training: Training) -> None:
        writer = self.dcp.FileSystemWriter(root / f"step-{training.step}", sync_files=True)
        self.dcp.save(self.state(training), storage_writer=writer, no_dist=True)

    def candidates(self, root: Path) -> list[Path]:
        return [path for path in numbered(root, r"step-(\d+)") if (path / ".metadata").exists()]

    def read(self, path: Path) -> Found:
        training = Training()
        training.make_step()  # so that there is momentum to load into
        state = self.state(training)
        self.dcp.load(state, storage_reader=self.dcp.FileSystemReader(path), no_dist=True)
        step = state.pop("step")
        return Found(step, digest(step, state))


class DcpAsync(Dcp):
    settings = (
        "dcp.async_save(checkpoint_id=new directory), default writer (sync_files=True), acknowledged when its future has a result; the script keeps 3"
    )

    def work(self, course: Course) -> None:
        training = Training()
        pending: tuple[int, Any] | None = None
        while True:
            training.make_step()
            if pending is not None and (pending[1].done() or training.step % SAVE_EVERY == 0):
                pending[1].result()
                course.saved(pending[0])
                pending = None
                keep_newest(self.candidates(course.root))
            if training.step % SAVE_EVERY == 0:
                course.saving(training.step, training.tensors())
                pending = training.step, self.dcp.async_save(self.state(training), checkpoint_id=course.root / f"step-{training.step}", no_dist=True)

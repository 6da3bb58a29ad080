"""The engines of `survival.py` that train, or save all that a trainer has: they have their own way to the newest."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from survival_course import IN, KEEP, SAVE_EVERY, STEP_S, Course, Found, Training, digest, loss_of, new_model, new_optimizer, numbered, tensors_of
from survival_files import Engine


class Loaded(BaseException):
    """Ends a trainer that has loaded; not an Exception, so that no trainer takes it for a failure to handle."""

    def __init__(self, found: Found) -> None:
        self.found = found


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Batches without end, at the pace of the other engines."""

    def __iter__(self) -> Any:
        while True:
            time.sleep(STEP_S)
            yield from torch.randn(8, IN)


class Named(Stream):
    def __iter__(self) -> Any:
        return ({"x": x} for x in super().__iter__())


class Lightning(Engine):
    package = "lightning"
    settings = f'ModelCheckpoint(monitor="step", mode="max", save_top_k={KEEP}, save_last=True, every_n_train_steps={SAVE_EVERY})'
    finds = 'fit(ckpt_path="last")'
    source = "https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.ModelCheckpoint.html"

    def __init__(self) -> None:
        self.lightning: Any = import_module("lightning.pytorch")

    def fit(self, root: Path, callback: type[Any], ckpt_path: str | None) -> None:
        class Module(self.lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.layer = new_model()

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                return loss_of(self.layer(batch))

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return new_optimizer(self.layer)

        saver = self.lightning.callbacks.ModelCheckpoint(
            dirpath=root / "lightning", filename="{step}", monitor="step", mode="max", save_top_k=KEEP, save_last=True, every_n_train_steps=SAVE_EVERY
        )
        trainer = self.lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=-1, max_steps=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=root, callbacks=[callback(), saver],
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(Stream(), batch_size=8), ckpt_path=ckpt_path)

    def work(self, course: Course) -> None:
        class Report(self.lightning.Callback):  # type: ignore[misc, name-defined]
            pending = 0

            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                # Lightning calls callbacks that save after all others.
                if trainer.global_step % SAVE_EVERY == 0:
                    self.pending = trainer.global_step
                    course.saving(self.pending, tensors_of(module.layer, trainer.optimizers[0]))

            def on_train_batch_start(self, *_: Any) -> None:
                if self.pending:
                    course.saved(self.pending)
                    self.pending = 0

        self.fit(course.root, Report, None)

    def candidates(self, root: Path) -> list[Path]:
        last = root / "lightning" / "last.ckpt"
        return [*([last] if last.exists() else []), *numbered(root / "lightning", r"step=(\d+)\.ckpt")]

    def load(self, root: Path, path: Path | None) -> Found | None:
        class Report(self.lightning.Callback):  # type: ignore[misc, name-defined]
            def on_train_start(self, trainer: Any, module: Any) -> None:
                step = trainer.global_step
                raise Loaded(Found(step, digest(step, tensors_of(module.layer, trainer.optimizers[0]))))

        try:
            self.fit(root, Report, "last" if path is None else str(path))
        except Loaded as loaded:
            return loaded.found if loaded.found.step else None
        raise AssertionError


class Transformers(Engine):
    package = "transformers"
    settings = f'TrainingArguments(save_strategy="steps", save_steps={SAVE_EVERY}, save_total_limit={KEEP})'
    finds = "train(resume_from_checkpoint=True)"
    source = "https://huggingface.co/docs/transformers/main/en/trainer"

    def __init__(self) -> None:
        self.transformers: Any = import_module("transformers")
        self.trainer: Any = self.transformers.Trainer  # imports all that it needs, once

    def train(self, root: Path, callback: type[Any], resume: bool | str) -> None:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = new_model()

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": loss_of(self.layer(x))}

        model = Model()
        arguments = self.transformers.TrainingArguments(
            output_dir=str(root / "transformers"), save_strategy="steps", save_steps=SAVE_EVERY, save_total_limit=KEEP, max_steps=10**6,
            report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no", per_device_train_batch_size=8,
        )  # fmt: skip
        optimizer = new_optimizer(model.layer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        # Not the wrapped optimizer that a callback is handed: its state is empty until it has made a step.
        hook = type("Report", (callback,), {"tensors": staticmethod(lambda: tensors_of(model.layer, optimizer))})()
        self.trainer(model=model, args=arguments, train_dataset=Named(), optimizers=(optimizer, schedule), callbacks=[hook]).train(
            resume_from_checkpoint=resume
        )

    def work(self, course: Course) -> None:
        class Report(self.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % SAVE_EVERY == 0:
                    course.saving(state.global_step, self.tensors())

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                course.saved(state.global_step)

        self.train(course.root, Report, False)

    def candidates(self, root: Path) -> list[Path]:
        return numbered(root / "transformers", r"checkpoint-(\d+)")

    def load(self, root: Path, path: Path | None) -> Found | None:
        class Report(self.transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                raise Loaded(Found(state.global_step, digest(state.global_step, self.tensors())))

        if not self.candidates(root):
            return None
        try:
            self.train(root, Report, True if path is None else str(path))
        except Loaded as loaded:
            return loaded.found
        raise AssertionError


class Accelerate(Engine):
    package = "accelerate"
    settings = f"save_state(), ProjectConfiguration(automatic_checkpoint_naming=True, total_limit={KEEP})"
    finds = "load_state()"
    source = "https://huggingface.co/docs/accelerate/usage_guides/checkpoint"

    def __init__(self) -> None:
        self.accelerate: Any = import_module("accelerate")

    def prepare(self, root: Path) -> tuple[Any, Training]:
        project = self.accelerate.utils.ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=KEEP)
        accelerator = self.accelerate.Accelerator(cpu=True, project_config=project)
        training = Training()
        training.model, training.optimizer = accelerator.prepare(training.model, training.optimizer)
        accelerator.register_for_checkpointing(Counter(training))
        return accelerator, training

    def work(self, course: Course) -> None:
        accelerator, training = self.prepare(course.root)
        for step in training.save_steps():
            course.saving(step, training.tensors())
            accelerator.save_state()
            course.saved(step)

    def candidates(self, root: Path) -> list[Path]:
        return numbered(root / "checkpoints", r"checkpoint_(\d+)")

    def load(self, root: Path, path: Path | None) -> Found | None:
        if not self.candidates(root):
            return None
        accelerator, training = self.prepare(root)
        accelerator.load_state(None if path is None else str(path))
        return training.found()


class Counter:
    """The step, for an engine that keeps objects and has no number of its own."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> dict[str, int]:
        return {"step": self.training.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.training.step = state["step"]

"""Run directories made by the store's own functions, without torch."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridethrough.format import layout
from ridethrough.format.attempt import Attempt, Roster, RosterPart, Run
from ridethrough.format.part import lay_out
from ridethrough.format.seal import Seal, save_id
from ridethrough.journal import Journal
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store import commit, start
from ridethrough.types import AttemptRef, Parent

FS = PosixFileSystem()
CLASSES = {
    "model": {"presence": "present", "detail": "4 tensors"},
    "optimizer": {"presence": "present", "detail": "AdamW"},
    "scheduler": {"presence": "present", "detail": "LambdaLR"},
    "data": {"presence": "unprotectable", "detail": "IterableDataset without state"},
    "distributed": {"presence": "present", "detail": "2 ranks"},
}


def meta_of(step: int, **changes: Any) -> dict[str, Any]:
    saved_at = datetime.datetime.now(tz=datetime.UTC) - datetime.timedelta(minutes=90)
    return {
        "experiment": "exp001",
        "git_commit": "3f2a9c1d0b7e4f5a6c8d9e0f1a2b3c4d5e6f7a8b",
        "git_dirty": False,
        "start_command": ["torchrun", "--nproc-per-node=2", "train.py"],
        "data_version": None,
        "step": step,
        "saved_at": saved_at.isoformat(timespec="seconds"),
        "dependencies": {"torch": "2.13.0", "numpy": "2.4.6", "python": "3.11.9"},
        "config_hash": "9b1c",
        "metrics": {"loss": 2.25},
        "classes": CLASSES,
        **changes,
    }


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)

    @property
    def hint(self) -> str:
        return self.err.splitlines()[-1]


Call = Callable[..., Answer]


@dataclass
class Built:
    """A run under construction."""

    path: Path
    run: Run
    attempt: AttemptRef
    parent: Parent | None
    roster: Roster

    @property
    def journal(self) -> Journal:
        return Journal(FS, SystemClock(), layout.journal_path(str(self.path), "node-a"), role="test")

    def restart(self, *, at_step: int) -> Built:
        """The next attempt, resumed from that step."""
        return _attempt(self.path, self.run, seq=self.attempt.seq + 1, parent=Parent(attempt=self.attempt, step=at_step))

    def save(
        self, step: int, *, parts: tuple[str, ...] | None = None, nodes: tuple[str, ...] = ("node-a",), proof: str = "verified", **meta: Any
    ) -> Path:
        """A checkpoint of the step, or some parts of it; returns its directory."""
        name = save_id(self.run.run_uid, self.attempt.nonce, step)
        seals: list[Seal] = []
        meta = meta_of(step, **meta)  # once: a second may begin between two parts
        for part in parts if parts is not None else tuple(p.name for p in self.roster.parts):
            for node in nodes if part == layout.REPLICATED else nodes[:1]:
                seals.append(commit.commit_part(FS, str(self.path), self._part(part, node, step, name, meta)))
        directory = self.path / layout.step_dir(step, name)
        if parts is None:
            commit.write_manifest(FS, str(self.path), tuple(seals), self.roster)
            commit.write_meta(FS, str(self.path), seals[0])
            for kind in {"verified": ("durable", "verified"), "durable": ("durable",)}.get(proof, ()):
                self.journal.append(f"checkpoint.{kind}", step=step, save_id=name)
        return directory

    def _part(self, part: str, node: str, step: int, name: str, meta: dict[str, Any]) -> commit.PartSave:
        shape = (64, 16)
        spec = lay_out([("weight", "F32", shape), ("bias", "F32", (16,)), ("step", "I64", ())])
        body = bytes((step + i) % 251 for i in range(spec.size_bytes - len(spec.header)))
        return commit.PartSave(
            run_uid=self.run.run_uid, attempt=self.attempt, parent=self.parent, step=step, save_id=name, part=part, node=node,
            roster_digest=self.roster.digest, payload=memoryview(spec.header + body), tree={"lr": 0.1}, meta=meta,
        )  # fmt: skip


def new_run(path: Path) -> Built:
    """A run with one attempt of two ranks and no checkpoint."""
    run = start.open_run(FS, SystemClock(), str(path), known_uid=None, is_fresh=False)
    return _attempt(path, run, seq=1, parent=None)


def _attempt(path: Path, run: Run, *, seq: int, parent: Parent | None) -> Built:
    ref = AttemptRef(seq=seq, nonce=os.urandom(16).hex())
    parts = (RosterPart(name=layout.REPLICATED, holders=(0, 1)), *(RosterPart(name=layout.rank_part(r), holders=(r,)) for r in range(2)))
    roster = Roster(run_uid=run.run_uid, attempt=ref, nodes=("node-a", "node-a"), parts=parts)
    record = Attempt(
        run_uid=run.run_uid, attempt=ref, parent=parent, snapshot_interval_steps=1, world_size=2, roster_digest=roster.digest,
        started_at=SystemClock().now_at().isoformat(timespec="seconds"),
    )  # fmt: skip
    start.write_attempt(FS, str(path), record, roster)
    return Built(path=path, run=run, attempt=ref, parent=parent, roster=roster)


def payload_of(directory: Path, part: str) -> Path:
    return next(directory.glob(f"{part}~*.safetensors"))


def seal_of(directory: Path, part: str) -> Path:
    return next(directory.glob(f"{part}~*.seal"))


def flip(path: Path, *, at: float = 0.5) -> None:
    """One bit of the file is wrong; `at` is the place from 0 (head) to 1 (tail)."""
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 0x04
    path.write_bytes(data)

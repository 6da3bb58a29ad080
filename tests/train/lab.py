"""A whole life of a training process inside the test process: the real checkpointer and persister, no keeper, no other process.

A `Life` is what happens between two power cuts: its memory is gone afterwards, the run directory stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fake_link import FakeLink
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.snapshot.persist import Persister
from ridethrough.train import checkpointer, session
from ridethrough.train.checkpointer import Checkpointer


class LabLink(FakeLink):
    """Answers what a keeper would."""

    hello: ClassVar[dict[str, Any]] = {}

    def request(self, op: str, **_: Any) -> dict[str, Any]:
        return {"launch": 1} if op == "launch" else {}


class Life:
    """One start of the job. Its thread plays persister and supervisor: it announces what a rank waits for."""

    def __init__(self) -> None:
        self.link = LabLink()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="lab-persister")

    def begin(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        control, rank = self.link.board(links.CONTROL), self.link.board(links.rank_board(1, 0))
        persister = Persister(PosixFileSystem(), SystemClock(), self.link, echo=lambda kind, data: self.events.append((kind, data)))  # type: ignore[arg-type]
        control.write({"launch": 1})
        announced, number = None, 0
        while not self._is_over.is_set():
            wanted = rank.read().get("wanted_save")
            if wanted is not None and wanted != announced:
                number += 1
                control.write({"launch": 1, "announced": wanted, "announcement": number})
            announced = wanted
            persister.tick()
            time.sleep(0.001)

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(10)


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    found = Lives(monkeypatch)
    yield found
    found.end()


class Lives:
    """Starts lives one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._now: Life | None = None
        monkeypatch.setattr(checkpointer, "atexit", _NoExit())
        monkeypatch.setattr(session, "watch", lambda *_, **__: None)

    def start(self, run_dir: Any, **settings: Any) -> Checkpointer:
        """The power is back: a new process with a new checkpointer."""
        self.end()
        life = self._now = Life()
        self._patch.setattr(checkpointer, "attach", lambda *_, **__: life.link)
        self._patch.setattr(session, "KeeperLink", lambda *_, **__: life.link)
        life.begin()
        return Checkpointer(run_dir, **{"every_n_train_steps": 1000, "storage_wait_s": 10.0, **settings})

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        assert self._now is not None
        return self._now.events

    @property
    def rank_says(self) -> dict[str, Any]:
        """The board of the rank."""
        assert self._now is not None
        return self._now.link.board(links.rank_board(1, 0)).read()

    def end(self) -> None:
        """The power is cut."""
        if self._now is not None:
            self._now.end()
        self._now = None


class _NoExit:
    @staticmethod
    def register(*_: Any) -> None:
        """A life in the lab ends before the process does."""


def digest(value: Any) -> str:
    """Names a value by its content: tensors by type, shape and bits."""
    total = hashlib.sha256()

    def walk(found: Any) -> None:
        if isinstance(found, torch.Tensor):
            total.update(f"{found.dtype}{tuple(found.shape)}".encode())
            total.update(found.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(found, np.ndarray):
            total.update(f"{found.dtype}{found.shape}".encode() + found.tobytes())
        elif isinstance(found, dict):
            for key in found:
                total.update(repr(key).encode())
                walk(found[key])
        elif isinstance(found, (list, tuple)):
            for item in found:
                walk(item)
        else:
            total.update(repr(found).encode())

    walk(value)
    return total.hexdigest()[:16]


def rng_digest() -> str:
    """Names the state of every generator a script can draw from."""
    return digest([random.getstate(), torch.get_rng_state(), np.random.get_state(legacy=False)])


@contextlib.contextmanager
def draws_nothing() -> Iterator[None]:
    """What happens inside leaves all generators as they were."""
    before = rng_digest()
    yield
    assert rng_digest() == before


def seed_everything(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def as_json(value: Any) -> Any:
    """A tree as it comes back from a seal."""
    return json.loads(json.dumps(value))

"""The random generators of a rank: read and set without drawing from them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

_MASK = (1 << 63) - 1


def capture() -> dict[str, Any]:
    """State of every global generator this process uses: Python, NumPy if loaded, torch on CPU and on each GPU."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    return state


def restore(state: dict[str, Any]) -> None:
    """The generators are as `capture` found them."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy  # noqa: PLC0415  the checkpoint says that the run uses it

        numpy.random.set_state(state["numpy"])
    # Another node may have fewer devices; the state of those that are not there is of no use to anybody.
    for index, one in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, index)


def moved(state: dict[str, Any], source: int, target: int) -> dict[str, Any]:
    """The state for a process that uses GPU `target`, from that of one that used GPU `source`."""
    devices = list(state.get("cuda", ()))
    if source == target or not source < len(devices):
        return state  # no GPUs, or each process sees only its own
    devices += [devices[source]] * (target + 1 - len(devices))
    devices[target] = state["cuda"][source]
    return {**state, "cuda": devices}


def branch(rank: int) -> None:
    """The generators of a rank that did not exist before, on from those of another rank; the same each time, and unlike any other rank's."""
    drawn = int(torch.randint(_MASK, (), dtype=torch.int64))
    seed_all(mix(drawn, rank))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mix(drawn, rank, 1))


def mix(*values: int) -> int:
    """A seed from numbers, well spread and the same on every machine and version (splitmix64, Steele et al. 2014)."""
    mixed = 0
    for value in values:
        mixed = (mixed ^ (value & ((1 << 64) - 1))) + 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
        mixed ^= mixed >> 31
    return mixed & _MASK


def seed_all(seed: int) -> None:
    """The CPU generators start from this seed."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside, the CPU generators are afterwards as they were before."""
    numpy = sys.modules.get("numpy")
    python, tensor = random.getstate(), torch.get_rng_state()
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(tensor)
        if numpy is not None:
            numpy.random.set_state(arrays)

"""PyTorch training that rides through power loss.

>>> import ridethrough
>>> ckpt = ridethrough.Checkpointer("runs/exp001")  # doctest: +SKIP

The names below are the public ones. Importing this package does not import torch; using
`Checkpointer` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridethrough.errors import RideThroughError

if TYPE_CHECKING:
    from ridethrough.train.checkpointer import Checkpointer
    from ridethrough.train.provenance import data_fingerprint

__all__ = ["Checkpointer", "RideThroughError", "__version__", "data_fingerprint"]

__version__ = "0.1.0"

_HOMES = {"Checkpointer": "ridethrough.train.checkpointer", "data_fingerprint": "ridethrough.train.provenance"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib  # noqa: PLC0415  torch is loaded when it is needed and not before

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(name)

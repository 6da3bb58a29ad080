"""The trainer's side of a snapshot: live tensors into a slot, then posted. The only module here that imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ridethrough.format.part import PartLayout
from ridethrough.format.tensors import view_tensor
from ridethrough.snapshot.link import KeeperLink, slot_name
from ridethrough.snapshot.slots import PAGE, Slot, aligned

_INDEX_SPARE_BYTES = 256 << 10
"""Room for the index to grow between snapshots (a longer learning-rate history, say) without new memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """A part before it is copied: its tree, its live tensors, its layout."""

    name: str
    tree: Any
    tensors: Mapping[str, torch.Tensor]
    layout: PartLayout


class Poster:
    """This rank's slots.

    Args:
        link: To the keeper, who holds the memory.
        launch: Start of the command that the slots belong to.
        rank: This rank.
        count: Slots, as agreed.
    """

    def __init__(self, link: KeeperLink, *, launch: int, rank: int, count: int) -> None:
        self._link = link
        self._names = [slot_name(launch, rank, index) for index in range(count)]
        self._slots: list[Slot | None] = [None] * count
        self._steps: list[int] = [-1] * count
        self._views: list[dict[str, tuple[bytes, dict[str, torch.Tensor]]]] = [{} for _ in range(count)]

    def post(self, step: int, parts: tuple[PartState, ...], facts: Mapping[str, Any], *, reserved: int | None) -> bool:
        """A whole snapshot of `step` is in a slot, where it outlives this process.

        Args:
            step: The step just finished.
            parts: Every part this rank holds; their tensors do not change during the call.
            facts: Goes into the index (time, metrics).
            reserved: Step whose slot must not be overwritten: announced to become durable and not yet taken.

        Returns:
            False if no slot was free: the snapshot of this step does not exist on this rank.
        """
        index: dict[str, Any] = {"step": step, "parts": [], **facts}
        at = PAGE
        for part in parts:
            index["parts"].append({"name": part.name, "at": at, "size_bytes": part.layout.size_bytes, "tree": part.tree})
            at += aligned(part.layout.size_bytes)
        needed = aligned(at + len(json.dumps(index, separators=(",", ":"))) + PAGE)
        number = self._free_slot(needed, reserved)
        if number is None:
            return False
        slot = self._slots[number]
        assert slot is not None
        for part, entry in zip(parts, index["parts"], strict=True):
            views = self._views_of(number, slot, part, entry["at"])
            for name, tensor in part.tensors.items():
                views[name].copy_(tensor)
        slot.post(step, index, at)
        self._steps[number] = step
        return True

    @property
    def posted_steps(self) -> list[int]:
        """Steps of which a whole snapshot is in a slot, oldest first."""
        return sorted(step for step in self._steps if step >= 0)

    def _free_slot(self, needed: int, reserved: int | None) -> int | None:
        """A slot of sufficient size, locked for writing: the one with the oldest snapshot."""
        for number in sorted(range(len(self._slots)), key=lambda n: self._steps[n]):
            if reserved is not None and self._steps[number] == reserved:
                continue
            slot = self._slots[number]
            if slot is None or slot.size_bytes < needed:
                self._drop(number)
                slot = self._link.slot(self._names[number], needed + _INDEX_SPARE_BYTES)
                self._slots[number] = slot
            if slot.begin():
                self._steps[number] = -1
                return number
        return None

    def _views_of(self, number: int, slot: Slot, part: PartState, at: int) -> dict[str, torch.Tensor]:
        cached = self._views[number].get(part.name)
        header = part.layout.header
        if cached is None or cached[0] != header or slot.memory[at : at + len(header)] != header:
            slot.memory[at : at + len(header)] = header
            views = {spec.name: view_tensor(slot.memory, at + len(header), spec) for spec in part.layout.tensors}
            cached = (header, views)
            self._views[number][part.name] = cached
        return cached[1]

    def _drop(self, number: int) -> None:
        self._views[number].clear()  # tensors over the memory must go before it can be unmapped
        slot = self._slots[number]
        if slot is not None:
            slot.close()
        self._slots[number] = None
        self._steps[number] = -1

    def close(self) -> None:
        """This process has unmapped its slots; the keeper still holds them. Idempotent."""
        for number in range(len(self._slots)):
            self._drop(number)

"""Snapshots of other nodes' private parts, in the keeper's memory, where they outlive the courier."""

from __future__ import annotations

import json

from ridethrough.errors import KeeperGone
from ridethrough.snapshot.link import KeeperLink, replica_slot
from ridethrough.snapshot.slots import PAGE, Slot, aligned
from ridethrough.snapshot.wire import Parcel

SLOTS_PER_RANK = 4
"""As many as a rank of its own may have: a step that is newest common somewhere is still here."""
_INDEX_SPARE_BYTES = 16 << 10


def find_slot(link: KeeperLink, name: str, size_bytes: int = 0) -> Slot | None:
    """The slot, None if its memory has just been freed or cannot be had.

    Raises:
        KeeperGone: The keeper is dead.
    """
    try:
        return link.slot(name, size_bytes)
    except KeeperGone:
        link.names()  # raises if it is the keeper that is gone, and not the memory
        return None


class Replicas:
    """The slots of one launch; this courier, or its predecessor, is their only writer."""

    def __init__(self, link: KeeperLink) -> None:
        self._link = link
        self._launch = 0
        self._slots: dict[int, list[Slot | None]] = {}

    def change_launch(self, launch: int) -> None:
        """Slots of the launch before are let go; those that a predecessor has filled in this one are found again."""
        self.close()
        self._launch = launch
        prefix = f"{launch}/replica/"
        for name in self._link.names():
            if name.startswith(prefix):
                rank, index = (int(piece) for piece in name.removeprefix(prefix).split("/"))
                self._of(rank)[index] = find_slot(self._link, name)

    def _of(self, rank: int) -> list[Slot | None]:
        return self._slots.setdefault(rank, [None] * SLOTS_PER_RANK)

    def put(self, parcel: Parcel) -> bool:
        """The part is held; False if there is no room, since every slot is being read or there is no memory."""
        entry = parcel.index["parts"][0]
        entry["at"] = PAGE
        index_at = PAGE + aligned(len(parcel.payload))
        needed = index_at + len(json.dumps(parcel.index, separators=(",", ":")))
        slot = self._free_slot(parcel.rank, parcel.step, needed)
        if slot is None:
            return False
        slot.memory[PAGE : PAGE + len(parcel.payload)] = parcel.payload
        slot.post(parcel.step, parcel.index, index_at)
        return True

    def _free_slot(self, rank: int, step: int, needed_bytes: int) -> Slot | None:
        """A slot that is locked for writing: of the same step, or empty, or with the oldest step."""
        slots = self._of(rank)

        def age(index: int) -> tuple[bool, int]:
            slot = slots[index]
            posted = slot.posted_step() if slot is not None else None
            return (posted != step, -1 if posted is None else posted)

        for index in sorted(range(SLOTS_PER_RANK), key=age):
            slot = slots[index]
            if slot is not None and not slot.begin():
                continue
            if slot is None or slot.size_bytes < needed_bytes:
                if slot is not None:
                    slot.close()
                slot = slots[index] = find_slot(self._link, replica_slot(self._launch, rank, index), aligned(needed_bytes + _INDEX_SPARE_BYTES))
                if slot is None or not slot.begin():
                    return None
            return slot
        return None

    def held(self) -> dict[str, list[int]]:
        """The steps that are here, by rank."""
        found = {}
        for rank, slots in sorted(self._slots.items()):
            found[str(rank)] = sorted(step for slot in slots if slot is not None and (step := slot.posted_step()) is not None)
        return found

    def close(self) -> None:
        """Unmapped; the keeper still holds them. Idempotent."""
        for slots in self._slots.values():
            for slot in slots:
                if slot is not None:
                    slot.close()
        self._slots.clear()

"""The snapshots that this node's memory holds: its own ranks' and, as replicas, private parts of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.replicas import find_slot
from ridethrough.snapshot.slots import Slot


class Holdings:
    """Slots of one launch at a time, found by their names in the keeper's memory."""

    def __init__(self, link: KeeperLink) -> None:
        self._link = link
        self._launch = 0
        self._slots: dict[str, Slot] = {}

    def change_launch(self, launch: int) -> None:
        """Slots of the launch before are let go."""
        self._launch = launch
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _of(self, ranks: Sequence[int]) -> dict[int, list[Slot]]:
        prefix = f"{self._launch}/slot/"
        found = self._link.names()
        for name in [n for n in self._slots if n not in found]:
            self._slots.pop(name).close()
        for name, size in found.items():
            if name.startswith(prefix) and (name not in self._slots or self._slots[name].size_bytes != size):
                if name in self._slots:
                    self._slots.pop(name).close()
                slot = find_slot(self._link, name)
                if slot is not None:
                    self._slots[name] = slot
        by_rank: dict[int, list[Slot]] = {rank: [] for rank in ranks}
        for name, slot in self._slots.items():
            by_rank.setdefault(int(name.split("/")[2]), []).append(slot)
        return by_rank

    def state_at(self, step: int, ranks: Sequence[int]) -> str:
        """Says "ready" if every rank has posted the step, "missed" if one has passed it, else "wait"."""
        posted = {rank: {slot.posted_step() for slot in slots} for rank, slots in self._of(ranks).items()}
        if all(step in steps for steps in posted.values()):
            return "ready"
        if any(step not in steps and max((s for s in steps if s is not None), default=-1) > step for steps in posted.values()):
            return "missed"
        return "wait"

    def newest_common(self, ranks: Sequence[int]) -> int:
        """The newest step that every rank has posted, -1 if there is none."""
        posted = [{s for slot in slots if (s := slot.posted_step()) is not None} for slots in self._of(ranks).values()]
        return max(set.intersection(*posted), default=-1) if posted else -1

    def pin(self, step: int, ranks: Sequence[int]) -> dict[int, Slot] | None:
        """Every rank's slot of this step, pinned; None if one is gone."""
        pinned: dict[int, Slot] = {}
        for rank, slots in self._of(ranks).items():
            held = next((slot for slot in slots if slot.posted_step() == step and slot.pin(step)), None)
            if held is None:
                for slot in pinned.values():
                    slot.release()
                return None
            pinned[rank] = held
        return pinned

    def has_replicas(self, step: int, ranks: Iterable[int]) -> bool:
        """Snapshots of all those ranks of other nodes are here at this step."""
        pinned = self.pin_replicas(step, ranks)
        for slot in pinned.values():
            slot.close()
        return pinned.keys() >= set(ranks)

    def pin_replicas(self, step: int, ranks: Iterable[int]) -> dict[int, Slot]:
        """Slots of those ranks of other nodes, as far as they are here at this step; pinned until closed by the caller."""
        prefix, wanted = f"{self._launch}/replica/", set(ranks)
        pinned: dict[int, Slot] = {}
        for name in self._link.names() if wanted else ():
            rank = int(name.split("/")[2]) if name.startswith(prefix) else -1
            if rank in wanted and rank not in pinned:
                slot = find_slot(self._link, name)
                if slot is not None and slot.posted_step() == step and slot.pin(step):
                    pinned[rank] = slot
                elif slot is not None:
                    slot.close()
        return pinned

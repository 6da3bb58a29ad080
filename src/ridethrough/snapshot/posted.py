"""What this node's own trainers have posted, and copies of their private parts to send away."""

from __future__ import annotations

from collections.abc import Iterable

from ridethrough.errors import Damaged
from ridethrough.format.layout import rank_part
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.placement import REPLICA_LIMIT_BYTES
from ridethrough.snapshot.replicas import find_slot
from ridethrough.snapshot.slots import Slot
from ridethrough.snapshot.wire import HEAD_LIMIT_BYTES, Packed, pack


class Posted:
    """The slots of this node's ranks in one launch."""

    def __init__(self, link: KeeperLink, launch: int, ranks: Iterable[int]) -> None:
        self._link = link
        self._launch = launch
        self._slots: dict[str, Slot] = {}
        self._of: dict[int, list[Slot]] = {rank: [] for rank in ranks}
        self.too_large: set[int] = set()
        """Ranks whose private part is over the limit: it is never sent, and survives only on tiers."""

    def refresh(self) -> bool:
        """Slots that were made since, or made anew because a state has grown, are known; False if there were none."""
        prefix = f"{self._launch}/slot/"
        found = {name: size for name, size in self._link.names().items() if name.startswith(prefix)}
        for name in [name for name, slot in self._slots.items() if found.get(name) != slot.size_bytes]:
            self._slots.pop(name).close()
        unknown = found.keys() - self._slots.keys()
        for name in unknown:
            slot = find_slot(self._link, name)
            if slot is not None:
                self._slots[name] = slot
        for rank in self._of:
            self._of[rank] = [slot for name, slot in self._slots.items() if int(name.split("/")[2]) == rank]
        return bool(unknown)

    def newest_common(self) -> int:
        """The newest step that all ranks have posted, -1 if there is none."""
        steps = [{slot.posted_step() for slot in slots} - {None} for rank, slots in self._of.items() if rank not in self.too_large]
        return max((step for step in set.intersection(*steps) if step is not None), default=-1) if steps else -1

    def copy_all(self, step: int) -> tuple[Packed, ...] | None:
        """The private parts of all ranks at this step; None if one has been overwritten meanwhile."""
        found = []
        for rank in sorted(self._of.keys() - self.too_large):
            packed = self._copy(rank, step)
            if packed is not None:
                found.append(packed)
            elif rank not in self.too_large:
                return None
        return tuple(found)

    def _copy(self, rank: int, step: int) -> Packed | None:
        slot = next((slot for slot in self._of[rank] if slot.posted_step() == step), None)
        if slot is None:
            return None
        try:
            parts, index = slot.read()
        except (Damaged, ValueError):
            return None  # being overwritten
        packed = None
        is_too_large = False
        for part in parts:
            if part.name == rank_part(rank):
                is_too_large = part.payload.nbytes > REPLICA_LIMIT_BYTES
                if not is_too_large:
                    packed = pack(rank=rank, step=step, index=index, tree=part.tree, payload=bytes(part.payload))
                    is_too_large = len(packed.head) > HEAD_LIMIT_BYTES
            part.payload.release()
        # Proven afterwards, not pinned meanwhile: the trainer must find its slots free. A slot that can be pinned at this
        # step now has held it all the time, for who writes to it takes the step away first and never brings it back.
        if not slot.pin(step):
            return None
        slot.release()
        if is_too_large:
            self.too_large.add(rank)
            return None
        return packed

    def close(self) -> None:
        """Unmapped. Idempotent."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._of = {rank: [] for rank in self._of}

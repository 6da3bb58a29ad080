"""All ranks of the job as they come to agreements: who is where, and what everybody is told.

A failure is a value here until every rank has it: raised on one rank alone it would leave the
others waiting in a collective for ever.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ridethrough.errors import RideThroughError, StorageError, UsageError
from ridethrough.seam.clock import boot_id
from ridethrough.types import FORMAT

T = TypeVar("T")
U = TypeVar("U")


class Group:
    """All ranks of the job; one rank alone if torch.distributed is not in use."""

    def __init__(self) -> None:
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.world_size = dist.get_world_size() if self.is_distributed else 1
        if not self.is_distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(detail="call torch.distributed.init_process_group() before ckpt.restore()")
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.nodes: tuple[str, ...] = ()
        """Node of each rank; known after `meet`."""

    # -- transport: object collectives work with every backend, also where a group has only NCCL -------------------------

    def exchange(self, value: Any) -> list[Any]:
        """What every rank has given, in rank order, on every rank."""
        if not self.is_distributed:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def collect(self, value: Any) -> list[Any] | None:
        """What every rank has given, in rank order, on the first rank; None elsewhere."""
        if not self.is_distributed:
            return [value]
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0)
        return found

    def tell(self, value: Any, *, source: int) -> Any:
        """What the rank `source` has given, on every rank."""
        box = [value]
        if self.is_distributed:
            dist.broadcast_object_list(box, src=source)
        return box[0]

    # -- who is where ----------------------------------------------------------------------------------------------------

    def meet(self, node: str) -> None:
        """Every rank knows on which node each is.

        Raises:
            UsageError: Ranks run different versions of this package, or two machines have one name.
        """
        # Plain values: what another version says must be readable before it is known to be another.
        mine = {"version": f"{importlib.metadata.version('ridethrough')} (format {FORMAT})", "node": node, "boot": boot_id()}
        rows = self.exchange(mine)
        check_meeting(rows)
        self.nodes = tuple(str(row["node"]) for row in rows)

    @property
    def node(self) -> str:
        """This rank's node."""
        return self.nodes[self.rank]

    @property
    def node_order(self) -> tuple[str, ...]:
        """Every node once, in the order of its first rank."""
        return tuple(_first_ranks(self.nodes))

    def first_rank_of(self, node: str) -> int:
        """The rank that speaks for a node."""
        return _first_ranks(self.nodes)[node]

    # -- deciding together -----------------------------------------------------------------------------------------------

    def first_decides(self, decide: Callable[[], T]) -> T:
        """What the first rank's call returned, on every rank; its error is raised on every rank."""
        value, error = self.tell(attempted(decide) if self.rank == 0 else None, source=0)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def everyone(self, act: Callable[[], T]) -> list[tuple[T | None, RideThroughError | None]]:
        """What every rank's call returned or raised, in rank order, on every rank."""
        return self.exchange(attempted(act))

    def together(self, act: Callable[[], T]) -> T:
        """This rank's result; if any rank failed, the first failure is raised on all."""
        kept: list[T] = []

        def run() -> None:
            kept.append(act())

        for _, error in self.everyone(run):
            if error is not None:
                raise error
        return kept[0]

    def each_node(self, act: Callable[[], T], *, nodes: Collection[str] | None = None) -> dict[str, T]:
        """What the first rank of every node (or of those given) came to, by node, on every rank; the first failure is raised on all."""
        return self._by_node(self.exchange(self._as_speaker(act, nodes)), nodes)

    def first_decides_from(self, act: Callable[[], T], decide: Callable[[Mapping[str, T]], U], *, nodes: Collection[str] | None = None) -> U:
        """What the first rank makes of what the nodes came to; for findings that are too large to be told to everybody."""
        rows = self.collect(self._as_speaker(act, nodes))

        def decide_from() -> U:
            assert rows is not None
            return decide(self._by_node(rows, nodes))

        return self.first_decides(decide_from)

    def _as_speaker(self, act: Callable[[], T], nodes: Collection[str] | None) -> tuple[T | None, RideThroughError | None]:
        is_asked = nodes is None or self.node in nodes
        return attempted(act) if is_asked and self.rank == self.first_rank_of(self.node) else (None, None)

    def _by_node(self, rows: list[Any], nodes: Collection[str] | None) -> dict[str, Any]:
        found = {}
        for node, rank in _first_ranks(self.nodes).items():
            value, error = rows[rank]
            if error is not None:
                raise error
            if nodes is None or node in nodes:
                found[node] = value
        return found


@functools.lru_cache(maxsize=4)
def _first_ranks(nodes: tuple[str, ...]) -> dict[str, int]:
    """The first rank of every node, in the order of these ranks."""
    found: dict[str, int] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, rank)
    return found


def check_meeting(rows: list[Mapping[str, Any]]) -> None:
    """The ranks fit together.

    Raises:
        UsageError: They run different versions of this package, or two machines have one name.
    """
    by_version: dict[str, str] = {}
    by_node: dict[str, str] = {}
    for row in rows:
        by_version.setdefault(str(row["version"]), str(row["node"]))
        if by_node.setdefault(str(row["node"]), str(row["boot"])) != str(row["boot"]):
            raise UsageError(detail=f"two machines are called {row['node']}: set RIDETHROUGH_NODE to a different name on each")
    if len(by_version) > 1:
        listed = ", ".join(f"{version} on {node}" for version, node in by_version.items())
        raise UsageError(detail=f"the nodes run different versions of ridethrough: {listed}; install the same one everywhere")


def attempted(act: Callable[[], T]) -> tuple[T | None, RideThroughError | None]:
    """The result or the failure of a call, as values."""
    try:
        return act(), None
    except RideThroughError as error:
        return None, error
    except OSError as error:
        # Not-found and the like keep their own type on the way here: a run directory that is a file, say.
        return None, StorageError(path=str(error.filename), detail=str(error.strerror))

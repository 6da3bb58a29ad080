"""Several nodes in one process: ranks are threads, what they tell each other is pickled as on its way between machines.

A `Room` has the nodes' run directories: one for all, or one for each. `Disks` writes checkpoints into them, with the store's own functions.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.format import layout
from ridethrough.format.attempt import Attempt, Roster, Run
from ridethrough.format.seal import Seal, save_id
from ridethrough.seam.fs import FileSystem, PosixFileSystem
from ridethrough.store.commit import PartSave, commit_part
from ridethrough.store.start import adopt_run, write_attempt
from ridethrough.testing import FakeClock
from ridethrough.testing.store import simple_payload
from ridethrough.train.agreement import new_roster
from ridethrough.train.group import Group
from ridethrough.train.tier import Memory
from ridethrough.types import AttemptRef, Parent

RUN_UID = "5a" * 16
PART_BYTES = 3000
_PATIENCE_S = 30.0


class ThreadGroup(Group):
    """A rank among threads."""

    def __init__(self, rank: int, nodes: tuple[str, ...], table: list[bytes], barrier: threading.Barrier) -> None:
        self.is_distributed = len(nodes) > 1
        self.rank, self.world_size, self.local_rank = rank, len(nodes), nodes[:rank].count(nodes[rank])
        self.nodes = nodes
        self._table, self._barrier = table, barrier

    def exchange(self, value: Any) -> list[Any]:
        self._table[self.rank] = pickle.dumps(value)
        self._barrier.wait(_PATIENCE_S)
        found = [pickle.loads(given) for given in self._table]
        self._barrier.wait(_PATIENCE_S)
        return found

    def collect(self, value: Any) -> list[Any] | None:
        found = self.exchange(value)
        return found if self.rank == 0 else None

    def tell(self, value: Any, *, source: int) -> Any:
        return self.exchange(value if self.rank == source else None)[source]


def run_ranks(nodes: Iterable[str], act: Callable[[Group], Any]) -> list[Any]:
    """What every rank's call returned or raised."""
    where = tuple(nodes)
    table, barrier, outcomes = [b""] * len(where), threading.Barrier(len(where)), [None] * len(where)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = act(ThreadGroup(rank, where, table, barrier))
        except BaseException as error:  # noqa: BLE001  the test looks at it
            outcomes[rank] = error  # type: ignore[call-overload]
            if isinstance(error, (AssertionError, KeyError, TypeError, AttributeError)):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(where))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome in outcomes:
        if isinstance(outcome, threading.BrokenBarrierError):
            raise AssertionError(f"the ranks lost each other: {outcomes}")
    return outcomes


def same_error(outcomes: list[Any], kind: type[BaseException]) -> BaseException:
    """The one error that all ranks have raised."""
    assert [type(outcome) for outcome in outcomes] == [kind] * len(outcomes), outcomes
    # The run directory may have another path on each node.
    assert len({str({**outcome.fields, "path": None}) for outcome in outcomes}) == 1
    found: BaseException = outcomes[0]
    return found


@dataclass(slots=True)
class Room:
    """Nodes and their disks."""

    root: Path
    nodes: tuple[str, ...]
    is_shared: bool = False
    fs: dict[str, FileSystem] = field(default_factory=dict)
    memories: dict[str, Memory] = field(default_factory=dict)

    def run_dir(self, node: str) -> str:
        return str(self.root / "shared" / "run") if self.is_shared else str(self.root / node / "run")

    def fs_of(self, node: str) -> FileSystem:
        return self.fs.get(node, PosixFileSystem())

    def memory(self, node: str) -> Memory:
        return self.memories.get(node, Memory())

    @property
    def disks(self) -> dict[str, str]:
        """Every directory once, under the name of the first node that has it."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if self.run_dir(node) not in found.values():
                found[node] = self.run_dir(node)
        return found


@dataclass(slots=True)
class Disks:
    """A run in the directories of a room, as its nodes have left it."""

    room: Room
    run_uid: str = RUN_UID
    attempt: AttemptRef = field(default_factory=lambda: AttemptRef(seq=0, nonce=""))
    parent: Parent | None = None
    roster: Roster | None = None

    def open(self, *nodes: str) -> None:
        """The run's marker is on the disks of these nodes (of all unless given)."""
        for node in nodes or self.room.disks:
            run = Run(run_uid=self.run_uid, name="run", created_at="then")
            adopt_run(PosixFileSystem(), self.room.run_dir(node), run)

    def start(
        self,
        seq: int,
        ranks: Iterable[str],
        *,
        parent: Parent | None = None,
        on: Iterable[str] | None = None,
        nonce: str | None = None,
        has_replicated: bool = True,
    ) -> AttemptRef:
        """An attempt of those ranks' nodes, its records on the disks of `on`."""
        self.attempt = AttemptRef(seq=seq, nonce=nonce or f"{seq:02x}" * 16)
        self.parent = parent
        self.roster = new_roster(self.run_uid, self.attempt, tuple(ranks), has_replicated=has_replicated)
        for node in self.room.disks if on is None else on:
            record = Attempt(
                run_uid=self.run_uid,
                attempt=self.attempt,
                parent=parent,
                snapshot_interval_steps=1,
                world_size=self.roster.world_size,
                roster_digest=self.roster.digest,
                started_at="then",
            )
            write_attempt(PosixFileSystem(), self.room.run_dir(node), record, self.roster)
        return self.attempt

    def save(self, step: int, where: Mapping[str, Iterable[str]], *, trees: Mapping[str, Any] | None = None, **meta: Any) -> list[Seal]:
        """Parts of a step by the node on whose disk they are."""
        assert self.roster is not None
        seals = []
        for node, parts in where.items():
            for name in parts:
                save = PartSave(
                    run_uid=self.run_uid,
                    attempt=self.attempt,
                    parent=self.parent,
                    step=step,
                    save_id=save_id(self.run_uid, self.attempt.nonce, step),
                    part=name,
                    node=node,
                    roster_digest=self.roster.digest,
                    payload=memoryview(payload(step, name)),
                    tree=(trees or {}).get(name, {}),
                    meta={"step": step, "by": node, **meta},
                )
                seals.append(commit_part(PosixFileSystem(), self.room.run_dir(node), save))
        return seals

    def path(self, node: str, step: int, part: str) -> Path:
        """The payload of a part on a node's disk."""
        directory = Path(self.room.run_dir(node), layout.step_dir(step, save_id(self.run_uid, self.attempt.nonce, step)))
        [found] = [path for path in directory.glob(f"{part}~*.safetensors") if path.name.startswith(f"{part}~{node}-")]
        return found


def payload(step: int, part: str) -> bytes:
    """What the payload of a part must be."""
    return simple_payload(7, step, part, size_bytes=PART_BYTES)


CLOCK = FakeClock()

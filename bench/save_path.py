"""What our two halves of a save cost: the snapshot that blocks training, and the durable save that does not.

Compared in the same run with their floors: a plain copy of the same bytes in memory, and a plain
write + fsync of the same bytes on the same disk. Ratios count, not seconds: the disk varies.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import figures
import torch

from ridethrough.format import layout, seal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import memory_file
from ridethrough.snapshot.link import KeeperLink
from ridethrough.snapshot.post import Poster
from ridethrough.snapshot.slots import Slot
from ridethrough.store import commit
from ridethrough.store.retain import delete_checkpoint
from ridethrough.store.verify import check_part
from ridethrough.train import state
from ridethrough.types import AttemptRef

MIB = 1 << 20
SIZE_MIB = int(os.environ.get("BENCH_MIB", "256"))
RUNS = 5


class Memory(KeeperLink):
    """A keeper's memory without the keeper: this measures copies, not messages."""

    def __init__(self) -> None:
        pass

    def slot(self, name: str, size_bytes: int = 0) -> Slot:
        return Slot(memory_file(name.replace("/", "-"), size_bytes))


def median_s(act: Callable[[int], None]) -> float:
    times = []
    for number in range(RUNS + 1):
        began = time.perf_counter()
        act(number)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first run faults the pages in


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.ModuleList([torch.nn.Linear(1024, 1024, bias=False) for _ in range(SIZE_MIB // 4)])
    tracked = [state.classify("model", model, world_size=1, seed=0)]
    context = state.Context(
        rank=0, local_rank=0, world_size=1, node="bench", step=1, epoch=0, loss=None, metrics={}, config_hash=None, start_command="", structure={}
    )
    parts = state.capture(tracked, context)
    size = sum(p.layout.size_bytes for p in parts)
    poster = Poster(Memory(), launch=1, rank=0, count=2)
    sources = [p.detach() for p in model.parameters()]
    targets = [torch.empty_like(p) for p in sources]

    def copy(_: int) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def snapshot(number: int) -> None:
        poster.post(number + 1, state.capture(tracked, context), {"captured_at": "", "metrics": {}}, reserved=None)

    copy_s, snapshot_s = median_s(copy), median_s(snapshot)
    slot = next(s for s in poster._slots if s is not None)
    payload = slot.read()[0][0]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR", ".")) as directory:
        fs = PosixFileSystem()

        def raw(number: int) -> None:
            descriptor = os.open(Path(directory, f"raw-{number}"), os.O_WRONLY | os.O_CREAT)
            view = memoryview(payload.payload)
            while view:
                view = view[os.write(descriptor, view[: 8 * MIB]) :]
            os.fsync(descriptor)
            os.close(descriptor)
            os.unlink(Path(directory, f"raw-{number}"))

        sealed: list[seal.Seal] = []

        def durable(number: int) -> None:
            nonce = uuid.uuid4().hex
            save = commit.PartSave(
                run_uid="bench", attempt=AttemptRef(seq=1, nonce=nonce), parent=None, step=number, save_id=seal.save_id("bench", nonce, number),
                part="replicated", node="bench", roster_digest="", payload=payload.payload, tree={}, meta={},
            )  # fmt: skip
            if sealed:
                # As the raw write does: else ours alone would pay for fresh memory of the page cache.
                delete_checkpoint(fs, directory, layout.step_dir(sealed[-1].step, sealed[-1].save_id))
            sealed.append(commit.commit_part(fs, directory, save))

        def verify(_: int) -> None:
            one = sealed[-1]
            check_part(fs, directory, layout.step_dir(one.step, one.save_id), one)

        raw_s, durable_s, verify_s = median_s(raw), median_s(durable), median_s(verify)
    rows = [
        {"name": "snapshot, blocking", "value": snapshot_s, "unit": "s", "floor": copy_s, "ratio": snapshot_s / copy_s, "target": 1.2},
        {"name": "durable save of one part", "value": durable_s, "unit": "s", "floor": raw_s, "ratio": durable_s / raw_s, "target": 1.3},
        {"name": "verify past the cache", "value": verify_s, "unit": "s", "floor": raw_s, "ratio": verify_s / raw_s, "target": None},
    ]
    print(f"{size / MIB:.0f} MiB, median of {RUNS}")
    print(f"{'':28}{'seconds':>9}{'floor':>9}{'ratio':>8}{'target':>8}")
    for row in rows:
        row["met"] = row["target"] is None or row["ratio"] <= row["target"]
        print(f"{row['name']:28}{row['value']:9.3f}{row['floor']:9.3f}{row['ratio']:8.2f}{row['target'] or '-':>8}{'' if row['met'] else '  missed'}")
    print(f"figures: {figures.write('bench', rows, size_bytes=size)}")


if __name__ == "__main__":
    main()

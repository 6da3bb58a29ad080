"""What copies cost, beside the plain tools of the same run: verifying beside xxh3 and the disk, copying beside cp and an upload.

    python bench/places.py [--mib 256]

Ratios count, not seconds. An object store is one on loopback (seaweedfs), as its floor gets the same bytes by the same client.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import obstore
import xxhash
from obstore.store import from_url

from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import candidates, read_catalog
from ridethrough.store.commit import commit_part
from ridethrough.store.copy import copy_checkpoint
from ridethrough.store.place import Place, open_place
from ridethrough.store.verify import check_part
from ridethrough.testing import SimpleStore

MIB = 1 << 20
RUNS = 3


def median_s(act: Callable[[int], object]) -> float:
    times = []
    for number in range(RUNS):
        began = time.perf_counter()
        act(number)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def dropped(path: str) -> None:
    """The file is not in the page cache any more."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_raw(path: str) -> None:
    """Past the cache, as the check does."""
    fs, buffer = PosixFileSystem(), memoryview(bytearray(16 * MIB))
    size = os.stat(path).st_size
    for at in range(0, size, len(buffer)):
        fs.read_into(path, buffer[: min(len(buffer), size - at)], offset=at, past_cache=True)


def synced_cp(source: str, target: str) -> None:
    """What a careful person types."""
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)


def rows_of_bytes(root: Path, mib: int) -> list[dict[str, Any]]:
    store = SimpleStore(fs=PosixFileSystem(), run_dir=str(root / "run"), part_bytes=mib * MIB, world_size=1, has_private_parts=False)
    store.start()
    [seal] = store.commit(1)
    dir_name = store.dir_name(1)
    payload = os.path.join(store.run_dir, dir_name, seal.payload_name)
    data = Path(payload).read_bytes()
    hash_s = median_s(lambda _: xxhash.xxh3_128_digest(data))
    read_s = median_s(lambda _: read_raw(payload))
    verify_s = median_s(lambda _: check_part(store.fs, store.run_dir, dir_name, seal))
    floor_s = max(hash_s, read_s)
    rows = [_row("verify past the cache: speed of the slower of xxh3 and disk", floor_s / verify_s, 0.8, verify_s, floor_s)]
    here = Place(fs=store.fs, run_dir=store.run_dir, shown="run", is_mounted=True)
    checkpoint = candidates(read_catalog(store.fs, store.run_dir))[0]

    def cp(number: int) -> None:
        dropped(payload)
        synced_cp(os.path.join(store.run_dir, dir_name), str(root / f"cp-{number}"))
        shutil.rmtree(root / f"cp-{number}")

    def ours(number: int) -> None:
        dropped(payload)
        copy_checkpoint(here, open_place(str(root / f"copy-{number}")), checkpoint)
        shutil.rmtree(root / f"copy-{number}")

    def cp_and_read(number: int) -> None:
        dropped(payload)
        synced_cp(os.path.join(store.run_dir, dir_name), str(root / f"cp-{number}"))
        read_raw(str(root / f"cp-{number}" / seal.payload_name))
        shutil.rmtree(root / f"cp-{number}")

    cp_s, ours_s, cp_read_s = median_s(cp), median_s(ours), median_s(cp_and_read)
    rows.append(_row("copy: speed of cp + sync", cp_s / ours_s, 0.8, ours_s, cp_s))
    rows.append(_row("copy: speed of cp + sync + reading it back", cp_read_s / ours_s, None, ours_s, cp_read_s))
    return rows


def rows_of_objects(root: Path, mib: int, url: str) -> list[dict[str, Any]]:
    store = SimpleStore(fs=PosixFileSystem(), run_dir=str(root / "objects-run"), part_bytes=mib * MIB, world_size=1, has_private_parts=False)
    store.start()
    [seal] = store.commit(1)
    payload = Path(store.run_dir, store.dir_name(1), seal.payload_name).read_bytes()
    here = Place(fs=store.fs, run_dir=store.run_dir, shown="run", is_mounted=True)
    checkpoint = candidates(read_catalog(store.fs, store.run_dir))[0]
    options: dict[str, Any] = {"client_options": {"allow_http": "true"}, "virtual_hosted_style_request": False}
    client = from_url(url, **options)
    plain_s = median_s(lambda number: obstore.put(client, f"plain-{number}", payload))
    ours_s = median_s(lambda number: copy_checkpoint(here, open_place(f"{url}/copy-{number}"), checkpoint))
    both_s = median_s(lambda number: (obstore.put(client, f"plain-{number}", payload), obstore.get(client, f"plain-{number}").bytes()))
    return [
        _row("copy to S3: speed of a plain put", plain_s / ours_s, 0.8, ours_s, plain_s),
        _row("copy to S3: speed of a put and a get", both_s / ours_s, None, ours_s, both_s),
    ]


def rows_of_catalogs(root: Path) -> list[dict[str, Any]]:
    rows = []
    for name, steps, ranks in (("10,000 checkpoints of one part", 10_000, 0), ("1 checkpoint of 4,096 parts", 1, 4095)):
        run_dir = str(root / f"catalog-{steps}")
        store = SimpleStore(fs=_Unsynced(), run_dir=run_dir, part_bytes=64, world_size=max(ranks, 1), has_private_parts=bool(ranks))
        store.start()
        for step in range(1, steps + 1):
            for part in store.part_names:
                commit_part(store.fs, run_dir, store.part_save(step, part))
        took_s = median_s(lambda _, at=run_dir: read_catalog(PosixFileSystem(), at))
        rows.append({"name": f"catalogue of {name}", "value": round(took_s, 2), "unit": "s", "target": 1.0, "met": took_s < 1.0})
    return rows


class _Unsynced(PosixFileSystem):
    """Fills a directory quickly; durability is not what is measured here."""

    def sync_dir(self, path: str) -> None:
        return

    def create(self, path: str, size_bytes: int) -> Any:
        writer = super().create(path, 0)
        writer.sync = lambda: None  # type: ignore[method-assign]
        return writer


def _row(name: str, ratio: float, target: float | None, value_s: float, floor_s: float) -> dict[str, Any]:
    return {
        "name": name, "value": round(value_s, 3), "unit": "s", "floor": round(floor_s, 3), "ratio": round(ratio, 2), "target": target,
        "met": target is None or ratio >= target,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--s3", help="s3://BUCKET/PREFIX of a running store (with the AWS_ variables); left out unless given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR", ".")) as directory:
        root = Path(directory)
        rows = rows_of_bytes(root, arguments.mib)
        if arguments.s3:
            rows += rows_of_objects(root, arguments.mib, f"{arguments.s3}/{uuid.uuid4().hex[:8]}")
        rows += rows_of_catalogs(root)
    print(f"{'':62}{'seconds':>9}{'floor':>8}{'ratio':>7}{'target':>8}")
    for row in rows:
        said = [
            f"{row.get(key) if row.get(key) is not None else '-':>{width}}"
            for key, width in (("value", 9), ("floor", 8), ("ratio", 7), ("target", 8))
        ]
        print(f"{row['name']:62}{''.join(said)}{'' if row['met'] else '  NOT MET'}")
    print(f"figures: {figures.write('places', rows)}")
    sys.exit(0)


if __name__ == "__main__":
    main()

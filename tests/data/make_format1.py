"""Writes the golden run of format 1, once. It is then committed and never written again.

    python tests/data/make_format1.py tests/data/format1

Every later version must read these very bytes; a change of the format is a new directory.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import random
import sys

from ridethrough.format import layout, part, tree
from ridethrough.format.attempt import Attempt, Roster, RosterPart
from ridethrough.format.seal import save_id
from ridethrough.journal import Journal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.commit import PartSave, commit_part, write_manifest, write_meta
from ridethrough.store.start import open_run, write_attempt
from ridethrough.testing import FakeClock
from ridethrough.types import AttemptRef, Parent

INVENTORIES = {
    "replicated": [("model/layer.weight", "F32", [3, 4]), ("model/layer.bias", "BF16", [5]), ("model/é \"quoted\"", "F16", [2]),
                   ("optimizer/0/step", "F32", []), ("optimizer/0/exp_avg", "F64", [2, 2]), ("empty", "F32", [0, 7])],
    "rank-00000": [("rng/torch", "U8", [16]), ("rng/numpy", "U32", [6]), ("norm/count", "I64", []), ("mask", "BOOL", [9])],
    "rank-00001": [("rng/torch", "U8", [16]), ("rng/numpy", "U32", [6]), ("norm/count", "I64", []), ("small", "I8", [3]), ("medium", "I16", [3])],
}  # fmt: skip


def leaf(path: str, value: object) -> object:
    """Values that are already encoded stand as they are."""
    return value.encoded if isinstance(value, Encoded) else NotImplemented


class Encoded:
    """A tag that only an adapter of NumPy or torch writes."""

    def __init__(self, tag: str, value: object) -> None:
        self.encoded = {"~": tag, "v": value}


def state(step: int, part_name: str) -> dict[str, object]:
    return {
        "step": step,
        "part": part_name,
        "first_tensor": Encoded("tensor", INVENTORIES[part_name][0][0]),
        "betas": (0.9, 0.999),
        "lr": 0.1 + 0.2,
        "minus_zero": -0.0,
        "nan": float("nan"),
        "infinity": float("-inf"),
        "big": 2**100,
        "by_number": {0: "zero", (1, "a"): None},
        "unsorted": {"z": 1, "a": 2},
        "tag_like": {"~": "tensor", "v": 1},
        "raw": b"\x00\xff",
        "seen": {3, 1, 2},
        "complex": 1.5 - 2j,
        "numpy": Encoded("numpy", ["<f4", "cdcccc3d"]),
        "dtype": Encoded("torch", ["dtype", "bfloat16"]),
        "text": "é日本\n",
    }


def payload(step: int, part_name: str) -> bytes:
    laid = part.lay_out(INVENTORIES[part_name])
    body = bytearray(random.Random(f"{step}/{part_name}").randbytes(laid.size_bytes - len(laid.header)))
    for spec in laid.tensors:
        if spec.dtype == "BOOL":
            body[spec.begin : spec.end] = bytes(value & 1 for value in body[spec.begin : spec.end])
    return laid.header + bytes(body)


def main(target: str) -> None:
    if os.path.exists(target):
        sys.exit(f"{target} exists: golden data is written once")
    os.environ["RIDETHROUGH_NODE"] = "golden"
    fs = PosixFileSystem()
    clock = FakeClock(now_at=datetime.datetime(2026, 7, 28, 12, 0, tzinfo=datetime.UTC))
    run_dir = os.path.join(os.path.abspath(target), "exp001")
    run_uid = open_run(fs, clock, run_dir, known_uid=None, is_fresh=False).run_uid
    journal = Journal(fs, clock, layout.journal_path(run_dir, "golden"), role="golden")
    parent = None
    for seq, step in ((1, 100), (2, 200)):
        attempt = AttemptRef(seq=seq, nonce=f"{seq}0" * 16)
        roster = Roster(
            run_uid=run_uid,
            attempt=attempt,
            nodes=("golden", "golden"),
            parts=(
                RosterPart(name="replicated", holders=(0, 1)),
                RosterPart(name="rank-00000", holders=(0,)),
                RosterPart(name="rank-00001", holders=(1,)),
            ),
        )
        started_at = clock.now_at().isoformat(timespec="seconds")
        record = Attempt(
            run_uid=run_uid,
            attempt=attempt,
            parent=parent,
            snapshot_interval_steps=10,
            world_size=2,
            roster_digest=roster.digest,
            started_at=started_at,
        )
        write_attempt(fs, run_dir, record, roster)
        journal.append("attempt.started", attempt=attempt.label, world_size=2)
        clock.advance(60)
        meta = {
            "experiment": "exp001", "git_commit": "0" * 40, "git_dirty": False, "start_command": ["python", "train.py"], "data_version": None,
            "step": step, "saved_at": clock.now_at().isoformat(timespec="seconds"), "dependencies": {"python": "3.11"}, "config_hash": None,
            "metrics": {"loss": 0.5},
        }  # fmt: skip
        seals = tuple(
            commit_part(
                fs,
                run_dir,
                PartSave(
                    run_uid=run_uid,
                    attempt=attempt,
                    parent=parent,
                    step=step,
                    save_id=save_id(run_uid, attempt.nonce, step),
                    part=name,
                    node="golden",
                    roster_digest=roster.digest,
                    payload=memoryview(payload(step, name)),
                    tree=tree.encode(state(step, name), name, leaf),
                    meta=meta,
                ),
            )
            for name in INVENTORIES
        )
        write_meta(fs, run_dir, seals[0])
        write_manifest(fs, run_dir, seals, roster)
        journal.append("checkpoint.durable", step=step, save_id=seals[0].save_id)
        journal.append("checkpoint.verified", step=step, save_id=seals[0].save_id)
        parent = Parent(attempt=attempt, step=step)
    journal.append("torn", text="the power went while this was written")
    os.truncate(journal.path, os.path.getsize(journal.path) - 40)
    digests = {}
    for name in INVENTORIES:
        data = payload(200, name)
        specs, begin = part.parse_header(data, path=name)
        digests[name] = {s.name: hashlib.sha256(data[begin + s.begin : begin + s.end]).hexdigest() for s in specs}
    print(json.dumps(digests, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Every flush boundary of a real file system under the store: images of what a power cut leaves, recovered and read.

    python bench/crash_blocks.py [--fs ext4,xfs,btrfs] [--images N] [--mutants] [--torn 4096] [--seed N] [--output FILE]
    python bench/crash_blocks.py --replay build/crash-blocks-ext4.log [--at POSITION]

The store saves on a file system on a loop device whose file remembers what the file system told its disk (`blockdisk`).
From that log images are built (`blockimage`), mounted, which runs the journal's recovery, and read by the real readers
(`blockload`). With `--mutants` the same must fail where no fsync, or none of a directory, reaches the disk. Needs root,
/dev/fuse, loop devices, mfusepy and the mkfs of each file system. Exit 0: nothing damaged accepted, nothing acknowledged
lost, every mutant found; 1: not so; 2: something is missing.

Nothing else may call sync(2) meanwhile, which flushes every mount and makes a broken store look safe.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import blockload
from blockdisk import MARK, BlockDisk, Entry, read_log, xfs_commits_often
from blockimage import MEDIA, Images, Medium, cuts_of, mounted, sample

KEPT = Path("build")
_APART = "RIDETHROUGH_OWN_MOUNTS"
_GO_ON_EVERY = 8
_MUTANT_IMAGES = 120
_MUTANT_IS_FOUND = 5
"""After this many images that show it nothing more is to be learnt of a mutant."""
_SHOWN = 5


def missing(media: list[str]) -> list[str]:
    """What this machine lacks."""
    programs = ("losetup", "mount", "umount", "unshare", *(MEDIA[name].mkfs[0] for name in media))
    found = [name for name in programs if shutil.which(name) is None]
    if os.geteuid() != 0:
        found.append("root")
    found += [path for path in ("/dev/fuse", "/dev/loop-control") if not os.path.exists(path)]
    if importlib.util.find_spec("mfusepy") is None:
        found.append("mfusepy")
    if not any(ctypes.util.find_library(name) for name in ("fuse3", "fuse")):
        found.append("fuse3")
    return found


def let_go() -> None:
    """Disks of others are not kept alive by the copies of their mounts in our namespace: a cut of one needs its last unmount."""
    for mount in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        device, target, kind = mount.split(" ")[:3]
        if device.startswith("/dev/loop") or kind.startswith("fuse"):
            path = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), target)
            subprocess.run(["umount", "--lazy", path], capture_output=True, check=False)


def fast_place() -> str | None:
    """Memory for the images if there is enough: the file systems on them are tested, not the speed below."""
    shm = "/dev/shm"
    return shm if os.path.isdir(shm) and shutil.disk_usage(shm).free > 2 << 30 else None


def record(medium: Medium, work: Path, args: argparse.Namespace, mutant: str | None) -> Path:
    """The log of one disk that the workload has been through."""
    mount_point = work / "live"
    mount_point.mkdir()
    with contextlib.ExitStack() as undo:
        if medium.name == "xfs":
            undo.enter_context(xfs_commits_often())
        disk = undo.enter_context(BlockDisk(work, medium.size_bytes))
        subprocess.run([*medium.mkfs, disk.path], check=True, capture_output=True)
        options = ",".join(part for part in ("loop", medium.live_options, args.options) if part)
        subprocess.run(["mount", "-t", medium.name, "-o", options, disk.path, mount_point], check=True)
        undo.callback(subprocess.run, ["umount", mount_point], check=True)
        subprocess.run(["sync", "-f", mount_point], check=True)
        disk.mark(begin=args.seed, medium=medium.name, mutant=mutant)
        blockload.work(str(mount_point), disk.mark, seed=args.seed, mutant=mutant, pauses=args.pauses)
        disk.mark(end=args.seed)
    return disk.log


def promises_of(entries: list[Entry], begin: int) -> list[blockload.Promise]:
    """What had been acknowledged before each position."""
    promise = blockload.Promise()
    found = [promise] * (begin + 1)
    for entry in entries[begin:]:
        if entry.kind == MARK:
            promise = promise.after(entry.mark)
        found.append(promise)
    return found


def doing_at(entries: list[Entry], at: int) -> str:
    """The last words of the workload before a position."""
    return next((str(entry.mark) for entry in reversed(entries[:at]) if entry.kind == MARK), "nothing")


def explore(medium: Medium, work: Path, entries: list[Entry], args: argparse.Namespace, images: int, stop_after: int) -> dict[str, Any]:
    """Images of the log have been recovered and read; what was wrong with them."""
    begin = next(at for at, entry in enumerate(entries) if entry.kind == MARK and "begin" in entry.mark)
    # Unmounting flushes everything: what comes after the workload's end is no cut.
    end = next((at for at, entry in enumerate(entries) if entry.kind == MARK and "end" in entry.mark), len(entries))
    entries = entries[:end]
    seed = entries[begin].mark["begin"]
    chance = random.Random(args.seed)
    cuts = cuts_of(entries, begin, chance=chance, randoms=args.randoms, grain_bytes=args.torn)
    acks = [at for at, entry in enumerate(entries) if at > begin and entry.kind == MARK and "acked" in entry.mark]
    boundaries = sum(cut.kind == "none" for cut in cuts)
    chosen = [cut for cut in cuts if cut.first <= args.at <= cut.last] if args.at is not None else sample(cuts, images, chance, acks)
    promises = promises_of(entries, begin)
    tried: Counter[str] = Counter()
    found: Counter[str] = Counter()
    failures: list[str] = []
    mount_point = work / "cut"
    mount_point.mkdir()
    options = ",".join(part for part in (medium.image_options, args.options) if part)
    began_s = time.monotonic()
    with Images(work, entries, medium.size_bytes) as built:
        for number, cut in enumerate(chosen):
            with mounted(medium, built.build(cut), mount_point, options) as is_mounted:
                problems = (
                    look(mount_point, seed, set(promises[cut.first : cut.last + 1]), goes_on=number % _GO_ON_EVERY == 0)
                    if is_mounted
                    else {"unmountable": ["the file system cannot be mounted"]}
                )
            found.update(kind for kind, texts in problems.items() if texts)
            for kind, texts in problems.items():
                failures += [f"{kind}: {cut} ({doing_at(entries, cut.first)}): {text}" for text in texts[:2]]
            tried[cut.kind] += 1
            if stop_after and found["damaged"] + found["lost"] >= stop_after:
                break
    return {
        "medium": medium.name,
        "log": len(entries) - begin,
        "flushes": boundaries,
        "flushes_tried": tried["none"],
        "possible": len(cuts),
        "images": tried.total(),
        "kinds": dict(tried),
        "acked": len(set(promises[-1].acked)),
        "damaged": found["damaged"],
        "lost": found["lost"],
        "stuck": found["stuck"],
        "unmountable": found["unmountable"],
        "failures": failures,
        "used_s": round(time.monotonic() - began_s, 1),
    }


def look(mount_point: Path, seed: int, promises: set[blockload.Promise], *, goes_on: bool) -> dict[str, list[str]]:
    """What is wrong with a mounted image, by kind."""
    found = blockload.judge(str(mount_point), seed, promises, goes_on=goes_on)
    return {"damaged": found.damaged, "lost": found.lost, "stuck": found.stuck}


def one(name: str, args: argparse.Namespace, mutant: str | None) -> dict[str, Any]:
    """One file system, with the store as it is or a mutant of it; the log of one that failed is kept."""
    medium = MEDIA[name]
    work = Path(tempfile.mkdtemp(prefix="crash-blocks-", dir=fast_place()))
    try:
        began_s = time.monotonic()
        log = args.replay or record(medium, work, args, mutant)
        recorded_s = time.monotonic() - began_s
        images, stop_after = (_MUTANT_IMAGES, _MUTANT_IS_FOUND) if mutant else (args.images, 0)
        report = explore(medium, work, read_log(log), args, images, stop_after)
        report |= {"mutant": mutant, "recorded_s": round(recorded_s, 1), "torn_bytes": args.torn, "seed": args.seed}
        if report["failures"] and not mutant and not args.replay:
            KEPT.mkdir(exist_ok=True)
            report["kept"] = str(shutil.copy(log, KEPT / f"crash-blocks-{name}.log"))
        return report
    finally:
        shutil.rmtree(work, ignore_errors=True)


def line(report: dict[str, Any]) -> str:
    """For people."""
    who = f"{report['medium']:5} {report['mutant'] or 'as it is':12}"
    counts = f"{report['images']:5} images of {report['possible']:5}, {report['flushes_tried']:4} of {report['flushes']:4} flushes"
    wrong = f"damaged {report['damaged']}, lost {report['lost']}, stuck {report['stuck']}, unmountable {report['unmountable']}"
    return f"{who} {counts}: {wrong}; log {report['log']}, {report['recorded_s']} + {report['used_s']} s"


def is_right(report: dict[str, Any]) -> bool:
    """A mutant is found, the store as it is has no fault. Tears finer than a disk's block may cost the file system itself."""
    if report["mutant"]:
        return bool(report["damaged"] or report["lost"])
    bad = report["damaged"] + report["lost"] + report["stuck"] + (report["unmountable"] if report["torn_bytes"] % 4096 == 0 else 0)
    return report["images"] > 0 and not bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fs", default=",".join(MEDIA), help="file systems, comma separated")
    parser.add_argument("--images", type=int, default=0, help="at most this many of each file system; 0 is all")
    parser.add_argument("--mutants", action="store_true", help="also the store without fsync, and without those of directories")
    parser.add_argument("--randoms", type=int, default=1, help="random subsets for each write")
    parser.add_argument("--torn", type=int, default=4096, help="tear at multiples of this; 512 is harsher than most disks, 0 is off")
    parser.add_argument("--pauses", type=int, default=99, help="saves after which to wait for a background commit")
    parser.add_argument("--options", default="", help="more mount options, for example noauto_da_alloc")
    parser.add_argument("--seed", type=int, default=20260730)
    parser.add_argument("--output", type=Path, help="write the reports there as JSON")
    parser.add_argument("--replay", type=Path, help="explore a kept log instead of recording one")
    parser.add_argument("--at", type=int, help="only images that a cut at this position can leave")
    args = parser.parse_args()
    if args.replay:
        args.fs = next(entry.mark["medium"] for entry in read_log(args.replay) if entry.kind == MARK)
    media = args.fs.split(",")
    if lacking := missing(media):
        print(f"missing: {', '.join(lacking)}", file=sys.stderr)
        return 2
    if _APART not in os.environ:
        # Mounts that this process leaves behind when it is killed go away with its namespace.
        os.environ[_APART] = "yes"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])
    let_go()
    reports = []
    for name in media:
        for mutant in (None, *(blockload.MUTANTS if args.mutants and not args.replay else ())):
            report = one(name, args, mutant)
            reports.append(report)
            print(line(report), flush=True)
            for text in report["failures"][: _SHOWN if not mutant else 1]:
                print(f"    {text}", flush=True)
            if "kept" in report:
                print(f"    again: python bench/crash_blocks.py --replay {report['kept']} --seed {args.seed}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    return 0 if all(is_right(report) for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())

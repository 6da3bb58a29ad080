"""Every name on disk, made and parsed in one place.

Names are checked both ways: what we write, and what a directory listing returns. A name that
does not parse is not ours and is left alone.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ridethrough.types import AttemptRef

RUN = "run.json"
ATTEMPTS = "attempts"
ATTEMPT = "attempt.json"
ROSTER = "roster.json"
META = "meta.json"
MANIFEST = "manifest.json"
JOURNAL = "journal"
QUARANTINE = "quarantine"
TEMPORARY = ".tmp"
KEY = "key"
"""Secret of the run, for what its nodes say to each other; readable by its owner only."""

_STEP = re.compile(r"step-([0-9]{9,18})-([0-9a-f]{8})")
_ATTEMPT = re.compile(r"([0-9]{6,18})-([0-9a-f]{8})")
_CLAIM = re.compile(r"([0-9]{6,18})\.claim")
_PART = re.compile(r"([a-z][a-z0-9-]{0,63})~([a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?)-([0-9a-f]{8})\.(safetensors|seal)")
_PART_NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")
_CHECK = re.compile(r"storage-check~([a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?)~([0-9a-z]{1,12})-([0-9]+)-([0-9]+)-([0-9]+)\.tmp")
_NODE = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDir:
    """A parsed name of the directory that a storage check works in: which process made it."""

    node: str
    boot: str
    space: str
    """Of its pids."""
    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A parsed name of a payload or seal."""

    part: str
    node: str
    nonce8: str
    is_seal: bool

    @property
    def stem(self) -> str:
        """The name that payload and seal share."""
        return f"{self.part}~{self.node}-{self.nonce8}"


def step_dir(step: int, save_id: str) -> str:
    """Directory of one checkpoint, sorting by step for people."""
    return f"step-{step:09d}-{save_id[:8]}"


def parse_step_dir(name: str) -> tuple[int, str] | None:
    """Step and first 8 digits of the save id, or None if the name is not ours."""
    found = _STEP.fullmatch(name)
    if found is None or step_dir(int(found.group(1)), found.group(2)) != name:
        return None
    return int(found.group(1)), found.group(2)


def parse_attempt_dir(name: str) -> tuple[int, str] | None:
    """Sequence number and first 8 digits of the nonce, or None."""
    found = _ATTEMPT.fullmatch(name)
    if found is None or AttemptRef(seq=int(found.group(1)), nonce=found.group(2)).label != name:
        return None
    return int(found.group(1)), found.group(2)


def claim_path(run_dir: str, seq: int) -> str:
    """The file whose creation makes a sequence number somebody's."""
    return os.path.join(run_dir, ATTEMPTS, f"{seq:06d}.claim")


def parse_claim(name: str) -> int | None:
    """The sequence number that a claim is about, or None."""
    found = _CLAIM.fullmatch(name)
    if found is None or os.path.basename(claim_path("", int(found.group(1)))) != name:
        return None
    return int(found.group(1))


def probe_name(token: str, node: str) -> str:
    """A file that a node leaves for the others to see."""
    return f"probe-{token}-{node}{TEMPORARY}"


def check_name(node: str, boot: str, space: str, pid: int, started: int) -> str:
    """The directory of one storage check."""
    return f"storage-check~{node}~{boot}-{space}-{pid}-{started}{TEMPORARY}"


def parse_check(name: str) -> CheckDir | None:
    """Who made the directory of a storage check, or None if it is none."""
    found = _CHECK.fullmatch(name)
    if found is None:
        return None
    node, boot, space, pid, started = found.groups()
    return CheckDir(node=node, boot=boot, space=space, pid=int(pid), started=int(started))


def is_part(part: str, node: str) -> bool:
    """A part and a node may be called so."""
    return bool(_PART_NAME.fullmatch(part) and _NODE.fullmatch(node))


def part_stem(part: str, node: str, nonce: str) -> str:
    """What payload and seal of one part are called, without the suffix."""
    if not is_part(part, node):
        raise ValueError(f"not a name for a part: {part!r} on {node!r}")
    return f"{part}~{node}-{nonce[:8]}"


def seal_name(payload_name: str) -> str:
    """The file that seals a payload."""
    return payload_name.removesuffix(".safetensors") + ".seal"


def parse_part_file(name: str) -> PartFile | None:
    """The parts of a payload's or seal's name, or None."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    return PartFile(part=found.group(1), node=found.group(2), nonce8=found.group(3), is_seal=found.group(4) == "seal")


def attempt_dir(run_dir: str, attempt: AttemptRef) -> str:
    """Directory of an attempt's records."""
    return os.path.join(run_dir, ATTEMPTS, attempt.label)


def journal_path(run_dir: str, node: str) -> str:
    """This node's journal."""
    return os.path.join(run_dir, JOURNAL, f"{node}.jsonl")


def rank_part(rank: int) -> str:
    """Name of the part that is private to a rank."""
    return f"rank-{rank:05d}"


REPLICATED = "replicated"
"""Name of the part that all data-parallel ranks hold identically."""

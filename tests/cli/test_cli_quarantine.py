from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_build import FS, Built, Call, flip, new_run
from test_schemas import check

from ridethrough import journal
from ridethrough.errors import StorageUnreachable
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import node_name
from ridethrough.snapshot.address import lock_path
from ridethrough.store import quarantine
from ridethrough.store.catalog import read_seals

REASON = "two reads past the cache found wrong bytes"
HOLD = """
import sys
from ridethrough.seam.process import FileLock
FileLock(sys.argv[1]).acquire(run="/r", note="")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def aside(good: Built) -> str:
    """A part of step 200 that was moved aside although its bytes are right; returns its name."""
    return move_aside(good, 200, "rank-00001")


def move_aside(run: Built, step: int, part: str) -> str:
    directory = next(run.path.glob(f"step-*{step}-*"))
    for seal in read_seals(FS, str(run.path), directory.name):
        if seal.part == part:
            run.journal.append("part.quarantined", dir_name=directory.name, part=part, payload=seal.payload_name)
            quarantine.quarantine_part(FS, str(run.path), directory.name, seal, reason=REASON)
    return f"{directory.name}/{part}"


def in_quarantine(run: Built, suffix: str) -> Path:
    [found] = (run.path / "quarantine").rglob(f"*{suffix}")
    return found


def files(run: Built) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def released(run: Built) -> list[dict[str, Any]]:
    return [e.data for e in journal.read(FS, [str(run.path / "journal" / f"{node_name()}.jsonl")]).of("part.released")]


def test_the_list_says_what_is_there_why_how_large_and_since_when(good: Built, aside: str, call: Call) -> None:
    answer = call("quarantine", "list", "--json", good.path)
    check(answer.json, "quarantine")
    [part] = answer.json["parts"]
    assert (part["name"], part["reason"], part["node"], part["is_sealed"]) == (aside, REASON, "node-a", True)
    assert part["size_bytes"] == sum(p.stat().st_size for p in (good.path / "quarantine").rglob("*") if p.is_file())
    assert 0 <= part["age_s"] < 60
    assert part["result"] is None
    line = call("quarantine", "list", good.path).out.splitlines()[1]
    assert line.startswith(aside)
    assert line.endswith(REASON)


def test_what_is_not_known_is_said_as_unknown(good: Built, aside: str, call: Call) -> None:
    for path in (good.path / "journal").iterdir():
        path.unlink()
    in_quarantine(good, ".reason.json").unlink()
    [part] = call("quarantine", "list", "--json", good.path).json["parts"]
    assert (part["reason"], part["since_at"], part["age_s"]) == (None, None, None)
    out = call("quarantine", "list", good.path).out
    assert "unknown" in out
    assert "no reason on record" in out


def test_an_empty_quarantine_is_said_to_be_empty(good: Built, call: Call) -> None:
    assert call("quarantine", "list", good.path).err == call("quarantine", "show", good.path).err == "nothing is in quarantine\n"
    assert call("quarantine", "list", "--json", good.path).json["parts"] == []


def test_show_reads_the_bytes_anew_and_changes_nothing(good: Built, aside: str, call: Call) -> None:
    before = files(good)
    answer = call("quarantine", "show", good.path, aside)
    assert answer.code == 0
    assert "ok: both reads match the seal" in answer.out
    assert answer.hint == f"hint: ridethrough quarantine release {good.path} {aside}"
    assert files(good) == before
    flip(in_quarantine(good, ".safetensors"))
    found = call("quarantine", "show", good.path, aside, "--json")
    check(found.json, "quarantine")
    assert found.json["parts"][0]["result"] == "damaged"
    assert "checksum of bytes 0 to" in found.json["parts"][0]["detail"]


def test_a_released_part_counts_again_and_is_on_record(good: Built, aside: str, call: Call) -> None:
    before = {name: data for name, data in files(good).items() if "/step-" in name and "reason" not in name}
    assert call("ls", "--json", good.path).json["checkpoints"][1]["state"] == "incomplete"
    answer = call("quarantine", "release", "--json", good.path, aside)
    check(answer.json, "quarantine")
    assert (answer.code, answer.json["parts"][0]["is_released"]) == (0, True)
    assert call("ls", "--json", good.path).json["checkpoints"][1]["state"] == "complete"
    assert call("verify", good.path).code == 0
    assert {name.replace("quarantine/", ""): data for name, data in before.items()}.items() <= files(good).items()
    assert call("quarantine", "list", "--json", good.path).json["parts"] == []
    assert [(e["dir_name"], e["part"]) for e in released(good)] == [tuple(aside.split("/"))]


def test_after_a_release_it_is_said_what_a_restart_restores(good: Built, call: Call) -> None:
    name = move_aside(good, 300, "replicated")
    assert call("ls", "--json", good.path).json["restart"]["step"] == 200
    answer = call("quarantine", "release", good.path, name)
    assert answer.out == f"released {name}\n"
    assert answer.err == "a restart restores step 300\n"


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("suffix", [".safetensors", ".seal"])
def test_one_wrong_bit_and_it_stays_where_it_is(suffix: str, at: float, good: Built, aside: str, call: Call) -> None:
    flip(in_quarantine(good, suffix), at=at)
    before = files(good)
    answer = call("quarantine", "release", good.path, aside)
    assert answer.code == 1
    assert "is damaged" in answer.err
    assert files(good) == before


def test_bytes_that_read_right_only_once_stay_where_they_are(good: Built, aside: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, reads = PosixFileSystem.read_into, []

    def read_into(self: PosixFileSystem, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        got = honest(self, path, buffer, offset=offset, past_cache=past_cache)
        if path.endswith(".safetensors"):
            assert past_cache
            reads.append(path)
            if len(reads) == 2:
                buffer[100] ^= 1
        return got

    monkeypatch.setattr(PosixFileSystem, "read_into", read_into)
    before = files(good)
    assert call("quarantine", "release", good.path, aside).code == 1
    assert len(reads) == 2
    assert files(good) == before


def test_what_cannot_be_read_now_is_not_called_damaged(good: Built, aside: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PosixFileSystem.read_into

    def read_into(self: PosixFileSystem, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        if path.endswith(".safetensors"):
            raise StorageUnreachable(path=path, detail="EIO on read")
        return honest(self, path, buffer, offset=offset, past_cache=past_cache)

    monkeypatch.setattr(PosixFileSystem, "read_into", read_into)
    before = files(good)
    assert call("quarantine", "show", "--json", good.path, aside).json["parts"][0]["result"] == "unreadable"
    assert call("quarantine", "release", good.path, aside).code == 13
    assert files(good) == before


def test_a_part_of_another_run_is_not_let_in(good: Built, aside: str, call: Call, tmp_path: Path) -> None:
    other = new_run(tmp_path / "other")
    other.save(200)
    moved = good.path / "quarantine" / next(other.path.glob("step-*")).name
    name = move_aside(other, 200, "replicated")
    (other.path / "quarantine" / moved.name).rename(moved)
    answer = call("quarantine", "release", good.path, name)
    assert answer.code == 1
    assert "belongs to something else" in answer.err


def test_while_a_job_has_the_run_nothing_is_released(good: Built, aside: str, call: Call) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD, lock_path(str(good.path))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    before = files(good)
    assert call("quarantine", "release", good.path, aside).code == 11
    assert call("quarantine", "show", good.path, aside).code == 0
    assert files(good) == before
    child.communicate()


def test_of_two_copies_of_a_part_the_one_that_is_meant_must_be_named(good: Built, call: Call) -> None:
    name = move_aside(good, 200, "replicated")
    answer = call("quarantine", "release", good.path, name)
    assert answer.code == 2
    names = [part["name"] for part in call("quarantine", "list", "--json", good.path).json["parts"]]
    assert len(names) == 2
    assert all(name in answer.err for name in names)
    for long_name in names:
        assert call("quarantine", "release", good.path, f"{long_name}.safetensors").code == 0
    assert call("verify", good.path).code == 0


def test_a_name_that_is_not_there_leads_to_the_list(good: Built, aside: str, call: Call) -> None:
    answer = call("quarantine", "release", good.path, f"{aside}x")
    assert (answer.code, answer.hint) == (10, f"hint: ridethrough quarantine list {good.path}")


def test_a_release_that_was_cut_after_the_payload_can_be_made_again(good: Built, aside: str, call: Call) -> None:
    payload = in_quarantine(good, ".safetensors")
    payload.rename(good.path / payload.parent.name / payload.name)
    [part] = call("quarantine", "list", "--json", good.path).json["parts"]
    assert part["payload_at"] == f"{payload.parent.name}/{payload.name}"
    assert call("quarantine", "release", good.path, aside).code == 0
    assert call("verify", good.path).code == 0


def test_other_peoples_files_in_quarantine_are_left_alone(good: Built, aside: str, call: Call) -> None:
    (in_quarantine(good, ".seal").parent / "notes.txt").write_text("why?", encoding="utf-8")
    (good.path / "quarantine" / "mine").mkdir()
    assert len(call("quarantine", "list", "--json", good.path).json["parts"]) == 1
    assert call("quarantine", "release", good.path, aside).code == 0
    assert in_quarantine(good, "notes.txt").read_text(encoding="utf-8") == "why?"

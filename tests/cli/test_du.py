from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_build import Built, Call, flip

from ridethrough.errors import StorageDenied
from ridethrough.seam.fs import PosixFileSystem


def test_the_shares_add_up_to_every_byte_in_the_run(good: Built, call: Call) -> None:
    directory = next(good.path.glob("step-*100-*"))
    (directory / "replicated~node-a-00112233.safetensors").write_bytes(b"x" * 1000)
    (directory / "a.seal.0011.tmp").write_bytes(b"y" * 10)
    (good.path / "quarantine" / directory.name).mkdir(parents=True)
    (good.path / "quarantine" / directory.name / "old").write_bytes(b"z" * 70)
    (good.path / "mine").mkdir()
    (good.path / "mine" / "log.txt").write_bytes(b"w" * 5)
    answer = call("du", "--json", good.path)
    found = answer.json
    assert found["total"]["size_bytes"] == sum(p.stat().st_size for p in good.path.rglob("*") if p.is_file())
    assert found["total"]["files_count"] == sum(p.is_file() for p in good.path.rglob("*"))
    assert found["leftovers"] == {"files_count": 2, "size_bytes": 1010}
    assert found["quarantine"] == {"files_count": 1, "size_bytes": 70}
    assert found["other"] == {"files_count": 1, "size_bytes": 5}
    assert [c["step"] for c in found["checkpoints"]] == [100, 200, 300]
    assert found["is_partial"] is False
    shares = sum(found[name]["size_bytes"] for name in ("leftovers", "quarantine", "journal", "records", "other"))
    assert shares + sum(c["size_bytes"] for c in found["checkpoints"]) == found["total"]["size_bytes"]


def test_total_and_free_space_are_told(good: Built, call: Call) -> None:
    space = os.statvfs(good.path)
    found = call("du", "--json", good.path).json
    assert found["disk_bytes"] == space.f_blocks * space.f_frsize
    assert 0 < found["free_bytes"] <= found["disk_bytes"]
    out = call("du", good.path).out
    assert "\ntotal " in out
    assert "\nfree on this file system: " in out


def test_an_empty_run_is_counted(run: Built, call: Call) -> None:
    answer = call("du", "--json", run.path)
    assert (answer.code, answer.json["checkpoints"]) == (0, [])
    assert answer.json["records"]["files_count"] == 4  # run.json, claim, attempt.json, roster.json


def test_links_are_not_followed_out_of_the_run(good: Built, call: Call, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    (good.path / "last").symlink_to(tmp_path)
    (good.path / "loop").symlink_to("loop")
    assert call("du", "--json", good.path).json["other"] == {"files_count": 2, "size_bytes": 0}


def test_a_damaged_run_is_counted_all_the_same(good: Built, call: Call) -> None:
    flip(good.path / "run.json")
    assert call("du", good.path).code == 0


def test_what_cannot_be_read_is_said_and_not_left_out_silently(good: Built, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PosixFileSystem.list_dir

    def list_dir(self: PosixFileSystem, path: str) -> list[str]:
        if path.endswith("journal"):
            raise StorageDenied(path=path, detail="EACCES on list")
        return honest(self, path)

    monkeypatch.setattr(PosixFileSystem, "list_dir", list_dir)
    assert call("du", "--json", good.path).json["is_partial"] is True
    assert "too small" in call("du", good.path).err


def test_whether_it_becomes_full_is_foretold_from_the_journal(good: Built, call: Call) -> None:
    for number in range(3):
        good.journal.append(
            "checkpoint.durable", step=400 + number, save_id=f"{number}" * 32, attempt_seq=1, size_bytes=1 << 20,
            retention={"keep_last": 3, "keep_top": 1, "mode": "min", "keep_every": 0},
        )  # fmt: skip
    found = call("du", "--json", good.path).json["forecast"]
    assert (found["verdict"], found["keep_last"], found["keep_top"], found["saves_count"]) == ("never", 3, 1, 3)
    assert found["kept_at_most_bytes"] == 8 << 20
    assert found["written_bytes_per_s"] > 0
    out = call("du", good.path).out
    assert "at most 8.0 MiB (keep_last=3, save_top_k=1" in out
    assert "full    never" in out


def test_what_the_journal_does_not_say_is_said_to_be_unknown(good: Built, call: Call) -> None:
    found = call("du", "--json", good.path).json["forecast"]
    assert (found["verdict"], found["full_in_s"], found["kept_at_most_bytes"], found["save_bytes"]) == ("unknown", None, None, None)
    out = call("du", good.path).out
    assert "growth  unknown" in out
    assert "full    unknown (no save with its size is on record)" in out

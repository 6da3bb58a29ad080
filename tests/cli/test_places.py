"""copy, restore and scrub as a user meets them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_build import Built, Call, flip, payload_of
from test_schemas import check

from ridethrough.seam.process import FileLock
from ridethrough.snapshot.address import lock_path


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror" / "exp001"


def test_what_was_copied_is_brought_back_when_the_disk_is_gone(good: Built, mirror: Path, call: Call) -> None:
    copied = call("copy", "--json", good.path, mirror)
    assert copied.code == 0
    check(copied.json, "copy")
    assert [c["step"] for c in copied.json["checkpoints"]] == [300]
    shutil.rmtree(good.path)
    restored = call("restore", "--json", good.path, "--from", mirror)
    assert restored.code == 0
    check(restored.json, "restore")
    assert (restored.json["checkpoint"]["step"], restored.json["restart"]["step"]) == (300, 300)
    assert call("verify", good.path).code == 0


def test_a_second_copy_says_that_nothing_was_to_do(good: Built, mirror: Path, call: Call) -> None:
    call("copy", good.path, mirror)
    again = call("copy", good.path, f"file://{mirror}")
    assert again.code == 0
    assert "was there already" in again.out


def test_all_and_one_named_checkpoint_are_copied(good: Built, mirror: Path, call: Call) -> None:
    assert [c["step"] for c in call("copy", "--json", f"{good.path}@100", mirror).json["checkpoints"]] == [100]
    assert [c["step"] for c in call("copy", "--json", "--all", good.path, mirror).json["checkpoints"]] == [100, 200, 300]


def test_restoring_what_is_there_already_changes_nothing(good: Built, mirror: Path, call: Call) -> None:
    call("copy", good.path, mirror)
    before = sorted((path, path.stat().st_mtime_ns) for path in good.path.rglob("*"))
    answer = call("restore", good.path, "--from", mirror)
    assert answer.code == 0
    assert answer.out.startswith("nothing to do")
    assert sorted((path, path.stat().st_mtime_ns) for path in good.path.rglob("*")) == before


def test_a_named_step_is_restored_and_the_answer_says_where_a_restart_goes_on(good: Built, mirror: Path, call: Call) -> None:
    call("copy", "--all", good.path, mirror)
    shutil.rmtree(good.path)
    answer = call("restore", good.path, "--from", mirror, "--step", 200)
    assert answer.code == 0
    assert "step 200 is in" in answer.out
    assert "goes on from step 200" in answer.err


def test_scrub_repairs_and_says_so_in_json_and_in_its_exit_code(good: Built, mirror: Path, call: Call) -> None:
    call("copy", "--all", good.path, mirror)
    [checkpoint] = good.path.glob("step-000000300-*")
    flip(payload_of(checkpoint, "replicated"))
    looked = call("scrub", "--json", "--dry-run", good.path, mirror)
    check(looked.json, "scrub")
    assert (looked.code, looked.json["exit_code"]) == (1, 1)
    repaired = call("scrub", "--json", good.path, mirror)
    check(repaired.json, "scrub")
    assert (repaired.code, {p["result"] for p in repaired.json["parts"]}) == (0, {"ok", "repaired"})
    assert call("scrub", good.path, mirror).code == 0


def test_damage_without_another_copy_ends_with_1(good: Built, call: Call) -> None:
    [checkpoint] = good.path.glob("step-000000300-*")
    flip(payload_of(checkpoint, "rank-00000"))
    answer = call("scrub", good.path)
    assert answer.code == 1
    assert "damaged" in answer.out


@pytest.mark.parametrize("verb", ["restore", "scrub"])
def test_a_run_that_a_job_owns_is_left_alone(good: Built, mirror: Path, call: Call, verb: str) -> None:
    call("copy", good.path, mirror)
    lock = FileLock(lock_path(str(good.path)))
    lock.acquire(run="x", note="")
    try:
        answer = call(verb, good.path, *(("--from", mirror) if verb == "restore" else (mirror,)))
        assert answer.code == 11
        assert call("scrub", "--dry-run", good.path, mirror).code == 0
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("copy", "RUN", "RUN"), 2, "is the run itself"),
        (("copy", "RUN", "ftp://x/y"), 2, "no kind of place called ftp://"),
        (("copy", "RUN", "MIRROR", "--bandwidth", "fast"), 2, "is not a bandwidth"),
        (("copy", "RUN@999", "MIRROR"), 10, "no checkpoint step 999"),
        (("copy", "NOWHERE", "MIRROR"), 10, "there is no such directory"),
        (("ls", "s3://bucket/exp001"), 2, "reads a directory of this machine"),
        (("scrub", "rsync://me:secret@host/runs", "MIRROR"), 2, "reads a directory of this machine"),
        (("restore", "RUN", "--from", "NOWHERE"), 10, "there is no run"),
        (("scrub", "RUN", "NOWHERE"), 10, "there is no run"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_a_hint(good: Built, mirror: Path, call: Call, arguments: tuple[str, ...], code: int, text: str) -> None:
    places = {"RUN": str(good.path), "MIRROR": str(mirror), "NOWHERE": str(mirror.parent / "nowhere"), "RUN@999": f"{good.path}@999"}
    answer = call(*(places.get(word, word) for word in arguments))
    assert answer.code == code
    assert text in answer.err
    assert answer.hint.startswith("hint: ")
    assert "secret" not in answer.err


def test_a_place_of_another_run_is_refused(good: Built, mirror: Path, call: Call, tmp_path: Path) -> None:
    from cli_build import new_run

    other = new_run(tmp_path / "other")
    other.save(5)
    answer = call("copy", good.path, other.path)
    assert answer.code != 0
    assert "it holds run" in answer.err

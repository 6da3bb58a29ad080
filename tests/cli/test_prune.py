from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_build import FS, Built, Call, flip, payload_of
from test_terminal import seen

from ridethrough import journal
from ridethrough.cli import prune
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import FileLock, node_name
from ridethrough.snapshot.address import lock_path
from ridethrough.store.catalog import read_seals

HOLD = """
import sys
from ridethrough.seam.process import FileLock
FileLock(sys.argv[1]).acquire(run="/r", note="/somewhere/keeper.sock")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def long(run: Built) -> Built:
    """Five verified checkpoints, the second of them the best, and a newer one that is only durable."""
    for step, loss in ((100, 1.0), (200, 0.2), (300, 0.9), (400, 0.8), (500, 0.7)):
        run.save(step, metrics={"loss": loss})
    run.save(600, proof="durable", metrics={"loss": 0.6})
    return run


@pytest.fixture
def job(long: Built) -> Iterator[subprocess.Popen[str]]:
    """Another process has the run's lock, as a keeper does."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, lock_path(str(long.path))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    yield child
    child.communicate()


def steps(run: Built) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run.path.glob("step-*"))


def removed(run: Built) -> dict[str, str]:
    """What this node's journal says was removed, and why."""
    found = journal.read(FS, [str(run.path / "journal" / f"{node_name()}.jsonl")])
    return {event.data["dir_name"]: event.data["reason"] for event in found.of("checkpoint.removed")}


def files(run: Built) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_what_the_dry_run_announces_goes_and_nothing_else_each_with_its_reason_on_record(long: Built, call: Call) -> None:
    options = ("--keep-last", 1, "--keep-best", 1, "--monitor", "loss", "--keep-every", 300)
    said = call("prune", long.path, *options, "--dry-run", "--json").json["checkpoints"]
    assert {row["step"]: row["verdict"] for row in said} == {100: "remove", 200: "keep", 300: "keep", 400: "remove", 500: "keep", 600: "keep"}
    assert all(row["reason"] for row in said)
    answer = call("prune", long.path, *options, "--yes", "--json")
    assert (answer.code, answer.json["removed_count"], answer.json["is_dry_run"]) == (0, 2, False)
    assert steps(long) == [200, 300, 500, 600]
    assert removed(long) == {row["dir_name"]: row["reason"] for row in said if row["verdict"] == "remove"}
    again = call("prune", long.path, *options, "--yes")
    assert again.code == 0
    assert "nothing has to go" in again.err


def test_a_dry_run_changes_nothing_and_works_beside_a_job(long: Built, call: Call, job: subprocess.Popen[str]) -> None:
    before = files(long)
    answer = call("prune", long.path, "--keep-last", 1, "--dry-run")
    assert answer.code == 0
    assert "dry run: 4 checkpoints" in answer.err
    assert files(long) == before


def test_while_a_job_has_the_run_it_is_refused_with_11_naming_the_process(long: Built, call: Call, job: subprocess.Popen[str]) -> None:
    answer = call("prune", long.path, "--keep-last", 1, "--yes")
    assert answer.code == 11
    assert f"process {job.pid}" in answer.err
    assert len(steps(long)) == 6


def test_a_link_to_the_run_is_the_same_lock(long: Built, call: Call, job: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(long.path)
    assert call("prune", tmp_path / "link", "--keep-last", 1, "--yes").code == 11


def test_the_reason_is_on_record_before_the_first_byte_goes(long: Built, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, early = PosixFileSystem.remove, []

    def remove(self: PosixFileSystem, path: str) -> None:
        if "step-" in path:
            early.extend([path] if os.path.basename(os.path.dirname(path)) not in removed(long) and "step-" in os.path.dirname(path) else [])
        honest(self, path)

    monkeypatch.setattr(PosixFileSystem, "remove", remove)
    assert call("prune", long.path, "--keep-last", 1, "--yes").code == 0
    assert early == []


def test_where_nothing_is_verified_nothing_goes_and_the_command_that_verifies_is_named_and_does(run: Built, call: Call) -> None:
    for step in (100, 200, 300):
        run.save(step, proof="durable")
    answer = call("prune", run.path, "--keep-last", 1, "--yes")
    assert (answer.code, steps(run)) == (1, [100, 200, 300])
    assert "nothing may go: no complete checkpoint of the lineage was verified" in answer.err
    assert f"hint: ridethrough prune {run.path} --keep-last 1 --verify" in answer.hint
    assert call("prune", run.path, "--keep-last", 1, "--verify", "--yes").code == 0
    assert steps(run) == [300]
    assert call("ls", "--json", run.path).json["checkpoints"][0]["is_verified"] is True


def test_what_is_damaged_is_not_called_verified_by_being_asked_to(run: Built, call: Call) -> None:
    run.save(100, proof="durable")
    flip(payload_of(run.save(200, proof="durable"), "rank-00001"))
    answer = call("prune", run.path, "--keep-last", 1, "--verify", "--yes")
    assert (answer.code, steps(run)) == (1, [100, 200])
    assert call("ls", "--json", run.path).json["checkpoints"][1]["is_verified"] is False


@pytest.mark.parametrize("part", ["replicated", "rank-00000"])
def test_if_the_newest_verified_one_reads_back_wrong_nothing_goes(part: str, long: Built, call: Call) -> None:
    flip(payload_of(next(long.path.glob("step-*500-*")), part))
    answer = call("prune", long.path, "--keep-last", 1, "--yes")
    assert answer.code == 1
    assert "nothing was removed" in answer.err
    assert answer.hint == f"hint: ridethrough verify {long.path}"
    assert len(steps(long)) == 6
    assert removed(long) == {}


def test_one_damaged_copy_of_two_does_not_keep_the_checkpoint_from_vouching(good: Built, call: Call) -> None:
    flip(payload_of(next(good.path.glob("step-*200-*")), "replicated"))
    assert call("prune", good.path, "--keep-last", 1, "--yes").code == 0
    assert steps(good) == [200, 300]


def test_the_checkpoint_that_the_newest_attempt_resumed_from_stays(long: Built, call: Call) -> None:
    after = long.restart(at_step=300)
    for step in (310, 320):
        after.save(step)
    said = {row["step"]: row for row in call("prune", long.path, "--keep-last", 1, "--yes", "--json").json["checkpoints"]}
    assert steps(long) == [300, 320]
    assert said[300]["reason"] == "this attempt resumed from it"
    assert said[500]["reason"].startswith("abandoned branch")


def test_where_nobody_can_be_asked_it_wants_yes_and_the_hint_is_the_whole_command(long: Built, call: Call) -> None:
    answer = call("prune", long.path, "--keep-last", 2, "--keep-best", 1, "--monitor", "loss")
    assert (answer.code, len(steps(long))) == (2, 6)
    assert answer.hint == f"hint: ridethrough prune {long.path} --keep-last 2 --keep-best 1 --monitor loss --mode min --yes"


def test_on_a_terminal_it_asks_and_goes_by_the_answer(long: Built) -> None:
    assert "remove 4 checkpoints" in seen("prune", long.path, "--keep-last", 1, columns=120, typed="n\n")
    assert len(steps(long)) == 6
    seen("prune", long.path, "--keep-last", 1, columns=120, typed="y\n")
    assert steps(long) == [500, 600]


def test_a_metric_that_nobody_has_removes_nothing_and_the_known_ones_are_named(long: Built, call: Call) -> None:
    answer = call("prune", long.path, "--keep-last", 1, "--keep-best", 2, "--monitor", "lose", "--yes")
    assert (answer.code, len(steps(long))) == (2, 6)
    assert "no checkpoint has a metric 'lose': there are loss" in answer.err


@pytest.mark.parametrize(
    "words",
    [("--keep-best", 2), ("--dry-run", "--verify"), ("--keep-last", 0), ("--keep-every", -1)],
    ids=lambda words: " ".join(map(str, words)),
)
def test_what_makes_no_sense_is_refused_with_2(words: tuple[object, ...], long: Built, call: Call) -> None:
    assert call("prune", long.path, *words).code == 2
    assert len(steps(long)) == 6


def test_a_checkpoint_instead_of_a_run_is_refused(long: Built, call: Call) -> None:
    answer = call("prune", f"{long.path}@300", "--yes")
    assert (answer.code, answer.hint) == (2, f"hint: ridethrough prune {long.path} --dry-run")


def test_a_run_whose_marker_is_damaged_loses_nothing(long: Built, call: Call) -> None:
    flip(long.path / "run.json")
    assert call("prune", long.path, "--keep-last", 1, "--yes").code == 1
    assert len(steps(long)) == 6


def test_an_attempt_that_begins_meanwhile_elsewhere_ends_it_before_anything_goes(long: Built, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = prune._vouch

    def vouch(*args: object) -> None:
        honest(*args)  # type: ignore[arg-type]
        long.restart(at_step=100)

    monkeypatch.setattr(prune, "_vouch", vouch)
    answer = call("prune", long.path, "--keep-last", 1, "--yes")
    assert answer.code == 21
    assert len(steps(long)) == 6


def test_on_a_disk_of_several_nodes_only_what_is_whole_on_it_lets_others_go(run: Built, call: Call) -> None:
    ours = ("replicated", "rank-00000")
    directories = [run.save(step, parts=ours) for step in (100, 200, 300)]
    for directory in directories:  # the lead has called all of them verified: the other parts are on another node's disk
        seal = read_seals(FS, str(run.path), directory.name)[0]
        run.journal.append("checkpoint.verified", step=seal.step, save_id=seal.save_id)
    answer = call("prune", run.path, "--keep-last", 1, "--yes")
    assert (answer.code, steps(run)) == (1, [100, 200, 300])
    run.save(400)
    assert call("prune", run.path, "--keep-last", 1, "--yes").code == 0
    assert steps(run) == [400]


def test_a_run_without_checkpoints_has_nothing_to_go(run: Built, call: Call) -> None:
    assert call("prune", run.path, "--yes").code == 0


def test_a_run_that_is_being_pruned_is_not_called_running(run: Built, call: Call) -> None:
    lock = FileLock(lock_path(str(run.path)))
    lock.acquire(run="/r", note=None)
    assert call("status", "--json", run.path).json["is_running"] is False
    lock.release()


def test_a_seal_that_is_right_only_in_the_page_cache_does_not_vouch(long: Built, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PosixFileSystem.read

    def read(self: PosixFileSystem, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        data = honest(self, path, max_bytes=max_bytes, past_cache=past_cache)
        return data[:-1] if past_cache and path.endswith(".seal") and "-000000500-" in path else data

    monkeypatch.setattr(PosixFileSystem, "read", read)
    assert call("prune", long.path, "--keep-last", 1, "--yes").code == 1
    assert len(steps(long)) == 6

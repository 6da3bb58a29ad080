from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_build import Built, Call, flip, new_run, payload_of, seal_of

from ridethrough.errors import StorageUnreachable
from ridethrough.format import layout, record
from ridethrough.seam.fs import PosixFileSystem


def row(answer: Any, step: int) -> Any:
    return next(c for c in answer.json["checkpoints"] if c["step"] == step)


def test_a_run_without_checkpoints_lists_nothing_and_says_so_beside_the_data(run: Built, call: Call) -> None:
    answer = call("ls", run.path)
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == f"{run.path} has no checkpoint yet\n"
    assert call("ls", "--json", run.path).json["checkpoints"] == []


def test_the_table_is_on_stdout_and_the_remark_on_stderr(good: Built, call: Call) -> None:
    answer = call("ls", good.path)
    heading, *rows = answer.out.splitlines()
    assert heading.split() == ["STEP", "ATTEMPT", "STATE", "SIZE", "AGE", "WHY"]
    assert rows[0].split()[:3] == ["100", "1", "verified"]
    assert answer.err == "* a restart restores step 300\n"


def test_the_star_is_on_what_a_restart_restores_and_nowhere_else(good: Built, call: Call) -> None:
    stars = [line.split()[1] for line in call("ls", good.path).out.splitlines() if line.startswith("*")]
    assert stars == ["300"]
    answer = call("ls", "--json", good.path).json
    assert answer["restart"]["step"] == 300
    assert [c["step"] for c in answer["checkpoints"] if c["is_restart"]] == [300]


def test_durable_and_verified_are_what_the_journal_says(good: Built, call: Call) -> None:
    good.save(400, proof="none")
    answer = call("ls", "--json", good.path)
    found = {c["step"]: (c["state"], c["is_durable"], c["is_verified"]) for c in answer.json["checkpoints"]}
    assert found == {
        100: ("complete", True, True),
        200: ("complete", True, True),
        300: ("complete", True, False),
        400: ("complete", False, False),
    }
    words = [line.lstrip("* ").split()[2] for line in call("ls", good.path).out.splitlines()[1:]]
    assert words == ["verified", "verified", "durable", "complete"]


def test_without_a_whole_journal_what_it_does_not_say_is_unknown(good: Built, call: Call) -> None:
    good.save(400, proof="none")
    path = Path(layout.journal_path(str(good.path), "node-a"))
    path.write_bytes(path.read_bytes()[:-5])
    answer = call("ls", "--json", good.path)
    assert row(answer, 100)["is_verified"] is True
    assert row(answer, 400)["is_durable"] is None
    assert answer.json["journal_doubt"]
    shutil.rmtree(path.parent)
    assert row(call("ls", "--json", good.path), 100)["is_durable"] is None
    assert "may be durable" in call("ls", good.path).err


def test_age_and_size_are_told(good: Built, call: Call) -> None:
    found = row(call("ls", "--json", good.path), 100)
    directory = next(good.path.glob("step-*100-*"))
    assert found["size_bytes"] == sum(p.stat().st_size for p in directory.iterdir())
    assert found["age_s"] == pytest.approx(90 * 60, abs=60)
    assert found["saved_at"].endswith("Z")
    assert "1h 30m" in call("ls", good.path).out


@pytest.mark.parametrize("saved_at", [None, 17, "yesterday", "2999-01-01T00:00:00Z", "2026-01-01T00:00:00"])
def test_an_age_that_cannot_be_known_is_unknown(saved_at: object, run: Built, call: Call) -> None:
    run.save(1, saved_at=saved_at)
    assert row(call("ls", "--json", run.path), 1)["age_s"] is None
    assert "unknown" in call("ls", run.path).out


def test_an_incomplete_checkpoint_says_what_is_missing_and_is_passed_over(good: Built, call: Call) -> None:
    good.save(400, parts=("replicated", "rank-00000"))
    answer = call("ls", "--json", good.path)
    assert row(answer, 400)["state"] == "incomplete"
    assert row(answer, 400)["why"] == "missing rank-00001"
    assert answer.json["restart"]["step"] == 300
    assert [s["step"] for s in answer.json["skipped"]] == [400]
    assert "passing over 1 other" in call("ls", good.path).err


def test_without_a_seal_the_save_id_still_tells_the_attempt(good: Built, call: Call) -> None:
    for path in good.save(400, parts=("replicated",)).glob("*.seal"):
        path.unlink()
    assert row(call("ls", "--json", good.path), 400)["attempt"] == good.attempt.label


def test_a_save_cut_before_its_first_seal_is_listed(good: Built, call: Call) -> None:
    directory = good.path / "step-000000400-0123abcd"
    directory.mkdir()
    (directory / "replicated~node-a-00112233.safetensors").write_bytes(b"half")
    answer = call("ls", "--json", good.path)
    assert row(answer, 400)["attempt"] is None
    assert row(answer, 400)["save_id"] is None
    assert row(answer, 400)["why"] == "no seal: cut during the save, or still being written"
    assert answer.json["checkpoints"][-1]["step"] == 400


@pytest.mark.parametrize(("damage", "reason"), [("flip", "checksum"), ("empty", "empty"), ("cut", "torn"), ("future", "newer")])
def test_a_seal_that_cannot_be_used_takes_its_checkpoint_out_with_the_reason(damage: str, reason: str, good: Built, call: Call) -> None:
    path = seal_of(next(good.path.glob("step-*300-*")), "rank-00001")
    data = path.read_bytes()
    if damage == "flip":
        flip(path)
    elif damage == "future":
        body = record.decode("seal", data, path="")
        path.write_bytes(_with_format(body, 99))
    else:
        path.write_bytes(b"" if damage == "empty" else data[:-30])
    found = row(call("ls", "--json", good.path), 300)
    assert found["state"] == "incomplete"
    assert found["why"].startswith("was durable; rank-00001: ")
    assert reason in found["why"]
    assert call("ls", "--json", good.path).json["restart"]["step"] == 200


def _with_format(fields: dict[str, Any], version: int) -> bytes:
    import hashlib

    body = record.canonical({**fields, "format": version})
    return b'{"record": ' + body + b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_payload_that_is_not_there_in_full_is_noticed(damage: str, good: Built, call: Call) -> None:
    path = payload_of(next(good.path.glob("step-*300-*")), "replicated")
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert "replicated: " in row(call("ls", "--json", good.path), 300)["why"]


def test_a_bad_copy_beside_a_good_one_is_named_and_costs_nothing(good: Built, call: Call) -> None:
    flip(seal_of(next(good.path.glob("step-*200-*")), "replicated"))
    found = row(call("ls", "--json", good.path), 200)
    assert found["state"] == "complete"
    assert found["why"].startswith("1 copy unusable: replicated: ")


def test_a_flipped_roster_is_reported_and_the_copy_in_the_manifest_is_used(good: Built, call: Call) -> None:
    flip(next(good.path.glob("attempts/*/roster.json")))
    answer = call("ls", good.path)
    assert answer.code == 0
    assert "roster.json: its own checksum does not match" in answer.err
    assert call("ls", "--json", good.path).json["restart"]["step"] == 300


def test_a_lost_roster_is_named_as_the_reason(good: Built, call: Call) -> None:
    next(good.path.glob("attempts/*/roster.json")).unlink()
    for manifest in good.path.glob("step-*/manifest.json"):
        manifest.unlink()
    answer = call("ls", "--json", good.path)
    assert answer.json["restart"] is None
    assert row(answer, 300)["why"] == "was durable; its roster is lost"
    assert "a restart can restore none of these" in call("ls", good.path).err


def test_steps_of_an_abandoned_branch_say_where_the_run_went_on(good: Built, call: Call) -> None:
    after = good.restart(at_step=200)
    after.save(250)
    answer = call("ls", "--json", good.path)
    assert row(answer, 300)["why"] == "abandoned: attempt 2 went on from step 200"
    assert answer.json["restart"]["step"] == 250
    assert [s["step"] for s in answer.json["skipped"]] == [300]


def test_two_heads_are_listed_with_the_error_that_names_both(good: Built, call: Call) -> None:
    twin = good.path / "attempts" / "000001-ffffffff"
    other = new_run(good.path.parent / "other")
    shutil.copytree(next(good.path.glob("attempts/000001-*")), twin)
    fields = record.decode("attempt", (twin / "attempt.json").read_bytes(), path="")
    fields["attempt"] = {"seq": 1, "nonce": "f" * 32}
    (twin / "attempt.json").write_bytes(record.encode("attempt", {k: v for k, v in fields.items() if k not in ("format", "kind")}))
    answer = call("ls", good.path)
    assert answer.code == 0
    assert "error[RT-043]" in answer.err
    assert "000001-ffffffff" in answer.err
    assert f"ridethrough ls {good.path}" in answer.err
    assert good.attempt.label in answer.out
    found = call("ls", "--json", good.path).json
    assert (found["restart"], found["restart_error"]["code"]) == (None, "RT-043")
    assert call("show", good.path).code == 21
    assert call("ls", other.path).code == 0


def test_a_damaged_run_json_is_replaced_by_what_the_seals_say(good: Built, call: Call) -> None:
    flip(good.path / "run.json")
    answer = call("ls", good.path)
    assert answer.code == 0
    assert "record run.json: " in answer.err
    found = call("ls", "--json", good.path).json
    assert (found["run"]["name"], found["run"]["run_uid"]) == (None, good.run.run_uid)


def test_a_damaged_run_json_without_seals_exits_1(run: Built, call: Call) -> None:
    flip(run.path / "run.json")
    answer = call("ls", run.path)
    assert (answer.code, answer.out) == (1, "")
    (run.path / "run.json").unlink()
    (run.path / "run.json").mkdir()
    assert call("ls", run.path).code == 1


@pytest.mark.parametrize("name", ["run.json", "attempts/*/attempt.json"])
def test_a_run_of_a_future_format_is_refused_with_the_way_out(name: str, good: Built, call: Call) -> None:
    path = next(good.path.glob(name))
    kind = "run" if name == "run.json" else "attempt"
    path.write_bytes(_with_format(record.decode(kind, path.read_bytes(), path=""), 99))
    answer = call("ls", good.path)
    assert answer.code == 2
    assert "error[RT-041]" in answer.err
    assert answer.hint == "hint: pip install -U ridethrough"


def test_storage_that_does_not_answer_exits_13_and_lists_nothing(good: Built, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(self: PosixFileSystem, path: str) -> list[str]:
        raise StorageUnreachable(path=path, detail="ESTALE on list")

    monkeypatch.setattr(PosixFileSystem, "list_dir", stale)
    answer = call("ls", good.path)
    assert (answer.code, answer.out) == (13, "")
    assert call("ls", "--json", good.path).error["retryable"] is True


def test_files_that_are_not_ours_change_nothing(good: Built, call: Call) -> None:
    before = call("ls", good.path).out
    (good.path / "step-000000999-0123abcd").write_bytes(b"a file")
    (good.path / "step-12").mkdir()
    (good.path / "notes\x1b[2J.txt").write_text("x")
    (next(good.path.glob("step-*100-*")) / ".nfs0001").mkdir()
    (good.path / "journal" / "x.jsonl.swp").write_text("x")
    after = call("ls", good.path)
    assert [line.split()[:3] for line in after.out.splitlines()] == [line.split()[:3] for line in before.splitlines()]


def test_no_line_is_cut_or_padded_off_the_terminal(good: Built, call: Call) -> None:
    good.save(400, parts=("replicated",))
    flip(seal_of(next(good.path.glob("step-*300-*")), "replicated"))
    for verb in ("ls", "show", "verify", "du"):
        answer = call(verb, good.path)
        assert all(line == line.rstrip() for line in answer.out.splitlines())
        assert "…" not in answer.out
        assert "\x1b" not in answer.out + answer.err
    assert sum("missing rank-00000, rank-00001" in line for line in call("ls", good.path).out.splitlines()) == 1

from __future__ import annotations

from typing import Any

import pytest
from cli_build import Built, Call, flip, payload_of, seal_of

from ridethrough.errors import StorageUnreachable
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import read_seals
from ridethrough.store.commit import write_meta

RECORDS = [
    "step-*200-*/replicated~*.seal",
    "step-*200-*/manifest.json",
    "step-*200-*/meta.json",
    "attempts/*/roster.json",
    "attempts/*/attempt.json",
    "run.json",
]


def results(answer: Any) -> list[str]:
    return sorted({part["result"] for c in answer.json["checkpoints"] for part in c["parts"]})


def test_intact_copies_exit_0_and_every_copy_is_listed(good: Built, call: Call) -> None:
    answer = call("verify", good.path)
    assert answer.code == 0
    assert len(answer.out.splitlines()) == 1 + 3 + 4 + 3
    assert answer.err == "intact: 3 of 3 checkpoints restorable\n"
    found = call("verify", "--json", good.path).json
    assert (found["verdict"], found["exit_code"], found["ok_count"], found["damaged_count"]) == ("intact", 0, 10, 0)
    assert found["read_bytes"] == sum(p.stat().st_size for p in good.path.glob("step-*/*.safetensors"))


def test_copies_are_read_past_the_page_cache(good: Built, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    honest = PosixFileSystem.read_into

    def read_into(self: PosixFileSystem, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        asked.append((path.rpartition(".")[2], past_cache))
        return honest(self, path, buffer, offset=offset, past_cache=past_cache)

    monkeypatch.setattr(PosixFileSystem, "read_into", read_into)
    assert call("verify", good.path).code == 0
    assert {past_cache for suffix, past_cache in asked if suffix == "safetensors"} == {True}


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_one_flipped_bit_of_a_payload_exits_1_and_names_the_copy(at: float, good: Built, call: Call) -> None:
    path = payload_of(next(good.path.glob("step-*300-*")), "rank-00001")
    flip(path, at=at)
    answer = call("verify", good.path)
    assert answer.code == 1
    assert [line.split()[2] for line in answer.out.splitlines() if "damaged" in line] == ["rank-00001"]
    assert "a restart falls back to what is intact: newest is step 200" in answer.err
    found = call("verify", "--json", good.path)
    assert (found.code, found.json["verdict"], found.json["exit_code"]) == (1, "damaged", 1)
    assert [c["is_intact"] for c in found.json["checkpoints"]] == [True, True, False]


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", RECORDS)
def test_one_flipped_bit_of_any_record_exits_1_and_names_the_file(name: str, at: float, good: Built, call: Call) -> None:
    path = next(good.path.glob(name))
    flip(path, at=at)
    answer = call("verify", "--json", good.path)
    assert answer.code == 1
    named = [f["path"] for f in answer.json["records"]] + [p["path"] for c in answer.json["checkpoints"] for p in c["parts"] if p["result"] != "ok"]
    assert str(path.relative_to(good.path)) in named
    assert call("verify", good.path).code == 1


def test_damage_of_one_copy_leaves_a_checkpoint_with_another_restorable(good: Built, call: Call) -> None:
    flip(payload_of(next(good.path.glob("step-*200-*")), "replicated"))
    found = call("verify", "--json", f"{good.path}@200").json
    assert (found["verdict"], found["checkpoints"][0]["is_intact"]) == ("damaged", True)


def test_only_the_named_checkpoint_is_read(good: Built, call: Call) -> None:
    flip(payload_of(next(good.path.glob("step-*300-*")), "replicated"))
    assert call("verify", f"{good.path}@200").code == 0
    assert call("verify", next(good.path.glob("step-*300-*"))).code == 1


def test_what_cannot_be_read_now_is_not_called_damaged_and_exits_13(good: Built, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PosixFileSystem.read_into

    def read_into(self: PosixFileSystem, path: str, buffer: memoryview, *, offset: int = 0, past_cache: bool = False) -> int:
        if path.endswith(".safetensors") and "step-000000200" in path:
            raise StorageUnreachable(path=path, detail="EIO on read")
        return honest(self, path, buffer, offset=offset, past_cache=past_cache)

    monkeypatch.setattr(PosixFileSystem, "read_into", read_into)
    answer = call("verify", "--json", good.path)
    assert (answer.code, answer.json["verdict"]) == (13, "unreadable")
    assert results(answer) == ["ok", "unreadable"]
    assert "EIO on read" in call("verify", good.path).out
    flip(payload_of(next(good.path.glob("step-*300-*")), "replicated"))
    assert call("verify", good.path).code == 1  # damage is certain, whatever else is unknown


def test_an_empty_run_has_nothing_to_verify_and_exits_10(run: Built, call: Call) -> None:
    answer = call("verify", run.path)
    assert (answer.code, answer.out) == (10, "")
    assert answer.err.startswith("error[RT-010]")


def test_a_save_that_was_cut_is_missing_parts_and_no_damage(good: Built, call: Call) -> None:
    good.save(400, parts=("replicated",))
    answer = call("verify", "--json", good.path)
    assert (answer.code, answer.json["verdict"], answer.json["missing_count"]) == (0, "intact", 2)
    only = call("verify", f"{good.path}@400")
    assert only.code == 10
    assert only.err == "incomplete: 0 of 1 checkpoint restorable\n"


def test_seals_that_vanished_from_what_was_durable_are_damage(good: Built, call: Call) -> None:
    for path in next(good.path.glob("step-*300-*")).glob("*.seal"):
        path.unlink()
    answer = call("verify", "--json", good.path)
    assert (answer.code, answer.json["verdict"]) == (1, "damaged")
    assert answer.json["checkpoints"][-1]["parts"][0]["detail"] == "was durable and its seals are gone"


def test_one_seal_that_vanished_from_what_was_durable_is_damage(good: Built, call: Call) -> None:
    seal_of(next(good.path.glob("step-*300-*")), "rank-00000").unlink()
    answer = call("verify", good.path)
    assert answer.code == 1
    assert "was durable and is gone" in answer.out


def test_a_half_deleted_old_checkpoint_is_no_damage(good: Built, call: Call) -> None:
    directory = next(good.path.glob("step-*100-*"))
    (directory / "manifest.json").unlink()
    for path in directory.glob("*.seal"):
        path.unlink()
    assert call("verify", good.path).code == 0


def test_a_half_deleted_abandoned_checkpoint_is_no_damage(good: Built, call: Call) -> None:
    good.restart(at_step=200).save(250)
    for path in next(good.path.glob("step-*300-*")).glob("*.seal"):
        path.unlink()
    assert call("verify", good.path).code == 0


def test_a_run_without_any_identity_is_damage(run: Built, call: Call) -> None:
    flip(run.path / "run.json")
    answer = call("verify", "--json", run.path)
    assert (answer.code, answer.json["verdict"], answer.json["run"]["run_uid"]) == (1, "damaged", None)


def test_nothing_is_drawn_on_stderr_off_the_terminal(good: Built, call: Call) -> None:
    assert "\x1b" not in call("verify", good.path).err
    assert "reading" not in call("verify", good.path).err


def test_verifying_changes_nothing(good: Built, call: Call) -> None:
    flip(payload_of(next(good.path.glob("step-*300-*")), "replicated"))
    before = {p: p.read_bytes() for p in good.path.rglob("*") if p.is_file()}
    call("verify", good.path)
    assert {p: p.read_bytes() for p in good.path.rglob("*") if p.is_file()} == before


def test_nodes_that_took_their_snapshots_at_different_instants_have_made_one_intact_checkpoint(run: Built, call: Call) -> None:
    directory = run.save(5, parts=("rank-00000",), saved_at="2026-01-01T00:00:00.000+00:00")
    run.save(5, parts=("rank-00001", "replicated"), saved_at="2026-01-01T00:00:00.007+00:00")
    seals = read_seals(PosixFileSystem(), str(run.path), directory.name)
    write_meta(PosixFileSystem(), str(run.path), seals[-1])
    assert call("verify", run.path).code == 0

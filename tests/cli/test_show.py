from __future__ import annotations

from pathlib import Path

import pytest
from cli_build import Built, Call, flip, payload_of, seal_of

from ridethrough.cli.show import PROVENANCE


def test_a_run_means_what_a_restart_restores(good: Built, call: Call) -> None:
    good.save(400, parts=("replicated",))
    answer = call("show", "--json", good.path)
    assert (answer.json["checkpoint"]["step"], answer.json["checkpoint"]["is_restart"]) == (300, True)


def test_every_field_of_the_provenance_is_shown_and_absent_ones_are_unknown(run: Built, call: Call) -> None:
    run.save(7, git_commit=None, git_dirty=True, start_command=["python", "train me.py", "-n", "3"])
    answer = call("show", run.path)
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in answer.out.split("\n\n")[0].splitlines()}
    assert set(PROVENANCE) <= set(shown)
    assert (shown["git_commit"], shown["data_version"], shown["git_dirty"]) == ("unknown", "unknown", "yes")
    assert shown["start_command"] == "python 'train me.py' -n 3"
    assert shown["dependencies"] == "numpy 2.4.6, python 3.11.9, torch 2.13.0"
    assert call("show", "--json", run.path).json["meta"]["git_commit"] is None


def test_each_of_the_six_classes_is_present_missing_or_unprotectable(good: Built, call: Call) -> None:
    found = {c["class"]: (c["presence"], c["detail"]) for c in call("show", "--json", good.path).json["classes"]}
    assert found == {
        "model": ("present", "4 tensors"),
        "optimizer": ("present", "AdamW"),
        "scheduler": ("present", "LambdaLR"),
        "data": ("unprotectable", "IterableDataset without state"),
        "distributed": ("present", "2 ranks"),
        "metrics": ("missing", None),
    }
    out = call("show", good.path).out
    assert "data         unprotectable  IterableDataset without state\n" in out
    assert "metrics      missing\n" in out


@pytest.mark.parametrize("classes", [None, [], "present", {"model": "present"}, {"model": {"presence": ["x"]}}, {"model": {}}])
def test_classes_that_make_no_sense_are_missing_and_never_present(classes: object, run: Built, call: Call) -> None:
    run.save(7, classes=classes)
    answer = call("show", "--json", run.path)
    assert {c["presence"] for c in answer.json["classes"]} == {"missing"}
    assert call("show", run.path).code == 0


def test_parts_are_shown_with_holders_copies_tensors_and_bytes(good: Built, call: Call) -> None:
    parts = {p["part"]: p for p in call("show", "--json", f"{good.path}@200").json["parts"]}
    assert list(parts) == ["replicated", "rank-00000", "rank-00001"]
    assert parts["replicated"]["holders"] == [0, 1]
    assert [c["node"] for c in parts["replicated"]["copies"]] == ["node-a", "node-b"]
    assert parts["rank-00001"]["holders"] == [1]
    assert parts["rank-00001"]["tensors_count"] == 3
    size = payload_of(next(good.path.glob("step-*200-*")), "rank-00001").stat().st_size
    assert parts["rank-00001"]["size_bytes"] == size
    lines = call("show", f"{good.path}@200").out.splitlines()
    assert ["replicated", "0-1", "2", "3"] in [line.split()[:4] for line in lines]


def test_a_part_without_a_seal_is_shown_as_missing(good: Built, call: Call) -> None:
    good.save(400, parts=("replicated",))
    answer = call("show", "--json", f"{good.path}@400")
    assert [(p["part"], p["is_sealed"]) for p in answer.json["parts"]] == [("replicated", True), ("rank-00000", False), ("rank-00001", False)]
    assert "missing rank-00000, rank-00001" in call("show", f"{good.path}@400").out


def test_a_checkpoint_without_any_seal_is_shown_with_what_its_directory_says(good: Built, call: Call) -> None:
    (good.path / "step-000000400-0123abcd").mkdir()
    answer = call("show", f"{good.path}@400")
    assert answer.code == 0
    assert "step           400\n" in answer.out
    assert "no seal is left to tell" in answer.out
    assert call("show", "--json", f"{good.path}@400").json["meta"] is None


def test_the_parent_is_named(good: Built, call: Call) -> None:
    good.restart(at_step=200).save(250)
    assert call("show", "--json", good.path).json["parent"] == {"attempt": good.attempt.label, "step": 200}
    assert f"resumed from step 200 of {good.attempt.label}" in call("show", good.path).out


def test_a_run_that_never_saved_exits_10(run: Built, call: Call) -> None:
    answer = call("show", run.path)
    assert (answer.code, answer.out) == (10, "")
    assert "no checkpoint yet" in answer.err


def test_a_run_of_which_nothing_can_be_restored_exits_12(run: Built, call: Call) -> None:
    directory = run.save(100)
    for path in directory.glob("*.seal"):
        flip(path)
    answer = call("show", run.path)
    assert (answer.code, answer.out) == (12, "")
    assert "step 100 was once durable" in answer.err
    assert answer.hint.startswith(f"hint: ridethrough verify {run.path}")


def test_seals_that_disagree_about_the_provenance_are_pointed_out(run: Built, call: Call, tmp_path: Path) -> None:
    run.save(7, parts=("replicated", "rank-00000"))
    run.save(7, parts=("rank-00001",), git_commit="f" * 40)
    assert call("show", "--json", run.path).json["meta_differs"] is True
    assert "do not agree" in call("show", run.path).err


def test_hostile_provenance_is_shown_without_being_obeyed(run: Built, call: Call) -> None:
    run.save(
        7, experiment="[red]\x1b]0;owned\x07[/red]\nfake line", start_command=["a\x1b[2J", "b c"], dependencies={"\x9bx": "1\r2"},
        config_hash={"deep": [1, {"x": "\u202e"}]}, **{"extra\nfield": "y"},
    )  # fmt: skip
    answer = call("show", run.path)
    assert answer.code == 0
    assert answer.out.replace("\n", "").isprintable()
    assert "[red]\\x1b]0;owned\\x07[/red]\\nfake line" in answer.out


def test_a_damaged_copy_of_the_checkpoint_shown_is_named(good: Built, call: Call) -> None:
    flip(seal_of(next(good.path.glob("step-*200-*")), "replicated"))
    answer = call("show", f"{good.path}@200")
    assert answer.code == 0
    assert "unusable step-000000200-" in answer.err
    assert call("show", "--json", f"{good.path}@200").json["problems"][0]["code"] == "RT-040"

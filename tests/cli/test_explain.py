"""`ridethrough show --explain`: what made a checkpoint beside what is here."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_build import Built, Call
from test_schemas import check

from ridethrough import __version__
from ridethrough.train.guard import FIELDS


def git(root: Path, *argv: str) -> str:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = {f"GIT_{role}_{what}": "nobody@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *argv], cwd=root, check=True, env={**os.environ, **own, **who}, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The command is given in a repository; its commit."""
    root = tmp_path / "code"
    root.mkdir()
    (root / "train.py").write_text("lr = 1\n")
    for argv in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(root, *argv)
    monkeypatch.chdir(root)
    return git(root, "rev-parse", "HEAD")


def explained(call: Call, run: Built) -> dict[tuple[str, str | None], dict[str, Any]]:
    answer = call("show", "--explain", "--json", run.path)
    assert answer.code == 0
    check(answer.json, "show")
    return {(row["field"], row["item"]): row for row in answer.json["explain"]}


def test_every_field_is_there_with_both_sides_verdict_policy_and_what_a_start_would_do(run: Built, call: Call, here: str) -> None:
    run.save(7, git_commit=here, data_version="v1", dependencies={"python": "3.9.0", "ridethrough": __version__}, batch_size={"data": 4})
    rows = explained(call, run)
    assert [row["field"] for row in rows.values()] == sorted((row["field"] for row in rows.values()), key=FIELDS.index)
    assert {field for field, _ in rows} == set(FIELDS)
    assert rows["code", "commit"] == {
        "field": "code", "item": "commit", "checkpoint": here, "here": here, "verdict": "same", "policy": "warn", "action": "nothing",
    }  # fmt: skip
    python = rows["dependencies", "python"]
    assert (python["here"], python["verdict"], python["action"]) == (platform.python_version(), "differs", "warn")
    assert (rows["dependencies", "ridethrough"]["verdict"], rows["batch_size", "data"]["checkpoint"]) == ("same", "4")


@pytest.mark.parametrize("field", ["config", "data", "command", "world_size", "batch_size"])
def test_what_only_the_training_script_knows_is_unknown_and_decided_at_the_start(field: str, run: Built, call: Call, here: str) -> None:
    run.save(7, git_commit=here, data_version="v1", batch_size={"data": 4})
    [row] = [row for (found, _), row in explained(call, run).items() if found == field]
    assert row["checkpoint"] is not None
    assert (row["here"], row["verdict"], row["action"]) == (None, "unknown", None)
    line = next(line for line in call("show", "--explain", run.path).out.splitlines() if line.startswith(f"{field} "))
    assert "told at the start" in line


def test_uncommitted_changes_are_seen(run: Built, call: Call, here: str) -> None:
    run.save(7, git_commit=here)
    assert explained(call, run)["code", "tree"]["verdict"] == "same"
    Path("train.py").write_text("lr = 2\n")
    tree = explained(call, run)["code", "tree"]
    assert (tree["checkpoint"], tree["verdict"], tree["action"]) == ("clean", "differs", "warn")
    assert "a start from here would warn of: work tree, " in call("show", "--explain", run.path).err


def test_a_directory_without_a_repository_is_unknown_and_not_equal(run: Built, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(7)
    monkeypatch.chdir(tmp_path)
    commit = explained(call, run)["code", "commit"]
    assert (commit["here"], commit["verdict"], commit["action"]) == (None, "unknown", "warn")


def test_policies_are_those_of_the_configuration_here(run: Built, call: Call, here: str) -> None:
    run.save(7, git_commit="ab" * 20, data_version="v1")
    Path("ridethrough.toml").write_text('[resume]\ncode = "refuse"\ndependencies = "ignore"\n')
    rows = explained(call, run)
    assert (rows["code", "commit"]["policy"], rows["code", "commit"]["action"]) == ("refuse", "refuse")
    assert rows["dependencies", "numpy"]["action"] == "nothing"
    assert "a start from here would refuse: commit" in call("show", "--explain", run.path).err


def test_a_configuration_that_is_wrong_ends_with_2(run: Built, call: Call, here: str) -> None:
    run.save(7)
    Path("ridethrough.toml").write_text('[resume]\ncode = "no"\n')
    answer = call("show", "--explain", run.path)
    assert (answer.code, answer.out) == (2, "")
    assert call("show", run.path).code == 0


def test_a_checkpoint_without_any_seal_is_all_unknown(good: Built, call: Call, here: str) -> None:
    (good.path / "step-000000400-0123abcd").mkdir()
    answer = call("show", "--explain", "--json", f"{good.path}@400")
    assert {row["verdict"] for row in answer.json["explain"]} == {"unknown"}


def test_hostile_provenance_is_compared_without_being_obeyed(run: Built, call: Call, here: str) -> None:
    run.save(
        7, git_commit=["\x1b[2J"], git_dirty="x", git_diff={}, start_command=["a\x1b[2J", "b c"], data_version="\x1b]0;owned\x07\n[red]",
        dependencies={"../../x": "1", "\x9bnumpy": {"a": 1}, "torch": 7, "click": "0"}, config_hash=[1], batch_size=[4],
    )  # fmt: skip
    answer = call("show", "--explain", run.path)
    assert answer.code == 0
    assert answer.out.replace("\n", "").isprintable()
    check(call("show", "--explain", "--json", run.path).json, "show")


def test_explain_is_null_where_it_was_not_asked_for(good: Built, call: Call) -> None:
    assert call("show", "--json", good.path).json["explain"] is None


def test_explaining_never_imports_torch_or_numpy(run: Built, here: str) -> None:
    run.save(7)
    code = (
        "import sys; from ridethrough.cli import main; assert main(['show', '--explain', sys.argv[1]]) == 0; "
        "sys.exit(', '.join({'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

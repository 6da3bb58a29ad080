from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from cli_build import Built, Call, new_run

VERBS = ["ls", "show", "verify", "du"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_that_does_not_exist_exits_10_with_a_hint(verb: str, call: Call, tmp_path: Path) -> None:
    answer = call(verb, tmp_path / "nowhere" / "deep")
    assert (answer.code, answer.out) == (10, "")
    assert answer.err.startswith("error[RT-010]: there is no such directory")
    assert answer.hint == f"hint: ls {tmp_path}"
    error = call(verb, "--json", tmp_path / "nowhere").error
    assert (error["code"], error["exit_code"]) == ("RT-010", 10)


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_that_is_no_run_exits_10_and_says_what_was_looked_for(verb: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    answer = call(verb, tmp_path / "empty")
    assert answer.code == 10
    for name in ("run.json", "attempts", "step-"):
        assert name in answer.err


def test_a_directory_of_runs_is_answered_with_one_of_them(call: Call, good: Built) -> None:
    answer = call("ls", good.path.parent)
    assert answer.code == 10
    assert answer.hint == f"hint: ridethrough ls {good.path}"


def test_a_mistyped_run_is_answered_with_the_nearest(call: Call, good: Built) -> None:
    assert call("verify", good.path.parent / "exp01").hint == f"hint: ridethrough verify {good.path}"


def test_a_run_that_lost_its_marker_is_still_read_and_the_loss_is_named(call: Call, good: Built) -> None:
    (good.path / "run.json").unlink()
    for verb in VERBS:
        assert call(verb, good.path).code == (1 if verb == "verify" else 0)
    assert "record run.json: " in call("ls", good.path).err
    assert call("show", next(good.path.glob("step-*200-*"))).code == 0


def test_attempts_without_a_marker_or_a_seal_are_damage_and_not_nothing(call: Call, run: Built) -> None:
    (run.path / "run.json").unlink()
    assert call("ls", run.path).code == 1
    assert call("verify", run.path).code == 1


def test_a_file_is_answered_with_the_directory_it_is_in(call: Call, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    answer = call("ls", tmp_path / "notes.txt")
    assert answer.code == 10
    assert "a file" in answer.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_way_to_write_a_run_is_understood(verb: str, call: Call, good: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good.path.parent)
    for path in (good.path, f"{good.path}/", "exp001", "./exp001/", "../runs/exp001", good.path / "run.json"):
        assert call(verb, path).code == 0, path
    monkeypatch.chdir(good.path)
    assert call(verb, ".").code == 0


def test_every_way_to_write_a_checkpoint_is_understood(call: Call, good: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = next(good.path.glob("step-*200-*"))
    (good.path.parent / "last").symlink_to(directory)
    ways = [directory, f"{directory}/", directory / "meta.json", f"{good.path}@200", f"{good.path}/@200", good.path.parent / "last"]
    for path in ways:
        answer = call("show", "--json", path)
        assert (answer.code, answer.json["checkpoint"]["step"]) == (0, 200), path
    monkeypatch.chdir(directory)
    assert call("show", "--json", ".").json["checkpoint"]["step"] == 200


def test_a_step_that_is_not_there_exits_10_and_points_to_ls(call: Call, good: Built) -> None:
    for path in (f"{good.path}@999", good.path / "step-000000999-0123abcd"):
        answer = call("show", path)
        assert answer.code == 10
        assert answer.hint == f"hint: ridethrough ls {good.path}"


def test_a_run_whose_name_looks_like_a_step_of_another_is_itself(call: Call, good: Built) -> None:
    twin = new_run(good.path.parent / "exp001@200")
    twin.save(7)
    assert call("show", "--json", twin.path).json["checkpoint"]["step"] == 7
    assert call("show", "--json", f"{twin.path}@7").json["checkpoint"]["step"] == 7


def test_of_two_checkpoints_of_a_step_the_one_on_the_lineage_is_meant(call: Call, run: Built) -> None:
    run.save(100)
    run.save(200)
    after = run.restart(at_step=100)
    after.save(200)
    assert call("show", "--json", f"{run.path}@200").json["checkpoint"]["attempt"] == after.attempt.label


@pytest.mark.parametrize("verb", VERBS)
def test_hostile_names_are_read_and_shown_without_being_obeyed(verb: str, call: Call, hostile_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = new_run(hostile_dir / "[red]x[bold] \x1b[31m\x07\u202e:boom:")
    built.save(5)
    monkeypatch.chdir(hostile_dir)
    answer = call(verb, f"./{built.path.name}")
    assert answer.code == 0, answer.out
    for text in (answer.out, answer.err):
        assert text.replace("\n", "").isprintable()
    assert call(verb, "--json", built.path).json["run"]["path"] == str(built.path)
    if verb == "show":
        assert "[red]x[bold] \\x1b[31m\\x07\\u202e:boom:" in answer.out


@pytest.mark.parametrize("name", ["a b", "it's", 'say "x"', "new\nline", "-dash", "$(reboot)", "dollar$HOME", "back\\slash", "bell\x07'quote"])
def test_a_hint_can_be_pasted_into_a_shell(name: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    pasted = call("show", "--", name).hint.removeprefix("hint: ridethrough status ")
    assert pasted.isprintable()
    if pasted.startswith("$'"):
        assert pasted[2:-1].encode().decode("unicode_escape") == name
    else:
        assert os.path.normpath(shlex.split(pasted)[0]) == name


def test_a_name_that_is_not_utf8_is_read(call: Call, tmp_path: Path) -> None:
    built = new_run(Path(os.fsdecode(os.fsencode(str(tmp_path)) + b"/caf\xe9")))
    built.save(5)
    answer = call("show", built.path)
    assert answer.code == 0
    assert "caf\\xe9/step-" in answer.out
    assert call("ls", "--json", built.path).code == 0


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 3000, "a@", "@5", "@", "/dev/null", "loop"])
def test_paths_that_cannot_be_runs_are_answered_and_never_break_anything(
    path: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for verb in VERBS:
        answer = call(verb, path)
        assert (answer.code, answer.out) == (10, "")
        assert "hint: " in answer.hint

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_build import Built, Call

from ridethrough import cli
from ridethrough.cli import ls
from ridethrough.errors import StoreLocked

VERBS = [verb for verb in cli.VERBS if importlib.util.find_spec(f"ridethrough.cli.{verb}")]
MOST_S = 0.3


def command_line(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ridethrough", *map(str, args)], capture_output=True, text=True, timeout=30, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_the_reading_verbs_are_there() -> None:
    assert {"ls", "show", "verify", "du"} <= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_its_help_with_two_examples_and_its_exit_codes(verb: str, call: Call) -> None:
    answer = call(verb, "--help")
    assert answer.code == 0
    examples, _, codes = answer.out.partition("Examples:\n")[2].partition("Exit codes:\n")
    assert len([line for line in examples.splitlines() if line.strip().startswith(f"ridethrough {verb}")]) == 2
    lines = codes.strip().splitlines()
    assert lines
    assert all(line.split()[0].isdigit() for line in lines)
    assert answer.out.rstrip().endswith(lines[-1].strip())


@pytest.mark.parametrize("verb", VERBS)
def test_the_list_of_verbs_says_what_each_verb_says_itself(verb: str) -> None:
    command = cli.group.get_command(click.Context(cli.group), verb)
    assert command is not None
    assert (command.help or "").splitlines()[0] == cli.VERBS[verb]


def test_no_verb_and_help_show_the_same(call: Call) -> None:
    assert call("--help") == call() == call("-h")
    for verb in cli.VERBS:
        assert f"\n  {verb} " in call().out


def test_help_fits_a_terminal_of_80_columns(call: Call) -> None:
    for verb in ("", *VERBS):
        answer = call(verb, "--help") if verb else call("--help")
        assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "args", [["--help"], ["ls", "RUN"], ["show", "RUN"], ["verify", "RUN"], ["du", "RUN"], ["ls", "--json", "RUN"], ["run", "--help"],
     ["prune", "RUN", "--dry-run"], ["quarantine", "list", "RUN"], ["export", "--help"]],
)  # fmt: skip
def test_reading_never_imports_torch_or_numpy(args: list[str], good: Built) -> None:
    if args[0] in cli.VERBS and args[0] not in VERBS:
        pytest.skip(f"the verb {args[0]} is not written yet")
    words = [str(good.path) if word == "RUN" else word for word in args]
    program = "import sys; from ridethrough.cli import main; main(sys.argv[1:]); sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=30, check=True)
    loaded = done.stderr.split()
    assert "ridethrough.cli" in loaded
    assert not {"torch", "numpy"} & set(loaded)


CONFIGURED = "run = '/r'\n[nodes.n0]\n[nodes.n1]\n"


@pytest.mark.parametrize(
    ("args", "is_parsed"),
    [
        (["--help"], False),
        (["ls", "RUN"], False),
        (["run", "--help"], False),
        (["run", "--config", "nowhere.toml", "--", "true"], False),
        (["plan", "recovery"], False),
        (["run", "--config", "site.toml", "--", "true"], True),
        (["plan", "recovery", "--config", "site.toml"], True),
    ],
)
def test_pydantic_is_imported_only_where_a_configuration_is_parsed(args: list[str], is_parsed: bool, good: Built, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(CONFIGURED, encoding="utf-8")
    words = [str(good.path) if word == "RUN" else word for word in args]
    program = "import sys; from ridethrough.cli import main; main(sys.argv[1:]); sys.stderr.write(' '.join(sys.modules))"
    # The node's name is not in the file, so that `run` ends there.
    environment = {**os.environ, "RIDETHROUGH_NODE": "stranger"}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=30, check=True, cwd=tmp_path, env=environment
    )
    assert ("pydantic" in done.stderr.split()) == is_parsed


def test_help_does_not_import_what_draws(good: Built) -> None:
    program = "import sys; from ridethrough.cli import main; main(['--help']); assert 'rich' not in sys.modules, 'rich'"
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=True)


@pytest.mark.parametrize("args", [["--help"], ["ls", "RUN"], ["run", "--help"], ["plan", "recovery"]])
def test_it_starts_in_less_than_a_third_of_a_second(args: list[str], good: Built) -> None:
    if args[0] in cli.VERBS and args[0] not in VERBS:
        pytest.skip(f"the verb {args[0]} is not written yet")
    took_s = []
    for _ in range(12):  # the best of several, and of the processor's time: a busy machine makes single figures meaningless
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command_line(*(good.path if word == "RUN" else word for word in args))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if took_s[-1] < MOST_S:
            return
    pytest.fail(f"the fastest of {len(took_s)} starts took {min(took_s):.2f} s")


def test_python_dash_m_is_the_same_program(good: Built, call: Call) -> None:
    done = command_line("ls", good.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, call("ls", good.path).out, call("ls", good.path).err)
    assert command_line("ls", good.path / "nowhere").returncode == 10


def test_version_is_that_of_the_package(call: Call) -> None:
    answer = call("--version")
    assert answer.code == 0
    assert answer.out.startswith("ridethrough 0.")


@pytest.mark.parametrize("args", [["lss"], ["ls"], ["ls", "--bogus", "x"], ["ls", "a", "b"], ["--bogus"], ["ls", ""]])
def test_a_wrong_command_line_exits_2_in_one_line_with_a_hint(args: list[str], call: Call) -> None:
    answer = call(*args)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error[RT-002]: ")
    assert answer.hint.startswith("hint: ridethrough")
    assert len(answer.err.splitlines()) == 2


def test_a_mistyped_verb_is_answered_with_the_nearest(call: Call) -> None:
    assert call("verfy", "x").hint == "hint: ridethrough verify"


def test_a_wrong_command_line_with_json_is_json_too(call: Call) -> None:
    answer = call("ls", "--json")
    assert answer.error["code"] == "RT-002"
    assert answer.error["hint"] == "ridethrough ls --help"


def test_an_error_goes_to_stderr_with_its_code_and_exit_code(call: Call, monkeypatch: pytest.MonkeyPatch, good: Built) -> None:
    def locked(*_: object, **__: object) -> None:
        raise StoreLocked(path=str(good.path), holder="process 7")

    monkeypatch.setattr(ls.target, "load", locked)
    answer = call("ls", good.path)
    assert (answer.code, answer.out) == (11, "")
    assert answer.err.splitlines() == [
        f"error[RT-011]: run {good.path} is locked on this node by process 7",
        f"hint: ridethrough status {good.path}",
    ]
    assert call("ls", "--json", good.path).error == {
        "code": "RT-011",
        "message": f"run {good.path} is locked on this node by process 7",
        "hint": f"ridethrough status {good.path}",
        "retryable": True,
        "exit_code": 11,
    }


def test_a_bug_is_one_line_and_exit_70_and_a_traceback_only_with_vv(call: Call, monkeypatch: pytest.MonkeyPatch, good: Built) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(ls.target, "load", broken)
    answer = call("ls", good.path)
    assert answer.code == 70
    assert answer.err.splitlines()[0] == "error[RT-070]: internal error: ZeroDivisionError: by\\nzero"
    assert len(answer.err.splitlines()) == 2
    assert "Traceback" not in call("-v", "ls", good.path).err
    for args in (["-vv", "ls", good.path], ["ls", "-vv", good.path], ["-v", "ls", "-v", good.path]):
        assert "Traceback" in call(*args).err
        assert "ZeroDivisionError" in call(*args).err


def test_an_interrupt_is_quiet_and_exits_130(call: Call, monkeypatch: pytest.MonkeyPatch, good: Built) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls.target, "load", interrupted)
    answer = call("ls", good.path)
    assert (answer.code, answer.out, answer.err) == (130, "", "")


def test_a_closed_pipe_is_quiet(good: Built) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "ridethrough", "ls", good.path], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error_and_not_a_success(good: Built) -> None:
    for args in (["ls", good.path], ["ls", "--json", good.path], ["--help"]):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([sys.executable, "-m", "ridethrough", *args], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 13
        assert "RT-018" in done.stderr
        assert "cannot be written (No space left on device): the output" in done.stderr
        assert "Traceback" not in done.stderr

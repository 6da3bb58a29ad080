"""`ridethrough plan recovery`: a runbook that says what the configuration says, and no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_build import Answer, Call
from test_schemas import check
from test_terminal import ESCAPE, seen

from ridethrough.cli.plan import EXAMPLE
from ridethrough.config import Config, load
from ridethrough.supervisor.runbook import Runbook, runbook

NODES = '[nodes.n0]\naddress = "10.0.0.1"\n[nodes.n1]\naddress = "10.0.0.2"\n[nodes.n2]\naddress = "10.0.0.3"\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def site(text: str = EXAMPLE) -> Config:
    Path("ridethrough.toml").write_text(text, encoding="utf-8")
    return load(None, {}, {})


def plan_of(text: str = EXAMPLE) -> Runbook:
    return runbook(site(text), run="/ckpt/exp1", command="ridethrough run -- CMD")


def text_of(plan: Runbook) -> str:
    steps = [f"{step.when}: {step.what}" for course in plan.courses for step in course.steps]
    return "\n".join([*(line for question in plan.questions for line in question.meaning), *steps])


def warned(text: str) -> set[str]:
    return {remark.text for remark in plan_of(text).warnings}


# -- what is printed -------------------------------------------------------------------------------------------------------


def test_the_five_questions_are_answered_each_with_its_value_and_where_it_came_from(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    site()
    monkeypatch.setenv("RIDETHROUGH_RECOVERY_WAIT_FOR_NODES", "20m")
    text = call("plan", "recovery").out
    for number, question in enumerate(
        (
            "Where is the step recorded?",
            "Which paths must every node reach?",
            "In which order does it start?",
            "How long to wait for missing nodes, and then?",
            "Continue or roll back?",
        ),
        start=1,
    ):
        assert f"\n{number}. {question}\n" in text
    assert re.search(r"\n   run +/ckpt/exp1  \(file ridethrough\.toml\)\n", text)
    assert re.search(r"\n   wait_for_nodes +20 min  \(env RIDETHROUGH_RECOVERY_WAIT_FOR_NODES\)\n", text)
    assert re.search(r"\n   start_order +storage, network, rendezvous, workers  \(default\)\n", text)


def test_the_course_of_events_has_the_times_of_the_configuration() -> None:
    plan = plan_of(EXAMPLE.replace('"10m"', '"7m"') + '[peers]\nsuspect = "3s"\ndead = "40s"\n')
    assert [course.title for course in plan.courses] == ["IF A PART OF THE ROOM GOES DARK", "IF THE WHOLE ROOM GOES DARK"]
    assert [step.when for step in plan.courses[0].steps] == ["0 s", "3 s", "40 s", "from then", "all are ready", "7 min later"]
    assert "at most 7 min" in plan.courses[0].steps[3].what
    assert "n2 is suspected" in plan.courses[0].steps[1].what


def test_it_says_who_hosts_the_rendezvous_and_who_takes_over() -> None:
    plan = plan_of()
    assert (plan.rendezvous.host, plan.rendezvous.address, plan.rendezvous.successors) == ("n0", "10.0.0.1", ("n1", "n2"))
    assert plan.rendezvous.ports == tuple(range(29500, 29508))
    assert "3. rendezvous: n0 hosts at 10.0.0.1, ports 29500 to 29507, one after the other; if it is dark n1 then n2" in text_of(plan)


def test_the_gates_stand_in_the_configured_order() -> None:
    plan = plan_of(EXAMPLE + 'start_order = ["network", "storage", "rendezvous", "workers"]\n[peers]\ninterface = "eth7"\n')
    assert [line.split(":")[0] for line in plan.questions[2].meaning] == ["1. network", "2. storage", "3. rendezvous", "4. workers"]
    assert "interface eth7 has its address" in plan.questions[2].meaning[0]


def test_shrinking_and_stopping_are_told_apart() -> None:
    shrinking, stopping = text_of(plan_of()), text_of(plan_of(EXAMPLE.replace('"shrink"', '"stop"')))
    assert "go on without it, if they are at least 2" in shrinking
    assert "go on without it" not in stopping
    assert "ends on every node with exit 21" in stopping


def test_rolling_back_promises_nothing_of_memory() -> None:
    text = text_of(plan_of(EXAMPLE.replace('"continue" ', '"roll-back"')))
    assert "memory elsewhere is made durable" not in text
    assert "the memory is kept" not in text
    assert "resume from the newest verified checkpoint" in text
    assert "memory elsewhere is made durable" in text_of(plan_of())


def test_commands_can_be_pasted_and_find_the_configuration_from_anywhere(call: Call, here: Path) -> None:
    site(EXAMPLE.replace("/ckpt/exp1", "/ckpt/my exp"))
    text = call("plan", "recovery").out
    for line in (
        "   ridethrough status '/ckpt/my exp'\n",
        "   ridethrough ls '/ckpt/my exp'\n",
        f"   ridethrough run --config {here}/ridethrough.toml -- CMD\n",
        f"   RIDETHROUGH_RECOVERY_WAIT_FOR_NODES=30s ridethrough run --config {here}/ridethrough.toml -- CMD\n",
    ):
        assert line in text


def test_the_command_that_goes_on_without_the_rest_sets_what_the_configuration_does_not() -> None:
    plan = plan_of(f'run = "/r"\n{NODES}')
    last = plan.commands[-1].command
    assert last == "RIDETHROUGH_STORAGE=shared RIDETHROUGH_RECOVERY_THEN=shrink RIDETHROUGH_RECOVERY_WAIT_FOR_NODES=30s ridethrough run -- CMD"
    assert not any("SHRINK" in each.command.upper() for each in plan_of(f'run = "/r"\nstorage = "node-local"\n{NODES}').commands)


def test_a_run_directory_from_the_command_line_stands_in_the_commands(call: Call, here: Path) -> None:
    site('storage = "shared"\n')
    text = call("plan", "recovery", "--run", "runs/a").out
    assert f"   run             {here}/runs/a  (flag --run)\n" in text
    assert f"   ridethrough run --config {here}/ridethrough.toml --run {here}/runs/a -- CMD\n" in text


def test_one_node_has_a_plan_of_its_own() -> None:
    plan = plan_of('run = "/ckpt/exp1"\n[recovery]\npaths = ["/data"]\n')
    assert [course.title for course in plan.courses] == ["IF THIS NODE GOES DARK"]
    assert plan.rendezvous.host is None
    assert [step.when for step in plan.courses[0].steps] == ["0 s", "power is back", "storage answers", "after 10 min"]
    assert [step.when for step in plan_of('run = "/ckpt/exp1"\n').courses[0].steps][-1] == "if it does not"


def test_without_a_configuration_there_are_the_defaults_and_a_first_file_to_copy(call: Call) -> None:
    answer = call("plan", "recovery")
    assert answer.code == 0
    assert "no configuration found: these are the defaults\n" in answer.out
    assert "RUN: the directory that the script's Checkpointer names\n" in answer.out
    shown = "\n".join(line.removeprefix("   ") for line in answer.out.partition("the same on every node:\n\n")[2].splitlines())
    assert shown + "\n" == EXAMPLE
    site(shown)
    assert "A FIRST ridethrough.toml" not in call("plan", "recovery").out


def test_the_documentation_shows_the_same_example() -> None:
    page = Path(__file__).parents[2] / "docs" / "recovery.md"
    assert f"```toml\n{EXAMPLE}```\n" in page.read_text(encoding="utf-8")


def test_the_example_is_a_configuration_of_three_nodes_without_surprises() -> None:
    tomllib.loads(EXAMPLE)
    assert site().order == ("n0", "n1", "n2")
    assert plan_of().warnings == ()
    assert max(map(len, EXAMPLE.splitlines())) <= 77


# -- warnings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("", "no nodes are configured"),
        ("", "the run directory is not set"),
        ("", "no paths are configured"),
        (f'run = "/r"\n{NODES}', "no power domains are configured"),
        (f'run = "/r"\n{NODES}', "storage is not declared"),
        (f'run = "/r"\n{NODES}', 'then is "stop": one node that is not back in 10 min ends the run'),
        (f'run = "/r"\n{NODES}', None),
        (EXAMPLE.replace("rack-b", "rack-a"), "all nodes are in one power domain (rack-a)"),
        (EXAMPLE.replace('storage = "shared"', 'storage = "detect"'), "after a cut of the whole room nobody knows yet"),
        (EXAMPLE.replace('"shared"', '"node-local"').replace('"shrink"', '"stop"'), "storage is node-local"),
        (EXAMPLE.replace("min_nodes = 2", "min_nodes = 3"), "the run never shrinks"),
        (EXAMPLE.replace('"shrink"', '"stop"'), "min_nodes has no effect"),
        (EXAMPLE.replace('"10m"', '"30s"'), "30 s is short for machines that boot"),
        (EXAMPLE.replace('"continue"', '"roll-back"'), "roll-back gives up the steps since"),
        (EXAMPLE.replace('"10.0.0.3"', '"n2.cluster"'), "addresses are host names"),
    ],
)
def test_what_a_reader_should_know_before_that_night_is_a_warning(text: str, warning: str | None) -> None:
    found = warned(text)
    if warning is None:
        assert not any("host names" in one or "node-local:" in one for one in found)
    else:
        assert any(warning in one for one in found), found
        assert not any(warning in one for one in warned(EXAMPLE))


# -- how it is printed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("text", [EXAMPLE, ""])
def test_nothing_but_commands_is_wider_than_the_terminal_and_nothing_is_cut(columns: int, text: str) -> None:
    if text:
        site(text)
    shown = ESCAPE.sub("", seen("plan", "recovery", columns=columns))
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert "IN SHORT" in shown


def test_json_is_what_the_schema_says(call: Call) -> None:
    for text in (EXAMPLE, ""):
        if text:
            site(text)
        else:
            Path("ridethrough.toml").unlink()
        answer = call("plan", "recovery", "--json")
        assert answer.err == ""
        check(answer.json, "plan-recovery")
        assert answer.json["schema"] == {"name": "ridethrough.plan.recovery", "version": 1}
        assert (answer.json["example"] is None) == bool(text)
        assert [question["number"] for question in answer.json["questions"]] == [1, 2, 3, 4, 5]


def test_json_has_the_values_that_a_program_needs(call: Call, here: Path) -> None:
    site()
    found = call("plan", "recovery", "--json").json
    assert found["config"] == {"file": str(here / "ridethrough.toml")}
    assert found["nodes"][2] == {"name": "n2", "address": "10.0.0.3", "domain": "rack-b"}
    assert (found["suspect_s"], found["dead_s"], found["wait_for_nodes_s"], found["then"], found["min_nodes"]) == (1.5, 15.0, 600.0, "shrink", 2)


def test_it_ends_with_0_whatever_it_warns_of_and_with_2_where_the_configuration_is_wrong(call: Call) -> None:
    site(f'run = "/r"\n{NODES}')
    assert call("plan", "recovery").code == 0
    site()
    Path("ridethrough.toml").write_text("[peers]\nprot = 3\n", encoding="utf-8")
    answer: Answer = call("plan", "recovery")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "error[RT-002]: ridethrough.toml: peers.prot: there is no such key\nhint: did you mean port?\n"
    assert call("plan", "recovery", "--json").error["hint"] == "did you mean port?"
    assert call("plan", "recovery", "--config", "nowhere.toml").code == 2


def test_a_plan_for_what_there_is_no_plan_for_is_refused(call: Call) -> None:
    answer = call("plan", "recvery")
    assert (answer.code, answer.hint) == (2, "hint: ridethrough plan --help")
    assert call("plan").out == call("plan", "--help").out


def test_a_hostile_name_of_a_directory_is_shown_and_not_obeyed(hostile_dir: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile_dir)
    site('[recovery]\npaths = ["data"]\nmin_nodes = 1\n')
    text = call("plan", "recovery").out
    assert "d\\ne*{f}$(g)" in text
    assert "d\ne*{f}" not in text


def test_a_wrong_configuration_keeps_a_job_from_starting(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("ridethrough.toml").write_text("[peers]\ndead = 15\n", encoding="utf-8")
    answer = call("run", "--", "true")
    assert (answer.code, answer.hint) == (2, 'hint: write dead = "15s" (units are s, m and h)')
    site()
    monkeypatch.setenv("RIDETHROUGH_NODE", "stranger")
    answer = call("run", "--", "true")
    assert (answer.code, "this node is called stranger" in answer.err) == (2, True)


def test_a_plan_can_be_made_on_any_system() -> None:
    site()
    # pydantic itself needs the real platform, so only the code of ours sees the other one.
    code = """
import sys, ridethrough.config_file
sys.platform, sys.modules["fcntl"] = "darwin", None
from ridethrough.cli import main
sys.exit(main(["plan", "recovery"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema
import pytest
from cli_build import Built, Call, flip, payload_of, seal_of

VERBS = ["ls", "show", "verify", "du", "prune"]
WORDS = {"prune": ("prune", "--dry-run")}
"""What is typed for a verb that is more than its name."""


def schema_of(name: str) -> Any:
    return json.loads((resources.files("ridethrough.cli") / "schemas" / f"{name}.json").read_text(encoding="utf-8"))


def strict(schema: Any) -> Any:
    """The schema as we keep it ourselves: a field that it does not name is a mistake (readers ignore it)."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in found else found


def check(document: Any, name: str) -> None:
    jsonschema.validate(document, strict(schema_of(name)), format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", [*VERBS, "error"])
def test_every_schema_is_json_schema_2020_12(name: str) -> None:
    assert schema_of(name)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize("verb", VERBS)
def test_real_output_is_what_the_schema_says(verb: str, good: Built, call: Call) -> None:
    answer = call(*WORDS.get(verb, (verb,)), "--json", good.path)
    check(answer.json, verb)
    assert answer.json["schema"] == {"name": f"ridethrough.{verb}", "version": 1}
    assert answer.json["generated_at"].endswith("Z")
    assert answer.err == ""


@pytest.mark.parametrize("verb", VERBS)
def test_output_about_a_ruined_run_is_what_the_schema_says(verb: str, good: Built, call: Call) -> None:
    good.save(400, parts=("replicated",), saved_at=None)
    after = good.restart(at_step=200)
    after.save(250)
    flip(seal_of(after.save(260), "rank-00000"))
    flip(payload_of(after.save(270), "rank-00000"))
    flip(good.path / "run.json")
    flip(next(good.path.glob("attempts/000001-*/roster.json")))
    (good.path / "step-000000500-0123abcd").mkdir()
    check(call(*WORDS.get(verb, (verb,)), "--json", good.path).json, verb)
    if verb in ("show", "verify"):
        for step in (400, 260, 270, 500):
            check(call(verb, "--json", f"{good.path}@{step}").json, verb)


@pytest.mark.parametrize("verb", ["ls", "du", "prune"])
def test_output_about_an_empty_run_is_what_the_schema_says(verb: str, run: Built, call: Call) -> None:
    check(call(*WORDS.get(verb, (verb,)), "--json", run.path).json, verb)


@pytest.mark.parametrize("verb", VERBS)
def test_errors_are_what_the_schema_says_and_leave_stdout_empty(verb: str, run: Built, call: Call) -> None:
    answer = call(verb, "--json", run.path / "nowhere")
    assert answer.out == ""
    check(answer.error, "error")
    assert answer.error["exit_code"] == answer.code == 10

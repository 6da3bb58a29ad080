"""A suite that cannot fail proves nothing: with any one sync, order or check taken away a cut is found that does harm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from crash_mutants import MUTANTS, Mutant, run


@pytest.mark.parametrize("name", MUTANTS)
def test_a_store_that_lacks_it_is_found_out(name: str) -> None:
    report = run(MUTANTS[name])
    assert report.wrong, f"nothing noticed: {name}"
    print(f"{name}\n{report}")


def test_the_table_of_bugs_has_them_all_and_no_other() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "crash.md"
    table = page.read_text(encoding="utf-8").split("| BUG |")[1].split("\n\n")[0]
    assert re.findall(r"^\| (.+?) \|", table, re.M) == list(MUTANTS)


SHAPES = sorted({(trace, mutant.parts) for mutant in MUTANTS.values() for trace in mutant.traces})


@pytest.mark.parametrize(("trace", "parts"), SHAPES)
def test_in_the_same_stories_the_whole_store_does_no_harm(trace: str, parts: int) -> None:
    report = run(Mutant(traces=(trace,), parts=parts))
    assert report.wrong == [], report

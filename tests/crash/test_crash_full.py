"""A hundred thousand states of a disk after a power cut, each read by the real readers: with RIDETHROUGH_CRASH=full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from crash_book import Seen
from crash_lab import Report, check, new_world, seeded_names
from crash_lives import CUT, LIVES, random_story, second_cuts
from crash_mutants import MUTANTS, run
from crash_nodes import NODES, new_nodes
from crash_traces import CALLS_OF_A_SAVE, FAST, at_change, failing_save, interleaved_claims, killed, rivals, several_writers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rows import crash_row, record

pytestmark = [
    pytest.mark.skipif(os.environ.get("RIDETHROUGH_CRASH") != "full", reason="takes minutes: RIDETHROUGH_CRASH=full"),
    pytest.mark.timeout(3600),
]

TARGET_STATES = 100_000
PROFILES = {"posix": 1, "journal": 4}
"""And one of how many of the stories is told: what a journal may leave is a part of what POSIX lets be left."""
OF_ONE_CLAIM = 9
CUT_TWICE = {"start": 2, "one save": 4, "saves and retention": 20, "quarantine": 20, "full disk": 20, "restarts": 20}
"""Stories, and after one of how many of their cuts the run is started again."""
UNHURRIED = list(HealthCheck)
Section = Callable[..., Iterator[Report]]


def _told(story: Callable[[Any], None], ledger: dict[str, Any], *, go_on_every: int = 100, names: int = 1, **shape: Any) -> Report:
    with seeded_names(names):
        world = new_world(seed=names, **shape)
        story(world)
        return check(world, go_on_every=go_on_every, **ledger)


def stories(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    for parts in (1, 2, 3) if share == 1 else (2,):
        for page_bytes, part_bytes in ((4096, 9000), (512, 2000), (512, 3000)):
            for story in FAST.values():
                shape = {"parts": parts, "page_bytes": page_bytes, "part_bytes": part_bytes}
                yield _told(story, {**ledger, "known": {}}, profile=profile, **shape)


def failed_saves(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    for call, count in (("create", 6), ("write", 6), ("sync", 6), ("rename", 4), ("sync_dir", 9), ("close", 6), ("make_dir", 1), ("remove", 6)):
        for nth in range(1, count + 1, share):
            for is_late in (False, True):
                for error in (errno.EIO, errno.ENOSPC):
                    story = failing_save(call, error, nth, is_late=is_late, is_lasting=error == errno.ENOSPC)
                    yield _told(story, ledger, profile=profile, names=2, part_bytes=9000)


def killed_saves(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    for at_call in range(0, CALLS_OF_A_SAVE, share):
        yield _told(killed(at_change(at_call)), ledger, profile=profile, names=5, part_bytes=9000)


def claims(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    for at_call in range(1, OF_ONE_CLAIM + 1):
        yield _told(rivals(at_call), ledger, profile=profile, names=3, go_on_every=5)
    for seed in range(0, 20, share):
        yield _told(interleaved_claims(seed), ledger, profile=profile, names=100 + seed, go_on_every=10, page_bytes=512)


def writers(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    for seed in range(0, 24, share):
        yield _told(several_writers(seed), {**ledger, "known": {}}, profile=profile, names=200 + seed, parts=4, part_bytes=3000)


def two_nodes(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    for seed in range(300, 312, share):
        known: dict[int, Seen] = {}
        for hit in (NODES, NODES[:1], NODES[1:]):
            with seeded_names(seed):
                nodes = new_nodes(profile=profile, hit=hit, seed=seed, page_bytes=4096 if seed % 2 else 512)
                nodes.start()
                for _ in range(3):
                    nodes.save()
                yield check(nodes, go_on_every=50, **{**ledger, "known": known})


def cut_twice(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    for number, (name, every) in enumerate(CUT_TWICE.items()):
        with seeded_names(400 + number):
            world = new_world(profile=profile, seed=400 + number, page_bytes=512, part_bytes=2500)
            FAST[name](world)
            yield second_cuts(world, every=every * share, **{**ledger, "known": {}})


def random_lives(profile: Any, ledger: dict[str, Any], share: int) -> Iterator[Report]:
    reports: list[Report] = []

    @settings(max_examples=600 // share, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=UNHURRIED)
    @given(first=LIVES, second=LIVES, cuts=st.tuples(CUT, CUT))
    def lives(first: Any, second: Any, cuts: Any) -> None:
        reports.append(random_story(first, second, profile, cuts, window=40, **ledger))

    lives()
    yield from reports


MEDIUM = "posix and journal"
NOT_WHAT_WAS_SAVED = "is not what was saved"
"""What the judge says of damage that was accepted; all else that it says is of something lost."""
SECTIONS: dict[str, Section] = {
    "stories": stories,
    "a failed save between two": failed_saves,
    "killed within a save, then cut": killed_saves,
    "rivals for a number": claims,
    "several writers": writers,
    "two nodes with a disk each": two_nodes,
    "cut, restarted and cut again": cut_twice,
    "random lives": random_lives,
}


def test_a_hundred_thousand_states_after_a_cut_accept_nothing_damaged_and_lose_nothing_durable(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = []
    total = Report()
    distinct: set[int] = set()
    harm: list[str] = []
    for profile, share in PROFILES.items():
        counted: set[int] = set()
        for name, section in SECTIONS.items():
            report = Report()
            for one in section(profile, {"known": {}, "counted": counted}, share):
                harm.extend([f"{profile}, {name}: {one}"] if one.wrong else [])
                report.add(one)
            total.add(report)
            with capsys.disabled():
                print(f"\n{profile:<8} {name:<32} {report.states:>7} states {report.gone_on:>6} gone on from {report.used_s:>6.1f} s", end="")
            rows.append({"name": f"states after a cut, {profile}: {name}", "value": report.states, "unit": "states", "met": True})
        distinct |= counted
    with capsys.disabled():
        print(f"\n{len(distinct)} distinct states, {total.checks} checks, {total.used_s:.0f} s; stories that end in harm: {len(harm)}")
    damaged = sum(NOT_WHAT_WAS_SAVED in one for one in harm)
    record(
        *rows,
        crash_row("model", MEDIUM, "instants tried", len(distinct), "states", TARGET_STATES, met=len(distinct) >= TARGET_STATES),
        crash_row("model", MEDIUM, "damaged accepted", damaged, "stories", 0, met=damaged == 0),
        crash_row("model", MEDIUM, "durable lost", len(harm) - damaged, "stories", 0, met=len(harm) == damaged),
        {"name": "of these also started and saved on", "value": total.gone_on, "unit": "states", "met": True},
    )
    assert not harm, "\n\n".join(harm[:3])
    assert len(distinct) >= TARGET_STATES


def test_every_mutant_is_found_out_in_the_strict_profile() -> None:
    found = {profile: [name for name, mutant in MUTANTS.items() if run(mutant, profile=profile).wrong] for profile in PROFILES}
    killed = len(found["posix"])
    record(crash_row("model", MEDIUM, "mutants killed", killed, "mutants", len(MUTANTS), met=killed == len(MUTANTS)))
    print("harmless where names keep their order:", sorted(set(MUTANTS) - set(found["journal"])))
    assert set(found["posix"]) == set(MUTANTS)

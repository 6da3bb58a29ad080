"""A power cut at any call of what happens to a run: nothing damaged is accepted, nothing durable is lost, the run goes on."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from crash_lab import check, new_world, seeded_names
from crash_lives import CUT, LIVES, random_story, second_cuts
from crash_nodes import NODES, new_nodes
from crash_traces import CALLS_OF_A_SAVE, FAST, at_change, failing_save, interleaved_claims, killed, rivals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROFILES = ("posix", "journal")
OF_ONE_CLAIM = 9
"""Calls that a claim makes; a rival may come at each."""


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("story", FAST)
def test_no_cut_loses_what_was_durable_or_shows_what_is_damaged(story: str, profile: Any) -> None:
    with seeded_names(1):
        world = new_world(profile=profile, seed=1)
        FAST[story](world)
        report = check(world)
    assert report.wrong == [], report


@pytest.mark.parametrize("profile", PROFILES)
def test_torn_at_every_sector_the_same_holds(profile: Any) -> None:
    with seeded_names(2):
        world = new_world(profile=profile, page_bytes=512, part_bytes=2000, seed=2)
        FAST["saves and retention"](world)
        report = check(world, go_on_every=50)
    assert report.wrong == [], report
    assert report.states > 300


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_dir"])
def test_a_cut_around_a_save_of_which_one_call_failed_is_no_worse(call: str, is_late: bool) -> None:
    with seeded_names(3):
        world = new_world(seed=3, parts=2, part_bytes=3000)
        failing_save(call, errno.EIO, 2, is_late=is_late)(world)
        report = check(world)
    assert report.wrong == [], report


@pytest.mark.parametrize("at_call", range(0, CALLS_OF_A_SAVE, 8))
def test_a_cut_after_a_process_was_killed_in_a_save_and_another_went_on_is_no_worse(at_call: int) -> None:
    with seeded_names(8):
        world = new_world(seed=8)
        killed(at_change(at_call))(world)
        report = check(world, go_on_every=60)
    assert report.wrong == [], report


@pytest.mark.parametrize("at_call", range(1, OF_ONE_CLAIM))
def test_a_number_is_nobodys_twice_whenever_its_rival_comes_and_the_power_goes(at_call: int) -> None:
    with seeded_names(4):
        world = new_world(seed=4)
        rivals(at_call)(world)
        report = check(world, go_on_every=3)
    assert report.wrong == [], report


@pytest.mark.parametrize("seed", range(4))
def test_two_starts_that_take_turns_call_by_call_never_share_a_number(seed: int) -> None:
    with seeded_names(seed):
        world = new_world(seed=seed)
        interleaved_claims(seed)(world)
        report = check(world, go_on_every=3)
    assert report.wrong == [], report


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("hit", [NODES, NODES[:1], NODES[1:]], ids=["both", "the first", "the second"])
def test_of_two_nodes_with_a_disk_each_a_cut_of_either_or_both_loses_nothing_durable(hit: tuple[str, ...], profile: Any) -> None:
    with seeded_names(5):
        nodes = new_nodes(profile=profile, hit=hit, seed=5)
        nodes.start()
        for _ in range(3):
            nodes.save()
        report = check(nodes)
    assert report.wrong == [], report


@pytest.mark.parametrize("profile", PROFILES)
def test_a_second_cut_after_the_restart_from_a_first_one_loses_nothing_either(profile: Any) -> None:
    with seeded_names(6):
        world = new_world(profile=profile, seed=6)
        FAST["one save"](world)
        report = second_cuts(world, every=9)
    assert report.wrong == [], report


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(first=LIVES, second=LIVES, profile=st.sampled_from(PROFILES), cuts=st.tuples(CUT, CUT))
def test_whatever_happens_before_and_after_a_cut_the_run_keeps_its_word(
    first: list[tuple[Any, ...]], second: list[tuple[Any, ...]], profile: Any, cuts: tuple[float, float]
) -> None:
    report = random_story(first, second, profile, cuts)
    assert report.wrong == [], report

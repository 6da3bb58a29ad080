"""Scenarios say what they do, and the matrix covers what it must."""

from __future__ import annotations

import itertools

import pytest

from ridethrough.drill.scenario import SCENARIOS, SERVER, Cut, Instant, Scenario, Storage, matrix

EVERY = [*SCENARIOS.values(), *matrix(seed=1, runs=8)]


@pytest.mark.parametrize("scenario", EVERY, ids=lambda scenario: scenario.name)
def test_only_nodes_that_are_there_and_on_are_cut(scenario: Scenario) -> None:
    known = {*scenario.names, *([SERVER] if scenario.storage is Storage.SHARED else [])}
    for before, cut in itertools.pairwise((None, *scenario.cuts)):
        assert set(cut.nodes) <= known
        assert set(cut.back_s) | cut.never <= set(cut.nodes)
        if cut.kind is Instant.RECOVERING:
            assert before is not None
            assert not set(cut.nodes) & set(before.nodes)


@pytest.mark.parametrize("scenario", EVERY, ids=lambda scenario: scenario.name)
def test_the_last_cut_leaves_steps_to_train(scenario: Scenario) -> None:
    assert scenario.steps % 3 == 0
    assert max(cut.after_step for cut in scenario.cuts) + 10 < scenario.steps


def test_the_same_seed_gives_the_same_matrix_and_another_one_another() -> None:
    assert matrix(seed=5, runs=8) == matrix(seed=5, runs=8)
    assert matrix(seed=5, runs=8) != matrix(seed=6, runs=8)


@pytest.mark.parametrize("seed", range(20))
def test_the_matrix_covers_every_node_alone_pairs_and_the_room_in_every_phase_and_order_of_return(seed: int) -> None:
    scenarios = matrix(seed=seed, runs=8)
    cuts: list[Cut] = [cut for scenario in scenarios for cut in scenario.cuts]
    assert len(cuts) == 40
    assert {("n0",), ("n1",), ("n2",), ("n0", "n1", "n2")} <= {cut.nodes for cut in cuts}
    assert any(len(cut.nodes) == 2 for cut in cuts)
    assert {Instant.MID_STEP, Instant.MID_SAVE, Instant.AGAIN} <= {cut.kind for cut in cuts}
    assert {scenario.storage for scenario in scenarios} == set(Storage)
    room = [tuple(sorted(cut.nodes, key=cut.back_after_s)) for cut in cuts if len(cut.nodes) == 3]
    assert len(set(room)) > 1


def test_a_job_must_not_notice_its_file_server_or_a_short_cut_of_a_cable() -> None:
    assert {name for name, scenario in SCENARIOS.items() if not scenario.cuts[0].is_felt} == {"storage-down", "blip"}

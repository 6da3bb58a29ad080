from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.format.attempt import Roster, RosterPart
from ridethrough.format.layout import REPLICATED, rank_part
from ridethrough.snapshot.placement import REPLICAS, all_replicas, distinct_nodes, parts_to_write
from ridethrough.types import AttemptRef

layouts = st.lists(st.integers(1, 6), min_size=1, max_size=7)
"""Sizes of the power domains."""


def room(sizes: list[int]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Nodes in start order, and their domains, rack by rack."""
    domains = {f"{chr(97 + rack)}{at}": f"rack-{rack}" for rack, size in enumerate(sizes) for at in range(size)}
    return tuple(domains), domains


def shuffled(sizes: list[int], draw: st.DataObject) -> tuple[tuple[str, ...], dict[str, str]]:
    nodes, domains = room(sizes)
    return tuple(draw.draw(st.permutations(nodes))), domains


def replica_nodes(nodes: tuple[str, ...], node: str, domains: dict[str, str]) -> tuple[str, ...]:
    return all_replicas(nodes, domains)[node]


def roster(nodes: tuple[str, ...], *, ranks: int = 1, extra: tuple[RosterPart, ...] = ()) -> Roster:
    by_rank = tuple(node for node in nodes for _ in range(ranks))
    everyone = tuple(range(len(by_rank)))
    private = (RosterPart(name=rank_part(rank), holders=(rank,)) for rank in everyone)
    return Roster(
        run_uid="r",
        attempt=AttemptRef(seq=1, nonce="ab" * 16),
        nodes=by_rank,
        parts=(RosterPart(name=REPLICATED, holders=everyone), *extra, *private),
    )


def load(nodes: tuple[str, ...], domains: dict[str, str]) -> Counter[str]:
    """Of how many others each node holds the parts."""
    return Counter({node: 0 for node in nodes}) + Counter(holder for node in nodes for holder in replica_nodes(nodes, node, domains))


@given(layouts, st.data())
def test_the_holders_are_as_many_others_as_there_are_up_to_two(sizes: list[int], draw: st.DataObject) -> None:
    nodes, domains = shuffled(sizes, draw)
    for node in nodes:
        holders = replica_nodes(nodes, node, domains)
        assert len(set(holders)) == len(holders) == min(REPLICAS, len(nodes) - 1)
        assert node not in holders
        assert set(holders) <= set(nodes)


@given(layouts, st.data())
def test_the_holders_are_in_other_domains_as_far_as_there_are_nodes(sizes: list[int], draw: st.DataObject) -> None:
    """Sizes here are small enough for every node to find room elsewhere."""
    nodes, domains = shuffled(sizes, draw)
    for node in nodes:
        elsewhere = [n for n in nodes if domains[n] != domains[node]]
        outside = [n for n in replica_nodes(nodes, node, domains) if domains[n] != domains[node]]
        assert len(outside) == min(len(elsewhere), REPLICAS)


@given(layouts, st.data())
def test_the_second_holder_is_in_a_third_domain_unless_one_has_more_than_a_third_of_the_nodes(sizes: list[int], draw: st.DataObject) -> None:
    nodes, domains = shuffled(sizes, draw)
    if 3 * max(sizes) > len(nodes):
        return
    for node in nodes:
        assert len({domains[n] for n in (node, *replica_nodes(nodes, node, domains))}) == 3


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 1, 1], [2, 2, 1], [4, 1, 1], [1, 4, 1], [8, 4, 4], [3, 2, 2, 1]])
def test_the_second_holder_is_in_a_third_domain_of_a_small_room(sizes: list[int]) -> None:
    nodes, domains = room(sizes)
    for node in nodes:
        assert len({domains[n] for n in (node, *replica_nodes(nodes, node, domains))}) == 3


@pytest.mark.parametrize("sizes", [[1] * 3, [1] * 64, [16] * 4, [32, 32], [8, 8, 8], [16, 16, 16, 3], [5, 4, 3, 2, 1], [64], [2, 2]])
def test_everybody_holds_the_parts_of_two_others(sizes: list[int]) -> None:
    """Racks in start order, too: the next node of another rack is the same one for the whole rack."""
    nodes, domains = room(sizes)
    assert set(load(nodes, domains).values()) == {2}


@pytest.mark.parametrize("sizes", [[32, 32, 1], [8] + [1] * 8, [512, 256, 256]])
def test_uneven_domains_burden_nobody_with_more_than_three_others(sizes: list[int]) -> None:
    nodes, domains = room(sizes)
    assert max(load(nodes, domains).values()) <= 3


@pytest.mark.parametrize("sizes", [[1023, 1], [1000, 24], [200, 1, 1]])
def test_a_few_nodes_elsewhere_are_not_burdened_with_a_whole_room(sizes: list[int]) -> None:
    nodes, domains = room(sizes)
    assert max(load(nodes, domains).values()) <= 20


def test_nodes_without_a_domain_are_each_their_own() -> None:
    assert replica_nodes(("n0", "n1", "n2", "n3"), "n2", {}) == ("n3", "n0")


def test_a_node_alone_has_no_holders() -> None:
    assert replica_nodes(("n0",), "n0", {}) == ()


@pytest.mark.parametrize("sizes", [[1], [1, 1], [1, 1, 1], [2, 2], [2, 1, 1], [3, 1], [2, 2, 1]])
def test_on_a_shared_tier_each_part_with_a_living_holder_has_one_writer_whoever_is_dark(sizes: list[int]) -> None:
    nodes, domains = room(sizes)
    found = roster(nodes, ranks=2)
    for count in range(len(nodes) + 1):
        for dark in map(frozenset, itertools.combinations(nodes, count)):
            writers = Counter(name for node in nodes for name in parts_to_write(found, node, dark=dark, is_shared=True, domains=domains))
            for part in found.parts:
                owners = {found.nodes[rank] for rank in part.holders}
                holders = owners | set().union(*(replica_nodes(nodes, owner, domains) for owner in owners if len(owners) == 1))
                assert writers[part.name] == (1 if holders - dark else 0), (dark, part.name)


@pytest.mark.parametrize("sizes", [[1], [1, 1], [1, 1, 1], [2, 2], [2, 1, 1], [2, 2, 1]])
def test_on_node_local_tiers_every_living_holder_writes(sizes: list[int]) -> None:
    nodes, domains = room(sizes)
    found = roster(nodes)
    for count in range(len(nodes) + 1):
        for dark in map(frozenset, itertools.combinations(nodes, count)):
            for node in nodes:
                written = parts_to_write(found, node, dark=dark, is_shared=False, domains=domains)
                mine = {REPLICATED} | {rank_part(r) for r, owner in enumerate(nodes) if node in (owner, *replica_nodes(nodes, owner, domains))}
                assert set(written) == (set() if node in dark else mine)


def test_a_dark_node_writes_nothing() -> None:
    assert parts_to_write(roster(("n0", "n1")), "n0", dark=frozenset({"n0"}), is_shared=True, domains={}) == ()


def test_the_owner_of_a_private_part_writes_it_while_it_lives() -> None:
    found = roster(("n0", "n1", "n2"))
    assert parts_to_write(found, "n1", dark=frozenset({"n0", "n2"}), is_shared=True, domains={}) == (
        REPLICATED, rank_part(0), rank_part(1), rank_part(2),
    )  # fmt: skip
    assert parts_to_write(found, "n1", dark=frozenset(), is_shared=True, domains={}) == (rank_part(1),)


@pytest.mark.parametrize("holders", [(0,), (0, 1)])
def test_a_part_that_is_not_sent_to_others_is_not_theirs_to_write(holders: tuple[int, ...]) -> None:
    """Ordinary parts that only one node holds survive on tiers alone."""
    found = roster(("n0", "n1"), ranks=2, extra=(RosterPart(name="shard-00000", holders=holders),))
    assert "shard-00000" not in parts_to_write(found, "n1", dark=frozenset({"n0"}), is_shared=True, domains={})
    assert "shard-00000" not in parts_to_write(found, "n1", dark=frozenset(), is_shared=False, domains={})


def test_the_parts_of_1024_nodes_with_8_ranks_are_told_apart_in_no_time() -> None:
    nodes, domains = room([256] * 4)
    found = roster(nodes, ranks=8)
    assert len(distinct_nodes(found)) == 1024
    began = time.perf_counter()
    written = parts_to_write(found, nodes[5], dark=frozenset({nodes[4]}), is_shared=False, domains=domains)
    assert len(written) == 1 + 3 * 8
    assert time.perf_counter() - began < 1.0

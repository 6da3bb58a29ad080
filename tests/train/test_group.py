from __future__ import annotations

from typing import Any

import pytest
from room import run_ranks, same_error

from ridethrough.errors import Damaged, StorageError, UsageError
from ridethrough.train.group import Group, check_meeting

NODES = ("a", "a", "b", "c")


def row(node: str, *, version: str = "1 (format 1)", boot: str | None = None) -> dict[str, str]:
    return {"version": version, "node": node, "boot": boot or f"boot of {node}"}


def test_ranks_of_one_version_on_machines_with_names_of_their_own_fit_together() -> None:
    check_meeting([row("a"), row("a"), row("b")])


def test_nodes_of_different_versions_are_refused_and_named() -> None:
    with pytest.raises(UsageError, match=r"1 \(format 1\) on a, 2 \(format 1\) on b"):
        check_meeting([row("a"), row("b", version="2 (format 1)"), row("c")])


def test_two_machines_with_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two machines are called a: set RIDETHROUGH_NODE"):
        check_meeting([row("a"), row("b"), row("a", boot="another")])


def test_every_rank_knows_where_each_is() -> None:
    def meet(group: Group) -> tuple[str, ...]:
        names = group.nodes
        group.nodes = ()
        group.meet(names[group.rank])
        return group.nodes

    assert run_ranks(NODES, meet) == [NODES] * 4


def test_a_failure_of_one_rank_is_raised_on_all() -> None:
    def act(group: Group) -> Any:
        def fail() -> None:
            if group.rank == 2:
                raise Damaged(path="p", detail="d")

        return group.together(fail)

    same_error(run_ranks(NODES, act), Damaged)


def test_the_first_rank_decides_for_all() -> None:
    assert run_ranks(NODES, lambda group: group.first_decides(lambda: f"rank {group.rank}")) == ["rank 0"] * 4


def test_the_first_rank_of_each_node_speaks_for_it() -> None:
    found = run_ranks(NODES, lambda group: group.each_node(lambda: group.rank))
    assert found == [{"a": 0, "b": 2, "c": 3}] * 4


def test_only_nodes_that_are_asked_act() -> None:
    acted: list[int] = []
    found = run_ranks(NODES, lambda group: group.each_node(lambda: acted.append(group.rank), nodes=("b",)))
    assert (found, acted) == ([{"b": None}] * 4, [2])


def test_what_is_too_large_to_tell_everybody_reaches_only_the_first_rank() -> None:
    seen: dict[int, Any] = {}

    def act(group: Group) -> Any:
        def decide(found: Any) -> int:
            seen[group.rank] = dict(found)
            return sum(found.values())

        return group.first_decides_from(lambda: group.rank * 10, decide)

    assert run_ranks(NODES, act) == [50] * 4
    assert seen == {0: {"a": 0, "b": 20, "c": 30}}


def test_an_operating_system_error_of_one_node_is_raised_on_all() -> None:
    def act(group: Group) -> Any:
        def read() -> str:
            if group.node == "c":
                raise NotADirectoryError(20, "Not a directory", "/x")
            return "fine"

        return group.each_node(read)

    same_error(run_ranks(NODES, act), StorageError)

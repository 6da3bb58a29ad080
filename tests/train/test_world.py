"""Jobs over several nodes in processes of their own: real collectives and DDP, cut and started again."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import world_child
from world_child import EPOCHS, SAMPLES

from ridethrough.format.seal import decode
from ridethrough.testing import flip_bit

CONTEXT = multiprocessing.get_context("forkserver")
"""Ranks are forked from a process that has imported torch: starting them costs milliseconds."""
CONTEXT.set_forkserver_preload(["ridethrough.train.checkpointer", "torch._dynamo", "pytest"])
LINES = list[dict[str, Any]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class World:
    """Nodes with their state directories and disks, on one machine."""

    def __init__(self, root: Path, *, is_shared: bool = False, **environment: str) -> None:
        self.root = root
        self._is_shared = is_shared
        self._environment = environment
        self._starts = 0

    def run_dir(self, node: str) -> Path:
        return self.root / ("shared" if self._is_shared else node) / "run"

    def start(self, nodes: Iterable[str], *, until: int = 0, save: Iterable[int] = (), code: int = 0) -> LINES:
        """One start with a rank on each of the nodes, to its end; what the ranks have told."""
        where = tuple(nodes)
        self._starts += 1
        port = free_port()
        logs = [str(self.root / f"log-{self._starts}-{rank}.txt") for rank in range(len(where))]
        children = []
        for rank, node in enumerate(where):
            (self.root / node).mkdir(exist_ok=True, parents=True)
            environment = {
                **self._environment, "RANK": str(rank), "WORLD_SIZE": str(len(where)), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "RIDETHROUGH_NODE": node, "RIDETHROUGH_STATE_DIR": str(self.root / node / "state"),
            }  # fmt: skip
            arguments = (environment, logs[rank], str(self.run_dir(node)), str(self._tells(rank)), until, tuple(save))
            child = CONTEXT.Process(target=world_child.run, args=arguments)
            child.start()
            children.append(child)
        try:
            for child in children:
                child.join(120)
        finally:
            for child in children:
                child.kill()
        shown = "\n".join(Path(path).read_text()[-3000:] for path in logs if os.path.exists(path))
        assert [child.exitcode for child in children] == [code] * len(where), shown
        return [json.loads(line) for rank in range(len(where)) for line in self._tells(rank).read_text().splitlines()]

    def _tells(self, rank: int) -> Path:
        return self.root / f"tells-{self._starts}-{rank}.jsonl"


def steps(lines: LINES, *, after: int = 0, up_to: int | None = None) -> dict[tuple[int, int], dict[str, Any]]:
    return {(line["step"], line["rank"]): line for line in lines if "step" in line and after < line["step"] <= (up_to or line["step"])}


def restored(lines: LINES) -> set[int]:
    return {line["restored"] for line in lines if "restored" in line}


def require_identical(straight: LINES, resumed: LINES, *, after: int) -> None:
    expected = steps(straight, after=after)
    assert steps(resumed) == expected
    assert len(expected) >= 2


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> LINES:
    """Two nodes, never cut."""
    return World(tmp_path_factory.mktemp("straight")).start("ab", save=(3,))


def test_a_job_over_two_nodes_with_a_disk_each_resumes_identically(tmp_path: Path, straight: LINES) -> None:
    world = World(tmp_path)
    world.start("ab", until=5, save=(3,))
    resumed = world.start("ab")
    assert restored(resumed) == {3}
    require_identical(straight, resumed, after=3)


def test_every_rank_gets_the_same_plan_with_addresses_and_key(straight: LINES) -> None:
    told = [line for line in straight if "restored" in line]
    assert {line["is_shared"] for line in told} == {False}
    assert [line["addresses"] for line in told] == [{"a": ["127.0.0.1", 1000, 2000], "b": ["127.0.0.1", 1000, 2000]}] * 2
    assert len({line["key"] for line in told}) == 1
    assert len(told[0]["key"]) == 64


def test_a_node_whose_disk_is_new_gets_its_state_from_the_other(tmp_path: Path, straight: LINES) -> None:
    """The private part of its rank is on the other disk as well: each node keeps what it holds for others."""
    world = World(tmp_path)
    world.start("ab", until=5, save=(3,))
    [private] = world.run_dir("b").glob("step-*/rank-00001~*.safetensors")
    [seal] = world.run_dir("b").glob("step-*/rank-00001~*.seal")
    directory = next(world.run_dir("a").glob("step-*"))
    for file in (private, seal):
        shutil.copy(file, directory / file.name)
    shutil.rmtree(tmp_path / "b")
    require_identical(straight, world.start("ab"), after=3)


def test_nodes_that_change_places_resume_identically(tmp_path: Path, straight: LINES) -> None:
    world = World(tmp_path)
    world.start("ab", until=5, save=(3,))
    require_identical(straight, world.start("ba"), after=3)


def test_a_damaged_copy_of_the_model_on_one_node_is_taken_from_the_other(tmp_path: Path, straight: LINES) -> None:
    world = World(tmp_path)
    world.start("ab", until=5, save=(3,))
    [payload] = world.run_dir("b").glob("step-*/replicated~*.safetensors")
    flip_bit(str(payload), payload.stat().st_size - 9)
    require_identical(straight, world.start("ab"), after=3)


def test_one_of_two_nodes_with_disks_of_their_own_does_not_go_on_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.start("ab", until=5, save=(3,))
    told = world.start("b", code=21)
    assert [line["error"] for line in told] == ["RT-081"]
    assert restored(world.start("ab", until=4)) == {3}


def test_a_run_that_shrinks_and_grows_trains_on_every_sample_exactly_once(tmp_path: Path) -> None:
    world = World(tmp_path, is_shared=True)
    worlds = [("abc", 2), ("ac", 4), ("c", 7), ("abcd", 8), ("ab", 12)]
    lines: LINES = []
    step = 0
    for nodes, until in worlds:
        told = world.start(nodes, until=until, save=(until,))
        assert restored(told) == {step}
        assert {line["is_shared"] for line in told if "restored" in line} == {True}
        lines += told
        step = until
    lines += world.start("abc")
    made = steps(lines)
    for epoch in range(EPOCHS):
        consumed = Counter(sample for line in made.values() if line["epoch"] == epoch for sample in line["samples"])
        assert consumed == Counter(range(SAMPLES))
    by_step: dict[int, set[str]] = {}
    for (number, _), line in made.items():
        by_step.setdefault(number, set()).add(line["common"])
    assert all(len(found) == 1 for found in by_step.values()), "all ranks have the same model"
    assert {line["seq"] for line in lines if "seq" in line} == {1, 2, 3, 4, 5, 6}


def test_a_shrunk_start_is_the_same_each_time_it_is_tried(tmp_path: Path) -> None:
    world = World(tmp_path, is_shared=True)
    world.start("abc", until=2, save=(2,))
    first = world.start("ab", until=4)
    second = world.start("ab", until=4)
    assert steps(first) == steps(second) != {}


def test_a_new_rank_draws_numbers_of_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, is_shared=True)
    world.start("a", until=2, save=(2,))
    told = steps(world.start("ab", until=3))
    assert told[3, 0]["rng"] != told[3, 1]["rng"]
    assert told[3, 0]["common"] == told[3, 1]["common"]


def test_ranks_that_were_at_different_places_of_the_epoch_do_not_change_their_number(tmp_path: Path) -> None:
    """Only the seals tell where a rank was that is no more."""
    world = World(tmp_path, is_shared=True)
    world.start("ab", until=2, save=(2,))
    [path] = world.run_dir("a").glob("step-*/rank-00001~*.seal")
    seal = decode(path.read_bytes(), path="seal")
    seal.tree["objects"]["data"]["batches"] += 1
    path.write_bytes(seal.encode())
    [told] = world.start("a", code=22)
    assert "the ranks were at different places of the epoch" in told["message"]


def test_ranks_with_models_of_their_own_do_not_change_their_number(tmp_path: Path) -> None:
    world = World(tmp_path, is_shared=True, WORLD_IS_DDP="0")
    world.start("ab", until=2, save=(2,))
    told = world.start("abc", code=22)
    assert {line["error"] for line in told} == {"RT-051"}

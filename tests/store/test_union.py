"""Disks of several nodes seen as one: complete is what is complete over all of them."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from ridethrough.errors import TwoHeads
from ridethrough.format import layout
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.store.catalog import Catalog, catalog_evidence, owed_since, read_catalog
from ridethrough.store.union import Union, candidates, merge, outline
from ridethrough.testing import SimpleStore, flip_bit
from ridethrough.types import Parent

FS = PosixFileSystem()
PARTS = ("replicated", "rank-00000", "rank-00001")


class Cluster:
    """A run of two ranks whose nodes each keep a part of every checkpoint."""

    def __init__(self, root: Path, nodes: Iterable[str]) -> None:
        self._whole = SimpleStore(fs=FS, run_dir=str(root / "whole"))
        self._whole.start()
        self.dirs = {node: root / node for node in nodes}
        self.copy_records()

    def copy_records(self, *nodes: str) -> None:
        """The run's and the attempts' records, as they are now, are on these disks (on all unless given)."""
        for node in nodes or self.dirs:
            self.dirs[node].mkdir(exist_ok=True)
            for name in (layout.RUN, layout.ATTEMPTS):
                source, target = Path(self._whole.run_dir, name), self.dirs[node] / name
                if source.is_dir():
                    shutil.copytree(source, target, dirs_exist_ok=True)
                else:
                    shutil.copy(source, target)

    def save(self, step: int, where: dict[str, Iterable[str]]) -> None:
        for node, parts in where.items():
            store = dataclasses.replace(self._whole, run_dir=str(self.dirs[node]), node=node)
            store.commit_parts(step, parts=tuple(parts))

    def go_on(self, at: int) -> None:
        self._whole.start(parent=Parent(attempt=self._whole.attempt, step=at))

    def catalogs(self) -> dict[str, Catalog]:
        return {node: read_catalog(FS, str(path)) for node, path in self.dirs.items()}

    def union(self) -> Union:
        return merge(self.catalogs())

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in candidates(self.union())]


@pytest.fixture
def two(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, ("a", "b"))


def test_a_checkpoint_complete_only_over_both_nodes_is_complete(two: Cluster) -> None:
    two.save(10, {"a": PARTS[:2], "b": PARTS[2:]})
    assert two.steps() == [10]
    assert all(not catalog.checkpoints[0].is_complete for catalog in two.catalogs().values())


def test_a_part_that_no_node_has_is_missing(two: Cluster) -> None:
    two.save(10, {"a": PARTS[:2], "b": PARTS[:1]})
    assert two.steps() == []
    assert two.union().catalog.checkpoints[0].missing_parts == ("rank-00001",)


def test_parts_of_different_steps_make_no_checkpoint(two: Cluster) -> None:
    two.save(10, {"a": PARTS[:2]})
    two.save(20, {"b": PARTS[2:]})
    assert two.steps() == []


def test_every_copy_is_kept_with_the_node_that_has_it(two: Cluster) -> None:
    two.save(10, {"a": PARTS[:2], "b": [PARTS[0], PARTS[2]]})
    union = two.union()
    [checkpoint] = candidates(union)
    found = {(seal.part, union.holders[checkpoint.dir_name][seal.payload_name]) for seal in checkpoint.seals}
    assert found == {("replicated", ("a",)), ("replicated", ("b",)), ("rank-00000", ("a",)), ("rank-00001", ("b",))}


def test_a_file_counts_where_it_was_found_whatever_its_writer_was_called(two: Cluster) -> None:
    two.save(10, {"a": PARTS})
    shutil.rmtree(two.dirs["b"])
    shutil.copytree(two.dirs["a"], two.dirs["b"])
    union = two.union()
    assert set(union.holders[candidates(union)[0].dir_name].values()) == {("a", "b")}


def test_a_node_with_nothing_but_the_marker_adds_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ("a", "b"))
    cluster.save(10, {"a": PARTS})
    shutil.rmtree(cluster.dirs["b"] / layout.ATTEMPTS)
    assert cluster.steps() == [10]


def test_a_roster_that_only_another_node_has_is_found(two: Cluster) -> None:
    two.save(10, {"a": PARTS})
    shutil.rmtree(two.dirs["a"] / layout.ATTEMPTS)
    assert two.steps() == [10]


def test_a_seal_that_is_damaged_on_one_node_is_a_problem_with_its_node(two: Cluster) -> None:
    two.save(10, {"a": PARTS, "b": PARTS})
    [seal] = two.dirs["b"].glob("step-*/rank-00001*.seal")
    flip_bit(str(seal), 50)
    union = two.union()
    assert two.steps() == [10]
    assert [problem.path.startswith("b:step-") for problem in union.catalog.problems] == [True]


def test_copies_share_the_names_that_they_have_in_common(two: Cluster) -> None:
    """A thousand nodes have a thousand seals of one part, whose outlines all travel to the first rank and back."""
    two.save(10, {"a": PARTS, "b": PARTS})
    [checkpoint] = two.union().catalog.checkpoints
    first, second = (seal for seal in checkpoint.seals if seal.part == "replicated")
    assert first.payload_name != second.payload_name
    assert first.save_id is second.save_id
    assert first.roster_digest is second.roster_digest


# -- outlines ------------------------------------------------------------------------------------------------------------


def nothing(tree: object) -> dict[str, object]:
    return {}


def test_outlines_and_rosters_beside_them_make_the_same_checkpoints(two: Cluster) -> None:
    two.save(10, {"a": PARTS[:2], "b": [PARTS[0], PARTS[2]]})
    two.save(20, {"a": PARTS[:1], "b": PARTS[1:2]})
    whole = two.catalogs()
    outlined = {node: outline(catalog, nothing) for node, catalog in whole.items()}
    outlined["a"] = dataclasses.replace(outlined["a"], rosters=whole["b"].rosters)
    found, expected = merge(outlined), merge(whole)
    assert found.holders == expected.holders
    assert [c.step for c in candidates(found)] == [c.step for c in candidates(expected)] == [10]
    missing = [[c.missing_parts for c in union.catalog.checkpoints] for union in (found, expected)]
    assert missing[0] == missing[1]


def test_an_outline_keeps_what_is_asked_of_private_parts_and_nothing_of_the_state(two: Cluster) -> None:
    two.save(10, {"a": PARTS})
    [checkpoint] = outline(two.catalogs()["a"], lambda tree: sorted(tree)).checkpoints
    assert {seal.part: bool(seal.tree) for seal in checkpoint.seals} == {"replicated": False, "rank-00000": True, "rank-00001": True}
    assert not any(seal.chunks or seal.tensors or seal.meta for seal in checkpoint.seals)
    assert checkpoint.problems == ()


def test_what_is_damaged_on_a_node_is_in_its_outline(two: Cluster) -> None:
    two.save(10, {"a": PARTS})
    [seal] = two.dirs["a"].glob("step-*/rank-00001*.seal")
    flip_bit(str(seal), 50)
    catalog = two.catalogs()["a"]
    assert outline(catalog, nothing).problems == catalog.problems != ()


# -- lineage -------------------------------------------------------------------------------------------------------------


def test_the_head_that_only_one_node_knows_is_the_head(two: Cluster) -> None:
    """Cut while the records of an attempt were written: no step was made under it, and its number is taken."""
    two.save(10, {"a": PARTS[:2], "b": PARTS[2:]})
    two.save(20, {"a": PARTS[:2], "b": PARTS[2:]})
    two.go_on(at=10)
    two.copy_records("b")
    assert two.union().catalog.next_seq == 3
    assert two.steps() == [10], "the new attempt has gone back to step 10"


def test_two_heads_on_different_nodes_are_refused_with_both_names_and_nodes(tmp_path: Path) -> None:
    stores = {}
    cluster = Cluster(tmp_path, ("a", "b", "c"))
    for node, nonce in (("a", "1a"), ("b", "2b"), ("c", "1a")):
        store = SimpleStore(fs=FS, run_dir=str(cluster.dirs[node]), node=node)
        stores[node] = store.start(seq=2, nonce=nonce * 16)
    with pytest.raises(TwoHeads) as caught:
        candidates(cluster.union())
    assert f"{stores['a'].label} (on a, c)" in str(caught.value)
    assert f"{stores['b'].label} (on b)" in str(caught.value)


def test_the_newest_rosters_nodes_are_known(two: Cluster) -> None:
    catalog = two.union().catalog
    head = catalog.attempts[-1][0]
    roster = catalog.roster_of(head)
    assert roster is not None
    assert roster.nodes == ("node-0", "node-0")


def test_catalogs_of_two_runs_are_not_merged(tmp_path: Path) -> None:
    found = {}
    for node in ("a", "b"):
        store = SimpleStore(fs=FS, run_dir=str(tmp_path / node))
        store.start()
        found[node] = read_catalog(FS, store.run_dir)
    with pytest.raises(ValueError, match="catalogs of runs"):
        merge(found)


# -- as one place --------------------------------------------------------------------------------------------------------


def test_files_spread_over_any_nodes_make_the_same_run_as_in_one_place(tmp_path: Path) -> None:
    """Whichever node has which file: what can be restored depends on the files alone."""
    random_numbers = random.Random(3)
    for case in range(20):
        root = tmp_path / str(case)
        root.mkdir()
        one = Cluster(root, ("one",))
        for step in (10, 20, 30):
            one.save(step, {"one": [name for name in PARTS if random_numbers.random() < 0.8]})
        expected = [c.step for c in candidates(merge(one.catalogs()))]
        many = {name: tmp_path / f"{case}-{name}" for name in ("a", "b", "c")}
        for path in many.values():
            shutil.copytree(one.dirs["one"], path, ignore=shutil.ignore_patterns("*.seal", "*.safetensors"))
        for payload in one.dirs["one"].glob("step-*/*.safetensors"):
            for node in random_numbers.sample(list(many), random_numbers.randint(1, 3)):
                for file in (payload, payload.with_suffix(".seal")):
                    shutil.copy(file, many[node] / payload.parent.name / file.name)
        union = merge({name: read_catalog(FS, str(path)) for name, path in many.items()})
        assert [c.step for c in candidates(union)] == expected


def test_one_catalog_alone_is_itself(two: Cluster) -> None:
    two.save(10, {"a": PARTS})
    [catalog] = [two.catalogs()["a"]]
    merged = merge({"a": catalog}).catalog
    assert merged.checkpoints == catalog.checkpoints
    assert (merged.attempts, merged.next_seq, merged.run) == (catalog.attempts, catalog.next_seq, catalog.run)


def test_a_sealed_checkpoint_that_cannot_be_used_is_evidence_wherever_it_is(two: Cluster) -> None:
    two.save(10, {"b": PARTS})
    [payload] = two.dirs["b"].glob("step-*/rank-00001*.safetensors")
    os.unlink(payload)
    catalog = two.union().catalog
    assert "is sealed but cannot be used" in str(catalog_evidence(catalog, owed_since(catalog)))


def test_parts_of_an_unfinished_save_are_no_evidence(two: Cluster) -> None:
    two.save(10, {"b": PARTS[2:]})
    catalog = two.union().catalog
    assert catalog_evidence(catalog, owed_since(catalog)) is None

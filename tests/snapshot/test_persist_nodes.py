"""The persister where a job has several nodes: who writes what, and when a save counts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import FS, SLOTS, Cluster, Node, truth

from ridethrough.format.layout import REPLICATED
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.testing import ErrorOn, FlipBit

Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Cluster] = []

    def build(count: int = 3, *, is_shared: bool = True, **how: Any) -> Cluster:
        made.append(Cluster(tmp_path / str(len(made)), count, is_shared=is_shared, **how))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


def durable_step(node: Node) -> int | None:
    durable = node.answer["durable"]
    return durable["step"] if durable else None


BOTH = pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "node-local"])

# -- who writes what -------------------------------------------------------------------------------------------------------


def test_on_a_shared_tier_each_part_is_written_once_by_its_first_holder(make: Make) -> None:
    cluster = make()
    cluster.post(10)
    cluster.tick()
    assert {n: node.files(10) for n, node in cluster.nodes.items()} == {
        "n0": ["rank-00000", "replicated"], "n1": ["rank-00001"], "n2": ["rank-00002"],
    }  # fmt: skip


def test_on_tiers_of_their_own_nodes_write_what_they_hold_of_others_too(make: Make) -> None:
    cluster = make(is_shared=False)
    cluster.post(10)
    cluster.tick()
    everything = ["rank-00000", "rank-00001", "rank-00002", "replicated"]
    assert {n: node.files(10) for n, node in cluster.nodes.items()} == dict.fromkeys(cluster.names, everything)


def test_copy_of_another_nodes_part_that_has_not_arrived_keeps_nobody_waiting(make: Make) -> None:
    cluster = make(is_shared=False)
    for node in cluster.nodes.values():
        node.post(10)
    cluster.tick()
    assert {n: node.files(10) for n, node in cluster.nodes.items()} == {
        "n0": ["rank-00000", "replicated"], "n1": ["rank-00001", "replicated"], "n2": ["rank-00002", "replicated"],
    }  # fmt: skip


@BOTH
def test_what_was_saved_together_loads_as_it_was_posted(make: Make, is_shared: bool) -> None:
    cluster = make(is_shared=is_shared, ranks=2)
    cluster.save(10, 0)
    assert cluster.loaded(10) == cluster.truths(10)


@pytest.mark.parametrize("lost", ["n0", "n1", "n2", "n3"])
def test_save_on_tiers_of_their_own_is_restorable_when_any_one_node_never_returns(make: Make, lost: str) -> None:
    cluster = make(4, is_shared=False)
    cluster.save(10, 0)
    assert cluster.loaded(10, lost=(lost,)) == cluster.truths(10)


# -- when it counts --------------------------------------------------------------------------------------------------------


@BOTH
def test_sealed_is_not_durable_before_the_lead_has_heard_of_every_part(make: Make, is_shared: bool) -> None:
    cluster = make(is_shared=is_shared)
    cluster.post(10)
    cluster.tick("n0", "n1")
    cluster.lead()
    cluster.tick("n0", "n1")
    assert [node.sealed() for node in cluster.nodes.values()] == [{10: ()}, {10: ()}, {}]
    assert [durable_step(node) for node in cluster.nodes.values()] == [None, None, None]
    assert not any(node.noted("checkpoint.durable") for node in cluster.nodes.values())


@BOTH
def test_confirmed_save_is_durable_on_every_node_and_on_record_once(make: Make, is_shared: bool) -> None:
    cluster = make(is_shared=is_shared)
    cluster.save(10, 0)
    cluster.tick(times=3)
    assert [durable_step(node) for node in cluster.nodes.values()] == [10, 10, 10]
    assert [[e["step"] for e in node.noted("checkpoint.durable")] for node in cluster.nodes.values()] == [[10], [10], [10]]


@BOTH
def test_save_is_verified_when_the_lead_says_that_all_have_read_their_parts_back(make: Make, is_shared: bool) -> None:
    cluster = make(is_shared=is_shared)
    cluster.save(10, 0)
    assert [node.answer["verified"]["step"] for node in cluster.nodes.values()] == [10, 10, 10]
    assert [[e["step"] for e in node.noted("checkpoint.verified")] for node in cluster.nodes.values()] == [[10], [10], [10]]


def test_durable_but_not_yet_verified_is_not_called_verified(make: Make) -> None:
    cluster = make()
    cluster.nodes["n0"].say(confirmed={"step": 10, "is_verified": False})
    cluster.tick("n0")
    assert cluster.nodes["n0"].answer["verified"] is None


def test_step_that_an_earlier_launch_has_verified_is_verified_anew(make: Make) -> None:
    """Its save was damaged since, and this launch has come from before it."""
    cluster = make()
    cluster.save(10, 0)
    node = cluster.nodes["n0"]
    board = node.link.board(links.plan_board(2), links.PLAN_BYTES)
    board.write(node.plan.as_board())
    board.close()
    node.say(launch=2, confirmed={"step": 10, "is_verified": True})
    cluster.tick("n0")
    assert (node.answer["verified"]["launch"], node.answer["verified"]["step"]) == (2, 10)
    assert len(node.noted("checkpoint.verified")) == 2


def test_names_of_a_large_dark_domain_fit_on_the_board(make: Make) -> None:
    cluster = make()
    dark = [f"gpu-node-{number:05d}.cluster.example.com" for number in range(600)]
    node = cluster.nodes["n0"]
    for number, step in enumerate((10, 20, 30, 40), start=1):
        node.say(announced=step, announcement=number, dark=dark)
        cluster.post(step)
        cluster.tick("n0", times=2)
    assert {step: len(without) for step, without in node.sealed().items()} == dict.fromkeys((10, 20, 30, 40), 600)


def test_save_that_the_lead_takes_back_is_durable_no_more(make: Make) -> None:
    cluster = make()
    cluster.save(10, 0)
    cluster.nodes["n0"].say(confirmed=None)
    cluster.tick("n0")
    assert durable_step(cluster.nodes["n0"]) is None


def test_nodes_tell_the_digests_of_what_they_hold_together(make: Make) -> None:
    cluster = make()
    cluster.post(10)
    other = bytearray(truth(10, REPLICATED))
    other[-9] ^= 1
    cluster.nodes["n2"].post(10, replicated=bytes(other))
    cluster.tick()
    digests = [node.answer["sealed"][0]["digests"] for node in cluster.nodes.values()]
    assert digests[0] == digests[1] != digests[2]
    assert [list(found) for found in digests] == [[REPLICATED]] * 3


# -- refusals --------------------------------------------------------------------------------------------------------------


@BOTH
def test_disk_that_refuses_seals_nothing_and_takes_its_parts_back(make: Make, is_shared: bool) -> None:
    cluster = make(is_shared=is_shared)
    cluster.nodes["n1"].make_persister(ErrorOn(PosixFileSystem(), "sync", errno.ENOSPC, is_lasting=True, within="step-"))
    cluster.post(10)
    cluster.tick()
    refused = cluster.nodes["n1"]
    assert (refused.sealed(), refused.files(10)) == ({}, [])
    assert (refused.answer["failed"]["step"], refused.answer["failed"]["code"]) == (10, "RT-014")
    cluster.lead()
    assert cluster.word.confirmed is None


def test_refusal_elsewhere_is_one_here_too_and_on_record_once(make: Make) -> None:
    cluster = make()
    cluster.post(10)
    cluster.tick("n0")
    cluster.nodes["n0"].say(refused={"number": 0, "step": 10, "code": "RT-014", "message": "n1: disk full"})
    cluster.tick("n0", times=3)
    failed = cluster.nodes["n0"].answer["failed"]
    assert (failed["step"], failed["code"], failed["message"], failed["number"]) == (10, "RT-014", "n1: disk full", 0)
    assert len(cluster.nodes["n0"].noted("checkpoint.failed")) == 1


def test_refusal_elsewhere_is_not_heard_again_after_a_failure_of_our_own(make: Make) -> None:
    cluster = make()
    node = cluster.nodes["n0"]
    node.say(refused={"number": 0, "step": 10, "code": "RT-014", "message": "n1: disk full"})
    cluster.tick("n0")
    cluster.announce(20, 1)
    cluster.post(21)
    cluster.tick("n0", times=3)
    assert node.answer["failed"]["step"] == 20
    assert [e["step"] for e in node.noted("checkpoint.failed")] == [10, 20]


def test_word_of_the_next_launch_undoes_nothing_and_asks_nothing_of_the_one_before(make: Make) -> None:
    """It names no announced step and no confirmed one; the first save of this launch is long past."""
    cluster = make()
    cluster.save(10, 0)
    cluster.post(25)
    node = cluster.nodes["n0"]
    node.say(is_over=True, announced=None, announcement=0, confirmed=None)
    cluster.tick("n0", times=3)
    assert durable_step(node) == 10
    assert node.noted("checkpoint.failed") == []


@BOTH
def test_part_that_reads_back_wrong_is_no_seal_any_more(make: Make, is_shared: bool) -> None:
    cluster = make(is_shared=is_shared)
    cluster.nodes["n1"].make_persister(FlipBit(PosixFileSystem(), within="rank-00001~n1", at_byte=900))
    cluster.post(10)
    cluster.tick()
    assert cluster.nodes["n1"].sealed() == {}
    assert cluster.nodes["n1"].answer["failed"]["code"] == "RT-040"


def test_announcement_that_counts_less_far_than_the_last_one_heard_is_acted_upon(make: Make) -> None:
    """After a partition the word of the other half may win."""
    cluster = make()
    cluster.announce(10, 9)
    cluster.post(10)
    cluster.tick()
    cluster.announce(20, 3)
    cluster.post(20)
    cluster.tick()
    assert [20 in node.sealed() for node in cluster.nodes.values()] == [True, True, True]


def test_successor_does_not_refuse_what_its_predecessor_had_sealed(make: Make) -> None:
    """The others may still be writing; a refusal would throw their work away."""
    cluster = make()
    cluster.announce(10, 1)
    cluster.post(10)
    cluster.tick("n0")
    for step in range(11, 12 + SLOTS):
        cluster.post(step)
    cluster.nodes["n0"].make_persister()
    cluster.tick("n0", times=3)
    assert cluster.nodes["n0"].answer["failed"] is None
    assert cluster.nodes["n0"].sealed() == {10: ()}


# -- without a dark node ---------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dark", ["n0", "n1", "n2"])
def test_save_without_a_dark_node_has_its_parts_from_replicas_bit_for_bit(make: Make, is_shared: bool, dark: str) -> None:
    cluster = make(is_shared=is_shared, ranks=2)
    cluster.save(10, 1, dark)
    assert cluster.word.confirmed == {"step": 10, "is_verified": True, "dark": [dark]}
    assert cluster.loaded(10, lost=() if is_shared else (dark,)) == cluster.truths(10)


def test_on_a_shared_tier_each_part_of_a_dark_node_is_written_once(make: Make) -> None:
    cluster = make(4)
    cluster.save(10, 1, "n0")
    written = [part for node in cluster.nodes.values() for part in node.files(10)]
    assert sorted(written) == sorted(cluster.roster.part_names)


def test_save_that_is_taken_over_adds_only_what_is_missing(make: Make) -> None:
    cluster = make()
    cluster.post(10)
    cluster.tick("n0", "n1")
    cluster.announce(10, 1, "n2")
    cluster.tick("n0", "n1")
    assert [cluster.nodes[n].sealed() for n in ("n0", "n1")] == [{10: ("n2",)}] * 2
    cluster.lead(without=("n2",))
    assert cluster.word.confirmed == {"step": 10, "is_verified": True, "dark": ["n2"]}
    written = sorted(part for node in cluster.nodes.values() for part in node.files(10))
    assert written == sorted(cluster.roster.part_names), "nothing twice"


@BOTH
def test_replica_that_is_on_its_way_is_waited_for(make: Make, is_shared: bool) -> None:
    cluster = make(2, is_shared=is_shared)
    cluster.announce(10, 1, "n1")
    node = cluster.nodes["n0"]
    node.post(10)
    assert node.persister.tick(), "a save is awaited"
    assert node.sealed() == {}
    node.hold(10, 1)
    cluster.tick("n0")
    assert node.sealed() == {10: ("n1",)}


@BOTH
def test_replica_that_never_comes_is_a_refusal_after_two_seconds(make: Make, is_shared: bool) -> None:
    cluster = make(2, is_shared=is_shared)
    cluster.announce(10, 1, "n1")
    node = cluster.nodes["n0"]
    node.post(10)
    cluster.tick("n0")
    cluster.clock.advance(2.1)
    cluster.tick("n0")
    assert node.sealed() == {}
    assert "nobody here holds part rank-00001" in node.answer["failed"]["message"]
    cluster.post(20)
    cluster.announce(20, 2)
    cluster.tick()
    assert 20 in node.sealed(), "the next one is made"


def test_wait_for_a_replica_begins_anew_with_each_save(make: Make) -> None:
    cluster = make(2)
    node = cluster.nodes["n0"]
    cluster.announce(10, 1, "n1")
    node.post(10)
    cluster.tick("n0")
    cluster.clock.advance(1.5)
    cluster.announce(11, 2, "n1")
    node.post(11)
    cluster.tick("n0")
    cluster.clock.advance(1.5)
    cluster.tick("n0")
    assert node.answer["failed"] is None


def test_node_that_is_dark_in_a_save_writes_nothing_for_it(make: Make) -> None:
    cluster = make()
    cluster.announce(10, 1, "n2")
    cluster.post(10)
    cluster.tick("n2")
    assert cluster.nodes["n2"].files(10) == []


def test_pins_are_given_back_also_when_a_replica_is_missing(make: Make) -> None:
    cluster = make(2)
    cluster.announce(10, 1, "n1")
    node = cluster.nodes["n0"]
    node.post(10)
    cluster.tick("n0")
    cluster.clock.advance(2.1)
    cluster.tick("n0")
    for step in range(11, 11 + 2 * SLOTS):
        node.post(step)  # asserts that no slot is pinned


# -- flush -----------------------------------------------------------------------------------------------------------------


@BOTH
def test_flush_saves_the_step_that_the_lead_names_without_the_dark_nodes(make: Make, is_shared: bool) -> None:
    cluster = make(is_shared=is_shared)
    living = ("n0", "n1")
    cluster.post(3, only=living)
    for name in living:
        cluster.nodes[name].say(flush={"id": 4, "reason": "n2 silent", "step": 3, "dark": ["n2"]})
    cluster.tick(*living)
    cluster.lead(without=("n2",))
    assert cluster.word.confirmed == {"step": 3, "is_verified": True, "dark": ["n2"]}
    assert cluster.loaded(3, lost=() if is_shared else ("n2",)) == cluster.truths(3)
    assert [cluster.nodes[n].answer["flushed"] for n in living] == [4, 4]


def test_flush_of_nothing_is_answered(make: Make) -> None:
    cluster = make()
    cluster.nodes["n0"].say(flush={"id": 1, "reason": "n2 silent", "step": -1, "dark": ["n2"]})
    cluster.tick("n0")
    assert (cluster.nodes["n0"].answer["flushed"], cluster.nodes["n0"].sealed()) == (1, {})


def test_flush_of_a_step_that_is_no_longer_here_is_a_refusal_and_answered(make: Make) -> None:
    cluster = make()
    cluster.post(9)
    cluster.nodes["n0"].say(flush={"id": 1, "reason": "n2 silent", "step": 3, "dark": []})
    cluster.tick("n0")
    assert cluster.nodes["n0"].answer["flushed"] == 1
    assert cluster.nodes["n0"].answer["failed"]["step"] == 3


# -- retention -------------------------------------------------------------------------------------------------------------


@BOTH
def test_tier_keeps_the_last_saves_and_nothing_older(make: Make, is_shared: bool) -> None:
    cluster = make(5, is_shared=is_shared, keep_last=2)  # of five, no node has all parts of a save
    for number in range(1, 6):
        cluster.save(10 * number, number)
    assert {n: node.kept() for n, node in cluster.nodes.items()} == {n: [40, 50] for n in cluster.names}


def test_on_a_shared_tier_only_the_lead_removes(make: Make) -> None:
    cluster = make(keep_last=1)
    cluster.save(10, 1)
    cluster.announce(20, 2)
    cluster.post(20)
    cluster.tick()
    cluster.lead()
    cluster.tick("n2", "n1")
    assert cluster.nodes["n1"].answer["verified"]["step"] == 20
    assert cluster.nodes["n0"].kept() == [10, 20]
    cluster.tick("n0")
    assert cluster.nodes["n0"].kept() == [20]
    assert [bool(node.noted("checkpoint.removed")) for node in cluster.nodes.values()] == [True, False, False]
    assert not any(node.noted("retention.failed") for node in cluster.nodes.values())


def test_on_a_tier_of_its_own_a_node_removes_nothing_before_all_nodes_have_verified_a_newer_save(make: Make) -> None:
    cluster = make(is_shared=False, keep_last=1)
    cluster.save(10, 1)
    cluster.announce(20, 2)
    cluster.post(20)
    cluster.tick("n0", "n1")
    cluster.lead(without=("n2",))
    cluster.tick("n0", "n1", times=2)
    assert cluster.nodes["n0"].kept() == [10, 20], "n2 has not sealed its parts of 20"
    assert cluster.loaded(10) == cluster.truths(10)


def test_node_that_missed_saves_keeps_the_newest_that_it_has_parts_of(make: Make) -> None:
    cluster = make(is_shared=False, keep_last=1)
    cluster.save(10, 1)
    for number in range(2, 5):
        cluster.save(10 * number, number, "n2")
    assert cluster.nodes["n2"].kept() == [10]
    late = cluster.nodes["n2"]
    late.say(confirmed=cluster.word.confirmed)
    cluster.tick("n2", times=2)
    assert late.kept() == [10], "what it would have to be restored from alone"
    cluster.save(50, 5)
    assert {n: node.kept() for n, node in cluster.nodes.items()} == {n: [50] for n in cluster.names}


def test_replicas_of_a_dark_node_stay_as_long_as_the_save_they_belong_to(make: Make) -> None:
    cluster = make(is_shared=False, keep_last=2)
    cluster.save(10, 1, "n2")
    cluster.save(20, 2, "n2")
    assert cluster.loaded(20, lost=("n2",)) == cluster.truths(20)
    assert cluster.loaded(10, lost=("n2",)) == cluster.truths(10)


def test_union_of_the_tiers_always_has_a_whole_save_whatever_was_removed(make: Make) -> None:
    cluster = make(4, is_shared=False, keep_last=1)
    whole: list[int] = []
    dark: tuple[str, ...]
    for number, dark in enumerate([(), ("n3",), ("n3",), (), ("n0",), ("n1",), (), ("n2",)], start=1):
        cluster.save(10 * number, number, *dark)
        _, candidates = cluster.found()
        whole.append(candidates[0].step)
        assert cluster.loaded(candidates[0].step) == cluster.truths(candidates[0].step)
    assert whole == [10, 20, 30, 40, 50, 60, 70, 80]


def test_meta_and_manifest_are_written_where_the_lead_is(make: Make) -> None:
    cluster = make()
    cluster.save(10, 0)
    names = {path.name for path in Path(cluster.run_dirs["n0"], cluster.dir_name(10)).iterdir()}
    assert {"meta.json", "manifest.json"} <= names


def test_fixture_makes_one_run_on_every_tier(make: Make) -> None:
    catalogs, _ = make(is_shared=False).found()
    assert len({catalog.run.run_uid for catalog in catalogs.values()}) == 1
    assert isinstance(FS, PosixFileSystem)

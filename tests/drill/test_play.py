"""The verdicts of a drill, on a job that is only played: what must be called a failure is."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from ridethrough.drill.play import Outcome, Play
from ridethrough.drill.scenario import Cut, Fault, Instant, Scenario
from ridethrough.drill.watch import Watch

INTERVAL = 5


class PlayedJob:
    """Two nodes whose job makes a step at every look; it does what its settings say when something is cut."""

    realism = "played"
    names: tuple[str, ...] = ("n0", "n1")
    shared: str | None = None
    interface = "lo"

    def __init__(self, directory: Path, *, steps: int, forgets: int = 0, restarts_for_nothing: bool = False, exit_code: int = 0) -> None:
        self.directory, self.steps = directory, steps
        self.forgets, self.restarts_for_nothing, self.exit_code = forgets, restarts_for_nothing, exit_code
        self.disk = str(directory / "disk")
        self.on: set[str] = set()
        self.step = self.durable = self.seq = 0
        self.is_silent = False

    def address(self, name: str) -> str:
        return "127.0.0.1"

    def seen(self, name: str, path: str) -> str:
        return path

    def _say(self, node: str, kind: str, **data: object) -> None:
        with (self.directory / f"command-{node}.log").open("a") as log:
            log.write(json.dumps({"ridethrough": kind, **data}) + "\n")

    def _trace(self, *, is_resume: bool) -> None:
        for rank in range(2):
            line = {"rank": rank, "step": self.step, "launch": str(self.seq), "at_s": time.monotonic(), "is_resume": is_resume, "digests": {}}
            with (self.directory / f"rank-{rank}.jsonl").open("a") as trace:
                trace.write(json.dumps(line) + "\n")

    def start(self, name: str, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        self.on.add(name)
        if len(self.on) == len(self.names):
            self._launch()

    def _launch(self) -> None:
        self.seq += 1
        self.step = max(self.durable - self.forgets, 0)
        self._say("n0", "launch.decided", at_s=time.monotonic())
        times = {name: time.monotonic() + 0.001 for name in ("attached", "chosen", "loaded", "first_step")}
        self._trace(is_resume=True)
        self._say("n0", "launch.stepped", restored_step=self.step, times_s=times, attempt={"seq": self.seq, "nonce": ""})

    def has_ended(self, name: str) -> int | None:
        if self.step >= self.steps:
            return self.exit_code
        if name == "n0" and len(self.on) == len(self.names) and not self.is_silent:
            self.step += 1
            self._trace(is_resume=False)
            if self.step % INTERVAL == 0:
                self.durable = self.step
                self._say("n1", "checkpoint.durable", step=self.step)
        return None

    def cut(self, names: Iterable[str]) -> None:
        self.on -= set(names)
        for node in self.on:
            self._say(node, "peer.convicted", nodes=sorted(names))

    def power_on(self, names: Iterable[str]) -> None:
        pass

    def set_links(self, names: Iterable[str], *, is_up: bool) -> None:
        self.is_silent = not is_up
        if is_up and self.restarts_for_nothing:
            self._say("n0", "launch.ended")

    def part(self, *groups: Iterable[str]) -> None:
        pass

    def heal(self) -> None:
        pass

    def await_shared(self, names: Iterable[str]) -> None:
        pass

    def close(self) -> None:
        pass


def play(tmp_path: Path, *cuts: Cut, **settings: object) -> Outcome:
    scenario = Scenario(name="played", summary="", cuts=cuts, nodes=2, ranks_per_node=1, steps=30, save_interval_steps=INTERVAL)
    watch = Watch(tmp_path, scenario.ranks, scenario.names)
    job = PlayedJob(tmp_path, steps=scenario.steps, **settings)  # type: ignore[arg-type]
    return Play(job, watch, scenario, sabotage=None, rng=random.Random(1), say=lambda text: None).run()


NODE = Cut(kind=Instant.MID_STEP, after_step=12, nodes=("n1",), back_s={"n1": 0.1})
ROOM = Cut(kind=Instant.AGAIN, after_step=3, nodes=("n0", "n1"), back_s={"n0": 0.1})
CABLE = Cut(kind=Instant.MID_STEP, after_step=12, nodes=("n1",), fault=Fault.CABLE, back_s={"n1": 0.3})


def test_a_job_that_goes_on_from_its_newest_durable_step_is_no_failure(tmp_path: Path) -> None:
    outcome = play(tmp_path, NODE, ROOM)
    assert outcome.failures == []
    node, room = outcome.cuts
    assert (node.nodes, node.restored_step) == ("n1", 10)
    assert node.rpo_steps == node.at_step - 10
    assert node.convicted_s is not None
    assert (room.kind, room.nodes, room.returns) == ("before-first-save", "n0+n1", "n1 0 n0 0.1")
    assert room.convicted_s is None  # nobody was left to be sure of anything


def test_a_step_that_was_called_durable_and_is_not_restored_is_a_failure(tmp_path: Path) -> None:
    outcome = play(tmp_path, NODE, forgets=5)
    assert outcome.failures == ["step 10 was called durable and step 5 was restored"]


def test_a_healthy_job_that_is_restarted_is_a_failure(tmp_path: Path) -> None:
    outcome = play(tmp_path, CABLE)
    assert outcome.failures == []
    assert outcome.cuts[0].restored_step is None
    assert outcome.cuts[0].standstill_s == pytest.approx(0.3, abs=0.2)
    (tmp_path / "second").mkdir()
    assert play(tmp_path / "second", CABLE, restarts_for_nothing=True).failures == ["a healthy job was restarted: launch.ended on n0"]


def test_a_run_that_ends_badly_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    assert [text.partition(":")[0] for text in play(tmp_path, exit_code=22).failures] == [
        "the run ended with 22 on n0",
        "the run ended with 22 on n1",
    ]


def test_a_command_that_ends_before_its_cut_is_a_failure_and_what_was_found_before_is_kept(tmp_path: Path) -> None:
    outcome = play(tmp_path, NODE, Cut(kind=Instant.MID_STEP, after_step=99, nodes=("n0",)))
    assert len(outcome.cuts) == 1
    assert "before step 99" in outcome.failures[0]

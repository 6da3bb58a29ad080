"""Conducting a drill: two runs of the trainee, one of them with faults, and the verdict."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridethrough.drill import command
from ridethrough.drill.compare import Difference, TraceLine, compare, final_lineage, sample_faults
from ridethrough.drill.measure import CutResult
from ridethrough.drill.play import Outcome, Play, Say
from ridethrough.drill.scenario import Scenario
from ridethrough.drill.site import make_site
from ridethrough.drill.watch import Watch
from ridethrough.errors import DrillFailed

_EPOCHS = 3
"""Of the trainee."""
Trace = tuple[TraceLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """Everything a drill found."""

    scenario: Scenario
    realism: str
    sabotage: str | None
    seed: int
    cuts: tuple[CutResult, ...]
    difference: Difference | None
    invariant_failures: tuple[str, ...]
    incidents: tuple[dict[str, Any], ...]
    """As the supervisors have recorded them."""
    compared_lines: int
    wall_s: float

    @property
    def is_identical(self) -> bool:
        """Every step of every rank equals the uninterrupted run's; where the run shrank, every sample was trained on once an epoch."""
        return self.difference is None and not self.invariant_failures

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "scenario": self.scenario.name,
            "realism": self.realism,
            "nodes": self.scenario.nodes,
            "ranks": self.scenario.ranks,
            "storage": self.scenario.storage.value,
            "steps": self.scenario.steps,
            "save_interval_steps": self.scenario.save_interval_steps,
            "seed": self.seed,
            "sabotage": self.sabotage,
            "cuts": [cut.as_dict() for cut in self.cuts],
            "shrunk": self.scenario.shrinks,
            "identical": self.is_identical,
            "first_difference": self.difference.as_dict() if self.difference else None,
            "invariant_failures": list(self.invariant_failures),
            "incidents": list(self.incidents),
            "compared_lines": self.compared_lines,
            "wall_s": round(self.wall_s, 1),
        }


def train_reference(scenario: Scenario, say: Say) -> Trace:
    """The trace of the scenario's run if nothing ever happened to it: as many ranks, all on one node.

    Raises:
        DrillFailed: Not even that went through.
    """
    straight = Scenario(
        name="straight",
        summary="nothing happens",
        cuts=(),
        ranks_per_node=scenario.ranks,
        steps=scenario.steps,
        save_interval_steps=scenario.save_interval_steps,
        pace_s=scenario.pace_s,
    )
    say(f"uninterrupted run: {straight.steps} steps, {straight.ranks} ranks")
    _, outcome, watch, _ = _run(straight, sabotage=None, seed=0, say=say)
    if outcome.failures:
        raise DrillFailed(detail=f"the uninterrupted run failed: {outcome.failures[0]}")
    return tuple(watch.lines)


def conduct(scenario: Scenario, *, reference: Trace, sabotage: str | None, seed: int, say: Say, logs_dir: Path | None = None) -> DrillReport:
    """The drill has been run and everything it made is taken down again.

    Args:
        scenario: What happens.
        reference: What every step must look like: `train_reference` of a scenario with the same `course`.
        sabotage: A class of state to break after each resume.
        seed: Of the instants within a step.
        say: Told of each stage, for a person who waits.
        logs_dir: Where what the nodes' commands have printed, and the trace, is kept.

    Raises:
        DrillFailed: The drill itself could not be carried out.
    """
    began_s = time.monotonic()
    say(f"run with power cuts: {scenario.summary}")
    realism, outcome, watch, incidents = _run(scenario, sabotage=sabotage, seed=seed, say=say, logs_dir=logs_dir)
    # Ranks of another world are not comparable step by step.
    comparable = [line for line in watch.lines if outcome.shrunk_s is None or line.at_s < outcome.shrunk_s]
    difference, gaps = compare(reference, comparable, steps=scenario.steps, ranks=scenario.ranks)
    if outcome.shrunk_s is not None:
        resumes = [(float(e.data["times_s"]["chosen"]), int(e.data["restored_step"])) for e in watch.of("launch.stepped")]
        trained = sum(len(line.samples) for line in reference)
        gaps = sample_faults(final_lineage(watch.lines, resumes), per_epoch=trained // _EPOCHS, epochs=_EPOCHS)
    return DrillReport(
        scenario=scenario,
        realism=realism,
        sabotage=sabotage,
        seed=seed,
        cuts=tuple(outcome.cuts),
        difference=difference,
        # A sabotaged run may well lack steps; what it must show is the difference.
        invariant_failures=tuple([*outcome.failures, *(() if sabotage else gaps)]),
        incidents=tuple(incidents),
        compared_lines=len(comparable),
        wall_s=time.monotonic() - began_s,
    )


def _run(
    scenario: Scenario, *, sabotage: str | None, seed: int, say: Say, logs_dir: Path | None = None
) -> tuple[str, Outcome, Watch, list[dict[str, Any]]]:
    """One run of the trainee on nodes of its own, to the end."""
    with tempfile.TemporaryDirectory(prefix="ridethrough-drill-") as outside:
        watch = Watch(Path(outside), scenario.ranks, scenario.names)
        site = make_site(scenario.names, has_server=scenario.has_server)
        try:
            if scenario.nodes > 1:
                command.write_config(site, scenario, watch.directory)
            rng = random.Random(seed)  # noqa: S311  instants of cuts
            outcome = Play(site, watch, scenario, sabotage=sabotage, rng=rng, say=say).run()
        finally:
            site.close()
            if logs_dir is not None:
                shutil.copytree(watch.directory, logs_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("key"))
    return site.realism, outcome, watch, [{"node": event.node, **event.data} for event in watch.of("incident")]

"""Conducting a drill: two runs of the trainee, one of them cut, and the verdict."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridethrough.drill.compare import Difference, TraceLine, compare
from ridethrough.drill.measure import CutResult, measure
from ridethrough.drill.node import Node, free_port, make_node
from ridethrough.drill.scenario import SAVE_INTERVAL_STEPS, STEPS, Cut, CutKind, Scenario
from ridethrough.drill.watch import PersisterView, Watch
from ridethrough.errors import DrillFailed
from ridethrough.seam import process

RANKS = 2
_STEP_WAIT_S = 180.0
_POLL_S = 0.002
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """Everything a drill found."""

    scenario: str
    realism: str
    sabotage: str | None
    seed: int
    steps: int
    cuts: tuple[CutResult, ...]
    difference: Difference | None
    invariant_failures: tuple[str, ...]
    compared_lines: int
    wall_s: float

    @property
    def is_identical(self) -> bool:
        """Every step of every rank equals the uninterrupted run's."""
        return self.difference is None and not self.invariant_failures

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "scenario": self.scenario,
            "realism": self.realism,
            "nodes": 1,
            "ranks": RANKS,
            "steps": self.steps,
            "save_interval_steps": SAVE_INTERVAL_STEPS,
            "seed": self.seed,
            "sabotage": self.sabotage,
            "cuts": [cut.as_dict() for cut in self.cuts],
            "identical": self.is_identical,
            "first_difference": self.difference.as_dict() if self.difference else None,
            "invariant_failures": list(self.invariant_failures),
            "compared_lines": self.compared_lines,
            "wall_s": round(self.wall_s, 1),
        }


def train_reference(say: Say) -> tuple[TraceLine, ...]:
    """The trace of the run that nothing ever happened to.

    Raises:
        DrillFailed: Not even that went through.
    """
    with tempfile.TemporaryDirectory(prefix="ridethrough-drill-") as outside:
        watch = Watch(Path(outside), RANKS)
        say(f"uninterrupted run: {STEPS} steps, {RANKS} ranks")
        _, _, failures = _run(watch, (), sabotage=None, rng=random.Random(0), say=say)  # noqa: S311
        if failures:
            raise DrillFailed(detail=f"the uninterrupted run failed: {failures[0]}")
        return tuple(watch.lines)


def conduct(scenario: Scenario, *, reference: tuple[TraceLine, ...], sabotage: str | None, seed: int, say: Say) -> DrillReport:
    """The drill has been run and everything it made is taken down again.

    Args:
        scenario: What to cut.
        reference: What every step must look like.
        sabotage: A class of state to break after each resume.
        seed: Of the instants within a step.
        say: Told of each stage, for a person who waits.

    Raises:
        DrillFailed: The drill itself could not be carried out.
    """
    began_s = time.monotonic()
    rng = random.Random(seed)  # noqa: S311  instants of cuts
    with tempfile.TemporaryDirectory(prefix="ridethrough-drill-") as outside:
        watch = Watch(Path(outside), RANKS)
        say(f"run with power cuts: {scenario.summary}")
        realism, cuts, failed = _run(watch, scenario.cuts, sabotage=sabotage, rng=rng, say=say)
    difference, gaps = compare(reference, watch.lines, steps=STEPS, ranks=RANKS)
    return DrillReport(
        scenario=scenario.name,
        realism=realism,
        sabotage=sabotage,
        seed=seed,
        steps=STEPS,
        cuts=tuple(cuts),
        difference=difference,
        # A sabotaged run may well lack steps; what it must show is the difference.
        invariant_failures=tuple([*failed, *(() if sabotage else gaps)]),
        compared_lines=len(watch.lines),
        wall_s=time.monotonic() - began_s,
    )


def _run(watch: Watch, cuts: tuple[Cut, ...], *, sabotage: str | None, rng: random.Random, say: Say) -> tuple[str, list[CutResult], list[str]]:
    """One run of the trainee on a node of its own, to the end, with these cuts."""
    node = make_node()
    try:
        return _run_on(node, watch, cuts, sabotage=sabotage, rng=rng, say=say)
    finally:
        node.close()


def _run_on(
    node: Node, watch: Watch, cuts: tuple[Cut, ...], *, sabotage: str | None, rng: random.Random, say: Say
) -> tuple[str, list[CutResult], list[str]]:
    environment = _environment(node)
    results: list[CutResult] = []
    failures: list[str] = []
    power_s, pending = time.monotonic(), None
    with watch.log_path.open("ab") as log:
        for cut in (*cuts, None):
            first_event = len(watch.events)
            command_s = time.monotonic()
            node.start(_command(node, watch, sabotage), environment=environment, log=log)
            if pending is not None:
                _await(node, watch, lambda since=first_event: bool(watch.of("launch.stepped", since=since)), "the first step after the resume")  # type: ignore[misc]
                stepped = watch.of("launch.stepped", since=first_event)[0]
                result = _measure(pending, watch, stepped, first_event, power_s=power_s, command_s=command_s)
                results.append(result)
                say(f"resumed at step {result.restored_step}: RPO {result.rpo_steps} steps, RTO {result.rto_s:.1f} s")
                if result.restored_step < pending.acknowledged:
                    failures.append(f"step {pending.acknowledged} was called durable and step {result.restored_step} was restored")
            if sabotage is not None and results:
                # What was broken shows right after the resume: no need to train to the end.
                _await(node, watch, lambda: sum(line.is_resume for line in watch.lines) >= RANKS, "the state after the resume")
                return node.realism, results, failures
            if cut is None:
                _await(node, watch, lambda: node.has_ended() is not None, "the end of the run")
                break
            phase = _await_cut(node, watch, cut, environment["RIDETHROUGH_STATE_DIR"], rng)
            node.cut()
            watch.look()
            at_step, at_s = watch.last_step()
            pending = _Pending(cut=cut, phase=phase, at_step=at_step, at_s=at_s, acknowledged=watch.acknowledged())
            say(f"power cut {cut.kind.value} after step {at_step} (persister: {phase})")
            node.restore_power()
            power_s = time.monotonic()
    code = node.has_ended()
    if code != 0:
        failures.append(f"the run ended with {code}: {_last_words(watch)}")
    return node.realism, results, failures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A cut whose resume has not been seen yet."""

    cut: Cut
    phase: str
    at_step: int
    at_s: float
    acknowledged: int


def _environment(node: Node) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RIDETHROUGH_", "TORCHELASTIC"))}
    return {
        **kept,
        "RIDETHROUGH_STATE_DIR": os.path.join(node.disk, "state"),
        "RIDETHROUGH_NODE": "node-0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _command(node: Node, watch: Watch, sabotage: str | None) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    trainee = ["-m", "ridethrough.drill.trainee", "--checkpoints", os.path.join(node.disk, "run"), "--trace", str(watch.directory)]
    numbers = ["--steps", str(STEPS), "--every", str(SAVE_INTERVAL_STEPS), *(["--sabotage", sabotage] if sabotage else [])]
    return [sys.executable, "-m", "ridethrough", "run", "--", *launcher, *trainee, *numbers]


def _await(node: Node, watch: Watch, is_there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _STEP_WAIT_S
    while time.monotonic() < deadline:
        watch.look()
        if is_there():
            return
        if node.has_ended() is not None:
            watch.look()
            if is_there():
                return
            raise DrillFailed(detail=f"the command ended with {node.has_ended()} before {what}: {_last_words(watch)}")
        time.sleep(_POLL_S)
    raise DrillFailed(detail=f"{what} did not come within {_STEP_WAIT_S:.0f} s: {_last_words(watch)}")


def _await_cut(node: Node, watch: Watch, cut: Cut, state_dir: str, rng: random.Random) -> str:
    """Returns at the instant of the cut; says what the persister was doing."""
    view = PersisterView(state_dir)
    after = cut.after_step
    if cut.kind is CutKind.AGAIN:
        after += max((int(event["restored_step"]) for event in watch.of("launch.stepped")[-1:]), default=0)
    _await(node, watch, lambda: watch.last_step()[0] >= after, f"step {after}")
    if cut.kind is CutKind.MID_SAVE:
        deadline = time.monotonic() + _STEP_WAIT_S
        while time.monotonic() < deadline:
            busy = view.busy()
            if busy and busy["phase"] == "writing":
                time.sleep(rng.random() * 0.005)
                return str((view.busy() or busy)["phase"])
        raise DrillFailed(detail="no save was seen in progress")
    time.sleep(rng.random() * 0.04)
    busy = view.busy()
    return str(busy["phase"]) if busy else "train"


def _measure(pending: _Pending, watch: Watch, stepped: Mapping[str, Any], first_event: int, *, power_s: float, command_s: float) -> CutResult:
    decided = watch.of("launch.decided", since=first_event)[0]
    return measure(
        kind=pending.cut.kind.value,
        phase=pending.phase,
        at_step=pending.at_step,
        last_step_s=pending.at_s,
        power_s=power_s,
        command_s=command_s,
        launched_s=float(decided["at_s"]),
        times_s=stepped["times_s"],
        restored_step=int(stepped["restored_step"]),
    )


def _last_words(watch: Watch) -> str:
    text = watch.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return process.shown_tail(text[-12:])

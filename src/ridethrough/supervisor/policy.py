"""What an end of the command means, and what to do next. Pure: no clock, no files, no processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ridethrough.errors import JobFailed, JobStuck, all_errors
from ridethrough.supervisor.evidence import find_exit_code, find_signal, find_syntax_error, find_traces

_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Before restart n without progress in between: the first at once, for most faults are gone with their process."""
_RESTARTS_WITHOUT_PROGRESS = 10
_NOT_STARTED = {
    2: "the command does not accept its arguments or finds no script",
    126: "the command cannot be executed",
    127: "there is no such command",
}
"""Exit codes of shells and argument parsers; by convention nothing was done."""


class Cause(StrEnum):
    """Why a launch ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    OURS = "ridethrough"
    """A rank ended with one of our own errors, which has its exit code."""
    APPLICATION = "application"
    KILLED = "killed"
    HANG = "hang"
    DARK = "dark"
    """Nodes fell silent and nobody made progress: power or network."""
    CASCADE = "cascade"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnd:
    """Facts about a launch that is over."""

    status: int
    """Exit code of the command, negative for a signal."""
    output: str
    """The end of its standard error."""
    start_step: int
    last_step: int
    """Highest step any rank has finished; equal to start_step if none was made."""
    failures: tuple[dict[str, Any], ...] = ()
    """Errors of ours that ranks have put on their boards."""
    was_convicted: bool = False
    is_stopped: bool = False
    """Every rank has saved and stopped because it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What it was."""

    cause: Cause
    fingerprint: str
    detail: str
    exit_code: int = 0
    is_retryable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PastEnd:
    """An earlier end of this run in this keeper's life."""

    fingerprint: str
    last_step: int
    durable_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAction:
    """Restart after a pause, or end with a code."""

    action: str
    reason: str
    pause_s: float = 0.0
    exit_code: int = 0


def classify(end: LaunchEnd) -> Verdict:
    """The cause of an end, from the nearest evidence to the weakest."""
    if end.is_stopped:
        return Verdict(cause=Cause.STOPPED, fingerprint="stopped", detail="saved and stopped on request")
    if end.status == 0:
        return Verdict(cause=Cause.FINISHED, fingerprint="finished", detail="the command ended with 0")
    if end.failures:
        first = end.failures[0]
        return Verdict(
            cause=Cause.OURS,
            fingerprint=str(first["code"]),
            detail=str(first["message"]),
            exit_code=int(first["exit_code"]),
            is_retryable=bool(first["retryable"]),
        )
    if end.was_convicted:
        return Verdict(cause=Cause.HANG, fingerprint="hang", detail="no rank made progress; the trainers were stopped")
    traces = find_traces(end.output)
    roots = [trace for trace in traces if not trace.is_cascade]
    if roots:
        ours = next((kind for kind in all_errors() if f"{kind.__module__}.{kind.__qualname__}" == roots[0].kind), None)
        if ours is not None and ours.retryable:
            # Raised before the rank could report it: storage that hangs when the script names the run, say.
            return Verdict(cause=Cause.OURS, fingerprint=ours.code, detail=roots[0].text, exit_code=ours.exit_code)
        return Verdict(cause=Cause.APPLICATION, fingerprint=roots[0].fingerprint, detail=str(roots[0]))
    broken = find_syntax_error(end.output)
    if broken:
        return Verdict(cause=Cause.APPLICATION, fingerprint=broken, detail=broken)
    number = -end.status if end.status < 0 else find_signal(end.output)
    if number:
        name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
        return Verdict(cause=Cause.KILLED, fingerprint=name, detail=f"ended by {name}")
    code = find_exit_code(end.output) or end.status
    if code in _NOT_STARTED:
        return Verdict(cause=Cause.APPLICATION, fingerprint=f"exit {code}", detail=_NOT_STARTED[code])
    symptoms = [trace for trace in traces if not trace.is_report]
    if symptoms:
        return Verdict(cause=Cause.CASCADE, fingerprint=symptoms[0].fingerprint, detail=str(symptoms[0]))
    return Verdict(cause=Cause.UNKNOWN, fingerprint=f"exit {code}", detail=f"the command ended with {code} and said nothing we know")


def next_action(verdict: Verdict, end: LaunchEnd, past: tuple[PastEnd, ...], *, durable_step: int) -> NextAction:
    """What follows from a verdict and the run's history, oldest first.

    Rules: an error of the user's own code before the first step stops with 22; the same failure
    at the same step twice, or too many restarts without a newer durable step, stops with 21;
    everything else is restarted.
    """
    if verdict.cause in (Cause.FINISHED, Cause.STOPPED):
        return NextAction(action="finish", reason=verdict.detail)
    if verdict.cause is Cause.OURS and not verdict.is_retryable:
        return NextAction(action="finish", reason=verdict.detail, exit_code=verdict.exit_code)
    is_repeated = bool(past) and past[-1].fingerprint == verdict.fingerprint and past[-1].last_step == end.last_step
    # A node may well go dark twice at one step: that says nothing about the code.
    if is_repeated and verdict.cause is not Cause.DARK:
        if verdict.cause is Cause.OURS:
            return NextAction(action="finish", reason=verdict.detail, exit_code=verdict.exit_code)
        return NextAction(
            action="finish", reason=f"the same failure at step {end.last_step} twice without progress: {verdict.detail}", exit_code=JobStuck.exit_code
        )
    # After the rule above: restarted from the very step before the failure, the same failure comes before the first step.
    if verdict.cause is Cause.APPLICATION and end.last_step <= end.start_step:
        return NextAction(
            action="finish", reason=f"error in the training code before its first step: {verdict.detail}", exit_code=JobFailed.exit_code
        )
    without_progress = 0
    for earlier in reversed(past):
        if earlier.durable_step < durable_step:
            break
        without_progress += 1
    if without_progress >= _RESTARTS_WITHOUT_PROGRESS:
        return NextAction(
            action="finish", reason=f"{without_progress} restarts without a newer durable step: {verdict.detail}", exit_code=JobStuck.exit_code
        )
    pause_s = _PAUSES_S[min(without_progress, len(_PAUSES_S) - 1)]
    return NextAction(action="restart", reason=f"{verdict.cause.value}: {verdict.detail}", pause_s=pause_s)


_OUTSIDE_S = 1800.0
_SAVE_DEADLINE_S = 60.0
"""Gigabytes a rank take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a job's steps go."""

    is_stepping: bool
    """Every rank has made a step since it started, and is neither saving nor done."""
    is_inside: bool
    """Every rank is inside an epoch's loop: the next step is expected soon."""
    overdue_s: float
    """Time since the most recent step of any rank."""
    step_s_p99: float


def overdue_limit_s(pace: Pace) -> float:
    """How long a step may take before it is called overdue."""
    return 3 * pace.step_s_p99 + 1


def save_deadline_s(last_save_s: float | None) -> float:
    """How long one phase of a save may take before a person should know; the last save tells what this storage is like."""
    return max(_SAVE_DEADLINE_S, 3 * (last_save_s or 0.0))


def suspicion(pace: Pace, *, hang_s: float) -> str | None:
    """Says "suspect" (flush, stop nothing), "convict" (stop the trainers), or None."""
    if not pace.is_stepping:
        return None
    limit_s = max(hang_s, 10 * pace.step_s_p99)
    if not pace.is_inside:
        # Validation, an export: nobody can say how long. The usual collective timeouts end here anyway.
        return "convict" if pace.overdue_s > max(limit_s, _OUTSIDE_S) else None
    if pace.overdue_s > limit_s:
        return "convict"
    if pace.overdue_s > overdue_limit_s(pace):
        return "suspect"
    return None


def next_announcement(*, interval_steps: int, newest_step: int, previous: int, step_s: float, lead_s: float) -> int:
    """The next step to make durable: far enough ahead that every rank hears of it before it gets there."""
    margin = 1 + int(lead_s / step_s) if step_s > 0 else 1
    earliest = max(newest_step + margin, previous + 1)
    return -(-earliest // interval_steps) * interval_steps

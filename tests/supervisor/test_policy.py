from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.errors import NothingRestorable, RideThroughError, StateMismatch, StoreFull, StoreLocked, TierMissing, all_errors
from ridethrough.supervisor.policy import (
    Cause,
    LaunchEnd,
    NextAction,
    Pace,
    PastEnd,
    Verdict,
    classify,
    next_action,
    next_announcement,
    suspicion,
)

OUTPUTS = Path(__file__).parents[1] / "data" / "outputs"
USER_ERROR = 'Traceback (most recent call last):\n  File "/home/user/train.py", line 9, in step\n    f()\nValueError: bad batch 3\n'


def output(name: str) -> str:
    return (OUTPUTS / f"torchrun-{name}.txt").read_text()


def end(text: str = "", *, status: int = 1, start: int = 0, last: int = 50, **more: object) -> LaunchEnd:
    return LaunchEnd(status=status, output=text, start_step=start, last_step=last, **more)  # type: ignore[arg-type]


def decide(found: LaunchEnd, *past: PastEnd, durable: int = 40) -> NextAction:
    return next_action(classify(found), found, past, durable_step=durable)


def before(found: LaunchEnd, *, last: int | None = None, durable: int = 40) -> PastEnd:
    return PastEnd(fingerprint=classify(found).fingerprint, last_step=found.last_step if last is None else last, durable_step=durable)


# -- classify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("value-error", Cause.APPLICATION),
        ("chained", Cause.APPLICATION),
        ("worker-error", Cause.APPLICATION),
        ("syntax-error", Cause.APPLICATION),
        ("absent-script", Cause.APPLICATION),
        ("sigkill", Cause.KILLED),
        ("lost-peer", Cause.KILLED),
        ("lost-worker", Cause.CASCADE),
        ("port-in-use", Cause.CASCADE),
        ("exit-3", Cause.UNKNOWN),
    ],
)
def test_cause_of_a_torchrun_that_failed(name: str, cause: Cause) -> None:
    assert classify(end(output(name))).cause is cause


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (end(status=0), Cause.FINISHED),
        (end(status=0, text=USER_ERROR), Cause.FINISHED),
        (end(status=1, is_stopped=True), Cause.STOPPED),
        (end(status=-9), Cause.KILLED),
        (end(status=-11), Cause.KILLED),
        (end(USER_ERROR), Cause.APPLICATION),
        (end(status=127), Cause.APPLICATION),
        (end(status=126), Cause.APPLICATION),
        (end(USER_ERROR, status=-9, was_convicted=True), Cause.HANG),
        (end(status=5), Cause.UNKNOWN),
    ],
)
def test_cause_of_a_command_that_ended(found: LaunchEnd, cause: Cause) -> None:
    assert classify(found).cause is cause


def test_verdict_on_a_signal_names_it() -> None:
    assert classify(end(status=-11)).detail == "ended by SIGSEGV"


def test_verdict_on_a_killed_worker_of_torchrun_names_the_signal() -> None:
    assert classify(end(output("sigkill"))).fingerprint == "SIGKILL"


def test_signal_without_a_name_is_classified_all_the_same() -> None:
    assert classify(end(status=-120)).fingerprint == "signal 120"


@pytest.mark.parametrize(
    "error",
    [
        NothingRestorable(path="/r", detail="none"),
        TierMissing(path="/r", run_uid="abc"),
        StoreFull(path="/r", detail="ENOSPC"),
        StateMismatch(name="model", detail="shapes"),
        StoreLocked(path="/r", holder="process 1"),
    ],
)
def test_our_own_error_goes_before_the_traceback_it_prints(error: RideThroughError) -> None:
    verdict = classify(end(USER_ERROR, failures=(error.as_dict(),)))
    assert (verdict.cause, verdict.exit_code) == (Cause.OURS, error.exit_code)


def test_our_own_error_that_no_rank_could_report_is_known_by_its_traceback() -> None:
    trace = 'Traceback (most recent call last):\n  File "/job/train.py", line 3, in <module>\n    ckpt = Checkpointer(run)\n'
    raised = end(f"{trace}ridethrough.errors.StorageUnreachable: storage cannot be used now (no answer within 10 s on look up): /mnt/run\n")
    verdict = classify(raised)
    assert (verdict.cause, verdict.exit_code, verdict.is_retryable) == (Cause.OURS, 13, True)
    assert verdict.detail.endswith("/mnt/run")
    mistake = classify(end(f"{trace}ridethrough.errors.UsageError: keep_last is at least 1\n"))
    assert mistake.cause is Cause.APPLICATION


@given(st.text(max_size=2000), st.integers(-64, 255))
def test_any_output_gets_a_verdict(text: str, status: int) -> None:
    assert isinstance(classify(end(text, status=status)), Verdict)


# -- next_action -------------------------------------------------------------------------------------------------------


def test_user_error_before_the_first_step_stops_with_22() -> None:
    assert decide(end(USER_ERROR, start=-1, last=-1)).exit_code == 22


def test_user_error_after_a_resume_and_before_its_first_step_stops_with_22() -> None:
    assert decide(end(USER_ERROR, start=40, last=40)).exit_code == 22


@pytest.mark.parametrize("name", ["value-error", "syntax-error", "worker-error", "absent-script"])
def test_user_error_under_torchrun_before_the_first_step_stops_with_22(name: str) -> None:
    assert decide(end(output(name), start=-1, last=-1)).exit_code == 22


def test_command_that_does_not_exist_stops_with_22() -> None:
    assert decide(end(status=127, start=-1, last=-1)).exit_code == 22


def test_user_error_in_mid_training_is_tried_again() -> None:
    assert decide(end(USER_ERROR)).action == "restart"


def test_same_user_error_at_the_same_step_twice_stops_with_21() -> None:
    found = end(USER_ERROR)
    assert decide(found, before(found)).exit_code == 21


def test_same_user_error_twice_is_stuck_also_when_the_restart_began_just_before_it() -> None:
    """The snapshot of the last step is flushed, so the second launch fails before its first step."""
    assert decide(end(USER_ERROR, start=50, last=50), before(end(USER_ERROR))).exit_code == 21


def test_same_user_error_at_another_step_is_tried_again() -> None:
    found = end(USER_ERROR)
    assert decide(found, before(found, last=49)).action == "restart"


def test_other_error_at_the_same_step_is_tried_again() -> None:
    found = end(USER_ERROR)
    assert decide(found, before(end(status=-9))).action == "restart"


def test_same_error_at_the_same_step_but_with_another_in_between_is_tried_again() -> None:
    found = end(USER_ERROR)
    assert decide(found, before(found), before(end(status=-9, last=45))).action == "restart"


def test_killed_is_restarted_at_once() -> None:
    assert decide(end(output("sigkill"))) == NextAction(action="restart", reason="killed: ended by SIGKILL", pause_s=0.0)


def test_killed_before_the_first_step_is_restarted() -> None:
    assert decide(end(status=-9, start=-1, last=-1)).action == "restart"


def test_killed_at_the_same_step_twice_stops_with_21() -> None:
    found = end(status=-9)
    assert decide(found, before(found)).exit_code == 21


@pytest.mark.parametrize("name", ["lost-peer", "lost-worker", "port-in-use", "exit-3"])
def test_cascade_is_restarted_also_before_the_first_step(name: str) -> None:
    assert decide(end(output(name), start=-1, last=-1)).action == "restart"


def test_hang_is_restarted() -> None:
    assert decide(end(status=-9, was_convicted=True)).action == "restart"


@pytest.mark.parametrize("kind", [k for k in all_errors() if not k.retryable])
def test_our_own_final_error_ends_with_its_exit_code(kind: type[RideThroughError]) -> None:
    assert decide(end(failures=(kind().as_dict(),))) == NextAction(action="finish", reason=str(kind()), exit_code=kind.exit_code)


def test_our_own_error_that_may_pass_is_tried_again() -> None:
    found = end(failures=(TierMissing(path="/r", run_uid="abc").as_dict(),), start=-1, last=-1)
    assert decide(found).action == "restart"


def test_our_own_error_that_did_not_pass_ends_with_its_exit_code() -> None:
    found = end(failures=(TierMissing(path="/r", run_uid="abc").as_dict(),), start=-1, last=-1)
    assert decide(found, before(found)).exit_code == 13


@pytest.mark.parametrize("found", [end(status=0), end(status=1, is_stopped=True)])
def test_finished_and_stopped_end_with_0(found: LaunchEnd) -> None:
    assert decide(found) == NextAction(action="finish", reason=classify(found).detail, exit_code=0)


def different_ends(count: int, *, durable: int = 40) -> list[PastEnd]:
    return [PastEnd(fingerprint="SIGKILL", last_step=step, durable_step=durable) for step in range(100, 100 + count)]


def test_tenth_restart_without_progress_is_made() -> None:
    assert decide(end(status=-9), *different_ends(9)).action == "restart"


def test_eleventh_restart_without_progress_stops_with_21() -> None:
    assert decide(end(status=-9), *different_ends(10)).exit_code == 21


def test_newer_durable_step_resets_the_budget() -> None:
    assert decide(end(status=-9), *different_ends(30), durable=41).action == "restart"


def test_only_ends_since_the_last_progress_count() -> None:
    past = [*different_ends(30, durable=30), *different_ends(9, durable=40)]
    assert decide(end(status=-9), *past, durable=40).action == "restart"


def test_pauses_grow_while_there_is_no_progress() -> None:
    pauses = [decide(end(status=-9), *different_ends(count)).pause_s for count in range(10)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.0, 60.0)


def test_reason_is_never_empty() -> None:
    for found in (end(status=0), end(USER_ERROR), end(status=-9), end(status=3), end(output("lost-peer"))):
        assert decide(found).reason


# -- pace --------------------------------------------------------------------------------------------------------------


def pace(overdue_s: float, *, p99_s: float = 0.1, is_stepping: bool = True, is_inside: bool = True) -> Pace:
    return Pace(is_stepping=is_stepping, is_inside=is_inside, overdue_s=overdue_s, step_s_p99=p99_s)


@pytest.mark.parametrize(
    ("overdue_s", "p99_s", "expected"),
    [
        (0.0, 0.1, None),
        (1.29, 0.1, None),
        (1.31, 0.1, "suspect"),
        (60.0, 0.1, "suspect"),
        (60.1, 0.1, "convict"),
        (61.1, 20.0, "suspect"),
        (199.0, 20.0, "suspect"),
        (201.0, 20.0, "convict"),
    ],
)
def test_suspicion_follows_the_jobs_own_pace(overdue_s: float, p99_s: float, expected: str | None) -> None:
    assert suspicion(pace(overdue_s, p99_s=p99_s), hang_s=60.0) == expected


@pytest.mark.parametrize(("overdue_s", "expected"), [(59.0, None), (1799.0, None), (1801.0, "convict")])
def test_between_epochs_nothing_is_suspected_before_half_an_hour(overdue_s: float, expected: str | None) -> None:
    assert suspicion(pace(overdue_s, is_inside=False), hang_s=60.0) == expected


@given(st.floats(0, 1e6), st.floats(0, 1e3))
def test_job_that_is_not_stepping_is_never_suspected(overdue_s: float, p99_s: float) -> None:
    assert suspicion(pace(overdue_s, p99_s=p99_s, is_stepping=False), hang_s=60.0) is None


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e3))
def test_suspicion_never_gets_weaker_with_time(first_s: float, more_s: float, p99_s: float) -> None:
    order = [None, "suspect", "convict"]
    early, late = (order.index(suspicion(pace(s, p99_s=p99_s), hang_s=60.0)) for s in (first_s, first_s + more_s))
    assert late >= early


intervals = st.integers(1, 1000)
steps = st.integers(0, 10**9)
paces = st.just(0.0) | st.floats(1e-6, 100)


@given(intervals, steps, steps, paces, st.floats(0, 10))
def test_announced_step_is_a_multiple_of_the_interval(interval: int, newest: int, previous: int, step_s: float, lead_s: float) -> None:
    found = next_announcement(interval_steps=interval, newest_step=newest, previous=previous, step_s=step_s, lead_s=lead_s)
    assert found % interval == 0


@given(intervals, steps, steps, paces, st.floats(0, 10))
def test_announced_step_is_ahead_of_every_rank_and_of_the_last_one(interval: int, newest: int, previous: int, step_s: float, lead_s: float) -> None:
    found = next_announcement(interval_steps=interval, newest_step=newest, previous=previous, step_s=step_s, lead_s=lead_s)
    assert found > max(newest, previous)


@given(intervals, st.integers(0, 10**6), st.floats(1e-4, 100), st.floats(0, 10))
def test_announced_step_leaves_the_lead_time(interval: int, newest: int, step_s: float, lead_s: float) -> None:
    found = next_announcement(interval_steps=interval, newest_step=newest, previous=0, step_s=step_s, lead_s=lead_s)
    assert (found - newest) * step_s >= lead_s - 1e-6


@given(intervals, st.integers(0, 10**6), st.integers(0, 10**6), st.floats(1e-3, 100), st.floats(0, 10))
def test_announced_step_is_the_first_such_multiple(interval: int, newest: int, previous: int, step_s: float, lead_s: float) -> None:
    found = next_announcement(interval_steps=interval, newest_step=newest, previous=previous, step_s=step_s, lead_s=lead_s)
    assert found - interval < max(newest + 1 + int(lead_s / step_s), previous + 1)

"""On what torchrun and Python really print; `tests/data/outputs` says how it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridethrough.supervisor.evidence import Trace, find_exit_code, find_signal, find_syntax_error, find_traces

OUTPUTS = Path(__file__).parents[1] / "data" / "outputs"


def output(name: str) -> str:
    return (OUTPUTS / f"torchrun-{name}.txt").read_text()


def roots(name: str) -> list[Trace]:
    return [trace for trace in find_traces(output(name)) if not trace.is_cascade]


def test_error_of_one_rank_is_found_at_its_innermost_frame_of_the_users_code() -> None:
    assert str(roots("value-error")[0]) == "ValueError: sample 17 has no label (/home/user/train.py:11, in load_batch)"


def test_error_of_one_rank_is_the_only_root() -> None:
    assert len(roots("value-error")) == 1


def test_launchers_own_report_is_a_cascade() -> None:
    assert [t.kind.rsplit(".", 1)[-1] for t in find_traces(output("sigkill")) if t.is_report] == ["ChildFailedError"]
    assert roots("sigkill") == []


def test_first_of_chained_errors_is_the_root() -> None:
    assert roots("chained")[0].kind == "ValueError"


def test_error_in_a_loader_worker_is_found_where_it_was_raised() -> None:
    assert str(roots("worker-error")[0]) == "ValueError: sample 0 has no label (/home/user/train.py:11, in load_batch)"


@pytest.mark.parametrize("name", ["lost-peer", "lost-worker", "port-in-use", "exit-3", "absent-script"])
def test_symptoms_of_another_failure_are_no_roots(name: str) -> None:
    assert roots(name) == []


def test_prefix_that_torch_puts_before_a_ranks_lines_is_not_part_of_them() -> None:
    assert find_traces(output("lost-peer"))[0].file == "/home/user/train.py"


def test_fingerprint_does_not_change_with_the_numbers_in_the_text() -> None:
    first = output("value-error")
    second = first.replace("sample 17 has", "sample 4711 has")
    assert find_traces(first)[0].fingerprint == find_traces(second)[0].fingerprint


def test_fingerprint_changes_with_the_place() -> None:
    first = output("value-error")
    second = first.replace("line 11, in load_batch", "line 12, in load_batch")
    assert find_traces(first)[0].fingerprint != find_traces(second)[0].fingerprint


def test_error_raised_only_inside_libraries_is_found_at_its_last_frame() -> None:
    text = 'Traceback (most recent call last):\n  File "/venv/lib/python3.11/site-packages/a.py", line 3, in f\n    g()\nKeyError: 1\n'
    assert find_traces(text) == (Trace(kind="KeyError", text="1", file="/venv/lib/python3.11/site-packages/a.py", line=3, where="f"),)


def test_output_without_a_traceback_has_no_traces() -> None:
    assert find_traces("epoch 1\nloss 0.3\nValueError: this is only a log line\n") == ()


def test_traceback_whose_end_is_cut_off_is_no_trace() -> None:
    text = output("value-error").split("ValueError")[0]
    assert find_traces(text) == ()


def test_signal_of_a_killed_worker_is_the_cause_and_not_the_launchers_sigterm() -> None:
    assert find_signal(output("sigkill")) == 9


def test_sigterm_of_survivors_alone_is_not_the_cause() -> None:
    assert find_signal(output("lost-worker")) is None


def test_sigterm_that_is_the_root_cause_is_the_cause() -> None:
    text = output("sigkill").replace("Signal 9 (SIGKILL)", "Signal 15 (SIGTERM)")
    assert find_signal(text) == 15


def test_sigterm_of_the_launcher_is_the_cause() -> None:
    assert find_signal("torch.distributed.elastic.multiprocessing.api.SignalException: Process 15599 got signal: 15\n") == 15


def test_no_signal_is_found_where_none_was() -> None:
    assert find_signal(output("value-error").replace("15 (SIGTERM)", "")) is None


@pytest.mark.parametrize(("name", "code"), [("exit-3", 3), ("absent-script", 2), ("value-error", 1), ("sigkill", None), ("port-in-use", None)])
def test_exit_code_is_that_of_the_first_worker_that_failed(name: str, code: int | None) -> None:
    assert find_exit_code(output(name)) == code


def test_script_that_cannot_be_compiled_is_named() -> None:
    assert find_syntax_error(output("syntax-error")) == "SyntaxError: invalid syntax (/home/user/broken.py:3)"


def test_wrong_indentation_is_named() -> None:
    text = '  File "/home/user/a.py", line 2\n    x = 1\nIndentationError: unexpected indent\n'
    assert find_syntax_error(text) == "IndentationError: unexpected indent (/home/user/a.py:2)"


def test_output_without_a_syntax_error_has_none() -> None:
    assert find_syntax_error(output("value-error")) is None

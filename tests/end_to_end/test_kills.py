"""Two ranks under torchrun, and somebody kills a part of it. Each story is told once; the tests are what must be true of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from job import Job, is_gone, wait_for

from ridethrough.seam import process

Digests = dict[int, dict[int, str]]
STEPS = 120


@dataclass(slots=True)
class Story:
    """What was seen while it happened."""

    job: Job
    codes: list[int] = field(default_factory=list)
    gone: dict[str, bool] = field(default_factory=dict)
    restored: dict[str, int] = field(default_factory=dict)
    killed_at: dict[str, int] = field(default_factory=dict)
    helpers_before: dict[str, int] = field(default_factory=dict)
    helpers_after: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def healed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """One command; its supervisor, then its persister, then a trainer are killed. Nobody helps."""
    story = Story(Job(tmp_path_factory.mktemp("healed"), ranks=2))
    job = story.job
    try:
        job.start()
        job.wait_for_step(20)
        for role in ("supervisor", "persister"):
            story.helpers_before[role] = job.helper_pid(role)
            story.killed_at[role] = job.steps()[-1]
            os.kill(story.helpers_before[role], signal.SIGKILL)
            job.wait_for_step(story.killed_at[role] + 15)
            story.helpers_after[role] = job.helper_pid(role)
        story.killed_at["trainer"] = job.steps()[-1]
        os.kill(job.newest_pids()[1], signal.SIGKILL)
        story.codes.append(job.finish())
        yield story
    finally:
        job.close()


@pytest.mark.parametrize("role", ["supervisor", "persister"])
def test_killed_helper_is_started_again(healed: Story, role: str) -> None:
    assert healed.helpers_after[role] not in (0, healed.helpers_before[role])


def test_killed_helpers_and_trainer_cost_no_exit_code(healed: Story) -> None:
    assert healed.codes == [0], healed.job.shown[-4000:]


def test_killed_supervisor_and_persister_restart_no_trainer(healed: Story) -> None:
    first_start_steps = healed.job.steps()[: healed.killed_at["trainer"]]
    assert first_start_steps == list(range(1, healed.killed_at["trainer"] + 1))


def test_killed_trainer_restarts_the_command_once(healed: Story) -> None:
    assert len(healed.job.restored()) == 2


def test_killed_trainer_costs_at_most_the_step_it_was_in(healed: Story) -> None:
    """Every step is snapshotted, and the snapshots outlive the trainer."""
    assert healed.job.restored()[1] >= healed.killed_at["trainer"] - 1


@pytest.mark.parametrize("rank", [0, 1])
def test_job_that_healed_itself_equals_the_undisturbed_one(healed: Story, straight_pair: Digests, rank: int) -> None:
    assert healed.job.digests(rank) == straight_pair[rank]


def test_killed_trainer_is_named_in_the_journal(healed: Story) -> None:
    assert [1] in [event["ranks"] for event in healed.job.events("trainer.died")] or healed.job.events("launch.ended")[0]["cause"] == "killed"


def test_verdict_on_the_killed_trainer_is_killed(healed: Story) -> None:
    assert healed.job.events("launch.ended")[0]["cause"] == "killed"


def test_restart_is_decided_in_the_journal_before_it_happens(healed: Story) -> None:
    kinds = [event["kind"] for event in healed.job.journal() if event["kind"] in ("launch.decided", "launch.ended", "launch.stepped")]
    assert kinds == ["launch.decided", "launch.stepped", "launch.ended", "launch.decided", "launch.stepped", "launch.ended"]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The same command given four times: asked to stop; keeper killed while a rank is frozen; everything killed; to the end."""
    story = Story(Job(tmp_path_factory.mktemp("continued"), ranks=2))
    job = story.job
    try:
        command = job.start()
        job.wait_for_step(20)
        command.send_signal(signal.SIGTERM)
        story.codes.append(job.finish())
        story.killed_at["stop"] = job.steps()[-1]

        command = job.start()
        job.wait_for_step(story.killed_at["stop"] + 15, starts=2)
        job.socket()
        everybody = process.descendants(command.pid)
        frozen = job.newest_pids()[1]
        os.kill(frozen, signal.SIGSTOP)
        story.killed_at["keeper"] = job.steps()[-1]
        command.kill()
        job.finish()
        wait_for("the kernel ends what the keeper has started", lambda: all(map(is_gone, everybody)), deadline_s=20)
        story.gone["keeper"] = all(map(is_gone, everybody))
        story.gone["frozen"] = is_gone(frozen)

        command = job.start()
        job.wait_for_step(story.killed_at["keeper"] + 15, starts=3)
        job.socket()
        everybody = [command.pid, *process.descendants(command.pid)]
        story.killed_at["everything"] = job.steps()[-1]
        process.send_signal(everybody, signal.SIGKILL)
        job.finish()
        wait_for("everything is gone", lambda: all(map(is_gone, everybody)), deadline_s=20)
        story.gone["everything"] = not job.workers_left()

        story.codes.append(job.run())
        yield story
    finally:
        job.close()


def test_sigterm_saves_and_exits_with_20(continued: Story) -> None:
    assert continued.codes[0] == 20, continued.job.shown[-4000:]


def test_all_ranks_stop_at_the_same_step(continued: Story) -> None:
    first = continued.job.restored(0)[1], continued.job.restored(1)[1]
    assert first[0] == first[1]


def test_job_that_was_asked_to_stop_loses_no_step(continued: Story) -> None:
    assert continued.job.restored()[1] in (continued.killed_at["stop"], continued.killed_at["stop"] + 1)


def test_dead_keeper_leaves_no_process_behind(continued: Story) -> None:
    assert continued.gone["keeper"]


def test_trainer_frozen_while_the_keeper_died_is_gone(continued: Story) -> None:
    assert continued.gone["frozen"]


def test_trainer_frozen_while_the_keeper_died_has_written_nothing_since(continued: Story) -> None:
    attempts = [event["data"]["attempt"]["seq"] for event in continued.job.journal() if event["kind"] == "launch.stepped"]
    assert attempts == sorted(attempts)


def test_killing_everything_leaves_no_process_behind(continued: Story) -> None:
    assert continued.gone["everything"]


@pytest.mark.parametrize(("start", "what"), [(2, "keeper"), (3, "everything")])
def test_same_command_goes_on_from_a_durable_step(continued: Story, start: int, what: str) -> None:
    """Snapshots in memory died with the keeper; the newest save did not."""
    restored = continued.job.restored()[start]
    assert continued.killed_at[what] - 20 <= restored <= continued.killed_at[what] + 1
    assert restored > 0


def test_same_command_ends_with_0(continued: Story) -> None:
    assert continued.codes[-1] == 0, continued.job.shown[-4000:]


@pytest.mark.parametrize("rank", [0, 1])
def test_job_that_was_continued_equals_the_undisturbed_one(continued: Story, straight_pair: Digests, rank: int) -> None:
    assert continued.job.digests(rank) == straight_pair[rank]

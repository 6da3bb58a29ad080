from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job import Job

Maker = Callable[..., Job]


@pytest.fixture(scope="session")
def straight_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, str]]:
    """Digests by rank and step of two ranks that were never disturbed."""
    return _straight(Job(tmp_path_factory.mktemp("straight-pair"), ranks=2))


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, str]]:
    """The same of one rank."""
    return _straight(Job(tmp_path_factory.mktemp("straight")))


def _straight(job: Job) -> dict[int, dict[int, str]]:
    try:
        assert job.run() == 0, job.shown
        return {rank: job.digests(rank) for rank in range(job.ranks)}
    finally:
        job.close()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Maker]:
    """Jobs of one test; nothing of them is left after it."""
    made: list[Job] = []

    def make(**settings: object) -> Job:
        made.append(Job(tmp_path / f"job-{len(made)}", **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for job in made:
        job.close()

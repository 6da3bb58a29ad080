"""Children that are asked, in a process that has many files open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from ridethrough.seam.children import ask_children


@pytest.fixture
def crowded() -> Iterator[None]:
    """More descriptors are open than `select` can count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"this machine allows only {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("crowded")
def test_children_answer_although_a_thousand_files_are_open() -> None:
    assert ask_children([lambda: 1, lambda: 2], limit_s=30, doing="count", path="/", tick=lambda: None) == [1, 2]

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_node import FakeNode

from ridethrough.testing import SimpleStore


@pytest.fixture
def node(store: SimpleStore) -> Iterator[FakeNode]:
    """Two ranks in launch 1 that save every 10 steps."""
    made = FakeNode(store)
    yield made
    made.close()

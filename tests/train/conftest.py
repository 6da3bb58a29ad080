from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the training side needs torch")

from lab import lives  # noqa: E402, F401  a fixture


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """More threads only fight for the few cores of a test machine."""
    torch.set_num_threads(1)

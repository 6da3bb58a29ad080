"""The rule for tests that need something of the machine: skipped with the reason, and with CI=true a failure."""

from __future__ import annotations

import os

import pytest


def lacking(reason: str | None) -> None:
    """The machine has what the test needs, or the test ends here."""
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the root-only tests: {reason}", pytrace=False)
    pytest.skip(f"root-only: {reason}")

"""The fuzzer of `bench/`, for the tests of this directory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))

"""The documentation, the public names and the tree keep their promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ridethrough

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists():
            broken.append(target)
        elif anchor and found.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            if anchor not in slugs and f'id="{anchor}"' not in found.read_text(encoding="utf-8"):
                broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_named_in_the_docs_exist(page: Path) -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"\b(test_[a-z0-9_]{12,})\b(?!\.py)", page.read_text(encoding="utf-8")))
    assert not {name for name in named if f"def {name}(" not in code}


def test_generated_pages_are_current() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_complete_and_sorted() -> None:
    assert ridethrough.__all__ == sorted(ridethrough.__all__)
    assert set(ridethrough.__all__) == {"Checkpointer", "RideThroughError", "__version__", "data_fingerprint"}


@pytest.mark.torch
def test_every_public_name_can_be_used() -> None:
    for name in ridethrough.__all__:
        assert getattr(ridethrough, name)


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_is_longer_than_a_newcomer_can_hold_in_the_head(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def test_importing_the_package_does_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", "import ridethrough, sys; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0

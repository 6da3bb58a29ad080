"""Every package that an installation of ours brings along has a licence compatible with Apache-2.0."""

from __future__ import annotations

import importlib.metadata
import re
import sys

ALLOWED = re.compile(r"\b(Apache|BSD|MIT|ISC|PSF|Python Software Foundation|MPL-2\.0|Mozilla Public License 2\.0|Zlib|Unlicense|0BSD|HPND)", re.I)
FORBIDDEN = re.compile(r"\b(AGPL|Affero|GPL-[23]|SSPL|proprietary|NVIDIA)\b|(?<!Lesser )(?<!L)\bGeneral Public License", re.I)


def licence_of(name: str) -> str:
    """What the package says of itself: expression, classifiers, or the first line of its licence field."""
    meta = importlib.metadata.metadata(name)
    expression = meta.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    return "; ".join(classifiers) or str(meta.get("License") or "unknown").splitlines()[0]


def brought_along(root: str) -> set[str]:
    """The package, its core and torch dependencies, and theirs."""
    found: set[str] = set()
    queue = [root]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a dependency for another platform
        found.add(name)
        for line in requires:
            wanted = re.match(r"[A-Za-z0-9._-]+", line)
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
            if wanted and (extra is None or (name == root and extra.group(1) == "torch")):
                queue.append(re.sub(r"[-_.]+", "-", wanted.group(0)).lower())
    return found


def main() -> int:
    """0 if all are compatible, 1 and their names otherwise."""
    rows = {name: licence_of(name) for name in sorted(brought_along("ridethrough"))}
    wrong = {name: text for name, text in rows.items() if FORBIDDEN.search(text) or not ALLOWED.search(text)}
    for name, text in rows.items():
        print(f"{'BAD ' if name in wrong else 'ok  '} {name:22} {text}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())

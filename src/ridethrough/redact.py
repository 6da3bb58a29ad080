"""Secrets never reach a record, a page or an alert.

Used at the two doors where text from outside enters what we write: provenance (command line)
and the journal (everything else: stderr tails, tracebacks, error texts).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "<redacted>"

_MARK = (
    r"(?:token(?!iz|s)|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|auth[_-]?key|authorization)"
)
_GUARDED = rf"[\w.-]*{_MARK}[\w.-]*"
# The same inside a text. Looked for only where a word begins, and then taken whole: a plain `[\w.-]*` in front would be
# tried from every letter, and a progress bar of 100,000 dashes in a stderr tail would stop the supervisor for minutes.
_GUARDED_WORD = rf"(?<![\w.-])(?=[\w.-]*?{_MARK})[\w.-]++"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # scheme://user:password@host and scheme://token@host
    (re.compile(r"(?P<keep>(?<![a-z0-9+.-])[a-z0-9+.-]*+://)[^/\s'\"]+@", re.I), rf"\g<keep>{REDACTED}@"),
    # ?X-Amz-Signature=…, &sig=…, &token=…
    (
        re.compile(
            r"(?P<keep>[?&](?:(?:sig|key)|(?=[\w-]*?(?:signature|token(?!iz|s)|secret|passw(?:or)?d|credential|[_-]key|apikey|accesskey))[\w-]++)=)"
            r"[^&\s'\"]+",
            re.I,
        ),
        rf"\g<keep>{REDACTED}",
    ),
    # --api-key=VALUE, API_KEY: VALUE, "password": "VALUE", --token VALUE
    (re.compile(rf"(?P<keep>{_GUARDED_WORD}['\"]?\s*[=:]\s*['\"]?)(?:bearer\s+|basic\s+)?[^\s'\",;&]+", re.I), rf"\g<keep>{REDACTED}"),
    (re.compile(rf"(?P<keep>(?<![\w.-])-(?=[\w.-]*?{_MARK})[\w.-]++\s+['\"]?)[^\s'\"-][^\s'\"]*", re.I), rf"\g<keep>{REDACTED}"),
    (re.compile(r"(?P<keep>\bbearer\s+)[\w.~+/=-]{8,}", re.I), rf"\g<keep>{REDACTED}"),
    # Token shapes their issuers document as recognisable.
    (
        re.compile(r"\b(?:hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abpr]-[\w-]{10,}|AKIA[0-9A-Z]{16})"),
        REDACTED,
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), REDACTED),
)
_SECRET_VARIABLE = re.compile(_GUARDED, re.I)
# A shorter value would blank ordinary words out of every text.
_SHORTEST_SECRET = 6


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of environment variables whose names say that they are secret, longest first."""
    found = {
        value
        for name, value in environment.items()
        if len(value) >= _SHORTEST_SECRET and _SECRET_VARIABLE.fullmatch(name) and not value.startswith("/")
    }
    return tuple(sorted(found, key=len, reverse=True))


def redact_text(text: str, *, secrets: Iterable[str] | None = None) -> str:
    """The text without secrets: by value from the environment, by name, and by known shape."""
    for value in secret_values(os.environ) if secrets is None else secrets:
        text = text.replace(value, REDACTED)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_argv(argv: Iterable[str]) -> list[str]:
    """A command line without secrets, also where the value is an argument of its own."""
    cleaned: list[str] = []
    hide_next = False
    for word in argv:
        if hide_next and not word.startswith("-"):
            cleaned.append(REDACTED)
        else:
            cleaned.append(redact_text(word))
        hide_next = bool(re.fullmatch(rf"--?{_GUARDED}", word, re.I))
    return cleaned


def redact(value: Any) -> Any:
    """The same JSON value with every string in it redacted."""
    secrets = secret_values(os.environ)
    return _walk(value, secrets)


def _walk(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return redact_text(value, secrets=secrets)
    if isinstance(value, Mapping):
        # The name of a key can itself say that the value is secret.
        return {
            (redact_text(key, secrets=secrets) if isinstance(key, str) else key): (
                REDACTED if isinstance(item, str) and item and _SECRET_VARIABLE.fullmatch(str(key)) else _walk(item, secrets)
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_walk(item, secrets) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    # An exception or a path would become text later, behind our back.
    return redact_text(str(value), secrets=secrets)

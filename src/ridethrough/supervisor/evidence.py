"""What the end of a command tells: tracebacks and signals in its last output. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_RANK_PREFIX = re.compile(r"^(?:\[rank\d+\]|\[\w+\d+\]):\s?", re.M)
# A worker's exception is printed inside the one that passes it on, under a head of its own.
_HEADS = ("Traceback (most recent call last):", "Original Traceback (most recent call last):")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>.+)$')
_RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_SIGNALLED = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID \d+|SignalException: Process \d+ got signal: (\d+)")
_ROOT_CAUSE = "Root Cause (first observed failure):"
_EXIT_CODE = re.compile(r"^\s*exitcode\s*: (\d+) ", re.M)
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")

# The launcher's own report that a child failed: says nothing about why.
_REPORTS = ("ChildFailedError", "SignalException", "ProcessExitedException", "ProcessRaisedException")
# What survivors print when somebody else has died, and what a start finds before the world is up again.
_CASCADES = re.compile(
    r"Connection closed by (remote )?peer|Connection reset|Connection refused|Broken pipe|Socket Timeout|socketProgress"
    r"|DistNetworkError|DistStoreError|RendezvousTimeout|RendezvousConnection|Timed out waiting|EADDRINUSE|Address already in use"
    r"|NCCL|Watchdog caught collective|Stale file handle|Input/output error|Transport endpoint|No route to host|KeeperGone"
    r"|DataLoader worker .*(killed by signal|exited unexpectedly)|Caught \w+ in (DataLoader worker|pin memory thread)",
    re.I,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One exception as printed."""

    kind: str
    text: str
    file: str
    line: int
    where: str

    @property
    def fingerprint(self) -> str:
        """Equal for the same failure at the same place, whatever numbers are in its text."""
        return f"{self.kind} in {self.where} ({self.file}:{self.line})"

    @property
    def is_cascade(self) -> bool:
        """A symptom of another failure, or of a world that is not up yet."""
        return self.is_report or bool(_CASCADES.search(f"{self.kind}: {self.text}"))

    @property
    def is_report(self) -> bool:
        """The launcher's word that a child has failed, whatever the reason."""
        return self.kind.rsplit(".", 1)[-1] in _REPORTS

    def __str__(self) -> str:
        """As a person would say it."""
        return f"{self.kind}: {self.text} ({self.file}:{self.line}, in {self.where})" if self.text else self.fingerprint


def find_traces(output: str) -> tuple[Trace, ...]:
    """Every exception in the text, in order, at its innermost frame outside of libraries."""
    lines = _RANK_PREFIX.sub("", output).splitlines()
    found = []
    frames: list[tuple[str, int, str]] | None = None
    for line in lines:
        if line.strip() in _HEADS:
            frames = []
            continue
        if frames is None:
            continue
        frame = _FRAME.match(line)
        if frame:
            frames.append((frame["file"], int(frame["line"]), frame["where"]))
        elif line[:1] not in (" ", "\t", ""):
            raised = _RAISED.match(line)
            if raised and frames:
                own = [f for f in frames if not any(part in f[0] for part in _LIBRARY)] or frames
                file, number, where = own[-1]
                found.append(Trace(kind=raised["kind"], text=(raised["text"] or "")[:300], file=file, line=number, where=where))
            frames = None
    return tuple(found)


def find_signal(output: str) -> int | None:
    """The signal that ended a worker or the launcher, as the launcher reports it."""

    def numbers(text: str) -> list[int]:
        return [int(worker or launcher) for worker, launcher in _SIGNALLED.findall(text)]

    # The launcher ends the survivors itself with SIGTERM: any other signal is the cause, and SIGTERM only as root cause.
    causes = [number for number in numbers(output) if number != signal.SIGTERM]
    root = output.rpartition(_ROOT_CAUSE)[2] if _ROOT_CAUSE in output else output
    return next(iter(causes or numbers(root)), None)


def find_exit_code(output: str) -> int | None:
    """With what the first worker ended that failed by itself, as the launcher reports it."""
    found = _EXIT_CODE.search(output.rpartition(_ROOT_CAUSE)[2])
    return int(found.group(1)) if found else None


def find_syntax_error(output: str) -> str | None:
    """A script that cannot even be compiled has no traceback head of its own."""
    found = re.search(
        r'File "(?P<file>[^"]+)", line (?P<line>\d+)\n(?:.*\n){1,3}?(?P<kind>SyntaxError|IndentationError|TabError): (?P<text>.*)', output
    )
    return f"{found['kind']}: {found['text']} ({found['file']}:{found['line']})" if found else None

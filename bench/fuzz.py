"""Damaged and hostile bytes for every reader: no crash, no hang, no memory without end, no code that runs, no lie.

Each input follows from the seed: real files and messages, mutated with a sense of their structure, checksums made to hold
again. Inputs that a reader refuses at a place where none was refused before are kept and mutated further. A failure is
written to build/fuzz/ and ends with status 1; `--replay FILE --reader NAME` shows it again.

    python bench/fuzz.py --minutes 10 --seed 7            each reader for ten minutes, one process per core
    python bench/fuzz.py --reader seal --inputs 5000
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import figures
import fuzz_mutate
import fuzz_readers

from ridethrough.errors import RideThroughError

SLOW_S = 4.0
"""Of this process's time, for inputs of at most 300 kB. The slowest linear reader (a tree of nested lists) needs 0.3 s, some times
as much while its memory is watched and others use the processor."""
HANG_S = 8.0
MEMORY_RATIO, MEMORY_SPARE_BYTES = 64, 1 << 20
"""`[{},{},...` is the worst that JSON can do: 72 bytes of Python for 3 bytes of text."""
MESSAGE_CHARS = 2000
"""What is said of a bad input goes to terminals and journals."""
ADDRESS_SPACE_BYTES = 6 << 30
_POOL = 400
_FAILURES = 12
_BUILD = Path("build", "fuzz")
_FORBIDDEN = (
    "exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "ctypes.", "pickle.", "marshal.", "shutil.", "code.", "mmap.",
    "builtins.input", "builtins.breakpoint", "sys.settrace", "sys.setprofile", "cpython.", "urllib.", "tempfile.", "gc.", "signal.",
)  # fmt: skip
"""Beginnings of audit events that reading bytes must not cause."""


class Hang(BaseException):
    """The reader did not come back."""


@dataclass(slots=True)
class Watch:
    """What a reader does to the world while it reads."""

    thread: int | None = None
    """Which reads now; None if none does. What others do, left from other tests in this process, is not the reader's."""
    allowed: tuple[str, ...] = ()
    events: list[str] = field(default_factory=list)

    def hear(self, event: str, details: tuple[Any, ...]) -> None:
        if self.thread == threading.get_ident() and event.startswith(_FORBIDDEN) and not event.startswith(self.allowed or ("\0",)):
            self.events.append(f"{event} {repr(details)[:100]}")


_watch = Watch()
_installed: list[bool] = []


def _install_watch() -> None:
    if not _installed:  # an audit hook stays for the life of the process
        _installed.append(True)
        sys.addaudithook(_watch.hear)
    for name in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "ascii", "idna"):
        "".encode(name)  # their modules are imported at first use
    with contextlib.suppress(ImportError):
        import numpy  # noqa: PLC0415

        numpy.frombuffer(b"\0\0\0\0", dtype=numpy.dtype("<f4"))[0]


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    # Time of this process and not of the clock: others use the machine, and pytest has the clock's timer.
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one input did."""

    is_accepted: bool
    place: tuple[Any, ...]
    """Where it was refused, or where the reader failed."""
    failure: str | None
    spent_s: float
    memory_ratio: float


def try_input(reader: fuzz_readers.Reader, data: bytes) -> Outcome:
    """The reader has read it, and was watched."""
    _install_watch()
    _watch.allowed, _watch.events = reader.allowed_events, []
    result: Any = None
    error: BaseException | None = None
    tracemalloc.start(1)
    begin_s = time.process_time()
    spent_s = 0.0
    try:
        with _time_limit():
            _watch.thread = threading.get_ident()
            try:
                result = reader.read(data)
            finally:
                _watch.thread = None
                spent_s = time.process_time() - begin_s
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the finding
        error = raised
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()  # making the next input is nobody's concern, and slow under it
    failure, place = _judge(reader, data, result, error)
    allowed_bytes = MEMORY_RATIO * reader.copies * len(data) + MEMORY_SPARE_BYTES
    if failure is None and peak_bytes > allowed_bytes:
        failure = f"memory: {peak_bytes} bytes for {len(data)}"
    if failure is None and spent_s > SLOW_S:
        failure = f"slow: {spent_s:.1f} s for {len(data)} bytes"
    ratio = peak_bytes / max(len(data), 4096)
    return Outcome(is_accepted=error is None and result is not None, place=place, failure=failure, spent_s=spent_s, memory_ratio=ratio)


def _judge(reader: fuzz_readers.Reader, data: bytes, result: Any, error: BaseException | None) -> tuple[str | None, tuple[Any, ...]]:
    place: tuple[Any, ...] = (type(result),)
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)[-40:]
        place = (type(error), *dict.fromkeys((Path(frame.filename).name, frame.lineno) for frame in frames[1:]))[:12]
    if _watch.events:
        return f"code: {_watch.events[0]}", place
    if isinstance(error, Hang):
        return f"hang: not back after {HANG_S:.0f} s", place
    if error is not None and not isinstance(error, reader.documented or ()):
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"crash: {type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {str(error)[:200]!r}", place
    if isinstance(error, RideThroughError):  # others are caught where they are raised, and shown to nobody
        text = str(error)
        if len(text) > MESSAGE_CHARS:
            return f"message: {len(text)} characters: {text[:80]!r}", place
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"message: cannot be printed: {text[:80]!r}", place
    if error is not None:
        return None, place
    if reader.is_vouched is not None and not reader.is_vouched(data, result):
        return "lie: accepted although its checksum does not hold, or not what was saved", place
    return None, place


@dataclass(slots=True)
class Row:
    """What became of the inputs of one reader."""

    reader: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_ms: float = 0.0
    largest_memory_ratio: float = 0.0
    places: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)


def fuzz(
    reader: fuzz_readers.Reader, *, seed: int, inputs: int | None, until_s: float | None, last: mmap.mmap | None = None, failures: int = _FAILURES
) -> Row:
    """So many inputs, or until then on the monotonic clock; ends early after so many different failures."""
    rng = random.Random(f"{seed}/{reader.name}")
    pool = list(reader.corpus)
    seen: set[tuple[Any, ...]] = set()
    known: set[tuple[str, tuple[Any, ...]]] = set()
    row = Row(reader=reader.name)
    mutator = fuzz_mutate.Mutator(rng, reader.shape, reader.fix, reader.hints)
    while (inputs is None or row.inputs < inputs) and (until_s is None or time.monotonic() < until_s):
        data = pool[row.inputs] if row.inputs < len(reader.corpus) else mutator.make(pool, reader.limit_bytes)
        if last is not None:
            note = reader.name.encode() + b"\n" + data
            last[: 8 + len(note)] = len(note).to_bytes(8, "little") + note
        outcome = try_input(reader, data)
        row.inputs += 1
        row.accepted += outcome.is_accepted
        row.refused += not outcome.is_accepted
        row.slowest_ms = max(row.slowest_ms, round(outcome.spent_s * 1000, 1))
        row.largest_memory_ratio = max(row.largest_memory_ratio, round(outcome.memory_ratio, 1))
        if outcome.place not in seen:
            seen.add(outcome.place)
            if len(data) < 20_000 and outcome.failure is None:
                pool.append(data)
                del pool[len(reader.corpus) : -_POOL]
        if outcome.failure is not None:
            key = (outcome.failure.split(":")[0], outcome.place)
            if key not in known:
                known.add(key)
                row.failures.append({"failure": outcome.failure, "seed": seed, "number": row.inputs - 1, **_kept(reader.name, data)})
                if len(known) >= failures:
                    break
        if row.inputs % 500 == 0:
            gc.collect()
    row.places = len(seen)
    return row


def _kept(name: str, data: bytes) -> dict[str, str]:
    """Short inputs as hex, long ones in a file."""
    if len(data) <= 2000:
        return {"hex": data.hex()}
    _BUILD.mkdir(parents=True, exist_ok=True)
    path = _BUILD / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return {"file": str(path)}


# -- processes -------------------------------------------------------------------------------------------------------------

_LAST_BYTES = 1 << 20


def _child(names: list[str], seed: int, inputs: int | None, seconds: float | None, last_path: str) -> int:
    """Fuzzes these readers one after the other and says a line of JSON for each."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with open(last_path, "r+b") as file, mmap.mmap(file.fileno(), _LAST_BYTES) as last, fuzz_readers.readers() as readers:
        for name in names:
            until_s = None if seconds is None else time.monotonic() + seconds
            row = fuzz(readers[name], seed=seed, inputs=inputs, until_s=until_s, last=last)
            print(json.dumps({slot: getattr(row, slot) for slot in Row.__slots__}), flush=True)
    return 0


def _run_child(names: list[str], arguments: argparse.Namespace, seconds: float | None) -> list[dict[str, Any]]:
    """The rows of a process of its own: a reader that kills the interpreter is a finding and not the end."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    last = _BUILD / f"last-{os.getpid()}-{names[0]}.bin"
    last.write_bytes(bytes(_LAST_BYTES))
    command = [sys.executable, __file__, "--child", str(last), "--seed", str(arguments.seed)]
    command += [f"--reader={name}" for name in names]
    command += [] if arguments.inputs is None else ["--inputs", str(arguments.inputs)]
    command += [] if seconds is None else ["--seconds", str(seconds)]
    limit_s = 600.0 if seconds is None else len(names) * seconds + 120.0
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
        text, ending = done.stdout, f"ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        text, ending = (error.stdout or b"").decode(), f"did not end within {limit_s:.0f} s"
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    if ending:
        note = last.read_bytes()
        name, _, data = note[8 : 8 + int.from_bytes(note[:8], "little")].partition(b"\n")
        name_text = name.decode() or names[0]
        failure = {"failure": f"interpreter: {ending}", "seed": arguments.seed, **_kept(name_text, data)}
        rows.append({**{slot: getattr(Row(reader=name_text), slot) for slot in Row.__slots__}, "failures": [failure]})
    last.unlink()
    return rows


def _replay(name: str, path: str) -> int:
    is_hex = re.fullmatch(r"(?:[0-9a-f]{2})*", path) is not None
    data = bytes.fromhex(path) if is_hex else Path(path).read_bytes()
    with fuzz_readers.readers() as readers:
        outcome = try_input(readers[name], data)
        print(outcome)
        with contextlib.suppress(readers[name].documented or ()):
            readers[name].read(data)
    return outcome.failure is not None


def _table(rows: list[dict[str, Any]]) -> str:
    head = f"{'READER':<10} {'INPUTS':>8} {'ACCEPTED':>9} {'REFUSED':>8} {'PLACES':>7} {'SLOWEST':>11} {'MEMORY':>8} {'FAILURES':>9}"
    lines = [
        f"{r['reader']:<10} {r['inputs']:>8} {r['accepted']:>9} {r['refused']:>8} {r['places']:>7} {r['slowest_ms']:>8.1f} ms "
        f"{r['largest_memory_ratio']:>6.1f} x {len(r['failures']):>9}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def _figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for r in rows:
        name = r["reader"]
        count, slow_ms = len(r["failures"]), SLOW_S * 1000
        found.append({"name": f"{name}: failures in {r['inputs']} inputs", "value": count, "unit": "count", "target": 0, "met": not count})
        found.append({"name": f"{name}: slowest input", "value": r["slowest_ms"], "unit": "ms", "target": slow_ms, "met": r["slowest_ms"] <= slow_ms})
        found.append({"name": f"{name}: largest memory, of input or 4 KiB", "value": r["largest_memory_ratio"], "unit": "ratio"})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes every reader of bytes that may be damaged or hostile.")
    parser.add_argument("--minutes", type=float, default=0.1, help="for each reader")
    parser.add_argument("--inputs", type=int, help="so many for each reader, instead of minutes")
    parser.add_argument("--seed", type=int, help="drawn and printed unless given")
    parser.add_argument("--reader", action="append", help="only this one; may be given several times")
    parser.add_argument("--rows", help="write the rows to this file as JSON, and no figures")
    parser.add_argument("--replay", help="file or hex of one input, for the reader that is named")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return _child(arguments.reader, arguments.seed, arguments.inputs, arguments.seconds, arguments.child)
    if arguments.replay:
        return _replay(arguments.reader[0], arguments.replay)
    if arguments.seed is None:
        arguments.seed = int.from_bytes(os.urandom(3), "big")
    with fuzz_readers.readers() as readers:
        names = arguments.reader or list(readers)
        unknown = [name for name in names if name not in readers]
        if unknown:
            parser.error(f"no reader {unknown[0]!r}; there are {', '.join(readers)}")
    rows: list[dict[str, Any]] = []
    if arguments.inputs is not None:
        rows = _run_child(names, arguments, None)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for found in pool.map(lambda name: _run_child([name], arguments, arguments.minutes * 60), names):
                rows += found
                for row in found:
                    print(f"{row['reader']}: {row['inputs']} inputs, {len(row['failures'])} failures", file=sys.stderr, flush=True)
    print(_table(rows))
    failures = [(row["reader"], failure) for row in rows for failure in row["failures"]]
    for name, failure in failures:
        print(
            f"\n{name}: {failure['failure']}\n  seed {failure['seed']}, input {failure.get('number', '?')}: {failure.get('file') or failure['hex']}"
        )
    print(f"\nseed: {arguments.seed}   inputs: {sum(row['inputs'] for row in rows)}   failures: {len(failures)}")
    if arguments.rows:
        Path(arguments.rows).write_text(json.dumps(rows), encoding="utf-8")
    else:
        print(f"figures: {figures.write('fuzz', _figures(rows), seed=arguments.seed)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

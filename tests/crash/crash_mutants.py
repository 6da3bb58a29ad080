"""The store with one sync, order or check taken away: what the suite must be able to see."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from crash_lab import Report, Wrap, check, new_world, seeded_names
from crash_traces import FAST

from ridethrough.errors import Damaged, StorageError
from ridethrough.format import layout
from ridethrough.format.attempt import Run
from ridethrough.format.seal import Seal
from ridethrough.seam.fs import FileSystem, Writer
from ridethrough.store import commit, quarantine, retain, start, verify, writer
from ridethrough.testing import ErrorOn, RecordingFileSystem
from ridethrough.testing.crash_model import Profile
from ridethrough.testing.faults import RecordingWriter


class _Without(RecordingFileSystem):
    """Syncs that `drops` chooses, by call, path and the call before it, do not reach the disk."""

    def __init__(self, inner: FileSystem, drops: Callable[[str, str, str], bool]) -> None:
        super().__init__(inner)
        self._drops = drops
        self._before = None
        self._last = ""

    def _is_dropped(self, call: str, path: str) -> bool:
        last, self._last = self._last, f"{call} {path}"
        return self._drops(call, path, last)

    def create(self, path: str, size_bytes: int) -> Writer:
        self._last = f"create {path}"
        return _WithoutWriter(self, path, self.inner.create(path, size_bytes))

    def make_dir(self, path: str) -> bool:
        self._last = f"make_dir {path}"
        return self.inner.make_dir(path)

    def rename(self, source: str, target: str) -> None:
        self._last = f"rename {target}"
        self.inner.rename(source, target)

    def remove(self, path: str) -> None:
        self._last = f"remove {path}"
        self.inner.remove(path)

    def sync_dir(self, path: str) -> None:
        if not self._is_dropped("sync_dir", path):
            self.inner.sync_dir(path)


class _WithoutWriter:
    def __init__(self, fs: _Without, path: str, inner: Writer) -> None:
        self._fs, self._path, self.inner = fs, path, inner
        self.write, self.close = inner.write, inner.close

    def sync(self) -> None:
        if not self._fs._is_dropped("sync", self._path):
            self.inner.sync()


class _RenameFirst(RecordingFileSystem):
    """A temporary file is synced only once it has its name."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._late: dict[str, Writer] = {}

    def create(self, path: str, size_bytes: int) -> Writer:
        made = self.inner.create(path, size_bytes)
        return _LateWriter(self._late, path, made) if path.endswith(layout.TEMPORARY) else made

    def rename(self, source: str, target: str) -> None:
        self.inner.rename(source, target)
        late = self._late.pop(source, None)
        if late is not None:
            late.sync()
            late.close()


class _LateWriter:
    def __init__(self, late: dict[str, Writer], path: str, inner: Writer) -> None:
        self._late, self._path, self._inner = late, path, inner
        self.write = inner.write

    def sync(self) -> None:
        self._late[self._path] = self._inner

    def close(self) -> None:
        if self._path not in self._late:
            self._inner.close()


class _SealFirst(RecordingFileSystem):
    """A payload reaches the disk only when its seal stands."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._held: dict[str, bytearray] = {}

    def create(self, path: str, size_bytes: int) -> Writer:
        if not path.endswith(".safetensors"):
            return self.inner.create(path, size_bytes)
        return _HeldWriter(self._held.setdefault(path, bytearray()))

    def sync_dir(self, path: str) -> None:
        self.inner.sync_dir(path)
        for name in [name for name in self._held if os.path.dirname(name) == path]:
            if name.removesuffix(".safetensors") + ".seal" in {os.path.join(path, entry) for entry in self.inner.list_dir(path)}:
                data = self._held.pop(name)
                real = self.inner.create(name, len(data))
                real.write(bytes(data))
                real.sync()
                real.close()
                self.inner.sync_dir(path)


class _HeldWriter:
    def __init__(self, held: bytearray) -> None:
        self._held = held

    def write(self, data: bytes | memoryview) -> None:
        self._held += data

    def sync(self) -> None:
        return

    def close(self) -> None:
        return


def without(drops: Callable[[str, str, str], bool]) -> Wrap:
    return lambda fs: _Without(fs, drops)


# -- reordered functions -------------------------------------------------------------------------------------------------


def _delete_payloads_first(fs: FileSystem, run_dir: str, dir_name: str) -> None:
    directory = os.path.join(run_dir, dir_name)
    names = fs.list_dir(directory)
    seals = [n for n in names if n.endswith(".seal")]
    for group in ([n for n in names if n not in seals], seals):
        for name in group:
            fs.remove(os.path.join(directory, name))
        fs.sync_dir(directory)
    fs.remove(directory)
    fs.sync_dir(run_dir)


def _delete_without_a_sync_for_seals_already_gone(fs: FileSystem, run_dir: str, dir_name: str) -> None:
    directory = os.path.join(run_dir, dir_name)
    names = fs.list_dir(directory)
    seals = [n for n in names if n.endswith(".seal")]
    for group in (seals, [n for n in names if n not in seals]):
        for name in group:
            fs.remove(os.path.join(directory, name))
        if group:
            fs.sync_dir(directory)
    fs.remove(directory)
    fs.sync_dir(run_dir)


def _delete_at_once(fs: FileSystem, run_dir: str, dir_name: str) -> None:
    directory = os.path.join(run_dir, dir_name)
    names = fs.list_dir(directory)
    for name in sorted(names, key=lambda name: not name.endswith(".seal")):
        fs.remove(os.path.join(directory, name))
    fs.sync_dir(directory)
    fs.remove(directory)
    fs.sync_dir(run_dir)


@contextlib.contextmanager
def _sync_errors_ignored() -> Iterator[None]:
    real = ErrorOn.enter

    def enter(self: ErrorOn, call: str, path: str) -> None:
        # The kernel reports the error once and the caller goes on: nothing has reached the disk.
        with contextlib.suppress(StorageError):
            real(self, call, path)
            return
        raise _Ignored

    def sync(self: RecordingWriter) -> None:
        with contextlib.suppress(_Ignored):
            self._fs.enter("sync", self._path)
            self.inner.sync()

    with patch.object(ErrorOn, "enter", enter), patch.object(RecordingWriter, "sync", sync):
        yield


class _Ignored(Exception):
    pass


@contextlib.contextmanager
def _prune_before_prove() -> Iterator[None]:
    real = writer.RunWriter.prove

    def prove(self: Any, seals: tuple[Seal, ...]) -> None:
        self.verified.add(seals[0].save_id)
        self.prune(layout.step_dir(seals[0].step, seals[0].save_id))
        real(self, seals)

    with patch.object(writer.RunWriter, "prove", prove):
        yield


def _adopt_marker_first(fs: FileSystem, run_dir: str, run: Run) -> None:
    start.ensure_dir(fs, run_dir)
    start.publish(fs, os.path.join(run_dir, layout.RUN), run.encode())
    for name in (layout.ATTEMPTS, layout.JOURNAL):
        start.ensure_dir(fs, os.path.join(run_dir, name))


@contextlib.contextmanager
def _roster_last() -> Iterator[None]:
    held: list[tuple[str, bytes]] = []

    def publish(fs: FileSystem, path: str, data: bytes) -> None:
        if path.endswith(layout.ROSTER):
            held.append((path, data))
            return
        commit.publish(fs, path, data)
        while held:
            commit.publish(fs, *held.pop())

    with patch.object(start, "publish", publish):
        yield


def _quarantine_payload_first(fs: FileSystem, run_dir: str, dir_name: str, seal: Seal, *, reason: str) -> str:
    target, source = os.path.join(run_dir, layout.QUARANTINE, dir_name), os.path.join(run_dir, dir_name)
    commit.ensure_dir(fs, target)
    for name in (seal.payload_name, seal.payload_name.removesuffix(".safetensors") + ".seal"):
        fs.rename(os.path.join(source, name), os.path.join(target, name))
        fs.sync_dir(target)
        fs.sync_dir(source)
    return target


def _release_seal_first(fs: FileSystem, run_dir: str, held: quarantine.Held, seal: Seal) -> None:
    target, source = os.path.join(run_dir, held.dir_name), os.path.join(run_dir, held.place)
    commit.ensure_dir(fs, target)
    for name in (layout.seal_name(seal.payload_name), seal.payload_name):
        fs.rename(os.path.join(source, name), os.path.join(target, name))
        fs.sync_dir(target)
        fs.sync_dir(source)


def _size_only(fs: FileSystem, run_dir: str, dir_name: str, seal: Seal, *, buffer: memoryview | None = None, **_: Any) -> None:
    path = os.path.join(run_dir, dir_name, seal.payload_name)
    if fs.stat(path).size_bytes != seal.payload_bytes:
        raise Damaged(path=path, detail="its size is wrong")
    if buffer is not None:
        fs.read_into(path, buffer)


def _unchecked(fs: FileSystem, run_dir: str, dir_name: str, seal: Seal, *, buffer: memoryview | None = None, **_: Any) -> None:
    if buffer is not None:
        fs.read_into(os.path.join(run_dir, dir_name, seal.payload_name), buffer)


def _checks(replacement: Callable[..., None]) -> Callable[[], AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with patch.object(verify, "check_part", replacement), patch.object(writer, "check_part", replacement):
            yield

    return both


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One thing taken away, and the stories in which it must be seen."""

    traces: tuple[str, ...]
    wrap: Wrap = lambda fs: fs
    patched: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    parts: int = 2


def _seal(path: str) -> bool:
    return ".seal." in path and path.endswith(layout.TEMPORARY)


MUTANTS: dict[str, Mutant] = {
    "no sync of any file": Mutant(traces=("start", "one save"), wrap=without(lambda call, path, last: call == "sync")),
    "no sync at all": Mutant(traces=("start", "one save"), wrap=without(lambda call, path, last: True)),
    "no sync of the seal before its rename": Mutant(traces=("one save",), wrap=without(lambda call, path, last: call == "sync" and _seal(path))),
    "no sync of the payload": Mutant(traces=("one save",), wrap=without(lambda call, path, last: call == "sync" and path.endswith(".safetensors"))),
    "no sync of the payload's name": Mutant(
        traces=("one save",), wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("sync ") and last.endswith(".safetensors"))
    ),
    "an error of a payload's sync is ignored": Mutant(traces=("failing sync",), patched=_sync_errors_ignored),
    "no sync of any directory": Mutant(traces=("start", "one save"), wrap=without(lambda call, path, last: call == "sync_dir")),
    "no sync of the directory after a rename": Mutant(
        traces=("start", "one save"), wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("rename"))
    ),
    "no sync of the directory after the rename of a seal": Mutant(
        traces=("one save",), wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("rename") and "/step-" in path), parts=1
    ),
    "no sync of the parent after a mkdir": Mutant(
        traces=("start", "one save"), wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("make_dir")), parts=1
    ),
    "no sync of the parent after the mkdir of a checkpoint": Mutant(
        traces=("one save",), wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("make_dir") and "/step-" in last), parts=1
    ),
    "no sync of the directory between removals": Mutant(
        traces=("saves and retention",), wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("remove"))
    ),
    "rename before the sync of the file": Mutant(traces=("start", "one save"), wrap=_RenameFirst),
    "seal before payload": Mutant(traces=("one save",), wrap=_SealFirst),
    "retention deletes payloads before seals": Mutant(
        traces=("saves and retention",), patched=lambda: patch.object(retain, "delete_checkpoint", _delete_payloads_first)
    ),
    "retention deletes seals and payloads under one sync": Mutant(
        traces=("saves and retention",), patched=lambda: patch.object(retain, "delete_checkpoint", _delete_at_once)
    ),
    "retention takes seals that it no longer sees for durably gone": Mutant(
        traces=("killed in a removal",), patched=lambda: patch.object(retain, "delete_checkpoint", _delete_without_a_sync_for_seals_already_gone)
    ),
    "retention deletes before the newer one is verified": Mutant(traces=("first goes bad",), patched=_prune_before_prove),
    "run.json before attempts/": Mutant(traces=("start",), patched=lambda: patch.object(start, "adopt_run", _adopt_marker_first)),
    "attempt.json before roster.json": Mutant(traces=("start",), patched=_roster_last),
    "claim without sync of its file": Mutant(
        traces=("start", "rivals"), wrap=without(lambda call, path, last: call == "sync" and path.endswith(".claim"))
    ),
    "claim without sync of its directory": Mutant(
        traces=("rivals",), wrap=without(lambda call, path, last: call == "sync_dir" and path.endswith("attempts") and ".claim" in last)
    ),
    "quarantine moves the payload before the seal": Mutant(
        traces=("quarantine",), patched=lambda: patch.object(quarantine, "quarantine_part", _quarantine_payload_first)
    ),
    "quarantine syncs only the directory it moves to": Mutant(
        traces=("quarantine",),
        wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("sync_dir") and "quarantine" not in path and "step-" in path),
    ),
    "release moves the seal before the payload": Mutant(
        traces=("release",), patched=lambda: patch.object(quarantine, "release_part", _release_seal_first)
    ),
    "release moves the seal before the payload's name is durable": Mutant(
        traces=("release",),
        wrap=without(lambda call, path, last: call == "sync_dir" and last.startswith("rename") and "/step-" in path and "tensors" in last),
    ),
    "no checksum of the payload": Mutant(traces=("rot",), patched=_checks(_unchecked)),
    "only the size of the payload": Mutant(traces=("rot",), patched=_checks(_size_only)),
}  # fmt: skip


def run(mutant: Mutant, *, profile: Profile = "posix") -> Report:
    """The shortest story, up to its first cut, in which the mutant does harm; one without harm if there is none."""
    found = Report()
    for name in mutant.traces:
        with seeded_names(1), mutant.patched():
            world = new_world(profile=profile, seed=1, wrap=mutant.wrap, parts=mutant.parts)
            FAST[name](world)
            report = check(world)
        if report.wrong and (not found.wrong or report.call_count < found.call_count):
            found = report
    return found

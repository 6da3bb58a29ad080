"""A run on a disk whose power can be cut at any call: what was said so far, what a reader finds, and what may never be."""

from __future__ import annotations

import contextlib
import functools
import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from crash_book import Book, Seen, book_of, judge

from ridethrough.errors import Damaged, RideThroughError, StoreMissing
from ridethrough.format import layout
from ridethrough.seam.fs import FileSystem
from ridethrough.store import quarantine
from ridethrough.store.catalog import Catalog, Checkpoint, candidates, read_catalog, read_run
from ridethrough.store.start import claim_attempt, unfinished_claims
from ridethrough.store.verify import verify_checkpoint
from ridethrough.testing import CrashFS, ErrorOn, SimpleStore, State, load_newest, restorable_steps, save_once
from ridethrough.testing import store as testing_store
from ridethrough.testing.crash_model import Profile
from ridethrough.types import AttemptRef

ROOT = "/disk"
RUN = "/disk/run"
SPOILED_BYTE = -5

Wrap = Callable[[FileSystem], FileSystem]


@contextlib.contextmanager
def seeded_names(seed: int) -> Iterator[None]:
    """Random names follow from the seed, so that a trace is the same again."""
    chance = random.Random(seed)
    real = uuid.uuid4
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128), version=4)
    try:
        yield
    finally:
        uuid.uuid4 = real


@functools.lru_cache(maxsize=4096)
def truth_of(seed: int, part_bytes: int, step: int, part: str) -> tuple[bytes, str]:
    store = SimpleStore(fs=None, run_dir="", seed=seed, part_bytes=part_bytes)  # type: ignore[arg-type]
    return store.truth(step, part), repr(store.state(step, part))


class World:
    """One run on one disk, with everything that was said about it on the disk's timeline.

    Args:
        disk: The disk; marks go to its timeline.
        wrap: What stands between the store and the disk: nothing, or a mutant.
        parts: 1: only the replicated part; 2 and more: and so many ranks, less one, with one each.
    """

    def __init__(
        self, disk: CrashFS, *, wrap: Wrap = lambda fs: fs, seed: int = 0, parts: int = 2, part_bytes: int = 9000, keep_last: int = 2
    ) -> None:
        self.disk = disk
        self.fs = wrap(disk)
        self.wrap = wrap
        self.seed = seed
        self.parts = parts
        self.part_bytes = part_bytes
        self.keep_last = keep_last
        self.truths: dict[str, int] = {}
        self.starts = 0
        self.store = self._new_store()
        self.now = 0
        self.said_before = 0

    def _new_store(self) -> SimpleStore:
        # Each attempt has bytes of its own, so that a mixture would be noticed.
        seed = self.seed * 1000 + self.starts
        self.starts += 1
        store = SimpleStore(
            fs=self.fs, run_dir=RUN, seed=seed, part_bytes=self.part_bytes, world_size=max(self.parts - 1, 1), has_private_parts=self.parts > 1
        )
        store.retention = type(store.retention)(keep_last=self.keep_last)
        return store

    def after(self, state: State) -> World:
        """Power is back on this state, and what was said before still holds."""
        disk = state.fs
        world = World(disk, wrap=self.wrap, seed=self.seed, parts=self.parts, part_bytes=self.part_bytes, keep_last=self.keep_last)
        world.truths = dict(self.truths)
        world.starts = self.starts + 1
        world.now = self.now
        for mark in state.marks:
            disk.mark(mark)
        world.said_before = len(state.marks)
        return world

    # -- what happens ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new attempt goes on from what is there."""
        self.store = self._new_store()
        self.now = self.store.resume()
        self._started(self.store)

    def _started(self, store: SimpleStore) -> None:
        self.truths[store.attempt.nonce] = store.seed
        self.disk.mark(("started", store.run_uid, store.attempt.seq, store.attempt.nonce))

    def claim(self, seq: int, nonce: str, fs: FileSystem | None = None) -> None:
        if claim_attempt(fs or self.fs, RUN, AttemptRef(seq=seq, nonce=nonce), ("node-0",)) is None:
            self.disk.mark(("claimed", seq, nonce))

    def save(self, *, spoil: str | None = None) -> bool:
        """The next step is saved from end to end as the persister does it; False if the disk refused.

        Args:
            spoil: A part whose bytes on the medium go bad as soon as the save was called durable.
        """
        self.now += 10
        store, step = self.store, self.now
        name, place = store.dir_name(step), (store.attempt.seq, step)
        self.truths[store.attempt.nonce] = store.seed
        writer = store.writer(self._note)
        try:
            seals = writer.commit(store.part_save(step, part) for part in store.part_names)
        except RideThroughError:
            return False
        self.disk.mark(("durable", name, *place))
        if spoil is not None:
            self.spoil(name, spoil)
        try:
            writer.describe(step, seals[0].save_id)
            writer.prove(seals)
        except Damaged:
            return False
        except RideThroughError:
            return True
        writer.verified.add(seals[0].save_id)
        self.disk.mark(("verified", name, *place))
        writer.prune(name)
        return True

    def spoil(self, dir_name: str, part: str) -> None:
        [payload] = [n for n in self.disk.list_dir(f"{RUN}/{dir_name}") if n.startswith(f"{part}~") and n.endswith(".safetensors")]
        self.disk.mark(("spoiled", dir_name, part))
        self.disk.flip_bit(f"{RUN}/{dir_name}/{payload}", SPOILED_BYTE)

    def release(self) -> None:
        """The bytes of all that is in quarantine are right again, and it is moved back."""
        for held in quarantine.holdings(self.fs, RUN):
            self.disk.flip_bit(f"{RUN}/{held.place}/{held.file.stem}.safetensors", SPOILED_BYTE)
            seal = quarantine.prove(self.fs, RUN, held, run_uid=self.store.run_uid)
            quarantine.release_part(self.fs, RUN, held, seal)
            self.disk.mark(("released", held.dir_name, held.file.part))

    def _note(self, kind: str, **data: Any) -> None:
        if kind == "checkpoint.removed":
            self.disk.mark(("removing", data["dir_name"]))

    @contextlib.contextmanager
    def failing(self, call: str, error: int, *, nth: int = 1, within: str = "", is_lasting: bool = False, is_late: bool = False) -> Iterator[ErrorOn]:
        """The disk refuses one call."""
        sound = self.fs
        self.fs = self.store.fs = ErrorOn(sound, call, error, nth=nth, within=within, is_lasting=is_lasting, is_late=is_late)
        try:
            yield self.fs
        finally:
            self.fs = self.store.fs = sound

    # -- what a reader finds ---------------------------------------------------------------------------------------

    def states(self, *, limit: int, only: set[int] | None) -> Iterator[State]:
        # What was said in an earlier life was all said before this one's first call.
        return (state for state in self.disk.states(limit=limit, only=only) if state.call_count >= self.said_before)

    def observe(self, state: State) -> Seen:
        """What the real readers say about this state of the disk; the catalog is read once for all of them."""
        fs = state.fs
        seen = Seen()
        try:
            run = read_run(fs, RUN)
            names = fs.list_dir(RUN)
            if missing := {layout.ATTEMPTS, layout.JOURNAL} - set(names):
                seen.wrong.append(f"run.json is there without {sorted(missing)}")
            catalog = read_catalog(fs, RUN)
            with _one_catalog(catalog):
                loaded = load_newest(fs, RUN)
                seen.steps = {step: error and str(error) for step, error in restorable_steps(fs, RUN).items()}
            chosen = candidates(catalog)
        except StoreMissing:
            seen.is_missing = True
            return seen
        except (RideThroughError, OSError) as error:
            seen.wrong.append(f"cannot be read: {error!r}")
            return seen
        seen.run_uid = run.run_uid
        seen.attempts = frozenset((ref.seq, ref.nonce) for ref, _ in catalog.attempts)
        seen.next_seq = catalog.next_seq
        seen.wrong.extend(f"attempt {ref.label} has no roster" for ref, _ in catalog.attempts if catalog.roster_of(ref) is None)
        seen.wrong.extend(f"{problem.path}: {problem.error}" for problem in catalog.problems)
        for checkpoint in catalog.checkpoints:
            if checkpoint not in chosen or seen.steps.get(checkpoint.step):
                seen.broken |= _broken(fs, checkpoint)
        with contextlib.suppress(FileNotFoundError):
            seen.claims = {claim.seq: claim.nonce for claim in unfinished_claims(fs, RUN, above=0)}
        if loaded is not None:
            seen.loaded = (loaded.attempt.seq, loaded.step)
            seen.loaded_dir = loaded.dir_name
            seed = self.truths.get(loaded.attempt.nonce)
            if seed is None:
                seen.wrong.append(f"step {loaded.step} of an attempt that nobody started was loaded")
            else:
                truth = {name: truth_of(seed, self.part_bytes, loaded.step, name) for name in self.store.part_names}
                if {name: (loaded.payloads[name], repr(loaded.states[name])) for name in loaded.payloads} != truth:
                    seen.wrong.append(f"step {loaded.step} was loaded and is not what was saved")
        return seen

    def goes_on(self, state: State, book: Book) -> list[str]:
        """What hinders the next start and the next save on this state."""
        for seq in book.claims:
            if claim_attempt(state.fs, RUN, AttemptRef(seq=seq, nonce="f" * 32), ("node-9",)) is None:
                return [f"number {seq} was given a second time"]
        disk = state.fs
        disk.capacity_bytes = 1 << 40  # a full disk hinders for a reason
        try:
            store = self._new_store()
            store.fs = self.wrap(disk)
            step = store.resume() + 10
            save_once(store, step)
            loaded = load_newest(store.fs, RUN)
        except (RideThroughError, OSError) as error:
            return [f"the next start or save fails: {error!r}"]
        if store.attempt.seq in book.claims:
            return [f"number {store.attempt.seq} was given a second time"]
        if loaded is None or loaded.step != step or not store.is_true(loaded):
            return [f"the next save, of step {step}, loads as {loaded and loaded.step}"]
        return []


@contextlib.contextmanager
def _one_catalog(catalog: Catalog) -> Iterator[None]:
    testing_store.read_catalog = lambda fs, run_dir: catalog  # type: ignore[attr-defined]
    try:
        yield
    finally:
        testing_store.read_catalog = read_catalog  # type: ignore[attr-defined]


def _broken(fs: CrashFS, checkpoint: Checkpoint) -> set[tuple[str, str]]:
    return {(checkpoint.dir_name, result.seal.part) for result in verify_checkpoint(fs, RUN, checkpoint) if result.error is not None}


@dataclass(slots=True)
class Report:
    """What a check found."""

    states: int = 0
    checks: int = 0
    gone_on: int = 0
    used_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    story: str = ""
    call_count: int = 0

    def add(self, other: Report) -> None:
        self.states += other.states
        self.checks += other.checks
        self.gone_on += other.gone_on
        self.used_s += other.used_s
        if other.wrong and not self.wrong:
            self.wrong, self.story, self.call_count = other.wrong, other.story, other.call_count

    def __str__(self) -> str:
        return "\n".join([*self.wrong, self.story])


class Checked(Protocol):
    """A story that has been told, and how its states are judged."""

    def states(self, *, limit: int, only: set[int] | None) -> Iterator[State]: ...

    def observe(self, state: State) -> Seen: ...

    def goes_on(self, state: State, book: Book) -> list[str]: ...


def check(
    world: Checked,
    *,
    go_on_every: int = 25,
    limit: int = 1 << 10,
    only: set[int] | None = None,
    known: dict[int, Seen] | None = None,
    counted: set[int] | None = None,
    visit: Callable[[State], None] | None = None,
) -> Report:
    """Every state that a cut may leave is judged, up to the first one that is wrong.

    Args:
        world: With a story on its disk.
        go_on_every: On one of so many states the next start and save are tried.
        limit: See `CrashFS.states`.
        only: See `CrashFS.states`.
        known: States of earlier stories about runs of the same shape, which are not read again.
        counted: States of earlier stories, which are not counted again.
        visit: Called with each state that equals no earlier one of this story.
    """
    report = Report()
    began_s = time.process_time()
    known = {} if known is None else known
    counted = set() if counted is None else counted
    counted_before = len(counted)
    mine: set[int] = set()
    books: dict[int, Book] = {}
    for state in world.states(limit=limit, only=only):
        book = books.get(len(state.marks))
        if book is None:
            book = books[len(state.marks)] = book_of(state.marks)
        seen = known.get(state.key)
        if seen is None:
            seen = known[state.key] = world.observe(state)
        is_new = state.key not in mine
        mine.add(state.key)
        wrong = judge(book, seen)
        report.checks += 1
        if not wrong and is_new and state.key not in counted and len(mine) % go_on_every == 0:
            report.gone_on += 1
            wrong = world.goes_on(state, book)
        counted.add(state.key)
        if wrong:
            report.wrong, report.story, report.call_count = wrong, state.describe(), state.call_count
            break
        if visit is not None and is_new:
            visit(state)
    report.states = len(counted) - counted_before
    report.used_s = time.process_time() - began_s
    return report


def new_world(*, profile: Profile = "posix", page_bytes: int = 4096, wrap: Wrap = lambda fs: fs, seed: int = 0, **shape: Any) -> World:
    return World(CrashFS(profile=profile, page_bytes=page_bytes, root=ROOT, seed=seed), wrap=wrap, seed=seed, **shape)

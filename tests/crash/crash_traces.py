"""What happens on a disk before its power is cut: each trace is one story, told in calls of the real store."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections.abc import Callable

from crash_lab import World

from ridethrough.format import layout
from ridethrough.store.commit import commit_part
from ridethrough.store.start import remember_run
from ridethrough.testing import RecordingFileSystem
from ridethrough.testing.faults import READS

STATE_DIR = "/disk/state"
A, B = "a" * 32, "b" * 32


def start(world: World) -> None:
    """A run and its first attempt."""
    world.start()


def saves(world: World) -> None:
    """Saves, with retention removing older ones."""
    world.start()
    for _ in range(world.keep_last + 2):
        world.save()


def one_save(world: World) -> None:
    """The shortest story with a checkpoint."""
    world.start()
    world.save()


def quarantine(world: World) -> None:
    """The bytes of a save go bad before they are read back; the next save is well."""
    world.start()
    world.save()
    world.save(spoil=layout.REPLICATED)
    world.save()


def release(world: World) -> None:
    """What went bad reads right again (another controller, say) and is released; then the run goes on."""
    world.start()
    world.save()
    world.save(spoil=layout.REPLICATED)
    world.release()
    world.save()


def rot(world: World) -> None:
    """A verified checkpoint goes bad long after."""
    world.start()
    world.save()
    world.save()
    world.spoil(world.store.dir_name(world.now), layout.REPLICATED)


def first_goes_bad(world: World) -> None:
    """The newest of two goes bad with keep_last=1: the older one is all there is."""
    world.keep_last = 1
    world.start()
    world.save()
    world.save(spoil=layout.REPLICATED)


def full_disk(world: World) -> None:
    """A save finds no room for its second part, the next one does."""
    world.start()
    world.save()
    with world.failing("create", errno.ENOSPC, nth=3, is_lasting=False):
        world.save()
    world.save()


def small_disk(world: World) -> None:
    """The disk holds two checkpoints and a bit: saves fail in earnest."""
    world.disk.capacity_bytes = 30_000 + 3 * world.parts * world.part_bytes
    world.keep_last = 1
    world.start()
    for _ in range(3):
        world.save()
    filler = world.disk.create("/disk/filler", max(world.disk.usage("/disk").free_bytes - world.part_bytes - 4000, 0))
    filler.close()
    world.save()
    world.disk.remove("/disk/filler")
    world.save()


def restarts(world: World) -> None:
    """Three attempts, each with a save."""
    for _ in range(3):
        world.start()
        world.save()


def memory(world: World) -> None:
    """A node remembers its run."""
    world.start()
    remember_run(world.fs, STATE_DIR, "/disk/run", world.store.run_uid, "shared")
    remember_run(world.fs, STATE_DIR, "/disk/run", world.store.run_uid, "node-local")


def failing_save(call: str, error: int, nth: int, *, is_late: bool = False, is_lasting: bool = False) -> Callable[[World], None]:
    """A save of which one call fails, between two that succeed."""

    def story(world: World) -> None:
        world.start()
        world.save()
        with world.failing(call, error, nth=nth, is_late=is_late, is_lasting=is_lasting):
            world.save()
        world.save()

    return story


class Killed(BaseException):
    """The process is gone: nothing that it would have cleaned up is cleaned up."""


def killed(is_now: Callable[[str, str], bool]) -> Callable[[World], None]:
    """The process is killed at one of the calls of a save; the next process finds what it left, with power on."""

    def story(world: World) -> None:
        world.keep_last = 1
        world.start()
        world.save()
        is_dead = False

        def before(call: str, path: str) -> None:
            nonlocal is_dead
            is_dead = is_dead or is_now(call, path)
            if is_dead:
                raise Killed

        sound = world.fs
        world.fs = world.store.fs = RecordingFileSystem(sound, before=before)
        with contextlib.suppress(Killed):
            world.save()
        world.fs = sound
        world.start()
        world.save()

    return story


def at_change(number: int) -> Callable[[str, str], bool]:
    """So many calls that change something have been made."""
    left = [number]

    def is_now(call: str, path: str) -> bool:
        left[0] -= call not in READS
        return left[0] < 0

    return is_now


def in_a_removal() -> Callable[[str, str], bool]:
    """Seals have been removed, and their directory not yet been synced."""
    removed: list[str] = []

    def is_now(call: str, path: str) -> bool:
        if call == "remove" and path.endswith(".seal"):
            removed.append(path)
        return call == "sync_dir" and bool(removed)

    return is_now


def killed_in_a_removal(world: World) -> None:
    """The next process removes the payloads of seals that are gone for every reader, and not durably."""
    killed(in_a_removal())(world)


CALLS_OF_A_SAVE = 75
"""That change something, with retention."""


def rivals(at_call: int) -> Callable[[World], None]:
    """Another start claims the same number while the first is at one of its calls; then both try a whole start."""

    def story(world: World) -> None:
        world.start()
        seq = world.store.attempt.seq + 1
        left = [at_call]

        def before(call: str, path: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                world.claim(seq, B)

        world.claim(seq, A, RecordingFileSystem(world.fs, before=before))
        world.claim(seq, B)

    return story


class Turns:
    """Threads that take turns at the disk in an order that a seed decides: one call, then whoever is next."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._condition = threading.Condition()
        self._waiting: set[int] = set()
        self._alive: set[int] = set()
        self._turn = -1

    def run(self, *actions: Callable[[Callable[[str, str], None]], None]) -> None:
        """Each action is done, with a hook to call before it touches the disk."""
        self._alive = set(range(len(actions)))
        errors: list[BaseException] = []

        def body(me: int) -> None:
            try:
                actions[me](lambda call, path: self._wait(me))
            except BaseException as error:  # noqa: BLE001 - raised again by the thread of the test
                errors.append(error)
            finally:
                with self._condition:
                    self._alive.discard(me)
                    self._choose()

        threads = [threading.Thread(target=body, args=(me,)) for me in range(len(actions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _wait(self, me: int) -> None:
        with self._condition:
            self._waiting.add(me)
            self._choose()
            self._condition.wait_for(lambda: self._turn == me)
            self._turn = -1
            self._waiting.discard(me)

    def _choose(self) -> None:
        # Only when everybody stands before a call is it known who could be next.
        if self._turn == -1 and self._waiting and self._waiting == self._alive:
            self._turn = self._chance.choice(sorted(self._waiting))
            self._condition.notify_all()


def interleaved_claims(seed: int) -> Callable[[World], None]:
    """Two starts want the same number, call by call in a random order."""

    def story(world: World) -> None:
        world.start()
        seq = world.store.attempt.seq + 1
        Turns(seed).run(
            lambda hook: world.claim(seq, A, RecordingFileSystem(world.fs, before=hook)),
            lambda hook: world.claim(seq, B, RecordingFileSystem(world.fs, before=hook)),
        )

    return story


def several_writers(seed: int) -> Callable[[World], None]:
    """Each part of a save is written by a thread of its own, as several nodes do in a shared directory."""

    def story(world: World) -> None:
        world.start()
        world.save()
        world.now += 10
        store, step = world.store, world.now

        def write(part: str) -> Callable[[Callable[[str, str], None]], None]:
            return lambda hook: void(commit_part(RecordingFileSystem(world.fs, before=hook), store.run_dir, store.part_save(step, part)))

        Turns(seed).run(*(write(part) for part in store.part_names))
        world.disk.mark(("durable", store.dir_name(step), store.attempt.seq, step))

    return story


def void(_: object) -> None:
    return None


FAST: dict[str, Callable[[World], None]] = {
    "start": start,
    "one save": one_save,
    "saves and retention": saves,
    "quarantine": quarantine,
    "release": release,
    "rot": rot,
    "first goes bad": first_goes_bad,
    "full disk": full_disk,
    "failing sync": failing_save("sync", errno.EIO, 1),
    "small disk": small_disk,
    "killed in a removal": killed_in_a_removal,
    "restarts": restarts,
    "memory": memory,
    "rivals": rivals(6),
    "interleaved claims": interleaved_claims(1),
    "several writers": several_writers(1),
}

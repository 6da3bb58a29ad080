"""A common order of the calls of several disks, and the states that a power cut after any of them may leave."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridethrough.testing.crash_model import EXHAUSTIVE_STATES, Call, Change, Image, Medium, landings

if TYPE_CHECKING:
    from ridethrough.testing.crash import CrashFS


class Timeline:
    """The calls of one or several disks, of all their users, in one order.

    Args:
        seed: Decides which of too many states are looked at.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.calls: list[Call] = []
        self.disks: dict[str, CrashFS] = {}
        self.lock = threading.RLock()
        self.serials = itertools.count(1)

    def mark(self, said: Any) -> None:
        """From this call on somebody has been told so: a cut after it must not make it a lie."""
        with self.lock:
            self.calls.append(Call(disk="", name="mark", path="", said=said))

    def states(
        self, *, hit: Collection[str] | None = None, limit: int = EXHAUSTIVE_STATES, random_count: int = 32, only: Collection[int] | None = None
    ) -> Iterator[State]:
        """What may be on the disks after a power cut, for a cut after each call; a state that was there with the same marks is not repeated.

        Args:
            hit: Names of the disks that lose power; the others are as their users see them. All unless given.
            limit: States up to which all of a cut are enumerated.
            random_count: Random ones where there are more.
            only: Cuts after so many calls, instead of after each.
        """
        chance = random.Random(self.seed)  # noqa: S311 - a repeatable choice, no secret
        media = {name: disk.medium() for name, disk in self.disks.items()}
        struck = [name for name in media if hit is None or name in hit]
        marks: tuple[Any, ...] = ()
        seen: set[tuple[int, int]] = set()
        for count in range(len(self.calls) + 1):
            if count:
                call = self.calls[count - 1]
                if call.name == "mark":
                    marks = (*marks, call.said)
                elif call.changes or call.synced:
                    media[call.disk].apply(call)
                elif only is None:
                    continue
            if only is not None and count not in only:
                continue
            for landed in _joint({name: media[name] for name in struck}, limit, random_count, chance):
                images = {name: medium.image(landed.get(name, medium.pending)) for name, medium in media.items()}
                keys = [image.key() for image in images.values()]
                key = hash(tuple(keys)) if len(keys) > 1 else keys[0]
                if (key, len(marks)) not in seen:
                    seen.add((key, len(marks)))
                    pending = {name: tuple(media[name].pending) for name in struck}
                    yield State(timeline=self, call_count=count, marks=marks, key=key, images=images, landed=landed, pending=pending)


def _joint(media: dict[str, Medium], limit: int, random_count: int, chance: random.Random) -> Iterator[dict[str, tuple[Change, ...]]]:
    if len(media) == 1:
        [(name, medium)] = media.items()
        for landed in landings(medium.pending, profile=medium.profile, limit=limit, random_count=random_count, chance=chance):
            yield {name: landed}
        return
    found = {
        name: list(landings(medium.pending, profile=medium.profile, limit=limit, random_count=random_count, chance=chance))
        for name, medium in media.items()
    }
    total = 1
    for choices in found.values():
        total *= len(choices)
    if total <= limit:
        for choice in itertools.product(*found.values()):
            yield dict(zip(found, choice, strict=True))
        return
    # Each choice of each disk at least once, beside any of the other disks.
    for name, choices in found.items():
        for landed in choices:
            yield {**{other: chance.choice(found[other]) for other in found}, name: landed}
    for _ in range(random_count):
        yield {name: chance.choice(choices) for name, choices in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What one power cut left."""

    timeline: Timeline = field(repr=False)
    call_count: int
    """Calls and marks that came before the cut."""
    marks: tuple[Any, ...]
    """What had been said by then."""
    key: int
    """Equal for states that no reader can tell apart."""
    images: dict[str, Image] = field(repr=False)
    landed: dict[str, tuple[Change, ...]]
    pending: dict[str, tuple[Change, ...]]

    @property
    def fs(self) -> CrashFS:
        """The only disk, after power's return, with a timeline of its own: it can be read, written and cut again."""
        [fs] = self.disks().values()
        return fs

    def disks(self) -> dict[str, CrashFS]:
        """The disks after power's return, with one new timeline."""
        timeline = Timeline(seed=self.timeline.seed)
        return {name: self.timeline.disks[name].reborn(image, timeline) for name, image in self.images.items()}

    def describe(self) -> str:
        """The calls that changed something, up to the cut, and what of the pending changes had landed; for people."""
        owner = {change.serial: call for call in self.timeline.calls for change in call.changes}
        lines = []
        for number, call in enumerate(self.timeline.calls[: self.call_count], start=1):
            if call.name == "mark":
                lines.append(f"{number:5}  -- said: {call.said}")
            elif call.changes or call.synced:
                lines.append(f"{number:5}  {call.disk} {call.name} {call.path}")
        lines.append(f"       == power cut of {' and '.join(self.pending)} after call {self.call_count}")
        for name, pending in self.pending.items():
            landed = {change.serial for change in self.landed[name]}
            for change in pending:
                fate = "landed" if change.serial in landed else "lost  "
                call = owner[change.serial]
                lines.append(f"       {fate} {name} {change} of {call.name} {call.path}")
        return "\n".join(lines)

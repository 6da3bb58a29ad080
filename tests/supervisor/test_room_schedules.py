"""Faults in any order, from a seed. `Room` itself checks after every round what must never happen; here it must also end well."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from room_node import CRASHED
from room_of import Room

from ridethrough.testing.network import Weather

PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0)


class Schedule:
    """Up to six faults, and what is broken is mended in the end."""

    def __init__(self, seed: int, *, is_configured: bool) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        self.room = Room(
            chance.choice([2, 3, 4, 4, 5]),
            seed=seed,
            is_configured=is_configured,
            is_shared=chance.random() < 0.7,
            weather=Weather(delay_s=(0.001, 0.01), loss_ratio=chance.choice([0, 0, 0.1, 0.2]), duplicate_ratio=0.05, replay_ratio=0.02),
            rendezvous_s=900.0,
            step_s=chance.choice([0.1, 0.2, 0.4]),
            save_every=chance.choice([10, 25]),
            write_s=chance.choice([0.1, 0.3, 1.5]),
        )
        self.done: list[str] = []

    def play(self) -> None:
        faults = (
            self.cut, self.cut, self.cut, self.cut_room, self.boot_one, self.restart, self.freeze, self.kill_supervisor, self.part, self.part,
            self.silence, self.heal, self.crash, self.stall, self.hang_storage, self.fail_save,
        )  # fmt: skip
        self.room.run_for(self.chance.uniform(0.0, 8.0))
        for _ in range(self.chance.randint(1, 6)):
            if not self.living:
                break
            fault: Callable[[], object] = self.chance.choice(faults)
            self.done.append(f"{self.room.now_s - 1000:.1f} {fault.__name__}")
            fault()
            self.room.run_for(self.chance.choice(PAUSES_S))
        self.mend()

    @property
    def living(self) -> list[str]:
        return [n for n, node in self.room.nodes.items() if node.is_on]

    @property
    def dark(self) -> list[str]:
        return [n for n, node in self.room.nodes.items() if not node.is_on and node.exit is None]

    @property
    def any(self) -> str:
        return self.chance.choice(self.living)

    def cut(self) -> None:
        self.room.cut(*self.chance.sample(self.living, self.chance.randint(1, min(2, len(self.living)))))

    def cut_room(self) -> None:
        self.room.cut(*self.living)

    def boot_one(self) -> None:
        if self.dark:
            self.room.power_on(self.chance.choice(self.dark))

    def restart(self) -> None:
        self.room.restart(self.any)

    def freeze(self) -> None:
        self.room.freeze(self.any, self.chance.choice([1.0, 3.0, 20.0]))

    def kill_supervisor(self) -> None:
        self.room.kill_supervisor(self.any)

    def part(self) -> None:
        self.room.heal()
        some = self.chance.sample(self.room.names, self.chance.randint(1, len(self.room.names) - 1))
        self.room.part(some, [n for n in self.room.names if n not in some], data=self.chance.random() < 0.5)

    def silence(self) -> None:
        self.room.silence(self.any)

    def heal(self) -> None:
        self.room.heal()
        self.room.hanging.clear()

    def crash(self) -> None:
        name = self.any
        worker = self.room.nodes[name].keeper.worker
        if worker is not None and worker.is_alive and worker.job is not None and worker.step > worker.job.restored_step:
            line = self.chance.randint(1, 10_000)  # the same failure twice would rightly stop the run
            self.room.crash(name, CRASHED.replace("line 12", f"line {line}"), others_after_s=self.chance.choice([0.5, 2.0, None]))

    def stall(self) -> None:
        self.room.stall(self.any, self.chance.choice([5.0, 30.0]))

    def hang_storage(self) -> None:
        self.room.hanging.add(self.any)

    def fail_save(self) -> None:
        self.room.fail_save(self.any)

    def mend(self) -> None:
        self.done.append(f"{self.room.now_s - 1000:.1f} mend")
        self.heal()
        if self.dark:
            self.room.power_on(*self.dark)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_in_whatever_order_the_job_trains_and_saves_again_when_all_is_mended(seed: int) -> None:
    schedule = Schedule(seed, is_configured=seed % 4 != 3)
    room = schedule.room
    schedule.play()

    def trains() -> bool:
        jobs = {id(room.worker(n).job) for n in room.steps}
        return room.step > 1 and len(jobs) == 1

    try:
        room.run_until(trains, limit_s=300)
        newest = room.step
        room.run_until(lambda: room.confirmed_step() >= newest, limit_s=200)
    except AssertionError as error:
        raise AssertionError(f"{schedule.done}: {error}") from error
    opened = [e.data["opened_at"] for e in room.all_events("incident") if "opened_at" in e.data]
    assert len(opened) == len(set(opened)), "an incident is on record twice"

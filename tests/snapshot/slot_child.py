"""Posts snapshots into a slot as fast as it can (`write`), or pins one and waits (`pin STEP`), until it is killed."""

from __future__ import annotations

import sys
import time

import xxhash

from ridethrough.snapshot.slots import PAGE, Slot

PAYLOAD_BYTES = 200_000


def payload(step: int) -> bytes:
    """Bytes that follow from the step."""
    return bytes([step % 251]) * PAYLOAD_BYTES


def post(slot: Slot, step: int) -> None:
    """A whole snapshot of the step."""
    data = payload(step)
    assert slot.begin()
    slot.memory[PAGE : PAGE + len(data)] = data
    entry = {"name": "part", "at": PAGE, "size_bytes": len(data), "tree": {"sum": xxhash.xxh3_64_hexdigest(data)}}
    slot.post(step, {"step": step, "parts": [entry]}, PAGE + len(data))


def main() -> None:
    slot = Slot(int(sys.argv[1]))
    if sys.argv[2] == "pin":
        assert slot.pin(int(sys.argv[3]))
        print("ready", flush=True)
        time.sleep(60)
    step = 0
    print("ready", flush=True)
    while True:
        step += 1
        post(slot, step)


if __name__ == "__main__":
    main()

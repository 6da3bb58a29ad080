"""A training job without ridethrough: an all-reduce a step, to see how long plain torchrun hangs when a node goes silent.

Run as ``torchrun … plain_job.py TRACE TIMEOUT_S``; each rank writes the time of each step, and of its error, to TRACE.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
    trace = Path(sys.argv[1], f"rank-{os.environ['RANK']}.jsonl")

    def say(**fields: object) -> None:
        with trace.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": time.monotonic(), **fields}) + "\n")

    gradient = torch.ones(1 << 16)
    for step in range(1, 10_000):
        try:
            dist.all_reduce(gradient)
        except RuntimeError as error:
            say(error=str(error).splitlines()[0])
            raise
        gradient /= dist.get_world_size()
        say(step=step)
        time.sleep(0.1)


if __name__ == "__main__":
    main()

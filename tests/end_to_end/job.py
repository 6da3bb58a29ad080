"""One `ridethrough run` of the trainee, as a test drives it: start, wait for a step, kill, look at what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.errors import KeeperGone
from ridethrough.seam import process
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot.address import find_socket
from ridethrough.snapshot.link import SOCKET_VARIABLE, KeeperLink
from ridethrough.testing import restorable_steps

TRAINEE = str(Path(__file__).with_name("trainee.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=0")
DEADLINE_S = 90.0


def wait_for(what: str, is_so: Callable[[], Any], *, deadline_s: float = DEADLINE_S) -> Any:
    """The first true answer; fails the test when there is none in time."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        found = is_so()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline_s:.0f} s: {what}")


@dataclass(slots=True)
class Job:
    """A run directory and the commands given for it. `close` ends whatever is left of them."""

    root: Path
    ranks: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    commands: list[subprocess.Popen[str]] = field(default_factory=list)
    sockets: set[str] = field(default_factory=set)
    output: str = ""

    def __post_init__(self) -> None:
        self.tells.mkdir(parents=True, exist_ok=True)

    @property
    def run_dir(self) -> str:
        return str(self.root / "run")

    @property
    def tells(self) -> Path:
        return self.root / "tells"

    @property
    def all_environment(self) -> dict[str, str]:
        own = {"RIDETHROUGH_STATE_DIR": str(self.root / "state"), "RIDETHROUGH_NODE": "node-0", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own, **self.environment}

    @property
    def trainer_command(self) -> list[str]:
        launcher = (*TORCHRUN, f"--nproc-per-node={self.ranks}") if self.ranks > 1 else ()
        return [sys.executable, *launcher, TRAINEE, self.run_dir, str(self.tells)]

    def start(self, *options: str, command: Iterable[str] | None = None) -> subprocess.Popen[str]:
        """`ridethrough run` of the trainee, or of another command."""
        return self._popen([sys.executable, "-m", "ridethrough", "run", *options, "--", *(command or self.trainer_command)])

    def start_alone(self) -> subprocess.Popen[str]:
        """The trainee without `ridethrough run`."""
        return self._popen(self.trainer_command)

    def _popen(self, argv: list[str]) -> subprocess.Popen[str]:
        log = open(self.root / f"output-{len(self.commands)}.txt", "w")  # noqa: SIM115  the child's
        try:
            started = subprocess.Popen(argv, env=self.all_environment, stdout=log, stderr=log, text=True, start_new_session=True)
        finally:
            log.close()
        self.commands.append(started)
        return started

    def finish(self, command: subprocess.Popen[str] | None = None, *, deadline_s: float = DEADLINE_S) -> int:
        """The exit code of the newest command, or of this one."""
        found = command or self.commands[-1]
        code = wait_for("the command ends", lambda: (found.poll() is not None) and (found.returncode,), deadline_s=deadline_s)[0]
        assert isinstance(code, int)
        return code

    def run(self, *options: str, command: Iterable[str] | None = None) -> int:
        """Started and finished."""
        return self.finish(self.start(*options, command=command))

    @property
    def shown(self) -> str:
        """What the commands have printed."""
        return "\n".join(p.read_text(errors="replace") for p in sorted(self.root.glob("output-*.txt")))

    # -- what the trainee tells ------------------------------------------------------------------------------------

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.tells / f"steps-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def steps(self, rank: int = 0) -> list[int]:
        """Every step made, in the order in which they were made."""
        return [line["step"] for line in self._lines(rank) if "step" in line]

    def restored(self, rank: int = 0) -> list[int]:
        """The step that each start went on from."""
        return [line["restored"] for line in self._lines(rank) if "restored" in line]

    def digests(self, rank: int = 0) -> dict[int, str]:
        """Digest of weights and optimizer by step; a step made twice must have come out the same."""
        found: dict[int, str] = {}
        for line in self._lines(rank):
            if "step" in line:
                assert found.setdefault(line["step"], line["digest"]) == line["digest"], f"step {line['step']} of rank {rank} came out differently"
        return found

    def wait_for_step(self, step: int, *, starts: int = 1) -> None:
        """Every rank has made the step in its newest of so many starts."""

        def is_there() -> bool:
            codes = [c.returncode for c in self.commands if c.poll() is not None]
            assert not codes or codes[-1] is None or self.commands[-1].poll() is None, f"the command ended with {codes[-1]}:\n{self.shown[-4000:]}"
            return all(len(self.restored(r)) >= starts and max(self.steps(r)[-1:], default=-1) >= step for r in range(self.ranks))

        wait_for(f"step {step}", is_there)

    def trainer_pids(self) -> list[int]:
        """Every trainer there ever was."""
        return [int(path.name.split("-")[2]) for path in self.tells.glob("pid-*")]

    def newest_pids(self) -> list[int]:
        """The trainers of the newest start, by rank."""
        return [[line["pid"] for line in self._lines(rank) if "pid" in line][-1] for rank in range(self.ranks)]

    # -- processes -------------------------------------------------------------------------------------------------

    def socket(self) -> str | None:
        """Where the run's keeper answers."""
        before = os.environ.get("RIDETHROUGH_STATE_DIR")
        os.environ["RIDETHROUGH_STATE_DIR"] = str(self.root / "state")
        try:
            found = find_socket(os.path.realpath(self.run_dir))
        finally:
            if before is None:
                del os.environ["RIDETHROUGH_STATE_DIR"]
            else:
                os.environ["RIDETHROUGH_STATE_DIR"] = before
        if found:
            self.sockets.add(found)
        return found

    def look(self) -> dict[str, Any]:
        """The keeper's own answer."""
        path = wait_for("a keeper answers", self.socket)
        link = KeeperLink(path, role="test")
        try:
            return link.request("look")
        finally:
            link.close()

    def helper_pid(self, role: str) -> int:
        """The supervisor or the persister."""
        return int(self.look()["helpers"][role]["pid"])

    def workers_left(self) -> list[int]:
        """Processes that a keeper of this run has started and that still live."""
        return [pid for path in self.sockets for pid in process.processes_with_environment(SOCKET_VARIABLE, path)]

    def durable(self) -> list[int]:
        """Steps that can be restored, by their bytes."""
        return sorted(step for step, error in restorable_steps(PosixFileSystem(), self.run_dir).items() if error is None)

    def journal(self) -> list[dict[str, Any]]:
        """Every event, oldest first."""
        files = sorted((Path(self.run_dir) / "journal").glob("*.jsonl"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Data of the events of a kind."""
        return [event["data"] for event in self.journal() if event["kind"] == kind]

    def close(self) -> None:
        """Nothing that was started here is left."""
        self.socket()
        for command in self.commands:
            if command.poll() is None:
                command.send_signal(signal.SIGKILL)
                command.wait(10)
        process.send_signal(self.workers_left(), signal.SIGKILL)
        path = self.socket()
        with contextlib.suppress(KeeperGone):  # it has just ended by itself
            if path is not None:  # a library's keeper, which is nobody's child
                link = KeeperLink(path, role="test")
                process.send_signal([int(link.request("look")["keeper_pid"])], signal.SIGKILL)
                link.close()


def is_gone(pid: int) -> bool:
    return not process.is_alive(pid)

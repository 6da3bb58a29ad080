"""The keeper: holds memory, starts processes, answers questions. Nothing here waits for storage.

It must outlive everything else on the node short of a power cut, so it stays small: one thread,
one loop, no state that would have to survive it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ridethrough.errors import KeeperGone, RideThroughError, StoreLocked
from ridethrough.seam import net, process
from ridethrough.seam.clock import Clock
from ridethrough.snapshot import link as names

Role = Callable[[str], None]
"""A long-running helper: gets the socket path, returns never."""

_RESTART_PAUSES_S = (0.0, 0.2, 1.0, 5.0)
_LIVED_LONG_S = 30.0


@dataclass(slots=True)
class _Helper:
    role: str
    function: Role
    pid: int = 0
    started_s: float = 0.0
    restarts: int = 0
    quick_deaths: int = 0
    due_s: float | None = 0.0


@dataclass(slots=True)
class _Command:
    launch: int = 0
    pid: int = 0
    status: int | None = None
    ended_s: float | None = None
    stderr: int = -1


@dataclass(slots=True)
class _Ending:
    code: int | None = None
    message: str = ""
    signals: list[int] = field(default_factory=list)


class Keeper:
    """One per run and node.

    Args:
        clock: For restart pauses.
        socket_path: Where it answers.
        helpers: The supervisor and the persister, by role.
        facts: Told to everybody who says hello (the command, whether a library started us, …).
    """

    def __init__(self, clock: Clock, socket_path: str, helpers: Mapping[str, Role], facts: Mapping[str, Any]) -> None:
        self._clock = clock
        self._socket_path = socket_path
        self._facts = dict(facts)
        self._helpers = [_Helper(role=role, function=function) for role, function in helpers.items()]
        self._memory: dict[str, tuple[int, int]] = {}
        self._command = _Command()
        self._launches = 0
        self._greeted: dict[int, int | None] = {}
        self._joined: dict[int, int | None] = {}
        self._ending = _Ending()
        self._lock: process.FileLock | None = None
        self._run_dir: str | None = None
        self._server: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._caught: list[int] = []
        self._wants_peers = False
        self._began_s = clock.monotonic_s()

    # -- life ------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until the supervisor says that the run is over; returns the exit code to end with."""
        process.require_linux("ridethrough run")
        process.adopt_orphans()
        process.set_name("rt-keeper")
        self._server = net.listen(self._socket_path)
        self._server.setblocking(False)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(wake_read, selectors.EVENT_READ)
        try:
            while self._ending.code is None:
                self._start_due_helpers()
                self._round(wake_read)
            return self._ending.code
        finally:
            self._stop_everything()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket_path)

    def _on_signal(self, number: int, _frame: object) -> None:
        # Only an attribute is set; the wake-up descriptor gets the loop going.
        self._caught.append(number)

    def _round(self, wake_read: int) -> None:
        due = [h.due_s for h in self._helpers if h.due_s is not None]
        wait_s = min([1.0, *(max(d - self._clock.monotonic_s(), 0.0) for d in due)])
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._server:
                self._accept()
            elif key.fd == wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._serve(key.fileobj)
        caught, self._caught = self._caught, []
        wanted = [number for number in caught if number != signal.SIGCHLD]
        self._ending.signals.extend(wanted)
        if len(self._ending.signals) >= 3 and wanted:
            # Somebody has asked three times: no more waiting for saves.
            self._ending.code = 128 + wanted[-1]
        self._reap()

    def _accept(self) -> None:
        assert self._server is not None
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._server.accept()
            connection.settimeout(1.0)
            self._connections.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _hang_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()

    # -- children --------------------------------------------------------------------------------------------------

    def _start_due_helpers(self) -> None:
        for helper in self._helpers:
            if helper.due_s is not None and self._clock.monotonic_s() >= helper.due_s:
                helper.due_s = None
                helper.started_s = self._clock.monotonic_s()
                function = helper.function
                helper.pid = process.fork_function(
                    lambda function=function: function(self._socket_path),  # type: ignore[misc]
                    name=f"rt-{helper.role}",
                )

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            now_s = self._clock.monotonic_s()
            if pid == self._command.pid and self._command.status is None:
                self._command.status = os.waitstatus_to_exitcode(status)
                self._command.ended_s = now_s
            for helper in self._helpers:
                if helper.pid == pid:
                    helper.pid = 0
                    helper.restarts += 1
                    lived_long = now_s - helper.started_s > _LIVED_LONG_S
                    helper.quick_deaths = 0 if lived_long else helper.quick_deaths + 1
                    pause_s = _RESTART_PAUSES_S[min(helper.quick_deaths, len(_RESTART_PAUSES_S)) - 1] if helper.quick_deaths else 0.0
                    helper.due_s = now_s + pause_s

    def _workers(self) -> list[int]:
        """Every process that the command has left on this node."""
        helpers = {h.pid for h in self._helpers}
        return [pid for pid in process.descendants(os.getpid()) if pid not in helpers]

    def _stop_everything(self) -> None:
        for helper in self._helpers:
            helper.due_s = None
        # Nobody may go on training whose snapshots nobody holds any more.
        for _ in range(50):
            left = process.descendants(os.getpid())
            if not left:
                break
            process.send_signal(left, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            self._clock.sleep(0.02)
        if self._lock is not None:
            self._lock.release()

    # -- questions -------------------------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        try:
            message, descriptors = net.receive(connection)
        except KeeperGone:
            self._hang_up(connection)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        given: list[int] = []
        try:
            handler = _HANDLERS.get(str(message.get("op")))
            if handler is None:
                answer: dict[str, Any] = {"error": {"message": f"unknown question {message.get('op')!r}"}}
            else:
                answer = handler(self, message, given)
        except RideThroughError as error:
            answer = {"error": {**{k: str(v) for k, v in error.fields.items()}, **error.as_dict()}}
        except (OSError, KeyError, TypeError, ValueError) as error:
            # A question that makes no sense, or memory that cannot be had, is the asker's problem and not ours.
            answer = {"error": {"message": f"{type(error).__name__}: {error}"}}
        try:
            net.send(connection, answer, given)
        except KeeperGone:
            self._hang_up(connection)

    def _hello(self, message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        if message.get("role") == "trainer":
            pid = int(message["pid"])
            self._greeted[pid] = process.start_time(pid)
        return {"keeper_pid": os.getpid(), **self._facts}

    def _names(self, _message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        return {"names": {name: size for name, (_, size) in self._memory.items()}}

    def _memory_op(self, message: dict[str, Any], given: list[int]) -> dict[str, Any]:
        name, size = str(message["name"]), int(message["size_bytes"])
        held = self._memory.get(name)
        if held is not None and size and held[1] != size and name.split("/")[1:2] in (["slot"], ["replica"]):
            # A rank's state has grown: readers find the new size in the list of names and map anew. A board never
            # changes: a `status` of another version that asks for another size must not take it from its writer.
            os.close(held[0])
            held = None
        if held is None:
            if not size:
                raise KeyError(name)
            held = (process.memory_file(name.replace("/", "-"), size), size)
            self._memory[name] = held
        given.append(held[0])
        return {"size_bytes": held[1]}

    def _free(self, message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        prefix = str(message["prefix"])
        gone = [name for name in self._memory if name.startswith(prefix)]
        for name in gone:
            os.close(self._memory.pop(name)[0])
        return {"freed": len(gone)}

    def _claim(self, message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        return {"left_behind": self.claim(str(message["run_dir"]), str(message["lock_path"]))}

    def claim(self, run_dir: str, lock_path: str) -> int:
        """This keeper owns the run on this node; returns how many trainers of a dead keeper were ended.

        Raises:
            StoreLocked: Another keeper owns it, or this one owns another.
        """
        if self._run_dir is not None:
            if self._run_dir != run_dir:
                raise StoreLocked(path=run_dir, holder=f"process {os.getpid()}, which keeps {self._run_dir}: one run a command")
            return 0
        lock = process.FileLock(lock_path)
        previous = lock.acquire(run=run_dir, note=self._socket_path).split("\n")
        self._lock, self._run_dir = lock, run_dir
        # Trainers of a keeper that is dead (the lock was free) are fenced for good: frozen ones too.
        left = (
            process.processes_with_environment(names.SOCKET_VARIABLE, previous[1]) if len(previous) > 1 and previous[1] != self._socket_path else []
        )
        process.send_signal(left, signal.SIGKILL)
        return len(left)

    def _launch(self, _message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        alive = [pid for pid, started in self._joined.items() if process.is_alive(pid, started)]
        if alive:
            raise StoreLocked(path=str(self._run_dir), holder=f"process {alive[0]}, which trains it")
        self._joined.clear()
        self._launches += 1
        return {"launch": self._launches}

    def _join(self, message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        pid = int(message["pid"])
        self._joined[pid] = process.start_time(pid)
        return {}

    def _peers(self, _message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        """A rank has found that the job has other nodes: only then does anybody here listen on the network."""
        self._wants_peers = True
        return {}

    def _spawn(self, message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        if self._command.pid and self._command.status is None:
            raise ValueError("the command is still running")
        if self._command.stderr >= 0:
            os.close(self._command.stderr)
        self._launches += 1
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        # A burst of tracebacks must not block the trainers while the supervisor is being restarted.
        process.widen_pipe(read_end)
        environment = {**os.environ, **message["environment"], names.SOCKET_VARIABLE: self._socket_path, names.LAUNCH_VARIABLE: str(self._launches)}
        pid = process.fork_command(message["argv"], environment=environment, stderr=write_end)
        os.close(write_end)
        self._command = _Command(launch=self._launches, pid=pid, stderr=read_end)
        return {"launch": self._launches, "pid": pid}

    def _stderr(self, _message: dict[str, Any], given: list[int]) -> dict[str, Any]:
        if self._command.stderr < 0:
            raise ValueError("no command was started")
        given.append(self._command.stderr)
        return {"launch": self._command.launch}

    def _signal(self, message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        number, whom = int(message["number"]), str(message["whom"])
        if whom == "command":
            if self._command.pid and self._command.status is None:
                process.send_signal([self._command.pid], number)
            return {"signalled": 1}
        workers = self._workers()
        process.send_signal(workers, number)
        return {"signalled": len(workers)}

    def _look(self, _message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        command = self._command
        return {
            "keeper_pid": os.getpid(),
            "run_dir": self._run_dir,
            "launch": command.launch,
            "pid": command.pid,
            "status": command.status,
            "ended_s": command.ended_s,
            "trainers": sum(process.is_alive(pid, started) for pid, started in self._greeted.items()),
            "workers": len(self._workers()) if command.status is not None else None,
            "signals": list(self._ending.signals),
            "wants_peers": self._wants_peers,
            "up_s": self._clock.monotonic_s() - self._began_s,
            "helpers": {h.role: {"pid": h.pid, "restarts": h.restarts} for h in self._helpers},
        }

    def _finish(self, message: dict[str, Any], _given: list[int]) -> dict[str, Any]:
        self._ending.code = int(message["code"])
        text = str(message.get("message", ""))
        if text:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        return {}


_HANDLERS: dict[str, Callable[[Keeper, dict[str, Any], list[int]], dict[str, Any]]] = {
    "hello": Keeper._hello,
    "names": Keeper._names,
    "memory": Keeper._memory_op,
    "free": Keeper._free,
    "claim": Keeper._claim,
    "launch": Keeper._launch,
    "join": Keeper._join,
    "peers": Keeper._peers,
    "spawn": Keeper._spawn,
    "stderr": Keeper._stderr,
    "signal": Keeper._signal,
    "look": Keeper._look,
    "finish": Keeper._finish,
}

"""Whether this node has what it needs to train: the probes behind `muster.Presence`.

A probe may hang for ever in a dead mount or for half a minute in a name server, so each one runs in a thread of its own
and the supervisor only ever reads the last answer. A gate is looked at when those before it are open, not earlier:
a process stuck in a file system whose network is not up yet cannot be killed.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence

from ridethrough.config import Config
from ridethrough.errors import RideThroughError, UsageError
from ridethrough.format import layout
from ridethrough.seam import process
from ridethrough.seam.clock import Clock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.udp import interface_address, reachable_address
from ridethrough.store.start import remembered_run
from ridethrough.supervisor.muster import Presence, missing

EVERY_S = 1.0
"""How old an answer may be before the question is asked again."""
PATIENCE_S = 5.0
"""Longer than any healthy answer; from then on the silence is the answer."""
_FORGOTTEN_S = 2 * EVERY_S
"""An answer that old when the question is asked again is of a call long over: nobody has asked since."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Gates:
    """The gates of this node, in the site's start order.

    Args:
        clock: For the age of answers.
        config: Paths, start order, addresses.
        run_dir: The run directory, None while the script has not named it: then only the configured paths count.
        address: Answers with the address that this node announces; raises OSError while it has none. None: found from
            the configuration.
        node: Name of this node.
        reach: Asks a path; raises OSError or an error of ours while it cannot be used.
        reach_run: Asks the run directory in the same way.
        route: Asks for the way to a host in the same way.
    """

    def __init__(
        self,
        clock: Clock,
        config: Config,
        run_dir: str | None,
        address: Callable[[], str] | None = None,
        *,
        node: str | None = None,
        reach: Callable[[str], None] | None = None,
        reach_run: Callable[[str], None] | None = None,
        route: Callable[[str], str] | None = None,
    ) -> None:
        self._clock = clock
        self._config = config
        self._node = node or process.node_name()
        self._route = route or reachable_address
        others = tuple(n.address for n in config.nodes if n.name != self._node)
        own = address or (lambda: own_address(config.peers.interface, others, self._route))
        asked = reach or reach_path
        asked_run = reach_run or RunDirectory().reach
        self._storage = [self._probe(path, lambda path=path: asked(path)) for path in config.recovery.paths]  # type: ignore[misc]
        if run_dir is not None:
            self._storage.append(self._probe(run_dir, lambda: asked_run(run_dir)))
        self._network = self._probe("", own)
        self._ways: dict[str, _Probe] = {}

    def _probe(self, what: str, ask: Callable[[], object]) -> _Probe:
        return _Probe(self._clock, what, ask)

    def look(self, lead: str | None = None) -> Presence:
        """How far this node has come. Returns at once, with the newest answers.

        Args:
            lead: The node that calls; None: the first of the configuration. It is the first that lives, so the one that
                will host the rendezvous, unless one before it comes back meanwhile: who hosts is known only with the call.
        """
        if not self._config.has_gates:
            return Presence(is_ready=True)
        shut: dict[str, tuple[str, ...]] = {}
        for gate in self._config.recovery.start_order:
            if gate == "workers":
                break
            shut[gate] = self._shut(gate, lead)
            if shut[gate]:
                break
        waiting = missing({gate for gate, reasons in shut.items() if not reasons}, self._config.recovery.start_order)
        if not waiting:
            return Presence(is_ready=True)
        return Presence(is_ready=False, missing=tuple(f"{waiting[0]}: {reason}" for reason in shut[waiting[0]]))

    def _shut(self, gate: str, lead: str | None) -> tuple[str, ...]:
        """Why the gate is shut, nothing if it is open."""
        if gate == "storage":
            probes = self._storage
        elif gate == "network":
            probes = [self._network]
        else:
            probes = self._way(lead)
        return tuple(reason for reason in (probe.ask() for probe in probes) if reason is not None)

    def _way(self, lead: str | None) -> list[_Probe]:
        host = lead or next(iter(self._config.order), self._node)
        address = self._config.addresses.get(host)
        if host == self._node or address is None:
            return []
        if host not in self._ways:
            route = self._route
            self._ways[host] = self._probe(f"{host} at {address}", lambda: route(address))
        return [self._ways[host]]


class _Probe:
    """One question that is asked again and again, never by the caller's thread.

    At most one thread asks. One that hangs is left behind as a daemon: nothing can end it, and its answer, should it
    ever come, is as good as a fresh one.
    """

    def __init__(self, clock: Clock, what: str, question: Callable[[], object]) -> None:
        self._clock = clock
        self._what = f"{what}: " if what else ""
        self._question = question
        self._asked_s: float | None = None
        """When the thread that is asking began, None if nobody asks."""
        self._answer: tuple[str | None, float] | None = None
        self._shut_s: float | None = None
        """Since when the answer has been no."""

    def ask(self) -> str | None:
        """Why not, from the newest answer; None if all is well. Sees to it that the next answer comes."""
        now_s = self._clock.monotonic_s()
        asked_s, answer = self._asked_s, self._answer
        if asked_s is None and answer is not None and now_s - answer[1] > _FORGOTTEN_S:
            self._answer = answer = self._shut_s = None
        if asked_s is None and (answer is None or now_s - answer[1] >= EVERY_S):
            self._asked_s = now_s
            threading.Thread(target=self._run, name="ridethrough-gate", daemon=True).start()
        reason = None if answer is None else answer[0]
        if asked_s is not None and now_s - asked_s >= PATIENCE_S:
            reason, self._shut_s = "does not answer", asked_s
        elif answer is None:
            return f"{self._what}not looked at yet"
        if reason is None:
            self._shut_s = None
            return None
        if self._shut_s is None:
            self._shut_s = now_s
        # In minutes: the sentence goes into heartbeats and, when it changes, on record.
        minutes = int((now_s - self._shut_s) // 60)
        return f"{self._what}{reason}" + (f" (for {minutes} min)" if minutes else "")

    def _run(self) -> None:
        reason = None
        try:
            self._question()
        except OSError as error:
            reason = error.strerror or str(error)
        except RideThroughError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  the top of a thread: a silent end would look like a dead mount
            reason = f"{type(error).__name__}: {error}"
        self._answer = (reason, self._clock.monotonic_s())
        self._asked_s = None


# -- the questions -------------------------------------------------------------------------------------------------------


def reach_path(path: str) -> None:
    """The path can be read now.

    Raises:
        OSError: It cannot. An empty directory on which nothing is mounted is what an unmounted disk looks like.
    """
    if not os.path.isdir(path):
        with open(path, "rb") as file:
            file.read(1)
        return
    os.statvfs(path)  # asks the server where a listing may come from a cache
    with os.scandir(path) as entries:
        is_empty = next(entries, None) is None
    if is_empty and not os.path.ismount(path):
        raise OSError(errno.ENODEV, "is empty and nothing is mounted there")


class RunDirectory:
    """Asks the run directory: by writing to it until that has been possible, and from then on by a lighter question.

    A thousand nodes that each make a file there every second would hold up the very server that they wait for.
    """

    def __init__(self) -> None:
        self._is_written = False

    def reach(self, run_dir: str) -> None:
        """As `reach_run_dir`."""
        is_written, self._is_written = self._is_written, False  # what fails now must be written to again
        if is_written:
            os.statvfs(run_dir)
        else:
            reach_run_dir(run_dir)
        self._is_written = os.path.isdir(run_dir)


def reach_run_dir(run_dir: str) -> None:
    """The run directory can be written now, or may be created.

    A file system without room is no reason to wait: the start says so itself, with its own exit code.

    Raises:
        OSError: It cannot, or this node remembers a run that is not there: an unmounted disk.
        RideThroughError: What this node remembers cannot be read.
    """
    is_remembered = remembered_run(PosixFileSystem(), process.state_dir(), run_dir) is not None
    if is_remembered and not os.path.exists(os.path.join(run_dir, layout.RUN)):
        os.stat(run_dir)  # its own error is the better one
        raise OSError(errno.ENODEV, "the run was here before and is not there now: not mounted?")
    if not os.path.isdir(run_dir):
        above = run_dir
        while not os.path.exists(above):
            above = os.path.dirname(above)
        if not os.access(above, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, f"cannot be created: no permission to write to {above}")
        return
    # One name a node, so that what power cuts leave behind does not add up.
    trial = os.path.join(run_dir, f".ready-{process.node_name()}{layout.TEMPORARY}")
    try:
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.unlink(trial)
    except OSError as error:
        if error.errno not in _FULL:
            raise


def own_address(interface: str | None, others: Sequence[str], route: Callable[[str], str] = reachable_address) -> str:
    """The address that this node announces: of the interface, else on the way to another node.

    Raises:
        OSError: The address is not there yet.
        UsageError: There is no such interface, or no way to any other node, yet.
    """
    if interface is not None:
        address = interface_address(interface)
        # An address given as a number is believed above; only binding shows that some interface has it.
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as trial:
            try:
                trial.bind((address, 0))
            except OSError as error:
                raise OSError(error.errno, f"no interface has the address {address}") from error
        return address
    failure: UsageError | None = None
    for other in others:
        try:
            return route(other)
        except UsageError as error:
            failure = error
    if failure is not None:
        raise failure
    return "127.0.0.1"  # nobody else to talk to

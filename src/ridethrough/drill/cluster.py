"""Virtual nodes on one switch, with or without a file server, whose power and links can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from ridethrough.drill import fileserver
from ridethrough.drill.machine import Machine, call
from ridethrough.drill.scenario import SERVER
from ridethrough.errors import DrillFailed

_INTERFACE = "eth0"
_NETWORK = "10.77.0"
"""The same in every drill: no packet leaves the namespaces."""
_FILE_PORT = 5999
_NOBODY = "02:00:00:00:00:fe"
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_CLONE_NEWNET = 0x40000000
_WAIT_S = 20.0


class Cluster:
    """Nodes that can lose power and links, each with its own disk; on from the start.

    Every node sees its own disk at `disk` and the file server, if there is one, at `shared`.

    Args:
        names: Of the nodes.
        has_server: With one more node, `SERVER`, whose disk is mounted by all.
    """

    realism = "netns+fs-shutdown"
    interface = _INTERFACE

    def __init__(self, names: Sequence[str], *, has_server: bool = False) -> None:
        self.names = tuple(names)
        self._work = tempfile.mkdtemp(prefix="ridethrough-drill-")
        self._machines: dict[str, Machine] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._groups: tuple[frozenset[str], ...] = ()
        self.shared: str | None = os.path.join(self._work, "shared") if has_server else None
        self.cut_took_s = 0.0
        """From the first link to the last process of the newest cut."""
        everybody = (*self.names, SERVER) if has_server else self.names
        self._addresses = {name: f"{_NETWORK}.{10 + number}" for number, name in enumerate(everybody)}
        hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        Path(self._work, "hosts").write_text("\n".join(hosts) + "\n", encoding="ascii")
        try:
            if self.shared:
                os.mkdir(self.shared)
            self._start_switch()
            for name in everybody:
                self._machines[name] = Machine(name, self._work, options=fileserver.DISK_OPTIONS if name == SERVER else "rw")
            if has_server:
                self.power_on([SERVER])
            self.power_on(self.names)
        except BaseException:
            self.close()
            raise

    def _start_switch(self) -> None:
        self._switch = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._switch.stdout is not None
        self._switch.stdout.readline()
        self._control = _socket_inside(self._switch.pid)
        self._in_switch("link add br0 type bridge", "link set br0 up")

    def _in_switch(self, *lines: str) -> None:
        assert self._switch is not None
        call("nsenter", "--target", str(self._switch.pid), "--net", "ip", "-batch", "-", stdin="\n".join(lines))

    # -- what the drill sees ---------------------------------------------------------------------------------------

    @property
    def disk(self) -> str:
        """Where every node has its own disk."""
        return os.path.join(self._work, "disk")

    def address(self, name: str) -> str:
        """The node's address."""
        return self._addresses[name]

    def seen(self, name: str, path: str) -> str:
        """How the drill reaches a file of the node."""
        return self._machines[name].seen(path)

    def pid(self, name: str) -> int:
        """The node's first process, as seen from outside."""
        return self._machines[name].pid

    def is_on(self, name: str) -> bool:
        """The node has power."""
        return self._machines[name].is_on

    def entered(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs a command on the node."""
        return self._machines[name].entered(argv)

    def start(self, name: str, argv: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> None:
        """The node's command runs, its output in the log, which is not on the node."""
        self._machines[name].start(argv, environment=environment, log=log)

    def has_ended(self, name: str) -> int | None:
        """Exit code of the node's command, None while it runs or if there is none."""
        return self._machines[name].has_ended()

    # -- power -----------------------------------------------------------------------------------------------------

    def cut(self, names: Iterable[str]) -> None:
        """The nodes have lost their power: links, unsynced data and processes, at one instant."""
        machines = [self._machines[name] for name in names if self._machines[name].is_on]
        began_s = time.monotonic()
        # Links first: peers see silence and not the resets of a kernel that closes the sockets of the killed.
        for machine in machines:
            self._set_link(machine.name, is_up=False)
        for machine in machines:
            machine.stop_disk()
        for machine in machines:
            machine.kill()
        self.cut_took_s = time.monotonic() - began_s
        for machine in machines:
            machine.await_off()
            # The kernel takes the cable away some time after the last process; the next boot needs its name.
            with contextlib.suppress(DrillFailed):
                self._in_switch(f"link del {_port(machine.name)}")

    def power_on(self, names: Iterable[str]) -> None:
        """The nodes are up: file system recovered, on the network, file server (being) mounted. Their command is not given."""
        machines = [self._machines[name] for name in names if not self._machines[name].is_on]
        for machine in machines:
            is_client = self.shared and machine.name != SERVER
            machine.boot(self._file_program("mount", f"{self.disk}/export", str(self.shared)) if is_client else ())
        for machine in machines:
            machine.await_disk()
            self._plug_in(machine)
            machine.finish_boot()
        for machine in machines:
            if machine.name == SERVER:
                self._serve_files(machine)

    def _plug_in(self, machine: Machine) -> None:
        address = self._addresses[machine.name]
        hardware = f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}"
        port = _port(machine.name)
        self._in_switch(
            f"link add {port} type veth peer name {_INTERFACE} address {hardware} netns {machine.pid}",
            f"link set {port} master br0",
            f"link set {port} up",
        )
        call(
            *machine.entered(["ip", "-batch", "-"]),
            stdin=f"addr add {address}/24 dev {_INTERFACE}\nlink set {_INTERFACE} up\n" + self._blinders(machine.name, is_on=True),
        )

    def _serve_files(self, machine: Machine) -> None:
        os.makedirs(machine.seen(os.path.join(self.disk, "export")), exist_ok=True)
        with open(os.path.join(self._work, f"console-{SERVER}"), "ab") as log:
            machine.start(self._file_program("serve"), environment={"PATH": os.environ.get("PATH", "")}, log=log)

    def _file_program(self, what: str, *arguments: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(fileserver.__file__), what, self._addresses[SERVER], str(_FILE_PORT), *arguments]

    def await_shared(self, names: Iterable[str]) -> None:
        """The nodes have mounted the file server.

        Raises:
            DrillFailed: They have not in time.
        """
        assert self.shared is not None
        deadline = time.monotonic() + _WAIT_S
        for name in names:
            while f" {self.shared} fuse" not in self._machines[name].mounts():
                if time.monotonic() > deadline:
                    raise DrillFailed(detail=f"node {name} cannot mount the file server")
                time.sleep(0.02)

    # -- links -----------------------------------------------------------------------------------------------------

    def set_links(self, names: Iterable[str], *, is_up: bool) -> None:
        """The nodes' cables are in or out; they themselves go on."""
        for name in names:
            self._set_link(name, is_up=is_up)

    def _set_link(self, name: str, *, is_up: bool) -> None:
        # One call of the kernel and not a program: cuts of several nodes must fall together.
        assert self._control is not None
        request = struct.pack("16sH14x", _port(name).encode(), 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(self._control, _SIOCGIFFLAGS, request))[1]
        flags = flags | _IFF_UP if is_up else flags & ~_IFF_UP
        fcntl.ioctl(self._control, _SIOCSIFFLAGS, struct.pack("16sH14x", _port(name).encode(), flags))

    def part(self, *groups: Iterable[str]) -> None:
        """Nodes of different groups do not hear each other any more; a node in no group (the file server, say) hears all."""
        self._groups = tuple(frozenset(group) for group in groups)
        self._blind(is_on=True)

    def heal(self) -> None:
        """All hear each other again."""
        self._blind(is_on=False)
        self._groups = ()

    def _blind(self, *, is_on: bool) -> None:
        for name, machine in self._machines.items():
            lines = self._blinders(name, is_on=is_on)
            if machine.is_on and lines:
                call(*machine.entered(["ip", "-batch", "-"]), stdin=lines)

    def _blinders(self, name: str, *, is_on: bool) -> str:
        """Commands after which what the node sends to the other groups reaches nobody."""
        mine = next((group for group in self._groups if name in group), frozenset())
        others = [self._addresses[n] for group in self._groups if mine and group != mine for n in sorted(group)]
        if is_on:
            return "".join(f"neigh replace {other} lladdr {_NOBODY} nud permanent dev {_INTERFACE}\n" for other in others)
        return "".join(f"neigh del {other} dev {_INTERFACE}\n" for other in others)

    def close(self) -> None:
        """Nothing is left: no process, namespace, mount, loop device or file. Idempotent."""
        for machine in self._machines.values():
            machine.kill()
        for machine in self._machines.values():
            with contextlib.suppress(DrillFailed):  # the others must go, too
                machine.close()
        if self._control is not None:
            self._control.close()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
            assert self._switch.stdout is not None
            self._switch.stdout.close()
        shutil.rmtree(self._work, ignore_errors=True)


def _port(name: str) -> str:
    return f"port-{name}"


def _socket_inside(pid: int) -> socket.socket:
    """A socket in the network namespace of a process, through which its interfaces can be switched."""
    made: list[socket.socket] = []

    def enter() -> None:
        with open(f"/proc/{pid}/ns/net", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0:
                made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

    # Entering concerns a thread alone, and this one ends; the socket stays where it was made.
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not made:
        raise DrillFailed(detail="cannot enter the network namespace of the switch")
    return made[0]

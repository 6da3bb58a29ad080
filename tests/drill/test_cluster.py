"""What a virtual cluster must be, for a drill on it to mean anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridethrough.drill import machine
from ridethrough.drill.cluster import Cluster
from ridethrough.drill.scenario import SERVER
from ridethrough.testing import LoopDisk

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

LISTEN = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); c, _ = s.accept(); print('peer', flush=True);"
"""A server that says when it is up and when somebody has come."""


@pytest.fixture
def pair() -> Iterator[Cluster]:
    made = Cluster(["n0", "n1"])
    yield made
    made.close()


def require_server() -> None:
    """As for other things that only some machines have: with CI=true their absence is a failure."""
    why = machine.missing(has_server=True)
    if why is not None and os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the tests of the file server: {why}", pytrace=False)
    if why is not None:
        pytest.skip(f"no file server: {why}")


@pytest.fixture
def served() -> Iterator[Cluster]:
    require_server()
    made = Cluster(["n0", "n1"], has_server=True)
    made.await_shared(["n0", "n1"])
    yield made
    made.close()


def start(cluster: Cluster, node: str, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(cluster.entered(node, [sys.executable, "-S", "-c", code]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def run(cluster: Cluster, node: str, code: str) -> str:
    """What the code prints on the node; the name of the error if it fails with one of the system's."""
    wrapped = f"import os, errno, time\ntry:\n    {code}\nexcept OSError as e:\n    print(errno.errorcode.get(e.errno, e))"
    return subprocess.run(
        cluster.entered(node, [sys.executable, "-S", "-c", wrapped]), capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def hears(cluster: Cluster, node: str, other: str) -> bool:
    """A datagram of `node` reaches `other`."""
    listener = start(
        cluster, other, "import socket; s = socket.socket(2, 2); s.bind(('', 7001)); s.settimeout(1); print('up', flush=True); print(s.recv(9))"
    )
    assert line(listener) == "up"
    run(cluster, node, f"import socket; socket.socket(2, 2).sendto(b'x', ('{other}', 7001))")
    has_come = line(listener) == "b'x'"
    listener.wait()
    return has_come


def leftovers(work: str) -> list[str]:
    """What of a cluster is still on this machine."""
    loops = [text for text in subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout.splitlines() if work in text]
    mounts = [text for text in Path("/proc/mounts").read_text().splitlines() if work in text]
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes().decode(errors="replace") + (entry / "mounts").read_text()
            except OSError:
                continue
            if work in text:
                processes.append(entry.name)
    return [*loops, *mounts, *processes]


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_nothing_of_a_cluster_is_left_after_it() -> None:
    require_server()
    cluster = Cluster(["n0", "n1"], has_server=True)
    cluster.await_shared(["n0", "n1"])
    work = str(Path(cluster.disk).parent)
    sleeper = start(cluster, "n0", "import time; time.sleep(60)")
    assert leftovers(work)
    cluster.close()
    assert sleeper.wait(5) != 0
    assert not Path(work).exists()
    assert leftovers(work) == []


def test_what_this_machine_unmounts_is_not_kept_in_use_by_a_node(tmp_path: Path) -> None:
    def mount(*argv: str) -> None:
        subprocess.run(["mount", *argv], check=True)

    outer, inner = tmp_path / "outer", tmp_path / "outer" / "inner"
    outer.mkdir()
    mount("-t", "tmpfs", "outer", str(outer))
    try:
        mount("--make-shared", str(outer))  # as systemd has all mounts
        inner.mkdir()
        mount("-t", "tmpfs", "inner", str(inner))
        cluster = Cluster(["n0"])
        try:
            seen = ["grep", "-c", str(inner), "/proc/self/mounts"]
            assert subprocess.run(cluster.entered("n0", seen), capture_output=True, check=False).stdout == b"1\n"
            subprocess.run(["umount", str(inner)], check=True)
            assert subprocess.run(cluster.entered("n0", seen), capture_output=True, check=False).stdout == b"0\n"
        finally:
            cluster.close()
    finally:
        subprocess.run(["umount", "-R", str(outer)], check=True)


def test_disk_of_somebody_else_is_not_kept_in_use_by_a_node(tmp_path: Path) -> None:
    with LoopDisk(32 << 20, directory=str(tmp_path)) as disk:
        cluster = Cluster(["n0"])
        try:
            seen = subprocess.run(cluster.entered("n0", ["cat", "/proc/self/mounts"]), capture_output=True, text=True, check=True).stdout
            assert disk.path not in seen
            assert cluster.disk in seen
            assert Path(disk.path).is_dir(), "it is still mounted here"
        finally:
            cluster.close()


def test_nothing_but_files_is_left_when_the_drill_itself_is_killed(tmp_path: Path) -> None:
    require_server()
    code = "import time; from ridethrough.drill.cluster import Cluster; "
    code += "c = Cluster(['n0', 'n1'], has_server=True); print(c.disk, flush=True); time.sleep(60)"
    drill = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    work = str(Path(line(drill)).parent)
    assert leftovers(work)
    drill.send_signal(signal.SIGKILL)
    drill.wait()
    deadline = time.monotonic() + 10
    while leftovers(work) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(work) == []


def test_two_clusters_do_not_hear_of_each_other(pair: Cluster) -> None:
    other = Cluster(["n0", "n1"])
    try:
        assert pair.address("n0") == other.address("n0")
        other.cut(["n1"])
        assert hears(pair, "n0", "n1")
    finally:
        other.close()


def test_every_node_has_its_own_disk_processes_and_boot_at_the_same_path(pair: Cluster) -> None:
    assert run(pair, "n0", f"open('{pair.disk}/own', 'w').write('n0')") == ""
    assert run(pair, "n1", f"print(os.path.exists('{pair.disk}/own'))") == "False"
    assert Path(pair.seen("n0", f"{pair.disk}/own")).read_text() == "n0"
    assert run(pair, "n0", "print(os.uname().nodename)") == "n0"
    assert len(run(pair, "n0", "print([p for p in os.listdir('/proc') if p.isdigit()])").split(",")) == 2  # the first process and this one
    boots = {run(pair, node, "print(open('/proc/sys/kernel/random/boot_id').read().strip())") for node in ("n0", "n1")}
    pair.cut(["n0"])
    pair.power_on(["n0"])
    boots.add(run(pair, "n0", "print(open('/proc/sys/kernel/random/boot_id').read().strip())"))
    assert len(boots) == 3


def test_a_cut_takes_what_was_not_synced_and_nothing_else(pair: Cluster) -> None:
    for node in ("n0", "n1"):
        run(
            pair,
            node,
            f"os.chdir('{pair.disk}'); f = open('synced', 'w'); f.write('x'); f.flush(); os.fsync(f.fileno()); "
            "os.fsync(os.open('.', os.O_RDONLY)); open('unsynced', 'w').write('y')",
        )
    pair.cut(["n1"])
    pair.power_on(["n1"])
    assert run(pair, "n1", f"print(sorted(os.listdir('{pair.disk}')))") == "['lost+found', 'synced', 'tmp']"
    assert run(pair, "n0", f"print(sorted(os.listdir('{pair.disk}')))") == "['lost+found', 'synced', 'tmp', 'unsynced']"


def test_nodes_of_one_cut_go_at_one_instant(pair: Cluster) -> None:
    sleepers = [start(pair, node, "import time; time.sleep(60)") for node in ("n0", "n1")]
    pair.cut(["n0", "n1"])
    assert pair.cut_took_s < 0.05
    assert [sleeper.wait(5) for sleeper in sleepers] == [-signal.SIGKILL] * 2


# -- links -------------------------------------------------------------------------------------------------------------


def test_the_peers_of_a_node_that_is_cut_see_silence_and_those_of_a_killed_process_see_its_end(pair: Cluster) -> None:
    watching = "c.settimeout(2)\ntry: print(c.recv(1), flush=True)\nexcept TimeoutError: print('silence', flush=True)"
    talking = "import socket, time; c = socket.create_connection(('n0', 7000)); time.sleep(60)"
    for is_cut, expected in ((False, "b''"), (True, "silence")):
        peer = start(pair, "n0", LISTEN + watching)
        assert line(peer) == "up"
        victim = start(pair, "n1", talking)
        assert line(peer) == "peer"
        if is_cut:
            pair.cut(["n1"])
        else:
            # The child, since killing nsenter outside would leave what it has started.
            children = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        assert line(peer) == expected
        peer.wait()
        victim.wait()


def test_groups_that_are_parted_do_not_hear_each_other_until_they_are_healed() -> None:
    cluster = Cluster(["n0", "n1", "n2"])
    try:
        cluster.part(["n0", "n1"], ["n2"])
        assert hears(cluster, "n0", "n1")
        assert not hears(cluster, "n0", "n2")
        assert not hears(cluster, "n2", "n1")
        cluster.cut(["n2"])
        cluster.power_on(["n2"])
        assert not hears(cluster, "n2", "n0")  # a node that boots into a partition is in it, too
        cluster.heal()
        assert hears(cluster, "n0", "n2")
        assert hears(cluster, "n2", "n1")
    finally:
        cluster.close()


def test_a_node_in_no_group_hears_both_sides(served: Cluster) -> None:
    served.part(["n0"], ["n1"])
    assert not hears(served, "n0", "n1")
    assert hears(served, "n0", SERVER)
    assert hears(served, SERVER, "n1")


def test_a_connection_outlives_a_cable_that_was_out_for_a_moment(pair: Cluster) -> None:
    peer = start(pair, "n0", LISTEN + "print(c.recv(1), flush=True)")
    assert line(peer) == "up"
    talker = start(pair, "n1", "import socket, time; c = socket.create_connection(('n0', 7000)); time.sleep(1); c.send(b'x'); time.sleep(60)")
    assert line(peer) == "peer"
    pair.set_links(["n1"], is_up=False)
    time.sleep(1.5)
    pair.set_links(["n1"], is_up=True)
    assert line(peer) == "b'x'"
    talker.kill()
    talker.wait()
    peer.wait()


# -- the file server ---------------------------------------------------------------------------------------------------


def write(path: str, text: str) -> str:
    return f"f = open('{path}', 'w'); f.write('{text}'); f.flush(); os.fsync(f.fileno())"


def until(cluster: Cluster, node: str, code: str, expected: str) -> bool:
    """It comes to that: the first calls after the server has restarted still fail on the dead connection."""
    deadline = time.monotonic() + 10
    while (found := run(cluster, node, code)) != expected:
        assert found == "EIO"
        assert time.monotonic() < deadline
    return True


def test_what_was_synced_to_the_file_server_survives_its_power_cut_and_the_rest_does_not(served: Cluster) -> None:
    at = served.shared
    run(served, "n0", write(f"{at}/synced", "x"))
    run(served, "n0", f"{write(f'{at}/temporary', 'y')}; os.rename('{at}/temporary', '{at}/renamed')")
    run(served, "n0", f"os.mkdir('{at}/folder')")
    run(served, "n0", f"open('{at}/unsynced', 'w').write('z' * 4096)")
    served.cut([SERVER])
    served.power_on([SERVER])
    # Without `dirsync` on the server the rename and the folder would be gone: sshfs cannot sync a directory.
    assert until(served, "n1", f"print(sorted(os.listdir('{at}')))", "['folder', 'renamed', 'synced', 'unsynced']")
    assert run(served, "n1", f"print([open(f'{at}/{{n}}').read() for n in ('renamed', 'synced', 'unsynced')])") == "['y', 'x', '']"


def test_nodes_see_at_once_what_another_has_written_renamed_and_created(served: Cluster) -> None:
    at = served.shared
    assert run(served, "n1", f"open('{at}/marker')") == "ENOENT"
    run(served, "n0", write(f"{at}/marker", "one"))
    assert run(served, "n1", f"print(open('{at}/marker').read(), os.stat('{at}/marker').st_size)") == "one 3"
    run(served, "n0", f"{write(f'{at}/new', 'second')}; os.rename('{at}/new', '{at}/marker')")
    assert run(served, "n1", f"print(open('{at}/marker').read(), os.path.exists('{at}/new'))") == "second False"


def test_only_one_of_two_nodes_creates_a_file_exclusively(served: Cluster) -> None:
    at = served.shared
    code = f"""
import os, sys, time
sys.path[:] = {sys.path!r}
from ridethrough.seam.fs import PosixFileSystem
won = 0
while not os.path.exists('{at}/go'): time.sleep(0.001)
for i in range(100):
    try:
        PosixFileSystem().create(f'{at}/claim-{{i}}', 0).close()
        won += 1
    except FileExistsError:
        assert os.path.exists(f'{at}/claim-{{i}}')
print(won)
"""
    racers = [start(served, node, code) for node in ("n0", "n1")]
    run(served, "n0", write(f"{at}/go", ""))
    assert sum(int(line(racer)) for racer in racers) == 100
    assert [racer.wait() for racer in racers] == [0, 0]


def test_a_silent_file_server_is_waited_for_and_a_restarted_one_has_forgotten_open_files(served: Cluster) -> None:
    at = served.shared
    run(served, "n0", write(f"{at}/data", "x" * 10))
    code = f"""
import os, errno, sys
f = os.open('{at}/data', os.O_RDONLY)
print('open', flush=True)
for _ in range(2):
    sys.stdin.readline()
    try: print(os.preadv(f, [bytearray(4096)], 0, 0) if os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED) is None else 0, flush=True)
    except OSError as e: print(errno.errorcode[e.errno], flush=True)
"""
    reader = subprocess.Popen(served.entered("n0", [sys.executable, "-S", "-c", code]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None
    assert line(reader) == "open"
    served.set_links([SERVER], is_up=False)
    began_s = time.monotonic()
    reader.stdin.write("\n")
    reader.stdin.flush()
    time.sleep(1.5)
    served.set_links([SERVER], is_up=True)
    assert line(reader) == "10"
    assert time.monotonic() - began_s > 1.5
    served.cut([SERVER])
    served.power_on([SERVER])
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert line(reader) == "EIO"
    assert until(served, "n0", f"print(open('{at}/data').read())", "x" * 10)
    reader.wait()


def test_a_node_that_is_up_before_the_file_server_has_an_empty_place_and_mounts_later(served: Cluster) -> None:
    at = served.shared
    run(served, "n0", write(f"{at}/data", "x"))
    served.cut(["n0", SERVER])
    served.power_on(["n0"])
    assert run(served, "n0", f"print(os.listdir('{at}'), os.path.ismount('{at}'))") == "[] False"
    served.power_on([SERVER])
    served.await_shared(["n0"])
    assert run(served, "n0", f"print(os.listdir('{at}'))") == "['data']"


def test_a_node_that_waits_for_a_silent_file_server_can_be_cut(served: Cluster) -> None:
    served.set_links([SERVER], is_up=False)
    stuck = start(served, "n0", f"print('go', flush=True); open('{served.shared}/x')")
    assert line(stuck) == "go"
    time.sleep(0.2)
    served.cut(["n0"])
    assert stuck.wait(5) == -signal.SIGKILL

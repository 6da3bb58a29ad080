"""What the keeper's helpers may not depend on, and may not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ridethrough.seam.process import start_time
from ridethrough.snapshot.address import find_socket, lock_path, remember_alias


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_a_helper_holds_no_memory_pipe_or_lock_of_the_keepers(tmp_path: Path) -> None:
    code = f"""
import os
from ridethrough.seam import process
held = [process.memory_file("test", 4096), *os.pipe(), os.open({str(tmp_path / "lock")!r}, os.O_RDWR | os.O_CREAT)]
def child():
    links = [os.readlink(f"/proc/self/fd/{{n}}") for n in range(3, 20) if os.path.lexists(f"/proc/self/fd/{{n}}")]
    with open({str(tmp_path / "links")!r}, "w") as file:
        file.write("\\n".join(links))
os.waitpid(process.fork_function(child, name="rt-test"), 0)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "links").read_text() == ""


def test_a_stderr_that_nobody_reads_costs_no_event() -> None:
    code = """
import os, sys
from ridethrough.supervisor.record import echo
read, write = os.pipe()
os.close(read)
os.dup2(write, 2)
for step in range(3):
    echo("checkpoint.durable", {"step": step})
print("alive")
"""
    assert run(code).stdout == "alive\n"


def lock_text(run_dir: Path, started: object, boot: str) -> None:
    Path(lock_path(str(run_dir))).write_text(f"{os.getpid()}\n/some/socket\n{started} {boot}\n", encoding="utf-8")


def test_a_process_that_has_a_dead_keepers_number_is_not_taken_for_it(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    lock_text(tmp_path, start_time(os.getpid()), boot)
    assert find_socket(str(tmp_path)) == "/some/socket"
    lock_text(tmp_path, (start_time(os.getpid()) or 0) + 1, boot)
    assert find_socket(str(tmp_path)) is None


def test_a_keeper_of_another_boot_is_not_looked_for(tmp_path: Path) -> None:
    lock_text(tmp_path, start_time(os.getpid()), "another-boot")
    assert find_socket(str(tmp_path)) is None


def test_a_run_is_found_through_a_link_to_its_directory(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    lock_text(tmp_path / "real", start_time(os.getpid()), boot)
    remember_alias(str(tmp_path / "link"), str(tmp_path / "real"))
    assert find_socket(str(tmp_path / "link")) == "/some/socket"

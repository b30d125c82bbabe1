"""The ring is a ring: nothing of this machine is in its reach, and nothing of it stays."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.system.booted_systemd import REPOSITORY, BootedSystemd, clean, need_booted_systemd

pytestmark = pytest.mark.system
NAMESPACES = ("mnt", "pid", "ipc", "uts", "cgroup", "net")


def test_a_real_systemd_is_process_1_and_has_booted_without_a_failure(ring: BootedSystemd) -> None:
    assert ring.read("/proc/1/comm") == "systemd\n"
    assert ring.do("systemctl", "is-system-running").strip() == "running", ring.do("systemctl", "--failed")
    assert ring.show("dbus.service")["ActiveState"] == "active"


def test_every_namespace_of_the_ring_is_its_own(ring: BootedSystemd) -> None:
    for kind in NAMESPACES:
        inside = ring.do("readlink", f"/proc/1/ns/{kind}").strip()
        assert inside != str(Path(f"/proc/self/ns/{kind}").readlink()), kind


@pytest.mark.parametrize("place", ["/tmp", "/run", "/var/tmp", "/dev/shm", "/etc"])
def test_a_file_of_this_machine_survives_what_the_ring_does_at_its_path(
    ring: BootedSystemd, place: str
) -> None:
    path = Path(place) / f"ring-test-{uuid.uuid4().hex}"
    path.write_text("the machine's")
    try:
        ring.do("sh", "-c", f"echo ring >{path} && rm {path} && mkdir {path}")
        assert path.read_text() == "the machine's"
    finally:
        path.unlink()
        ring.do("rmdir", str(path))


def test_what_the_ring_writes_is_seen_by_nobody_else(ring: BootedSystemd) -> None:
    name = f"ring-test-{uuid.uuid4().hex}"
    places = [
        f"{place}/{name}" for place in ("/tmp", "/run", "/var/lib", "/dev", "/etc", "/usr/bin", "/root")
    ]
    ring.do("touch", *places)
    try:
        assert [place for place in places if os.path.lexists(place)] == []
    finally:
        ring.do("rm", *places)


def test_a_mount_in_the_ring_does_not_come_out_of_it(ring: BootedSystemd) -> None:
    name = f"ring-test-{uuid.uuid4().hex}"
    ring.do("mount", "-t", "tmpfs", name, "/mnt")
    try:
        assert name in ring.read("/proc/self/mounts")
        assert name not in Path("/proc/self/mounts").read_text()
        assert ring.name not in Path("/proc/self/mounts").read_text()
    finally:
        ring.do("umount", "/mnt")


def test_the_ring_sees_no_process_of_this_machine(ring: BootedSystemd) -> None:
    mark = f"ring-test-{uuid.uuid4().hex}"
    argv = ["sh", "-c", "echo up; read _", mark]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ours:
        assert ours.stdout is not None
        ours.stdout.readline()
        assert mark in Path(f"/proc/{ours.pid}/cmdline").read_text()
        listed = ring.do("ps", "-e", "-o", "args")
        ours.kill()
    assert "/systemd" in listed, "ps says nothing here, so it proves nothing"
    assert mark not in listed


@pytest.mark.parametrize("path", ["/proc/sys/kernel/panic", "/sys/module/kernel/parameters/panic"])
def test_settings_of_the_kernel_cannot_be_written_in_the_ring(ring: BootedSystemd, path: str) -> None:
    status, out = ring.run(["sh", "-c", f": >{path}"])
    assert status != 0
    assert "Read-only file system" in out


def test_the_ring_has_no_device_of_this_machine(ring: BootedSystemd) -> None:
    nodes = ring.do("find", "/dev", "-xdev", "(", "-type", "b", "-o", "-type", "c", ")").split()
    assert {Path(node).name for node in nodes} <= {"null", "zero", "full", "random", "urandom", "tty"}
    assert ring.do("ls", "/sys/bus/pci/devices") == ""


def test_a_command_that_does_not_end_is_ended(ring: BootedSystemd) -> None:
    assert ring.run(["sleep", "1000"], timeout=0.5)[0] == 124
    assert "sleep 1000" not in ring.do("ps", "-e", "-o", "args")


def test_nothing_is_left_when_a_ring_is_closed() -> None:
    need_booted_systemd()
    ring = BootedSystemd()
    pid = ring.pid
    ring.do("systemd-run", "--unit=left", "sleep", "1000")
    ring.close()
    assert_gone(pid, ring.name, ring.work)


def test_a_ring_dies_with_the_process_that_booted_it() -> None:
    need_booted_systemd()
    booting = "from tests.system.booted_systemd import BootedSystemd as B; r = B(); print(r.pid, r.name, r.work, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", booting],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as booter:
        assert booter.stdout is not None
        pid, name, work = booter.stdout.readline().split()
        assert Path(f"/proc/{pid}/exe").readlink().name == "systemd"
        booter.send_signal(signal.SIGKILL)
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    clean(Path(work), name)
    assert_gone(int(pid), name, Path(work))


def assert_gone(pid: int, name: str, work: Path) -> None:
    """No process, no cgroup, no mount and no directory of that ring."""
    assert not Path(f"/proc/{pid}").exists()
    assert not work.exists()
    assert name not in Path("/proc/self/mounts").read_text()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    assert not [place for _, place, kind, *_ in mounts if kind == "cgroup2" and (Path(place) / name).exists()]

"""Writes to sysfs and unbinds as units of their own, over a fake tree and real processes."""

import asyncio
import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.binding import FunctionBinding, SlotBinding
from agent.core.fact import Absent, Known, Unknown
from agent.core.resolve import Resolved
from agent.core.selection import Selection
from agent.core.unbind_unit import unit_name
from agent.host.sysfs_pci import SysfsPci
from agent.kinds.udev_rules import udev_rules
from tests.host.fake_manager import ProcessManager
from tests.host.trees import Tree, config_space

GPU, OTHER = "0000:01:00.0", "0000:41:00.0"
DEVICES = "sys/bus/pci/devices"
UNBIND = "sys/bus/pci/drivers/nvidia/unbind"


@pytest.fixture
def host(tree: Tree) -> Tree:
    for address in (GPU, OTHER):
        path = tree.function(address, 0x030200)
        tree.file(f"{path}/config", config_space(serial=(0x48B02D, int(address[5:7], 16))))
        tree.bind(address, "nvidia")
    tree.file("sys/bus/pci/drivers_probe")
    tree.file("sys/kernel/iommu_groups/12/type", "DMA\n")
    return tree


@pytest.fixture
def manager(host: Tree) -> Iterator[ProcessManager]:
    made = ProcessManager(host.root)
    yield made
    made.end()


@pytest.fixture
def pci(host: Tree, manager: ProcessManager) -> SysfsPci:
    return SysfsPci(host.root, manager)


def make_fifo(host: Tree, path: str) -> Path:
    """A file at which whoever opens it waits for the other side."""
    at = host.root / path
    at.unlink(missing_ok=True)
    os.mkfifo(at)
    return at


async def ended(pci: SysfsPci, manager: ProcessManager, address: str) -> str:
    while (state := await pci.unbind_state(address)).startswith("running"):
        manager.reap()
        await asyncio.sleep(0.01)
    return state


async def test_each_write_lands_byte_for_byte(host: Tree, pci: SysfsPci) -> None:
    override = host.root / DEVICES / GPU / "driver_override"
    await pci.set_override(GPU, "vfio-pci")
    assert override.read_bytes() == b"vfio-pci\n"
    await pci.set_override(GPU, "")
    assert override.read_bytes() == b"\n"
    await pci.probe(GPU)
    assert (host.root / "sys/bus/pci/drivers_probe").read_bytes() == GPU.encode()
    await pci.set_group_type(12, "DMA-FQ")
    assert (host.root / "sys/kernel/iommu_groups/12/type").read_bytes() == b"DMA-FQ"


async def test_a_refused_write_names_the_kernels_errno_and_the_file(host: Tree, pci: SysfsPci) -> None:
    override = host.root / DEVICES / GPU / "driver_override"
    override.unlink()
    override.symlink_to("/dev/full")
    with pytest.raises(OSError, match="driver_override") as caught:
        await pci.set_override(GPU, "vfio-pci")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError):
        await pci.set_override("0000:fe:00.0", "vfio-pci")
    with pytest.raises(FileNotFoundError):
        await pci.set_group_type(99, "DMA")


@pytest.mark.parametrize("address", ["../../../../etc/passwd", "0000:01:00", "", "0000:01:00.0/../x"])
async def test_what_is_no_address_is_written_nowhere(
    host: Tree, pci: SysfsPci, manager: ProcessManager, address: str
) -> None:
    for call in (pci.set_override(address, "x"), pci.probe(address), pci.start_unbind(address, "nvidia")):
        with pytest.raises(OSError) as caught:
            await call
        assert caught.value.errno == errno.EINVAL
    assert (host.root / "sys/bus/pci/drivers_probe").read_bytes() == b""
    assert manager.commands == []


async def test_an_unbind_writes_the_address_and_is_done(
    host: Tree, pci: SysfsPci, manager: ProcessManager
) -> None:
    unbind = host.file(UNBIND)
    assert await pci.unbind_state(GPU) == "none"
    await pci.start_unbind(GPU, "nvidia")
    assert await ended(pci, manager, GPU) == "done"
    assert unbind.read_bytes() == GPU.encode()
    assert (await pci.read()).pending_unbinds == ()


async def test_a_refused_unbind_names_the_kernels_errno(
    host: Tree, pci: SysfsPci, manager: ProcessManager
) -> None:
    host.link(UNBIND, "/dev/full")
    await pci.start_unbind(GPU, "nvidia")
    assert await ended(pci, manager, GPU) == "failed: ENOSPC"
    await pci.start_unbind(GPU, "no-such-driver")
    assert await ended(pci, manager, GPU) == "failed: ENOENT"


async def test_B1_an_unbind_that_hangs_is_seen_by_the_next_agent_and_never_written_again(
    host: Tree, pci: SysfsPci, manager: ProcessManager
) -> None:
    fifo = make_fifo(host, UNBIND)
    await pci.start_unbind(GPU, "nvidia")
    after = SysfsPci(host.root, manager)
    assert (await after.read()).pending_unbinds == (GPU,)
    assert (await after.unbind_state(GPU)).startswith("running")
    with pytest.raises(OSError, match="has not returned") as caught:
        await after.start_unbind(GPU, "nvidia")
    assert caught.value.errno == errno.EBUSY
    assert len(manager.commands) == 1
    release = os.open(fifo, os.O_RDONLY)
    assert await ended(after, manager, GPU) == "done"
    assert os.read(release, 100) == GPU.encode()
    os.close(release)
    assert (await after.read()).pending_unbinds == ()


async def test_B1_a_pending_unbind_is_seen_where_systemd_gave_the_unit_up_and_where_it_does_not_answer(
    host: Tree, pci: SysfsPci, manager: ProcessManager
) -> None:
    make_fifo(host, UNBIND)
    await pci.start_unbind(GPU, "nvidia")
    held = manager.processes.pop(unit_name(GPU))
    assert (await pci.unbind_state(GPU)).startswith("running")
    manager.silent = True
    assert (await pci.unbind_state(GPU)).startswith("running")
    held.kill()
    held.wait()
    with pytest.raises(TimeoutError):
        await pci.unbind_state(OTHER)


async def test_B1_a_device_with_a_pending_unbind_is_neither_written_to_nor_asked_for_its_override(
    host: Tree, pci: SysfsPci
) -> None:
    make_fifo(host, UNBIND)
    serial = (await pci.read()).functions[GPU].serial
    await pci.start_unbind(GPU, "nvidia")
    for call in (pci.set_override(GPU, ""), pci.probe(GPU)):
        with pytest.raises(OSError, match="has not returned") as caught:
            await call
        assert caught.value.errno == errno.EBUSY
    make_fifo(host, f"{DEVICES}/{GPU}/driver_override")
    functions = (await pci.read()).functions
    override = functions[GPU].driver_override
    assert isinstance(override, Unknown)
    assert override.code == "UnbindPending"
    assert functions[GPU].serial == serial == Known("0048b02d00000001")
    assert isinstance(functions[OTHER].driver_override, Absent)
    await pci.set_override(OTHER, "vfio-pci")


async def test_B1_the_state_of_the_blocked_task_and_where_it_sleeps_are_told(
    host: Tree, pci: SysfsPci, manager: ProcessManager
) -> None:
    make_fifo(host, UNBIND)
    await pci.start_unbind(GPU, "nvidia")
    pid = manager.processes[unit_name(GPU)].pid
    host.file(f"proc/{pid}/stat", f"{pid} (a) b) D 1 1 1 0\n")
    assert await pci.unbind_state(GPU) == "running: state D"
    host.file(f"proc/{pid}/wchan", "nv_pci_remove")
    assert await pci.unbind_state(GPU) == "running: state D in nv_pci_remove"


async def test_pending_unbinds_are_found_in_a_hybrid_hierarchy(tree: Tree) -> None:
    tree.function(GPU, 0x030200)
    group = "gpu.slice/gpu-host.slice/gpu-host-agent.slice/gpu-host-agent-unbind.slice"
    tree.file(f"sys/fs/cgroup/systemd/{group}/{unit_name(GPU)}/cgroup.procs", "4711\n")
    tree.file(f"sys/fs/cgroup/systemd/{group}/{unit_name(OTHER)}/cgroup.procs", "")
    tree.file(f"sys/fs/cgroup/systemd/{group}/cgroup.procs", "")
    pci = SysfsPci(tree.root)
    assert (await pci.read()).pending_unbinds == (GPU,)
    assert await pci.unbind_state(GPU) == "running"


async def test_without_systemd_nothing_is_unbound(host: Tree) -> None:
    unbind = host.file(UNBIND)
    with pytest.raises(OSError, match="needs systemd"):
        await SysfsPci(host.root).start_unbind(GPU, "nvidia")
    assert unbind.read_bytes() == b""


async def test_a_device_that_somebody_else_keeps_locked_hides_only_itself(host: Tree, pci: SysfsPci) -> None:
    fifo = make_fifo(host, f"{DEVICES}/{GPU}/driver_override")
    for _ in range(6):  # more passes than threads that may hang
        functions = (await pci.read()).functions
        override = functions[GPU].driver_override
        assert isinstance(override, Unknown)
        assert override.code == "DeviceBusy"
        assert functions[GPU].driver == Known("nvidia")
        assert isinstance(functions[OTHER].driver_override, Absent)
    with pytest.raises(OSError) as caught:
        await pci.set_override(GPU, "vfio-pci")
    assert caught.value.errno == errno.EBUSY
    release = os.open(fifo, os.O_RDWR)  # the reader's open returns, and then its read
    os.write(release, b"(null)\n")
    os.close(release)
    fifo.unlink()
    host.file(f"{DEVICES}/{GPU}/driver_override", "(null)\n")
    while isinstance((await pci.read()).functions[GPU].driver_override, Unknown):
        await asyncio.sleep(0.01)


async def test_a_write_that_hangs_is_killed(
    host: Tree, pci: SysfsPci, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.host.sysfs_pci._WRITE_DEADLINE", 0.05)
    fifo = make_fifo(host, f"{DEVICES}/{GPU}/driver_override")
    with pytest.raises(TimeoutError, match=GPU):
        await pci.set_override(GPU, "vfio-pci")
    fifo.unlink()
    host.file(f"{DEVICES}/{GPU}/driver_override", "(null)\n")
    monkeypatch.undo()
    await pci.set_override(GPU, "vfio-pci")


async def test_a_write_that_not_even_a_kill_ends_is_given_up_and_no_second_one_begins(
    host: Tree, pci: SysfsPci, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.host.sysfs_pci._WRITE_DEADLINE", 0.05)
    monkeypatch.setattr("agent.host.command._KILL_WAIT", 0.05)
    monkeypatch.setattr("agent.host.command._kill", lambda _process: None)  # as for who sleeps in the kernel
    fifo = make_fifo(host, f"{DEVICES}/{GPU}/driver_override")
    with pytest.raises(TimeoutError, match=GPU):
        await pci.set_override(GPU, "vfio-pci")
    with pytest.raises(OSError, match="has not returned") as caught:
        await pci.set_override(GPU, "vfio-pci")
    assert caught.value.errno == errno.EBUSY
    override = (await pci.read()).functions[GPU].driver_override
    assert isinstance(override, Unknown)
    assert override.code == "DeviceBusy"
    monkeypatch.undo()
    await pci.set_override(OTHER, "vfio-pci")
    release = os.open(fifo, os.O_RDONLY)
    assert os.read(release, 100) == b"vfio-pci\n"
    assert os.read(release, 100) == b""
    os.close(release)
    fifo.unlink()
    host.file(f"{DEVICES}/{GPU}/driver_override", "(null)\n")
    while isinstance((await pci.read()).functions[GPU].driver_override, Unknown):
        await asyncio.sleep(0.01)


async def test_what_waits_for_a_devices_lock_is_no_thread_of_the_agent(
    host: Tree, pci: SysfsPci, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in the kernel would keep the whole process from ending, and a new agent from starting."""
    monkeypatch.setattr("agent.host.sysfs_pci._WRITE_DEADLINE", 0.05)
    before = threading.enumerate()
    for address in (GPU, OTHER):
        make_fifo(host, f"{DEVICES}/{address}/driver_override")
    with pytest.raises(TimeoutError):
        await pci.set_override(OTHER, "vfio-pci")
    assert isinstance((await pci.read()).functions[GPU].driver_override, Unknown)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(10.0)
            assert not thread.is_alive()


READ_AND_END = """
import asyncio, pathlib, sys
from agent.host.sysfs_pci import SysfsPci
pci = asyncio.run(SysfsPci(pathlib.Path(sys.argv[1])).read())
print(pci.functions[sys.argv[2]].driver_override.code, flush=True)
"""


def test_an_agent_that_has_read_a_locked_device_ends_when_it_wants_to(host: Tree) -> None:
    make_fifo(host, f"{DEVICES}/{GPU}/driver_override")
    argv = [sys.executable, "-c", READ_AND_END, str(host.root), GPU]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "DeviceBusy\n", "")


async def test_an_override_that_cannot_be_read_is_unknown_and_not_unset(host: Tree, pci: SysfsPci) -> None:
    override = host.root / DEVICES / GPU / "driver_override"
    override.unlink()
    assert isinstance((await pci.read()).functions[GPU].driver_override, Absent)
    for obstacle in (host.root / "sys", Path("/proc/self/mem")):  # neither opens and reads as an attribute
        override.unlink(missing_ok=True)
        override.symlink_to(obstacle)
        found = (await pci.read()).functions[GPU].driver_override
        assert isinstance(found, Unknown)
        assert found.code == "Unreadable"
    override.unlink()
    override.write_text("vfio-pci")  # without an end of line
    assert (await pci.read()).functions[GPU].driver_override == Known("vfio-pci")


async def test_B1_an_unbind_that_systemd_starts_too_late_writes_nothing(
    host: Tree, pci: SysfsPci, manager: ProcessManager
) -> None:
    unbind = host.file(UNBIND)
    await pci.start_unbind(GPU, "nvidia", -1.0)
    assert await ended(pci, manager, GPU) == "failed: ETIME"
    assert unbind.read_bytes() == b""


async def test_B1_where_systemds_cgroups_cannot_be_seen_nothing_says_that_no_unbind_is_pending(
    tree: Tree,
) -> None:
    tree.function(GPU, 0x030200)
    tree.directory("run/systemd/system")
    pci = SysfsPci(tree.root)
    with pytest.raises(OSError, match="no cgroups at"):
        await pci.read()
    with pytest.raises(OSError, match="no cgroups at"):
        await pci.unbind_state(GPU)
    tree.file("sys/fs/cgroup/cgroup.controllers", "cpu\n")
    assert (await pci.read()).pending_unbinds == ()


async def test_B1_the_udev_rules_look_for_the_very_cgroup_in_which_an_unbind_runs(
    host: Tree, pci: SysfsPci
) -> None:
    make_fifo(host, UNBIND)
    await pci.start_unbind(GPU, "nvidia")
    functions = tuple(FunctionBinding(a, Known("nvidia"), "vfio-pci", Absent()) for a in (GPU, OTHER))
    slots = tuple(SlotBinding(f.address[:-2], "all", f.address, "vfio-pci", (f,)) for f in functions)
    lines = udev_rules(Resolved(Selection(), slots)).splitlines()
    for address, hangs in ((GPU, True), (OTHER, False)):
        about = [line for line in lines if address in line]
        assert len(about) == 2  # its override at each event, and its probe at its own
        looked_for = {re.findall(r'TEST!="/([^"]*)"', line)[0] for line in about}
        assert [(host.root / path).is_dir() for path in looked_for] == [hangs]

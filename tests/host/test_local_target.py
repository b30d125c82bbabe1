import os
from pathlib import Path

import pytest

from agent.core.errors import TerminalError
from agent.core.fact import Absent, Known, Unknown
from agent.host.local_target import LocalTarget, UnobservableTarget, read_process
from agent.host.real import real_ports
from agent.host.systemctl_show import cgroup_pids, parse_properties, parse_unit
from tests.host.trees import Tree


async def test_the_host_shows_its_libraries_shm_and_device_nodes(tree: Tree):
    tree.file("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.590.48.01")
    tree.directory("dev/shm")
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "null", "nvidia-caps/nvidia-cap1"):
        tree.file(f"dev/{name}")
    facts = await LocalTarget(tree.root).facts()
    assert facts.reachable == Known(value=True)
    assert facts.user_driver == Known("590.48.01")
    assert isinstance(facts.shm_bytes, Known)
    assert facts.shm_bytes.value > 0
    assert facts.device_nodes == Known(("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"))
    assert isinstance(facts.nvml, Unknown)


async def test_P12_a_host_without_dev_shm_has_none(tree: Tree):
    assert isinstance((await LocalTarget(tree.root).facts()).shm_bytes, Absent)


async def test_files_are_read_and_looked_for(tree: Tree):
    tree.file("etc/nccl.conf", "NCCL_DEBUG=INFO\n")
    target = LocalTarget(tree.root)
    assert await target.read_file("/etc/nccl.conf") == "NCCL_DEBUG=INFO\n"
    assert await target.read_file("/etc/none") is None
    assert await target.exists("/etc/nccl.conf")
    assert not await target.exists("/etc/nccl.conf/under-a-file")


async def test_a_running_process_shows_what_it_was_started_with():
    process = await LocalTarget().process(os.getpid())
    assert process is not None
    assert process.argv[0]
    assert process.env["PATH"]


def test_arguments_and_environment_are_split_at_zero_bytes(tree: Tree):
    tree.file("proc/7/cmdline", b"python3\0-m\0sglang\0--flag=\0\0")
    tree.file("proc/7/environ", b"A=1=2\0B=\0broken\0")
    process = read_process(tree.root / "proc/7", 7)
    assert process is not None
    assert process.argv == ("python3", "-m", "sglang", "--flag=", "")
    assert process.env == {"A": "1=2", "B": ""}


def test_a_zombie_and_a_missing_process_are_none(tree: Tree):
    tree.file("proc/8/cmdline", b"")
    assert read_process(tree.root / "proc/8", 8) is None
    assert read_process(tree.root / "proc/9", 9) is None


def test_a_units_properties_are_read_by_name_in_any_order(tree: Tree):
    group = "system.slice/q.service"
    tree.file("sys/fs/cgroup/cgroup.controllers", "cpu\n")
    tree.file(f"sys/fs/cgroup/{group}/cgroup.procs", "12\n")
    tree.file(f"sys/fs/cgroup/{group}/payload/cgroup.procs", "14\n13\n")
    text = "MainPID=12\nNRestarts=2\nResult=exit-code\nLoadState=loaded\nExecMainStatus=9\nActiveState=active\nSubState=running\n"
    unit = parse_unit("q.service", parse_properties(text), cgroup_pids(tree.root, f"/{group}"))
    assert (unit.load_state, unit.active_state, unit.sub_state) == ("loaded", "active", "running")
    assert (unit.main_pid, unit.result, unit.exit_status, unit.restarts) == (12, "exit-code", 9, 2)
    assert unit.pids == (12, 13, 14)


def test_a_unit_without_a_cgroup_has_no_processes(tree: Tree):
    assert cgroup_pids(tree.root, "") == ()
    assert cgroup_pids(tree.root, "/system.slice/gone.service") == ()


def test_the_host_is_reached_over_loopback():
    assert LocalTarget().endpoint(30000) == "http://127.0.0.1:30000"


async def test_a_container_is_unknown_and_every_read_says_why():
    target = UnobservableTarget("lxc:129")
    facts = await target.facts()
    assert facts.reachable == Unknown(
        "reading lxc targets is not offered by this version", "TargetNotOffered"
    )
    assert facts.user_driver == facts.reachable
    for read in (target.unit("a.service"), target.process(1), target.exists("/x"), target.read_file("/x")):
        with pytest.raises(OSError, match="not offered"):
            await read
    with pytest.raises(OSError, match="not offered"):
        target.endpoint(1)


async def test_every_write_of_a_real_host_is_refused_and_says_what_was_not_done(tmp_path: Path):
    ports = real_ports(tmp_path)
    assert ports.simulated == ""
    writes = [
        ports.platform.load_module("nvidia_uvm"),
        ports.platform.set_module_parameter("m", "p", "1"),
        ports.pci.set_override("0000:01:00.0", "vfio-pci"),
        ports.pci.start_unbind("0000:01:00.0", "nvidia"),
        ports.pci.probe("0000:01:00.0"),
        ports.pci.set_group_type(1, "DMA"),
        ports.nvml.set_persistence_mode("0000:01:00.0", on=False),
        ports.nvml.set_power_limit("0000:01:00.0", 600),
        ports.p2p_test.run(["0000:01:00.0"], print),
    ]
    for name in ("host", "lxc:129"):
        target = ports.targets(name)
        writes += [
            target.write_file("/etc/x", "x"),
            target.remove_file("/etc/x"),
            target.install_secrets("/etc/x", {"HF_TOKEN": "/secret"}),
            target.daemon_reload(),
            target.start_unit("a.service"),
            target.stop_unit("a.service"),
            target.kill_unit("a.service"),
            target.reset_failed("a.service"),
        ]
    for write in writes:
        with pytest.raises(TerminalError, match="not offered by this version") as refused:
            await write
        assert refused.value.reason == "RealHostReadOnly"
        assert refused.value.next_step
    assert await ports.pci.unbind_state("0000:01:00.0") == "none"
    assert list(tmp_path.iterdir()) == []


async def test_the_real_machine_is_read_without_a_crash():
    ports = real_ports()
    platform = await ports.platform.read()
    assert isinstance(platform.kernel_release, Known)
    assert (await ports.targets("host").facts()).reachable == Known(value=True)
    try:
        functions = (await ports.pci.read()).functions
    except FileNotFoundError:
        functions = {}
    assert set(await ports.holders.read(functions)) == set(functions)

import errno
import os
import re
from pathlib import Path

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.host.command_target import CommandTarget
from agent.host.local_target import LocalTarget, read_process
from agent.host.real import real_host
from agent.host.systemctl_show import cgroup_pids, parse_properties, parse_unit, unread_drop_ins
from agent.host.systemd_bus import BusManager
from tests.host.fake_systemd import FakeUnit, fake_systemd
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


def test_B1_a_cgroup_that_goes_away_while_it_is_read_has_no_processes(tree: Tree, monkeypatch):
    """The kernel then gives ENODEV: seen when an unbind's process ended at that moment."""
    tree.file("sys/fs/cgroup/cgroup.controllers", "cpu\n")
    tree.file("sys/fs/cgroup/gone/cgroup.procs", "12\n")

    def read(path: Path) -> str:
        raise OSError(number, "as the kernel says it", str(path))

    monkeypatch.setattr(Path, "read_text", read)
    number = errno.ENODEV
    assert cgroup_pids(tree.root, "/gone") == ()
    number = errno.EACCES
    with pytest.raises(PermissionError):
        cgroup_pids(tree.root, "/gone")


def test_a_drop_in_that_systemd_has_not_read_is_found_by_every_name_of_the_unit(tree: Tree):
    names, place = ("alias.service", "a.service"), "etc/systemd/system"
    assert not unread_drop_ins(tree.root, names, ())
    tree.file(f"{place}/alias.service.d/50-gpu.conf", "[Service]\n")
    assert unread_drop_ins(tree.root, names, ())
    assert not unread_drop_ins(tree.root, names, (f"/{place}/alias.service.d/50-gpu.conf",))


def test_what_systemd_never_lists_is_no_unread_drop_in(tree: Tree):
    place = tree.root / "etc/systemd/system/a.service.d"
    tree.file("etc/systemd/system/a.service.d/10-empty.conf", "")
    tree.file("etc/systemd/system/a.service.d/.50-gpu.conf.gpu-host-agent", "half")
    (place / "20-masked.conf").symlink_to("/dev/null")
    assert not unread_drop_ins(tree.root, ("a.service",), ())


def test_a_unit_without_a_cgroup_has_no_processes(tree: Tree):
    assert cgroup_pids(tree.root, "") == ()
    assert cgroup_pids(tree.root, "/system.slice/gone.service") == ()


def test_the_host_is_reached_over_loopback():
    assert LocalTarget().endpoint(30000) == "http://127.0.0.1:30000"


async def test_a_target_whose_name_says_not_how_to_reach_it_is_unknown_and_every_call_says_why(
    tmp_path: Path,
):
    host = real_host(tmp_path)
    target = host.ports.targets("ssh:root@gpu;1")
    facts = await target.facts()
    assert isinstance(facts.reachable, Unknown)
    assert facts.reachable.code == "TargetUnreachable"
    assert "expected lxc:ID or ssh:user@host" in facts.reachable.reason
    for call in (
        target.unit("a.service"),
        target.process(1),
        target.read_file("/x"),
        target.write_file("/x", "x"),
        target.install_secrets("/x", {}),
        target.start_unit("a.service"),
    ):
        with pytest.raises(OSError, match="expected lxc:ID"):
            await call
    with pytest.raises(OSError, match="expected lxc:ID"):
        target.endpoint(1)
    await host.close()


async def test_a_target_is_one_object_for_as_long_as_the_agent_runs(tmp_path: Path):
    targets = real_host(tmp_path).ports.targets
    assert targets("lxc:129") is targets("lxc:129")
    assert targets("host") is targets("host")
    assert isinstance(targets("lxc:129"), CommandTarget)


async def test_another_root_never_reaches_this_machines_systemd(tmp_path: Path):
    target = LocalTarget(tmp_path)
    for call in (target.start_unit("a.service"), target.stop_unit("a.service"), target.daemon_reload()):
        with pytest.raises(ConnectionError, match="no D-Bus daemon answers"):  # no socket is under that root
            await call


async def test_units_are_switched_through_the_manager():
    async with fake_systemd() as (daemon, systemd):
        systemd.units["a.service"] = FakeUnit()
        target = LocalTarget(daemon.root, manager=(manager := BusManager(daemon.root)))
        await target.start_unit("a.service")
        assert (await target.unit("a.service")).active_state == "active"
        await target.kill_unit("a.service")
        await target.stop_unit("a.service")
        await target.reset_failed("a.service")
        await target.daemon_reload()
        await manager.close()
        verbs = [name for name, _ in systemd.calls if name != "LoadUnit"]
        assert verbs == ["StartUnit", "KillUnit", "StopUnit", "ResetFailedUnit", "Reload"]


# -- files --------------------------------------------------------------------------------------------------------


async def test_a_file_is_written_whole_with_its_parents_whatever_the_umask(tmp_path: Path):
    before = os.umask(0o077)
    try:
        await LocalTarget(tmp_path).write_file(
            "/etc/systemd/system/a.service.d/50-gpu.conf", "[Service]\né\n"
        )
    finally:
        os.umask(before)
    directory = tmp_path / "etc/systemd/system/a.service.d"
    path = directory / "50-gpu.conf"
    assert path.read_bytes() == "[Service]\né\n".encode()
    assert path.stat().st_mode & 0o7777 == 0o644
    assert [d.stat().st_mode & 0o7777 for d in (directory, tmp_path / "etc")] == [0o755, 0o755]
    assert [entry.name for entry in directory.iterdir()] == ["50-gpu.conf"]


async def test_a_symlink_is_replaced_and_what_it_led_to_stays_as_it_was(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    link = tmp_path / "etc/drop-in.conf"
    link.parent.mkdir()
    link.symlink_to(precious)
    await LocalTarget(tmp_path).write_file("/etc/drop-in.conf", "ours")
    assert precious.read_text() == "keep me"
    assert not link.is_symlink()
    assert link.read_text() == "ours"


async def test_what_a_killed_agent_left_half_written_is_in_nobodys_way(tmp_path: Path):
    (tmp_path / ".a.conf.gpu-host-agent").symlink_to(tmp_path / "elsewhere")
    await LocalTarget(tmp_path).write_file("/a.conf", "whole")
    assert (tmp_path / "a.conf").read_text() == "whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.conf"]


async def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    (tmp_path / "a.conf").mkdir()
    with pytest.raises(OSError):
        await LocalTarget(tmp_path).write_file("/a.conf", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.conf"]


async def test_a_removed_file_is_gone_and_a_missing_one_is_no_error(tmp_path: Path):
    (tmp_path / "a.conf").write_text("x")
    target = LocalTarget(tmp_path)
    for _ in range(2):
        await target.remove_file("/a.conf")
        assert not (tmp_path / "a.conf").exists()
    await target.remove_file("/no/such/directory/a.conf")


# -- secrets ------------------------------------------------------------------------------------------------------


def as_systemd_reads(text: str) -> dict[str, str]:
    """man 5 systemd.exec, EnvironmentFile=: in double quotes a backslash before one of these means it literally."""
    lines = (line.partition("=") for line in text.splitlines())
    return {name: re.sub(r'\\(["\\`$])', r"\1", value[1:-1]) for name, _, value in lines}


@pytest.mark.parametrize(
    "value", ["plain", "", "a b", 'q"q', "back\\slash", "$HOME `id` 'x'", "# ; =", "ümlaut\t", "\\"]
)
async def test_secrets_are_roots_alone_and_come_out_as_they_went_in(tmp_path: Path, value: str):
    (tmp_path / "token").write_text(value + "\n")
    await LocalTarget(tmp_path).install_secrets("/run/gpu-host-agent/secrets/q.env", {"HF_TOKEN": "/token"})
    path = tmp_path / "run/gpu-host-agent/secrets/q.env"
    assert as_systemd_reads(path.read_text()) == {"HF_TOKEN": value}
    assert path.stat().st_mode & 0o7777 == 0o600
    assert path.parent.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"two\nSECRETLINES", "a secret has one line"),
        (b"SECRET\r\nmore", "a secret has one line"),
        (b"SECRET\0zero", "control characters"),
        (b"SECRET\rmore", "control characters"),
        (b"SECRET\x1b[0m", "control characters"),
        (b"SECRET\x7f", "control characters"),
        ("SECRET\ufffe".encode(), "control characters"),
        (b"SECRET\xff", "not UTF-8"),
        (b"SECRET" * 3000, "larger than 16 KiB"),
    ],
)
async def test_a_secret_that_systemd_would_read_otherwise_is_refused_and_not_shown(
    tmp_path: Path, value: bytes, why: str
):
    (tmp_path / "token").write_bytes(value)
    with pytest.raises(OSError, match=why) as raised:
        await LocalTarget(tmp_path).install_secrets("/q.env", {"HF_TOKEN": "/token"})
    assert "SECRET" not in str(raised.value)
    assert "token" in str(raised.value)
    assert not (tmp_path / "q.env").exists()


async def test_a_file_that_is_linked_to_dev_null_is_an_empty_one(tmp_path: Path):
    (tmp_path / "50-masked.rules").symlink_to("/dev/null")
    assert await LocalTarget(tmp_path).read_file("/50-masked.rules") == ""


async def test_a_fifo_is_neither_a_secret_nor_a_file_to_read_and_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "token")
    target = LocalTarget(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        await target.install_secrets("/q.env", {"HF_TOKEN": "/token"})
    with pytest.raises(OSError, match="not a regular file"):
        await target.read_file("/token")


async def test_a_secret_whose_file_is_missing_names_the_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no-token"):
        await LocalTarget(tmp_path).install_secrets("/q.env", {"HF_TOKEN": "/no-token"})


async def test_the_real_machine_is_read_without_a_crash():
    host = real_host()
    ports = host.ports
    platform = await ports.platform.read()
    assert isinstance(platform.kernel_release, Known)
    assert (await ports.targets("host").facts()).reachable == Known(value=True)
    try:
        functions = (await ports.pci.read()).functions
    except FileNotFoundError:
        functions = {}
    assert set(await ports.holders.read(functions)) == set(functions)
    await host.close()

"""Modules loaded by a command of systemd's, and parameters written, over a fake tree and real processes."""

import errno
from collections.abc import Iterator

import pytest

from agent.host.proc_platform import ProcPlatform
from tests.host.fake_manager import ProcessManager
from tests.host.trees import Tree


@pytest.fixture
def manager(tree: Tree) -> Iterator[ProcessManager]:
    made = ProcessManager(tree.root)
    yield made
    made.end()


def install_modprobe(tree: Tree, body: str) -> None:
    tree.file("usr/sbin/modprobe", f"#!/bin/sh\n{body}\n").chmod(0o755)


async def test_modprobe_is_run_by_systemd_with_the_name_alone(tree: Tree, manager: ProcessManager) -> None:
    install_modprobe(tree, f'echo "$@" > {tree.root}/said')
    await ProcPlatform(tree.root, manager=manager).load_module("vfio-pci")
    assert (tree.root / "said").read_text() == "-- vfio-pci\n"
    assert [command.unit for command in manager.commands] == ["gpu-host-agent-modprobe-vfio-pci.service"]


async def test_a_module_that_is_live_or_built_in_is_not_loaded_again(
    tree: Tree, manager: ProcessManager
) -> None:
    tree.file("sys/module/nvidia/initstate", "live\n")
    tree.directory("sys/module/vfio_pci")
    for name in ("nvidia", "vfio-pci"):
        await ProcPlatform(tree.root, manager=manager).load_module(name)
    assert manager.commands == []


async def test_D9_a_modprobe_that_fails_names_its_status_and_where_to_look(
    tree: Tree, manager: ProcessManager
) -> None:
    install_modprobe(tree, "exit 3")
    with pytest.raises(
        OSError, match=r"nvidia_uvm ended with status 3.*journalctl -u gpu-host-agent-modprobe"
    ) as caught:
        await ProcPlatform(tree.root, manager=manager).load_module("nvidia_uvm")
    assert caught.value.errno == errno.EIO


async def test_a_modprobe_that_hangs_is_given_up_and_no_second_one_begins(
    tree: Tree, manager: ProcessManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.host.modprobe.DEADLINE", 0.05)
    install_modprobe(tree, "exec sleep 60")
    tree.file("sys/module/nvidia/initstate", "coming\n")
    platform = ProcPlatform(tree.root, manager=manager)
    with pytest.raises(TimeoutError, match="modprobe nvidia"):
        await platform.load_module("nvidia")
    with pytest.raises(OSError) as caught:
        await platform.load_module("nvidia")
    assert caught.value.errno == errno.EBUSY
    assert len(manager.commands) == 1


@pytest.mark.parametrize("name", ["", "-r", "../x", "a b", "nvidia;reboot"])
async def test_what_is_no_modules_name_is_not_run(tree: Tree, manager: ProcessManager, name: str) -> None:
    with pytest.raises(OSError) as caught:
        await ProcPlatform(tree.root, manager=manager).load_module(name)
    assert caught.value.errno == errno.EINVAL
    assert manager.commands == []


async def test_a_host_without_modprobe_or_without_systemd_says_so(
    tree: Tree, manager: ProcessManager
) -> None:
    with pytest.raises(OSError, match="install kmod"):
        await ProcPlatform(tree.root, manager=manager).load_module("nvidia")
    with pytest.raises(OSError, match="needs systemd"):
        await ProcPlatform(tree.root).load_module("nvidia")


async def test_a_parameter_is_written_byte_for_byte(tree: Tree) -> None:
    parameter = tree.file("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    platform = ProcPlatform(tree.root)
    await platform.set_module_parameter("nvidia-uvm", "uvm_disable_hmm", "1")
    assert parameter.read_bytes() == b"1"
    with pytest.raises(FileNotFoundError):
        await platform.set_module_parameter("nvidia_uvm", "no_such", "1")
    for module, name in (("..", "x"), ("nvidia", "../../x"), ("", "x")):
        with pytest.raises(OSError) as caught:
            await platform.set_module_parameter(module, name, "1")
        assert caught.value.errno == errno.EINVAL

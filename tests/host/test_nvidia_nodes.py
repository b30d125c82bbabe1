"""Device nodes of NVIDIA's driver: which are missing in a fake tree, and a real process that systemd would start."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator

import pytest

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.nvidia_nodes import by_hand
from agent.core.observation import NvidiaNodes
from agent.host.modules_load import read_modules_load
from agent.host.nvidia_minors import NvidiaMinors
from agent.host.nvidia_nodes import read_nvidia_nodes
from agent.host.proc_platform import ProcPlatform
from tests.host.fake_manager import ProcessManager
from tests.host.trees import Tree

MAKES = """#!/bin/sh
echo "$*" >>"@/said"
uvm=
while [ $# -gt 0 ]; do
  case $1$uvm in
    -u) uvm=u ;;
    -c) shift; [ "$1" = 255 ] && : >"@/dev/nvidiactl" || : >"@/dev/nvidia$1" ;;
    -cu) shift; : >"@/dev/nvidia-uvm"; : >"@/dev/nvidia-uvm-tools" ;;
  esac
  shift
done
"""


@pytest.fixture
def manager(tree: Tree) -> Iterator[ProcessManager]:
    made = ProcessManager(tree.root)
    yield made
    made.end()


@pytest.fixture
def host(tree: Tree) -> Tree:
    """Two GPUs on nvidia, whose minors are not their order, and no node."""
    tree.directory("dev")
    for address, minor in (("0000:01:00.0", 3), ("0000:41:00.0", 0)):
        tree.file(
            f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t x\nDevice Minor: \t {minor}\n"
        )
    return tree


def installs(tree: Tree, text: str = MAKES) -> None:
    tree.file("usr/bin/nvidia-modprobe", text.replace("@/", f"{tree.root}/")).chmod(0o755)


def read(host: Tree) -> Fact[NvidiaNodes]:
    return read_nvidia_nodes(host.root, NvidiaMinors(host.root))


def test_D6_the_nodes_that_are_missing_are_named_by_the_drivers_minors(host: Tree) -> None:
    assert read(host) == Known(NvidiaNodes(("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia3")))
    host.file("dev/nvidia0")
    host.file("sys/module/nvidia_uvm/initstate", "live\n")
    installs(host)
    missing = ("/dev/nvidiactl", "/dev/nvidia3", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
    assert read(host) == Known(NvidiaNodes(missing, "/usr/bin/nvidia-modprobe"))


def test_B14_a_host_with_no_gpu_on_nvidia_needs_no_node(tree: Tree) -> None:
    assert isinstance(read(tree), Absent)


def test_the_driver_is_asked_for_a_minor_once_in_the_life_of_its_gpus_directory(host: Tree) -> None:
    """A question wakes a GPU that is powered down."""
    minors = NvidiaMinors(host.root)
    assert minors.read() == {"0000:01:00.0": Known(3), "0000:41:00.0": Known(0)}
    gpu = host.root / "proc/driver/nvidia/gpus/0000:01:00.0"
    (gpu / "information").write_text("Device Minor: \t 5\n")
    assert minors.read()["0000:01:00.0"] == Known(3)
    gpu.rename(host.root / "moved")
    host.file(f"{gpu.relative_to(host.root)}/information", "Device Minor: \t 5\n")
    assert minors.read()["0000:01:00.0"] == Known(5)
    gpu.rename(host.root / "moved again")
    assert set(minors.read()) == {"0000:41:00.0"}


@pytest.mark.parametrize("text", ["", "Model: \t x\n", "Device Minor: \t ?\n", "Device Minor: \t 4 of 5\n"])
def test_a_gpu_that_shows_no_minor_leaves_unknown_which_nodes_are_missing(host: Tree, text: str) -> None:
    host.file("proc/driver/nvidia/gpus/0000:01:00.0/information", text)
    assert isinstance(read(host), Unknown)


async def test_a_gpu_that_is_stuck_keeps_no_thread_of_the_agent_and_is_not_asked_again(
    host: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread in the kernel would keep the process from ending, and a new agent from starting."""
    monkeypatch.setattr("agent.host.attribute_read.STALL", 0.1)
    information = host.root / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.unlink()
    os.mkfifo(information)
    before = threading.enumerate()
    minors = NvidiaMinors(host.root)
    platform = ProcPlatform(host.root, minors=minors)
    for _ in range(6):  # more passes than threads that may hang
        nodes = (await platform.read()).nvidia_nodes
        assert isinstance(nodes, Unknown)
        assert "does not answer" in nodes.reason
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(10.0)
            assert not thread.is_alive()
    waits = os.open(information, os.O_WRONLY | os.O_NONBLOCK)  # the one reader that there may be
    information.unlink()
    host.file("proc/driver/nvidia/gpus/0000:01:00.0/information", "Device Minor: \t 3\n")
    os.close(waits)
    while minors.read()["0000:01:00.0"] != Known(3):
        await asyncio.sleep(0.01)


async def test_missing_nodes_are_made_by_nvidia_modprobe_under_systemd_and_not_twice(
    host: Tree, manager: ProcessManager
) -> None:
    installs(host)
    host.file("sys/module/nvidia_uvm/initstate", "live\n")
    platform = ProcPlatform(host.root, manager=manager)
    await platform.make_device_nodes()
    await platform.make_device_nodes()
    assert (host.root / "said").read_text() == "-c 255 -c 0 -c 3\n-u -c 0\n"
    assert read(host) == Known(NvidiaNodes((), "/usr/bin/nvidia-modprobe"))
    assert [c.unit for c in manager.commands] == [
        "gpu-host-agent-device-nodes.service",
        "gpu-host-agent-device-nodes-uvm.service",
    ]


async def test_a_host_without_nvidia_modprobe_says_so_and_runs_nothing(
    host: Tree, manager: ProcessManager
) -> None:
    with pytest.raises(FileNotFoundError, match="no /usr/bin/nvidia-modprobe"):
        await ProcPlatform(host.root, manager=manager).make_device_nodes()
    assert manager.commands == []


async def test_an_nvidia_modprobe_that_fails_or_hangs_names_its_unit(
    host: Tree, manager: ProcessManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = ProcPlatform(host.root, manager=manager)
    installs(host, "#!/bin/sh\nexit 7\n")
    with pytest.raises(
        OSError, match="ended with status 7; journalctl -u gpu-host-agent-device-nodes"
    ) as caught:
        await platform.make_device_nodes()
    assert caught.value.errno == errno.EIO
    monkeypatch.setattr("agent.host.nvidia_nodes.DEADLINE", 0.05)
    installs(host, "#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(TimeoutError, match=r"systemctl status gpu-host-agent-device-nodes\.service"):
        await platform.make_device_nodes()


def test_the_words_for_an_operator_are_the_commands_that_make_the_nodes() -> None:
    missing = ("/dev/nvidiactl", "/dev/nvidia3", "/dev/nvidia-uvm")
    told = by_hand(NvidiaNodes(missing))
    assert "install nvidia-modprobe" in told
    assert told.endswith("as root: nvidia-modprobe -c 255 -c 3; nvidia-modprobe -u -c 0")
    assert "install" not in by_hand(NvidiaNodes(missing, "/usr/bin/nvidia-modprobe"))


def test_modules_load_d_is_read_as_systemd_reads_it(tree: Tree) -> None:
    tree.file("etc/modules", "# a comment\nnvidia\n\n; another\nvfio-pci \n")
    tree.directory("etc/modules-load.d")
    (tree.root / "etc/modules-load.d/modules.conf").symlink_to("../modules")
    tree.file("etc/modules-load.d/nvidia.conf", "")  # masks the package's
    tree.file("usr/lib/modules-load.d/nvidia.conf", "nvidia-drm\n")
    tree.file("usr/lib/modules-load.d/fwupd.conf", "msr\n")
    tree.file("etc/modules-load.d/README", "nouveau\n")
    assert read_modules_load(tree.root) == Known(
        (
            ("/usr/lib/modules-load.d/fwupd.conf", "msr"),
            ("/etc/modules-load.d/modules.conf", "nvidia"),
            ("/etc/modules-load.d/modules.conf", "vfio-pci"),
        )
    )


def test_a_file_of_modules_load_d_that_cannot_be_read_leaves_all_unknown(tree: Tree) -> None:
    tree.directory("etc/modules-load.d/odd.conf")
    assert isinstance(read_modules_load(tree.root), Unknown)

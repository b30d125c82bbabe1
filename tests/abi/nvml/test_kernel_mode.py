"""The stand-in library on a driver's /proc tree, as it serves in a virtual machine with a stand-in kernel driver."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.host.nvml import ChildNvml
from tests.abi.nvml.build import cached
from tests.abi.nvml.stub import needs_compiler
from tests.host.nvml_rig import A, C, known
from tests.host.trees import Tree

SESSION = """
import json, os, pynvml
def held():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.path.basename(os.readlink(p)) for p in links if os.path.islink(p) and "/dev/nvidia" in os.readlink(p))
pynvml.nvmlInit()
pynvml.nvmlInit()
during = held()
pynvml.nvmlShutdown()
still = held()
pynvml.nvmlShutdown()
print(json.dumps([during, still, held()]))
"""


@pytest.fixture
def driver(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.file(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01\n"
    )
    tree.file("sys/module/nvidia/version", "590.48.01\n")
    tree.file("dev/nvidiactl")
    for address, minor in ((C, 0), (A, 1)):
        information = (
            f"Model: \t\t Stand-in\nIRQ:   \t\t 16\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n"
        )
        tree.file(f"proc/driver/nvidia/gpus/{address}/information", information)
        tree.file(f"proc/driver/nvidia/gpus/{address}/persistence", "0\n")
        tree.file(f"dev/nvidia{minor}")
        tree.function(address, 0x030000)
        tree.bind(address, "nvidia")
    return tree


def environment(driver: Tree) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(cached()), "NVML_STUB_ROOT": str(driver.root), "NVML_STUB_STATE": "kernel"}


def nvml(driver: Tree) -> ChildNvml:
    return ChildNvml(driver.root, 60.0, environment(driver))


@needs_compiler
async def test_the_gpus_are_those_of_the_kernel_driver_in_the_order_of_their_addresses(driver: Tree):
    answer = await nvml(driver).read()
    assert isinstance(answer, Known)
    assert answer.value.driver_version == Known("590.48.01")
    found = {address: known(gpu) for address, gpu in answer.value.gpus.items()}
    assert {address: (gpu.index, gpu.minor, gpu.uuid) for address, gpu in found.items()} == {
        A: (0, Known(1), Known("GPU-1")),
        C: (1, Known(0), Known("GPU-0")),
    }
    gpu = found[A]
    assert (gpu.name, gpu.persistence_mode) == (Known("Stand-in"), Known(value=False))
    assert (gpu.memory_used, gpu.pids, gpu.utilization) == (Known(0), Known(()), Known(0))
    assert isinstance(gpu.power_limit, Absent)


@needs_compiler
async def test_persistence_mode_is_written_to_the_drivers_file_of_that_gpu(driver: Tree):
    await nvml(driver).set(A, "persistence-mode", "on")
    files = [driver.root / f"proc/driver/nvidia/gpus/{address}/persistence" for address in (A, C)]
    assert [file.read_text().strip() for file in files] == ["1", "0"]


@needs_compiler
async def test_without_a_loaded_driver_nvml_says_so(driver: Tree):
    (driver.root / "proc/driver/nvidia/version").unlink()
    answer = await nvml(driver).read()
    assert isinstance(answer, Unknown)
    assert answer.code == "NvmlDriverNotLoaded"


@needs_compiler
def test_an_open_session_holds_the_node_of_every_gpu_until_its_last_shutdown(driver: Tree):
    done = subprocess.run(
        [sys.executable, "-c", SESSION], env=environment(driver), check=True, capture_output=True, timeout=60
    )
    nodes = ["nvidia0", "nvidia1", "nvidiactl"]
    assert json.loads(done.stdout) == [nodes, nodes, []]

"""The real pynvml in the real child, against a stand-in library with injected faults (needs a C compiler)."""

import asyncio
import shutil
import subprocess
from ctypes.util import find_library
from pathlib import Path

import pytest

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Gpu, Nvml
from agent.host.nvml import CODES, ChildNvml
from agent.host.nvml_child import sysfs_address
from tests.host.trees import Tree

A, C = "0000:01:00.0", "0000:c1:00.0"
COMPILER = shutil.which("gcc") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler to build the stand-in NVML library"
)


@pytest.fixture
def host(tree: Tree) -> Tree:
    for address in (A, C):
        tree.function(address, 0x030200)
        tree.bind(address, "nvidia")
    return tree


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stub.c")
    output = directory / "libnvidia-ml.so.1"
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-o", str(output), str(source)], check=True, timeout=120
    )
    return directory


async def ask(host: Tree, library: Path, deadline: float = 60.0, **env: str) -> Fact[Nvml]:
    return await ChildNvml(host.root, deadline, {"LD_LIBRARY_PATH": str(library), **env}).read()


def gpu(answer: Fact[Nvml], address: str) -> Gpu:
    assert isinstance(answer, Known)
    fact = answer.value.gpus[address]
    assert isinstance(fact, Known)
    return fact.value


@needs_compiler
async def test_every_field_of_a_healthy_gpu_is_translated(host: Tree, library: Path):
    answer = await ask(host, library)
    assert isinstance(answer, Known)
    assert (answer.value.driver_version, answer.value.cuda_version) == (Known("590.48.01"), Known("13.1"))
    assert list(answer.value.gpus) == [A, C]
    first = gpu(answer, A)
    assert (first.index, first.minor, first.uuid) == (0, Known(3), Known("GPU-00000000"))
    assert (first.power_limit, first.power_limit_range) == (Known(600), Known((300, 600)))
    assert (first.memory_total, first.memory_used) == (Known(96 * 1024), Known(2))
    assert first.persistence_mode == Known(value=True)
    assert gpu(answer, C).persistence_mode == Known(value=False)
    assert first.pids == Known(())
    assert isinstance(first.serial, Absent)


@needs_compiler
async def test_D5_a_pending_recovery_action_is_read_from_field_230(host: Tree, library: Path):
    assert gpu(await ask(host, library), A).recovery_action == Known("reset")


@needs_compiler
async def test_D7_the_links_generation_while_idle_is_reported_beside_its_maximum(host: Tree, library: Path):
    first = gpu(await ask(host, library), A)
    assert (first.link_gen, first.max_link_gen) == (Known(1), Known(5))


@needs_compiler
async def test_D6_the_minor_number_is_not_the_index(host: Tree, library: Path):
    answer = await ask(host, library)
    assert [(gpu(answer, a).index, gpu(answer, a).minor) for a in (A, C)] == [(0, Known(3)), (1, Known(0))]


@needs_compiler
async def test_a_function_that_an_older_driver_lacks_is_unknown_for_itself_alone(host: Tree, library: Path):
    first = gpu(await ask(host, library), A)
    assert isinstance(first.utilization, Unknown)
    assert first.utilization.code == "NvmlFunctionNotFound"


@needs_compiler
async def test_D4_one_lost_gpu_does_not_hide_the_others(host: Tree, library: Path):
    answer = await ask(host, library, STUB_LOST="0")
    assert isinstance(answer, Known)
    lost = answer.value.gpus[A]
    assert isinstance(lost, Unknown)
    assert lost.code == "GpuLost"
    assert gpu(answer, C).index == 1
    assert set(answer.value.gpus) == {A, C}


@needs_compiler
@pytest.mark.parametrize(("code", "reason"), sorted(CODES.items()))
async def test_a_code_at_init_is_unknown_with_its_own_reason(
    host: Tree, library: Path, code: int, reason: str
):
    answer = await ask(host, library, STUB_INIT=str(code))
    assert isinstance(answer, Unknown)
    assert answer.code == reason


@needs_compiler
async def test_D2_a_version_mismatch_names_both_versions(host: Tree, library: Path):
    host.file("sys/module/nvidia/version", "590.48.01\n")
    host.file("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.565.57.01")
    answer = await ask(host, library, STUB_INIT="18")
    assert isinstance(answer, Unknown)
    assert "kernel module is 590.48.01" in answer.reason
    assert "library is 565.57.01" in answer.reason


@needs_compiler
async def test_B2_an_unreadable_persistence_mode_is_unknown_and_not_off(host: Tree, library: Path):
    first = gpu(await ask(host, library, STUB_CODE="4"), A)
    assert isinstance(first.persistence_mode, Unknown)
    assert first.persistence_mode.code == "NvmlNoPermission"
    assert isinstance(first.recovery_action, Unknown)
    assert isinstance(first.pids, Unknown)


@needs_compiler
async def test_a_library_that_hangs_is_given_up_at_the_deadline(host: Tree, library: Path):
    answer = await ask(host, library, deadline=1.0, STUB_HANG="1")
    assert isinstance(answer, Unknown)
    assert answer.code == "NvmlTimeout"


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="this machine has NVIDIA's library")
async def test_without_the_library_nvml_is_unknown(host: Tree):
    answer = await ChildNvml(host.root, 60.0).read()
    assert isinstance(answer, Unknown)
    assert answer.code == "NvmlLibraryNotFound"


async def test_B14_with_no_gpu_on_nvidia_nvml_is_not_opened(tree: Tree):
    answer = await ChildNvml(tree.root, 60.0, {"PATH": "/nonexistent"}).read()
    assert isinstance(answer, Absent)


@needs_compiler
async def test_callers_at_the_same_time_share_one_child(host: Tree, library: Path):
    nvml = ChildNvml(host.root, 60.0, {"LD_LIBRARY_PATH": str(library)})
    first, second = await asyncio.gather(nvml.read(), nvml.read())
    assert first is second


@needs_compiler
async def test_a_pynvml_in_the_working_directory_is_not_run(
    host: Tree, library: Path, monkeypatch: pytest.MonkeyPatch
):
    host.file("pynvml.py", "raise SystemExit(7)\n")
    monkeypatch.chdir(host.root)
    assert isinstance(await ask(host, library), Known)


def test_bus_ids_are_brought_to_sysfs_form():
    assert sysfs_address("00000000:C1:00.0") == "0000:c1:00.0"
    assert sysfs_address("00010000:01:00.0") == "10000:01:00.0"

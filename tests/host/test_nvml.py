"""The real pynvml in the real child, against a stand-in library with injected faults (needs a C compiler)."""

import asyncio
import contextlib
import errno
import os
import signal
from ctypes.util import find_library
from pathlib import Path

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.core.observation import NOT_TOLD, Gpu
from agent.host.nvml import ChildNvml
from agent.host.nvml_child import sysfs_address
from agent.host.nvml_facts import CODES
from tests.abi.nvml.stub import needs_compiler
from tests.host.nvml_rig import A, C, Rig, known, two_gpus, unknown_gpu
from tests.host.trees import Tree


@pytest.fixture
def host(tree: Tree) -> Rig:
    return two_gpus(tree)


@needs_compiler
async def test_every_field_of_a_healthy_gpu_is_translated(host: Rig):
    host.stub.set(
        {
            "gpu0.persistence": 1,
            "gpu0.memory_used": 2 << 20,
            "gpu0.memory_reserved": 512 << 20,
            "gpu0.utilization": 37,
            "gpu0.processes": "4243:1048576 4242:-",
        }
    )
    answer = await host.read()
    assert (answer.driver_version, answer.nvml_version) == (Known("590.48.01"), Known("13.590.48.01"))
    assert answer.cuda_version == Known("13.1")
    assert list(answer.gpus) == [A, C]
    first = known(answer.gpus[A])
    assert (first.index, first.minor, first.name) == (0, Known(3), Known("Stub"))
    assert first.uuid == Known("GPU-00000000-0000-0000-0000-000000000000")
    assert (first.power_limit, first.power_limit_range) == (Known(600), Known((300, 600)))
    assert (first.memory_total, first.memory_used) == (Known(96 * 1024), Known(2))
    assert (first.utilization, first.pids) == (Known(37), Known((4242, 4243)))
    assert first.persistence_mode == Known(value=True)
    assert known(answer.gpus[C]).persistence_mode == Known(value=False)
    assert (first.recovery_action, first.link_width) == (Known("none"), Known(16))
    assert isinstance(first.serial, Absent)


@needs_compiler
@pytest.mark.parametrize(
    ("number", "word"), [(1, "reset"), (2, "reboot"), (4, "drain and reset"), (99, "action 99")]
)
async def test_D5_a_pending_recovery_action_is_read_from_field_230(host: Rig, number: int, word: str):
    host.stub.set({"gpu0.recovery_action": number})
    assert (await host.gpu(A)).recovery_action == Known(word)


@needs_compiler
async def test_a_driver_that_does_not_know_field_230_leaves_the_recovery_action_absent(host: Rig):
    host.stub.set({"gpu.field.230.code": 3})
    assert isinstance((await host.gpu(A)).recovery_action, Absent)


@needs_compiler
async def test_D7_the_links_generation_while_idle_is_reported_beside_its_maximum(host: Rig):
    host.stub.set({"gpu0.link_gen": 1})
    first = await host.gpu(A)
    assert (first.link_gen, first.max_link_gen) == (Known(1), Known(5))


@needs_compiler
async def test_D6_the_minor_number_is_not_the_index(host: Rig):
    gpus = (await host.read()).gpus
    assert [(known(gpus[a]).index, known(gpus[a]).minor) for a in (A, C)] == [(0, Known(3)), (1, Known(0))]


@needs_compiler
@pytest.mark.parametrize("count", [8, 16])
async def test_every_gpu_of_a_full_host_is_found_by_its_address(tree: Tree, count: int):
    rig = Rig(tree)
    addresses = [f"0000:{0x11 + 8 * place:02x}:00.0" for place in range(count)]
    for place, address in enumerate(addresses):
        rig.add(address, count - 1 - place)
    gpus = (await rig.read()).gpus
    assert {address: known(gpu).minor for address, gpu in gpus.items()} == {
        address: Known(count - 1 - place) for place, address in enumerate(addresses)
    }


@needs_compiler
@pytest.mark.parametrize(
    ("lacking", "fields"),
    [
        (("nvmlDeviceGetUtilizationRates",), ["utilization"]),
        (("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), ["memory_total", "memory_used"]),
        (("nvmlDeviceGetFieldValues",), ["recovery_action", "remapped_rows", "replays"]),
        (("nvmlDeviceGetVbiosVersion",), ["vbios"]),
        (("nvmlDeviceGetBAR1MemoryInfo",), ["bar1_total"]),
        (
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            ["clock_reasons"],
        ),
        (
            ("nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
            ["graphics_pids"],
        ),
        (("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"), ["pids"]),
    ],
)
async def test_a_function_that_an_older_driver_lacks_is_unknown_for_itself_alone(
    tree: Tree, lacking: tuple[str, ...], fields: list[str]
):
    first = await two_gpus(tree, lacking).gpu(A)
    facts = {name: getattr(first, name) for name in Gpu.__slots__}
    unknown = {
        name: fact.code for name, fact in facts.items() if isinstance(fact, Unknown) and fact.code != NOT_TOLD
    }
    assert unknown == dict.fromkeys(fields, "NvmlFunctionNotFound")


@needs_compiler
@pytest.mark.parametrize("newest", ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"])
async def test_an_older_form_of_a_question_serves_where_the_driver_lacks_the_newest(tree: Tree, newest: str):
    rig = two_gpus(tree, (newest,))
    rig.stub.set({"gpu0.memory_used": 2 << 20, "gpu0.processes": "4242:1"})
    first = await rig.gpu(A)
    assert (first.memory_used, first.pids) == (Known(2), Known((4242,)))


@needs_compiler
@pytest.mark.parametrize(
    ("code", "reason"), [(15, "GpuLost"), (16, "GpuResetRequired"), (999, "NvmlUnknownError")]
)
async def test_D4_one_gpu_that_cannot_be_opened_does_not_hide_the_others(host: Rig, code: int, reason: str):
    host.stub.set({"gpu0.code": code})
    gpus = (await host.read()).gpus
    assert unknown_gpu(gpus[A]).code == reason
    assert known(gpus[C]).index == 1
    assert set(gpus) == {A, C}


@needs_compiler
async def test_D4_a_gpu_lost_while_it_is_being_asked_leaves_what_it_said_before(host: Rig):
    host.stub.set(
        {f"gpu0.call.{name}": 15 for name in ("nvmlDeviceGetSerial", "nvmlDeviceGetPersistenceMode")}
    )
    gpus = (await host.read()).gpus
    first = known(gpus[A])
    assert first.minor == Known(3)
    assert isinstance(first.persistence_mode, Unknown)
    assert first.persistence_mode.code == "GpuLost"
    assert known(gpus[C]).persistence_mode == Known(value=False)


@needs_compiler
@pytest.mark.parametrize(("code", "reason"), [*sorted(CODES.items()), (17, "NvmlError17")])
async def test_a_code_at_init_is_unknown_with_its_own_reason(host: Rig, code: int, reason: str):
    host.stub.set({"init.code": code})
    assert (await host.unknown()).code == reason


@needs_compiler
@pytest.mark.parametrize(("code", "reason"), [*sorted(CODES.items()), (17, "NvmlError17")])
async def test_a_code_for_one_question_is_unknown_with_its_own_reason(host: Rig, code: int, reason: str):
    host.stub.set({"gpu0.call.nvmlDeviceGetUUID": code})
    first = await host.gpu(A)
    assert isinstance(first.uuid, Unknown)
    assert first.uuid.code == reason
    assert first.minor == Known(3)


@needs_compiler
async def test_a_question_that_a_gpu_does_not_support_is_no_fault(host: Rig):
    host.stub.set({"call.nvmlDeviceGetUtilizationRates": 3})
    assert isinstance((await host.gpu(A)).utilization, Absent)


@needs_compiler
async def test_D2_a_version_mismatch_names_both_versions(host: Rig):
    host.tree.file("sys/module/nvidia/version", "590.48.01\n")
    host.tree.file("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.565.57.01")
    host.stub.set({"init.code": 18})
    answer = await host.unknown()
    assert "kernel module is 590.48.01" in answer.reason
    assert "library is 565.57.01" in answer.reason


@needs_compiler
async def test_B2_an_unreadable_persistence_mode_is_unknown_and_not_off(host: Rig):
    host.stub.set({"call.nvmlDeviceGetPersistenceMode": 4})
    first = await host.gpu(A)
    assert isinstance(first.persistence_mode, Unknown)
    assert first.persistence_mode.code == "NvmlNoPermission"


@needs_compiler
@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetUUID", "nvmlShutdown"])
async def test_a_call_that_hangs_is_given_up_and_the_next_reading_is_whole(host: Rig, call: str):
    host.stub.set({f"call.{call}": "hang"})
    assert (await host.unknown(deadline=2.0)).code == "NvmlTimeout"
    host.stub.set({f"call.{call}": None})
    assert set((await host.read()).gpus) == {A, C}


@needs_compiler
async def test_while_a_child_of_an_agent_before_this_one_sleeps_in_the_kernel_no_other_is_started(host: Rig):
    os.mkfifo(
        host.tree.file("proc/4711/stat", "4711 (gpu-agent-nvml) D 1 4711 4711 0\n").with_name("cmdline")
    )
    nvml = host.nvml()
    for _ in range(2):
        answer = await nvml.read()
        assert isinstance(answer, Unknown)
        assert answer.code == "NvmlStuck"
    assert not host.stub.trace.exists()
    with pytest.raises(OSError, match="still sleeps") as caught:
        await nvml.set(A, "persistence-mode", "on")
    assert caught.value.errno == errno.EBUSY
    assert not host.stub.trace.exists()
    host.tree.file("proc/4711/stat", "4711 (another) D 1 4711 4711 0\n")
    assert isinstance(await nvml.read(), Known)


@needs_compiler
async def test_a_process_that_does_not_show_its_arguments_is_not_waited_for(host: Rig):
    """Whoever has a process's memory map locked keeps everybody waiting who reads them: here, a FIFO nobody writes to."""
    for pid, name, state in ((4711, "gpu-agent-nvml", "S"), (4712, "python (x) D", "D")):
        host.tree.file(f"proc/{pid}/stat", f"{pid} ({name}) {state} 1 {pid} {pid} 0\n")
        os.mkfifo(host.tree.root / f"proc/{pid}/cmdline")
    assert isinstance(await host.nvml().read(), Known)


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
async def test_a_process_of_another_user_is_no_child_of_ours_whatever_it_calls_itself(host: Rig):
    host.tree.file("proc/4711/stat", "4711 (gpu-agent-nvml) D 1 4711 4711 0\n")
    os.chown(host.tree.root / "proc/4711", 1000, 1000)
    assert isinstance(await host.nvml().read(), Known)


@needs_compiler
async def test_a_child_calls_itself_by_the_name_that_the_next_agent_looks_for(host: Rig):
    host.stub.set({"call.nvmlInit": "hang"})
    reading = asyncio.create_task(host.nvml().read())
    while not (named := children("gpu-agent-nvml")):
        assert not reading.done(), "it has ended without taking its name"
        await asyncio.sleep(0.01)
    os.kill(named[0], signal.SIGKILL)
    assert isinstance(await reading, Unknown)


def children(name: str) -> list[int]:
    """Of this process, by what they call themselves."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pid, _, rest = stat.read_text().partition(f" ({name}) ")
            found += [int(pid)] if rest.split()[1:2] == [str(os.getpid())] else []
    return found


async def test_earlier_queries_that_cannot_be_looked_for_leave_nvml_unknown(tree: Tree):
    tree.function(A, 0x030200)
    tree.bind(A, "nvidia")
    (tree.root / "proc").symlink_to("proc")
    answer = await ChildNvml(tree.root, 60.0).read()
    assert isinstance(answer, Unknown)
    assert (answer.code, "cannot be told" in answer.reason) == ("NvmlStuck", True)


@needs_compiler
async def test_a_child_that_is_killed_is_unknown_and_says_by_what(host: Rig):
    host.stub.set({"call.nvmlDeviceGetUUID": "kill"})
    answer = await host.unknown()
    assert (answer.code, "status -9" in answer.reason) == ("NvmlChildFailed", True)


@needs_compiler
async def test_the_session_is_closed_also_after_a_fault(host: Rig):
    host.stub.set({"call.nvmlDeviceGetCount_v2": 999})
    await host.unknown()
    calls = host.stub.calls()
    assert (calls[0], calls[-1]) == ("nvmlInit", "nvmlShutdown")


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="this machine has NVIDIA's library")
async def test_without_the_library_nvml_is_unknown(tree: Tree):
    tree.function(A, 0x030200)
    tree.bind(A, "nvidia")
    answer = await ChildNvml(tree.root, 60.0).read()
    assert isinstance(answer, Unknown)
    assert answer.code == "NvmlLibraryNotFound"


@needs_compiler
async def test_B14_with_no_gpu_on_nvidia_nvml_is_not_opened(host: Rig):
    host.leave_nvidia(A)
    host.leave_nvidia(C)
    assert isinstance(await host.nvml().read(), Absent)
    assert not host.stub.trace.exists()


@needs_compiler
async def test_callers_at_the_same_time_share_one_child(host: Rig):
    nvml = host.nvml()
    first, second = await asyncio.gather(nvml.read(), nvml.read())
    assert first is second
    assert len(host.stub.calls("nvmlInit")) == 1


@needs_compiler
async def test_a_pynvml_in_the_working_directory_is_not_run(host: Rig, monkeypatch: pytest.MonkeyPatch):
    host.tree.file("pynvml.py", "raise SystemExit(7)\n")
    monkeypatch.chdir(host.tree.root)
    assert set((await host.read()).gpus) == {A, C}


def test_bus_ids_are_brought_to_sysfs_form():
    assert sysfs_address("00000000:C1:00.0") == "0000:c1:00.0"
    assert sysfs_address("00010000:01:00.0") == "10000:01:00.0"

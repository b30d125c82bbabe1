"""Settings through the real pynvml in the real child, against a stand-in library (needs a C compiler)."""

import asyncio
import errno
from ctypes.util import find_library
from dataclasses import replace

import pytest

from agent.core.errors import TransientError
from agent.core.fact import Known
from agent.core.plan import Action, Disruption, Stage
from agent.host.nvml import ERRNOS, ChildNvml
from agent.host.real import real_ports
from agent.kinds.gpu_settings import GpuSettingsKind
from agent.sim.nvml_codes import CODES as SIMULATED
from tests.abi.nvml.stub import needs_compiler
from tests.host.nvml_rig import A, C, Rig, two_gpus
from tests.host.trees import Tree

SET_PERSISTENCE, SET_POWER = "nvmlDeviceSetPersistenceMode", "nvmlDeviceSetPowerManagementLimit"


@pytest.fixture
def host(tree: Tree) -> Rig:
    return two_gpus(tree)


def power_limit(watts: int) -> Action:
    return Action(
        "gpu-settings", "power-limit", A, "set the power limit", Stage.SET, Disruption.LIVE,
        params={"value": str(watts)}, touches=(A,), undo="", why="", optional=True,
    )  # fmt: skip


async def act(host: Rig, action: Action) -> None:
    await GpuSettingsKind().act(action, replace(real_ports(host.tree.root), nvml=host.nvml()))


@needs_compiler
async def test_persistence_mode_is_switched_on_that_gpu_alone_and_reads_back(host: Rig):
    nvml = host.nvml()
    await nvml.set(C, "persistence-mode", "on")
    assert (await host.gpu(C)).persistence_mode == Known(value=True)
    assert (await host.gpu(A)).persistence_mode == Known(value=False)
    await nvml.set(C, "persistence-mode", "off")
    assert (await host.gpu(C)).persistence_mode == Known(value=False)
    assert host.stub.calls(SET_PERSISTENCE) == [f"{SET_PERSISTENCE} {C} 1", f"{SET_PERSISTENCE} {C} 0"]


@needs_compiler
async def test_a_power_limit_goes_to_nvml_in_milliwatts_and_reads_back_in_watts(host: Rig):
    await host.nvml().set(A, "power-limit", "450")
    assert host.stub.calls(SET_POWER) == [f"{SET_POWER} {A} 450000"]
    assert ((await host.gpu(A)).power_limit, (await host.gpu(C)).power_limit) == (Known(450), Known(600))


@needs_compiler
async def test_D6_the_gpu_is_opened_by_its_address_and_no_other_is_asked_anything(host: Rig):
    await host.nvml().set(C, "persistence-mode", "on")
    asked = {line.split()[1] for line in host.stub.calls() if len(line.split()) > 1}
    assert asked == {C}
    assert host.stub.calls("nvmlDeviceGetHandleByIndex_v2") == []


@needs_compiler
async def test_D6_nothing_is_written_to_a_handle_that_says_it_is_another_gpu(host: Rig):
    host.stub.set({"gpu1.pci_info": A})
    with pytest.raises(OSError, match=f"NVML opened {A} instead") as failed:
        await host.nvml().set(C, "persistence-mode", "on")
    assert failed.value.errno == errno.ENODEV
    assert host.stub.calls(SET_PERSISTENCE) == []


@needs_compiler
async def test_D4_a_lost_gpu_bars_no_write_to_the_others(host: Rig):
    host.stub.set({"gpu0.code": 15})
    await host.nvml().set(C, "persistence-mode", "on")
    assert host.stub.get("gpu1.persistence") == "1"
    with pytest.raises(OSError, match="GPU is lost") as failed:
        await host.nvml().set(A, "persistence-mode", "on")
    assert failed.value.errno == errno.EIO


@needs_compiler
@pytest.mark.parametrize("code", sorted({*SIMULATED, *ERRNOS, 17} - {18}))
@pytest.mark.parametrize("where", ["nvmlInit", SET_POWER])
async def test_each_code_fails_a_write_with_the_errno_that_it_has_on_a_simulated_host(
    host: Rig, where: str, code: int
):
    host.stub.set({f"call.{where}": code})
    with pytest.raises(
        OSError, match=rf"setting power-limit to 450 W failed: NVML: .+ \(code {code}\)"
    ) as failed:
        await host.nvml().set(A, "power-limit", "450")
    expected = SIMULATED[code][2] if code in SIMULATED else ERRNOS.get(code, errno.EIO)
    assert (failed.value.errno, failed.value.filename) == (expected, A)
    assert host.stub.get("gpu0.power_limit") is None


@needs_compiler
@pytest.mark.parametrize(("code", "kind"), [(4, PermissionError), (10, TimeoutError)])
async def test_a_refused_and_a_late_write_are_errors_of_their_own_kind(
    host: Rig, code: int, kind: type[OSError]
):
    host.stub.set({f"call.{SET_PERSISTENCE}": code})
    with pytest.raises(kind):
        await host.nvml().set(A, "persistence-mode", "on")


@needs_compiler
async def test_D2_a_write_that_meets_a_version_mismatch_names_both_versions(host: Rig):
    host.tree.file("sys/module/nvidia/version", "590.48.01\n")
    host.tree.file("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.565.57.01")
    host.stub.set({"init.code": 18})
    with pytest.raises(OSError, match=r"kernel module is 590\.48\.01, the library is 565\.57\.01") as failed:
        await host.nvml().set(A, "persistence-mode", "on")
    assert failed.value.errno == errno.EPROTO


@needs_compiler
async def test_a_setting_that_the_card_does_not_have_is_not_supported(host: Rig):
    host.stub.set({"gpu.power_min": None, "gpu.power_max": None})
    with pytest.raises(OSError, match="Not Supported") as failed:
        await host.nvml().set(A, "power-limit", "450")
    assert failed.value.errno == errno.EOPNOTSUPP


@needs_compiler
@pytest.mark.parametrize("watts", [299, 601])
async def test_a_power_limit_out_of_range_is_refused_by_nvml_and_changes_nothing(host: Rig, watts: int):
    with pytest.raises(OSError, match="Invalid Argument") as failed:
        await host.nvml().set(A, "power-limit", str(watts))
    assert failed.value.errno == errno.EINVAL
    assert (await host.gpu(A)).power_limit == Known(600)


@needs_compiler
async def test_a_setter_that_an_older_driver_lacks_is_not_implemented(tree: Tree):
    with pytest.raises(OSError, match="Function Not Found") as failed:
        await two_gpus(tree, (SET_POWER,)).nvml().set(A, "power-limit", "450")
    assert failed.value.errno == errno.ENOSYS


@needs_compiler
async def test_a_setter_that_hangs_is_given_up_and_the_next_write_is_done(host: Rig):
    nvml = host.nvml(deadline=3.0)
    host.stub.set({f"call.{SET_PERSISTENCE}": "hang"})
    with pytest.raises(TimeoutError, match="NVML did not answer within 3s"):
        await nvml.set(A, "persistence-mode", "on")
    host.stub.set({f"call.{SET_PERSISTENCE}": None})
    await host.nvml().set(A, "persistence-mode", "on")
    assert host.stub.get("gpu0.persistence") == "1"


@needs_compiler
async def test_a_child_that_is_killed_in_a_setter_is_an_error_that_says_by_what(host: Rig):
    host.stub.set({f"call.{SET_PERSISTENCE}": "kill"})
    with pytest.raises(OSError, match="ended with status -9") as failed:
        await host.nvml().set(A, "persistence-mode", "on")
    assert failed.value.errno == errno.EIO


@needs_compiler
async def test_B14_a_gpu_that_is_not_on_nvidia_is_refused_without_opening_nvml(host: Rig):
    host.leave_nvidia(C)
    with pytest.raises(OSError, match="not bound to nvidia") as failed:
        await host.nvml().set(C, "persistence-mode", "on")
    assert failed.value.errno == errno.ENODEV
    assert not host.stub.trace.exists()


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="this machine has NVIDIA's library")
async def test_without_the_library_a_write_finds_nothing(tree: Tree):
    tree.function(A, 0x030200)
    tree.bind(A, "nvidia")
    with pytest.raises(FileNotFoundError, match="NVML Shared Library Not Found"):
        await ChildNvml(tree.root, 60.0).set(A, "persistence-mode", "on")


@needs_compiler
async def test_writes_and_readings_at_the_same_time_are_made_one_after_another(host: Rig):
    nvml = host.nvml()
    await asyncio.gather(
        nvml.read(),
        nvml.set(A, "persistence-mode", "on"),
        nvml.set(C, "power-limit", "450"),
        nvml.set(A, "power-limit", "300"),
    )
    ends = [line for line in host.stub.calls() if line in {"nvmlInit", "nvmlShutdown"}]
    assert ends == ["nvmlInit", "nvmlShutdown"] * 4
    assert (host.stub.get("gpu0.power_limit"), host.stub.get("gpu1.power_limit")) == ("300000", "450000")


@needs_compiler
async def test_a_write_waits_for_whoever_looks_for_holders_and_then_looks_again_what_is_on_nvidia(host: Rig):
    looking = asyncio.Lock()
    nvml = ChildNvml(host.tree.root, 60.0, host.stub.env, looking)
    async with looking:
        write = asyncio.create_task(nvml.set(A, "persistence-mode", "on"))
        await asyncio.sleep(0)
        host.leave_nvidia(A)
    with pytest.raises(OSError, match="not bound to nvidia"):
        await write
    assert not host.stub.trace.exists()


@needs_compiler
async def test_a_reading_after_a_write_shows_it_also_while_another_was_on_its_way(host: Rig):
    nvml = host.nvml()
    earlier = asyncio.create_task(nvml.read())
    await nvml.set(A, "persistence-mode", "on")
    later = await nvml.read()
    await earlier
    assert isinstance(later, Known)
    gpu = later.value.gpus[A]
    assert isinstance(gpu, Known)
    assert gpu.value.persistence_mode == Known(value=True)


@needs_compiler
async def test_the_kind_sets_a_limit_and_reads_it_back(host: Rig):
    await act(host, power_limit(450))
    assert host.stub.get("gpu0.power_limit") == "450000"


@needs_compiler
async def test_a_setting_that_nvml_takes_and_does_not_keep_is_no_success(host: Rig):
    host.stub.set({f"call.{SET_POWER}": "ignore", "gpu0.persistence": 1})
    with pytest.raises(TransientError, match="was set to 450 and reads back 600") as failed:
        await act(host, power_limit(450))
    assert (failed.value.reason, failed.value.next_step) == ("ReadBackFailed", "")


@needs_compiler
async def test_a_power_limit_that_is_forgotten_without_persistence_mode_names_the_cure(host: Rig):
    host.stub.set({"gpu.power_default": 600_000})
    with pytest.raises(TransientError, match="reads back 600") as failed:
        await act(host, power_limit(450))
    assert "persistenceMode: true" in failed.value.next_step
    host.stub.set({"gpu0.persistence": 1})
    await act(host, power_limit(450))
    assert (await host.gpu(A)).power_limit == Known(450)

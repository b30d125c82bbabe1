"""Clocks, ECC, compute and MIG mode through the real pynvml, against a stand-in library (needs a C compiler)."""

import errno
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.core.errors import TerminalError, TransientError
from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import NOT_TOLD, Gpu
from agent.core.plan import Action, Disruption, Stage
from agent.core.quantity import UNLOCKED
from agent.host.real import real_ports
from agent.kinds.gpu_setting import SETTINGS
from agent.kinds.gpu_settings import GpuSettingsKind
from tests.abi.nvml.stub import needs_compiler
from tests.host.nvml_rig import A, C, Rig, two_gpus
from tests.host.trees import Tree

pytestmark = needs_compiler
GRAPHICS, MEMORY = "locked-graphics-clocks", "locked-memory-clocks"
MODES = {"gpu.ecc": 1, "gpu.ecc_pending": 1, "gpu.mig": 0, "gpu.mig_pending": 0}
CALLS = {
    ("persistence-mode", "on"): "nvmlDeviceSetPersistenceMode {} 1",
    ("power-limit", "450"): "nvmlDeviceSetPowerManagementLimit {} 450000",
    (GRAPHICS, "300-2000MHz"): "nvmlDeviceSetGpuLockedClocks {} 300 2000",
    (GRAPHICS, "1500MHz"): "nvmlDeviceSetGpuLockedClocks {} 1500 1500",
    (GRAPHICS, "unlocked"): "nvmlDeviceResetGpuLockedClocks {}",
    (MEMORY, "405-9001MHz"): "nvmlDeviceSetMemoryLockedClocks {} 405 9001",
    (MEMORY, "unlocked"): "nvmlDeviceResetMemoryLockedClocks {}",
    ("ecc", "off"): "nvmlDeviceSetEccMode {} 0",
    ("compute-mode", "prohibited"): "nvmlDeviceSetComputeMode {} 2",
    ("compute-mode", "exclusiveProcess"): "nvmlDeviceSetComputeMode {} 3",
    ("mig", "on"): "nvmlDeviceSetMigMode {} 1",
}


@pytest.fixture
def host(tree: Tree) -> Rig:
    return kept(tree)


def kept(tree: Tree, without: Sequence[str] = ()) -> Rig:
    """Two GPUs that have every setting, with persistence mode on."""
    rig = two_gpus(tree, without)
    rig.stub.set({"gpu.persistence": 1, **MODES})
    return rig


def action(setting: str, value: str) -> Action:
    return Action(
        "gpu-settings", setting, A, f"set {setting}", Stage.SET, Disruption.LIVE, params={"value": value},
        touches=(A,), optional=True,
    )  # fmt: skip


async def act(host: Rig, setting: str, value: str) -> None:
    ports = replace(real_ports(host.tree.root), nvml=host.nvml())
    await GpuSettingsKind().act(action(setting, value), ports)


async def lock(host: Rig, address: str = A) -> Fact[tuple[int, int]]:
    return (await host.gpu(address)).locked_graphics_clocks


def read(gpu: Gpu, name: str) -> Fact[str]:
    return next(s for s in SETTINGS if s.name == name).read(gpu)


def test_every_setting_of_the_kind_is_tried_here():
    assert {name for name, _ in CALLS} == {setting.name for setting in SETTINGS}


@pytest.mark.parametrize(("setting", "value"), CALLS)
async def test_a_setting_reaches_nvml_in_its_units_on_that_gpu_alone_and_reads_back(
    host: Rig, setting: str, value: str
):
    await act(host, setting, value)
    expected = CALLS[setting, value].format(A)
    assert [" ".join(c.split()) for c in host.stub.calls() if "Set" in c or "Reset" in c] == [expected]
    assert read(await host.gpu(A), setting) == Known(value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("ecc", "yes"), ("compute-mode", "shared"), (GRAPHICS, "1500"), ("fan", "on")],
)
async def test_what_is_no_setting_or_no_value_of_it_is_refused_before_nvml_is_opened(
    host: Rig, setting: str, value: str
):
    with pytest.raises(OSError, match=setting) as refused:
        await host.nvml().set(A, setting, value)
    assert refused.value.errno == errno.EINVAL
    assert not host.stub.trace.exists()


async def test_ecc_is_pending_until_a_reset(host: Rig):
    await act(host, "ecc", "off")
    gpu = await host.gpu(A)
    assert (gpu.ecc_mode, gpu.ecc_pending) == (Known(value=True), Known(value=False))


async def test_mig_mode_of_a_busy_gpu_is_pending_and_of_an_idle_one_works_at_once(host: Rig):
    host.stub.set({"gpu1.processes": "42:1"})
    for address, expected in ((A, True), (C, False)):
        await host.nvml().set(address, "mig", "on")
        gpu = await host.gpu(address)
        assert (gpu.mig_mode, gpu.mig_pending) == (Known(value=expected), Known(value=True))


async def test_modes_that_a_card_does_not_have_are_absent(host: Rig):
    host.stub.set(dict.fromkeys(MODES))
    gpu = await host.gpu(A)
    for fact in (gpu.ecc_mode, gpu.ecc_pending, gpu.mig_mode, gpu.mig_pending):
        assert isinstance(fact, Absent)


@pytest.mark.parametrize(("code", "error"), [(3, TerminalError), (13, TerminalError), (4, PermissionError)])
async def test_only_a_setting_that_will_never_be_there_is_given_up_for_good(
    host: Rig, code: int, error: type[Exception]
):
    host.stub.set({"call.nvmlDeviceSetMemoryLockedClocks": code})
    with pytest.raises(error):
        await act(host, MEMORY, "9001MHz")


async def test_an_older_driver_without_memory_locks_says_so_for_good(tree: Tree):
    host = kept(tree, ("nvmlDeviceSetMemoryLockedClocks",))
    with pytest.raises(TerminalError, match="Function Not Found") as failed:
        await act(host, MEMORY, "9001MHz")
    assert failed.value.reason == "NotSupported"


# -- what is known of a lock, which NVML does not tell ---------------------------------------------------------------


async def not_told(host: Rig, address: str = A) -> str:
    fact = await lock(host, address)
    assert isinstance(fact, Unknown)
    assert fact.code == NOT_TOLD
    return fact.reason


async def test_a_lock_is_not_told_until_it_was_set_here(host: Rig):
    host.stub.set({"gpu0.locked_clocks": "300-900"})
    assert "not set here" in await not_told(host)


async def test_a_lock_is_still_known_to_the_next_agent_and_of_that_gpu_alone(host: Rig):
    await host.nvml().set(A, GRAPHICS, "300-2000MHz")
    assert await lock(host) == Known((300, 2000))
    assert "not set here" in await not_told(host, C)


async def test_a_lock_is_forgotten_when_the_driver_takes_the_gpu_anew(host: Rig):
    await host.nvml().set(A, GRAPHICS, "300-2000MHz")
    link = host.tree.root / f"sys/bus/pci/drivers/nvidia/{A}"
    anew = link.with_name("anew")  # made while the other still has its inode, so that it gets one of its own
    anew.symlink_to(link.readlink())
    anew.rename(link)
    assert "not set here" in await not_told(host)


@pytest.mark.parametrize(("clock", "believed"), [(None, True), (210, True), (2015, True), (2400, False)])
async def test_a_lock_is_believed_as_long_as_no_clock_is_above_it(
    host: Rig, clock: int | None, believed: bool
):
    host.stub.set({"gpu0.clock_graphics": clock})
    await host.nvml().set(A, GRAPHICS, "300-2000MHz")
    if believed:
        assert await lock(host) == Known((300, 2000))
    else:
        assert "the clock is 2400 MHz" in await not_told(host)


async def test_a_lock_that_the_clock_belies_is_no_success(host: Rig):
    host.stub.set({"gpu0.clock_graphics": 2400, "call.nvmlDeviceSetGpuLockedClocks": "ignore"})
    with pytest.raises(TransientError, match="the clock is 2400 MHz"):
        await act(host, GRAPHICS, "300-2000MHz")


async def test_a_lock_without_persistence_mode_is_no_success_and_names_the_cure(host: Rig):
    host.stub.set({"gpu0.persistence": 0})
    with pytest.raises(TransientError, match="reads back unknown") as failed:
        await act(host, GRAPHICS, "300-2000MHz")
    assert "persistenceMode: true" in failed.value.next_step


async def test_a_lock_is_not_known_any_more_once_persistence_mode_went_off_and_on_again(host: Rig):
    await host.nvml().set(A, GRAPHICS, "300-2000MHz")
    await host.nvml().set(A, "persistence-mode", "off")
    await host.nvml().set(A, "persistence-mode", "on")
    assert "not set here" in await not_told(host)


async def test_a_lock_whose_change_failed_is_not_known(host: Rig):
    await host.nvml().set(A, GRAPHICS, "300-2000MHz")
    host.stub.set({"call.nvmlDeviceSetGpuLockedClocks": 999})
    with pytest.raises(OSError, match="Unknown Error"):
        await host.nvml().set(A, GRAPHICS, "300-900MHz")
    assert "not set here" in await not_told(host)


async def test_a_lock_that_was_reset_is_known_to_be_none(host: Rig):
    await host.nvml().set(A, GRAPHICS, "300-2000MHz")
    await host.nvml().set(A, GRAPHICS, "unlocked")
    assert await lock(host) == Known(UNLOCKED)
    assert host.stub.get("gpu0.locked_clocks") == ""


async def test_a_note_that_nobody_can_read_is_none(host: Rig):
    await host.nvml().set(A, GRAPHICS, "300-2000MHz")
    note = host.tree.root / f"run/gpu-host-agent/locked-clocks/{A}.{GRAPHICS}"
    note.write_text(note.read_text().replace("MHz", "GHz"))
    assert "not set here" in await not_told(host)

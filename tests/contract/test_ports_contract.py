"""What every host owes its callers, whatever stands behind the ports: the kernel's semantics, written down once."""

import asyncio
import contextlib
import errno
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Gpu, Nvml, PciFunction, Platform, TargetFacts, Unit
from agent.kinds.gpu_setting import SETTINGS
from agent.ports import KernelLines, Ports, TargetPort
from tests.contract.hosts import CHANGEABLE, READABLE, Subject
from tests.contract.target_contract import FilesContract, Place, UnitsContract

T = TypeVar("T")


@pytest.fixture(params=sorted(CHANGEABLE))
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    async with CHANGEABLE[request.param](tmp_path) as made:
        yield made


@pytest.fixture(params=sorted(READABLE))
async def ports(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ports]:
    async with READABLE[request.param](tmp_path) as made:
        yield made


async def function(host: Subject) -> PciFunction:
    return (await host.ports.pci.read()).functions[host.gpu]


async def unbind(host: Subject, driver: str) -> str:
    """How the write ended, wherever it failed."""
    try:
        await host.ports.pci.start_unbind(host.gpu, driver)
    except OSError as error:
        return f"failed: {errno.errorcode[error.errno or 0]}"
    while (state := await host.ports.pci.unbind_state(host.gpu)).startswith("running"):
        await host.ports.clock.sleep(0.1)
    return state


async def probed(host: Subject) -> Fact[str]:
    await host.ports.pci.probe(host.gpu)
    return await host.ports.pci.read_driver(host.gpu)


# -- PCI ----------------------------------------------------------------------------------------------------------


async def test_an_unbind_from_a_driver_that_does_not_have_the_device_fails_with_enodev(host: Subject) -> None:
    await host.ports.platform.load_module(host.other.replace("-", "_"))
    assert await unbind(host, host.other) == "failed: ENODEV"
    assert await host.ports.pci.read_driver(host.gpu) == Known(host.driver)


async def test_an_unbind_from_a_driver_that_is_not_loaded_fails_with_enoent(host: Subject) -> None:
    assert await unbind(host, "no-such-driver") == "failed: ENOENT"
    assert await host.ports.pci.read_driver(host.gpu) == Known(host.driver)


async def test_an_unbound_device_has_no_driver_by_either_way_of_reading(host: Subject) -> None:
    assert await unbind(host, host.driver) == "done"
    assert isinstance(await host.ports.pci.read_driver(host.gpu), Absent)
    assert isinstance((await function(host)).driver, Absent)
    assert host.gpu not in (await host.ports.pci.read()).pending_unbinds


async def test_no_unbind_of_ours_is_known_before_there_was_one(host: Subject) -> None:
    assert await host.ports.pci.unbind_state(host.gpu) == "none"


async def test_a_probe_succeeds_also_when_nothing_is_bound(host: Subject) -> None:
    await unbind(host, host.driver)
    await host.ports.pci.set_override(host.gpu, "no-such-driver")
    assert isinstance(await probed(host), Absent)


async def test_a_probe_leaves_a_bound_device_where_it_is(host: Subject) -> None:
    await host.ports.pci.set_override(host.gpu, host.other)
    assert await probed(host) == Known(host.driver)


async def test_an_override_reads_back_and_is_cleared_by_nothing(host: Subject) -> None:
    await host.ports.pci.set_override(host.gpu, host.other)
    assert (await function(host)).driver_override == Known(host.other)
    await host.ports.pci.set_override(host.gpu, "")
    cleared = (await function(host)).driver_override
    assert isinstance(cleared, Absent)
    assert cleared.reason, "an absence says why, so none equals a bare Absent()"


async def test_an_override_outlives_an_unbind_and_decides_the_next_probe(host: Subject) -> None:
    await host.ports.platform.load_module(host.other.replace("-", "_"))
    await host.ports.pci.set_override(host.gpu, host.other)
    await unbind(host, host.driver)
    assert await probed(host) == Known(host.other)
    assert await unbind(host, host.other) == "done"
    await host.ports.pci.set_override(host.gpu, "")
    assert await probed(host) == Known(host.native)


@pytest.mark.parametrize("verb", ["set_override", "probe"])
async def test_a_write_about_a_device_that_is_not_there_fails(host: Subject, verb: str) -> None:
    writes = {
        "set_override": lambda: host.ports.pci.set_override("0000:fe:00.0", "vfio-pci"),
        "probe": lambda: host.ports.pci.probe("0000:fe:00.0"),
    }
    with pytest.raises(OSError) as caught:
        await writes[verb]()
    assert caught.value.errno in {errno.ENODEV, errno.ENOENT}


async def test_a_group_type_cannot_change_under_a_driver_and_nonsense_is_no_type(host: Subject) -> None:
    group = (await function(host)).iommu_group
    assert isinstance(group, Known)
    with pytest.raises(OSError) as caught:
        await host.ports.pci.set_group_type(group.value, "identity")
    assert caught.value.errno in {errno.EBUSY, errno.EPERM}
    with pytest.raises(OSError) as caught:
        await host.ports.pci.set_group_type(group.value, "nonsense")
    assert caught.value.errno == errno.EINVAL


# -- holders and NVML -----------------------------------------------------------------------------------------------


async def test_functions_that_nobody_holds_are_known_to_be_unheld(host: Subject) -> None:
    assert await host.ports.holders.read([host.gpu]) == {host.gpu: Known(())}


async def test_holders_are_given_for_exactly_the_functions_asked_about(host: Subject) -> None:
    asked = sorted((await host.ports.pci.read()).functions)[:3]
    assert sorted(await host.ports.holders.read(asked)) == asked
    assert await host.ports.holders.read([]) == {}


async def gpu_of(host: Subject) -> Gpu:
    nvml = await host.ports.nvml.read()
    assert isinstance(nvml, Known)
    gpu = nvml.value.gpus[host.gpu]
    assert isinstance(gpu, Known)
    return gpu.value


async def test_a_gpu_setting_reads_back(host: Subject) -> None:
    for on in (True, False):
        await host.ports.nvml.set(host.gpu, "persistence-mode", "on" if on else "off")
        assert (await gpu_of(host)).persistence_mode == Known(on)
    allowed = (await gpu_of(host)).power_limit_range
    if isinstance(allowed, Known):
        low = allowed.value[0]
        await host.ports.nvml.set(host.gpu, "power-limit", str(low))
        assert (await gpu_of(host)).power_limit == Known(low)
    else:  # a GPU that tells no range has no limit that could be set
        assert isinstance(allowed, Absent)
        with pytest.raises(OSError):
            await host.ports.nvml.set(host.gpu, "power-limit", "300")


SWITCHED = [
    ("locked-graphics-clocks", "300-2000MHz"), ("locked-graphics-clocks", "unlocked"),
    ("locked-memory-clocks", "9001MHz"), ("locked-memory-clocks", "unlocked"), ("ecc", "off"), ("ecc", "on"),
    ("compute-mode", "exclusiveProcess"), ("compute-mode", "default"), ("mig", "on"), ("mig", "off"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "value"), SWITCHED)
async def test_a_setting_of_an_idle_gpu_reads_back_or_is_not_there(
    host: Subject, setting: str, value: str
) -> None:
    await host.ports.nvml.set(host.gpu, "persistence-mode", "on")
    read = next(s.read for s in SETTINGS if s.name == setting)
    before = read(await gpu_of(host))
    try:
        await host.ports.nvml.set(host.gpu, setting, value)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP
        assert read(await gpu_of(host)) == before
    else:
        assert read(await gpu_of(host)) == Known(value)


@pytest.mark.parametrize(("setting", "value"), [("ecc", "maybe"), ("compute-mode", "shared"), ("fan", "on")])
async def test_what_is_no_setting_or_no_value_of_it_is_refused(
    host: Subject, setting: str, value: str
) -> None:
    with pytest.raises(OSError) as caught:
        await host.ports.nvml.set(host.gpu, setting, value)
    assert caught.value.errno == errno.EINVAL


async def test_a_power_limit_out_of_range_is_refused_and_changes_nothing(host: Subject) -> None:
    before = (await gpu_of(host)).power_limit
    with pytest.raises(OSError):
        await host.ports.nvml.set(host.gpu, "power-limit", "1000000")
    assert (await gpu_of(host)).power_limit == before


async def test_a_gpu_that_leaves_nvidia_leaves_nvml_and_cannot_be_set(host: Subject) -> None:
    await unbind(host, "nvidia")
    nvml = await host.ports.nvml.read()
    assert isinstance(nvml, Known)
    assert host.gpu not in nvml.value.gpus
    with pytest.raises(OSError):
        await host.ports.nvml.set(host.gpu, "persistence-mode", "on")


# -- units and files ------------------------------------------------------------------------------------------------


class TestFilesOfTheHost(FilesContract):
    @pytest.fixture
    def target(self, host: Subject) -> TargetPort:
        return host.ports.targets("host")


class TestUnitsOfTheHost(UnitsContract):
    @pytest.fixture
    def place(self, host: Subject) -> Place:
        return Place(host.ports.targets("host"), host.unit)

    async def test_the_main_process_is_one_of_the_units_processes(self, place: Place) -> None:
        unit = await place.started()
        assert unit.main_pid in unit.pids


# -- the kernel log -------------------------------------------------------------------------------------------------


async def test_the_kernel_log_gives_every_line_once_and_in_order(host: Subject) -> None:
    first = await host.ports.kernel_log.read("")
    expected = [f"contract line {number}" for number in range(5)]
    seen: list[str] = []
    cursor = first.cursor
    for line in expected:
        host.log(line)
        read = await host.ports.kernel_log.read(cursor)
        seen += [text for _, text in read.lines]
        cursor = read.cursor
    assert [text for text in seen if text.startswith("contract line")] == expected
    again = await host.ports.kernel_log.read(cursor)
    assert (again.lines, again.cursor) == ((), cursor)


async def test_a_cursor_that_means_nothing_starts_from_the_beginning(host: Subject) -> None:
    host.log("contract line")
    whole = await host.ports.kernel_log.read("")
    again = await host.ports.kernel_log.read("another-boot 5")
    # The kernel counts seconds since its boot: the wall clock's may be told a little differently each time.
    assert [text for _, text in again.lines] == [text for _, text in whole.lines]
    assert [at for at, _ in again.lines] == pytest.approx([at for at, _ in whole.lines], abs=5.0)


async def test_only_lines_from_the_boots_first_one_on_are_said_to_be_all_there_are(host: Subject) -> None:
    host.log("contract line")
    first = await host.ports.kernel_log.read("")
    assert first.fresh
    assert (await host.ports.kernel_log.read("another-boot 5")).fresh
    assert not (await host.ports.kernel_log.read(first.cursor)).fresh


# -- reads, on every host, whatever it has --------------------------------------------------------------------------


async def answer(read: Awaitable[T]) -> T | OSError:
    """A read answers or raises OSError (TimeoutError is one). Anything else fails the test."""
    try:
        return await read
    except OSError as error:
        return error


async def test_every_read_answers_with_its_type_or_an_os_error(ports: Ports) -> None:
    assert isinstance(await answer(ports.platform.read()), Platform | OSError)
    pci = await answer(ports.pci.read())
    functions = {} if isinstance(pci, OSError) else pci.functions
    for address in [*list(functions)[:20], "0000:fe:00.0"]:
        assert isinstance(await answer(ports.pci.read_driver(address)), Known | Absent | Unknown | OSError)
        assert isinstance(await answer(ports.pci.unbind_state(address)), str | OSError)
    holders = await answer(ports.holders.read(functions))
    assert isinstance(holders, OSError) or set(holders) == set(functions)
    assert isinstance(await answer(ports.kernel_log.read("")), KernelLines | OSError)
    if any(f.is_gpu and f.driver == Known("nvidia") for f in functions.values()):
        nvml = await answer(ports.nvml.read())
        assert isinstance(nvml, Known | Absent | Unknown | OSError)
        assert not isinstance(nvml, Known) or isinstance(nvml.value, Nvml)


@pytest.mark.parametrize("name", ["host", "lxc:99999", "ssh:nobody@nowhere.invalid"])
async def test_every_read_of_a_target_answers_with_its_type_or_an_os_error(ports: Ports, name: str) -> None:
    target = ports.targets(name)
    assert isinstance(await answer(target.facts()), TargetFacts | OSError)
    for unit in ("dbus.service", "no-such-unit.service", "-x", "ü.service"):
        assert isinstance(await answer(target.unit(unit)), Unit | OSError)
        assert isinstance(await answer(target.unit_log(unit, 5)), tuple | OSError)
    for path in ("/etc/hostname", "/nowhere/at/all", "/", "/proc/self/mem", "/etc/hostname/below-a-file"):
        assert isinstance(await answer(target.read_file(path)), str | OSError | None)
        assert isinstance(await answer(target.exists(path)), bool | OSError)
    with contextlib.suppress(OSError):
        assert target.endpoint(30000).startswith("http://")


async def test_the_process_of_a_dead_pid_is_none(ports: Ports) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert await ports.targets("host").process(dead.pid) is None


async def test_reading_twice_reads_the_same_platform(ports: Ports) -> None:
    first = await answer(ports.platform.read())
    second = await answer(ports.platform.read())
    if isinstance(first, Platform) and isinstance(second, Platform):
        assert (first.boot_id, first.kernel_release, first.cmdline) == (
            second.boot_id, second.kernel_release, second.cmdline,
        )  # fmt: skip


async def test_a_read_that_is_given_up_harms_nothing(ports: Ports) -> None:
    before = await answer(ports.pci.read())
    task = asyncio.ensure_future(answer(ports.pci.read()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert type(await answer(ports.pci.read())) is type(before)


async def test_the_clock_goes_forward(ports: Ports) -> None:
    before, wall = ports.clock.monotonic(), ports.clock.now()
    await ports.clock.sleep(0.0)
    await ports.clock.sleep(-1.0)
    assert ports.clock.monotonic() >= before
    assert wall > 1_600_000_000


async def test_a_port_that_nobody_listens_on_refuses(ports: Ports) -> None:
    url = ports.targets("host").endpoint(1)
    with pytest.raises(ConnectionRefusedError):
        await ports.inference.get(url, "/health", 5.0)

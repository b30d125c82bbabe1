import os
from pathlib import Path

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.core.observation import NOT_READ
from agent.host.reading import names_in
from agent.host.sysfs_pci import SysfsPci
from tests.host.trees import Tree, config_space

BRIDGE, GPU, AUDIO = "0000:00:01.1", "0000:01:00.0", "0000:01:00.1"


@pytest.fixture
def host(tree: Tree) -> Tree:
    """A root port with one two-function GPU behind it."""
    tree.function(BRIDGE, 0x060400, vendor=0x1022)
    gpu = tree.function(GPU, 0x030200, behind=BRIDGE)
    tree.function(AUDIO, 0x040300, behind=BRIDGE)
    tree.file(f"{gpu}/config", config_space(serial=(0x48B02D, 0x7FF01234)))
    bars = ["0x00000000f0000000 0x00000000f3ffffff 0x0000000000040200"]
    bars += ["0x0000000000000000 0x0000000000000000 0x0000000000000000"]
    bars += ["0x0000024000000000 0x0000025fffffffff 0x000000000014220c"]
    bars += ["0x0000000000003000 0x000000000000307f 0x0000000000040101"]
    tree.file(f"{gpu}/resource", "\n".join(bars) + "\n")
    for name, text in (("current_link_speed", "2.5 GT/s PCIe"), ("max_link_speed", "32.0 GT/s PCIe")):
        tree.file(f"{gpu}/{name}", text + "\n")
    tree.file(f"{gpu}/current_link_width", "16\n")
    tree.bind(GPU, "nvidia")
    tree.group(12, "DMA-FQ", GPU, AUDIO)
    tree.file("sys/bus/pci/slots/3/address", "0000:01:00\n")
    return tree


async def test_a_gpu_is_read_with_its_driver_group_slot_and_place(host: Tree):
    pci = await SysfsPci(host.root).read()
    gpu = pci.functions[GPU]
    assert gpu.is_gpu
    assert (gpu.driver, gpu.iommu_group, gpu.slot) == (Known("nvidia"), Known(12), Known("3"))
    assert gpu.bridges == (BRIDGE,)
    assert gpu.power_state == Known("D0")
    assert pci.groups[12].type == Known("DMA-FQ")
    assert pci.groups[12].members == (GPU, AUDIO)
    assert isinstance(pci.functions[AUDIO].driver, Absent)


async def test_only_assigned_memory_bars_are_listed(host: Tree):
    gpu = (await SysfsPci(host.root).read()).functions[GPU]
    assert gpu.bars == ((0xF0000000, 0xF3FFFFFF), (0x24000000000, 0x25FFFFFFFFF))


async def test_null_override_and_numa_node_minus_one_are_absent(host: Tree):
    gpu = (await SysfsPci(host.root).read()).functions[GPU]
    assert isinstance(gpu.driver_override, Absent)
    assert isinstance(gpu.numa_node, Absent)
    host.file(f"sys/bus/pci/devices/{GPU}/driver_override", "vfio-pci\n")
    assert (await SysfsPci(host.root).read()).functions[GPU].driver_override == Known("vfio-pci")


async def test_D7_an_idle_link_is_reported_as_it_is(host: Tree):
    gpu = (await SysfsPci(host.root).read()).functions[GPU]
    assert gpu.link_speed == Known("2.5 GT/s PCIe")
    assert gpu.max_link_speed == Known("32.0 GT/s PCIe")
    assert gpu.link_width == Known(16)
    assert isinstance(gpu.max_link_width, Absent)


async def test_B11_the_serial_number_comes_from_configuration_space(host: Tree):
    assert (await SysfsPci(host.root).read()).functions[GPU].serial == Known("0048b02d7ff01234")


async def test_a_serial_number_is_unknown_where_only_the_header_is_readable(host: Tree):
    host.file(f"sys/bus/pci/devices/{GPU}/config", config_space(size=64))
    serial = (await SysfsPci(host.root).read()).functions[GPU].serial
    assert isinstance(serial, Unknown)
    assert serial.code == "NeedRoot"


async def test_a_card_without_the_capability_has_no_serial_number(host: Tree):
    host.file(f"sys/bus/pci/devices/{GPU}/config", config_space())
    assert isinstance((await SysfsPci(host.root).read()).functions[GPU].serial, Absent)


async def test_B12_a_device_that_reads_all_ones_does_not_answer(host: Tree):
    host.file(f"sys/bus/pci/devices/{GPU}/config", b"\xff" * 4096)
    serial = (await SysfsPci(host.root).read()).functions[GPU].serial
    assert isinstance(serial, Unknown)
    assert serial.code == "DeviceNotAnswering"


async def test_P3_the_acs_control_of_a_gpus_upstream_bridge_is_read(host: Tree):
    host.file(f"sys/bus/pci/devices/{BRIDGE}/config", config_space(serial=(1, 2), acs_ctl=0x001D))
    assert (await SysfsPci(host.root).read()).functions[BRIDGE].acs_ctl == Known(0x001D)


async def test_P16_acs_bits_are_read_anew_in_every_pass(host: Tree):
    adapter = SysfsPci(host.root)
    for value in (0x0000, 0x001D):
        host.file(f"sys/bus/pci/devices/{BRIDGE}/config", config_space(acs_ctl=value))
        assert (await adapter.read()).functions[BRIDGE].acs_ctl == Known(value)


async def test_virtual_functions_are_counted_by_their_links_and_the_locked_count_is_left_unread(host: Tree):
    path = f"sys/bus/pci/devices/{GPU}"
    adapter = SysfsPci(host.root)
    assert (await adapter.read()).functions[GPU].virtual_functions == Absent("no SR-IOV")
    host.file(f"{path}/sriov_totalvfs", "48\n")
    os.mkfifo(host.root / path / "sriov_numvfs")  # whoever opened it would wait, as for a device's lock
    assert (await adapter.read()).functions[GPU].virtual_functions == Known(0)
    for number, address in enumerate(("0000:01:00.4", "0000:01:00.5")):
        virtual = host.function(address, 0x030200, behind=BRIDGE)
        host.link(f"{path}/virtfn{number}", virtual)
        host.link(f"{virtual}/physfn", f"sys/devices/pci0000:00/{BRIDGE}/{GPU}")
    pci = await adapter.read()
    assert pci.functions[GPU].virtual_functions == Known(2)
    assert pci.functions["0000:01:00.4"].virtual_functions == Absent("it is a virtual function itself")
    assert pci.functions[BRIDGE].virtual_functions == NOT_READ


async def test_one_unreadable_attribute_is_unknown_for_itself_alone(host: Tree):
    path = host.root / f"sys/bus/pci/devices/{GPU}/numa_node"
    path.unlink()
    path.mkdir()  # reading it fails for root too
    gpu = (await SysfsPci(host.root).read()).functions[GPU]
    assert isinstance(gpu.numa_node, Unknown)
    assert gpu.driver == Known("nvidia")


async def test_a_device_that_goes_away_during_the_scan_is_left_out(host: Tree):
    (host.root / f"sys/bus/pci/devices/{AUDIO}/class").unlink()
    host.link("sys/bus/pci/devices/0000:02:00.0", "sys/devices/gone")
    assert set((await SysfsPci(host.root).read()).functions) == {BRIDGE, GPU}


async def test_a_driver_that_comes_while_devices_are_read_is_not_taken_for_one_that_does_not_go(
    host: Tree, monkeypatch: pytest.MonkeyPatch
):
    host.directory(f"proc/driver/nvidia/gpus/{AUDIO}")
    adapter = SysfsPci(host.root)
    assert (await adapter.read()).pending_unbinds == (AUDIO,)

    def bound_meanwhile(path: Path) -> tuple[str, ...]:
        if path.name == "gpus":
            host.bind(AUDIO, "nvidia")
        return names_in(path)

    monkeypatch.setattr("agent.host.sysfs_pci.names_in", bound_meanwhile)
    assert (await adapter.read()).pending_unbinds == ()


async def test_the_driver_link_alone_can_be_read(host: Tree):
    adapter = SysfsPci(host.root)
    assert await adapter.read_driver(GPU) == Known("nvidia")
    assert isinstance(await adapter.read_driver(AUDIO), Absent)


async def test_a_machine_without_a_pci_bus_says_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no PCI bus"):
        await SysfsPci(tmp_path).read()


async def test_a_host_without_iommu_has_no_groups(tree: Tree):
    tree.function(GPU, 0x030000)
    pci = await SysfsPci(tree.root).read()
    assert pci.groups == {}
    assert isinstance(pci.functions[GPU].iommu_group, Absent)

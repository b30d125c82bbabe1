"""The simulated kernel answers as the real one does."""

import errno

import pytest

from agent.core.fact import Absent, Known
from agent.core.observation import Nvml
from agent.sim import kernel
from agent.sim.host import SimulatedHost

GPU, AUDIO = "0000:81:00.0", "0000:81:00.1"
GROUP = 48
IDLE = 'set: {targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive}}}}}\n'
NO_SNP = (
    'set: {sevSnp: false, targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive}}}}}\n'
)


async def unbind(host: SimulatedHost, address: str, driver: str) -> str:
    await host.ports.pci.start_unbind(address, driver)
    await host.ports.clock.sleep(5)
    return await host.ports.pci.unbind_state(address)


async def move_to_vfio(host: SimulatedHost, *addresses: str) -> None:
    await host.ports.platform.load_module("vfio-pci")
    for address in addresses:
        driver = await host.ports.pci.read_driver(address)
        await host.ports.pci.set_override(address, "vfio-pci")
        if isinstance(driver, Known):
            assert await unbind(host, address, driver.value) == "done"
        await host.ports.pci.probe(address)
        assert await host.ports.pci.read_driver(address) == Known("vfio-pci")


async def log_text(host: SimulatedHost) -> str:
    return "\n".join(text for _, text in (await host.ports.kernel_log.read("")).lines)


async def test_a_free_gpu_moves_to_vfio_and_back(make_host):
    host = make_host(IDLE)
    await move_to_vfio(host, GPU, AUDIO)
    nvml = await host.ports.nvml.read()
    assert isinstance(nvml, Known)
    assert GPU not in nvml.value.gpus
    assert "/dev/nvidia7" not in (await host.ports.targets("host").facts()).device_nodes.value
    await host.ports.pci.set_override(GPU, "")
    assert await unbind(host, GPU, "vfio-pci") == "done"
    await host.ports.pci.probe(GPU)
    assert await host.ports.pci.read_driver(GPU) == Known("nvidia")


async def test_unbind_from_the_wrong_driver_is_ENODEV_and_from_one_that_is_not_loaded_ENOENT(make_host):
    host = make_host(IDLE)
    assert await unbind(host, GPU, "vfio-pci") == "failed: ENOENT"
    await host.ports.platform.load_module("vfio_pci")
    assert await unbind(host, GPU, "vfio-pci") == "failed: ENODEV"
    assert await host.ports.pci.read_driver(GPU) == Known("nvidia")


async def test_probe_succeeds_without_binding_while_the_driver_is_not_loaded(make_host):
    host = make_host(IDLE)
    await host.ports.pci.set_override(GPU, "vfio-pci")
    assert await unbind(host, GPU, "nvidia") == "done"
    await host.ports.pci.probe(GPU)
    assert await host.ports.pci.read_driver(GPU) == Absent()
    await host.ports.platform.load_module("vfio-pci")
    assert await host.ports.pci.read_driver(GPU) == Known("vfio-pci")


async def test_probe_of_an_unknown_address_is_ENODEV(make_host):
    with pytest.raises(OSError) as raised:
        await make_host(IDLE).ports.pci.probe("0000:ff:00.0")
    assert raised.value.errno == errno.ENODEV


async def test_unbinding_a_held_gpu_never_returns_and_the_link_is_gone_at_once(make_host):
    host = make_host()
    assert await unbind(host, GPU, "nvidia") == "running"
    assert await host.ports.pci.read_driver(GPU) == Absent()
    assert (await host.ports.pci.read()).pending_unbinds == (GPU,)
    assert f"NVRM: Attempting to remove device {GPU} with non-zero usage count!" in await log_text(host)
    await host.ports.pci.probe(GPU)
    assert await host.ports.pci.read_driver(GPU) == Absent()


async def test_persistence_mode_alone_holds_a_gpu(make_host):
    host = make_host(IDLE)
    await host.ports.nvml.set(GPU, "persistence-mode", "on")
    holders = await host.ports.holders.read([GPU])
    assert [h.kind for h in holders[GPU].value] == ["persistence"]
    assert await unbind(host, GPU, "nvidia") == "running"


async def test_unbind_from_vfio_waits_for_the_vm_and_then_returns(make_host):
    host = make_host(IDLE + 'events: [{at: 0s, do: {set: {vms: {"101": {functions: ["' + GPU + '"]}}}}}]')
    await move_to_vfio(host, GPU, AUDIO)
    with host.world.change():
        kernel.vm_start(host.world, "101")
    assert await unbind(host, GPU, "vfio-pci") == "running: state S in vfio_unregister_group_dev"
    assert await host.ports.pci.read_driver(GPU) == Absent()
    with host.world.change():
        kernel.vm_stop(host.world, "101")
    assert await host.ports.pci.unbind_state(GPU) == "done"


async def test_a_vm_does_not_start_while_its_group_is_split(make_host):
    host = make_host(
        IDLE + 'events: [{at: 0s, do: {set: {vms: {"101": {functions: ["' + GPU + '"]}}}, vmStart: "101"}}]'
    )
    assert "is not viable, VM 101 not started" in await log_text(host)
    assert not host.world.state.vms["101"].running


@pytest.mark.parametrize(
    ("now", "wanted", "expected"),
    [
        ("DMA", "DMA-FQ", None),
        ("DMA", "DMA", errno.EPERM),
        ("DMA", "identity", errno.EPERM),
        ("DMA", "auto", errno.EPERM),
        ("DMA", "bogus", errno.EINVAL),
        ("DMA-FQ", "DMA-FQ", errno.EPERM),
        ("identity", "DMA-FQ", errno.EPERM),
    ],
)
async def test_group_type_while_a_host_driver_is_bound(make_host, now, wanted, expected):
    host = make_host(f'set: {{groups: {{"{GROUP}": {{type: {now}}}}}}}')
    await assert_group_type(host, wanted, expected)


@pytest.mark.parametrize(
    ("wanted", "expected"), [("DMA", None), ("identity", None), ("auto", None), ("x", errno.EINVAL)]
)
async def test_group_type_while_all_functions_are_on_vfio_and_not_open(make_host, wanted, expected):
    host = make_host(NO_SNP)
    await move_to_vfio(host, GPU, AUDIO)
    await assert_group_type(host, wanted, expected)


async def test_an_open_vfio_device_allows_only_DMA_to_DMA_FQ(make_host):
    host = make_host(
        f'set: {{sevSnp: false, modules: {{vfio_pci: {{}}}}, functions: {{"0000:81:00.?": {{driver: vfio-pci}}}},'
        f' vms: {{"101": {{functions: ["{GPU}"], running: true}}}}}}'
    )
    await assert_group_type(host, "identity", errno.EPERM)
    await assert_group_type(host, "DMA-FQ", None)


async def test_snp_refuses_an_identity_domain(make_host):
    host = make_host(IDLE)
    await move_to_vfio(host, GPU, AUDIO)
    await assert_group_type(host, "identity", errno.EINVAL)


async def assert_group_type(host: SimulatedHost, wanted: str, expected: int | None) -> None:
    if expected is None:
        await host.ports.pci.set_group_type(GROUP, wanted)
        kind = (await host.ports.pci.read()).groups[GROUP].type
        assert kind == Known("DMA" if wanted == "auto" else wanted)
        return
    with pytest.raises(OSError) as raised:
        await host.ports.pci.set_group_type(GROUP, wanted)
    assert raised.value.errno == expected


async def test_a_rescan_loses_override_and_group_type_and_gives_the_native_driver(make_host):
    host = make_host(
        NO_SNP + f'events: [{{afterCalls: {{pci.set_group_type: 1}}, do: {{rescan: ["{GPU}"]}}}}]'
    )
    await move_to_vfio(host, GPU, AUDIO)
    await host.ports.pci.set_group_type(GROUP, "identity")
    pci = await host.ports.pci.read()
    assert pci.functions[GPU].driver == Known("nvidia")
    assert pci.functions[GPU].driver_override == Absent("not set")
    assert pci.functions[AUDIO].driver == Known("snd_hda_intel")
    assert pci.groups[GROUP].type == Known("DMA")


async def test_nvml_sees_only_gpus_on_nvidia_and_minors_are_not_indices(make_host):
    nvml = await make_host().ports.nvml.read()
    assert isinstance(nvml, Known)
    gpus = [gpu.value for gpu in nvml.value.gpus.values()]
    assert [gpu.index for gpu in gpus] == list(range(8))
    assert [gpu.minor.value for gpu in gpus] != list(range(8))


async def test_a_power_limit_out_of_range_is_refused(make_host):
    host = make_host()
    with pytest.raises(OSError) as raised:
        await host.ports.nvml.set(GPU, "power-limit", "700")
    assert raised.value.errno == errno.EINVAL
    await host.ports.nvml.set(GPU, "power-limit", "450")
    nvml = await host.ports.nvml.read()
    assert isinstance(nvml, Known)
    assert isinstance(nvml.value, Nvml)
    gpu = nvml.value.gpus[GPU]
    assert isinstance(gpu, Known)
    assert gpu.value.power_limit == Known(450)


async def test_module_parameters_answer_as_sysfs_does(make_host):
    platform = make_host().ports.platform
    for module, parameter, expected in (
        ("nvidia_uvm", "uvm_disable_hmm", errno.EACCES),
        ("nvidia_uvm", "no_such", errno.ENOENT),
        ("vfio_pci", "ids", errno.ENOENT),
    ):
        with pytest.raises(OSError) as raised:
            await platform.set_module_parameter(module, parameter, "1")
        assert raised.value.errno == expected
    with pytest.raises(FileNotFoundError):
        await platform.load_module("no_such_module")


async def test_p2p_is_good_over_identity_and_corrupt_over_translation(make_host):
    gpus = ["0000:01:00.0", "0000:11:00.0"]
    said: list[str] = []
    bad = await make_host().ports.p2p_test.run(gpus, said.append)
    assert {p.result for p in bad.paths} == {"corrupt"}
    assert "0000:01:00.0 -> 0000:11:00.0 copy-push corrupt" in said
    host = make_host('set: {sevSnp: false, groups: {"*": {type: identity}}}')
    before = await log_text(host)
    good = await host.ports.p2p_test.run(gpus, said.append)
    assert {p.result for p in good.paths} == {"good"}
    assert await log_text(host) == before


async def test_a_page_fault_names_the_source_and_an_address_in_the_peers_bar(make_host):
    host = make_host(IDLE)
    await host.ports.p2p_test.run(["0000:01:00.0", "0000:11:00.0"], lambda _text: None)
    assert (
        "nvidia 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x002c address=0x24000000000 flags=0x0030]"
        in (await log_text(host))
    )


async def test_the_kernel_log_cursor_gives_each_line_once(make_host):
    host = make_host("events: [{at: 0s, do: {log: {text: again, repeat: 3}}}]")
    first = await host.ports.kernel_log.read("")
    assert [text for _, text in first.lines][-3:] == ["again"] * 3
    with host.world.change():
        host.world.log("new", 2)
    second = await host.ports.kernel_log.read(first.cursor)
    assert [text for _, text in second.lines] == ["new", "new"]
    assert (await host.ports.kernel_log.read(second.cursor)).lines == ()

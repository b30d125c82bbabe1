"""Moves of one card's functions between drivers, over the simulated kernel."""

import pytest

from agent.core.errors import TransientError
from agent.core.fact import Absent, Known
from agent.kinds.rebind import rebind
from tests.sim.test_kernel_semantics import AUDIO, GPU, IDLE, move_to_vfio, unbind


async def test_B8_a_function_that_goes_back_to_the_host_gets_the_hosts_driver(make_host):
    host = make_host(IDLE)
    native = await host.ports.pci.read_driver(AUDIO)
    await move_to_vfio(host, GPU, AUDIO)
    await rebind([(AUDIO, "")], host.ports)
    assert await host.ports.pci.read_driver(AUDIO) == native
    assert isinstance(native, Known)
    assert isinstance((await host.ports.pci.read()).functions[AUDIO].driver_override, Absent)


async def test_B9_a_function_that_vfio_takes_back_without_an_override_is_not_given_back(make_host):
    host = make_host(IDLE)
    await move_to_vfio(host, GPU, AUDIO)
    with host.world.change() as state:
        state.functions[AUDIO].native = "vfio-pci"  # as vfio-pci.ids= has it
    with pytest.raises(TransientError, match="vfio-pci took it") as caught:
        await rebind([(AUDIO, "")], host.ports)
    assert caught.value.reason == "BindFailed"
    assert "vfio-pci.ids=" in caught.value.next_step


async def test_a_card_that_had_no_driver_has_none_again_when_its_second_function_cannot_move(make_host):
    host = make_host(IDLE + f'faults: [{{on: pci.probe, target: "{AUDIO}", succeedWithoutEffect: true}}]\n')
    assert await unbind(host, GPU, "nvidia") == "done"
    before = await host.ports.pci.read_driver(AUDIO)
    with pytest.raises(TransientError):
        await rebind([(GPU, "vfio-pci"), (AUDIO, "vfio-pci")], host.ports)
    functions = (await host.ports.pci.read()).functions
    assert isinstance(functions[GPU].driver, Absent)
    assert isinstance(functions[GPU].driver_override, Absent)
    assert isinstance(before, Known)
    assert functions[AUDIO].driver != Known("vfio-pci")

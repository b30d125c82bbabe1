"""An unbind of which nobody knows whether it was begun, and a holder that comes between the plan and the unbind."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agent.core.errors import TransientError
from agent.core.fact import Absent, Known
from agent.kinds.rebind import UnbindStuckError, rebind
from agent.ports import START_WITHIN, Ports
from agent.sim.host import SimulatedHost
from tests.sim.test_kernel_semantics import AUDIO, GPU, IDLE

SILENCES = [TimeoutError("systemd did not answer"), ConnectionResetError("the connection was lost")]


class SlowSystemd:
    """The PCI port with a systemd that does not answer, and does what it was asked for ``after`` seconds, or never.

    Everything else is the simulated host's. ``since``: how long after the unbind each override was written.
    """

    def __init__(self, host: SimulatedHost, error: Exception, after: float | None) -> None:
        self._pci: Any = host.ports.pci
        self._clock = host.ports.clock
        self._error = error
        self._after = after
        self._asked = 0.0
        self._late: asyncio.Task[None] | None = None
        self.since: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pci, name)

    async def start_unbind(self, address: str, driver: str, within: float = START_WITHIN) -> None:
        self._asked = self._clock.monotonic()
        if self._after is not None and self._after < within:
            self._late = asyncio.create_task(self._start(address, driver, self._after))
        raise self._error

    async def _start(self, address: str, driver: str, after: float) -> None:
        await self._clock.sleep(after)
        await self._pci.start_unbind(address, driver)

    async def set_override(self, address: str, driver: str) -> None:
        if self._asked:
            self.since.append(self._clock.monotonic() - self._asked)
        await self._pci.set_override(address, driver)


def slow(host: SimulatedHost, error: Exception, after: float | None) -> tuple[SlowSystemd, Ports]:
    pci = SlowSystemd(host, error, after)
    return pci, replace(host.ports, pci=pci)


def writes_of(host: SimulatedHost, address: str) -> list[str]:
    return [w for w in host.world.writes if address in w]


@pytest.mark.parametrize("error", SILENCES, ids=["timeout", "lost"])
async def test_B1_an_unbind_that_begins_after_systemd_was_given_up_is_waited_for_and_nothing_written_before(
    make_host, error
):
    host = make_host(IDLE)
    _, ports = slow(host, error, START_WITHIN / 2)
    await rebind([(GPU, "vfio-pci")], ports)
    assert writes_of(host, GPU) == [
        f"pci.set_override {GPU} vfio-pci", f"pci.unbind {GPU} nvidia", f"pci.probe {GPU}",
    ]  # fmt: skip
    assert await host.ports.pci.read_driver(GPU) == Known("vfio-pci")


@pytest.mark.parametrize("error", SILENCES, ids=["timeout", "lost"])
async def test_B1_what_was_written_for_an_unbind_that_never_began_is_taken_back_only_when_it_cannot_begin_any_more(
    make_host, error
):
    host = make_host(IDLE)
    pci, ports = slow(host, error, None)
    with pytest.raises(type(error)):
        await rebind([(GPU, "vfio-pci")], ports)
    assert pci.since
    assert min(pci.since) > START_WITHIN
    assert await host.ports.pci.read_driver(GPU) == Known("nvidia")
    assert isinstance((await host.ports.pci.read()).functions[GPU].driver_override, Absent)


async def test_B1_an_unbind_that_begins_late_and_hangs_is_stuck_and_nothing_is_written_any_more(make_host):
    host = make_host(IDLE + f'faults: [{{on: pci.unbind, target: "{GPU}", block: true}}]\n')
    pci, ports = slow(host, SILENCES[0], START_WITHIN / 2)
    with pytest.raises(UnbindStuckError):
        await rebind([(GPU, "vfio-pci")], ports)
    assert pci.since == []
    assert writes_of(host, GPU)[-1] == f"pci.unbind {GPU} nvidia"


async def test_law_1_a_persistence_mode_that_comes_on_after_the_override_was_written_stops_the_unbind(
    make_host,
):
    event = f'{{afterCalls: {{pci.set_override: 1}}, do: {{set: {{gpus: {{"{GPU}": {{persistenceMode: true}}}}}}}}}}'
    host = make_host(IDLE + f"events: [{event}]\n")
    with pytest.raises(TransientError, match="persistence mode") as caught:
        await rebind([(GPU, "vfio-pci")], host.ports)
    assert caught.value.reason == "Held"
    assert writes_of(host, GPU) == [f"pci.set_override {GPU} vfio-pci", f"pci.set_override {GPU}"]


async def test_law_1_a_virtual_machine_that_starts_after_the_override_was_written_keeps_its_card(make_host):
    host = make_host(f"""
set:
  modules: {{vfio_pci: {{}}}}
  functions: {{"0000:81:00.?": {{driver: vfio-pci, override: vfio-pci}}}}
  vms: {{"101": {{functions: ["{GPU}", "{AUDIO}"]}}}}
  targets: {{"lxc:129": {{units: {{sglang-qwen.service: {{activeState: inactive}}}}}}}}
events:
  - {{afterCalls: {{pci.set_override: 1}}, do: {{vmStart: "101"}}}}
""")
    with pytest.raises(TransientError, match="VM 101"):
        await rebind([(GPU, ""), (AUDIO, "")], host.ports)
    assert host.world.state.vms["101"].running
    assert not [w for w in host.world.writes if w.startswith("pci.unbind")]

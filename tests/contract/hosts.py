"""The hosts on which the contract of the ports is held up. Another edge joins by adding its factory here."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.host.inference import HttpInference
from agent.host.real import real_host
from agent.ports import Ports
from agent.sim.host import simulated_host
from agent.sim.scenario import parse_scenario
from tests.contract.kernel_host import GPU, log_line, put_back
from tests.contract.target_contract import UNIT_FILE


@dataclass(frozen=True)
class Subject:
    """A host that a test may change, and what of it the contract is tried on."""

    ports: Ports
    gpu: str  # a function on ``driver`` that nothing holds
    driver: str
    native: str  # what claims it when no override says otherwise
    other: str  # a driver that is there, fits the GPU and does not have it
    unit: str  # a unit of the host as ``target_contract.UNIT_FILE`` has it
    log: Callable[[str], None]  # one line into the kernel log


HostFactory = Callable[[Path], AbstractAsyncContextManager[Subject]]
UNIT = "contract-test.service"


@asynccontextmanager
async def simulated(folder: Path) -> AsyncIterator[Subject]:
    idle = parse_scenario(
        'set: {targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive}}}}}', "idle"
    )
    state = folder / "world.json"
    host = simulated_host(state=state, scenario=idle, time_factor=1000.0, inference=HttpInference)

    def log(line: str) -> None:
        with host.world.change():
            host.world.log(line)

    target = host.ports.targets("host")
    await target.write_file(f"/etc/systemd/system/{UNIT}", UNIT_FILE)
    await target.daemon_reload()
    yield Subject(host.ports, "0000:81:00.0", "nvidia", "nvidia", "vfio-pci", UNIT, log)
    await host.close()


@asynccontextmanager
async def real_kernel(_folder: Path) -> AsyncIterator[Subject]:
    """The first card of a guest, under the stand-in nvidia driver."""
    put_back(UNIT)
    host = real_host()
    try:
        yield Subject(host.ports, GPU, "nvidia", "nvidia", "vfio-pci", UNIT, log_line)
    finally:
        await host.close()


@asynccontextmanager
async def simulated_to_read(folder: Path) -> AsyncIterator[Ports]:
    async with simulated(folder) as subject:
        yield subject.ports


@asynccontextmanager
async def this_machine(_folder: Path) -> AsyncIterator[Ports]:
    host = real_host()  # to be read only: the tests on these hosts write nothing
    yield host.ports
    await host.close()


IN_GUEST = (
    os.environ.get("AGENT_CONTRACT_HOST") == "guest"
)  # this machine is a virtual one made to be tried on
CHANGEABLE: dict[str, HostFactory] = {"real-kernel": real_kernel} if IN_GUEST else {"simulated": simulated}
READABLE: dict[str, Callable[[Path], AbstractAsyncContextManager[Ports]]] = {
    **({} if IN_GUEST else {"simulated": simulated_to_read}),
    "this-machine": this_machine,
}

"""The hosts on which the contract of the ports is held up. Another edge joins by adding its factory here."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.host.inference import HttpInference
from agent.host.real import real_host
from agent.ports import Ports
from agent.sim.host import simulated_host
from agent.sim.scenario import parse_scenario


@dataclass(frozen=True)
class Subject:
    """A host that a test may change, and what of it the contract is tried on."""

    ports: Ports
    gpu: str  # a function on ``driver`` that nothing holds
    driver: str
    native: str  # what claims it when no override says otherwise
    other: str  # a driver that is there, fits the GPU and does not have it
    unit: str  # a unit of the host that exists and does not run
    log: Callable[[str], None]  # one line into the kernel log


HostFactory = Callable[[Path], AbstractAsyncContextManager[Subject]]


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

    yield Subject(
        host.ports, "0000:81:00.0", "nvidia", "nvidia", "vfio-pci", "nvidia-persistenced.service", log
    )
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


CHANGEABLE: dict[str, HostFactory] = {"simulated": simulated}
READABLE: dict[str, Callable[[Path], AbstractAsyncContextManager[Ports]]] = {
    "simulated": simulated_to_read,
    "this-machine": this_machine,
}

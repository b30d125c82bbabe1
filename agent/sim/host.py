"""A whole simulated host behind the agent's ports."""

from collections.abc import Callable
from pathlib import Path

from agent.ports import Clock, InferencePort, Ports
from agent.sim.nvml import SimNvml
from agent.sim.p2p import SimP2PTest
from agent.sim.pci import SimHolders, SimPci
from agent.sim.platform import SimKernelLog, SimPlatform
from agent.sim.profile import Profile, load_profile
from agent.sim.scenario import Scenario, SpecEdit
from agent.sim.target import SimTarget
from agent.sim.world import World


class SimulatedHost:
    """``ports`` for the loop, ``world`` for tests and scenarios. ``close`` ends child processes, not the host."""

    def __init__(self, world: World, ports: Ports) -> None:
        self.world = world
        self.ports = ports

    async def close(self) -> None:
        await self.world.close()


def simulated_host(
    profile: str | Profile = "esc8000a",
    *,
    inference: Callable[[Clock], InferencePort],
    state: Path | None = None,
    scenario: Scenario | None = None,
    time_factor: float | None = None,
    edit_spec: Callable[[SpecEdit], None] | None = None,
) -> SimulatedHost:
    """A host of this profile (a scenario names its own), new or as ``state`` has it.

    ``inference`` makes the real HTTP client. ``time_factor`` overrides the scenario's and the profile's.
    ``edit_spec`` hears of the scenario's edits of the spec file. Raises ``ScenarioError`` for bad files.
    """
    named = scenario is not None and "profile" in scenario.model_fields_set and isinstance(profile, str)
    name = scenario.profile if scenario is not None and named else profile
    made = load_profile(name) if isinstance(name, str) else name
    world = World(made, state=state, scenario=scenario, time_factor=time_factor, edit_spec=edit_spec)
    targets: dict[str, SimTarget] = {}
    ports = Ports(
        clock=world.clock,
        platform=SimPlatform(world),
        pci=SimPci(world),
        nvml=SimNvml(world),
        holders=SimHolders(world),
        kernel_log=SimKernelLog(world),
        targets=lambda target: targets.setdefault(target, SimTarget(world, target)),
        inference=inference(world.clock),
        p2p_test=SimP2PTest(world),
        simulated=made.name,
    )
    return SimulatedHost(world, ports)

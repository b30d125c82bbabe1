"""What every pure decision is made from."""

from dataclasses import dataclass

from agent.core.memory import Memory
from agent.core.observation import Observation
from agent.core.spec import GpuHost, Spec


@dataclass(frozen=True, slots=True)
class Inputs:
    """One pass: the accepted spec and its generation, the facts, the memory, and the wall clock (seconds)."""

    host: GpuHost
    generation: int
    obs: Observation
    memory: Memory
    now: float
    simulated: bool = False

    @property
    def spec(self) -> Spec:
        return self.host.spec

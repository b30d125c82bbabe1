"""A whole agent on a simulated host, for tests: the real wiring, a scenario, a spec, and a state directory.

Nothing here is a mock: the same assembly as ``agent run``, passes driven by hand. ``restart`` builds a new agent over
the same state, as after a kill; the simulated host goes on.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.app.paths import Paths
from agent.app.wiring import Assembly, assemble_on
from agent.core.condition import Condition
from agent.core.memory import Memory
from agent.core.status import Status
from agent.core.yaml12 import parse
from agent.host.inference import HttpInference
from agent.loop.reconcile import PassResult
from agent.sim.host import SimulatedHost, simulated_host
from agent.sim.merge import merge
from agent.sim.scenario import Scenario, load_scenario, parse_scenario
from agent.sim.spec_edit import spec_editor
from agent.sim.world import World

REPOSITORY = Path(__file__).parent.parent
RECIPE = REPOSITORY / "specs/esc8000a-qwen3.5-122b.yaml"
SCENARIOS = REPOSITORY / "tests/scenarios"

# The first recipe with a gate that takes a blink: the same decisions, fewer tokens. At this compression a busy machine
# can make a figure 40 % wrong, so only halved speeds are told apart by it, and no floor is set.
QUICK_GATE = {
    "startTimeout": "10m",
    "drainTimeout": "5s",
    "stopTimeout": "30s",
    "benchmark": {
        "concurrency": [1, 4],
        "outputTokens": 200,
        "repeats": 1,
        "requestsPerSlot": 1,
        "timeout": "30m",
    },
    "require": None,
    "regression": {"throughput": "40%", "latencyP50": "80%", "latencyP95": "90%"},
}
FACTOR = 200.0


def recipe(file: Path = RECIPE, **changes: Any) -> str:
    """A recipe (the first, if none is named) with the quick gate; ``changes`` are merged into ``spec``.

    None removes a key.
    """
    data: Any = parse(file.read_text()).value
    for service in data["spec"]["services"].values():
        service["gate"] = merge(service["gate"], QUICK_GATE)
    data["spec"] = merge(data["spec"], changes)
    return json.dumps(data, indent=2)  # YAML 1.2 takes JSON as it is


@dataclass
class Rig:
    root: Path
    scenario: Scenario | None = None
    factor: float | None = FACTOR
    profile: Any = "esc8000a"
    host: SimulatedHost = field(init=False)
    agent: Assembly = field(init=False)
    results: list[PassResult] = field(default_factory=list)

    @property
    def spec(self) -> Path:
        return self.root / "etc/gpu-host-agent/spec.yaml"

    @property
    def world(self) -> World:
        return self.host.world

    @property
    def memory(self) -> Memory:
        return self.agent.store.memory

    def write_spec(self, text: str) -> None:
        self.spec.parent.mkdir(parents=True, exist_ok=True)
        self.spec.write_text(text)

    def open(self) -> None:
        self.host = simulated_host(
            self.profile,
            state=self.root / "sim/world.json",
            scenario=self.scenario,
            time_factor=self.factor,
            inference=HttpInference,
            edit_spec=spec_editor(self.spec),
        )
        self.agent = assemble_on(self.host.ports, Paths(self.root, self.spec), host=self.host, deadline=2.0)

    async def close(self) -> None:
        await self.agent.close()

    async def restart(self) -> None:
        """A new agent over the same state directory and the same simulated host."""
        await self.close()
        self.open()

    async def one_pass(self, trigger: str = "test") -> PassResult:
        result = await self.agent.reconciler.run_pass(trigger)
        self.results.append(result)
        return result

    async def converge(self, most: int = 12) -> PassResult:
        """Passes until one asks for no other; fails the test when there is no end."""
        for _ in range(most):
            result = await self.one_pass()
            if not result.again:
                return result
        raise AssertionError("no end: " + " | ".join(r.sentence for r in self.results[-most:]))

    def status(self) -> Status:
        return Status.model_validate_json((self.root / "run/gpu-host-agent/status.json").read_bytes())

    def condition(self, kind: str) -> Condition:
        found = {c.type: c for c in self.status().conditions}
        assert kind in found, f"no condition {kind}; there are {sorted(found)}"
        return found[kind]


@asynccontextmanager
async def rig(
    root: Path,
    *,
    spec: str | None = None,
    scenario: str | Path | None = None,
    factor: float | None = FACTOR,
    profile: Any = "esc8000a",
) -> AsyncIterator[Rig]:
    """``scenario`` is YAML text or a file. ``spec`` is the spec's text (default: the first recipe, quick gate)."""
    parsed = None
    if isinstance(scenario, Path):
        parsed = load_scenario(scenario)
    elif scenario is not None:
        parsed = parse_scenario(scenario, "scenario")
    made = Rig(root, parsed, factor, profile)
    made.write_spec(spec if spec is not None else recipe())
    made.open()
    try:
        yield made
    finally:
        await made.close()

"""Simulated hosts for tests, closed afterwards."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent.host.inference import HttpInference
from agent.sim.host import SimulatedHost, simulated_host
from agent.sim.scenario import parse_scenario

MakeHost = Callable[..., SimulatedHost]


@pytest.fixture
async def make_host() -> AsyncIterator[MakeHost]:
    """``make_host(scenario text)``; time runs 200 times as fast as it does outside."""
    made: list[SimulatedHost] = []

    def make(text: str = "", *, state: Path | None = None, **options: Any) -> SimulatedHost:
        scenario = parse_scenario(text, "test.yaml") if text else None
        options = {"time_factor": 200.0, **options}
        host = simulated_host(inference=HttpInference, state=state, scenario=scenario, **options)
        made.append(host)
        return host

    yield make
    for host in made:
        await host.close()

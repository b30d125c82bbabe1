"""Units that the agent started and that the spec no longer has: left alone, never passed over, in nobody's way unsaid."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases.operating import TARGET, UNIT, asks, patient_health, recipe, rig, steady
from tests.rig import Rig

OTHER_UNIT = "sglang-glm.service"
STOP = f"pct exec 129 -- systemctl disable --now {UNIT}"


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    patient_health(monkeypatch)
    steady(monkeypatch)


def under_another_name() -> str:
    """The same service as ``glm``, in a unit of its own: to the spec, qwen is gone and glm is new."""
    data: Any = json.loads(recipe())
    services = data["spec"]["services"]
    services["glm"] = {**services.pop("qwen"), "unit": OTHER_UNIT}
    return json.dumps(data)


def runs(host: Rig, name: str) -> bool:
    return host.world.state.targets[TARGET].units[name].active_state == "active"


async def stopped_by_hand(host: Rig) -> None:
    await host.agent.ports.targets(TARGET).stop_unit(UNIT)
    for _ in range(100):
        if host.world.state.targets[TARGET].units[UNIT].active_state == "inactive":
            return
        await asyncio.sleep(0.05)
        host.world.tick()


async def test_the_unit_of_a_removed_service_is_left_running_and_named_until_a_person_stops_it(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as host:
        await host.converge()
        before = list(host.world.writes)
        host.write_spec(recipe(services={"qwen": None}))
        result = await host.converge()
        assert host.world.writes == before
        assert runs(host, UNIT)
        assert "Converged" not in result.sentence
        condition = host.condition("FormerUnitsStopped")
        assert (condition.status, condition.reason) == ("False", "FormerUnitRuns")
        assert f"{UNIT} in {TARGET}" in condition.message
        assert "service qwen" in condition.message
        assert STOP in condition.next_step
        assert host.status().ready == "False"
        await stopped_by_hand(host)
        result = await host.converge()
        assert result.sentence.startswith("Converged")
        assert host.status().ready == "True"
        assert not [c for c in host.status().conditions if c.type == "FormerUnitsStopped"]


async def test_a_service_under_another_name_waits_before_anything_starts_until_the_former_unit_is_stopped(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as host:
        await host.converge()
        before = list(host.world.writes)
        host.write_spec(under_another_name())
        for _ in range(3):
            result = await host.one_pass()
            assert result.plan is not None
            assert not result.plan.actions
        assert host.world.writes == before
        assert runs(host, UNIT)
        condition = host.condition("ServiceReady/glm")
        assert (condition.status, condition.reason) == ("False", "FormerUnitRuns")
        assert STOP in condition.next_step
        await stopped_by_hand(host)
        await host.converge()
        assert host.condition("ServiceReady/glm").reason == "Promoted"
        assert runs(host, OTHER_UNIT)
        assert host.status().ready == "True"


async def test_a_former_unit_that_the_operator_keeps_is_forgotten_by_a_retry(tmp_path: Path) -> None:
    """Also when the request waits for an agent; and what holds GPUs still stands in the way, whoever it belongs to."""
    async with rig(tmp_path) as host:
        await host.converge()
        host.write_spec(recipe(services={"qwen": None}))
        await host.converge()
        assert "agent retry qwen" in host.condition("FormerUnitsStopped").next_step
        before = list(host.world.writes)
        asks(host, "retry", "qwen")
        await host.restart()
        result = await host.converge()
        assert result.sentence.startswith("Converged")
        assert host.status().ready == "True"
        assert "qwen" not in {**host.memory.promoted, **host.memory.previous, **host.memory.trials}
        host.write_spec(under_another_name())
        await host.converge()
        assert host.status().ready != "True"
        assert host.world.writes == before
        assert runs(host, UNIT)


async def test_a_former_unit_that_comes_up_again_is_named(tmp_path: Path) -> None:
    """Also after a restart of the agent: who was promoted is remembered."""
    async with rig(tmp_path) as host:
        await host.converge()
        host.write_spec(recipe(services={"qwen": None}))
        await stopped_by_hand(host)
        await host.converge()
        await host.agent.ports.targets(TARGET).start_unit(UNIT)
        await host.restart()
        await host.one_pass()
        assert host.condition("FormerUnitsStopped").reason == "FormerUnitRuns"

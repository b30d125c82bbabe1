"""Services that fail after they were promoted: starts that nobody asked for, their budget, and what is proved again."""

from pathlib import Path

import pytest

from agent.core.fact import Unknown
from tests.cases.operating import (
    asks,
    journal,
    patient_health,
    phases,
    qwen,
    recipe,
    rig,
    service,
    service_dies,
    starts,
    steady,
    unit,
)  # fmt: skip
from tests.rig import SCENARIOS, Rig


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


async def dies_until_the_budget_is_used(agent: Rig) -> None:
    await agent.converge()
    for number in range(3):
        service_dies(agent, "CUDA error: an illegal memory access was encountered")
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert phases(agent)[-2:] == ["benchmark ok", "judge ok"]
        assert starts(agent) == 2 + number
    service_dies(agent)
    await agent.converge()


def assert_out_of_budget(agent: Rig) -> None:
    condition = agent.condition("ServiceReady/qwen")
    assert (condition.status, condition.reason) == ("False", "BudgetExhausted")
    assert "3" in condition.message
    assert "agent retry qwen" in condition.next_step
    assert agent.status().budget.startswith("3 of 3")
    assert agent.status().ready == "False"


async def test_S9_a_service_that_dies_again_and_again_is_restarted_until_the_budget_is_used(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await dies_until_the_budget_is_used(agent)
        assert_out_of_budget(agent)
        for _ in range(10):
            await agent.one_pass()
        assert starts(agent) == 4
        assert "the budget is 3" in agent.results[-1].sentence


async def test_S9_the_budget_survives_restarts_of_the_agent_and_a_retry_gives_it_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await dies_until_the_budget_is_used(agent)
        for _ in range(3):
            await agent.restart()
            await agent.converge()
            assert_out_of_budget(agent)
        assert starts(agent) == 4
        asks(agent, "retry", "qwen")
        await agent.converge()
        assert starts(agent) == 5
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert agent.status().ready == "True"
        asked = [r for r in journal(agent) if r["event"] == "request"]
        assert [(r["verb"], r["argument"]) for r in asked] == [("retry", "qwen")]


async def test_S9_the_budget_survives_a_reboot_of_the_host(tmp_path: Path) -> None:
    """Every start but the first crashes; the host reboots when the fourth was asked for, and starts its units itself."""
    scenario = """
      faults: [{on: service.start, after: 1, crash: {status: 1, log: [the host is broken]}}]
      events: [{afterCalls: {target.start_unit: 4}, at: 60s, do: {reboot: {}}}]
    """
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        service_dies(agent)
        while agent.world.state.boots == 1:
            await agent.host.ports.clock.sleep(20)
            await agent.one_pass()
        assert starts(agent) == 4
        await agent.restart()
        for _ in range(6):
            await agent.host.ports.clock.sleep(20)
            await agent.one_pass()
        assert starts(agent) == 4
        assert_out_of_budget(agent)


async def test_S9_an_edit_of_the_spec_is_no_remediation_and_costs_no_budget(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await dies_until_the_budget_is_used(agent)
        agent.write_spec(recipe(**qwen(args={"max-running-requests": 64})))
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert "--max-running-requests" in unit(agent).argv


async def test_S9_an_edit_back_to_what_was_promoted_before_costs_no_budget_either(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await dies_until_the_budget_is_used(agent)
        used = agent.memory.starts
        for args in ({"max-running-requests": 64}, {"max-running-requests": None}) * 2:
            counted = starts(agent)
            agent.write_spec(recipe(**qwen(args=args)))
            await agent.converge()
            assert agent.condition("ServiceReady/qwen").reason == "Promoted"
            assert starts(agent) == counted + 1
        assert agent.memory.starts == used
        service_dies(agent)
        await agent.converge()
        assert_out_of_budget(agent)


async def test_S10_a_degraded_service_stays_up_and_is_not_called_healthy_after_a_restart_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient_health(monkeypatch)
    # 108 and 2 tokens per second: a busy machine makes both slower, and hardly the first thirteen times.
    scenario = "faults: [{on: server, factor: 0.02, times: 1, after: 1}]"
    bench = {"concurrency": [1], "outputTokens": 500}
    spec = recipe(**qwen(gate={"benchmark": bench, "require": {"1": ">= 8 tok/s"}}))
    async with rig(tmp_path, spec=spec, scenario=scenario) as agent:
        await agent.converge()
        service_dies(agent)
        await agent.converge()
        for _ in range(2):
            shown = service(agent)
            assert (shown.state, shown.health) == ("active", "ok")
            condition = agent.condition("ServiceReady/qwen")
            assert (condition.status, condition.reason) == ("False", "Degraded")
            assert "below the floor of 8.0 tok/s" in condition.message
            assert "agent retry qwen" in condition.next_step
            assert agent.status().ready == "False"
            await agent.restart()
            await agent.converge()
        count = starts(agent)
        with agent.world.change():
            unit(agent).server = {}
        agent.world.servers.rewrite()
        asks(agent, "retry", "qwen")
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert starts(agent) == count  # measured as it runs


async def test_a_retry_is_used_up_by_the_start_that_it_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the started service then misses a few health probes: that silence is judged like any other."""
    async with rig(tmp_path) as agent:
        await agent.converge()
        service_dies(agent)
        asks(agent, "retry", "qwen")

        async def slow(*_: object) -> Unknown:
            return Unknown("no answer within 30 s", "Timeout")

        monkeypatch.setattr("agent.loop.health.HealthProbe._ask", slow)
        for _ in range(4):
            await agent.one_pass()
        assert agent.memory.asked == ()
        assert starts(agent) == 2
        assert agent.condition("ServiceReady/qwen").reason == "NotAnswering"


async def test_S10_a_service_found_degraded_is_measured_before_it_is_called_anything(tmp_path: Path) -> None:
    """It answers nonsense at a tenth of its speed: health alone would pass it."""
    async with rig(tmp_path, scenario=SCENARIOS / "S10.yaml") as agent:
        await agent.converge()
        assert agent.status().ready == "False"
        assert agent.condition("ServiceReady/qwen").status == "False"
        assert agent.memory.promoted == {}
        await agent.restart()
        await agent.converge()
        assert agent.status().ready == "False"


async def test_S10_a_service_that_hangs_while_no_agent_runs_is_not_healthy_when_one_starts(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        with agent.world.change():
            unit(agent).server = {"answer": "hang"}
        agent.world.servers.rewrite()
        await agent.restart()
        await agent.one_pass()
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "NotAnswering")
        assert agent.status().ready == "False"

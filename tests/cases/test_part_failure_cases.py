"""One part fails for good: what does not need it goes on, a running service stays, and status says what is amiss."""

from pathlib import Path
from typing import Any

import pytest

from agent.core.status import Status
from tests.cases.operating import (
    asks,
    on_any_platform,
    qwen,
    recipe,
    rig,
    service,
    service_dies,
    starts,
    steady,
    stops,
    unit,
    wait_out_backoff,
)  # fmt: skip
from tests.rig import Rig

MORE_REQUESTS = {"max-running-requests": 64}
LIMIT = {"gpus": {"inference": {"settings": {"powerLimit": "500W"}}}}
Fault = dict[str, Any]
CANNOT_TEST: Fault = {"on": "p2p.run", "errno": "EIO"}


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


def breaks(agent: Rig, *faults: Fault) -> None:
    with agent.world.change() as state:
        state.added_faults += faults


def mended(agent: Rig) -> None:
    with agent.world.change() as state:
        state.added_faults.clear()


def unready(status: Status) -> list[str]:
    return [c.type for c in status.conditions if c.status != "True" and not c.type.startswith("P2PVerified/")]


async def test_a_power_limit_that_cannot_be_set_keeps_no_service_from_its_new_revision(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        breaks(agent, {"on": "nvml.set_power_limit", "errno": "EPERM"})
        agent.write_spec(recipe(**qwen(args=MORE_REQUESTS), **LIMIT))
        result = await agent.converge()
        assert "--max-running-requests" in unit(agent).argv
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert unready(agent.status()) == ["GpuSettingsApplied"]
        condition = agent.condition("GpuSettingsApplied")
        assert (condition.status, condition.reason) == ("False", "Backoff")
        assert "agent retry" in condition.next_step
        assert "power-limit" in result.sentence
        assert (starts(agent), stops(agent)) == (2, 2)
        mended(agent)
        await wait_out_backoff(agent)
        await agent.converge()
        assert agent.status().ready == "True"
        assert (starts(agent), stops(agent)) == (2, 2)


async def test_a_service_that_died_comes_back_while_a_power_limit_waits_for_its_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        monkeypatch.setattr("agent.loop.execute.BACKOFF_FIRST", 900.0)
        breaks(agent, {"on": "nvml.set_power_limit", "errno": "EPERM"})
        agent.write_spec(recipe(**LIMIT))
        await agent.converge()
        service_dies(agent)
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert agent.condition("GpuSettingsApplied").reason == "Backoff"


async def test_a_self_test_that_cannot_run_takes_no_running_service_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, spec=recipe(**qwen(p2p="off"))) as agent:
        await agent.converge()
        monkeypatch.setattr("agent.loop.execute.BACKOFF_FIRST", 900.0)
        breaks(agent, CANNOT_TEST)
        agent.write_spec(recipe(**qwen(p2p="auto", args=MORE_REQUESTS)))
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert "--max-running-requests" in unit(agent).argv
        assert (service(agent).p2p, service(agent).health) == ("off", "ok")
        condition = agent.condition("P2PVerified/qwen")
        assert condition.status == "Unknown"
        assert "could not judge: [Errno 5] Input/output error" in condition.message
        service_dies(agent)  # idle GPUs, and the next test is not due: it starts without one
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert agent.memory.failures["p2p/selftest/qwen"] == 1


async def test_a_self_test_that_could_not_run_is_tried_again_when_the_gpus_are_idle_and_its_time_has_come(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=on_any_platform()) as agent:
        breaks(agent, CANNOT_TEST)
        await agent.converge()
        assert agent.condition("P2PVerified/qwen").status == "Unknown"
        mended(agent)
        await wait_out_backoff(agent)
        await agent.converge()
        assert agent.condition("P2PVerified/qwen").status == "Unknown"  # who is served is not disturbed
        service_dies(agent)
        await agent.converge()
        assert agent.condition("P2PVerified/qwen").reason == "Corrupt"
        assert agent.status().ready == "True"


async def test_where_p2p_is_required_a_self_test_that_cannot_run_refuses_the_start_and_is_tried_later_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.loop.execute.BACKOFF_FIRST", 900.0)
    async with rig(tmp_path, spec=recipe(**qwen(p2p="required"))) as agent:
        breaks(agent, CANNOT_TEST)
        await agent.converge()
        for _ in range(5):
            await agent.one_pass()
        assert starts(agent) == 0
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "P2PRequired")
        assert "could not judge" in condition.message
        assert agent.memory.failures["p2p/selftest/qwen"] == 1


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ({"on": "target.write_file", "target": "*modprobe*", "errno": "EROFS"}, "False", "Backoff"),
        ({"on": "target.read_file", "target": "*modprobe*", "errno": "EIO"}, "Unknown", "NotObserved"),
    ],
)
async def test_a_host_is_not_ready_while_its_module_options_cannot_be_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, status: str, reason: str
) -> None:
    monkeypatch.setattr("agent.loop.execute.BACKOFF_FIRST", 900.0)
    async with rig(tmp_path) as agent:
        await agent.converge()
        assert "Converged" not in {c.type for c in agent.status().conditions}
        breaks(agent, fault)
        agent.write_spec(recipe(platform={"modules": {"foo": {"bar": 1}}}))
        await agent.converge()
        assert unready(agent.status()) == ["Converged"]
        condition = agent.condition("Converged")
        assert (condition.status, condition.reason) == (status, reason)
        assert "/etc/modprobe.d/gpu-host-agent.conf" in condition.message
        assert condition.next_step
        assert agent.status().ready == status


async def test_S10_a_degraded_service_stays_degraded_when_only_the_reasons_for_its_values_change(
    tmp_path: Path,
) -> None:
    spec = {"gate": {"benchmark": {"concurrency": [1]}, "require": {"1": ">= 8 tok/s"}}}
    scenario = "faults: [{on: server, factor: 0.02, times: 1, after: 1}]"
    async with rig(tmp_path, spec=recipe(**qwen(**spec)), scenario=scenario) as agent:
        await agent.converge()
        service_dies(agent)
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Degraded"
        agent.write_spec(recipe(**qwen(p2p="off", **spec)))  # as it was already, for another reason
        await agent.converge()
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "Degraded")
        assert agent.status().ready == "False"


def hangs(agent: Rig, answer: str = "no-tokens") -> None:
    with agent.world.change():
        unit(agent).server = {**unit(agent).server, "answer": answer}
    agent.world.servers.rewrite()


def answers_again(agent: Rig) -> None:
    """What the next start brings: the fault was in the process."""
    with agent.world.change():
        unit(agent).server = {}


async def until_started_again(agent: Rig, most: int = 60) -> None:
    count = starts(agent)
    for _ in range(most):
        await agent.host.ports.clock.sleep(20)
        await agent.converge()
        if starts(agent) > count:
            return
    raise AssertionError("never started again: " + agent.results[-1].sentence)


async def test_a_promoted_service_that_answers_without_tokens_is_started_anew_after_some_minutes(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        await agent.one_pass()
        hangs(agent)
        await agent.restart()
        result = await agent.one_pass()
        assert (starts(agent), stops(agent)) == (1, 1)  # the first stop took over what ran
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "NotAnswering")
        assert "agent retry qwen" in condition.next_step
        assert "Converged" not in result.sentence
        assert "does not answer" in result.sentence
        await until_started_again(agent)
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert (starts(agent), stops(agent)) == (2, 2)
        assert len(agent.memory.starts) == 1  # nobody asked for it


async def test_a_hung_service_is_left_as_it_is_where_the_policy_allows_no_restart(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(recipe(policy={"allow": ["live"]}))
        hangs(agent)
        await agent.restart()
        for _ in range(40):
            await agent.host.ports.clock.sleep(20)
            result = await agent.converge()
            if result.blocked:
                break
        assert "restart" in result.blocked
        assert agent.condition("Converged").reason == "Blocked"
        assert (starts(agent), stops(agent)) == (1, 1)  # the first stop took over what ran
        assert agent.condition("ServiceReady/qwen").reason == "NotAnswering"


async def test_a_hung_service_is_started_anew_at_once_when_an_operator_asks_for_another_try(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        hangs(agent)
        await agent.restart()
        await agent.one_pass()
        asks(agent, "retry", "qwen")
        await agent.converge()
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert (starts(agent), stops(agent)) == (2, 2)
        await agent.one_pass()
        assert agent.memory.asked == ()


async def test_a_retry_of_a_service_that_answers_restarts_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        asks(agent, "retry", "qwen")
        await agent.converge()
        assert (starts(agent), stops(agent)) == (1, 1)  # the first stop took over what ran
        assert agent.memory.asked == ()

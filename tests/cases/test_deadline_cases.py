"""S8: every phase has a deadline, and every deadline has an outcome that the operator reads."""

from pathlib import Path

import pytest

from tests.cases.operating import (
    CANDIDATE,
    TARGET,
    UNIT,
    WHEN,
    assert_rolled_back,
    journal,
    promoted_then,
    qwen,
    recipe,
    rig,
    service,
    starts,
    steady,
    target,
    unit,
    wait_out_backoff,
)


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


async def test_S8_a_start_job_that_hangs_is_rolled_back(tmp_path: Path) -> None:
    scenario = "faults: [{on: target.start_unit, after: 1, times: 1, block: true}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        assert_rolled_back(agent, good, "StartTimeout", "start was not done within 60 s")


async def test_S8_a_server_that_never_becomes_ready_is_rolled_back(tmp_path: Path) -> None:
    scenario = f"faults: [{{on: service.start, hang: true, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent, gate={"startTimeout": "3m"})
        assert_rolled_back(agent, good, "ReadyTimeout", "ready was not done within 180 s")


async def test_S8_a_smoke_test_that_hangs_is_rolled_back(tmp_path: Path) -> None:
    scenario = f"faults: [{{on: server, answer: hang, afterRequests: 1, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        assert_rolled_back(agent, good, "SmokeFailed", "no complete answer within 120 s")


async def test_S8_a_benchmark_that_hangs_is_rolled_back(tmp_path: Path) -> None:
    scenario = f"faults: [{{on: server, answer: hang, afterRequests: 2, {WHEN}}}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        bench = {"benchmark": {"timeout": "2m"}}
        good = await promoted_then(agent, gate=bench)
        shown = service(agent)
        assert shown.revision == shown.promoted == good
        assert agent.memory.trials["qwen"].outcome == "rolled-back"
        assert "120 s" in agent.condition("ServiceReady/qwen").message


async def test_S8_a_stop_that_survives_sigkill_starts_nothing_and_goes_on_when_it_ends(
    tmp_path: Path,
) -> None:
    """A process in an uninterruptible sleep: systemd says deactivating for as long as it lasts."""
    scenario = """
      faults:
        - {on: target.unit, target: sglang-qwen.service, whileExists: /stuck, value: {activeState: deactivating}}
      events:
        - {afterCalls: {target.stop_unit: 2}, do: {set: {targets: {"lxc:129": {files: {/stuck: "1"}}}}}}
    """
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        count = starts(agent)
        agent.write_spec(recipe(**qwen(args=CANDIDATE)))
        await agent.converge()
        assert f"target.kill_unit {TARGET} {UNIT}" in agent.world.writes
        assert starts(agent) == count
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        assert f"{UNIT} is deactivating" in condition.message
        with agent.world.change():
            del target(agent).files["/stuck"]
        await wait_out_backoff(agent)
        await agent.converge()
        assert service(agent).revision == service(agent).promoted
        assert "--max-running-requests" in unit(agent).argv


async def test_S8_a_rollback_that_cannot_stop_the_candidate_says_both_and_goes_on_later(
    tmp_path: Path,
) -> None:
    scenario = f"""
      faults:
        - {{on: server, answer: nonsense, {WHEN}}}
        - {{on: target.unit, target: sglang-qwen.service, whileExists: /stuck, value: {{activeState: deactivating}}}}
      events:
        - {{afterCalls: {{target.stop_unit: 3}}, do: {{set: {{targets: {{"lxc:129": {{files: {{/stuck: "1"}}}}}}}}}}}}
    """
    async with rig(tmp_path, scenario=scenario) as agent:
        good = await promoted_then(agent)
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        trials = [r for r in journal(agent) if r["event"] == "trial"]
        assert [(r["outcome"], r["reason"]) for r in trials[1:2]] == [("failed", "RollbackFailed")]
        assert "expected '91'" in trials[1]["message"]
        assert "did not come back" in trials[1]["message"]
        with agent.world.change():
            del target(agent).files["/stuck"]
        await wait_out_backoff(agent)
        await agent.converge()
        assert service(agent).revision == service(agent).promoted == good
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "RolledBack")


async def test_S8_a_stop_job_that_hangs_passes_its_deadline_and_is_tried_again(tmp_path: Path) -> None:
    scenario = "faults: [{on: target.stop_unit, times: 1, block: true}]"
    spec = recipe(gpus={"inference": {"settings": None}})  # or they would be set meanwhile
    async with rig(tmp_path, spec=spec, scenario=scenario) as agent:
        await agent.converge()
        assert starts(agent) == 0
        assert "stop was not done within" in agent.condition("ServiceReady/qwen").message
        await wait_out_backoff(agent)
        await agent.converge()
        assert agent.status().ready == "True"


async def test_S8_every_phase_of_a_trial_has_a_line_with_its_end_in_the_journal(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        begun = [r["phase"] for r in journal(agent) if r["event"] == "phase"]
        ended = {r["phase"]: r["result"] for r in journal(agent) if r["event"] == "phase-end"}
        assert begun == [
            "assert-stopped",
            "render",
            "start",
            "ready",
            "effective",
            "smoke",
            "benchmark",
            "judge",
        ]
        assert set(ended.values()) == {"ok"}
        assert list(ended) == begun

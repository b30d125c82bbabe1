"""What an earlier start left behind: an engine's own memory of P2P, and GPUs that compute for nobody."""

from pathlib import Path

import pytest

from agent.sim.state import FileState
from tests.cases.operating import (
    INFERENCE,
    PASSTHROUGH,
    TARGET,
    on_any_platform,
    qwen,
    recipe,
    rig,
    service,
    service_dies,
    starts,
    unit,
    wait_out_backoff,
)  # fmt: skip
from tests.rig import SCENARIOS, Rig

CACHE = "/root/.cache/sglang/gpu_p2p_access_cache_for_0,1,2,3.json"
SOMETHING_ELSE = "/root/.cache/sglang/gpu_p2p_access_cache_for_4,5.json"


def leaves(agent: Rig, text: str) -> None:
    with agent.world.change() as state:
        files = state.targets[TARGET].files
        files[CACHE] = files[SOMETHING_ELSE] = FileState(text=text)


def files(agent: Rig) -> set[str]:
    return {path for path in (CACHE, SOMETHING_ELSE) if path in agent.world.state.targets[TARGET].files}


async def test_P10_an_engine_that_hangs_at_its_own_p2p_cache_starts_once_that_file_is_gone(tmp_path: Path):
    async with rig(tmp_path, scenario=SCENARIOS / "P10.yaml") as agent:
        await agent.converge()
        assert agent.status().ready == "True"
        assert CACHE not in agent.world.state.targets[TARGET].files
        trial = agent.memory.trials["qwen"]
        (render,) = [note for note in trial.notes if note.phase == "render"]
        assert CACHE in render.detail
        assert starts(agent) == 1


@pytest.mark.parametrize("reach", ["true", "false"])
async def test_P10_only_a_cache_of_these_gpus_that_contradicts_the_verdict_is_removed(
    tmp_path: Path, reach: str
):
    async with rig(tmp_path, spec=on_any_platform(), scenario=PASSTHROUGH) as agent:
        leaves(agent, f'{{"0->1": {reach}}}')
        await agent.converge()
        assert service(agent).p2p == "on"
        assert files(agent) == ({CACHE, SOMETHING_ELSE} if reach == "true" else {SOMETHING_ELSE})


async def test_P10_a_cache_that_cannot_be_removed_is_said_and_costs_no_start(tmp_path: Path):
    fault = "faults: [{on: target.remove_file, errno: EROFS}]"
    async with rig(tmp_path, scenario=fault) as agent:
        leaves(agent, '{"0->1": true}')
        await agent.converge()
        assert agent.status().ready == "True"
        details = " ".join(note.detail for note in agent.memory.trials["qwen"].notes)
        assert CACHE in details
        assert CACHE in files(agent)


async def test_S4_a_gpu_that_computes_for_nobody_is_named_after_a_minute_until_it_rests(
    tmp_path: Path,
):
    async with rig(tmp_path) as agent:
        await agent.converge()
        service_dies(agent)
        with agent.world.change() as state:
            state.gpus[INFERENCE[2]].utilization = 100
        await agent.converge()
        assert agent.condition("GpusHealthy").status == "True"
        agent.agent.store.update(busy_alone={a: at - 60 for a, at in agent.memory.busy_alone.items()})
        await agent.one_pass()
        condition = agent.condition("GpusHealthy")
        assert (condition.status, condition.reason) == ("False", "GpuWedged")
        assert INFERENCE[2] in condition.message
        assert "reset" in condition.next_step
        with agent.world.change() as state:
            state.gpus[INFERENCE[2]].utilization = 0
        await agent.one_pass()
        assert agent.condition("GpusHealthy").status == "True"


async def test_S4_a_rollback_is_not_begun_on_a_gpu_that_the_failed_start_left_wedged(tmp_path: Path):
    when = "when: {flag: max-running-requests, exists: true}"
    scenario = f"""
faults: [{{on: service.start, {when}, crash: {{status: 1, after: 5s, log: [hung]}}}}]
events: [{{afterCalls: {{target.start_unit: 2}}, do: {{set: {{gpus: {{"{INFERENCE[2]}": {{utilization: 100}}}}}}}}}}]
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert agent.status().ready == "True"
        agent.write_spec(recipe(**qwen(args={"max-running-requests": 64})))
        for _ in range(3):
            await agent.converge()
            await wait_out_backoff(agent)
        assert starts(agent) == 2  # promoted, tried; and no third
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        assert "100 % busy" in condition.message
        assert "the last good revision is not started" in condition.message
        assert unit(agent).active_state in {"inactive", "failed"}

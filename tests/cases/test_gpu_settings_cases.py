"""Settings of GPUs: made once, kept, made again where they were lost, and left alone where somebody would notice."""

from pathlib import Path
from typing import Any

import pytest

from agent.sim.state import GpuState
from tests.cases.hardware import boots, happens, is_ready, writes_about
from tests.cases.operating import recipe, rig, starts, steady, stops, wait_out_backoff
from tests.rig import Rig

GPU = "0000:01:00.0"
CLOCKS = {"lockedGraphicsClocks": "300-2000MHz", "lockedMemoryClocks": "9001MHz"}


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    steady(monkeypatch)


def settings(**wanted: Any) -> str:
    return recipe(gpus={"inference": {"settings": wanted}})


def gpu(agent: Rig) -> GpuState:
    return agent.world.state.gpus[GPU]


def said(agent: Rig) -> tuple[str, str]:
    condition = agent.condition("GpuSettingsApplied")
    return condition.status, condition.reason


async def test_settings_are_made_once_under_a_running_service_and_a_new_agent_writes_nothing(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(settings(**CLOCKS, computeMode="default", mig=False, ecc=True))
        await agent.converge()
        assert said(agent) == ("True", "AsSpecified")
        assert (gpu(agent).locked_graphics_clocks, gpu(agent).locked_memory_clocks) == (
            (300, 2000),
            (9001, 9001),
        )
        assert (starts(agent), stops(agent)) == (1, 1)
        before = list(agent.world.writes)
        await agent.restart()
        await agent.converge()
        assert agent.world.writes == before


async def test_clocks_are_locked_after_persistence_mode_is_on_and_not_before(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=settings(**CLOCKS)) as agent:
        await agent.converge()
        assert [w.split()[0] for w in writes_about(agent, "nvml.set_", GPU)] == [
            "nvml.set_persistence_mode",
            "nvml.set_locked_graphics_clocks",
            "nvml.set_locked_memory_clocks",
        ]


async def test_a_lock_that_a_boot_took_away_comes_back(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=settings(**CLOCKS)) as agent:
        await agent.converge()
        await boots(agent)
        assert gpu(agent).locked_graphics_clocks is None
        await agent.converge()
        await is_ready(agent)
        assert gpu(agent).locked_graphics_clocks == (300, 2000)


async def test_a_lock_leaves_with_the_word_unlocked(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=settings(**CLOCKS)) as agent:
        await agent.converge()
        agent.write_spec(settings(lockedGraphicsClocks="unlocked", lockedMemoryClocks="9001MHz"))
        await agent.converge()
        assert (gpu(agent).locked_graphics_clocks, gpu(agent).locked_memory_clocks) == ((0, 0), (9001, 9001))


async def test_ecc_waits_for_a_boot_that_the_operator_chooses_and_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        agent.write_spec(settings(ecc=False))
        await agent.converge()
        assert said(agent) == ("False", "ResetPending")
        assert "reboot" in agent.condition("GpuSettingsApplied").next_step
        assert (starts(agent), stops(agent)) == (1, 1)
        before = list(agent.world.writes)
        await agent.converge()
        assert agent.world.writes == before
        await boots(agent)
        await agent.converge()
        await is_ready(agent)
        assert said(agent) == ("True", "AsSpecified")


async def test_mig_mode_of_a_gpu_in_service_is_left_alone_and_the_user_is_named(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        happens(agent, set={"gpus": {GPU: {"mig": True, "migPending": True}}})
        agent.write_spec(settings(mig=False))
        await agent.converge()
        assert said(agent) == ("False", "Held")
        assert "sglang" in agent.condition("GpuSettingsApplied").message
        assert not writes_about(agent, "nvml.set_mig", GPU)
        assert (starts(agent), stops(agent)) == (1, 1)


async def test_mig_mode_is_set_before_the_service_starts_on_idle_gpus(tmp_path: Path) -> None:
    scenario = f'set: {{gpus: {{"{GPU}": {{mig: true, migPending: true}}}}}}'
    idle = scenario[:-1] + ', targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive}}}}}'
    async with rig(tmp_path, spec=settings(mig=False), scenario=idle) as agent:
        await agent.converge()
        assert not gpu(agent).mig
        assert agent.condition("ServiceReady/qwen").status == "True"


async def test_a_setting_that_the_card_refuses_for_good_is_tried_once_and_costs_nobody_anything(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        with agent.world.change() as state:
            state.added_faults += ({"on": "nvml.set_locked_memory_clocks", "target": GPU, "code": 3},)
        agent.write_spec(settings(lockedMemoryClocks="9001MHz"))
        await agent.converge()
        await wait_out_backoff(agent)
        await agent.converge()
        assert len(writes_about(agent, "nvml.set_locked_memory_clocks", GPU)) == 1
        assert said(agent) == ("False", "Failed")
        assert "Not Supported" in agent.condition("GpuSettingsApplied").message
        assert (starts(agent), stops(agent)) == (1, 1)


async def test_a_setting_that_is_taken_and_not_kept_is_no_success(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        with agent.world.change() as state:
            state.added_faults += (
                {"on": "nvml.set_compute_mode", "target": GPU, "succeedWithoutEffect": True},
            )
        agent.write_spec(settings(computeMode="exclusiveProcess"))
        await agent.converge()
        assert said(agent) == ("False", "Backoff")
        assert "reads back default" in agent.condition("GpuSettingsApplied").message


async def test_a_failed_write_is_tried_again_and_the_others_are_made(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        with agent.world.change() as state:
            state.added_faults += (
                {"on": "nvml.set_compute_mode", "target": GPU, "errno": "EIO", "times": 1},
            )
        agent.write_spec(settings(computeMode="exclusiveProcess", **CLOCKS))
        await agent.converge()
        await wait_out_backoff(agent)
        await agent.converge()
        assert said(agent) == ("True", "AsSpecified")

"""Platform and driver cases D1 to D3 and D9, and the door to real hosts, as an operator meets them."""

import os
import re
from pathlib import Path

import pytest

from agent.app.main import main
from tests.cases.hardware import everything_said, happens, is_ready, serves, writes_about
from tests.cases.operating import TARGET, asks, qwen, starts, stops, unit
from tests.rig import SCENARIOS, Rig, recipe, rig

EDITED = recipe(**qwen(args={"chunked-prefill-size": 4096}))
PROPOSES_PASSTHROUGH = re.compile(
    r"\b(put|add|set|append|use|try|boot with)\b[^;,.]*\b(iommu=pt|iommu=off|amd_iommu=off|iommu\.passthrough=1)"
)


def untouched(agent: Rig, before: list[str]) -> None:
    assert agent.world.writes == before
    assert unit(agent).active_state == "active"


async def test_D1_passthrough_that_cost_snp_is_found_and_only_its_removal_proposed(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "D1.yaml") as agent:
        await agent.converge()
        snp, platform = agent.condition("SnpPossible"), agent.condition("PlatformReady")
        assert (snp.status, snp.reason) == ("False", "SnpRefused")
        assert "SNP cannot be supported" in snp.message
        assert platform.status == "False"
        for condition in (snp, platform):
            assert condition.next_step.startswith("remove iommu=pt")
        assert not PROPOSES_PASSTHROUGH.search(everything_said(agent))
        assert agent.status().ready == "False"
        assert not [w for w in agent.world.writes if "group_type" in w]


async def test_D1_the_usual_cure_for_corrupt_peers_is_not_proposed_on_an_snp_host(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        said = everything_said(agent)
        assert "12 of 12 ordered pairs corrupt" in said
        assert not PROPOSES_PASSTHROUGH.search(said)
        assert "IommuMode" not in said


@pytest.mark.parametrize("mode", ["passthrough", "off"])
async def test_D1_a_spec_that_wants_snp_without_translation_is_refused(tmp_path: Path, mode: str) -> None:
    async with rig(tmp_path, spec=recipe(platform={"iommu": mode})) as agent:
        await agent.one_pass()
        condition = agent.condition("SpecAccepted")
        assert condition.status == "False"
        assert "sevSnp" in condition.message
        assert agent.world.writes == []


async def test_D2_another_user_space_in_the_target_is_named_and_the_running_service_left_alone(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        before = list(agent.world.writes)
        happens(agent, set={"targets": {TARGET: {"userDriver": "565.57.01"}}})
        await agent.converge()
        agent.write_spec(EDITED)
        await agent.converge()
        await agent.restart()
        await agent.converge()
        untouched(agent, before)
        versions, serving = agent.condition("DriverVersionsAgree"), agent.condition("ServiceReady/qwen")
        assert (versions.status, versions.reason) == ("False", "DriverMismatch")
        assert "user space 565.57.01 in lxc:129, kernel module 590.48.01 on the host" in versions.message
        assert versions.next_step == "install user-space driver 590.48.01 in lxc:129"
        assert (serving.status, serving.reason) == ("False", "DriverMismatch")
        assert "restart the container" not in everything_said(agent)  # that would not mend it


async def test_D2_another_library_on_the_host_is_named_and_the_running_service_left_alone(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        before = list(agent.world.writes)
        happens(agent, set={"targets": {"host": {"userDriver": "595.10"}}})
        agent.write_spec(EDITED)
        await agent.converge()
        untouched(agent, before)
        versions = agent.condition("DriverVersionsAgree")
        assert (versions.status, versions.reason) == ("False", "DriverMismatch")
        assert "user space 595.10 on the host, kernel module 590.48.01 on the host" in versions.message
        assert "code 18" in versions.message
        assert agent.status().ready == "False"


async def test_D2_a_service_that_is_down_is_not_started_into_a_mismatch(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "D2.yaml") as agent:
        await agent.converge()
        assert stops(agent) == starts(agent) == 0
        assert agent.condition("ServiceReady/qwen").reason == "DriverMismatch"


async def test_D3_gpus_lost_by_a_reload_are_found_in_the_target_and_no_revision_is_blamed(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "D3.yaml") as agent:
        await agent.converge()
        await agent.one_pass()
        versions, serving = agent.condition("DriverVersionsAgree"), agent.condition("ServiceReady/qwen")
        assert (versions.status, versions.reason) == ("False", "NvmlFails")
        assert "NVML fails in lxc:129" in versions.message
        assert "on the host" not in versions.message
        assert (serving.status, serving.reason) == ("False", "TargetLostGpus")
        assert serving.next_step == "restart lxc:129 so that it gets its devices back"
        assert starts(agent) == 0
        happens(agent, set={"targets": {TARGET: {"nvmlCode": 0}}})
        agent.write_spec(recipe(policy={"resync": "20s"}))  # a person is at it: nothing waits for its backoff
        await agent.converge()
        await serves(agent)


async def test_D9_a_module_that_did_not_load_is_tried_again_before_the_service_starts(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "D9.yaml") as agent:
        await agent.converge()
        await agent.one_pass()
        condition = agent.condition("ModulesLoaded")
        assert (condition.status, condition.reason) == ("False", "ModuleMissing")
        assert "modprobe nvidia_uvm came back, and the module is not loaded" in condition.message
        assert starts(agent) == 0
        assert writes_about(agent, "nvidia_uvm") == [
            "platform.load_module nvidia_uvm"
        ]  # no second one at once
        asks(agent, "retry", "nvidia_uvm")
        await agent.converge()
        assert "nvidia_uvm" in agent.world.state.modules
        await is_ready(agent)


@pytest.mark.parametrize("command", ["apply", "run"])
def test_whoever_is_not_root_is_told_so_before_a_real_host_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    root = tmp_path / "root"
    assert main([command, "--host", "real", "--root", str(root), "--spec", str(tmp_path / "none.yaml")]) == 1
    said = capsys.readouterr().err
    assert "needs root, and this is user 1000" in said
    assert "agent plan" in said
    assert not root.exists()

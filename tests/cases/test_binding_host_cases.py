"""Binding cases B7 to B10: machines that hold cards, overrides left behind, boots."""

import asyncio
from pathlib import Path

import pytest

from tests.cases.hardware import (
    CONFIDENTIAL,
    NOTHING_FOR_NVIDIA,
    at_any_speed,
    boots,
    card,
    driver,
    happens,
    is_ready,
    override,
    rules,
    serves,
    unbinds,
    writes_about,
)
from tests.cases.operating import INFERENCE
from tests.rig import SCENARIOS, recipe, rig

GPU, AUDIO = "0000:81:00.0", "0000:81:00.1"


async def test_B7_an_agent_restarted_while_a_vm_holds_its_cards_writes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B7.yaml") as agent:
        await agent.converge()
        assert not writes_about(agent, "0000:81:00")
        before = list(agent.world.writes)
        await agent.restart()
        result = await agent.converge()
        assert result.sentence == "Converged: nothing to do."
        assert agent.world.writes == before
        await is_ready(agent)


async def test_B7_a_card_that_a_vm_holds_is_not_taken_from_it(tmp_path: Path) -> None:
    spec = recipe(gpus={"confidential": {"driver": "nvidia"}})
    async with rig(tmp_path, spec=spec, scenario=SCENARIOS / "B7.yaml") as agent:
        await agent.converge()
        await agent.restart()
        await agent.converge()
        assert not writes_about(agent, "0000:81:00")
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "Held")
        assert "VM 101" in condition.message
        assert "/dev/vfio/48" in condition.message


async def test_B7_a_vm_that_starts_while_the_plan_runs_keeps_its_card(tmp_path: Path) -> None:
    """What was free when the plan was made is looked at again right before the unbind."""
    scenario = """
set:
  modules: {vfio_pci: {}}
  functions: {"0000:[89ef]1:00.?": {driver: vfio-pci, override: vfio-pci}}
  vms: {"101": {functions: ["0000:f1:00.0", "0000:f1:00.1"]}}
  targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive, mainPid: 0}}}}
events:
  - {afterCalls: {pci.unbind: 1}, do: {vmStart: "101"}}
"""
    spec = recipe(gpus={"confidential": {"driver": "nvidia"}})
    async with rig(tmp_path, spec=spec, scenario=scenario) as agent:
        await agent.converge()
        assert unbinds(agent, "0000:f1:00.0") == 0
        assert driver(agent, GPU) == "nvidia"
        assert "VM 101" in agent.condition("DriversBound").message


async def test_B8_a_stale_override_and_a_card_without_a_driver_are_mended_and_verified(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B8.yaml") as agent:
        await agent.converge()
        assert card(agent, GPU) == {GPU: "vfio-pci", AUDIO: "vfio-pci"}
        assert unbinds(agent, GPU) == 0
        await is_ready(agent)


@pytest.mark.parametrize("stale", ["vfio-pci", "gone-driver", ""])
async def test_B8_a_driverless_card_of_the_service_comes_to_nvidia_whatever_its_override(
    tmp_path: Path, stale: str
) -> None:
    scenario = f"""
set:
  functions: {{"0000:11:00.0": {{driver: "", override: "{stale}"}}}}
  targets: {{"lxc:129": {{units: {{sglang-qwen.service: {{activeState: inactive, mainPid: 0}}}}}}}}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert driver(agent, "0000:11:00.0") == "nvidia"
        assert override(agent, "0000:11:00.0") == ""
        await is_ready(agent)


async def test_B8_a_stale_override_on_a_working_card_is_cleared_without_touching_its_driver(
    tmp_path: Path,
) -> None:
    scenario = 'set: {functions: {"0000:11:00.?": {override: vfio-pci}}}'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert override(agent, "0000:11:00.0") == override(agent, "0000:11:00.1") == ""
        assert unbinds(agent, "0000:11:00.0") == unbinds(agent, "0000:11:00.1") == 0
        await is_ready(agent)


async def test_B8_an_override_that_cannot_be_cleared_is_no_success(tmp_path: Path) -> None:
    scenario = """
set: {functions: {"0000:11:00.0": {override: vfio-pci}}}
faults: [{on: pci.set_override, target: "0000:11:00.0", succeedWithoutEffect: true}]
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("DriversBound")
        assert condition.status == "False"
        assert "driver_override of 0000:11:00.0 was set to none and reads back vfio-pci" in condition.message


async def test_B9_ids_on_the_command_line_are_flagged_and_the_cards_taken_back(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B9.yaml") as agent:
        await agent.converge()
        condition = agent.condition("PlatformReady")
        assert condition.status == "False"
        assert "vfio-pci.ids=10de:2bb5" in condition.message
        assert condition.next_step.startswith("remove vfio-pci.ids=10de:2bb5")
        assert {driver(agent, a) for a in INFERENCE} == {"nvidia"}
        assert {driver(agent, a) for a in CONFIDENTIAL} == {"vfio-pci"}
        await serves(agent)
        assert agent.status().ready == "False"


async def test_B9_ids_in_modprobe_d_are_flagged_too(tmp_path: Path) -> None:
    scenario = 'set: {moduleOptions: ["options vfio-pci ids=10de:2bb5,10de:22e8 disable_vga=1"]}'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("PlatformReady")
        assert (condition.status, condition.reason) == ("False", "IdenticalCards")
        assert "options vfio-pci ids=10de:2bb5" in condition.next_step


async def test_B9_ids_are_nobodys_business_where_all_cards_go_to_vfio(tmp_path: Path) -> None:
    scenario = 'set: {moduleOptions: ["options vfio-pci ids=10de:2bb5"]}'
    async with rig(tmp_path, spec=NOTHING_FOR_NVIDIA, scenario=scenario) as agent:
        await agent.one_pass()
        assert agent.condition("PlatformReady").reason != "IdenticalCards"


async def test_B10_a_card_on_the_wrong_driver_after_a_boot_is_fixed_and_the_next_boot_is_right(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=at_any_speed(), scenario=SCENARIOS / "B10.yaml") as agent:
        async with asyncio.timeout(10.0):
            while not agent.world.state.events_done:
                await asyncio.sleep(0.02)
                agent.world.tick()
        assert driver(agent, GPU) == "nvidia"
        assert driver(agent, "0000:91:00.0") == "vfio-pci"  # a rule of somebody else named it
        await agent.converge()
        assert {driver(agent, a) for a in CONFIDENTIAL} == {"vfio-pci"}
        before = len(agent.world.writes)
        await boots(agent)
        wanted = {a: "vfio-pci" for slot in CONFIDENTIAL for a in card(agent, slot)}
        assert {a: driver(agent, a) for a in wanted} == wanted  # before the agent has done anything
        assert {driver(agent, a) for a in INFERENCE} == {"nvidia"}
        await agent.converge()
        assert not [
            w for w in agent.world.writes[before:] if w.startswith(("pci.", "target.write_file host"))
        ]


async def test_B10_the_rules_name_every_function_of_the_declared_cards_and_no_other(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        lines = [line for line in rules(agent).splitlines() if not line.startswith("#")]
        named = [a for slot in CONFIDENTIAL for a in (slot, slot.replace(".0", ".1"))]
        overrides = [line for line in lines if "driver_override" in line]
        # Of a function whose unbind hangs, the kernel may block whoever touches the override.
        assert overrides == [
            f'TEST!="/sys/fs/cgroup/gpu.slice/gpu-host.slice/gpu-host-agent.slice/gpu-host-agent-unbind.slice'
            f'/gpu-host-agent-unbind-{a}.service", TEST=="[pci/{a}]driver_override",'
            f' ATTR{{[pci/{a}]driver_override}}="vfio-pci"'
            for a in named
        ]
        probed = [line.split('"')[1] for line in lines if line.startswith("KERNEL==")]
        assert probed == named
        # The first event may load the host's driver: every override comes before any event's own lines.
        first = next(n for n, line in enumerate(lines) if line.startswith("KERNEL=="))
        assert all(lines.index(line) < first for line in overrides)


async def test_B10_rules_that_somebody_edits_are_written_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        good = rules(agent)
        path = "/etc/udev/rules.d/50-gpu-host-agent.rules"
        happens(agent, set={"targets": {"host": {"files": {path: "# mine now\n"}}}})
        await agent.converge()
        assert rules(agent) == good

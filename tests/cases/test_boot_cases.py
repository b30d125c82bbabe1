"""Kernel arguments, boot files, group types and the initramfs on a simulated host, through reboots."""

from pathlib import Path

import pytest

from agent.core.boot import GRUB_DROP_IN
from tests.cases.hardware import CONFIDENTIAL, boots, driver, happens, writes_about
from tests.rig import Rig, recipe, rig

ARGS = {"require": ["pcie_aspm=off"], "forbid": ["amd_iommu=on"]}
GPU = CONFIDENTIAL[0]
IDLE = '"lxc:129": {units: {sglang-qwen.service: {activeState: inactive}}}'  # nothing holds a card


def asks(boot_files: str, **platform: object) -> str:
    return recipe(
        services=None,
        policy={"bootFiles": boot_files},
        platform={"iommu": "any", "sevSnp": "any", "modules": None, **platform},
    )


def drop_in(agent: Rig) -> bool:
    return GRUB_DROP_IN in agent.world.state.targets["host"].files


def group(agent: Rig, address: str) -> int:
    number = agent.world.state.functions[address].group
    assert number is not None
    return number


async def test_arguments_are_told_and_no_boot_file_is_touched_unless_the_policy_says_edit(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=asks("ask", kernelArgs=ARGS)) as agent:
        await agent.converge()
        ready = agent.condition("PlatformReady")
        assert (ready.status, ready.reason) == ("False", "KernelArgs")
        assert (
            "add pcie_aspm=off to GRUB_CMDLINE_LINUX in /etc/default/grub, run update-grub" in ready.next_step
        )
        assert not drop_in(agent)
        assert not writes_about(agent, "platform.refresh_boot_loader")


async def test_edited_boot_files_wait_for_a_reboot_that_the_agent_never_makes(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=asks("edit", kernelArgs=ARGS)) as agent:
        await agent.converge()
        await agent.one_pass()
        ready = agent.condition("PlatformReady")
        assert (ready.status, ready.reason) == ("False", "RebootPending")
        assert ready.next_step.startswith("reboot when it suits you")
        assert len(writes_about(agent, "platform.refresh_boot_loader")) == 1
        assert agent.world.state.boots == 1
        before = len(agent.world.writes)
        await boots(agent)
        await agent.converge()
        assert agent.condition("PlatformReady").status == "True"
        assert {"pcie_aspm=off"} <= set(agent.world.state.cmdline)
        assert "amd_iommu=on" not in agent.world.state.cmdline
        assert not [w for w in agent.world.writes[before:] if "refresh_boot_loader" in w or GRUB_DROP_IN in w]


async def test_an_edit_is_taken_back_when_the_spec_asks_for_nothing_any_more(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=asks("edit", kernelArgs=ARGS)) as agent:
        await agent.converge()
        assert drop_in(agent)
        agent.write_spec(asks("edit", kernelArgs=None))
        await agent.converge()
        assert not drop_in(agent)
        await boots(agent)
        assert "amd_iommu=on" in agent.world.state.cmdline
        assert "pcie_aspm=off" not in agent.world.state.cmdline


async def test_a_refresh_without_effect_is_not_taken_for_success(tmp_path: Path) -> None:
    broken = "faults: [{on: platform.refresh_boot_loader, succeedWithoutEffect: true, times: 1}]"
    async with rig(tmp_path, spec=asks("edit", kernelArgs=ARGS), scenario=broken) as agent:
        await agent.one_pass()
        failed = agent.memory.errors["platform/edit-boot-files/host"]
        assert "still has" in failed
        assert agent.condition("PlatformReady").reason == "KernelArgs"


HIDDEN = "{on: platform.read, value: {nextCmdline: {unknown: ESPs are not mounted, code: NotMounted}}}"
EDIT = "platform/edit-boot-files/host"


async def test_a_refresh_that_failed_is_run_again_where_the_next_boot_cannot_be_read(tmp_path: Path) -> None:
    broken = f"faults: [{HIDDEN}, {{on: platform.refresh_boot_loader, errno: EIO, times: 1}}]"
    async with rig(tmp_path, spec=asks("edit", kernelArgs=ARGS), scenario=broken) as agent:
        await agent.one_pass()
        assert EDIT in agent.memory.errors
        assert drop_in(agent)
        assert agent.memory.unrefreshed == GRUB_DROP_IN
        assert agent.condition("PlatformReady").next_step.startswith("the agent runs update-grub")
        await agent.restart()
        agent.agent.store.update(retry_after={})
        await agent.converge()
        assert agent.world.state.next_cmdline is not None
        assert "pcie_aspm=off" in agent.world.state.next_cmdline
        assert agent.memory.unrefreshed == ""
        assert agent.condition("PlatformReady").next_step.startswith("reboot: ")
        before = len(agent.world.writes)
        await agent.converge()
        assert not [w for w in agent.world.writes[before:] if "refresh_boot_loader" in w]


async def test_law_8_an_agent_that_died_between_the_edit_and_the_refresh_makes_up_for_it(
    tmp_path: Path,
) -> None:
    broken = f"faults: [{HIDDEN}, {{on: platform.refresh_boot_loader, raise: RuntimeError, times: 1}}]"
    async with rig(tmp_path, spec=asks("edit", kernelArgs=ARGS), scenario=broken) as agent:
        with pytest.raises(RuntimeError):
            await agent.one_pass()
        assert drop_in(agent)
        await agent.restart()
        await agent.converge()
        assert agent.world.state.next_cmdline is not None
        assert "pcie_aspm=off" in agent.world.state.next_cmdline


async def test_a_next_boot_that_would_undo_an_argument_is_found_while_this_one_is_right(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=asks("ask", kernelArgs={"require": ["amd_iommu=on"]})) as agent:
        await agent.converge()
        assert agent.condition("PlatformReady").status == "True"
        happens(agent, set={"nextCmdline": ["ro", "quiet"], "bootWords": ["ro", "quiet"]})
        await agent.converge()
        ready = agent.condition("PlatformReady")
        assert (ready.status, ready.reason) == ("False", "NotKept")
        assert "reboot" not in ready.next_step


async def test_D1_a_boot_loader_that_would_lose_snp_at_the_next_boot_is_named(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=recipe(services=None)) as agent:
        words = [*agent.world.state.cmdline, "iommu=pt"]
        happens(agent, set={"nextCmdline": words, "bootWords": words})
        await agent.converge()
        ready = agent.condition("PlatformReady")
        assert (ready.status, ready.reason) == ("False", "NotKept")
        assert ready.next_step == "remove iommu=pt from /etc/default/grub, run update-grub"


async def test_a_group_type_lost_by_remove_and_rescan_is_noticed_and_mended(tmp_path: Path) -> None:
    scenario = f"set: {{cmdline: [ro, iommu=pt], sevSnp: null, targets: {{{IDLE}}}}}"
    async with rig(tmp_path, spec=asks("ask", iommu="translated"), scenario=scenario) as agent:
        for number in agent.world.state.groups:
            happens(agent, set={"groups": {str(number): {"type": "DMA"}}})
        await agent.converge()
        happens(agent, rescan=[GPU])
        assert agent.world.state.groups[group(agent, GPU)].type == "identity"
        await agent.converge()
        await agent.one_pass()
        assert driver(agent, GPU) == "vfio-pci"
        assert agent.world.state.groups[group(agent, GPU)].type == "DMA"
        assert len(writes_about(agent, "pci.set_group_type")) == 1


async def test_a_group_type_under_a_running_machine_waits_for_its_end(tmp_path: Path) -> None:
    scenario = f"set: {{sevSnp: null, targets: {{{IDLE}}}}}"
    async with rig(tmp_path, spec=asks("ask", iommu="translated"), scenario=scenario) as agent:
        await agent.converge()
        name = next(iter(agent.world.state.vms), None)
        if name is None:
            happens(agent, set={"vms": {"101": {"functions": [GPU]}}})
            name = "101"
        number = group(agent, agent.world.state.vms[name].functions[0])
        happens(agent, set={"groups": {str(number): {"type": "identity"}}})
        happens(agent, vmStart=name)
        await agent.converge()
        assert not writes_about(agent, "pci.set_group_type")
        assert f"group {number}: " in agent.condition("PlatformReady").next_step
        happens(agent, vmStop=name)
        await agent.converge()
        assert agent.world.state.groups[number].type in ("DMA", "DMA-FQ")


async def test_B10_an_initramfs_that_takes_the_cards_first_is_said_before_the_boot_proves_it(
    tmp_path: Path,
) -> None:
    scenario = f"set: {{initramfsModules: [nvidia], targets: {{{IDLE}}}}}"
    async with rig(tmp_path, spec=recipe(services=None), scenario=scenario) as agent:
        await agent.converge()
        said = agent.condition("BindingsHoldAtBoot")
        assert (said.status, said.reason) == ("False", "InitramfsTakesGpus")
        assert "update-initramfs -u" in said.next_step
        await boots(agent)
        assert driver(agent, GPU) == "nvidia"  # as it was said
        happens(agent, set={"initramfsModules": []})
        await agent.converge()
        assert "BindingsHoldAtBoot" not in {c.type for c in agent.status().conditions}


async def test_B10_a_driver_named_in_modules_load_d_is_said_to_come_before_the_rules(tmp_path: Path) -> None:
    scenario = f"set: {{modulesLoad: [nvidia-drm, nvidia], targets: {{{IDLE}}}}}"
    async with rig(tmp_path, spec=recipe(services=None), scenario=scenario) as agent:
        await agent.converge()
        said = agent.condition("BindingsHoldAtBoot")
        assert (said.status, said.reason) == ("False", "ModulesLoadTakesGpus")
        assert said.next_step.startswith("remove nvidia-drm and nvidia from /etc/modules-load.d/local.conf")
        await boots(agent)
        assert driver(agent, GPU) == "nvidia"  # here it does come first
        happens(agent, set={"modulesLoad": ["msr", "vfio-pci", "nvidia_wmi_ec_backlight"]})
        await agent.converge()
        assert "BindingsHoldAtBoot" not in {c.type for c in agent.status().conditions}


async def test_nodes_that_no_udev_rule_makes_are_made_after_a_boot_and_after_a_move(tmp_path: Path) -> None:
    scenario = f"set: {{madeNodes: [], sevSnp: null, targets: {{{IDLE}}}}}"
    async with rig(tmp_path, spec=recipe(services=None), scenario=scenario) as agent:
        await agent.converge()
        nodes = agent.world.state.made_nodes
        assert nodes is not None
        assert "/dev/nvidiactl" in nodes
        assert agent.condition("DriversBound").status == "True"
        assert "ModulesLoaded" not in {c.type for c in agent.status().conditions}
        before = len(agent.world.writes)
        await agent.converge()
        assert not [w for w in agent.world.writes[before:] if "make_device_nodes" in w]
        await boots(agent)
        assert agent.world.state.made_nodes == []
        await agent.converge()
        assert "/dev/nvidiactl" in agent.world.state.made_nodes


async def test_the_node_of_a_card_that_comes_to_nvidia_is_there_before_its_services_start(
    tmp_path: Path,
) -> None:
    scenario = f"set: {{madeNodes: [], sevSnp: null, targets: {{{IDLE}}}}}"
    async with rig(tmp_path, spec=recipe(services=None), scenario=scenario) as agent:
        await agent.converge()
        node = f"/dev/nvidia{agent.world.state.gpus[GPU].minor}"
        with (
            agent.world.change() as state
        ):  # it was on nvidia in the first pass, and a node outlives its card
            assert state.made_nodes is not None
            state.made_nodes.remove(node)
        agent.write_spec(recipe(services=None, gpus={"confidential": {"driver": "nvidia"}}))
        await agent.one_pass()
        assert driver(agent, GPU) == "nvidia"
        assert node in (agent.world.state.made_nodes or ())


async def test_nodes_that_cannot_be_made_are_named_with_the_command(tmp_path: Path) -> None:
    scenario = (
        f"{{set: {{madeNodes: [], sevSnp: null, targets: {{{IDLE}}}}},"
        " faults: [{on: platform.make_device_nodes, succeedWithoutEffect: true}]}"
    )
    async with rig(tmp_path, spec=recipe(), scenario=scenario) as agent:
        await agent.one_pass()
        said = agent.condition("ModulesLoaded")
        assert (said.status, said.reason) == ("False", "NodesMissing")
        assert "/dev/nvidiactl" in said.message
        assert "nvidia-modprobe -c 255 -c 0" in agent.condition("DriverVersionsAgree").next_step

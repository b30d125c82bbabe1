"""Kernel arguments, boot files, group types and the initramfs on a simulated host, through reboots."""

from pathlib import Path

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

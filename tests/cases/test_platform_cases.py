"""Platform and driver cases D1 to D8, and the door to real hosts, as an operator meets them."""

import re
from pathlib import Path
from typing import Any

import pytest

from agent.app.main import main
from agent.app.paths import Paths
from agent.app.wiring import Choice, assemble
from tests.cases.hardware import (
    CONFIDENTIAL,
    at_any_speed,
    boots,
    driver,
    everything_said,
    happens,
    is_ready,
    serves,
    shown,
    writes_about,
)
from tests.cases.operating import (
    INFERENCE,
    TARGET,
    asks,
    kernel_says,
    service_dies,
    starts,
    stops,
    unit,
)
from tests.rig import SCENARIOS, Rig, recipe, rig

GPU = "0000:11:00.0"
XID_79 = "NVRM: Xid (PCI:0000:11:00): 79, pid=40002, name=python3, GPU has fallen off the bus."
EDITED = {"services": {"qwen": {"args": {"chunked-prefill-size": 4096}}}}
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
        agent.write_spec(recipe(**EDITED))
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
        agent.write_spec(recipe(**EDITED))
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


async def test_D4_a_gpu_off_the_bus_is_terminal_for_it_alone(tmp_path: Path) -> None:
    scenario = f"""
set: {{gpus: {{"{GPU}": {{nvmlCode: 15}}}}, targets: {{"lxc:129": {{units: {{sglang-qwen.service: {{activeState: inactive, mainPid: 0}}}}}}}}}}
events: [{{at: 0s, do: {{log: "{XID_79}"}}}}]
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        for _ in range(5):
            await agent.one_pass()
        assert starts(agent) == 0
        assert not writes_about(agent, GPU)
        assert {driver(agent, a) for a in CONFIDENTIAL} == {"vfio-pci"}
        health, serving = agent.condition("GpusHealthy"), agent.condition("ServiceReady/qwen")
        assert health.status == "False"
        assert "fallen off the bus" in health.message
        assert "power-cycle" in health.next_step
        assert (serving.status, serving.reason) == ("False", "GpuLost")
        assert GPU in serving.message
        assert "GpuLost" in shown(agent, GPU).note


@pytest.mark.parametrize("seen", ["in the kernel log", "by NVML"])
async def test_D4_a_service_whose_gpu_is_lost_is_not_restarted_for_ever(tmp_path: Path, seen: str) -> None:
    async with rig(tmp_path, spec=at_any_speed()) as agent:
        await agent.converge()
        assert starts(agent) == 1
        if seen == "by NVML":
            happens(agent, set={"gpus": {GPU: {"nvmlCode": 15}}})
        else:
            kernel_says(agent, XID_79)
        service_dies(agent, "CUDA error: unspecified launch failure")
        await agent.converge()
        for _ in range(4):
            await agent.one_pass()
        await agent.restart()
        await agent.converge()
        assert starts(agent) == 1
        condition = agent.condition("ServiceReady/qwen")
        assert (condition.status, condition.reason) == ("False", "GpuLost")
        assert agent.status().ready == "False"
        await boots(agent)
        await agent.converge()
        await serves(agent)


async def test_D4_cards_held_by_a_service_that_cannot_be_restarted_wait_and_say_for_whom(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        kernel_says(agent, XID_79)
        await agent.converge()
        assert stops(agent) == 0
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "HeldByService")
        assert "service qwen" in condition.message
        assert "ServiceReady/qwen" in condition.next_step


@pytest.mark.parametrize("action", ["drain", "reset", "reboot"])
async def test_D5_a_pending_recovery_action_is_not_ready(tmp_path: Path, action: str) -> None:
    scenario = (SCENARIOS / "D5.yaml").read_text().replace("drain", action)
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("GpusHealthy")
        assert condition.status == "False"
        assert f"{GPU}: recovery action pending: {action}" in condition.message
        assert action in condition.next_step
        assert agent.status().ready == "False"
        await serves(agent)


async def test_D5_a_recovery_action_that_cannot_be_read_is_not_none(tmp_path: Path) -> None:
    fault = f'faults: [{{on: nvml.read, target: "{GPU}", value: {{recoveryAction: {{unknown: timed out, code: NvmlTimeout}}}}}}]'
    async with rig(tmp_path, scenario=fault) as agent:
        await agent.converge()
        assert agent.condition("GpusHealthy").status == "Unknown"
        assert agent.status().ready != "True"


async def test_D5_a_known_fault_is_not_hidden_by_an_unreadable_kernel_log(tmp_path: Path) -> None:
    scenario = (SCENARIOS / "D5.yaml").read_text() + "faults: [{on: kernel_log.read, errno: EPERM}]"
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert agent.condition("GpusHealthy").status == "False"


async def test_D6_cards_are_told_apart_by_uuid_and_never_by_node_number(tmp_path: Path) -> None:
    """/dev/nvidia3 is the eighth GPU by address: its holder stands in that card's way and in no other's."""
    holder = {"address": "0000:f1:00.0", "what": "/dev/nvidia3", "pid": 4242, "command": "python3"}
    async with rig(tmp_path, scenario=SCENARIOS / "D6.yaml") as agent:
        happens(agent, set={"holders": [holder]})
        await agent.converge()
        uuids = [agent.world.state.gpus[a].uuid for a in INFERENCE]
        assert unit(agent).env["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)
        assert [shown(agent, a).uuid for a in INFERENCE] == uuids
        message = agent.condition("DriversBound").message
        assert message == "0000:f1:00.0: pid 4242 (python3) holds /dev/nvidia3"
        assert {driver(agent, a) for a in CONFIDENTIAL[:3]} == {"vfio-pci"}


async def test_D7_a_link_at_gen_1_while_idle_is_no_fault(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "D7.yaml") as agent:
        await agent.converge()
        await is_ready(agent)
        assert "2.5 GT/s" not in everything_said(agent)


async def test_D8_a_link_that_went_down_by_surprise_names_its_cure(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "D8.yaml") as agent:
        await agent.converge()
        condition = agent.condition("GpusHealthy")
        assert condition.status == "False"
        assert f"{GPU}: PCIe link went down by surprise" in condition.message
        assert "pcie_aspm=off pcie_port_pm=off" in condition.next_step
        assert agent.status().ready == "False"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("pcieport 0000:10:01.1: AER: aer_uncor_status: 0x00000020, aer_uncor_mask: 0x00400000", "False"),
        ("i40e 0000:41:00.0: AER: aer_uncor_status: 0x00000020, aer_uncor_mask: 0x00400000", "True"),
        (
            "NVRM: Xid (PCI:0000:11:00): 119, pid=1234, name=python3, Timeout after 6s of waiting for RPC response",
            "False",
        ),
        ("NVRM: Xid (PCI:0000:11:00): 31, pid=1234, name=python3, Ch 00000008, MMU Fault", "True"),
    ],
)
async def test_D8_what_the_kernel_says_counts_for_the_cards_it_concerns(
    tmp_path: Path, line: str, status: str
) -> None:
    """A bridge above a card counts, another device's error does not, nor does an Xid that a program has caused."""
    async with rig(tmp_path) as agent:
        kernel_says(agent, line)
        await agent.one_pass()
        assert agent.condition("GpusHealthy").status == status


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


async def test_a_real_host_is_never_acted_on(tmp_path: Path) -> None:
    assembly = assemble(Choice("real"), Paths(tmp_path, tmp_path / "spec.yaml"))
    try:
        assert "not offered" in assembly.reconciler.acting
        assert assembly.ports.simulated == ""
        port: Any = assembly.ports
        for write in (
            port.pci.set_override("0000:00:00.0", "vfio-pci"),
            port.pci.start_unbind("0000:00:00.0", "nvidia"),
            port.pci.probe("0000:00:00.0"),
            port.nvml.set_persistence_mode("0000:00:00.0", on=False),
            port.platform.load_module("vfio-pci"),
            port.targets("host").stop_unit("example.service"),
            port.targets("lxc:129").start_unit("example.service"),
        ):
            with pytest.raises(Exception, match="not offered by this version"):
                await write
    finally:
        await assembly.close()


def test_apply_refuses_a_real_host_and_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(recipe())
    root = tmp_path / "root"
    assert main(["apply", "--host", "real", "--root", str(root), "--spec", str(spec)]) == 1
    assert "not offered by this version" in capsys.readouterr().err
    assert not root.exists()

"""Cases D4 to D8, as an operator meets them: GPUs that are lost, at fault, or only look so."""

from pathlib import Path

import pytest

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
from tests.cases.operating import INFERENCE, kernel_says, service_dies, starts, stops, unit
from tests.rig import SCENARIOS, rig

GPU = "0000:11:00.0"
XID_79 = "NVRM: Xid (PCI:0000:11:00): 79, pid=40002, name=python3, GPU has fallen off the bus."


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

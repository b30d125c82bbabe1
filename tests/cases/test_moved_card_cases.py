"""Binding cases B11 to B15: cards that move or die, hosts without nvidia, addresses as they are written."""

from pathlib import Path
from typing import Any

import pytest

from agent.app.main import main
from agent.app.readonly import observe_only, plan_only
from agent.app.wiring import Choice
from agent.sim.scenario import load_scenario
from tests.cases.hardware import (
    CONFIDENTIAL,
    NOTHING_FOR_NVIDIA,
    SHIFT,
    at_any_speed,
    boots,
    driver,
    is_ready,
    killed_at,
    override,
    rules,
    serves,
    shown,
    writes_about,
)
from tests.cases.operating import INFERENCE, starts, stops, unit
from tests.rig import SCENARIOS, Rig, recipe, rig

GPU = "0000:81:00.0"
OTHERS = CONFIDENTIAL[1:]
PROFILE_CARDS = {
    "0000:01:00.0": ("GPU-3f97d640-ac7b-5f74-81ec-93ebd6876b3b", "48b02d00000000a1", "1"),
    "0000:11:00.0": ("GPU-0fb8bbbf-ba68-587a-9f0f-ca996a7b975a", "48b02d00000000a2", "2"),
    "0000:61:00.0": ("GPU-50fee813-6a0d-57ac-83f1-fa7bbfc3bc11", "48b02d00000000a3", "3"),
    "0000:71:00.0": ("GPU-03cd89d6-7c63-5ba6-bdf6-13821cba640e", "48b02d00000000a4", "4"),
    "0000:81:00.0": ("GPU-b159304f-7947-522c-9845-faaf3e961a78", "48b02d00000000a5", "5"),
    "0000:91:00.0": ("GPU-4ef3c80f-31c5-59df-a26a-64e1451eb42b", "48b02d00000000a6", "6"),
    "0000:e1:00.0": ("GPU-e938e67a-501f-5253-b3f7-2709c46027c7", "48b02d00000000a7", "7"),
    "0000:f1:00.0": ("GPU-c46c289d-4246-5eb4-bef7-4c5d958c74e7", "48b02d00000000a8", "8"),
}


def selected_by(key: str) -> dict[str, Any]:
    """Both groups of the recipe, their cards named by ``uuid``, ``serial`` or ``slot``."""
    which = ("uuid", "serial", "slot").index(key)
    return {
        name: {"select": [{key: PROFILE_CARDS[a][which]} for a in members]}
        for name, members in (("inference", INFERENCE), ("confidential", CONFIDENTIAL))
    }


def uuids_on(agent: Rig, name: str) -> set[str]:
    """The UUIDs of the cards that the kernel has on a driver."""
    return {g.uuid for a, g in agent.world.state.gpus.items() if driver(agent, a) == name}


def uuids_of(addresses: tuple[str, ...]) -> set[str]:
    return {PROFILE_CARDS[a][0] for a in addresses}


async def test_B11_addresses_that_now_mean_other_cards_bind_and_stop_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=at_any_speed()) as agent:
        await agent.converge()
        before = len(agent.world.writes)
        await boots(agent, renumber=SHIFT)
        await agent.converge()
        await agent.one_pass()
        later = agent.world.writes[before:]
        assert not [w for w in later if w.startswith("pci.") or "stop_unit" in w or "start_unit" in w]
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "CardMoved")
        assert "now at" in condition.message
        assert "uuid, serial or slot" in condition.next_step
        assert agent.condition("ServiceReady/qwen").status == "False"
        assert agent.status().ready == "False"
        assert "vfio-pci" not in rules(agent)  # the next boot must not take the wrong cards either


async def test_B11_a_boot_that_moves_some_cards_moves_no_wrong_card_to_the_vm(tmp_path: Path) -> None:
    """Scenario B11: 0000:81 is the inference group's fourth card now, and 0000:71 is empty."""
    moved = load_scenario(SCENARIOS / "B11.yaml").renumber
    async with rig(tmp_path, spec=at_any_speed()) as agent:
        await agent.converge()
        before = len(agent.world.writes)
        await boots(agent, renumber=moved)
        await agent.converge()
        later = agent.world.writes[before:]
        assert not [w for w in later if w.startswith("pci.") or "_unit" in w]
        condition = agent.condition("DriversBound")
        assert condition.reason == "CardMoved"
        assert (
            "0000:71:00.0 was not found on this host; the card seen there before is now at 0000:81:00.0"
            in condition.message
        )
        assert {shown(agent, a).driver for a in ("0000:e1:00.0", "0000:f1:00.0")} == {"vfio-pci"}
        assert f'KERNEL=="{GPU}"' not in rules(agent)
        assert 'KERNEL=="0000:e1:00.0"' in rules(agent)


@pytest.mark.parametrize("key", ["uuid", "serial", "slot"])
async def test_B11_cards_named_by_what_they_are_keep_their_group_wherever_they_turn_up(
    tmp_path: Path, key: str
) -> None:
    async with rig(tmp_path, spec=at_any_speed(gpus=selected_by(key))) as agent:
        await agent.converge()
        assert uuids_on(agent, "vfio-pci") == uuids_of(CONFIDENTIAL)
        await boots(agent, renumber=SHIFT)
        await agent.converge()
        assert uuids_on(agent, "vfio-pci") == uuids_of(CONFIDENTIAL)
        assert uuids_on(agent, "nvidia") == uuids_of(INFERENCE)
        assert set(unit(agent).env["CUDA_VISIBLE_DEVICES"].split(",")) == uuids_of(INFERENCE)
        await is_ready(agent)
        await boots(agent)
        assert uuids_on(agent, "vfio-pci") == uuids_of(CONFIDENTIAL)  # the rules have followed


@pytest.mark.parametrize("key", ["uuid", "serial", "slot"])
async def test_B11_naming_the_cards_by_what_they_are_instead_of_where_changes_nothing(
    tmp_path: Path, key: str
) -> None:
    """Also for cards on vfio-pci, whose UUID only the memory knows."""
    async with rig(tmp_path, spec=at_any_speed()) as agent:
        await agent.converge()
        before = list(agent.world.writes)
        agent.write_spec(at_any_speed(gpus=selected_by(key)))
        await agent.converge()
        assert agent.world.writes == before
        await is_ready(agent)


async def test_B12_a_card_that_does_not_wake_is_quarantined_and_the_others_kept(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B12.yaml") as agent:
        await agent.converge()
        before = list(agent.world.writes)
        await agent.one_pass()
        await agent.restart()
        await agent.converge()
        assert agent.world.writes == before
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "GpuLost")
        assert "D3cold" in condition.message
        assert "power-cycle" in condition.next_step
        assert override(agent, GPU) == ""
        assert {driver(agent, a) for a in OTHERS} == {"vfio-pci"}
        await serves(agent)


async def test_B13_a_card_that_does_not_come_back_from_its_reset_is_never_touched(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B13.yaml") as agent:
        await agent.converge()
        assert not writes_about(agent, "0000:91:00")
        health = agent.condition("GpusHealthy")
        assert health.status == "False"
        assert "not ready 65535ms after FLR" in health.message
        assert "power-cycle" in health.next_step
        assert "GpuLost" in shown(agent, "0000:91:00.0").note
        assert {driver(agent, a) for a in CONFIDENTIAL if a != "0000:91:00.0"} == {"vfio-pci"}
        await serves(agent)


async def test_B13_a_lost_network_card_is_not_a_gpus_fault(tmp_path: Path) -> None:
    scenario = 'events: [{at: 0s, do: {log: "i40e 0000:41:00.0: not ready 65535ms after FLR; giving up"}}]'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        await is_ready(agent)


async def test_B14_on_a_host_without_nvidia_nvml_is_never_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rig(tmp_path, spec=NOTHING_FOR_NVIDIA, scenario=SCENARIOS / "B14.yaml") as agent:
        await agent.converge()
        for _ in range(3):
            await agent.one_pass()
        await agent.restart()
        await agent.one_pass()
        main(["status", "--host", "sim", "--root", str(tmp_path)])
        assert "driver none" in capsys.readouterr().out
        await plan_only(Choice("sim", "esc8000a"), agent.agent.paths)
        await observe_only(Choice("sim", "esc8000a"), agent.agent.paths)
        agent.world.tick()
        assert agent.world.reads["nvml"] == 0
        assert "nvidia" not in agent.world.state.modules
        assert not [w for w in agent.world.writes if w.startswith("platform.load_module")]


async def test_B14_nvml_is_not_opened_to_stop_a_service_before_its_cards_come_to_nvidia(
    tmp_path: Path,
) -> None:
    """The unit is up and useless: no card is on nvidia yet, and asking NVML would load the module first."""
    scenario = (
        (SCENARIOS / "B14.yaml")
        .read_text()
        .replace("activeState: inactive, enabled: false", "activeState: active")
    )
    async with rig(tmp_path, scenario=scenario) as agent:
        await killed_at(agent, "platform.load_module nvidia")
        assert agent.world.reads["nvml"] == 0
        await agent.converge()
        await serves(agent)


async def test_B15_an_address_without_quotes_is_an_address(tmp_path: Path) -> None:
    scenario = SCENARIOS / "B15.yaml"
    async with rig(tmp_path, spec=load_scenario(scenario).spec_text, scenario=scenario) as agent:
        await agent.converge()
        assert agent.condition("SpecAccepted").status == "True"
        assert [g.address for g in agent.status().gpus if g.group == "inference"] == [
            "0000:01:00.0",
            "0000:11:00.0",
        ]


async def test_B15_an_address_that_other_readers_take_for_a_number_is_named_as_it_is_written(
    tmp_path: Path,
) -> None:
    spec = recipe().replace('"0000:81:00.0"', "0000:41:00.0")
    async with rig(tmp_path, spec=spec) as agent:
        await agent.converge()
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "DeviceMissing")
        assert "0000:41:00.0 is not an NVIDIA GPU" in condition.message
        assert not writes_about(agent, "0000:41:00.0")
        assert not writes_about(agent, "0000:81:00")
        assert starts(agent) == stops(agent) == 1

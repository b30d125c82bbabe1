"""Binding cases B3 to B6, as an operator meets them: holders, whole cards and groups, binds that bind nothing."""

from pathlib import Path

from tests.cases.hardware import (
    CONFIDENTIAL,
    card,
    driver,
    host_unit,
    is_ready,
    killed_at,
    override,
    rules,
    serves,
    shown,
    unbinds,
    writes_about,
)
from tests.cases.operating import asks, journal
from tests.rig import SCENARIOS, recipe, rig

GPU, AUDIO = "0000:81:00.0", "0000:81:00.1"
OTHERS = CONFIDENTIAL[1:]
PERSISTENCED, EXPORTER = "nvidia-persistenced.service", "dcgm-exporter.service"
MONITORED = recipe(policy={"quiesce": [PERSISTENCED, EXPORTER]})


async def test_B3_declared_daemons_are_stopped_and_exactly_those_started_again(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=MONITORED, scenario=SCENARIOS / "B3.yaml") as agent:
        await agent.converge()
        assert {driver(agent, a) for a in CONFIDENTIAL} == {"vfio-pci"}
        stops = [w for w in agent.world.writes if w.startswith("target.stop_unit host")]
        again = [w for w in agent.world.writes if w.startswith("target.start_unit host")]
        assert [w.split()[2] for w in stops] == [w.split()[2] for w in again] == [EXPORTER, PERSISTENCED]
        assert host_unit(agent, EXPORTER) == host_unit(agent, PERSISTENCED) == "active"
        await is_ready(agent)


async def test_B3_a_declared_daemon_that_did_not_run_is_not_started(tmp_path: Path) -> None:
    scenario = (
        (SCENARIOS / "B3.yaml")
        .read_text()
        .replace(f"{PERSISTENCED}: {{activeState: active}}", f"{PERSISTENCED}: {{}}")
    )
    async with rig(tmp_path, spec=MONITORED, scenario=scenario) as agent:
        await agent.converge()
        assert host_unit(agent, EXPORTER) == "active"
        assert host_unit(agent, PERSISTENCED) == "inactive"
        assert not writes_about(agent, PERSISTENCED)


async def test_B3_daemons_come_back_when_the_agent_is_killed_in_between(tmp_path: Path) -> None:
    async with rig(tmp_path, spec=MONITORED, scenario=SCENARIOS / "B3.yaml") as agent:
        await killed_at(agent, f"pci.unbind {GPU}")
        assert host_unit(agent, EXPORTER) == "inactive"
        await agent.converge()
        assert host_unit(agent, EXPORTER) == host_unit(agent, PERSISTENCED) == "active"
        assert {driver(agent, a) for a in CONFIDENTIAL} == {"vfio-pci"}
        await is_ready(agent)


async def test_B3_daemons_come_back_when_the_binds_fail_and_are_not_stopped_for_nothing(
    tmp_path: Path,
) -> None:
    scenario = (
        SCENARIOS / "B3.yaml"
    ).read_text() + 'faults: [{on: pci.unbind, target: "0000:?1:00.0", errno: EBUSY}]'
    async with rig(tmp_path, spec=MONITORED, scenario=scenario) as agent:
        await agent.converge()
        before = list(agent.world.writes)
        for _ in range(3):
            await agent.one_pass()  # every card waits for its next try
        assert agent.world.writes == before
        assert host_unit(agent, EXPORTER) == host_unit(agent, PERSISTENCED) == "active"
        assert {driver(agent, a) for a in CONFIDENTIAL} == {"nvidia"}
        assert {override(agent, a) for a in CONFIDENTIAL} == {""}
        await serves(agent)


async def test_B3_an_undeclared_holder_is_named_with_pid_and_unit_and_nothing_of_it_is_touched(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B3.yaml") as agent:
        await agent.converge()
        condition = agent.condition("DriversBound")
        pid = agent.world.state.targets["host"].units[EXPORTER].main_pid
        assert (condition.status, condition.reason) == ("False", "Held")
        assert f"pid {pid} (dcgm-exporter), unit {EXPORTER} holds /dev/nvidia7" in condition.message
        assert "policy.quiesce" in condition.next_step
        assert not writes_about(agent, EXPORTER) + writes_about(agent, PERSISTENCED)
        assert not [w for w in agent.world.writes if w.startswith("pci.")]


async def test_B3_a_holder_in_a_container_is_named_with_it_and_not_taken_for_the_hosts_unit(
    tmp_path: Path,
) -> None:
    scenario = f"""
set:
  holders:
    - {{address: "{GPU}", what: /dev/nvidia7, pid: 4242, command: dcgm-exporter, unit: {EXPORTER}, container: "130"}}
"""
    async with rig(tmp_path, spec=MONITORED, scenario=scenario) as agent:
        await agent.converge()
        message = agent.condition("DriversBound").message
        assert f"pid 4242 (dcgm-exporter), unit {EXPORTER}, container 130 holds /dev/nvidia7" in message
        assert not writes_about(agent, "0000:81:00")
        assert not writes_about(agent, EXPORTER)
        assert {driver(agent, a) for a in OTHERS} == {"vfio-pci"}


async def test_a_card_with_virtual_functions_stays_until_they_are_gone(tmp_path: Path) -> None:
    scenario = f'set: {{functions: {{"{GPU}": {{virtualFunctions: 4}}}}}}'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "VirtualFunctions")
        assert f"{GPU} has 4 virtual functions" in condition.message
        assert "sriov_numvfs" in condition.next_step
        assert not writes_about(agent, "0000:81:00")
        assert {driver(agent, a) for a in OTHERS} == {"vfio-pci"}
        with agent.world.change() as state:
            state.functions[GPU].virtual_functions = 0
        await agent.converge()
        assert card(agent, GPU) == {GPU: "vfio-pci", AUDIO: "vfio-pci"}


async def test_B4_the_audio_function_goes_with_its_gpu_and_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        assert card(agent, GPU) == {GPU: "vfio-pci", AUDIO: "vfio-pci"}
        assert f'KERNEL=="{AUDIO}"' in rules(agent)
        agent.write_spec(recipe(gpus={"confidential": {"driver": "nvidia"}}))
        await agent.converge()
        assert card(agent, GPU) == {GPU: "nvidia", AUDIO: "snd_hda_intel"}
        assert override(agent, GPU) == override(agent, AUDIO) == ""
        assert rules(agent) == ""


async def test_B4_a_drive_in_the_gpus_group_is_named_and_neither_is_touched(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B4.yaml") as agent:
        await agent.converge()
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "GroupShared")
        assert "IOMMU group 48" in condition.message
        assert "0000:42:00.0 (driver nvme)" in condition.message
        assert not writes_about(agent, "0000:81:00")
        assert not writes_about(agent, "0000:42:00")
        assert "0000:81:00" not in rules(agent)  # the next boot must not split the group either
        assert "0000:91:00.1" in rules(agent)
        assert {driver(agent, a) for a in OTHERS} == {"vfio-pci"}


async def test_B4_a_group_that_a_drive_shares_is_reported_also_when_the_gpu_is_on_vfio_already(
    tmp_path: Path,
) -> None:
    scenario = """
set:
  modules: {vfio_pci: {}}
  functions: {"0000:42:00.0": {group: 48}, "0000:81:00.?": {driver: vfio-pci, override: vfio-pci}}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert agent.condition("DriversBound").reason == "GroupShared"
        assert agent.status().ready == "False"


async def test_B4_a_group_of_two_gpus_is_not_split_between_drivers(tmp_path: Path) -> None:
    scenario = 'set: {functions: {"0000:71:00.?": {group: 48}}}'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        condition = agent.condition("DriversBound")
        assert condition.reason == "GroupShared"
        assert "0000:71:00.0" in condition.message
        assert set(card(agent, GPU).values()) == {"nvidia", "snd_hda_intel"}
        await serves(agent)


async def test_B4_a_group_of_two_gpus_that_both_go_to_vfio_moves_as_one(tmp_path: Path) -> None:
    scenario = 'set: {functions: {"0000:91:00.?": {group: 48}}}'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        await is_ready(agent)
        assert {*card(agent, GPU).values(), *card(agent, "0000:91:00.0").values()} == {"vfio-pci"}


async def test_B5_a_spec_that_splits_a_slot_is_refused_and_the_last_good_one_stays(tmp_path: Path) -> None:
    split = recipe(gpus={"confidential": {"select": ["0000:71:00.1"]}})
    async with rig(tmp_path, spec=split) as agent:
        await agent.one_pass()
        condition = agent.condition("SpecAccepted")
        assert condition.status == "False"
        assert "0000:71:00.1" in condition.message
        assert "all functions of a card in one group" in condition.message
        assert agent.world.writes == []
        agent.write_spec(recipe())
        await agent.converge()
        before = list(agent.world.writes)
        agent.write_spec(split)
        await agent.converge()
        assert agent.world.writes == before
        assert agent.condition("SpecAccepted").status == "False"
        assert agent.condition("DriversBound").status == "True"


async def test_B6_a_bind_that_binds_nothing_is_no_success_and_the_old_driver_comes_back(
    tmp_path: Path,
) -> None:
    scenario = f'faults: [{{on: pci.probe, target: "{GPU}", succeedWithoutEffect: true, times: 1}}]'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert card(agent, GPU) == {GPU: "nvidia", AUDIO: "snd_hda_intel"}
        assert override(agent, GPU) == ""
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "Backoff")
        assert "was probed for vfio-pci, and its driver is none" in condition.message
        before = writes_about(agent, "0000:81:00")
        await agent.one_pass()
        assert writes_about(agent, "0000:81:00") == before  # it waits
        assert not [
            r
            for r in journal(agent)
            if r.get("action") == f"driver-binding/bind/{GPU}" and r.get("result") == "done"
        ]
        asks(agent, "retry", GPU)
        await agent.converge()
        assert set(card(agent, GPU).values()) == {"vfio-pci"}
        await is_ready(agent)


async def test_B6_a_device_that_no_probe_binds_is_never_called_bound(tmp_path: Path) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B6.yaml") as agent:
        await agent.converge()
        assert driver(agent, GPU) == override(agent, GPU) == ""
        assert shown(agent, GPU).driver.startswith("none")
        assert agent.condition("DriversBound").status == "False"
        assert agent.status().ready == "False"
        assert {driver(agent, a) for a in OTHERS} == {"vfio-pci"}


async def test_B6_an_unbind_that_changes_nothing_is_read_back(tmp_path: Path) -> None:
    scenario = f'faults: [{{on: pci.unbind, target: "{GPU}", succeedWithoutEffect: true}}]'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert card(agent, GPU) == {GPU: "nvidia", AUDIO: "snd_hda_intel"}
        assert override(agent, GPU) == ""
        assert "still on a driver after its unbind" in agent.condition("DriversBound").message


async def test_B6_an_override_that_does_not_hold_is_noticed_before_the_unbind(tmp_path: Path) -> None:
    scenario = f'faults: [{{on: pci.set_override, target: "{GPU}", succeedWithoutEffect: true}}]'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert unbinds(agent, GPU) == 0
        assert (
            f"driver_override of {GPU} was set to vfio-pci and reads back none"
            in agent.condition("DriversBound").message
        )


async def test_B6_when_one_function_does_not_move_the_whole_card_goes_back(tmp_path: Path) -> None:
    scenario = f'faults: [{{on: pci.probe, target: "{AUDIO}", succeedWithoutEffect: true, times: 1}}]'
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert card(agent, GPU) == {GPU: "nvidia", AUDIO: "snd_hda_intel"}
        assert override(agent, GPU) == override(agent, AUDIO) == ""
        assert agent.condition("DriversBound").status == "False"

"""Binding cases B1 and B2, as an operator meets them: an unbind that never returns, and what must let go before one."""

from pathlib import Path

from tests.cases.daemons import daemon
from tests.cases.hardware import (
    CONFIDENTIAL,
    at_any_speed,
    boots,
    card,
    driver,
    is_ready,
    killed_at,
    override,
    serves,
    shown,
    unbinds,
    writes_about,
)
from tests.cases.operating import INFERENCE, asks, journal, starts
from tests.rig import SCENARIOS, Rig, rig

GPU, AUDIO = "0000:81:00.0", "0000:81:00.1"
OTHERS = CONFIDENTIAL[1:]
IDLE_SERVICE = 'targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive, mainPid: 0}}}}'


async def assert_only_this_gpu_waits_for_a_reboot(agent: Rig) -> None:
    condition = agent.condition("DriversBound")
    assert (condition.status, condition.reason) == ("False", "RebootRequired")
    assert GPU in condition.message
    assert "reboot" in condition.next_step
    assert "RebootRequired" in shown(agent, GPU).note
    assert {shown(agent, a).driver for a in OTHERS} == {"vfio-pci"}
    assert {shown(agent, a).driver for a in INFERENCE} == {"nvidia"}
    await serves(agent)
    assert agent.status().ready == "False"


async def test_B1_a_blocked_unbind_is_terminal_for_that_gpu_only_and_never_written_again(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B1.yaml") as agent:
        await agent.converge()
        await assert_only_this_gpu_waits_for_a_reboot(agent)
        before = list(agent.world.writes)
        for _ in range(3):
            await agent.one_pass()
        await agent.restart()
        await agent.converge()
        asks(agent, "retry", GPU)
        await agent.converge()
        assert agent.world.writes == before
        assert unbinds(agent, GPU) == 1
        await assert_only_this_gpu_waits_for_a_reboot(agent)


async def test_B1_an_agent_killed_while_the_unbind_runs_knows_it_and_brings_the_service_back(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B1.yaml") as agent:
        await killed_at(agent, f"pci.unbind {GPU} nvidia")
        intents = [r["action"] for r in journal(agent) if r["event"] == "intent"]
        assert f"driver-binding/bind/{GPU}" in intents  # recorded before it was written
        await agent.converge()
        await agent.one_pass()
        assert unbinds(agent, GPU) == 1
        await assert_only_this_gpu_waits_for_a_reboot(agent)


async def test_B1_a_daemon_that_is_told_to_stop_does_not_wait_for_the_unbind_and_the_next_one_knows_of_it(
    tmp_path: Path,
) -> None:
    # Slow enough for the agent's own deadline, at which it gives up the GPU, to be far away.
    blocked = f'{{faults: [{{on: pci.unbind, target: "{GPU}", block: true}}], set: {{{IDLE_SERVICE}}}}}'
    async with daemon(tmp_path, scenario=blocked, factor=4.0) as running:
        agent = running.agent
        await running.until(lambda: unbinds(agent, GPU))
        running.daemon.stop()
        await running.task
        assert GPU in agent.memory.unbinding
        assert not agent.memory.quarantine
    async with rig(tmp_path) as agent:
        await agent.one_pass()
        assert unbinds(agent, GPU) == 1
        assert (agent.condition("DriversBound").reason, driver(agent, GPU)) == ("RebootRequired", "")


async def test_B1_after_the_reboot_the_gpu_is_managed_again(tmp_path: Path) -> None:
    once = f'faults: [{{on: pci.unbind, target: "{GPU}", block: true, times: 1}}]'
    async with rig(tmp_path, spec=at_any_speed(), scenario=once) as agent:
        await agent.converge()
        await assert_only_this_gpu_waits_for_a_reboot(agent)
        await boots(agent)
        await agent.converge()
        assert set(card(agent, GPU).values()) == {"vfio-pci"}
        await is_ready(agent)


async def test_B1_a_service_whose_own_gpu_is_stuck_is_not_started_and_says_why(tmp_path: Path) -> None:
    """The card comes back from vfio-pci and does not make it: three of four GPUs are no service."""
    scenario = """
set:
  modules: {vfio_pci: {}}
  functions: {"0000:71:00.?": {driver: vfio-pci, override: vfio-pci}}
  targets: {"lxc:129": {units: {sglang-qwen.service: {activeState: inactive, mainPid: 0}}}}
faults:
  - {on: pci.unbind, target: "0000:71:00.0", block: true}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        for _ in range(3):
            await agent.one_pass()
        condition = agent.condition("ServiceReady/qwen")
        assert condition.status == "False"
        assert "0000:71:00.0" in condition.message
        assert "reboot" in condition.next_step
        assert starts(agent) == 0
        assert unbinds(agent, "0000:71:00.0") == 1
        assert {driver(agent, a) for a in CONFIDENTIAL} == {"vfio-pci"}


async def test_B1_persistence_mode_is_not_touched_any_more_once_the_unbind_is_stuck(tmp_path: Path) -> None:
    scenario = f"""
set:
  gpus: {{"{GPU}": {{persistenceMode: true}}}}
  {IDLE_SERVICE}
faults:
  - {{on: pci.unbind, target: "{GPU}", block: true}}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert writes_about(agent, "nvml.set_persistence_mode", GPU) == [
            f"nvml.set_persistence_mode {GPU} off"
        ]
        # Nothing after it, the override neither: its write would wait for the device's lock, and a reboot clears it.
        assert writes_about(agent, GPU)[-1] == f"pci.unbind {GPU} nvidia"
        await assert_only_this_gpu_waits_for_a_reboot(agent)


async def test_B1_an_unbind_whose_state_cannot_be_read_counts_as_running(tmp_path: Path) -> None:
    scenario = f"""
faults:
  - {{on: pci.unbind, target: "{GPU}", block: true}}
  - {{on: pci.unbind_state, target: "{GPU}", errno: EIO}}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert not writes_about(agent, "pci.probe", GPU)  # a probe would wait behind it for ever
        await assert_only_this_gpu_waits_for_a_reboot(agent)


async def test_B2_persistence_mode_goes_off_first_and_what_cannot_be_read_counts_as_on(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, scenario=SCENARIOS / "B2.yaml") as agent:
        await agent.converge()
        mine = writes_about(agent, GPU)
        off = mine.index(f"nvml.set_persistence_mode {GPU} off")
        assert off < mine.index(f"pci.unbind {GPU} nvidia")
        assert driver(agent, GPU) == "vfio-pci"
        assert not writes_about(agent, "0000:91:00")
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "HoldersUnknown")
        assert "0000:91:00.0" in condition.message
        assert "nvidia-smi" in condition.next_step
        await serves(agent)


async def test_B2_persistence_mode_comes_back_only_where_the_driver_did_not_change(tmp_path: Path) -> None:
    scenario = f"""
set:
  gpus: {{"{GPU}": {{persistenceMode: true}}, "0000:91:00.0": {{persistenceMode: true}}}}
  {IDLE_SERVICE}
faults:
  - {{on: pci.unbind, target: "0000:91:00.0", errno: EBUSY}}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert driver(agent, "0000:91:00.0") == "nvidia"
        assert agent.world.state.gpus["0000:91:00.0"].persistence_mode
        assert override(agent, "0000:91:00.0") == ""
        assert driver(agent, GPU) == "vfio-pci"
        assert f"nvml.set_persistence_mode {GPU} on" not in agent.world.writes
        condition = agent.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "Backoff")
        assert "EBUSY" in condition.message
        assert "agent retry 0000:91:00.0" in condition.next_step


async def test_B2_a_persistence_mode_that_stays_on_is_read_back_and_the_card_left_alone(
    tmp_path: Path,
) -> None:
    scenario = f"""
set:
  gpus: {{"{GPU}": {{persistenceMode: true}}}}
  {IDLE_SERVICE}
faults:
  - {{on: nvml.set_persistence_mode, target: "{GPU}", succeedWithoutEffect: true}}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert unbinds(agent, GPU) == 0
        assert "reads back unchanged" in agent.condition("DriversBound").message
        assert {driver(agent, a) for a in OTHERS} == {"vfio-pci"}


async def test_B2_a_persistence_mode_turned_on_again_in_between_stops_the_unbind(tmp_path: Path) -> None:
    scenario = """
events:
  - afterCalls: {pci.unbind: 1}
    do: {set: {gpus: {"0000:f1:00.0": {persistenceMode: true}}}}
faults:
  - {on: nvml.set_persistence_mode, target: "0000:f1:00.0", errno: EIO}
"""
    async with rig(tmp_path, scenario=scenario) as agent:
        await agent.converge()
        assert unbinds(agent, "0000:f1:00.0") == 0
        assert driver(agent, "0000:f1:00.0") == "nvidia"
        assert driver(agent, GPU) == "vfio-pci"

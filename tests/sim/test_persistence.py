"""One simulated host, several processes: its state file is all that they share."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agent.core.fact import Known
from agent.host.inference import HttpInference
from agent.sim.host import simulated_host
from agent.sim.yaml_text import ScenarioError
from tests.sim.test_systemd import P2P_OFF, SGLANG, UNIT, drop_in, restart_with

GPU = "0000:81:00.0"
HOLD = "faults: [{on: pci.unbind, block: true}]"


async def ready(host, port: int = 30000) -> None:
    """Until the service's own server answers, in real time bounded by the test's patience."""
    inference = HttpInference(host.ports.clock)
    url = host.ports.targets("lxc:129").endpoint(port)
    for _ in range(100):
        try:
            status, _text = await inference.get(url, "/health", 600.0)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        assert status == 200
        return
    pytest.fail(f"{url} never answered")


async def test_a_second_host_on_the_same_file_sees_what_the_first_did(make_host, tmp_path):
    state = tmp_path / "world.json"
    first, second = make_host(state=state), make_host(state=state)
    await first.ports.pci.set_override(GPU, "vfio-pci")
    pci = await second.ports.pci.read()
    assert pci.functions[GPU].driver_override == Known("vfio-pci")
    await second.ports.pci.set_override(GPU, "")
    assert len(first.world.writes) == 1  # until it looks again
    await first.ports.pci.read()
    assert first.world.writes == [f"pci.set_override {GPU} vfio-pci", f"pci.set_override {GPU}"]


async def test_B1_a_pending_unbind_survives_its_process(make_host, tmp_path):
    state = tmp_path / "world.json"
    first = make_host(HOLD, state=state)
    await first.ports.pci.start_unbind(GPU, "nvidia")
    await first.close()
    second = make_host(state=state)  # the host keeps its scenario
    assert await second.ports.pci.unbind_state(GPU) == "running"
    assert (await second.ports.pci.read()).pending_unbinds == (GPU,)
    assert [w for w in second.world.writes if w.startswith("pci.unbind")] == [f"pci.unbind {GPU} nvidia"]


async def test_faults_are_counted_across_processes(make_host, tmp_path):
    state, text = tmp_path / "world.json", "faults: [{on: pci.set_override, errno: EIO, times: 1}]"
    with pytest.raises(OSError, match=GPU):
        await make_host(text, state=state).ports.pci.set_override(GPU, "vfio-pci")
    await make_host(text, state=state).ports.pci.set_override(GPU, "vfio-pci")


async def test_a_service_goes_on_loading_while_no_process_looks_and_serves_the_next_one(make_host, tmp_path):
    state = tmp_path / "world.json"
    first = make_host(state=state)
    await restart_with(first, drop_in(*SGLANG, env=P2P_OFF))
    pid = (await first.ports.targets("lxc:129").unit(UNIT)).main_pid
    await first.close()
    second = make_host(state=state)
    unit = await second.ports.targets("lxc:129").unit(UNIT)
    assert (unit.active_state, unit.main_pid) == ("active", pid)
    await ready(second)
    answer = await HttpInference(second.ports.clock).complete(
        second.ports.targets("lxc:129").endpoint(30000), "qwen3.5-122b", "What is 7 * 13?", 64, 600.0
    )
    assert "91" in answer.text


async def test_stopping_ends_the_server_and_another_process_may_do_it(make_host, tmp_path):
    state = tmp_path / "world.json"
    first, second = make_host(state=state), make_host(state=state)
    await restart_with(first, drop_in(*SGLANG, env=P2P_OFF))
    await ready(first)
    url = first.ports.targets("lxc:129").endpoint(30000)
    await second.ports.targets("lxc:129").stop_unit(UNIT)
    await second.ports.clock.sleep(5)
    assert (await second.ports.targets("lxc:129").unit(UNIT)).active_state == "inactive"
    assert (await first.ports.targets("lxc:129").unit(UNIT)).active_state == "inactive"
    with pytest.raises(OSError):
        await HttpInference(first.ports.clock).get(url, "/health", 60.0)
    assert first.ports.targets("lxc:129").endpoint(30000) != url


async def test_a_server_that_dies_fails_its_unit(make_host):
    host = make_host("faults: [{on: server, answer: die-half-way, dyingWords: [out of memory]}]")
    await restart_with(host, drop_in(*SGLANG, env=P2P_OFF, extra="Restart=no"))
    await ready(host)
    url = host.ports.targets("lxc:129").endpoint(30000)
    with pytest.raises(OSError):
        await HttpInference(host.ports.clock).complete(url, "qwen3.5-122b", "hello", 200, 6000.0)
    while (unit := await host.ports.targets("lxc:129").unit(UNIT)).active_state == "active":
        await asyncio.sleep(0.02)
    assert unit.active_state == "failed"
    assert "out of memory" in await host.ports.targets("lxc:129").unit_log(UNIT, 5)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from agent.host.inference import HttpInference
from agent.sim.host import simulated_host

async def main() -> None:
    host = simulated_host(state=Path(sys.argv[1]), inference=HttpInference, time_factor=200.0)
    await host.ports.pci.start_unbind("0000:81:00.0", "nvidia")
    print("written", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_process_leaves_a_whole_state(tmp_path):
    state = tmp_path / "world.json"
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    host = simulated_host(state=state, inference=HttpInference)
    assert host.world.writes == ["pci.unbind 0000:81:00.0 nvidia"]


def test_a_state_file_of_another_profile_or_version_is_refused(tmp_path):
    state = tmp_path / "world.json"
    simulated_host(state=state, inference=HttpInference)
    with pytest.raises(ScenarioError, match="synthetic-2"):
        simulated_host("synthetic-2", state=state, inference=HttpInference)
    state.write_text('{"profile": "esc8000a"}')
    with pytest.raises(ScenarioError, match="remove it"):
        simulated_host(state=state, inference=HttpInference)

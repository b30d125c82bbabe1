"""Every reported case can be scripted: its scenario shows what it must at the ports."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agent.core.errors import SpecError
from agent.core.fact import Absent, Known, Unknown
from agent.core.observation import Nvml
from agent.core.spec_load import load
from agent.host.inference import HttpInference
from agent.sim.host import SimulatedHost, simulated_host
from agent.sim.scenario import SpecEdit, load_scenario
from tests.sim.test_systemd import P2P_OFF, SGLANG, UNIT, drop_in, restart_with

SCENARIOS = Path(__file__).parents[1] / "scenarios"
FOUR = ["0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0"]
GPU, AUDIO = "0000:81:00.0", "0000:81:00.1"
LXC = "lxc:129"
FACTOR = 200.0

Check = Callable[[SimulatedHost], Awaitable[None]]
CHECKS: dict[str, Check] = {}
EDITS: list[SpecEdit] = []


def case(name: str) -> Callable[[Check], Check]:
    def note(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return note


def test_every_case_has_a_scenario_and_a_check():
    expected = {
        *(f"P{n}" for n in range(1, 17)),
        *(f"B{n}" for n in range(1, 16)),
        *(f"D{n}" for n in range(1, 10)),
        *(f"S{n}" for n in range(1, 15)),
    }
    assert set(CHECKS) == expected == {path.stem for path in SCENARIOS.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(path.stem for path in SCENARIOS.glob("*.yaml")))
async def test_the_scenario_shows_its_case_at_the_ports(name, tmp_path):
    EDITS.clear()
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    host = simulated_host(
        inference=HttpInference,
        state=tmp_path / "world.json",
        scenario=scenario,
        time_factor=FACTOR,
        edit_spec=EDITS.append,
    )
    try:
        await CHECKS[name](host)
    finally:
        await host.close()


# -- looking at a host ------------------------------------------------------------------------------------------------


async def pairs(host: SimulatedHost, gpus: list[str]) -> dict[str, set[tuple[str, str]]]:
    """Ordered pairs by result."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in (await host.ports.p2p_test.run(gpus, lambda _text: None)).paths:
        found.setdefault(path.result, set()).add((path.source, path.destination))
    return found


async def log(host: SimulatedHost) -> list[str]:
    return [text for _, text in (await host.ports.kernel_log.read("")).lines]


async def nvml(host: SimulatedHost) -> Nvml:
    fact = await host.ports.nvml.read()
    assert isinstance(fact, Known)
    return fact.value


async def wait_sim(host: SimulatedHost, seconds: float) -> None:
    await host.ports.clock.sleep(seconds)


async def restart(host: SimulatedHost, *flags: str, env: dict[str, str] | None = None) -> None:
    await restart_with(host, drop_in(*SGLANG, *flags, env={**P2P_OFF, **(env or {})}, extra="Restart=no"))


async def unit_after(host: SimulatedHost, seconds: float) -> tuple[str, str, int]:
    await wait_sim(host, seconds)
    unit = await host.ports.targets(LXC).unit(UNIT)
    return unit.active_state, unit.result, unit.exit_status


async def serving(host: SimulatedHost) -> bool:
    """Whether /health says 200 within some hundred simulated seconds."""
    for _ in range(15):
        url = host.ports.targets(LXC).endpoint(30000)
        try:
            status, _ = await HttpInference(host.ports.clock).get(url, "/health", 600.0)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            return status == 200
    return False


async def ask(host: SimulatedHost, text: str = "What is 7 * 13?") -> tuple[str, int]:
    url = host.ports.targets(LXC).endpoint(30000)
    answer = await HttpInference(host.ports.clock).complete(url, "/models/Qwen3.5-122B-A10B", text, 64, 600.0)
    return answer.text, answer.tokens


async def unit_log(host: SimulatedHost) -> str:
    return "\n".join(await host.ports.targets(LXC).unit_log(UNIT, 100))


def spec_problems(host: SimulatedHost) -> str:
    text = host.world.scenario.spec_text
    assert text is not None
    with pytest.raises(SpecError) as raised:
        load(text, "spec.yaml")
    return str(raised.value)


# -- P: P2P and transport ---------------------------------------------------------------------------------------------


@case("P1")
async def corrupt_everywhere(host):
    assert set(await pairs(host, FOUR)) == {"corrupt"}
    assert host.world.scenario.spec_text is not None


@case("P2")
async def one_pair_hangs(host):
    assert (await pairs(host, FOUR[:2]))["hung"] == {(FOUR[0], FOUR[1])}


@case("P3")
async def bridges_redirect(host):
    pci = await host.ports.pci.read()
    assert all(pci.functions[b].acs_ctl == Known(0x1D) for a in FOUR for b in pci.functions[a].bridges)
    assert {g.type for g in pci.groups.values()} == {Known("identity")}
    assert set(await pairs(host, FOUR)) == {"corrupt"}


@case("P4")
async def two_ranks_hang_and_four_work(host):
    assert set(await pairs(host, FOUR[:2])) == {"hung"}
    assert set(await pairs(host, FOUR)) == {"good"}


@case("P5")
async def zeros_and_page_faults(host):
    before = len(await log(host))
    result = await host.ports.p2p_test.run(FOUR[:2], lambda _text: None)
    assert {p.detail for p in result.paths} == {"zeros"}
    assert any("IO_PAGE_FAULT" in line for line in (await log(host))[before:])


@case("P6")
async def dropped_writes(host):
    result = await host.ports.p2p_test.run(FOUR[:2], lambda _text: None)
    assert {p.detail for p in result.paths if p.path == "copy-push"} == {"dropped write"}


@case("P7")
async def thousands_of_lines(host):
    assert sum("domain=0x0003" in line for line in await log(host)) == 5000


@case("P8")
async def exclamation_marks(host):
    await restart(host)
    assert await serving(host)
    text, _ = await ask(host)
    assert set(text.strip()) == {"!"}


@case("P9")
async def one_pair_one_direction(host):
    found = await pairs(host, sorted(host.world.state.gpus))
    assert found["corrupt"] == {("0000:61:00.0", "0000:f1:00.0")}
    assert ("0000:f1:00.0", "0000:61:00.0") in found["good"]


@case("P10")
async def hangs_until_the_cache_is_gone(host):
    await restart(host)
    await wait_sim(host, 60)
    assert "fired up" not in await unit_log(host)
    await host.ports.targets(LXC).remove_file("/root/.cache/sglang/gpu_p2p_access_cache_for_0,1,2,3.json")
    await restart(host)
    await wait_sim(host, 60)
    assert "fired up" in await unit_log(host)


@case("P11")
async def failure_217(host):
    await restart(host)
    assert await unit_after(host, 30) == ("failed", "exit-code", 1)
    assert "Cuda failure 217" in await unit_log(host)
    await restart(host, env={"NCCL_CUMEM_HOST_ENABLE": "0"})
    assert (await unit_after(host, 30))[0] == "active"


@case("P12")
async def small_shared_memory(host):
    assert (await host.ports.targets(LXC).facts()).shm_bytes == Known(64 << 20)
    await restart(host)
    assert await unit_after(host, 30) == ("failed", "exit-code", 1)


@case("P13")
async def left_over_segments(host):
    target = host.ports.targets(LXC)
    assert await target.exists("/dev/shm/nccl-left1")
    await target.remove_file("/dev/shm/nccl-left1")
    assert not await target.exists("/dev/shm/nccl-left1")
    assert host.world.state.targets[LXC].files["/dev/shm/nccl-open1"].opened_by == 40001


@case("P14")
async def custom_all_reduce_hangs(host):
    unit = await host.ports.targets(LXC).unit(UNIT)
    process = await host.ports.targets(LXC).process(unit.main_pid)
    assert process is not None
    assert "--disable-custom-all-reduce" not in process.argv
    assert process.env["NCCL_P2P_DISABLE"] == "1"
    assert not await serving(host)


@case("P15")
async def nccl_values(host):
    for name in ("NCCL_P2P_DISABLE", "NCCL_BUFFSIZE", "NCCL_P2P_LEVEL"):
        assert name in spec_problems(host)


@case("P16")
async def acs_comes_back(host):
    bridge = "0000:00:01.1"
    first = await host.ports.platform.read()
    assert (await host.ports.pci.read()).functions[bridge].acs_ctl == Known(0)
    await wait_sim(host, 305)
    assert (await host.ports.pci.read()).functions[bridge].acs_ctl == Known(0x1D)
    assert (await host.ports.platform.read()).boot_id != first.boot_id


# -- B: binding -------------------------------------------------------------------------------------------------------


@case("B1")
async def unbind_never_returns(host):
    await host.ports.pci.start_unbind(GPU, "nvidia")
    await wait_sim(host, 120)
    assert await host.ports.pci.unbind_state(GPU) == "running"


@case("B2")
async def held_by_persistence_mode(host):
    assert [h.kind for h in (await host.ports.holders.read([GPU]))[GPU].value] == ["persistence"]
    other = (await nvml(host)).gpus["0000:91:00.0"]
    assert isinstance(other, Known)
    assert isinstance(other.value.persistence_mode, Unknown)


@case("B3")
async def daemons_hold_the_node(host):
    units = {h.unit for h in (await host.ports.holders.read([GPU]))[GPU].value}
    assert {"nvidia-persistenced.service", "dcgm-exporter.service"} <= units
    for unit in ("nvidia-persistenced.service", "dcgm-exporter.service"):
        await host.ports.targets("host").stop_unit(unit)
    await wait_sim(host, 5)
    assert {h.unit for h in (await host.ports.holders.read([GPU]))[GPU].value} == {UNIT}


@case("B4")
async def a_drive_shares_the_group(host):
    pci = await host.ports.pci.read()
    assert pci.groups[48].members == ("0000:42:00.0", GPU, AUDIO)


@case("B5")
async def a_slot_is_split(host):
    text = host.world.scenario.spec_text
    assert text is not None
    assert AUDIO in text


@case("B6")
async def probe_binds_nothing(host):
    await host.ports.targets(LXC).stop_unit(UNIT)
    await wait_sim(host, 5)
    await host.ports.platform.load_module("vfio-pci")
    await host.ports.pci.set_override(GPU, "vfio-pci")
    await host.ports.pci.start_unbind(GPU, "nvidia")
    await wait_sim(host, 5)
    await host.ports.pci.probe(GPU)
    assert await host.ports.pci.read_driver(GPU) == Absent()


@case("B7")
async def a_vm_holds_the_group(host):
    holders = (await host.ports.holders.read([GPU]))[GPU].value
    assert [(h.kind, h.what) for h in holders] == [("vm", "/dev/vfio/48")]
    assert host.world.writes == []


@case("B8")
async def stale_override(host):
    function = (await host.ports.pci.read()).functions[GPU]
    assert (function.driver, function.driver_override) == (Absent(), Known("vfio-pci"))
    await host.ports.pci.probe(GPU)
    assert await host.ports.pci.read_driver(GPU) == Absent()


@case("B9")
async def ids_take_every_card(host):
    pci = await host.ports.pci.read()
    assert {f.driver for f in pci.functions.values() if f.is_gpu} == {Known("vfio-pci")}


@case("B10")
async def bound_to_nvidia_after_boot(host):
    assert await host.ports.pci.read_driver(GPU) == Known("vfio-pci")
    await wait_sim(host, 305)
    assert await host.ports.pci.read_driver(GPU) == Known("nvidia")
    assert await host.ports.pci.read_driver("0000:91:00.0") == Known("vfio-pci")


@case("B11")
async def buses_have_moved(host):
    pci = await host.ports.pci.read()
    assert pci.functions[GPU].serial == Known("48b02d00000000a4")  # the card that was at 0000:71
    assert "0000:a1:00.0" in pci.functions


@case("B12")
async def card_in_d3cold(host):
    await host.ports.pci.probe(GPU)
    assert await host.ports.pci.read_driver(GPU) == Absent()
    assert any("Unable to change power state from D3cold to D0" in line for line in await log(host))
    assert (await host.ports.pci.read()).functions[GPU].power_state == Known("D3cold")


@case("B13")
async def reset_fails(host):
    assert any("not ready 65535ms after FLR" in line for line in await log(host))


@case("B14")
async def nothing_on_nvidia(host):
    await host.ports.pci.read()
    assert host.world.reads["nvml"] == 0
    platform = await host.ports.platform.read()
    assert isinstance(platform.modules, Known)
    assert "nvidia" not in platform.modules.value
    await host.ports.nvml.read()
    platform = await host.ports.platform.read()
    assert isinstance(platform.modules, Known)
    assert "nvidia" in platform.modules.value


@case("B15")
async def address_without_quotes(host):
    text = host.world.scenario.spec_text
    assert text is not None
    spec = load(text, "spec.yaml").spec.spec
    assert spec.gpus["inference"].select == ("0000:01:00.0", "0000:11:00.0")


# -- D: platform and driver -------------------------------------------------------------------------------------------


@case("D1")
async def snp_is_refused(host):
    await host.ports.pci.read()
    platform = await host.ports.platform.read()
    assert platform.sev_snp == Known(value=False)
    assert any("SNP cannot be supported" in line for line in await log(host))
    assert {g.type for g in (await host.ports.pci.read()).groups.values()} == {Known("identity")}


@case("D2")
async def driver_versions_differ(host):
    facts = await host.ports.targets(LXC).facts()
    assert facts.user_driver == Known("565.57.01")
    assert isinstance(facts.nvml, Unknown)
    assert facts.nvml.code == "NvmlVersionMismatch"
    assert (await host.ports.platform.read()).nvidia_driver == Known("590.48.01")


@case("D3")
async def target_loses_its_gpus(host):
    target = host.ports.targets(LXC)
    assert (await target.facts()).nvml == Known("ok")
    await target.daemon_reload()
    seen = (await target.facts()).nvml
    assert isinstance(seen, Unknown)
    assert seen.code == "NvmlUnknownError"
    assert all(isinstance(gpu, Known) for gpu in (await nvml(host)).gpus.values())


@case("D4")
async def off_the_bus(host):
    assert any("fallen off the bus" in line for line in await log(host))
    lost = (await nvml(host)).gpus["0000:11:00.0"]
    assert isinstance(lost, Unknown)
    assert lost.code == "GpuLost"


@case("D5")
async def recovery_action(host):
    gpu = (await nvml(host)).gpus["0000:11:00.0"]
    assert isinstance(gpu, Known)
    assert gpu.value.recovery_action == Known("drain")


@case("D6")
async def minor_is_no_index(host):
    at_three = [
        g.value
        for g in (await nvml(host)).gpus.values()
        if isinstance(g, Known) and g.value.minor == Known(3)
    ]
    assert [gpu.index for gpu in at_three] == [7]


@case("D7")
async def idle_link(host):
    gpu = (await nvml(host)).gpus["0000:11:00.0"]
    assert isinstance(gpu, Known)
    assert (gpu.value.link_gen, gpu.value.max_link_gen) == (Known(1), Known(5))
    assert (await host.ports.pci.read()).functions["0000:11:00.0"].link_speed == Known("2.5 GT/s PCIe")


@case("D8")
async def surprise_link_down(host):
    assert any("aer_uncor_status: 0x00000020" in line for line in await log(host))


@case("D9")
async def uvm_is_missing(host):
    for expected in (False, False, True):
        platform = await host.ports.platform.read()
        assert isinstance(platform.modules, Known)
        assert ("nvidia_uvm" in platform.modules.value) == expected
        await host.ports.platform.load_module("nvidia_uvm")


# -- S: service and gate ----------------------------------------------------------------------------------------------


@case("S1")
async def healthy_and_silent(host):
    await restart(host)
    assert await serving(host)
    assert (await ask(host))[1] == 0


@case("S2")
async def dropped_flag(host):
    assert (await host.ports.targets(LXC).facts()).sglang_version == Known("0.5.20")
    await restart(host, "--mamba-scheduler-strategy", "extra_buffer")
    assert await unit_after(host, 10) == ("failed", "exit-code", 2)
    await restart(host)
    assert (await unit_after(host, 10))[0] == "active"


@case("S3")
async def out_of_memory_twice(host):
    await restart(host)
    assert await unit_after(host, 20) == ("failed", "signal", 9)
    assert "while loading weights" in await unit_log(host)
    await restart(host)
    assert await serving(host)
    with pytest.raises(OSError):
        await ask(host, "tell me a long story")
    while (await host.ports.targets(LXC).unit(UNIT)).active_state == "active":
        await asyncio.sleep(0.02)
    assert "during decode" in await unit_log(host)


@case("S4")
async def a_worker_stays(host):
    await host.ports.targets(LXC).stop_unit(UNIT)
    await wait_sim(host, 5)
    unit = await host.ports.targets(LXC).unit(UNIT)
    assert (unit.active_state, unit.pids) == ("inactive", ())
    gpu = (await nvml(host)).gpus["0000:01:00.0"]
    assert isinstance(gpu, Known)
    assert gpu.value.pids == Known((4711,))
    await restart(host)
    assert (await unit_after(host, 10))[0] == "failed"
    assert "address already in use" in await unit_log(host)


@case("S5")
async def crashes_every_time(host):
    for _ in range(2):
        await restart(host)
        assert await unit_after(host, 8) == ("failed", "exit-code", 1)


@case("S6")
async def no_usage(host):
    await restart(host)
    assert await serving(host)
    assert (await ask(host))[1] > 0
    assert (await ask(host))[1] > 0
    assert (await ask(host))[1] == 0


@case("S7")
async def edited_after_a_start(host):
    await restart(host)
    await wait_sim(host, 70)
    await host.ports.pci.read()
    assert [edit.set for edit in EDITS] == [
        {"spec": {"services": {"qwen": {"args": {"max-running-requests": 64}}}}}
    ]


@case("S8")
async def never_ready(host):
    await restart(host)
    assert not await serving(host)
    assert (await unit_after(host, 1))[0] == "active"


@case("S9")
async def reboot_in_a_crash_loop(host):
    before = (await host.ports.platform.read()).boot_id
    for _ in range(2):
        await restart(host)
        await wait_sim(host, 5)
    assert (await host.ports.platform.read()).boot_id != before


@case("S10")
async def degraded(host):
    await restart(host)
    assert await serving(host)
    assert "91" not in (await ask(host))[0]


@case("S11")
async def saves_in_a_burst(host):
    await host.ports.pci.read()
    await wait_sim(host, 65)
    await host.ports.pci.read()
    assert [edit.how for edit in EDITS] == ["rename"] * 5 + ["delete", "write"]


@case("S12")
async def nasty_arguments(host):
    text = host.world.scenario.spec_text
    assert text is not None
    service = load(text, "spec.yaml").spec.spec.services["qwen"]
    nasty = str(service.args["chat-template"])
    await restart(host, "--chat-template", nasty, env={"NASTY": str(service.env["NASTY"])})
    process = await host.ports.targets(LXC).process((await host.ports.targets(LXC).unit(UNIT)).main_pid)
    assert process is not None
    assert process.argv[-1] == nasty
    assert process.env["NASTY"] == service.env["NASTY"]


@case("S13")
async def secret_as_a_value(host):
    said = spec_problems(host)
    assert "HF_TOKEN" in said
    assert "hf_abc" not in said


@case("S14")
async def unexpected_exception(host):
    with pytest.raises(KeyError):
        await host.ports.platform.read()
    assert isinstance((await host.ports.platform.read()).boot_id, Known)

"""Scenarios: what they can say, and what is said of those that are wrong."""

import asyncio

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.host.inference import HttpInference
from agent.sim.host import simulated_host
from agent.sim.profile import load_profile, synthetic_profile
from agent.sim.scenario import SpecEdit, load_scenario, parse_scenario
from agent.sim.spec_edit import spec_editor
from agent.sim.yaml_text import ScenarioError

GPU = "0000:81:00.0"


def problems(text: str) -> str:
    with pytest.raises(ScenarioError) as raised:
        parse_scenario(text, "s.yaml")
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profil: x", "s.yaml:1: profil: this key is not known here"),
        (
            "faults:\n  - {on: pci.unbnd, errno: EIO}",
            "s.yaml:2: faults[0].on: expected a port call or rule, such as pci.unbind",
        ),
        ("faults:\n  - {on: pci.unbind, errno: EWHAT}", "expected an errno by name"),
        ("faults:\n  - {on: pci.unbind}", "expected what goes wrong"),
        ("faults:\n  - {on: p2p.pair, detail: x}", "expected result: good, corrupt"),
        ("faults:\n  - {on: platform.read, raise: Boom}", "expected a built-in exception"),
        (
            "events:\n  - {at: 5, do: {log: x}}\n  - {at: soon, do: {log: x}}",
            "s.yaml:3: events[1].at: expected a duration",
        ),
        ("events:\n  - {afterCalls: {target.strat_unit: 1}, do: {log: x}}", "target.start_unit is"),
        ("events:\n  - {do: {}}", "expected what happens"),
        (
            'set:\n  gpus:\n    "0000:81:00.0":\n      persistence: true',
            "s.yaml:4: set.gpus.0000:81:00.0.persistence",
        ),
        ("events:\n  - do:\n      set: {sevSnp: maybe}", "s.yaml:3: events[0].do.set.sevSnp"),
        ("profile: nowhere", "no profile is called 'nowhere'; there are: esc8000a"),
        ("- x", "expected a mapping"),
        ("a: 1\na: 2", "s.yaml:2"),
    ],
)
def test_a_wrong_scenario_is_named_by_line_place_and_expectation(text, expected):
    assert expected in problems(text)


def test_all_problems_are_said_at_once():
    assert len(problems("x: 1\ny: 2\nfaults: [{on: pci.unbind}]").splitlines()) == 3


def test_a_spec_may_be_text_a_mapping_or_a_path_beside_the_scenario(tmp_path):
    assert parse_scenario("spec: |\n  a: 0000:01:00.0\n  b: 1\n", "s").spec_text == "a: 0000:01:00.0\nb: 1\n"
    assert "0000:41:00.0" in (parse_scenario('spec: {a: "0000:41:00.0"}', "s").spec_text or "")
    (tmp_path / "s.yaml").write_text("spec: ../spec.yaml\n")
    assert load_scenario(tmp_path / "s.yaml").spec_path == tmp_path / "../spec.yaml"


async def test_an_errno_strikes_only_where_and_as_often_as_said(make_host):
    host = make_host('faults: [{on: pci.set_override, target: "0000:81:*", errno: EIO, after: 1, times: 1}]')
    await host.ports.pci.set_override("0000:91:00.0", "x")
    await host.ports.pci.set_override(GPU, "first passes")
    with pytest.raises(OSError, match=GPU):
        await host.ports.pci.set_override(GPU, "second fails")
    await host.ports.pci.set_override(GPU, "third passes")
    assert len(host.world.writes) == 4


async def test_a_blocked_read_never_returns_and_can_be_cancelled(make_host):
    host = make_host("faults: [{on: pci.read, block: true, times: 1}]")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.ports.pci.read(), 0.05)
    assert (await host.ports.pci.read()).functions


async def test_reads_can_be_made_unknown_whole_or_in_part(make_host):
    host = make_host(
        "faults:\n"
        f'- {{on: pci.read, target: "{GPU}", value: {{serial: {{unknown: no capability}}, numaNode: {{absent: none}}}}}}\n'
        f'- {{on: nvml.read, target: "{GPU}", code: 15}}\n'
        f'- {{on: holders.read, target: "{GPU}", unknown: no permission}}\n'
        "- {on: platform.read, value: {sevSnp: {unknown: unreadable}, cmdline: [a, b]}}\n"
        '- {on: target.facts, target: "lxc:129", value: {shmBytes: 5}}\n'
    )
    function = (await host.ports.pci.read()).functions[GPU]
    assert (function.serial, function.numa_node) == (Unknown("no capability"), Absent("none"))
    nvml = await host.ports.nvml.read()
    assert isinstance(nvml, Known)
    assert isinstance(gone := nvml.value.gpus[GPU], Unknown)
    assert gone.code == "GpuLost"
    assert isinstance((await host.ports.holders.read([GPU]))[GPU], Unknown)
    platform = await host.ports.platform.read()
    assert (platform.sev_snp, platform.cmdline) == (Unknown("unreadable"), Known(("a", "b")))
    assert (await host.ports.targets("lxc:129").facts()).shm_bytes == Known(5)


@pytest.mark.parametrize(
    ("code", "reason"), [(9, "NvmlDriverNotLoaded"), (18, "NvmlVersionMismatch"), (999, "NvmlUnknownError")]
)
async def test_nvml_codes_have_their_reasons(make_host, code, reason):
    fact = await make_host(f"faults: [{{on: nvml.read, code: {code}}}]").ports.nvml.read()
    assert isinstance(fact, Unknown)
    assert (fact.code, f"(code {code})" in fact.reason) == (reason, True)


async def test_events_come_by_time_and_after_calls_without_anybody_looking(make_host):
    edits: list[SpecEdit] = []
    host = make_host(
        "events:\n- {afterCalls: {pci.read: 2}, at: 10s, do: {log: late, editSpec: {set: {a: 1}}}}\n",
        edit_spec=edits.append,
    )
    await host.ports.pci.read()
    await host.ports.clock.sleep(20)
    assert edits == []
    await host.ports.pci.read()
    for _ in range(100):
        await asyncio.sleep(0.02)
        if edits:
            break
    assert edits == [SpecEdit(set={"a": 1})]
    assert (await host.ports.kernel_log.read("")).lines[-1][1] == "late"


async def test_a_fault_can_begin_in_the_middle(make_host):
    host = make_host("events: [{at: 200s, do: {fault: {on: pci.read_driver, unknown: later}}}]")
    assert await host.ports.pci.read_driver(GPU) == Known("nvidia")
    await host.ports.clock.sleep(205)
    assert await host.ports.pci.read_driver(GPU) == Unknown("later", "Scripted")


def test_the_spec_editor_renames_writes_deletes_and_brings_back(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text('gpus: ["0000:41:00.0"]\nmode: off\n')
    edit = spec_editor(spec)
    before = spec.stat().st_ino
    edit(SpecEdit(set={"extra": 1}))
    assert spec.stat().st_ino != before
    edit(SpecEdit(how="delete"))
    assert not spec.exists()
    edit(SpecEdit(set={"mode": None}, how="write"))
    assert spec.read_text() == "gpus:\n- '0000:41:00.0'\nextra: 1\n"
    edit(SpecEdit(text="new\n"))
    assert spec.read_text() == "new\n"


def test_profiles_are_data_and_labelled():
    profile = load_profile("esc8000a")
    assert len(profile.gpus) == 8
    assert profile.serving.speeds[0] == (1, 108.3)
    assert all("illustrative, not measured" in effect.note for effect in profile.serving.effects)


def test_a_synthetic_host_has_any_number_of_gpus():
    host = simulated_host(synthetic_profile(250), inference=HttpInference)
    state = host.world.state
    assert len(state.gpus) == 250
    assert all(bridge in state.functions for f in state.functions.values() for bridge in f.bridges)
    assert load_profile("synthetic-3").name == "synthetic-3"

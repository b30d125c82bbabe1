"""Observation: what cannot be read is Unknown with a reason, and hides nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.core.fact import Absent, Known, Unknown
from agent.core.observation import Observation
from tests.rig import Rig, rig

DEADLINE = 0.05  # real seconds


@asynccontextmanager
async def host(root: Path, scenario: str = "{}") -> AsyncIterator[Rig]:
    async with rig(root, scenario=scenario) as agent:
        await agent.agent.reconciler.specs.refresh()
        agent.agent.reconciler.observer.deadline = DEADLINE
        yield agent


async def look(agent: Rig) -> Observation:
    return (await agent.agent.reconciler.look()).obs


def fault(on: str, what: str) -> str:
    return f"faults: [{{on: {on}, {what}}}]"


async def test_a_host_that_answers_is_known_throughout(tmp_path: Path) -> None:
    async with host(tmp_path) as agent:
        obs = await look(agent)
        assert isinstance(obs.pci, Known)
        assert isinstance(obs.nvml, Known)
        assert isinstance(obs.kernel_events, Known)
        assert all(isinstance(h, Known) for h in obs.holders.values())
        assert isinstance(obs.services["qwen"].unit, Known)
        assert obs.targets["lxc:129"].reachable == Known(value=True)


@pytest.mark.parametrize(
    ("on", "read"),
    [
        ("pci.read", lambda o: o.pci),
        ("platform.read", lambda o: o.platform.boot_id),
        ("nvml.read", lambda o: o.nvml),
        ("holders.read", lambda o: o.holders["0000:01:00.0"]),
        ("kernel_log.read", lambda o: o.kernel_events),
        ("target.facts", lambda o: o.targets["lxc:129"].reachable),
        ("target.unit", lambda o: o.services["qwen"].unit),
        ("target.exists", lambda o: o.services["qwen"].model_present),
        ("target.read_file", lambda o: o.services["qwen"].files),
        ("target.process", lambda o: o.services["qwen"].process),
    ],
)
async def test_a_read_that_never_returns_or_is_refused_is_unknown_and_nothing_else_is(
    tmp_path: Path, on: str, read: object
) -> None:
    assert callable(read)
    async with host(tmp_path / "blocks", fault(on, "block: true")) as agent:
        fact = read(await look(agent))
        assert isinstance(fact, Unknown)
    async with host(tmp_path / "refused", fault(on, "errno: EACCES")) as agent:
        obs = await look(agent)
        fact = read(obs)
        assert isinstance(fact, Unknown)
        if on != "platform.read":
            assert isinstance(obs.platform.boot_id, Known)
            assert "denied" in fact.reason
            assert fact.code == "EACCES"
        if on not in {"pci.read", "platform.read"}:
            assert isinstance(obs.pci, Known)


async def test_a_timeout_says_how_long_was_waited(tmp_path: Path) -> None:
    async with host(tmp_path, fault("pci.read", "block: true")) as agent:
        fact = (await look(agent)).pci
        assert isinstance(fact, Unknown)
        assert fact.code == "Timeout"
        assert f"{DEADLINE:g} s" in fact.reason


async def test_a_defect_of_an_adapter_is_raised_and_not_taken_for_a_fact(tmp_path: Path) -> None:
    async with host(tmp_path, fault("pci.read", "raise: ZeroDivisionError")) as agent:
        with pytest.raises(ZeroDivisionError):
            await look(agent)


async def test_what_is_cancelled_from_outside_is_not_taken_for_a_timeout(tmp_path: Path) -> None:
    async with host(tmp_path, fault("pci.read", "block: true")) as agent:
        agent.agent.reconciler.observer.deadline = 60.0
        task = asyncio.create_task(look(agent))
        while not agent.world.reads["pci"]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_nvml_is_not_opened_while_no_gpu_is_on_nvidia(tmp_path: Path) -> None:
    scenario = 'set: {functions: {"*": {driver: ""}}}'
    async with host(tmp_path, scenario) as agent:
        obs = await look(agent)
        assert isinstance(obs.nvml, Absent)
        assert agent.world.reads["nvml"] == 0


async def test_nvml_is_not_opened_while_nobody_knows_who_is_on_nvidia(tmp_path: Path) -> None:
    async with host(tmp_path, fault("pci.read", "errno: EIO")) as agent:
        obs = await look(agent)
        assert isinstance(obs.nvml, Unknown)
        assert agent.world.reads["nvml"] == 0


async def test_holders_that_were_not_looked_for_may_be_there(tmp_path: Path) -> None:
    async with host(tmp_path) as agent:
        assert isinstance((await look(agent)).holders_of("0000:41:00.0"), Unknown)


async def test_a_target_that_cannot_be_reached_does_not_hide_the_host(tmp_path: Path) -> None:
    async with host(tmp_path, 'set: {targets: {"lxc:129": {reachable: false}}}') as agent:
        obs = await look(agent)
        assert obs.targets["lxc:129"].reachable == Known(value=False)
        assert isinstance(obs.services["qwen"].unit, Unknown)
        assert isinstance(obs.pci, Known)
        assert isinstance(obs.nvml, Known)


async def test_kernel_lines_are_counted_once_however_often_one_looks(tmp_path: Path) -> None:
    line = "NVRM: Xid (PCI:0000:01:00): 13, pid=1, name=python3, Graphics Exception"
    async with host(tmp_path) as agent:
        with agent.world.change():
            agent.world.log(line, count=3)
        for _ in range(3):
            events = (await look(agent)).kernel_events
        assert isinstance(events, Known)
        assert [(e.address, e.code, e.count) for e in events.value if e.sort == "xid"] == [
            ("0000:01:00.0", 13, 3)
        ]


async def test_a_missing_file_of_ours_is_left_out_and_an_empty_one_is_not(tmp_path: Path) -> None:
    async with host(tmp_path) as agent:
        assert (await look(agent)).services["qwen"].files == Known({})
        path = "/etc/systemd/system/sglang-qwen.service.d/50-gpu-host-agent.conf"
        await agent.host.ports.targets("lxc:129").write_file(path, "")
        assert (await look(agent)).services["qwen"].files == Known({path: ""})

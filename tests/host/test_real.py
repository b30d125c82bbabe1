"""The real host put together. Its root is never this machine's: nothing here may act on the machine that runs it."""

import asyncio
from contextlib import aclosing
from pathlib import Path

from agent.core.fact import Known
from agent.host.real import real_host
from agent.host.systemctl import SystemctlManager
from agent.host.systemd_bus import BusManager, local_manager
from agent.host.uevents import uevents
from tests.host.fake_systemd import FakeUnit, fake_systemd
from tests.host.trees import Tree

PATIENCE = 20.0


async def test_a_unit_that_dies_is_a_hint(tmp_path: Path):
    async with fake_systemd() as (daemon, systemd):
        systemd.units["a.service"] = FakeUnit(active="active", sub="running")
        host = real_host(daemon.root)
        sources = host.hints(lambda: ["a.service"])
        assert sources["uevent"] is uevents
        async with aclosing(sources["unit changed"]()) as hints, asyncio.timeout(PATIENCE):
            await anext(hints)  # it is new
            systemd.become("a.service", "failed", "failed")
            await anext(hints)
        assert (await host.ports.targets("host").unit("a.service")).active_state == "failed"
        await host.close()


async def test_reading_a_unit_is_no_hint():
    async with fake_systemd() as (daemon, systemd):
        systemd.units["a.service"] = FakeUnit(active="active", sub="running")
        host = real_host(daemon.root)
        async with aclosing(host.hints(lambda: ["a.service"])["unit changed"]()) as hints:
            async with asyncio.timeout(PATIENCE):
                await anext(hints)
            waiting = asyncio.ensure_future(anext(hints))
            for _ in range(3):
                await host.ports.targets("host").unit("a.service")
            await asyncio.sleep(0.1)
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert {name for name, _ in systemd.calls} == {"LoadUnit", "Subscribe"}
        await host.close()


async def test_the_parameters_of_modules_that_the_spec_names_are_read(tree: Tree):
    tree.file("proc/modules", "snd_hda 100 0 - Live 0x0\nloop 200 0 - Live 0x0\n")
    tree.file("sys/module/snd_hda/parameters/model", "auto\n")
    tree.file("sys/module/loop/parameters/max_loop", "8\n")
    named: list[str] = []
    host = real_host(tree.root, lambda: named)
    for names, expected in (((), {}), (("snd-hda",), {"model": "auto"})):
        named[:] = names
        modules = (await host.ports.platform.read()).modules
        assert isinstance(modules, Known)
        assert modules.value["snd_hda"].parameters == expected
        assert modules.value["loop"].parameters == {}


async def test_the_bus_is_chosen_where_it_answers(tmp_path: Path):
    async with fake_systemd() as (daemon, _):
        assert isinstance(local_manager(daemon.root), BusManager)
    assert isinstance(local_manager(tmp_path), BusManager)  # another root has D-Bus or nothing
    assert isinstance(local_manager(), BusManager | SystemctlManager)

"""Both managers in front of a real systemd: one contract. The bus is reached through the ring's own root directory."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from agent.core.observation import Unit
from agent.host.manager import ServiceManager, TransientCommand
from agent.host.systemctl import SystemctlManager
from agent.host.systemd_bus import BusManager
from tests.system.booted_systemd import PATH, BootedSystemd

pytestmark = pytest.mark.system
UNIT, ALIAS, ONCE = "manager-test.service", "manager-alias.service", "manager-once.service"
SERVICE = f"""[Service]
ExecStart=/bin/sh -c 'sleep 1000 & exec sleep 1001'
[Install]
Alias={ALIAS}
"""
PATIENCE = 30.0
PROPERTIES = {
    "Slice": "manager-test.slice",
    "TimeoutStartSec": "infinity",
    "TimeoutStopSec": "1s",
    "SendSIGKILL": "no",
    "KillMode": "process",
    "SyslogIdentifier": "manager-test",
    "CollectMode": "inactive",
}


def root_of(ring: BootedSystemd) -> Path:
    return Path(f"/proc/{ring.pid}/root")


def by_systemctl(ring: BootedSystemd) -> SystemctlManager:
    namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
    entering = ("nsenter", f"--target={ring.pid}", *namespaces, "--", "env", "-i", f"PATH={PATH}")
    return SystemctlManager(entering, root_of(ring))


@pytest.fixture(params=["D-Bus", "systemctl"])
async def manager(ring: BootedSystemd, request: pytest.FixtureRequest) -> AsyncIterator[ServiceManager]:
    ring.put(f"/etc/systemd/system/{UNIT}", SERVICE)
    ring.do("systemctl", "daemon-reload")
    ring.do("systemctl", "enable", UNIT)
    bus = BusManager(root_of(ring))
    yield bus if request.param == "D-Bus" else by_systemctl(ring)
    await bus.close()
    for name in (UNIT, ONCE):
        ring.run(["systemctl", "kill", "--signal=KILL", name])
        ring.run(["systemctl", "stop", name])
        ring.run(["systemctl", "reset-failed", name])
    ring.do("systemctl", "disable", UNIT)
    ring.do("rm", "-rf", f"/etc/systemd/system/{UNIT}", f"/etc/systemd/system/{UNIT}.d")
    ring.do("systemctl", "daemon-reload")


async def until(read: Callable[[], Awaitable[Unit]], holds: Callable[[Unit], bool]) -> Unit:
    async with asyncio.timeout(PATIENCE):
        while not holds(unit := await read()):
            await asyncio.sleep(0.05)
    return unit


async def test_a_unit_is_started_read_by_any_name_killed_and_reset(manager: ServiceManager):
    await manager.start(UNIT)
    unit = await until(lambda: manager.unit(ALIAS), lambda u: u.active_state == "active" and len(u.pids) == 2)
    assert (unit.name, unit.load_state, unit.sub_state, unit.result) == (UNIT, "loaded", "running", "success")
    assert unit.main_pid > 1
    assert not unit.needs_reload
    await manager.kill(UNIT)
    unit = await until(lambda: manager.unit(UNIT), lambda u: u.active_state == "failed" and not u.pids)
    assert (unit.result, unit.exit_status) == ("signal", 9)
    await manager.reset_failed(UNIT)
    assert (await manager.unit(UNIT)).active_state == "inactive"
    await manager.start(UNIT)
    await until(lambda: manager.unit(UNIT), lambda u: u.active_state == "active")
    await manager.stop(UNIT)
    await until(lambda: manager.unit(UNIT), lambda u: (u.active_state, u.pids) == ("inactive", ()))


async def test_a_unit_that_does_not_exist_is_not_found_and_cannot_be_started(manager: ServiceManager):
    assert (await manager.unit("no-such.service")).load_state == "not-found"
    await manager.kill("no-such.service")
    await manager.reset_failed("no-such.service")
    with pytest.raises(FileNotFoundError):
        await manager.start("no-such.service")


async def test_a_changed_file_needs_a_reload_until_it_is_reloaded(
    ring: BootedSystemd, manager: ServiceManager
):
    await manager.start(UNIT)  # one that does not run is read anew whenever it is asked for
    await until(lambda: manager.unit(UNIT), lambda u: u.active_state == "active")
    ring.put(f"/etc/systemd/system/{UNIT}.d/50-x.conf", "[Service]\nEnvironment=A=b\n")
    assert (await manager.unit(UNIT)).needs_reload
    await manager.reload()
    assert not (await manager.unit(UNIT)).needs_reload


async def test_a_transient_command_gets_its_words_exactly_and_its_outcome_can_be_read(
    ring: BootedSystemd, manager: ServiceManager
):
    words = ["$HOME", "${HOME}", "$$", "%n", "a b", '"q"', "back\\slash", "é", "", "'", ";", "*"]
    script = 'import json,sys; json.dump(sys.argv[1:], open("/run/manager-words", "w"))'
    argv = ("/usr/bin/python3", "-c", script, *words)
    await manager.run(TransientCommand(ONCE, argv, "Write $words 100% down", PROPERTIES))
    unit = await until(lambda: manager.unit(ONCE), lambda u: u.sub_state == "exited")
    assert (unit.active_state, unit.result) == ("active", "success")
    assert json.loads(ring.read("/run/manager-words")) == words
    shown = ring.show(ONCE)
    assert shown["Slice"] == "manager-test.slice"
    assert (shown["TimeoutStartUSec"], shown["TimeoutStopUSec"]) == ("infinity", "1s")
    assert (shown["SendSIGKILL"], shown["KillMode"], shown["SyslogIdentifier"]) == (
        "no",
        "process",
        "manager-test",
    )


async def test_a_transient_command_that_fails_leaves_its_status_and_makes_room_for_the_next(
    manager: ServiceManager,
):
    for status in (19, 7):
        await manager.run(TransientCommand(ONCE, ("/bin/sh", "-c", f"exit {status}"), "Fail", PROPERTIES))
        unit = await until(lambda: manager.unit(ONCE), lambda u: u.active_state == "failed")
        assert (unit.result, unit.exit_status) == ("exit-code", status)
    await manager.run(TransientCommand(ONCE, ("/bin/true",), "Succeed", PROPERTIES))
    await until(lambda: manager.unit(ONCE), lambda u: u.sub_state == "exited")
    await manager.run(TransientCommand(ONCE, ("/bin/sleep", "1000"), "Run", PROPERTIES))
    assert (await manager.unit(ONCE)).active_state == "activating"
    with pytest.raises(OSError, match="still runs") as raised:
        await manager.run(TransientCommand(ONCE, ("/bin/true",), "Another", PROPERTIES))
    assert raised.value.errno == errno.EBUSY


async def test_a_unit_that_dies_and_a_reload_are_hints_and_reading_is_none(ring: BootedSystemd):
    ring.put(f"/etc/systemd/system/{UNIT}", SERVICE)
    ring.do("systemctl", "daemon-reload")
    ring.do("systemctl", "start", UNIT)
    manager = BusManager(root_of(ring))
    unit = await until(lambda: manager.unit(UNIT), lambda u: len(u.pids) == 2)
    try:
        async with (
            aclosing(manager.watch(lambda: [UNIT, "no-such.service"])) as hints,
            asyncio.timeout(PATIENCE),
        ):
            await anext(hints)  # they are new
            waiting = asyncio.ensure_future(anext(hints))
            for _ in range(5):
                await manager.unit(UNIT)
                await manager.unit("no-such.service")
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await manager.kill(UNIT)
            await waiting
            await until(lambda: manager.unit(UNIT), lambda u: u.active_state == "failed")
            assert (await manager.unit(UNIT)).main_pid != unit.main_pid
    finally:
        await manager.close()
        ring.run(["systemctl", "reset-failed", UNIT])
        ring.do("rm", f"/etc/systemd/system/{UNIT}")
        ring.do("systemctl", "daemon-reload")


async def test_a_systemd_that_is_executed_anew_ends_the_watch_and_the_next_one_hears_again(
    ring: BootedSystemd,
):
    manager = BusManager(root_of(ring))
    try:
        async with aclosing(manager.watch(lambda: [UNIT])) as hints, asyncio.timeout(PATIENCE):
            await anext(hints)
            ring.do("systemctl", "daemon-reexec")
            with pytest.raises(ConnectionError):
                while True:
                    await anext(hints)
        async with aclosing(manager.watch(lambda: [UNIT])) as hints, asyncio.timeout(PATIENCE):
            await anext(hints)
            ring.do("systemctl", "daemon-reload")
            await anext(hints)
    finally:
        await manager.close()

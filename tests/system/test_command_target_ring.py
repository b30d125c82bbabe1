"""The target adapter in front of a real systemd: the ring is entered as a container is, by an argv prefix."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from agent.core.fact import Known
from agent.core.observation import Unit
from agent.host.command_target import CommandTarget
from agent.host.target_batch import Batch
from agent.host.target_names import BY_PID_1
from tests.system.booted_systemd import PATH, BootedSystemd

pytestmark = pytest.mark.system
UNIT = "target-test.service"
UNITS = "gpu-host-agent-enters-*"
ALIAS = "target-alias.service"
SECRET = " a\"b\\c$HOME `id` 'd' # é=%n "
SERVICE = f"""[Service]
Type=exec
Environment="NASTY=line \\"quoted\\" $ é"
EnvironmentFile=-/run/target-test.env
ExecStart=/bin/sh -c 'echo up; sleep 1000 & exec sleep 1001'
[Install]
Alias={ALIAS}
"""


def entering(ring: BootedSystemd) -> tuple[str, ...]:
    namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
    return ("nsenter", f"--target={ring.pid}", *namespaces, "--", "env", "-i", f"PATH={PATH}")


@pytest.fixture(params=["directly", "by PID 1"])
def target(ring: BootedSystemd, request: pytest.FixtureRequest) -> Iterator[CommandTarget]:
    """Also as the agent enters containers: the ring's PID 1 starts what enters."""
    ring.put(f"/etc/systemd/system/{UNIT}", SERVICE)
    ring.do("systemctl", "daemon-reload")
    ring.do("systemctl", "enable", UNIT)
    yield CommandTarget("lxc:1", (*entering(ring), *(BY_PID_1 if request.param == "by PID 1" else ())))
    ring.run(["systemctl", "disable", "--now", UNIT])
    ring.run(["systemctl", "reset-failed", UNIT])
    ring.do(
        "rm", "-rf", f"/etc/systemd/system/{UNIT}", f"/etc/systemd/system/{UNIT}.d", "/run/target-test.env"
    )
    ring.do("systemctl", "daemon-reload")


async def until(read: Callable[[], Awaitable[Unit]], fits: Callable[[Unit], bool]) -> Unit:
    end = time.monotonic() + 20
    while not fits(unit := await read()):
        assert time.monotonic() < end, unit
        await asyncio.sleep(0.1)
    return unit


async def test_a_unit_starts_runs_as_it_was_told_and_stops(
    ring: BootedSystemd, target: CommandTarget
) -> None:
    ring.put("/run/target-secret", f"{SECRET}\n", 0o600)
    await target.install_secrets("/run/target-test.env", {"TOKEN": "/run/target-secret"})
    await target.start_unit(ALIAS)
    unit = await until(lambda: target.unit(ALIAS), lambda u: u.active_state == "active" and len(u.pids) == 2)
    assert (unit.name, unit.load_state, unit.sub_state) == (UNIT, "loaded", "running")
    assert unit.main_pid in unit.pids
    process = await target.process(unit.main_pid)
    assert process is not None
    assert process.argv == ("sleep", "1001")
    assert process.env["TOKEN"] == SECRET
    assert process.env["NASTY"] == 'line "quoted" $ é'
    await target.start_unit(UNIT)  # once more does no harm
    assert (await target.unit(UNIT)).main_pid == unit.main_pid
    await target.stop_unit(UNIT)
    stopped = await until(lambda: target.unit(UNIT), lambda u: u.active_state in {"inactive", "failed"})
    assert (stopped.main_pid, stopped.pids) == (0, ())
    assert await target.process(unit.main_pid) is None
    assert "up" in await target.unit_log(UNIT, 50)


async def test_every_process_is_killed_and_a_failure_can_be_forgotten(target: CommandTarget) -> None:
    await target.start_unit(UNIT)
    unit = await until(lambda: target.unit(UNIT), lambda u: len(u.pids) == 2)
    await target.kill_unit(UNIT)
    failed = await until(lambda: target.unit(UNIT), lambda u: u.active_state == "failed")
    assert (failed.result, failed.exit_status, failed.pids) == ("signal", 9, ())
    assert [await target.process(pid) for pid in unit.pids] == [None, None]
    await target.kill_unit(UNIT)
    await target.reset_failed(UNIT)
    await target.reset_failed(UNIT)
    await target.kill_unit(UNIT)
    assert (await target.unit(UNIT)).active_state == "inactive"


async def test_a_unit_that_is_not_there_is_not_found_and_cannot_be_started(target: CommandTarget) -> None:
    unit = await target.unit("no-such-unit.service")
    assert (unit.load_state, unit.active_state, unit.main_pid) == ("not-found", "inactive", 0)
    for verb in (target.start_unit, target.stop_unit):
        with pytest.raises(OSError, match=r"no-such-unit\.service"):
            await verb("no-such-unit.service")
    await target.kill_unit("no-such-unit.service")
    await target.reset_failed("no-such-unit.service")


async def test_a_changed_unit_file_needs_a_reload_until_there_was_one(target: CommandTarget) -> None:
    """While it is loaded, that is: systemd reads the files of a unit that nothing holds in memory anew by itself."""
    await target.write_file(f"/etc/systemd/system/{UNIT}.d/50-test.conf", "[Service]\nEnvironment=A=0\n")
    await target.daemon_reload()
    await target.start_unit(UNIT)
    assert not (await until(lambda: target.unit(UNIT), lambda u: u.active_state == "active")).needs_reload
    await target.write_file(f"/etc/systemd/system/{UNIT}.d/50-test.conf", "[Service]\nEnvironment=A=1\n")
    assert (await target.unit(UNIT)).needs_reload
    await target.daemon_reload()
    assert not (await target.unit(UNIT)).needs_reload


async def test_the_first_drop_in_of_a_loaded_unit_needs_a_reload(target: CommandTarget) -> None:
    """systemd 252 says NeedDaemonReload=no of it, and goes on without it."""
    await target.start_unit(UNIT)
    await until(lambda: target.unit(UNIT), lambda u: u.active_state == "active")
    await target.write_file(f"/etc/systemd/system/{UNIT}.d/50-test.conf", "[Service]\nEnvironment=A=1\n")
    assert (await target.unit(UNIT)).needs_reload
    await target.daemon_reload()
    assert not (await target.unit(UNIT)).needs_reload


async def test_the_ring_is_reached_and_has_no_gpu_and_no_address(target: CommandTarget) -> None:
    facts = await target.facts()
    assert facts.reachable == Known(value=True)
    assert facts.device_nodes == Known(())
    assert isinstance(facts.shm_bytes, Known)
    assert facts.shm_bytes.value > 1 << 20
    assert target.endpoint(30000) == "http://no-address.invalid:30000"


async def test_entering_by_pid_1_leaves_no_unit_and_no_line_in_the_journal(
    ring: BootedSystemd,
) -> None:
    target = CommandTarget("lxc:1", (*entering(ring), *BY_PID_1))
    ring.do("journalctl", "--sync")
    before = ring.do("journalctl", "--no-pager", "--output=cat")
    assert await target.exists("/etc")
    ring.do("journalctl", "--sync")
    assert ring.do("journalctl", "--no-pager", "--output=cat").removeprefix(before).strip() == ""
    assert ring.do("systemctl", "list-units", "--all", "--no-legend", UNITS).strip() == ""


async def test_a_write_that_was_given_up_does_not_come_late(ring: BootedSystemd) -> None:
    """The command that waited is dead at once; what it waited for is PID 1's."""
    batch = Batch("lxc:1", (*entering(ring), *BY_PID_1))
    with pytest.raises(TimeoutError, match="did not answer within 2 s"):
        await batch.tell("sh", "-c", "touch /run/begun; sleep 6; touch /run/late", deadline=2.0)
    ring.do("test", "-e", "/run/begun")
    end = time.monotonic() + 20
    while ring.do("systemctl", "list-units", "--all", "--no-legend", UNITS).strip():
        assert time.monotonic() < end, "it still runs"
        await asyncio.sleep(0.1)
    await asyncio.sleep(6)
    assert ring.run(["test", "-e", "/run/late"])[0] == 1

"""BusManager over a real D-Bus to a fake systemd (fake_systemd.py)."""

import asyncio
import errno
import socket as listener
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from dbus_fast import Variant

from agent.host import bus_connection
from agent.host.manager import TransientCommand
from agent.host.systemd_bus import BusManager
from agent.host.transient import FOREVER
from tests.host.fake_systemd import SYSTEMD, BusDaemon, BusRefusalError, FakeSystemd, FakeUnit, fake_systemd

PATIENCE = 20.0  # seconds; nothing here waits for its end unless it fails
COMMAND = TransientCommand(
    "once.service", ("/bin/echo", "a $HOME"), "Say it", {"TimeoutStartSec": "infinity"}
)


@pytest.fixture
async def wire() -> AsyncIterator[tuple[BusDaemon, FakeSystemd]]:
    async with fake_systemd() as made:
        yield made


@pytest.fixture
async def systemd(wire: tuple[BusDaemon, FakeSystemd]) -> FakeSystemd:
    return wire[1]


@pytest.fixture
async def manager(wire: tuple[BusDaemon, FakeSystemd]) -> AsyncIterator[BusManager]:
    made = BusManager(wire[0].root)
    yield made
    await made.close()


async def test_a_unit_is_read_with_its_processes(wire, manager: BusManager):
    daemon, systemd = wire
    group = daemon.root / "sys/fs/cgroup/system.slice/a.service"
    group.mkdir(parents=True)
    (daemon.root / "sys/fs/cgroup/cgroup.controllers").write_text("pids\n")
    (group / "cgroup.procs").write_text("41\n42\n")
    systemd.units["a.service"] = FakeUnit(
        active="active",
        sub="running",
        service={
            "MainPID": Variant("u", 41),
            "Result": Variant("s", "success"),
            "ExecMainStatus": Variant("i", 3),
            "NRestarts": Variant("u", 2),
            "ControlGroup": Variant("s", "/system.slice/a.service"),
        },
    )
    unit = await manager.unit("a.service")
    assert (unit.name, unit.load_state, unit.active_state, unit.sub_state) == (
        "a.service",
        "loaded",
        "active",
        "running",
    )
    assert (unit.main_pid, unit.result, unit.exit_status, unit.restarts) == (41, "success", 3, 2)
    assert unit.pids == (41, 42)
    assert not unit.needs_reload


async def test_an_alias_is_read_as_the_unit_that_it_names(systemd: FakeSystemd, manager: BusManager):
    systemd.units["real@1.service"] = FakeUnit(active="active", sub="running")
    systemd.aliases["alias.service"] = "real@1.service"
    assert (await manager.unit("alias.service")).name == "real@1.service"


async def test_a_unit_that_does_not_exist_is_not_found(systemd: FakeSystemd, manager: BusManager):
    assert (await manager.unit("none.service")).load_state == "not-found"
    systemd.refuse["LoadUnit"] = BusRefusalError(f"{SYSTEMD}.NoSuchUnit", "no")
    assert (await manager.unit("none.service")).load_state == "not-found"


async def test_a_unit_whose_files_changed_needs_a_reload(systemd: FakeSystemd, manager: BusManager):
    systemd.units["stale.service"] = FakeUnit()
    assert (await manager.unit("stale.service")).needs_reload


async def test_jobs_are_queued_and_the_unit_follows(systemd: FakeSystemd, manager: BusManager):
    systemd.units["a.service"] = FakeUnit()
    await manager.start("a.service")
    assert (await manager.unit("a.service")).active_state == "active"
    await manager.kill("a.service")
    await manager.stop("a.service")
    await manager.reload()
    assert [c for c in systemd.calls if c[0] != "LoadUnit"] == [
        ("StartUnit", ["a.service", "replace"]),
        ("KillUnit", ["a.service", "all", 9]),
        ("StopUnit", ["a.service", "replace"]),
        ("Reload", []),
    ]


async def test_what_there_is_nothing_to_do_for_is_no_error(manager: BusManager):
    await manager.kill("none.service")
    await manager.reset_failed("none.service")


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        (f"{SYSTEMD}.NoSuchUnit", FileNotFoundError, errno.ENOENT),
        ("org.freedesktop.DBus.Error.AccessDenied", PermissionError, errno.EACCES),
        ("org.freedesktop.DBus.Error.InteractiveAuthorizationRequired", PermissionError, errno.EACCES),
        ("org.freedesktop.DBus.Error.NoReply", TimeoutError, errno.ETIMEDOUT),
        ("System.Error.EBUSY", OSError, errno.EBUSY),
        ("org.example.Unheard", OSError, errno.EIO),
    ],
)
async def test_errors_of_systemd_are_os_errors_with_its_words(
    systemd: FakeSystemd, manager: BusManager, name: str, kind: type[OSError], number: int
):
    systemd.refuse["StartUnit"] = BusRefusalError(name, "why it was not done")
    with pytest.raises(OSError, match="StartUnit: why it was not done") as raised:
        await manager.start("a.service")
    assert isinstance(raised.value, kind)
    assert raised.value.errno == number


async def test_an_answer_that_does_not_come_is_a_timeout(systemd: FakeSystemd, wire):
    connection = bus_connection.BusConnection(wire[0].root)
    systemd.silent.add("Subscribe")
    with pytest.raises(TimeoutError, match="did not answer"):
        await connection.call("/org/freedesktop/systemd1", f"{SYSTEMD}.Manager", "Subscribe", deadline=0.2)
    await connection.close()


async def test_without_a_bus_the_call_fails_and_with_one_the_same_manager_works(wire, manager: BusManager):
    daemon, systemd = wire
    assert (await manager.unit("a.service")).load_state == "not-found"
    await systemd.disconnect()
    await daemon.stop()
    with pytest.raises(OSError):
        await manager.unit("a.service")
    await daemon.start()
    await systemd.connect(daemon.address)
    systemd.units["a.service"] = FakeUnit()
    assert (await manager.unit("a.service")).load_state == "loaded"


@pytest.mark.parametrize("socket", ["is missing", "is no socket", "answers nobody"])
async def test_a_missing_bus_is_not_a_missing_unit(tmp_path, socket: str):
    """Whoever is told that a unit does not exist may go on as if its processes were gone."""
    path = tmp_path / "run/dbus/system_bus_socket"
    path.parent.mkdir(parents=True)
    if socket != "is missing":
        path.write_text("")
    if socket == "answers nobody":
        path.unlink()
        with listener.socket(listener.AF_UNIX) as made:
            made.bind(str(path))
    manager = BusManager(tmp_path)
    for call in (manager.unit, manager.kill, manager.reset_failed, manager.start):
        with pytest.raises(ConnectionError, match="no D-Bus daemon answers") as raised:
            await call("a.service")
        assert raised.value.errno == errno.ENOTCONN
    with pytest.raises(ConnectionError):
        await manager.run(COMMAND)


async def test_no_other_missing_file_is_taken_for_a_missing_unit(systemd: FakeSystemd, manager: BusManager):
    missing = BusRefusalError("org.freedesktop.DBus.Error.FileNotFound", "some file")
    systemd.refuse |= {"LoadUnit": missing, "KillUnit": missing, "ResetFailedUnit": missing}
    for call in (manager.unit, manager.kill, manager.reset_failed):
        with pytest.raises(FileNotFoundError, match="some file"):
            await call("a.service")


# -- transient commands -----------------------------------------------------------------------------------------------


async def test_a_command_is_run_outside_and_has_begun_when_run_returns(
    systemd: FakeSystemd, manager: BusManager
):
    await manager.run(COMMAND)
    made = systemd.units["once.service"]
    assert made.active == "activating"
    assert made.transient["ExecStart"].value == [("/bin/echo", ["/bin/echo", "a $$HOME"], False)]
    assert made.transient["TimeoutStartUSec"].value == FOREVER
    assert made.transient["Type"].value == "oneshot"
    assert made.transient["RemainAfterExit"].value is True
    assert made.transient["Description"].value == "Say it"


async def test_a_command_that_still_runs_is_not_started_again(systemd: FakeSystemd, manager: BusManager):
    await manager.run(COMMAND)
    with pytest.raises(OSError, match="still runs") as raised:
        await manager.run(COMMAND)
    assert raised.value.errno == errno.EBUSY
    assert [name for name, _ in systemd.calls].count("StartTransientUnit") == 1


async def test_a_queued_command_of_which_systemd_then_says_nothing_may_have_started(
    systemd: FakeSystemd, manager: BusManager, monkeypatch: pytest.MonkeyPatch
):
    def then_fall_silent(*_words: object) -> tuple[str, list[object]]:
        systemd.refuse["GetUnit"] = BusRefusalError("org.freedesktop.DBus.Error.AccessDenied", "no")
        return "o", ["/job/3"]

    monkeypatch.setattr(systemd, "_StartTransientUnit", then_fall_silent)
    with pytest.raises(TimeoutError, match="nothing tells whether it started"):
        await manager.run(COMMAND)


@pytest.mark.parametrize("end", [("active", "exited"), ("failed", "failed")])
async def test_one_that_has_ended_makes_room(systemd: FakeSystemd, manager: BusManager, end: tuple[str, str]):
    await manager.run(COMMAND)
    systemd.become("once.service", *end)
    await manager.run(COMMAND)
    assert systemd.units["once.service"].active == "activating"


async def test_a_setting_that_is_not_known_is_refused_before_anything_is_asked(
    systemd: FakeSystemd, manager: BusManager
):
    for properties in ({"ExecStop": "/bin/true"}, {"SendSIGKILL": "perhaps"}, {"TimeoutStopSec": "soon"}):
        with pytest.raises(ValueError, match=r"once\.service"):
            await manager.run(TransientCommand("once.service", ("/bin/true",), "x", properties))
    assert systemd.calls == []


# -- signals ----------------------------------------------------------------------------------------------------------


async def test_a_changed_state_is_told_and_a_repeated_one_is_not(systemd: FakeSystemd, manager: BusManager):
    systemd.units["a.service"] = FakeUnit()
    systemd.units["other.service"] = FakeUnit()
    async with aclosing(manager.watch(lambda: ["a.service"])) as hints:
        await _next(hints)  # it is new
        systemd.tell("a.service", {"ActiveState": Variant("s", "inactive")})
        systemd.tell("a.service", {"StateChangeTimestamp": Variant("t", 7)})
        systemd.become("other.service", "failed", "failed")
        systemd.reloading(begins=True)
        waiting = asyncio.ensure_future(_next(hints))
        await manager.unit("a.service")  # an answer after these signals: they have been heard by then
        await asyncio.sleep(0.2)
        assert not waiting.done()
        systemd.become("a.service", "active", "running")
        await waiting


async def test_a_new_main_process_is_told_although_the_state_is_the_same(
    systemd: FakeSystemd, manager: BusManager
):
    systemd.units["a.service"] = FakeUnit("loaded", "active", "running", {"MainPID": Variant("u", 5)})
    async with aclosing(manager.watch(lambda: ["a.service"])) as hints:
        await _next(hints)
        systemd.tell("a.service", {"MainPID": Variant("u", 6)})
        await _next(hints)


async def test_a_reload_of_systemd_is_told(systemd: FakeSystemd, manager: BusManager):
    async with aclosing(manager.watch(lambda: ["a.service"])) as hints:
        await _next(hints)
        systemd.reloading(begins=False)
        await _next(hints)


async def test_the_watched_units_follow_the_spec(systemd: FakeSystemd, manager: BusManager):
    systemd.units |= {"a.service": FakeUnit(), "b.service": FakeUnit()}
    units = ["a.service"]
    async with aclosing(manager.watch(lambda: units)) as hints:
        await _next(hints)
        units[:] = ["b.service"]
        await _next(hints)  # b is new
        systemd.become("a.service", "active", "running")
        systemd.become("b.service", "failed", "failed")
        await _next(hints)


async def test_an_alias_is_watched_where_it_leads(systemd: FakeSystemd, manager: BusManager):
    systemd.units["real.service"] = FakeUnit()
    systemd.aliases["alias.service"] = "real.service"
    async with aclosing(manager.watch(lambda: ["alias.service", "real.service"])) as hints:
        await _next(hints)
        systemd.become("real.service", "active", "running")
        await _next(hints)


@pytest.mark.parametrize("refused", ["LoadUnit", "GetAll"])
async def test_a_unit_that_systemd_refuses_does_not_end_the_watch_of_the_others(
    systemd: FakeSystemd, manager: BusManager, refused: str
):
    systemd.units |= {"a.service": FakeUnit(), "z.service": FakeUnit()}
    systemd.refuse_once[refused] = BusRefusalError("org.freedesktop.DBus.Error.InvalidArgs", "no such name")
    async with aclosing(manager.watch(lambda: ["a.service", "z.service"])) as hints:
        await _next(hints)  # z is new
        systemd.become("z.service", "active", "running")
        await _next(hints)
        systemd.reloading(begins=False)
        await _next(hints)  # and a, which is not refused any more
        systemd.become("a.service", "active", "running")
        await _next(hints)


@pytest.mark.parametrize("what", ["the daemon ends", "systemd is executed anew"])
async def test_a_watch_that_hears_nothing_any_more_ends_with_an_error(wire, manager: BusManager, what: str):
    daemon, systemd = wire
    async with aclosing(manager.watch(lambda: ["a.service"])) as hints:
        await _next(hints)
        await systemd.disconnect()
        if what == "the daemon ends":
            await daemon.stop()
        with pytest.raises(OSError):
            await _next(hints)


async def _next(hints) -> None:
    async with asyncio.timeout(PATIENCE):
        await anext(hints)

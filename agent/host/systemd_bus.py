"""systemd over D-Bus (org.freedesktop.systemd1, man 5): no process is started to ask or to act."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

from agent.core.observation import Unit
from agent.host.bus_connection import SOCKET, SYSTEMD, BusConnection, NoSuchUnitError
from agent.host.manager import ServiceManager, TransientCommand
from agent.host.systemctl import SystemctlManager
from agent.host.systemctl_show import cgroup_pids, unread_drop_ins
from agent.host.transient import bus_properties
from agent.host.unit_watch import watch_units

MANAGER_PATH = "/org/freedesktop/systemd1"
MANAGER = f"{SYSTEMD}.Manager"
UNIT = f"{SYSTEMD}.Unit"
SERVICE = f"{SYSTEMD}.Service"
PROPERTIES = "org.freedesktop.DBus.Properties"
# The answer comes when PID 1 has read every unit anew and run every generator.
RELOAD_DEADLINE = 60.0
_POLL = 0.02
_SETTLE = 5.0  # seconds for an ended unit to be cleared away, and for a queued job to begin
_PROBE = 1.0


class BusManager:
    """``ServiceManager`` over the system bus whose socket is under ``root``. Connects at the first call."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._connection = BusConnection(root)

    async def unit(self, name: str) -> Unit:
        try:
            # LoadUnit, not GetUnit: a unit that is not in memory is read, and an alias leads to the unit it names.
            (path,) = await self._manager("LoadUnit", "s", [name])
            general, service = await asyncio.gather(
                self._properties(path, UNIT),
                self._properties(path, SERVICE) if name.endswith(".service") else _nothing(),
            )
        except NoSuchUnitError:
            return Unit(name, load_state="not-found", active_state="inactive", sub_state="dead")
        own = str(general.get("Id", name))
        unread = unread_drop_ins(self._root, (name, own), general.get("DropInPaths", ()))
        return Unit(
            name=own,
            load_state=str(general["LoadState"]),
            active_state=str(general["ActiveState"]),
            sub_state=str(general["SubState"]),
            main_pid=int(service.get("MainPID", 0)),
            result=str(service.get("Result", "")),
            exit_status=int(service.get("ExecMainStatus", 0)),
            restarts=int(service.get("NRestarts", 0)),
            pids=cgroup_pids(self._root, str(service.get("ControlGroup", ""))),
            needs_reload=bool(general.get("NeedDaemonReload", False)) or unread,
        )

    async def reload(self) -> None:
        await self._connection.call(MANAGER_PATH, MANAGER, "Reload", deadline=RELOAD_DEADLINE)

    async def start(self, name: str) -> None:
        await self._manager("StartUnit", "ss", [name, "replace"])

    async def stop(self, name: str) -> None:
        await self._manager("StopUnit", "ss", [name, "replace"])

    async def kill(self, name: str) -> None:
        with contextlib.suppress(NoSuchUnitError, ProcessLookupError):
            await self._manager("KillUnit", "ssi", [name, "all", 9])

    async def reset_failed(self, name: str) -> None:
        with contextlib.suppress(NoSuchUnitError):
            await self._manager("ResetFailedUnit", "s", [name])

    async def run(self, command: TransientCommand) -> None:
        properties = bus_properties(command)
        await self._clear(command.unit)
        # mode "fail": a job that is queued for the same name is never replaced.
        await self._manager("StartTransientUnit", "ssa(sv)a(sa(sv))", [command.unit, "fail", properties, []])
        await self._begun(command.unit)

    async def close(self) -> None:
        """Let go of the connection. A later call makes a new one."""
        await self._connection.close()

    def watch(self, units: Callable[[], Iterable[str]]) -> AsyncGenerator[None, None]:
        """Yields when one of ``units`` changed its state, or systemd has read its unit files anew. ``units`` is asked
        again every few seconds, and a unit new in it counts as changed. Raises OSError when the connection is lost.
        """
        return watch_units(BusConnection(self._root), units)

    async def _clear(self, name: str) -> None:
        """An ended unit of that name goes; without one there is nothing to do. Raises OSError (EBUSY) while it runs."""
        state = await self._loaded_state(name)
        if state is None:
            return
        if state[0] == "failed":
            await self.reset_failed(name)
        elif state == ("active", "exited"):
            with contextlib.suppress(NoSuchUnitError):
                await self.stop(name)
        elif state[0] != "inactive":
            raise OSError(errno.EBUSY, f"{name} still runs ({state[0]}, {state[1]}); another was not started")
        await self._until(lambda found: found is None, name)

    async def _begun(self, name: str) -> None:
        """The job was queued; the unit is inactive until systemd takes it up."""
        try:
            begun = await self._until(lambda found: found is not None and found[0] != "inactive", name)
        except OSError as error:
            raise TimeoutError(f"{name} was queued, and nothing tells whether it started: {error}") from error
        if not begun:
            raise TimeoutError(f"{name} was queued and did not start within {_SETTLE:g} s")

    async def _until(self, holds: Callable[[tuple[str, str] | None], bool], name: str) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + _SETTLE
        while not holds(await self._loaded_state(name)):
            if loop.time() > end:
                return False
            await asyncio.sleep(_POLL)
        return True

    async def _loaded_state(self, name: str) -> tuple[str, str] | None:
        """Active and sub state of a unit in memory, without loading it; None where it is not."""
        try:
            (path,) = await self._manager("GetUnit", "s", [name])
            found = await self._properties(path, UNIT)
        except NoSuchUnitError:
            return None
        return None if found["LoadState"] == "not-found" else (found["ActiveState"], found["SubState"])

    async def _properties(self, path: str, interface: str) -> dict[str, Any]:
        (found,) = await self._connection.call(path, PROPERTIES, "GetAll", "s", [interface])
        return {name: variant.value for name, variant in found.items()}

    async def _manager(self, member: str, signature: str, body: list[Any]) -> list[Any]:
        return await self._connection.call(MANAGER_PATH, MANAGER, member, signature, body)


async def _nothing() -> dict[str, Any]:
    return {}


def local_manager(root: Path = Path("/")) -> ServiceManager:
    """systemd of the machine whose files are at ``root``: by D-Bus where its socket answers, else by systemctl.

    systemctl knows only the machine that it runs on, so another root has D-Bus or nothing.
    """
    if root == Path("/") and not _answers(root / SOCKET):
        return SystemctlManager()
    return BusManager(root)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True

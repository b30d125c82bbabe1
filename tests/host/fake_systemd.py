"""A private D-Bus daemon, and behind it a fake systemd: a real wire and real messages, with a peer that we wrote.

What the real systemd answers is not proved here. The fake says what its interface description (man 5
org.freedesktop.systemd1) says, and keeps no more state than the tests look at.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbus_fast import Message, MessageType, Variant
from dbus_fast.aio import MessageBus

SYSTEMD = "org.freedesktop.systemd1"
MANAGER_PATH = "/org/freedesktop/systemd1"
PROPERTIES = "org.freedesktop.DBus.Properties"
_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>custom</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/><allow user="*"/>
  </policy>
</busconfig>
"""


@dataclass
class BusDaemon:
    """A dbus-daemon of its own whose socket is where the system bus has it, under ``root``."""

    root: Path
    process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"unix:path={self.root}/run/dbus/system_bus_socket"

    async def start(self) -> None:
        socket = self.root / "run/dbus/system_bus_socket"
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        config = self.root / "bus.conf"
        config.write_text(_CONFIG.format(socket=socket))
        self.process = await asyncio.create_subprocess_exec(
            "dbus-daemon",
            f"--config-file={config}",
            "--nofork",
            "--print-address=1",
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert await self.process.stdout.readline()  # it listens

    async def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.communicate()
            self.process = None


@dataclass
class FakeUnit:
    load: str = "loaded"
    active: str = "inactive"
    sub: str = "dead"
    service: dict[str, Variant] = field(default_factory=dict)
    transient: dict[str, Variant] = field(default_factory=dict)


def label(name: str) -> str:
    """The object path's last part: what is not a letter or digit becomes _ and two hex digits."""
    return "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):02x}" for c in name)


def unit_path(name: str) -> str:
    return f"{MANAGER_PATH}/unit/{label(name)}"


class BusRefusalError(Exception):
    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass
class FakeSystemd:
    units: dict[str, FakeUnit] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, list[Any]]] = field(default_factory=list)  # of the manager's methods
    refuse: dict[str, BusRefusalError] = field(default_factory=dict)  # by method
    refuse_once: dict[str, BusRefusalError] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # methods that are never answered
    subscribed: int = 0
    bus: MessageBus | None = None

    async def connect(self, address: str) -> None:
        self.bus = await MessageBus(bus_address=address).connect()
        self.bus.add_message_handler(self.receive)
        await self.bus.request_name(SYSTEMD)

    async def disconnect(self) -> None:
        if self.bus is not None:
            self.bus.disconnect()
            with contextlib.suppress(Exception):
                await self.bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
            self.bus = None

    def receive(self, message: Message) -> Message | bool | None:
        if message.message_type is not MessageType.METHOD_CALL or message.destination is None:
            return None
        member = message.member or ""
        if member in self.silent:
            return True  # taken, and never answered
        try:
            if member in self.refuse_once:
                raise self.refuse_once.pop(member)
            if member in self.refuse:
                raise self.refuse[member]
            return Message.new_method_return(message, *self._answer(message, member))
        except BusRefusalError as error:
            return Message.new_error(message, error.name, str(error))

    def _answer(self, message: Message, member: str) -> tuple[str, list[Any]]:
        if member == "GetAll":
            return "a{sv}", [self._properties(message.path or "", message.body[0])]
        self.calls.append((member, list(message.body)))
        handler = getattr(self, f"_{member}", None)
        if handler is None:
            raise BusRefusalError("org.freedesktop.DBus.Error.UnknownMethod", member)
        answer: tuple[str, list[Any]] = handler(*message.body)
        return answer

    def _properties(self, path: str, interface: str) -> dict[str, Variant]:
        name = next((n for n in self.units if unit_path(n) == path), "")
        unit = self.units.get(name, FakeUnit(load="not-found"))
        if interface == f"{SYSTEMD}.Service":
            return unit.service
        return {
            "Id": Variant("s", name),
            "LoadState": Variant("s", unit.load),
            "ActiveState": Variant("s", unit.active),
            "SubState": Variant("s", unit.sub),
            "NeedDaemonReload": Variant("b", name == "stale.service"),
        }

    def _loaded(self, name: str) -> str:
        name = self.aliases.get(name, name)
        if name not in self.units:
            raise BusRefusalError(f"{SYSTEMD}.NoSuchUnit", f"Unit {name} not loaded.")
        return name

    def _Subscribe(self) -> tuple[str, list[Any]]:
        self.subscribed += 1
        return "", []

    def _Reload(self) -> tuple[str, list[Any]]:
        return "", []

    def _LoadUnit(self, name: str) -> tuple[str, list[Any]]:
        return "o", [unit_path(self.aliases.get(name, name))]

    def _GetUnit(self, name: str) -> tuple[str, list[Any]]:
        return "o", [unit_path(self._loaded(name))]

    def _StartUnit(self, name: str, mode: str) -> tuple[str, list[Any]]:
        self.become(self._loaded(name), "active", "running")
        return "o", [f"{MANAGER_PATH}/job/1"]

    def _StopUnit(self, name: str, mode: str) -> tuple[str, list[Any]]:
        loaded = self._loaded(name)
        if self.units[loaded].transient:
            del self.units[loaded]  # nothing refers to it any more
        else:
            self.become(loaded, "inactive", "dead")
        return "o", [f"{MANAGER_PATH}/job/2"]

    def _KillUnit(self, name: str, whom: str, signal: int) -> tuple[str, list[Any]]:
        self._loaded(name)
        return "", []

    def _ResetFailedUnit(self, name: str) -> tuple[str, list[Any]]:
        loaded = self._loaded(name)
        if self.units[loaded].transient and self.units[loaded].active == "failed":
            del self.units[loaded]
        return "", []

    def _StartTransientUnit(
        self, name: str, mode: str, properties: list[Any], others: list[Any]
    ) -> tuple[str, list[Any]]:
        if name in self.units:
            raise BusRefusalError(f"{SYSTEMD}.UnitExists", f"Unit {name} was already loaded.")
        self.units[name] = FakeUnit(transient=dict(properties))
        asyncio.get_running_loop().call_later(0.05, self.become, name, "activating", "start")
        return "o", [f"{MANAGER_PATH}/job/3"]

    def become(self, name: str, active: str, sub: str, *, told: bool = True) -> None:
        """The unit's state changes, and everybody who subscribed hears of it."""
        unit = self.units[name]
        unit.active, unit.sub = active, sub
        if told:
            self.tell(name, {"ActiveState": Variant("s", active), "SubState": Variant("s", sub)})

    def tell(self, name: str, changed: dict[str, Variant]) -> None:
        self._signal(
            unit_path(name), PROPERTIES, "PropertiesChanged", "sa{sv}as", [f"{SYSTEMD}.Unit", changed, []]
        )

    def reloading(self, *, begins: bool) -> None:
        self._signal(MANAGER_PATH, f"{SYSTEMD}.Manager", "Reloading", "b", [begins])

    def _signal(self, path: str, interface: str, member: str, signature: str, body: list[Any]) -> None:
        assert self.bus is not None
        self.bus.send(Message.new_signal(path, interface, member, signature, body))


@contextlib.asynccontextmanager
async def fake_systemd() -> AsyncIterator[tuple[BusDaemon, FakeSystemd]]:
    # A socket's path has at most 107 bytes: pytest's own directories are too deep.
    with tempfile.TemporaryDirectory(prefix="bus-") as directory:
        daemon, systemd = BusDaemon(Path(directory)), FakeSystemd()
        await daemon.start()
        try:
            await systemd.connect(daemon.address)
            yield daemon, systemd
        finally:
            await systemd.disconnect()
            await daemon.stop()

"""Units that change their state, as systemd's signals tell it. What only repeats what is known wakes nobody."""

import asyncio
import errno
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dbus_fast import Message, MessageType

from agent.host.bus_connection import SYSTEMD, BusConnection, BusError

_MANAGER_PATH = "/org/freedesktop/systemd1"
_MANAGER = f"{SYSTEMD}.Manager"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_INTERFACES = (f"{SYSTEMD}.Unit", f"{SYSTEMD}.Service")
_TOLD_BY = ("ActiveState", "SubState", "MainPID")
_NOWHERE = ""  # no object's path
_LOOK = 2.0  # seconds until the set of units is asked for again
_RELOADING = (
    f"type='signal',sender='{SYSTEMD}',path='{_MANAGER_PATH}',interface='{_MANAGER}',member='Reloading'"
)
_OWNER = (
    "type='signal',sender='org.freedesktop.DBus',interface='org.freedesktop.DBus',member='NameOwnerChanged',"
    f"arg0='{SYSTEMD}'"
)


@dataclass(slots=True)
class UnitStates:
    """The last state of every watched unit, by object path, and whether anything changed since that was asked."""

    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    changed: bool = False
    reloaded: bool = False
    lost: bool = False

    def learn(self, path: str, properties: dict[str, Any]) -> None:
        known = self.known.get(path)
        if known is None:
            return
        for name in _TOLD_BY:
            if name in properties and known.get(name) != properties[name]:
                known[name] = properties[name]
                self._wake(changed=True)

    def lose(self) -> None:
        self.lost = True
        self._wake(changed=False)

    def receive(self, message: Message) -> None:
        """A handler of messages: signals only, of others nothing is taken."""
        if message.message_type is not MessageType.SIGNAL:
            return
        if message.member == "PropertiesChanged" and message.body and message.body[0] in _INTERFACES:
            self.learn(message.path or "", {name: v.value for name, v in message.body[1].items()})
        elif message.member == "Reloading" and message.body == [False]:
            self.reloaded = True
            self._wake(changed=True)
        elif message.member == "NameOwnerChanged" and message.body and message.body[0] == SYSTEMD:
            self.lose()  # PID 1 was executed anew: it has forgotten who wanted signals

    def _wake(self, *, changed: bool) -> None:
        self.changed = self.changed or changed
        self.woken.set()


async def watch_units(
    connection: BusConnection, units: Callable[[], Iterable[str]]
) -> AsyncGenerator[None, None]:
    """See ``BusManager.watch``. The connection is this watch's own, and closed with it."""
    states = UnitStates()
    watched: dict[str, str] = {}  # name -> object path
    try:
        await _subscribe(connection, states)
        while True:
            _check(states)
            if states.reloaded:
                states.reloaded = False
                watched = await _forget(connection, watched, states)  # an alias may lead elsewhere now
            await _follow(connection, watched, frozenset(units()), states)
            if states.changed:
                states.changed = False
                yield
            await _wait(states)
    finally:
        await connection.close()


def _check(states: UnitStates) -> None:
    if states.lost:
        raise ConnectionResetError("systemd or the D-Bus daemon was started anew: its signals are lost")


async def _wait(states: UnitStates) -> None:
    _check(states)
    try:
        async with asyncio.timeout(_LOOK):
            await states.woken.wait()
    except TimeoutError:
        return
    states.woken.clear()


async def _subscribe(connection: BusConnection, states: UnitStates) -> None:
    bus = await connection.open()
    bus.add_message_handler(states.receive)
    connection.when_lost(states.lose)
    await connection.add_match(_OWNER)
    await connection.add_match(_RELOADING)
    try:
        await connection.call(_MANAGER_PATH, _MANAGER, "Subscribe")
    except BusError as error:
        if error.name != f"{SYSTEMD}.AlreadySubscribed":
            raise


async def _follow(
    connection: BusConnection, watched: dict[str, str], wanted: frozenset[str], states: UnitStates
) -> None:
    """Make ``watched`` what is wanted. A unit new in it counts as changed: its state was not told so far."""
    for name in watched.keys() - wanted:
        await _unwatch(connection, watched.pop(name), states)
    for name in sorted(wanted - watched.keys()):
        try:
            watched[name] = await _watch(connection, name, states)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                raise
            # systemd refuses this name, which whoever reads the unit is told. The others are watched all the same;
            # it is asked again when systemd has read its files anew.
            watched[name] = _NOWHERE


async def _watch(connection: BusConnection, name: str, states: UnitStates) -> str:
    """The object path of the unit, whose signals are heard from now on, and whose state is learned."""
    (found_path,) = await connection.call(_MANAGER_PATH, _MANAGER, "LoadUnit", "s", [name])
    path = str(found_path)
    if path in states.known:
        return path  # an alias of a unit that is watched already
    states.known[path] = {}
    try:
        await connection.add_match(_rule(path))
        for interface in _INTERFACES if name.endswith(".service") else _INTERFACES[:1]:
            (found,) = await connection.call(path, _PROPERTIES, "GetAll", "s", [interface])
            states.learn(path, {key: variant.value for key, variant in found.items()})
    except OSError:
        states.known.pop(path)  # whoever names it next begins anew; a match that is there twice does no harm
        raise
    return path


async def _forget(connection: BusConnection, watched: dict[str, str], states: UnitStates) -> dict[str, str]:
    for path in set(watched.values()):
        await _unwatch(connection, path, states)
    return {}


async def _unwatch(connection: BusConnection, path: str, states: UnitStates) -> None:
    if states.known.pop(path, None) is not None:
        await connection.remove_match(_rule(path))


def _rule(path: str) -> str:
    return (
        f"type='signal',sender='{SYSTEMD}',path='{path}',interface='{_PROPERTIES}',member='PropertiesChanged'"
    )

"""One connection to a D-Bus daemon: made when it is needed, made again after it was lost, every call with a deadline."""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dbus_fast import Message, MessageType
from dbus_fast.aio import MessageBus

SOCKET = Path("run/dbus/system_bus_socket")
SYSTEMD = "org.freedesktop.systemd1"
DEADLINE = 10.0  # seconds for one answer
_LOST = "the connection to the D-Bus daemon was lost"
_BUS = "org.freedesktop.DBus"
_ERRNO = {
    f"{SYSTEMD}.NoSuchUnit": errno.ENOENT,
    f"{SYSTEMD}.NoSuchProcess": errno.ESRCH,
    f"{SYSTEMD}.UnitExists": errno.EEXIST,
    f"{SYSTEMD}.UnitMasked": errno.EPERM,
    f"{SYSTEMD}.LoadFailed": errno.EINVAL,
    f"{SYSTEMD}.BadUnitSetting": errno.EINVAL,
    f"{_BUS}.Error.FileNotFound": errno.ENOENT,
    f"{_BUS}.Error.AccessDenied": errno.EACCES,
    f"{_BUS}.Error.InteractiveAuthorizationRequired": errno.EACCES,
    f"{_BUS}.Error.InvalidArgs": errno.EINVAL,
    f"{_BUS}.Error.NoReply": errno.ETIMEDOUT,
    f"{_BUS}.Error.Timeout": errno.ETIMEDOUT,
    f"{_BUS}.Error.TimedOut": errno.ETIMEDOUT,
    f"{_BUS}.Error.Disconnected": errno.ECONNRESET,
    f"{_BUS}.Error.ServiceUnknown": errno.ENOTCONN,
    f"{_BUS}.Error.NameHasNoOwner": errno.ENOTCONN,
}


class BusError(OSError):
    """What the other side answered, by its D-Bus name too: errno has no word for some of it."""

    def __init__(self, number: int, message: str, name: str) -> None:
        super().__init__(number, message)
        self.name = name


class NoSuchUnitError(FileNotFoundError):
    """systemd's own word that it has no unit of that name. No other missing file may be taken for it."""


class BusConnection:
    """The system bus whose socket is under ``root``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._address = "unix:path=" + quote(str(root / SOCKET), safe="/-_.")
        self._bus: MessageBus | None = None
        self._ended: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str = "",
        body: Sequence[Any] = (),
        *,
        destination: str = SYSTEMD,
        deadline: float = DEADLINE,
    ) -> list[Any]:
        """The answer's body. Raises OSError: ConnectionError where no bus answers, TimeoutError, PermissionError, and
        NoSuchUnitError where systemd says that.
        """
        message = Message(
            destination=destination, path=path, interface=interface, member=member,
            signature=signature, body=list(body),
        )  # fmt: skip
        try:
            async with asyncio.timeout(deadline):
                bus = await self.open()
                reply = await bus.call(message)
        except TimeoutError:
            raise TimeoutError(f"{member}: systemd did not answer on D-Bus within {deadline:g} s") from None
        except OSError:
            raise
        except Exception as error:
            # The library raises EOFError and bare exceptions when the connection breaks.
            raise ConnectionResetError(f"{member}: {_LOST}: {error!r}") from error
        if reply is None:
            raise ConnectionResetError(f"{member}: {_LOST}")
        if reply.message_type is MessageType.ERROR:
            raise bus_error(member, reply.error_name or "", reply.body)
        return list(reply.body)

    async def add_match(self, rule: str) -> None:
        await self._match("AddMatch", rule)

    async def remove_match(self, rule: str) -> None:
        await self._match("RemoveMatch", rule)

    async def _match(self, member: str, rule: str) -> None:
        await self.call(f"/{_BUS.replace('.', '/')}", _BUS, member, "s", [rule], destination=_BUS)

    async def open(self) -> MessageBus:
        """The connection, made if there is none that lives. Raises OSError."""
        async with self._connecting:
            if self._bus is None or self._ended is None or self._ended.done():
                self._bus = await self._connect()
                self._ended = asyncio.create_task(_end_of(self._bus))
            return self._bus

    async def _connect(self) -> MessageBus:
        try:
            return await MessageBus(bus_address=self._address, auth_timeout=DEADLINE).connect()
        except Exception as error:
            # Whatever it was, a missing socket too: no call was made. Refused authentication, and an end of file in
            # the middle of it, are no OSError.
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            text = f"{self._address}: no D-Bus daemon answers: {why}"
            raise ConnectionError(errno.ENOTCONN, text) from error

    def when_lost(self, tell: Callable[[], None]) -> None:
        """``tell`` is called once, when the connection that is open now has ended."""
        if self._ended is not None:
            self._ended.add_done_callback(lambda _task: tell())

    async def close(self) -> None:
        bus, ended, self._bus, self._ended = self._bus, self._ended, None, None
        if bus is None or ended is None:
            return
        bus.disconnect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await ended


async def _end_of(bus: MessageBus) -> None:
    # Why it ended says nothing to anybody: whoever calls next connects anew, or is told why that failed.
    with contextlib.suppress(Exception):
        await bus.wait_for_disconnect()  # type: ignore[no-untyped-call]  # the library left it untyped


def bus_error(member: str, name: str, body: Sequence[Any]) -> OSError:
    """An error reply as OSError. systemd names plain errors System.Error.EBUSY and the like."""
    text = str(body[0]) if body else name
    word = name.removeprefix("System.Error.")
    number = _ERRNO.get(name) or (vars(errno).get(word) if word != name else None) or errno.EIO
    message = f"{member}: {text}"
    if name == f"{SYSTEMD}.NoSuchUnit":
        return NoSuchUnitError(number, message)
    special = type(OSError(number, message))  # PermissionError, FileNotFoundError, TimeoutError...
    return BusError(number, message, name) if special is OSError else special(number, message)

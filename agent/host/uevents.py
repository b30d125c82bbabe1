"""The kernel's device events (man 7 netlink, NETLINK_KOBJECT_UEVENT): a driver was bound, a device or module came or went.

Only hints to look again: what changed is read from sysfs. A socket that overran has lost some, which is a hint too.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL = 1  # multicast group: as the kernel sends them, not as udev sends them on
_SIZE = 8192  # a uevent has at most 2 KiB of variables (UEVENT_BUFFER_SIZE) and its header
_MOST = 1000  # messages read in one go; the rest wait for the next turn of the loop
_ACTIONS = {
    "pci": {"add", "remove", "change", "bind", "unbind"},
    "vfio": {"add", "remove"},
    "vfio-dev": {"add", "remove"},
    "iommu": {"add", "remove"},
    "module": {"add", "remove"},
}


def matters(message: bytes) -> bool:
    """Whether this message of the kernel is about what the agent looks at. What does not parse does not matter."""
    header, _, rest = message.partition(b"\0")
    if b"@" not in header:
        return False
    pairs = (entry.partition(b"=") for entry in rest.split(b"\0"))
    found = {name: value.decode(errors="replace") for name, equals, value in pairs if equals}
    return found.get(b"ACTION", "") in _ACTIONS.get(found.get(b"SUBSYSTEM", ""), set())


def open_socket() -> socket.socket:
    """Raises OSError where the kernel or a sandbox has no such sockets."""
    opened = socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT
    )
    try:
        opened.bind((0, _KERNEL))
    except BaseException:
        opened.close()
        raise
    return opened


async def uevents() -> AsyncGenerator[None, None]:
    """Yields once for all events that matter and came since it was last asked. Raises OSError when it cannot go on."""
    with open_socket() as opened:
        while True:
            await _readable(opened)
            if _drain(opened):
                yield


async def _readable(opened: socket.socket) -> None:
    """Watched only while somebody waits: a socket that is left unread would wake the loop without end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(opened, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(opened)


def _drain(opened: socket.socket) -> bool:
    """Read what is there; whether any of it matters."""
    found = False
    for _ in range(_MOST):
        try:
            message, (sender, _groups) = opened.recvfrom(_SIZE)
        except BlockingIOError:
            return found
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            found = True  # the kernel dropped some: any of them may have mattered
            continue
        found = found or (sender == 0 and matters(message))  # 0: the kernel itself
    return found

"""Messages as a kernel sent them, and a real socket: that the kernel sends one is proved elsewhere."""

import asyncio
import socket
from contextlib import aclosing

import pytest

from agent.host import uevents
from agent.host.uevents import matters

BIND = (
    b"bind@/devices/pci0000:00/0000:00:09.0\0ACTION=bind\0DEVPATH=/devices/pci0000:00/0000:00:09.0\0SUBSYSTEM=pci\0"
    b"DRIVER=vfio-pci\0PCI_CLASS=30200\0PCI_ID=10DE:2BB5\0PCI_SUBSYS_ID=10DE:204E\0PCI_SLOT_NAME=0000:00:09.0\0"
    b"MODALIAS=pci:v000010DEd00002BB5sv000010DEsd0000204Ebc03sc02i00\0SEQNUM=1442\0"
)
MODULE = b"add@/module/nvidia_uvm\0ACTION=add\0DEVPATH=/module/nvidia_uvm\0SUBSYSTEM=module\0SEQNUM=1450\0"
NET = (
    b"add@/devices/virtual/net/veth1\0ACTION=add\0DEVPATH=/devices/virtual/net/veth1\0SUBSYSTEM=net\0"
    b"INTERFACE=veth1\0IFINDEX=7\0SEQNUM=1451\0"
)
UDEV = b"libudev\0\xfe\xed\xca\xfe\x28\0\0\0\x28\0\0\0ACTION=bind\0SUBSYSTEM=pci\0"


@pytest.mark.parametrize("action", ["add", "remove", "change", "bind", "unbind"])
def test_what_happens_to_a_pci_function_matters(action: str):
    assert matters(BIND.replace(b"bind", action.encode()))


def test_a_module_and_a_vfio_group_that_come_and_go_matter():
    assert matters(MODULE)
    assert matters(MODULE.replace(b"ACTION=add", b"ACTION=remove"))
    assert matters(BIND.replace(b"ACTION=bind", b"ACTION=add").replace(b"SUBSYSTEM=pci", b"SUBSYSTEM=vfio"))


@pytest.mark.parametrize(
    "message",
    [
        NET,
        MODULE.replace(b"ACTION=add", b"ACTION=bind"),
        BIND.replace(b"SUBSYSTEM=pci\0", b""),
        UDEV,
        b"",
        b"\0" * 9,
        b"no at sign\0ACTION=bind\0SUBSYSTEM=pci\0",
        BIND[:20],
        b"bind@/x\0ACTION=\xff\0SUBSYSTEM=pci\0",
    ],
)
def test_the_rest_does_not(message: bytes):
    assert not matters(message)


async def test_the_kernel_gives_a_socket_for_its_events_and_it_can_be_given_up():
    async with aclosing(uevents.uevents()) as events:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


class Sender(socket.socket):
    """One end of a pair, whose messages seem to come from ``port``: 0 is the kernel."""

    port = 0

    def recvfrom(self, size: int, _flags: int = 0):
        return self.recv(size), (self.port, 1)


async def test_a_burst_is_one_hint_and_what_does_not_matter_is_none(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    end = Sender(fileno=ours.detach())
    end.setblocking(False)
    monkeypatch.setattr(uevents, "open_socket", lambda: end)
    with theirs:
        async with aclosing(uevents.uevents()) as events:
            for message in (NET, BIND, BIND, MODULE):
                theirs.send(message)
            async with asyncio.timeout(20):
                await anext(events)
            theirs.send(NET)
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            theirs.send(MODULE)
            async with asyncio.timeout(20):
                await waiting


async def test_only_the_kernel_is_believed(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    end = Sender(fileno=ours.detach())
    end.setblocking(False)
    end.port = 4711
    monkeypatch.setattr(uevents, "open_socket", lambda: end)
    with theirs:
        async with aclosing(uevents.uevents()) as events:
            theirs.send(BIND)
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            end.port = 0
            theirs.send(BIND)
            async with asyncio.timeout(20):
                await waiting


async def test_an_overrun_is_a_hint():
    """A real netlink socket that has no room: the kernel drops a message, and says so at the next read."""
    end = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
    end.bind((0, 0))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    # RTM_GETLINK with NLM_F_REQUEST | NLM_F_DUMP, asked without the answers being read.
    ask = (20).to_bytes(4, "little") + (18).to_bytes(2, "little") + (0x301).to_bytes(2, "little") + bytes(12)
    with end:
        found = await asyncio.to_thread(_overrun, end, ask)
    assert found


def _overrun(end: socket.socket, ask: bytes) -> bool:
    for _ in range(200):
        end.send(ask)
    return uevents._drain(end)

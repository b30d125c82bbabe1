"""Keep files open where no /proc/PID/fd shows them: hold_hidden.py PATH|vfio:ADDRESS...

Their descriptors are sent to a UNIX socket, never received, and closed (unix(7), SCM_RIGHTS).
"""

import fcntl
import os
import signal
import socket
import struct
import sys
from pathlib import Path

GROUP_SET_CONTAINER, SET_IOMMU, GROUP_GET_DEVICE_FD, TYPE1 = 0x3B68, 0x3B66, 0x3B6A, 1


def vfio_device(address: str) -> list[int]:
    """Device, group and container of a function on vfio-pci (include/uapi/linux/vfio.h)."""
    name = Path(f"/sys/bus/pci/devices/{address}/iommu_group").readlink().name
    group = os.open(f"/dev/vfio/{name}", os.O_RDWR)
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    fcntl.ioctl(group, GROUP_SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, SET_IOMMU, TYPE1)
    return [fcntl.ioctl(group, GROUP_GET_DEVICE_FD, bytearray(address.encode() + b"\0")), group, container]


opened: list[int] = []
for name in sys.argv[1:]:
    kind, _, address = name.partition(":")
    opened += vfio_device(address) if kind == "vfio" else [os.open(name, os.O_RDWR)]
here, there = socket.socketpair()
socket.send_fds(here, [b"x"], opened)
for fd in opened:
    os.close(fd)
os.write(1, b"ready\n")
signal.pause()

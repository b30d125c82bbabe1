"""Keep a function's VFIO group open: hold_vfio.py ADDRESS group|container|device (include/uapi/linux/vfio.h)."""

import fcntl
import os
import signal
import struct
import sys
from pathlib import Path

GROUP_SET_CONTAINER, SET_IOMMU, GROUP_GET_DEVICE_FD, TYPE1 = 0x3B68, 0x3B66, 0x3B6A, 1
address, level = sys.argv[1:]
group_name = Path(f"/sys/bus/pci/devices/{address}/iommu_group").readlink().name
group = os.open(f"/dev/vfio/{group_name}", os.O_RDWR)
if level != "group":
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    fcntl.ioctl(group, GROUP_SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, SET_IOMMU, TYPE1)
if level == "device":
    fcntl.ioctl(group, GROUP_GET_DEVICE_FD, bytearray(address.encode() + b"\0"))
os.write(1, b"ready\n")
signal.pause()

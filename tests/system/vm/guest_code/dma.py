"""Let an edu device do DMA: dma.py ADDRESS BUS-ADDRESS read|write [TIMES] (QEMU: docs/specs/edu.rst).

"write" is into the machine's memory. Where the IOMMU does not translate, that really overwrites it.
"""

import mmap
import os
import struct
import sys
import time

IDENTITY, BUFFER = 0x010000ED, 0x40000
SOURCE, DESTINATION, COUNT, COMMAND = 0x80, 0x88, 0x90, 0x98
START, TO_MEMORY = 1, 2
device = f"/sys/bus/pci/devices/{sys.argv[1]}"
target, direction = int(sys.argv[2], 0), sys.argv[3]
times = int(sys.argv[4]) if len(sys.argv) > 4 else 1

config = os.open(f"{device}/config", os.O_RDWR)
(enabled,) = struct.unpack("<H", os.pread(config, 2, 4))
os.pwrite(config, struct.pack("<H", enabled | 0x6), 4)  # memory space, bus master
registers = mmap.mmap(os.open(f"{device}/resource0", os.O_RDWR | os.O_SYNC), 0x1000)
if struct.unpack_from("<I", registers, 0)[0] != IDENTITY:
    raise SystemExit(f"{sys.argv[1]} is no edu device")
for number in range(times):
    here = target + 0x1000 * number
    source, destination, order = (
        (BUFFER, here, START | TO_MEMORY) if direction == "write" else (here, BUFFER, START)
    )
    for offset, value in ((SOURCE, source), (DESTINATION, destination), (COUNT, 64), (COMMAND, order)):
        registers[offset : offset + 8] = struct.pack("<Q", value)
    end = time.monotonic() + 5
    while struct.unpack_from("<I", registers, COMMAND)[0] & START:
        if time.monotonic() > end:
            raise SystemExit("the DMA does not end")
        time.sleep(0.01)

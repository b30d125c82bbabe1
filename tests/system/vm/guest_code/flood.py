"""Forge a flood of kernel lines about one card, by the stand-in driver: flood.py GPU LINES.

Xids of a program's fault and page faults, each with an address or a code of its own, as fast as they can be written.
"""

import os
import sys

gpu, lines = sys.argv[1], int(sys.argv[2])
say = os.open("/sys/module/nvidia/parameters/say", os.O_WRONLY)
for number in range(lines):
    line = f"nvidia {gpu}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x002c address={number << 12:#x} flags={number:#06x}]"
    if number % 2:
        line = f"NVRM: Xid (PCI:{gpu}): 31, pid={number}, name=flood, Ch {number:08x}, MMU Fault"
    os.pwrite(say, line.encode() + b"\n", 0)

"""Fake /sys and /proc trees under a temporary directory, with the shapes that real kernels give them."""

import struct
from pathlib import Path


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: str | bytes = "") -> Path:
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(text if isinstance(text, bytes) else text.encode())
        return at

    def directory(self, path: str) -> Path:
        at = self.root / path
        at.mkdir(parents=True, exist_ok=True)
        return at

    def link(self, path: str, target: str) -> Path:
        """``target`` as the link reads; relative to the root of the tree when it starts with "sys/" or "proc/"."""
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(self.root / target if target.startswith(("sys/", "proc/")) else target)
        return at

    def function(self, address: str, code: int, *, behind: str = "", vendor: int = 0x10DE) -> str:
        """A PCI function below the bridges of ``behind`` ("0000:00:01.1/0000:01:00.0"); its real sysfs path."""
        middle = f"{behind}/" if behind else ""
        path = f"sys/devices/pci0000:00/{middle}{address}"
        for name, value in (("vendor", vendor), ("device", 0x2BB5), ("class", code)):
            self.file(f"{path}/{name}", f"0x{value:06x}\n" if name == "class" else f"0x{value:04x}\n")
        self.file(f"{path}/driver_override", "(null)\n")
        self.file(f"{path}/numa_node", "-1\n")
        self.file(f"{path}/power_state", "D0\n")
        self.file(f"{path}/config", config_space())
        self.link(f"sys/bus/pci/devices/{address}", path)
        return path

    def bind(self, address: str, driver: str) -> None:
        self.directory(f"sys/bus/pci/drivers/{driver}")
        self.link(f"sys/bus/pci/devices/{address}/driver", f"sys/bus/pci/drivers/{driver}")
        self.link(f"sys/bus/pci/drivers/{driver}/{address}", f"sys/bus/pci/devices/{address}")

    def group(self, number: int, kind: str, *members: str) -> None:
        self.file(f"sys/kernel/iommu_groups/{number}/type", f"{kind}\n")
        for address in members:
            self.link(f"sys/kernel/iommu_groups/{number}/devices/{address}", f"sys/bus/pci/devices/{address}")
            self.link(f"sys/bus/pci/devices/{address}/iommu_group", f"sys/kernel/iommu_groups/{number}")

    def process(self, pid: int, comm: str, *opened: str, cgroup: str = "/system.slice/x.service") -> None:
        self.file(f"proc/{pid}/comm", f"{comm}\n")
        self.file(f"proc/{pid}/cgroup", f"0::{cgroup}\n")
        self.directory(f"proc/{pid}/fd")
        for number, target in enumerate(opened, start=3):
            self.link(f"proc/{pid}/fd/{number}", target)


def config_space(
    serial: tuple[int, int] | None = None, acs_ctl: int | None = None, size: int = 4096
) -> bytes:
    """Extended configuration space with a serial number (high, low) and an ACS capability, where given."""
    space = bytearray(4096)
    space[0:4] = struct.pack("<HH", 0x10DE, 0x2BB5)
    at, following = 0x100, 0x140
    if serial is not None:
        space[at : at + 12] = struct.pack("<III", 0x0003 | 1 << 16 | following << 20, serial[1], serial[0])
        at = following
    if acs_ctl is not None:
        space[at : at + 8] = struct.pack("<IHH", 0x000D | 1 << 16, 0x00FF, acs_ctl)
    return bytes(space[:size])

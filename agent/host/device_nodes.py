"""Which device node belongs to which PCI function: /dev/nvidia3 is not index 3, and group 12 is not GPU 12."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.core.fact import Known
from agent.host.reading import PCI_ADDRESS, names_in, read_link_name, read_text

_MINOR = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)
_SHARED = re.compile(r"/dev/nvidia(?:ctl|-.+)")
_SOUND = re.compile(r"/dev/snd/(?:control|pcm|hw|midi)C(\d+)\w*")
VFIO_DEVICE = "anon_inode:[vfio-device]"


@dataclass(frozen=True, slots=True)
class DeviceNodes:
    """Open path -> functions, as the host has them now."""

    by_path: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    on_nvidia: tuple[str, ...] = ()
    on_vfio: tuple[str, ...] = ()  # and those with no driver: an unbind from vfio-pci may be pending

    def functions(self, path: str) -> tuple[str, ...]:
        """Functions that ``path`` keeps busy. A node that belongs to no one function counts for all."""
        if path in self.by_path:
            return self.by_path[path]
        if path.startswith("/dev/vfio/"):
            return self.on_vfio
        if _SHARED.fullmatch(path) or re.fullmatch(r"/dev/nvidia\d+", path):
            return self.on_nvidia
        sound = _SOUND.fullmatch(path)
        return self.by_path.get(f"/dev/snd/card{sound[1]}", ()) if sound else ()


def read_device_nodes(root: Path) -> DeviceNodes:
    """Raises OSError when the maps cannot be read."""
    pci = root / "sys/bus/pci"
    nodes: dict[str, tuple[str, ...]] = {}
    for address in names_in(root / "proc/driver/nvidia/gpus"):
        text = read_text(root / "proc/driver/nvidia/gpus" / address / "information")
        minor = _MINOR.search(text.value) if isinstance(text, Known) else None
        if minor is not None:
            nodes[f"/dev/nvidia{minor[1]}"] = (address.lower(),)
    groups = root / "sys/kernel/iommu_groups"
    for group in names_in(groups):
        nodes[f"/dev/vfio/{group}"] = names_in(groups / group / "devices")
    _by_device_link(root / "sys/class/vfio-dev", "/dev/vfio/devices/", nodes)
    _by_device_link(root / "sys/class/drm", "/dev/dri/", nodes)
    _by_device_link(root / "sys/class/sound", "/dev/snd/", nodes)
    for bus in names_in(root / "sys/class/i2c-dev"):
        owner = (root / "sys/class/i2c-dev" / bus / "device").resolve().parent.name
        if PCI_ADDRESS.fullmatch(owner):
            nodes[f"/dev/{bus}"] = (owner,)
    drivers = {a: read_link_name(pci / "devices" / a / "driver") for a in names_in(pci / "devices")}
    return DeviceNodes(
        by_path=nodes,
        on_nvidia=tuple(a for a, driver in drivers.items() if driver == Known("nvidia")),
        on_vfio=tuple(a for a, d in drivers.items() if not isinstance(d, Known) or d.value == "vfio-pci"),
    )


def _by_device_link(classes: Path, prefix: str, nodes: dict[str, tuple[str, ...]]) -> None:
    """Class devices whose ``device`` link leads straight to a PCI function."""
    for name in names_in(classes):
        owner = read_link_name(classes / name / "device")
        if isinstance(owner, Known) and PCI_ADDRESS.fullmatch(owner.value):
            nodes[prefix + name] = (owner.value,)

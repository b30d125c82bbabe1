"""Which device node belongs to which PCI function: /dev/nvidia3 is not index 3, and group 12 is not GPU 12."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.core.fact import Known, Unknown
from agent.host.nvidia_minors import NvidiaMinors
from agent.host.reading import PCI_ADDRESS, names_in, read_link_name

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


def read_device_nodes(root: Path, gpus: NvidiaMinors) -> DeviceNodes:
    """Raises OSError when the maps cannot be read. A GPU whose minor is unknown may be any node's that is nobody's."""
    pci = root / "sys/bus/pci"
    nodes: dict[str, tuple[str, ...]] = {}
    for address, minor in gpus.read().items():
        if isinstance(minor, Known):
            nodes[f"/dev/nvidia{minor.value}"] = (address,)
    groups = root / "sys/kernel/iommu_groups"
    for group in names_in(groups):
        nodes[f"/dev/vfio/{group}"] = names_in(groups / group / "devices")
    _by_device_link(root / "sys/class/vfio-dev", "/dev/vfio/devices/", nodes)
    _by_device_link(root / "sys/class/drm", "/dev/dri/", nodes)
    _by_device_link(root / "sys/class/sound", "/dev/snd/", nodes)
    for bus in names_in(root / "sys/class/i2c-dev"):
        if owner := _nearest_function(root / "sys/class/i2c-dev" / bus / "device"):
            nodes[f"/dev/{bus}"] = (owner,)
    drivers = {a: read_link_name(pci / "devices" / a / "driver") for a in names_in(pci / "devices")}
    return DeviceNodes(
        by_path=nodes,
        on_nvidia=tuple(a for a, d in drivers.items() if d == Known("nvidia") or isinstance(d, Unknown)),
        on_vfio=tuple(a for a, d in drivers.items() if not isinstance(d, Known) or d.value == "vfio-pci"),
    )


def _by_device_link(classes: Path, prefix: str, nodes: dict[str, tuple[str, ...]]) -> None:
    """Class devices whose ``device`` link leads straight to a PCI function. Raises OSError."""
    for name in names_in(classes):
        owner = read_link_name(classes / name / "device")
        if isinstance(owner, Unknown):
            raise OSError(owner.reason)
        if isinstance(owner, Known) and PCI_ADDRESS.fullmatch(owner.value):
            nodes[prefix + name] = (owner.value,)


def _nearest_function(device: Path) -> str:
    """That below which a device hangs, at any depth: a monitor's bus of i2c hangs below its connector."""
    try:
        parts = Path(os.path.realpath(device, strict=True)).parts
    except FileNotFoundError:
        return ""  # it went away
    return next((part for part in reversed(parts) if PCI_ADDRESS.fullmatch(part)), "")

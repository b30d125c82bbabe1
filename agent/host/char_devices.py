"""The true name of a character device by its number. A path says nothing: a container, or anyone who may call
mknod(2), can give a node any name.
"""

from pathlib import Path

from agent.core.fact import Known, Unknown, value_or
from agent.host.reading import read_text

_NVIDIA_MAJOR = 195
_NVIDIA_SHARED = {255: "/dev/nvidiactl", 254: "/dev/nvidia-modeset"}
# As /proc/devices names those that keep a PCI function's driver busy. A bus of i2c is deleted only when it is closed.
_FAMILIES = ("vfio", "vfio-dev", "drm", "alsa", "i2c")


class CharDevices:
    """Numbers -> names, as the host has them now: majors of drivers are given out when those are loaded.

    ``unseen``: why a device may have gone unrecognised; "" where none has.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        listed = read_text(root / "proc/devices")
        self._families = _families(value_or(listed, ""))
        self.unseen = (
            "" if isinstance(listed, Known) else f"which devices are GPUs' is unknown: {listed.reason}"
        )
        self._names: dict[tuple[int, int], str] = {}

    def name(self, major: int, minor: int) -> str:
        """A path as udev would make it; "" for a device that keeps no PCI function busy."""
        found = self._names.get((major, minor))
        if found is None:
            found = self._names[major, minor] = self._find(major, minor)
        return found

    def _find(self, major: int, minor: int) -> str:
        family = self._families.get(major, "")
        if major == _NVIDIA_MAJOR:
            return _NVIDIA_SHARED.get(minor, f"/dev/nvidia{minor}")
        if family.startswith("nvidia"):
            return f"/dev/{family}"
        if family not in _FAMILIES:
            return ""
        uevent = read_text(self._root / f"sys/dev/char/{major}:{minor}/uevent")
        if isinstance(uevent, Known):
            for line in uevent.value.splitlines():
                if line.startswith("DEVNAME="):
                    return "/dev/" + line.removeprefix("DEVNAME=")
        if isinstance(uevent, Unknown):
            self.unseen = f"which device has number {major}:{minor} is unknown: {uevent.reason}"
        # Its device is on its way out of sysfs, as in an unbind that waits for whoever has it open.
        return f"/dev/{family.partition('-')[0]}/{major}:{minor}"


def _families(devices: str) -> dict[int, str]:
    """From /proc/devices, whose first part lists character devices."""
    families: dict[int, str] = {}
    for line in devices.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdecimal():
            families.setdefault(int(number), name)
    return families

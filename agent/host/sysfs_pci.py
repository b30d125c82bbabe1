"""PCI functions and IOMMU groups from sysfs (Documentation/ABI/testing/sysfs-bus-pci, sysfs-kernel-iommu_groups)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.observation import NOT_READ, IommuGroup, Pci, PciFunction
from agent.host.config_space import read_acs_ctl, read_serial
from agent.host.reading import PCI_ADDRESS, convert, names_in, read_int, read_link_name, read_text
from agent.host.refusal import refuse
from agent.host.scan import Scan

_IORESOURCE_MEM = 0x200
_IORESOURCE_UNSET = 0x20000000
_STANDARD_BARS = 6
_OFF_PATH = Unknown("not read: no display device is behind this bridge", "NotObserved")


class SysfsPci:
    """``PciPort`` over /sys. Reads need no root, except for serial numbers and ACS bits."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._devices = root / "sys/bus/pci/devices"
        self._slots = root / "sys/bus/pci/slots"
        self._groups = root / "sys/kernel/iommu_groups"
        self._scan: Scan[Pci] = Scan("PCI scan")
        self._link: Scan[Fact[str]] = Scan("driver link")
        # Reading config space can wake a sleeping card, so it is read once in the life of a sysfs device:
        # one that is removed and found again has another inode.
        self._serials: dict[tuple[str, int], Fact[str]] = {}

    async def read(self) -> Pci:
        """Every function and group. Raises FileNotFoundError where there is no PCI bus."""
        return await self._scan.run(self._read)

    async def read_driver(self, address: str) -> Fact[str]:
        return await self._link.run(lambda: read_link_name(self._devices / address / "driver"))

    async def set_override(self, address: str, driver: str) -> None:
        refuse(f"setting driver_override of {address} to {driver!r}")

    async def start_unbind(self, address: str, driver: str) -> None:
        refuse(f"unbinding {address} from {driver}")

    async def unbind_state(self, address: str) -> str:  # noqa: ARG002 - the port's signature
        return "none"

    async def probe(self, address: str) -> None:
        refuse(f"probing drivers for {address}")

    async def set_group_type(self, group: int, group_type: str) -> None:
        refuse(f"setting the type of IOMMU group {group} to {group_type}")

    def _read(self) -> Pci:
        if not self._devices.is_dir():
            raise FileNotFoundError(
                f"no {self._devices}: this machine has no PCI bus, or sysfs is not mounted"
            )
        slots = self._slot_names()
        found: dict[str, PciFunction] = {}
        for address in names_in(self._devices):
            function = self._function(address, slots) if PCI_ADDRESS.fullmatch(address) else None
            if function is not None:
                found[address] = function
        on_path = {b for f in found.values() if f.class_code >> 16 == 0x03 for b in f.bridges}
        for address in on_path & found.keys():
            found[address] = replace(found[address], acs_ctl=read_acs_ctl(self._devices / address / "config"))
        return Pci(functions=found, groups=self._read_groups())

    def _function(self, address: str, slots: Mapping[str, str]) -> PciFunction | None:
        """None: the device went away while it was being read."""
        path = self._devices / address
        identity = tuple(read_int(path / name) for name in ("vendor", "device", "class"))
        vendor, device, code = (fact.value if isinstance(fact, Known) else None for fact in identity)
        if vendor is None or device is None or code is None:
            return None
        slot = slots.get(address.rpartition(".")[0])
        is_bridge = code >> 16 == 0x06
        return PciFunction(
            address=address,
            vendor_id=vendor,
            device_id=device,
            class_code=code,
            driver=read_link_name(path / "driver"),
            driver_override=convert(read_text(path / "driver_override"), _override),
            iommu_group=convert(read_link_name(path / "iommu_group"), lambda name: Known(int(name))),
            numa_node=convert(read_int(path / "numa_node"), _numa_node),
            power_state=convert(read_text(path / "power_state"), _power_state),
            boot_vga=convert(read_int(path / "boot_vga"), lambda flag: Known(flag == 1)),
            slot=Known(slot) if slot is not None else Absent("no physical slot names this device"),
            serial=self._serial(path) if code >> 16 == 0x03 else NOT_READ,
            bridges=_upstream(path),
            acs_ctl=_OFF_PATH if is_bridge else Absent("not a bridge"),
            bars=() if is_bridge else value_or(convert(read_text(path / "resource"), _memory_bars), ()),
            link_speed=convert(read_text(path / "current_link_speed"), _speed),
            link_width=convert(read_int(path / "current_link_width"), _width),
            max_link_speed=convert(read_text(path / "max_link_speed"), _speed),
            max_link_width=convert(read_int(path / "max_link_width"), _width),
        )

    def _serial(self, path: Path) -> Fact[str]:
        try:
            key = (path.name, path.stat().st_ino)
        except OSError:
            return Unknown(f"{path} went away", "Unreadable")
        known = self._serials.get(key)
        if known is None:
            known = read_serial(path / "config")
            if not isinstance(known, Unknown):
                self._serials = {k: v for k, v in self._serials.items() if k[0] != path.name} | {key: known}
        return known

    def _slot_names(self) -> dict[str, str]:
        """Domain, bus and device -> the slot's name."""
        names: dict[str, str] = {}
        for name in names_in(self._slots):
            address = read_text(self._slots / name / "address")
            if isinstance(address, Known):
                names.setdefault(address.value, name)
        return names

    def _read_groups(self) -> dict[int, IommuGroup]:
        groups: dict[int, IommuGroup] = {}
        for name in names_in(self._groups):
            if name.isdecimal():
                path = self._groups / name
                groups[int(name)] = IommuGroup(
                    int(name), read_text(path / "type"), names_in(path / "devices")
                )
        return dict(sorted(groups.items()))


def _override(text: str) -> Fact[str]:
    return Absent("not set") if text in ("", "(null)") else Known(text)


def _numa_node(node: int) -> Fact[int]:
    return Known(node) if node >= 0 else Absent("the firmware names no NUMA node")


def _power_state(text: str) -> Fact[str]:
    return Known(text) if text.startswith("D") else Unknown(f"the kernel says {text!r}", "PowerStateUnknown")


def _speed(text: str) -> Fact[str]:
    return (
        Unknown("the link's speed is unknown to the kernel", "LinkUnknown")
        if "nknown" in text
        else Known(text)
    )


def _width(lanes: int) -> Fact[int]:
    # 0 and 255 are what a link that is down or a device that does not answer reads as.
    return Known(lanes) if 0 < lanes <= 32 else Unknown(f"the link's width reads {lanes}", "LinkUnknown")


def _upstream(path: Path) -> tuple[str, ...]:
    try:
        parts = path.resolve().parts[:-1]
    except (OSError, RuntimeError):
        return ()
    return tuple(part for part in parts if PCI_ADDRESS.fullmatch(part))


def _memory_bars(resource: str) -> Fact[tuple[tuple[int, int], ...]]:
    """(first, last) of each assigned memory BAR; the file has one "first last flags" line for each."""
    bars = []
    for line in resource.splitlines()[:_STANDARD_BARS]:
        first, last, flags = (int(word, 16) for word in line.split())
        if flags & _IORESOURCE_MEM and not flags & _IORESOURCE_UNSET:
            bars.append((first, last))
    return Known(tuple(bars))

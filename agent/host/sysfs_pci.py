"""PCI functions and IOMMU groups in sysfs (Documentation/ABI/testing/sysfs-bus-pci, sysfs-kernel-iommu_groups)."""

import errno
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.observation import NOT_READ, IommuGroup, Pci, PciFunction
from agent.host.attribute_read import AttributeReader
from agent.host.attribute_write import AttributeWriter
from agent.host.config_space import read_acs_ctl, read_serial
from agent.host.kernel_calls import KernelCalls
from agent.host.manager import ServiceManager
from agent.host.reading import PCI_ADDRESS, convert, names_in, read_int, read_link_name, read_text, unreadable
from agent.host.scan import Scan
from agent.host.unbind_units import UnbindUnits
from agent.ports import START_WITHIN

_NVIDIA = 0x10DE
_IORESOURCE_MEM = 0x200
_IORESOURCE_UNSET = 0x20000000
_STANDARD_BARS = 6
_VIRTFN = re.compile(r"virtfn\d+")
_WRITE_DEADLINE = 10.0  # seconds
_PROBE_DEADLINE = 30.0  # the driver's own probe() is part of the write
_PENDING = Unknown("not read: an unbind of it has not returned, and would hold the read up", "UnbindPending")
_BUSY = Unknown("the kernel does not answer: somebody keeps the device's lock", "DeviceBusy")
_OFF_PATH = Unknown("not read: no display device is behind this bridge", "NotObserved")


class SysfsPci:
    """``PciPort`` over /sys. Reads need no root, except for serial numbers and ACS bits; unbinding needs ``manager``.

    A device whose unbind is pending, or that somebody else's call keeps locked, is neither written to nor asked for
    what needs the lock, and what may wait for a lock is done by a child that can be left behind: a thread that did
    would stay in the kernel, and the agent could not be ended.
    """

    def __init__(self, root: Path = Path("/"), manager: ServiceManager | None = None) -> None:
        self._devices = root / "sys/bus/pci/devices"
        self._probe_file = root / "sys/bus/pci/drivers_probe"
        self._slots = root / "sys/bus/pci/slots"
        self._groups = root / "sys/kernel/iommu_groups"
        self._nvidia_gpus = root / "proc/driver/nvidia/gpus"
        self._scan: Scan[Pci] = Scan("PCI scan")
        self._link: Scan[Fact[str]] = Scan("driver link")
        self._calls = KernelCalls("config space")
        self._reader = AttributeReader()
        self._writer = AttributeWriter()
        self._unbinds = UnbindUnits(root, manager)
        # Reading config space can wake a sleeping card, so it is read once in the life of a sysfs device:
        # one that is removed and found again has another inode.
        self._serials: dict[tuple[str, int], Fact[str]] = {}

    async def read(self) -> Pci:
        """Every function and group. Raises FileNotFoundError where there is no PCI bus."""
        return await self._scan.run(self._read)

    async def read_driver(self, address: str) -> Fact[str]:
        return await self._link.run(lambda: read_link_name(self._devices / address / "driver"))

    async def set_override(self, address: str, driver: str) -> None:
        """Raises OSError: EBUSY for a device whose unbind is pending or whose lock is taken."""
        await self._write(
            address, self._devices / address / "driver_override", f"{driver}\n", _WRITE_DEADLINE
        )

    async def start_unbind(self, address: str, driver: str, within: float = START_WITHIN) -> None:
        await self._unbinds.start(address, driver, within)

    async def unbind_state(self, address: str) -> str:
        return await self._unbinds.state(address)

    async def probe(self, address: str) -> None:
        """Raises OSError: EBUSY for a device whose unbind is pending or whose lock is taken."""
        await self._write(address, self._probe_file, address, _PROBE_DEADLINE)

    async def set_group_type(self, group: int, group_type: str) -> None:
        path = self._groups / str(group) / "type"
        await self._writer.write(f"IOMMU group {group}", path, group_type, _WRITE_DEADLINE)

    async def _write(self, address: str, path: Path, text: str, deadline: float) -> None:
        if not PCI_ADDRESS.fullmatch(address):
            raise OSError(errno.EINVAL, f"{address!r} is no PCI address")
        if self._unbinds.is_pending(address):
            raise OSError(errno.EBUSY, f"an unbind of {address} has not returned", str(path))
        if self._reader.is_stuck(address) or self._calls.is_stuck(address):
            raise OSError(errno.EBUSY, f"an earlier read of {address} has not returned", str(path))
        await self._writer.write(address, path, text, deadline)

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
        pending = tuple(sorted({*self._unbinds.pending(), *self._not_let_go(found)}))
        found = self._with_locked(found, pending)
        on_path = {b for f in found.values() if f.class_code >> 16 == 0x03 for b in f.bridges}
        for address in on_path & found.keys():
            found[address] = replace(found[address], acs_ctl=read_acs_ctl(self._devices / address / "config"))
        return Pci(functions=found, groups=self._read_groups(), pending_unbinds=pending)

    def _not_let_go(self, found: Mapping[str, PciFunction]) -> list[str]:
        """The driver link goes before NVIDIA's remove() is called, and the driver's own directory when it is done.

        The link is there before that directory too, but may have come after ``found`` was read: so once more.
        """
        known = (found.get(address) for address in names_in(self._nvidia_gpus))
        without = [f.address for f in known if f is not None and isinstance(f.driver, Absent)]
        return [a for a in without if isinstance(read_link_name(self._devices / a / "driver"), Absent)]

    def _with_locked(
        self, found: Mapping[str, PciFunction], pending: tuple[str, ...]
    ) -> dict[str, PciFunction]:
        overrides = {a: _PENDING if a in pending else self._override(a) for a in found}
        free = (a for a in found if overrides[a] not in (_PENDING, _BUSY))
        serials = self._calls.read_each(free, lambda a: self._serial(found[a]))
        told: dict[str, PciFunction] = {}
        for address, function in found.items():
            why = _PENDING if address in pending else _BUSY
            serial = serials.get(address) or self._known_serial(function) or why
            told[address] = replace(function, driver_override=overrides[address], serial=serial)
        return told

    def _override(self, address: str) -> Fact[str]:
        if self._writer.is_stuck(address) or self._calls.is_stuck(address):
            return _BUSY
        fact = self._reader.read(address, self._devices / address / "driver_override")
        return _BUSY if fact is None else convert(fact, _override)

    def _serial(self, function: PciFunction) -> Fact[str]:
        return self._known_serial(function) or self._read_serial(self._devices / function.address)

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
            iommu_group=convert(read_link_name(path / "iommu_group"), lambda name: Known(int(name))),
            numa_node=convert(read_int(path / "numa_node"), _numa_node),
            power_state=convert(read_text(path / "power_state"), _power_state),
            boot_vga=convert(read_int(path / "boot_vga"), lambda flag: Known(flag == 1)),
            slot=Known(slot) if slot is not None else Absent("no physical slot names this device"),
            bridges=_upstream(path),
            acs_ctl=_OFF_PATH if is_bridge else Absent("not a bridge"),
            bars=() if is_bridge else value_or(convert(read_text(path / "resource"), _memory_bars), ()),
            link_speed=convert(read_text(path / "current_link_speed"), _speed),
            link_width=convert(read_int(path / "current_link_width"), _width),
            max_link_speed=convert(read_text(path / "max_link_speed"), _speed),
            max_link_width=convert(read_int(path / "max_link_width"), _width),
            reset_methods=convert(read_text(path / "reset_method"), lambda text: Known(tuple(text.split()))),
            power_control=read_text(path / "power/control"),
            virtual_functions=_virtual_functions(path) if vendor == _NVIDIA and not is_bridge else NOT_READ,
        )

    def _known_serial(self, function: PciFunction) -> Fact[str] | None:
        if function.class_code >> 16 != 0x03:
            return NOT_READ
        try:
            return self._serials.get(_life(self._devices / function.address))
        except OSError:
            return Unknown(f"{function.address} went away", "Unreadable")

    def _read_serial(self, path: Path) -> Fact[str]:
        try:
            life = _life(path)
        except OSError:
            return Unknown(f"{path} went away", "Unreadable")
        serial = read_serial(path / "config")
        if not isinstance(serial, Unknown):
            self._serials = {k: v for k, v in self._serials.items() if k[0] != path.name} | {life: serial}
        return serial

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


def _life(path: Path) -> tuple[str, int]:
    """A device between its appearance in sysfs and its removal."""
    return path.name, path.stat().st_ino


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


def _virtual_functions(path: Path) -> Fact[int]:
    """Counted by their links: a read of ``sriov_numvfs`` takes the device's lock, and waits for a pending unbind."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except OSError as error:
        return unreadable(path, error)
    if "physfn" in names:
        return Absent("it is a virtual function itself")
    if "sriov_totalvfs" not in names:
        return Absent("no SR-IOV")
    return Known(sum(_VIRTFN.fullmatch(name) is not None for name in names))


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

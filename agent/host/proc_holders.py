"""Who holds a function's driver, over every process that /proc shows, and what the kernel itself holds.

Persistence mode leaves no trace here: it is NVML's to tell, and counts as a holder where the two are joined.
"""

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.core.fact import Fact, Known, Unknown, value_or
from agent.core.observation import Holder
from agent.host.device_nodes import VFIO_DEVICE, DeviceNodes, read_device_nodes
from agent.host.holder_owner import is_virtual_machine, owner_of
from agent.host.reading import names_in, read_int, read_link_name, read_text
from agent.host.scan import Scan

_NVIDIA_MAJOR = 195
_NVIDIA_SHARED = {255: "/dev/nvidiactl", 254: "/dev/nvidia-modeset"}
_INTERESTING = ("/dev/nvidia", "/dev/vfio/", "/dev/dri/", "/dev/snd/")
_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed in the kernel
# nvidia's own parts hold its use count merely by being loaded; only their users tell something.
_HARMLESS_USERS = ("nvidia_uvm", "nvidia_modeset")


class ProcHolders:
    """``HoldersPort``. Without root other users' open files cannot be seen, and the answer is Unknown.

    ``alone`` is held during a scan, so that our own NVML child does not run then (a stuck one is seen, and counts).
    """

    def __init__(self, root: Path = Path("/"), alone: asyncio.Lock | None = None) -> None:
        self._root = root
        self._alone = alone or asyncio.Lock()
        self._proc = root / "proc"
        self._scan: Scan[Mapping[str, Fact[tuple[Holder, ...]]]] = Scan("holder scan")

    async def read(self, addresses: Iterable[str]) -> Mapping[str, Fact[tuple[Holder, ...]]]:
        wanted = tuple(addresses)
        async with self._alone:
            return await self._scan.run(lambda: self._read(wanted))

    def _read(self, wanted: tuple[str, ...]) -> dict[str, Fact[tuple[Holder, ...]]]:
        nodes = read_device_nodes(self._root)
        held: dict[str, list[Holder]] = {address: [] for address in wanted}
        blind = self._blind_spot()
        for name in names_in(self._proc):
            if name.isdecimal():
                try:
                    self._add_process(int(name), nodes, held)
                except PermissionError:
                    blind = blind or f"open files of process {name} and others cannot be seen: need root"
                except OSError:
                    continue  # the process has ended
        for address in wanted:
            held[address] += self._kernel_holders(address, nodes)
        return {address: _verdict(tuple(holders), blind) for address, holders in held.items()}

    def _blind_spot(self) -> str:
        namespace = value_or(read_link_name(self._proc / "self/ns/pid"), _HOST_PID_NAMESPACE)
        if namespace != _HOST_PID_NAMESPACE:
            return "this is not the host's pid namespace, so processes outside it cannot be seen"
        return ""

    def _add_process(self, pid: int, nodes: DeviceNodes, held: dict[str, list[Holder]]) -> None:
        process = self._proc / str(pid)
        paths = sorted(_open_paths(process / "fd"))
        if not paths:
            return
        command = value_or(read_text(process / "comm"), "")
        owner = owner_of(value_or(read_text(process / "cgroup"), ""))
        kind = "vm" if is_virtual_machine(command) or owner.container.startswith("VM ") else "process"
        for address, path in _held_functions(paths, nodes):
            if address in held:
                held[address].append(Holder(kind, path, pid, command, owner.unit, owner.container))

    def _kernel_holders(self, address: str, nodes: DeviceNodes) -> list[Holder]:
        driver = value_or(read_link_name(self._root / "sys/bus/pci/devices" / address / "driver"), "")
        holders = []
        if driver not in ("", "vfio-pci"):
            holders += [Holder("console", f"the console on {fb}") for fb in self._framebuffers(address)]
            if not holders and read_text(self._root / "sys/bus/pci/devices" / address / "boot_vga") == Known(
                "1"
            ):
                holders.append(Holder("console", "the boot console (boot_vga)"))
        if address in nodes.on_nvidia:
            holders += self._module_users()
        return holders

    def _framebuffers(self, address: str) -> tuple[str, ...]:
        graphics = self._root / "sys/class/graphics"
        return tuple(
            n for n in names_in(graphics) if read_link_name(graphics / n / "device") == Known(address)
        )

    def _module_users(self) -> list[Holder]:
        """Modules on top of nvidia that are themselves in use: nvidia_drm by a console, nvidia_peermem by a transfer."""
        modules = self._root / "sys/module"
        holders = []
        for name in sorted({"nvidia_drm", *names_in(modules / "nvidia/holders")} - set(_HARMLESS_USERS)):
            uses = value_or(read_int(modules / name / "refcnt"), 0)
            if uses > 0:
                holders.append(Holder("module", f"{name} (use count {uses})"))
        return holders


def _open_paths(directory: Path) -> set[str]:
    """Device paths among a process's open files. Raises PermissionError, or OSError when the process has ended."""
    paths: set[str] = set()
    for name in os.listdir(directory):  # noqa: PTH208 - tens of thousands of entries on a busy host
        try:
            target = os.readlink(directory / name)  # noqa: PTH115
        except FileNotFoundError:
            continue
        path = target.removesuffix(" (deleted)")
        if path == VFIO_DEVICE:
            paths.add(_vfio_device(directory.parent / "fdinfo" / name))
        elif path.startswith("/dev/"):
            path = _nvidia_by_number(directory / name) or path
            if path.startswith(_INTERESTING) and path != "/dev/vfio/vfio":
                paths.add(path)
    return paths


def _nvidia_by_number(link: Path) -> str:
    """The node's true name by its device number: a container may have mounted /dev/nvidia4 as nvidia0."""
    try:
        number = link.stat().st_rdev
    except OSError:
        return ""
    if os.major(number) != _NVIDIA_MAJOR:
        return ""
    return _NVIDIA_SHARED.get(os.minor(number), f"/dev/nvidia{os.minor(number)}")


def _vfio_device(fdinfo: Path) -> str:
    """Newer kernels name the device of a vfio-device file in its fdinfo."""
    match = re.search(r"^vfio-device-syspath:\s*\S*/(\S+)$", value_or(read_text(fdinfo), ""), re.MULTILINE)
    return f"{VFIO_DEVICE} {match[1]}" if match else VFIO_DEVICE


def _held_functions(paths: list[str], nodes: DeviceNodes) -> list[tuple[str, str]]:
    """(function, path), each once.

    A vfio-device file of unknown device belongs to a group that its process has open; with none open (a pending
    unbind, iommufd) it may be any function on vfio-pci.
    """
    groups = [path for path in paths if re.fullmatch(r"/dev/vfio/(\d+|devices/.+)", path)]
    held: dict[tuple[str, str], None] = {}
    for path in paths:
        if path == VFIO_DEVICE:
            functions = tuple(a for group in groups for a in nodes.functions(group)) or nodes.on_vfio
        elif path.startswith(VFIO_DEVICE):
            functions = (path.rpartition(" ")[2],)
        else:
            functions = nodes.functions(path)
        held.update(dict.fromkeys((address, path) for address in functions))
    return list(held)


def _verdict(holders: tuple[Holder, ...], blind: str) -> Fact[tuple[Holder, ...]]:
    """A holder that was seen is proof; that none was seen is proof only where everything could be seen."""
    return Unknown(blind, "HoldersUnknown") if blind and not holders else Known(holders)

"""Who holds a function's driver, over every process that /proc shows, and what the kernel itself holds.

Persistence mode leaves no trace here: it is NVML's to tell, and counts as a holder where the two are joined.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.observation import Holder
from agent.host.device_nodes import VFIO_DEVICE, DeviceNodes, read_device_nodes
from agent.host.file_tables import ENDED
from agent.host.holder_owner import is_virtual_machine, owner_of
from agent.host.kernel_calls import KernelCalls
from agent.host.kernel_holders import KernelHolders
from agent.host.nvidia_minors import NvidiaMinors
from agent.host.process_files import EndingError, ProcessFiles, check_ending
from agent.host.reading import names_in, read_link_name, read_text
from agent.host.scan import Scan

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, fixed in the kernel


class ProcHolders:
    """``HoldersPort``. Without root other users' open files cannot be seen, and the answer is Unknown.

    ``alone`` is held during a scan, so that our own NVML child does not run then (a stuck one is seen, and counts).
    """

    def __init__(
        self,
        root: Path = Path("/"),
        alone: asyncio.Lock | None = None,
        minors: NvidiaMinors | None = None,
    ) -> None:
        self._root = root
        self._minors = minors or NvidiaMinors(root)
        self._alone = alone or asyncio.Lock()
        self._proc = root / "proc"
        self._scan: Scan[Mapping[str, Fact[tuple[Holder, ...]]]] = Scan("holder scan")
        self._maps = KernelCalls("memory map of a process")

    async def read(self, addresses: Iterable[str]) -> Mapping[str, Fact[tuple[Holder, ...]]]:
        wanted = tuple(addresses)
        async with self._alone:
            return await self._scan.run(lambda: self._read(wanted))

    def _read(self, wanted: tuple[str, ...]) -> dict[str, Fact[tuple[Holder, ...]]]:
        try:
            return self._look(wanted)
        except OSError as error:
            return dict.fromkeys(wanted, Unknown(f"holders cannot be looked for: {error}", "HoldersUnknown"))

    def _look(self, wanted: tuple[str, ...]) -> dict[str, Fact[tuple[Holder, ...]]]:
        nodes = read_device_nodes(self._root, self._minors)
        held: dict[str, list[Holder]] = {address: [] for address in wanted}
        blind = self._blind_spot()
        found, unseen = self._device_paths()
        for pid, paths in found.items():
            self._add_process(pid, sorted(paths), nodes, held)
        told: dict[str, Fact[tuple[Holder, ...]]] = {}
        for address in wanted:
            kernel = KernelHolders(self._root, address, on_nvidia=address in nodes.on_nvidia)
            told[address] = _verdict((*held[address], *kernel.found), blind or unseen or kernel.unseen)
        return told

    def _device_paths(self) -> tuple[dict[int, set[str]], str]:
        """Device paths that each process has open or mapped, and why there may be more; "" where there are not."""
        files = ProcessFiles(self._root)
        found: dict[int, set[str]] = {}
        ending, unseen = [], ""
        for name in names_in(self._proc):
            if name.isdecimal():
                try:
                    found[int(name)] = files.opened(self._proc / name)
                except PermissionError:
                    unseen = unseen or f"open files of process {name} and others cannot be seen: need root"
                except EndingError:
                    ending.append(self._proc / name)
                except ENDED:
                    continue
                except OSError as error:
                    unseen = unseen or f"open files of process {name} cannot be seen: {error}"
        maps = self._maps.read_each(map(str, found), lambda name: _mapped(files, self._proc / name))
        for pid in found:
            mapped = maps.get(str(pid), f"the memory map of process {pid} cannot be seen: it does not answer")
            if isinstance(mapped, EndingError):
                ending.append(self._proc / str(pid))
            elif isinstance(mapped, str):
                unseen = unseen or mapped
            else:
                found[pid] |= mapped
        unseen = unseen or files.unseen or next(filter(None, map(_still_ending, ending)), "")
        return {pid: paths for pid, paths in found.items() if paths}, unseen

    def _blind_spot(self) -> str:
        namespace = read_link_name(self._proc / "self/ns/pid")
        if not isinstance(namespace, Absent) and namespace != Known(_HOST_PID_NAMESPACE):
            return "this is not the host's pid namespace, so processes outside it cannot be seen"
        return ""

    def _add_process(
        self, pid: int, paths: list[str], nodes: DeviceNodes, held: dict[str, list[Holder]]
    ) -> None:
        process = self._proc / str(pid)
        command = value_or(read_text(process / "comm"), "")
        owner = owner_of(value_or(read_text(process / "cgroup"), ""))
        kind = "vm" if is_virtual_machine(command) or owner.container.startswith("VM ") else "process"
        for address, path in _held_functions(paths, nodes):
            if address in held:
                held[address].append(Holder(kind, path, pid, command, owner.unit, owner.container))


def _still_ending(process: Path) -> str:
    """Most are gone by the end of the scan. One that is not waits for something, such as a driver."""
    try:
        check_ending(process)
    except OSError as error:  # EndingError for one
        return str(error)
    return ""


def _mapped(files: ProcessFiles, process: Path) -> set[str] | str | EndingError:
    """Why not, where it cannot be seen."""
    try:
        return files.mapped(process)
    except PermissionError:
        return f"what process {process.name} and others have mapped cannot be seen: need root (CAP_SYS_ADMIN)"
    except EndingError as ending:
        return ending
    except ENDED:
        return set()
    except OSError as error:
        return f"what process {process.name} has mapped cannot be seen: {error}"


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

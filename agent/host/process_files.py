"""Which device files a process has open or mapped.

Not to be seen, by anyone in user space: a file on its way through a socket (SCM_RIGHTS) or registered with io_uring
and closed; a dma-buf whose device file was closed. A file of a FUSE file system that is one user's is told by its path:
its kind is not even root's to see, and no device can be opened there, for such mounts are nodev.

The use count of a driver's module is no cross-check: it counts inherited files once, the modules on top in ways that
differ between versions, and all GPUs together, at another moment than this scan.
"""

import os
import re
from pathlib import Path

from agent.core.fact import value_or
from agent.host.char_devices import CharDevices
from agent.host.device_nodes import VFIO_DEVICE
from agent.host.file_tables import ENDED, tables_of_threads, threads_but_first
from agent.host.reading import read_text
from agent.host.statx import KindReader

_INTERESTING = ("/dev/nvidia", "/dev/vfio/", "/dev/dri/", "/dev/snd/", "/dev/i2c-")
_MAX_MAPS = 64 << 20  # bytes; 65,530 mappings, the usual bound of the kernel, are about 8 MiB
_MAPPING = re.compile(rb"^0*([0-9a-f]+)-0*([0-9a-f]+) \S+ \S+ (\S+ [1-9]\d* +[^\n]*)$", re.MULTILINE)
_EXITING, _KERNEL_THREAD = 0x4, 0x200000  # PF_EXITING and PF_KTHREAD in the flags of /proc/PID/stat


class EndingError(OSError):
    """The process is being taken down, so its files are no longer listed, and are not all closed yet."""


class ProcessFiles:
    """For one scan of one host: what is found out about a file helps with the next process that has it.

    Of what is raised only ``ENDED`` means that the process holds nothing any more.
    """

    def __init__(self, root: Path) -> None:
        self._devices = CharDevices(root)
        self._kinds = KindReader()
        self._mapped: dict[bytes, str] = {}  # by the device, inode and path of a mapped file

    @property
    def unseen(self) -> str:
        """Why a device may have gone unrecognised in what was read so far; "" where none has."""
        return self._devices.unseen

    def opened(self, process: Path) -> set[str]:
        """Device paths among the open files of every thread.

        Raises PermissionError, EndingError, ``ENDED``, or another OSError.
        """
        paths, files = self._in_table(process / "fd")
        for tables in tables_of_threads(process):
            more, count = self._in_first(tables)
            paths |= more
            files += count
        if files == 0:
            check_ending(process)
        return paths

    def _in_first(self, tables: list[Path]) -> tuple[set[str], int]:
        """Of tables that are all the same, but for threads that have ended or are about to."""
        for table in tables:
            try:
                paths, files = self._in_table(table)
            except ENDED:
                continue
            if files:
                return paths, files
        return set(), 0

    def _in_table(self, table: Path) -> tuple[set[str], int]:
        """Device paths, and how many files are open in all."""
        paths = set()
        directory = os.open(table, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names = os.listdir(directory)  # noqa: PTH208 - of a directory that is open
            for name in names:
                path = self._opened_path(name, directory)
                if path == VFIO_DEVICE:
                    path = _vfio_device(table.parent / "fdinfo" / name)
                if path:
                    paths.add(path)
        finally:
            os.close(directory)
        return paths, len(names)

    def _opened_path(self, name: str, directory: int) -> str:
        try:
            file = self._kinds.read(name, directory)
        except (*ENDED, PermissionError):  # closed, or out of reach: the link says whether the process is
            return _by_text(_link(name, directory))
        if file.is_character_device:
            return self._devices.name(file.major, file.minor)
        is_device = file.kind == 0 and _link(name, directory) == VFIO_DEVICE
        return VFIO_DEVICE if is_device else ""

    def mapped(self, process: Path) -> set[str]:
        """Device paths among the mapped files: a mapping outlives the closing of its file, and holds it open.

        Sleeps for as long as someone has the process's memory map locked. Raises PermissionError, EndingError,
        ``ENDED``, or another OSError.
        """
        owner, mappings = _memory_of(process)
        new = {
            file: f"{start.decode()}-{end.decode()}"
            for start, end, file in mappings
            if file not in self._mapped
        }
        if new:
            self._learn(owner / "map_files", new)
        return {name for _, _, file in mappings if (name := self._mapped.get(file))}

    def _learn(self, links: Path, new: dict[bytes, str]) -> None:
        kinds = KindReader()  # an earlier read of this kind may have been given up on, and still be under way
        directory = os.open(links, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for file, span in new.items():
                text = b"".join(file.split(maxsplit=2)[2:]).decode(errors="replace")
                try:
                    kind = kinds.read(span, directory)
                except FileNotFoundError:  # it is mapped no longer, or elsewhere
                    if path := _by_text(text):
                        self._mapped[file] = path
                    continue
                is_device = kind.is_character_device
                self._mapped[file] = (
                    self._devices.name(kind.major, kind.minor) if is_device else _vfio_by_text(text)
                )
        finally:
            os.close(directory)


def check_ending(process: Path) -> None:
    """Raises EndingError: what is killed closes its files and gives its memory back after both have left the list, and a
    driver may prevent it. Raises OSError where that cannot be told.
    """
    for task in (process, *(process / "task" / name for name in threads_but_first(process))):
        _, _, rest = _stat(task).rpartition(") ")
        fields = rest.split()
        if len(fields) < 7 or fields[0] in ("Z", "X"):
            continue
        flags = int(fields[6])
        if flags & _EXITING and not flags & _KERNEL_THREAD:
            raise EndingError(f"process {process.name} is ending, and what it still has open cannot be seen")


def _stat(task: Path) -> str:
    try:
        return (task / "stat").read_text(errors="replace")
    except ENDED:
        return ""


def _memory_of(process: Path) -> tuple[Path, list[tuple[bytes, bytes, bytes]]]:
    """(start, end, device with inode and path) of each mapped file, and the thread that shows them.

    A first thread that has ended shows none. Raises EndingError, ``ENDED`` or another OSError.
    """
    mappings = _mappings(process)
    if mappings is not None:
        return process, mappings
    # Beside the processes /proc shows each thread, though it lists none there; only there is it with ``map_files``.
    for thread in (process / ".." / name for name in threads_but_first(process)):
        try:
            mappings = _mappings(thread)
        except FileNotFoundError:
            continue  # that thread has ended
        if mappings is not None:
            return thread, mappings
    check_ending(process)
    return process, []


def _mappings(task: Path) -> list[tuple[bytes, bytes, bytes]] | None:
    """None: it has no memory at all, as a kernel thread or one that has ended: newer kernels say ESRCH of those."""
    try:
        with (task / "maps").open("rb") as file:
            text = file.read(_MAX_MAPS + 1)
    except ProcessLookupError:
        return None
    if len(text) > _MAX_MAPS:
        raise PermissionError(f"{task / 'maps'} is longer than {_MAX_MAPS >> 20} MiB")
    return _MAPPING.findall(text) if text else None


def _link(name: str, directory: int) -> str:
    try:
        return os.readlink(name, dir_fd=directory)
    except ENDED:
        return ""  # it was closed


def _by_text(text: str) -> str:
    """Where the file itself cannot be looked at any more."""
    path = text.removesuffix(" (deleted)")
    if path == VFIO_DEVICE:
        return path
    return path if path.startswith(_INTERESTING) and path != "/dev/vfio/vfio" else ""


def _vfio_by_text(text: str) -> str:
    """Its files have no name in any directory, so a path, which begins with /, cannot pass for one."""
    return VFIO_DEVICE if text.removesuffix(" (deleted)") == VFIO_DEVICE else ""


def _vfio_device(fdinfo: Path) -> str:
    """Newer kernels name the device of a vfio-device file in its fdinfo."""
    match = re.search(r"^vfio-device-syspath:\s*\S*/(\S+)$", value_or(read_text(fdinfo), ""), re.MULTILINE)
    return f"{VFIO_DEVICE} {match[1]}" if match else VFIO_DEVICE

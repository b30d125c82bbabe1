"""Locked clocks as they were last set from here, by GPU: NVML has no call that tells them.

A note stands in a file under /run, so it outlives the agent and no boot, and carries the inode of the driver's link
to the GPU: sysfs makes that link anew with each binding, and no two of one boot share an inode.
"""

from pathlib import Path

from agent.core.fact import Known
from agent.core.quantity import parse_clocks
from agent.host.local_files import remove, write_atomically
from agent.host.nvml_settings import CLOCKS
from agent.host.reading import read_text


class ClockLocks:
    def __init__(self, root: Path) -> None:
        self._folder = root / "run/gpu-host-agent/locked-clocks"
        self._driver = root / "sys/bus/pci/drivers/nvidia"

    def noted(self, address: str, setting: str) -> tuple[int, int] | None:
        """``setting``: one of ``CLOCKS``. None: nothing that is about this binding of the GPU."""
        text = read_text(self._file(address, setting))
        if not isinstance(text, Known):
            return None
        binding, _, value = text.value.partition(" ")
        try:
            return parse_clocks(value) if binding == self.binding(address) else None
        except ValueError:
            return None

    def note(self, address: str, setting: str, value: str) -> None:
        """Raises OSError."""
        write_atomically(self._file(address, setting), f"{self.binding(address)} {value}\n".encode())

    def forget(self, address: str, setting: str) -> None:
        """Before what may change it. Without persistence mode the driver forgets both. Raises OSError."""
        for name in CLOCKS if setting == "persistence-mode" else (setting,):
            if name in CLOCKS:
                remove(self._file(address, name))

    def _file(self, address: str, setting: str) -> Path:
        return self._folder / f"{address}.{setting}"

    def binding(self, address: str) -> str:
        try:
            return str((self._driver / address).lstat().st_ino)
        except OSError:
            return "none"  # it has left the driver: a note about that is about nothing

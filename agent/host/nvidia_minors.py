"""The device minor of each GPU that NVIDIA's driver has: N of /dev/nvidiaN, which is no index.

The driver answers only when it has the GPU's lock, which one that is stuck never gives up, and it wakes a GPU that is
powered down. So the file is read once in the life of its directory, for a minor stays as long as the GPU is bound, and
by a child that can be left behind.
"""

import re
import threading
from collections.abc import Mapping
from pathlib import Path

from agent.core.fact import Fact, Known, Unknown
from agent.host.attribute_read import AttributeReader
from agent.host.reading import convert, names_in

_LINE = "Device Minor:"
_MINOR = re.compile(rf"{_LINE}\s*(\d+)")


class NvidiaMinors:
    """For any thread; they take turns."""

    def __init__(self, root: Path) -> None:
        self._gpus = root / "proc/driver/nvidia/gpus"
        self._reader = AttributeReader()
        self._turn = threading.Lock()
        self._known: Mapping[tuple[str, int, int], Fact[int]] = {}

    def read(self) -> Mapping[str, Fact[int]]:
        """By address. Blocks for up to two seconds for each GPU that has stopped to answer. Raises OSError."""
        with self._turn:
            lives = [life for name in names_in(self._gpus) if (life := self._life(name)) is not None]
            minors = {life: self._known.get(life) or self._ask(life[0]) for life in lives}
            self._known = {life: minor for life, minor in minors.items() if isinstance(minor, Known)}
            return {address.lower(): minor for (address, _, _), minor in minors.items()}

    def _life(self, address: str) -> tuple[str, int, int] | None:
        """A directory's number may be given to the next one, but not with the same time."""
        try:
            found = (self._gpus / address).stat()
        except FileNotFoundError:
            return None
        return address, found.st_ino, found.st_ctime_ns

    def _ask(self, address: str) -> Fact[int]:
        path = self._gpus / address / "information"
        line = self._reader.read(address, path, _LINE)
        if line is None:
            return Unknown(f"{path}: the driver does not answer")
        return convert(line, _minor)


def _minor(line: str) -> Fact[int]:
    """Raises ValueError."""
    found = _MINOR.fullmatch(line)
    if found is None:
        raise ValueError
    return Known(int(found[1]))

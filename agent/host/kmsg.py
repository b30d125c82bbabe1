"""The kernel log from /dev/kmsg (Documentation/ABI/testing/dev-kmsg), read without waiting and up to a bound."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

from agent.core.fact import Known
from agent.host.reading import read_text
from agent.host.scan import Scan
from agent.ports import KernelLines

MAX_LINES = 10_000  # per read; what is left comes with the next one
_RECORD = 8192  # the kernel gives one record a read, and EINVAL where the buffer is too small for it
_KERNEL_FACILITY = 0  # lines that programs write there have another: nobody may forge a fault


class Kmsg:
    """``KernelLogPort``. Raises PermissionError where the log may not be read (dmesg_restrict)."""

    def __init__(self, root: Path = Path("/"), max_lines: int = MAX_LINES) -> None:
        self._root = root
        self._max_lines = max_lines
        self._scan: Scan[KernelLines] = Scan("kernel log")

    async def read(self, cursor: str) -> KernelLines:
        """The cursor is "BOOT_ID:SEQUENCE" of the last line seen; one of another boot starts from the beginning."""
        return await self._scan.run(lambda: self._read(cursor))

    def _read(self, cursor: str) -> KernelLines:
        boot = read_text(self._root / "proc/sys/kernel/random/boot_id")
        boot_id = boot.value if isinstance(boot, Known) else "unknown"
        seen = parse_cursor(cursor, boot_id)
        fd = os.open(self._root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return self._collect(fd, boot_id, seen)
        finally:
            os.close(fd)

    def _collect(self, fd: int, boot_id: str, seen: int) -> KernelLines:
        offset = time.time() - time.monotonic()  # records carry microseconds since boot
        lines: list[tuple[float, str]] = []
        gap = False
        for record in _records(fd):
            parsed = parse_record(record) if record is not None else None
            if parsed is None:
                continue  # overwritten while we read: the sequence numbers will show it
            sequence, facility, seconds, text = parsed
            if sequence <= seen:
                continue
            gap = gap or sequence > seen + 1
            seen = sequence
            if facility == _KERNEL_FACILITY:
                lines.append((offset + seconds, text))
                if len(lines) >= self._max_lines:
                    break
        return KernelLines(tuple(lines), f"{boot_id}:{seen}", gap)


def parse_cursor(cursor: str, boot_id: str) -> int:
    """The sequence number last seen in this boot; -1 for none."""
    boot, _, sequence = cursor.rpartition(":")
    return int(sequence) if boot == boot_id and sequence.isdecimal() else -1


def parse_record(record: str) -> tuple[int, int, float, str] | None:
    """(sequence, facility, seconds since boot, text) of "priority,sequence,microseconds,flags;text". None: no record."""
    head, found, body = record.partition(";")
    fields = head.split(",")
    if not found or len(fields) < 3 or not all(field.isdecimal() for field in fields[:3]):
        return None
    priority, sequence, microseconds = (int(field) for field in fields[:3])
    # Lines that begin with a blank are the record's dictionary.
    return sequence, priority >> 3, microseconds / 1e6, body.partition("\n")[0]


def _records(fd: int) -> Iterator[str | None]:
    """Records up to the present. None stands for some that were overwritten before they could be read (EPIPE)."""
    while True:
        try:
            data = os.read(fd, _RECORD)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            yield None
            continue
        if not data:
            return
        yield data.decode(errors="replace")

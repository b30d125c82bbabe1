"""The kernel log from /dev/kmsg (Documentation/ABI/testing/dev-kmsg), read without waiting and up to a bound."""

import errno
import os
import re
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

from agent.core.fact import Known, say
from agent.host.reading import read_text
from agent.host.scan import Scan
from agent.ports import KernelLines

MAX_LINES = 10_000  # per read; what is left comes with the next one
_MAX_RECORDS = 50_000  # per read, lines of programs included: they cost time too
_RECORD = 8192  # the kernel gives one record a read, and EINVAL where the buffer is too small for it
_MAX_TEXT = 4096  # characters of a line and its continuations
_KERNEL_FACILITY = 0  # lines that programs write there have another: nobody may forge a fault
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``continues``: it is a further piece of the line before it, by the same caller."""

    sequence: int
    facility: int
    seconds: float  # since boot
    text: str
    continues: bool = False


class Kmsg:
    """``KernelLogPort``. Raises PermissionError where the log may not be read (dmesg_restrict).

    The file stays open between reads that go on where the last one ended: from its start the kernel would have to
    give every record of the whole ring again.
    """

    def __init__(self, root: Path = Path("/"), max_lines: int = MAX_LINES) -> None:
        self._root = root
        self._max_lines = max_lines
        self._scan: Scan[KernelLines] = Scan("kernel log")
        self._open: _Open | None = None

    async def read(self, cursor: str) -> KernelLines:
        """The cursor is "BOOT_ID:SEQUENCE" of the last line seen; one of another boot starts from the beginning."""
        return await self._scan.run(lambda: self._read(cursor))

    def _read(self, cursor: str) -> KernelLines:
        boot = read_text(self._root / "proc/sys/kernel/random/boot_id")
        if not isinstance(boot, Known):
            # Sequence numbers begin anew with every boot: without its name, lines of this one could be passed over.
            raise OSError(errno.ENODATA, f"the boot cannot be told: {say(boot)}")
        seen = parse_cursor(cursor, boot.value)
        # Taken, not shared: a read that was given up on must not move the place of the next one.
        opened, self._open = self._open, None
        if opened is None or opened.cursor != (boot.value, seen):
            opened = _Open(self._root / "dev/kmsg", (boot.value, seen))
        lines = _collect(opened, self._max_lines)
        self._open = opened
        return replace(lines, fresh=seen < 0)


class _Open:
    """The open log, and up to where it was read. Closed when nothing refers to it any more."""

    def __init__(self, path: Path, cursor: tuple[str, int]) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self.cursor = cursor
        self.ahead: Record | None = None  # read, and not given out

    def next(self) -> Record | None:
        """The next record; None at the present end. Those that were overwritten are missing: their numbers show it."""
        record, self.ahead = self.ahead, None
        while record is None:
            try:
                data = os.read(self._fd, _RECORD)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                continue
            if not data:
                return None
            record = parse_record(data)
        return record


def _collect(log: _Open, most: int) -> KernelLines:
    offset = time.time() - time.monotonic()  # records carry microseconds since boot
    lines: list[tuple[float, str]] = []
    boot, seen = log.cursor
    gap = more = joins = False
    taken = 0
    while (record := log.next()) is not None:
        if record.sequence <= seen:
            continue
        continues = record.continues and joins and record.sequence == seen + 1
        if not continues and (len(lines) >= most or taken >= _MAX_RECORDS):
            log.ahead, more = record, True
            break
        gap = gap or record.sequence > seen + 1
        seen, taken = record.sequence, taken + 1
        joins = record.facility == _KERNEL_FACILITY
        if joins and continues:
            lines[-1] = (lines[-1][0], (lines[-1][1] + record.text)[:_MAX_TEXT])
        elif joins:
            lines.append((offset + record.seconds, record.text))
    log.cursor = (boot, seen)
    return KernelLines(tuple(lines), f"{boot}:{seen}", gap, more=more)


def parse_cursor(cursor: str, boot_id: str) -> int:
    """The sequence number last seen in this boot; -1 for none."""
    boot, _, sequence = cursor.rpartition(":")
    return int(sequence) if boot == boot_id and sequence.isascii() and sequence.isdecimal() else -1


def parse_record(record: bytes) -> Record | None:
    """The record of "priority,sequence,microseconds,flags;text", without its dictionary. None: no record."""
    head, found, body = record.partition(b";")
    fields = head.split(b",")
    if not found or len(fields) < 3 or not all(field.isdigit() for field in fields[:3]):
        return None
    priority, sequence, microseconds = (int(field) for field in fields[:3])
    # Lines that begin with a blank are the record's dictionary: they are told apart by the line's end, for the text
    # itself cannot have one.
    text = unescape(body.partition(b"\n")[0])
    continues = len(fields) > 3 and b"c" in fields[3]
    return Record(sequence, priority >> 3, microseconds / 1e6, text, continues)


def unescape(text: bytes) -> str:
    r"""The text as it was logged: the kernel writes \xNN for what is not printable ASCII, and for the backslash.

    A line's end or another control character within the text becomes a blank: one record stays one line.
    """
    raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), text)
    return _CONTROL.sub(" ", raw.decode(errors="replace"))

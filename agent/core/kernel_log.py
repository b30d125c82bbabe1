"""Kernel log lines folded into counted records: a flood of thousands of lines leaves one record per device."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent.catalog.kernel_log import CodeNote, LineSort, kernel_log_catalog
from agent.core.observation import KernelEvent, Pci

MAX_RECORDS = 200
MAX_CODES = 8  # per sort and device; further codes are counted together, without a code
MAX_SAMPLE = 300  # characters
_MAX_LINE = 2000
# Every sort has places that no flood of another sort can take; the rest is for whoever comes first.
_RESERVED = 12

Key = tuple[str, str, int | None]


def fold(
    events: Sequence[KernelEvent], lines: Sequence[tuple[float, str]], pci: Pci | None
) -> tuple[KernelEvent, ...]:
    """``events`` with ``lines`` (wall clock, text) counted in, in order of first sight; at most MAX_RECORDS.

    ``pci`` gives the BARs that name the peer of a page fault. A count is a lower bound: the kernel leaves lines
    out, and says how many only sometimes.
    """
    return _Fold(events, pci).run(lines)


def note(event: KernelEvent) -> CodeNote:
    """What the event means for people, and the one next step."""
    entry = kernel_log_catalog().named(event.sort)
    if entry is None:
        return CodeNote(meaning=event.sample, next_step="read the kernel log")
    return entry.note(event.code)


def is_lost(event: KernelEvent) -> bool:
    """The device does not come back by itself: leave it alone, and keep the others (B12, B13, D4)."""
    entry = kernel_log_catalog().named(event.sort)
    return entry is not None and entry.lost


def is_fault(event: KernelEvent) -> bool:
    """The device itself is at fault until a reset or a reboot, and not just the program that used it."""
    entry = kernel_log_catalog().named(event.sort)
    return entry is not None and (entry.fault or event.code in entry.fault_codes)


@dataclass(slots=True)
class _Tally:
    count: int
    first: float
    last: float
    sample: str
    peer: str

    def add(self, count: int, when: float, peer: str = "") -> None:
        self.count += count
        self.first = min(self.first, when)
        self.last = max(self.last, when)
        self.peer = self.peer or peer


class _Fold:
    def __init__(self, events: Sequence[KernelEvent], pci: Pci | None) -> None:
        catalog = kernel_log_catalog()
        self._context = catalog.context
        self._needles = tuple((needle, entry) for entry in catalog.sorts for needle in entry.needles)
        self._shared = MAX_RECORDS - (_RESERVED + 1) * len(catalog.sorts)  # one place is each sort's rest
        self._bars = _gpu_bars(pci)
        self._tallies: dict[Key, _Tally] = {}
        self._per_sort: Counter[str] = Counter()
        self._per_device: Counter[tuple[str, str]] = Counter()
        self._device = ""  # named by the last context line
        for e in events:
            self._insert((e.sort, e.address, e.code), _Tally(e.count, e.first, e.last, e.sample, e.peer))

    def run(self, lines: Sequence[tuple[float, str]]) -> tuple[KernelEvent, ...]:
        for when, line in lines:
            entry = next((e for needle, e in self._needles if needle in line), None)
            if entry is not None:
                self._take(entry, when, line[:_MAX_LINE])
            elif self._context.needle in line:
                match = self._context.pattern.search(line)
                self._device = pci_address(match["address"]) if match else self._device
        return tuple(
            KernelEvent(sort, address, t.count, t.first, t.last, t.sample, code, t.peer)
            for (sort, address, code), t in self._tallies.items()
        )

    def _take(self, entry: LineSort, when: float, line: str) -> None:
        for pattern in entry.patterns:
            match = pattern.search(line)
            if match is not None:
                self._count(entry.sort, match.groupdict(), when, line)
                return
        match = entry.suppressed.search(line) if entry.suppressed is not None else None
        if match is not None:
            self._count_suppressed(entry.sort, int(match["count"]), when, line)

    def _count(self, sort: str, groups: dict[str, str | None], when: float, line: str) -> None:
        raw = groups.get("address") or groups.get("device")
        address = pci_address(raw) if raw else self._device if sort == "aer" else ""
        peer = self._peer(address, groups.get("fault"))
        key = self._place((sort, address, _code(groups.get("code"))))
        tally = self._tallies.get(key)
        if tally is None:
            self._insert(key, _Tally(1, when, when, line[:MAX_SAMPLE], peer))
        else:
            tally.add(1, when, peer)

    def _count_suppressed(self, sort: str, count: int, when: float, line: str) -> None:
        """The kernel does not say whose lines it left out: those of the device that was seen last."""
        latest = max(
            (k for k in self._tallies if k[0] == sort), key=lambda k: self._tallies[k].last, default=None
        )
        if latest is None:
            self._insert((sort, "", None), _Tally(count, when, when, line[:MAX_SAMPLE], ""))
        else:
            self._tallies[latest].add(count, when)

    def _place(self, key: Key) -> Key:
        """The record to count in: the key's own, or where there is no room for it, one that stands for several."""
        sort, address, _ = key
        if key in self._tallies:
            return key
        if self._per_device[(sort, address)] >= MAX_CODES:
            key = (sort, address, None)
        if key in self._tallies or self._has_room(sort):
            return key
        return (sort, "", None)

    def _has_room(self, sort: str) -> bool:
        beyond = sum(max(0, n - _RESERVED) for n in self._per_sort.values())
        return self._per_sort[sort] < _RESERVED or beyond < self._shared

    def _insert(self, key: Key, tally: _Tally) -> None:
        self._tallies[key] = tally
        self._per_sort[key[0]] += 1
        self._per_device[key[:2]] += 1

    def _peer(self, address: str, fault: str | None) -> str:
        if fault is None or not self._bars:
            return ""
        where, slot = int(fault, 16), address.rpartition(".")[0]
        return next(
            (
                gpu
                for first, last, gpu in self._bars
                if first <= where <= last and gpu.rpartition(".")[0] != slot
            ),
            "",
        )


def pci_address(text: str) -> str:
    """Sysfs form: lower case, segment 0000 where none is given (Intel's lines have none), function 0 likewise."""
    address = text.lower()
    if address.count(":") < 2:
        address = f"0000:{address}"
    domain, _, rest = address.partition(":")
    return f"{int(domain or '0', 16):04x}:{rest}" + ("" if "." in rest else ".0")


def _code(text: str | None) -> int | None:
    if text is None:
        return None
    return int(text, 16) if re.match("0x", text) else int(text)


def _gpu_bars(pci: Pci | None) -> tuple[tuple[int, int, str], ...]:
    functions = pci.functions.values() if pci is not None else ()
    return tuple((first, last, f.address) for f in functions if f.is_gpu for first, last in f.bars)

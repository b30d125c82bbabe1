"""Kernel log lines folded into counted records: a flood of thousands of lines leaves one record per device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent.catalog.kernel_log import CodeNote, LineSort, Severity, kernel_log_catalog
from agent.core.observation import KernelEvent, Pci

MAX_RECORDS = 400
MAX_CODES = 24  # codes and peers per sort and device; further ones are counted together, without either
MAX_SAMPLE = 300  # characters
_MAX_LINE = 1024  # the kernel's own limit for a line
# Every sort has places that no flood of another sort can take; the rest is for whoever comes first.
_RESERVED = 12

Key = tuple[str, str, int | None, str]  # sort, address, code, peer


@dataclass(frozen=True, slots=True)
class Folded:
    """Everything that is remembered of the lines so far, so that it does not matter where one read ends.

    ``context`` and ``device`` are the last context line's name and device: lines after it may be about them.
    """

    events: tuple[KernelEvent, ...] = ()
    context: str = ""
    device: str = ""


def fold(known: Folded, lines: Sequence[tuple[float, str]], pci: Pci | None) -> Folded:
    """``known`` with ``lines`` (wall clock, text) counted in, in order of first sight; at most MAX_RECORDS.

    ``pci`` gives the BARs that name the peer of a page fault. A count is a lower bound: the kernel leaves lines
    out, and says how many only sometimes.
    """
    return _Fold(known, pci).run(lines)


def note(event: KernelEvent) -> CodeNote:
    """What the event means for people, and the one next step."""
    entry = kernel_log_catalog().named(event.sort)
    if entry is None:
        return CodeNote(meaning=event.sample, next_step="read the kernel log")
    return entry.note(event.code)


def severity(event: KernelEvent) -> Severity:
    """``info`` for a sort of another version, of which nothing is known."""
    entry = kernel_log_catalog().named(event.sort)
    return "info" if entry is None else entry.severity_of(event.code)


def is_lost(event: KernelEvent) -> bool:
    """The device does not come back by itself: leave it alone, and keep the others (B12, B13, D4)."""
    return severity(event) == "lost"


def is_fault(event: KernelEvent) -> bool:
    """The device itself is at fault until a reset or a reboot, and not just the program that used it."""
    return severity(event) == "fault"


@dataclass(slots=True)
class _Tally:
    count: int
    first: float
    last: float
    sample: str

    def add(self, count: int, when: float) -> None:
        self.count += count
        self.first = min(self.first, when)
        self.last = max(self.last, when)


class _Fold:
    def __init__(self, known: Folded, pci: Pci | None) -> None:
        catalog = kernel_log_catalog()
        self._contexts = catalog.contexts
        self._sorts = catalog.sorts
        self._needles = tuple(
            {n for e in catalog.sorts for n in e.needles} | {c.needle for c in catalog.contexts}
        )
        self._shared = MAX_RECORDS - (_RESERVED + 1) * len(catalog.sorts)  # one place is each sort's rest
        self._bars = _gpu_bars(pci)
        self._tallies: dict[Key, _Tally] = {}
        self._per_sort: Counter[str] = Counter()
        self._per_device: Counter[tuple[str, str]] = Counter()
        self._context, self._device = known.context, known.device
        for e in known.events:
            self._insert((e.sort, e.address, e.code, e.peer), _Tally(e.count, e.first, e.last, e.sample))

    def run(self, lines: Sequence[tuple[float, str]]) -> Folded:
        for when, line in lines:
            if any(needle in line for needle in self._needles):
                self._line(when, line[:_MAX_LINE])
        events = tuple(
            KernelEvent(sort, address, t.count, t.first, t.last, t.sample, code, peer)
            for (sort, address, code, peer), t in self._tallies.items()
        )
        return Folded(events, self._context, self._device)

    def _line(self, when: float, line: str) -> None:
        for context in self._contexts:
            match = context.pattern.search(line) if context.needle in line else None
            if match is not None:
                self._context, self._device = context.name, pci_address(match["address"])
        # A line can hold another sort's needle in what a user has chosen (a process name): go on to the next sort.
        for entry in self._sorts:
            if any(needle in line for needle in entry.needles) and self._take(entry, when, line):
                return

    def _take(self, entry: LineSort, when: float, line: str) -> bool:
        for pattern in entry.patterns:
            match = pattern.pattern.search(line)
            if match is not None and self._count(entry, pattern.after, match.groupdict(), when, line):
                return True
        match = entry.suppressed.search(line) if entry.suppressed is not None else None
        if match is not None:
            self._count_suppressed(entry.sort, int(match["count"]), when, line)
        return match is not None

    def _count(
        self, entry: LineSort, after: str, groups: dict[str, str | None], when: float, line: str
    ) -> bool:
        raw = groups.get("address") or groups.get("device")
        address = pci_address(raw) if raw else self._device if after else ""
        if after and (after, address) != (self._context, self._device):
            return False
        wanted = (entry.sort, address, _code(groups), self._peer(address, groups.get("fault")))
        if entry.latest:
            for key in [k for k in self._tallies if k[:2] == wanted[:2] and k != wanted]:
                self._remove(key)
        key = self._place(wanted)
        tally = self._tallies.get(key)
        if tally is None:
            self._insert(key, _Tally(1, when, when, line[:MAX_SAMPLE]))
        else:
            tally.add(1, when)
        return True

    def _count_suppressed(self, sort: str, count: int, when: float, line: str) -> None:
        """The kernel does not say whose lines it left out: those of the device that was seen last."""
        latest = max(
            (k for k in self._tallies if k[0] == sort), key=lambda k: self._tallies[k].last, default=None
        )
        if latest is None:
            self._insert((sort, "", None, ""), _Tally(count, when, when, line[:MAX_SAMPLE]))
        else:
            self._tallies[latest].add(count, when)

    def _place(self, key: Key) -> Key:
        """The record to count in: the key's own, or where there is no room for it, one that stands for several."""
        sort, address, _, _ = key
        if key in self._tallies:
            return key
        if self._per_device[(sort, address)] >= MAX_CODES:
            key = (sort, address, None, "")
        if key in self._tallies or self._has_room(sort):
            return key
        return (sort, "", None, "")

    def _has_room(self, sort: str) -> bool:
        beyond = sum(max(0, n - _RESERVED) for n in self._per_sort.values())
        return self._per_sort[sort] < _RESERVED or beyond < self._shared

    def _insert(self, key: Key, tally: _Tally) -> None:
        self._tallies[key] = tally
        self._per_sort[key[0]] += 1
        self._per_device[key[:2]] += 1

    def _remove(self, key: Key) -> None:
        del self._tallies[key]
        self._per_sort[key[0]] -= 1
        self._per_device[key[:2]] -= 1

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
    return f"{int(domain, 16):04x}:{rest}" + ("" if "." in rest else ".0")


def _code(groups: dict[str, str | None]) -> int | None:
    bits, code = groups.get("bits"), groups.get("code")
    if bits is not None:
        return int(bits, 16)
    return None if code is None else int(code, 16 if code.startswith("0x") else 10)


def _gpu_bars(pci: Pci | None) -> tuple[tuple[int, int, str], ...]:
    functions = pci.functions.values() if pci is not None else ()
    return tuple((first, last, f.address) for f in functions if f.is_gpu for first, last in f.bars)

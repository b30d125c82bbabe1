"""One transfer, checked: the target is poisoned first and read by its owner afterwards, guards and source included."""

from collections.abc import Callable
from dataclasses import dataclass

from agent.selftest.driver import Gpu
from agent.selftest.patterns import FULL, POISON, QUICK, Patterns, describe

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GUARD = 64 * KIB  # before and after what is written
LARGE, HUGE = 4 * MIB, 64 * MIB
SPARE = 512 * MIB  # left free in full mode, which allocates the rest: the driver needs some itself
TIMED = 4  # copies of 4 MiB
_WORD = 8
_UNTOUCHED = bytes([POISON]) * GUARD


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory. Offsets count from behind the first guard; ``room`` is what lies between the guards."""

    gpu: Gpu
    start: int
    room: int

    def at(self, offset: int) -> int:
        return self.start + GUARD + offset


def allocate(gpu: Gpu, *, full: bool) -> Buffer:
    """As much as one pair needs; in full mode nearly all that is free, for its end is tested too."""
    room = _round(max(LARGE + GUARD, gpu.free_memory() - SPARE - 2 * GUARD)) if full else LARGE + GUARD
    return Buffer(gpu, gpu.allocate(room + 2 * GUARD), room)


def _round(size: int) -> int:
    return size - size % MIB


@dataclass(frozen=True, slots=True)
class Piece:
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{_said(self.size)} at offset {_said(self.offset)}"


def _said(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            whole, rest = divmod(size, unit)
            return f"{whole} {name}" + (f" + {rest}" if rest else "")
    return str(size)


def pieces(room: int, *, full: bool, words: bool) -> list[Piece]:
    """What is sent. ``words``: only whole 8-byte words, aligned, which is what a kernel can load and store."""
    odd = Piece(_WORD, 64 * KIB + _WORD) if words else Piece(4, 64 * KIB + 12)
    found = [Piece(0, 4 * KIB), odd, Piece(0, LARGE)]
    if full:
        if room >= HUGE:
            found.append(Piece(0, HUGE))
        if room >= 4 * GIB + LARGE // 2:
            found.append(Piece(4 * GIB - LARGE // 2, LARGE))
        if room > 2 * LARGE:
            found.append(Piece(room - LARGE, LARGE))
    return found


@dataclass(frozen=True, slots=True)
class Path:
    """How bytes go from one buffer to another: ``begin(to, origin, size)`` on ``engine``, whose stream is waited for."""

    engine: Gpu
    begin: Callable[[int, int, int], None]
    words: bool  # a kernel's


def path_of(name: str, source: Buffer, target: Buffer) -> Path:
    """copy-push, copy-pull: the copy engine of the source, of the target; store, load: their multiprocessors.

    staged is a push: without access of either to the other, the driver takes it through the host.
    """
    engine = target.gpu if name in {"copy-pull", "load"} else source.gpu
    if name in {"store", "load"}:
        return Path(engine, engine.launch, words=True)

    def begin(to: int, origin: int, size: int) -> None:
        engine.copy((target.gpu, to), (source.gpu, origin), size)

    return Path(engine, begin, words=False)


@dataclass(frozen=True, slots=True)
class Lane:
    """One ordered pair: where it sends from and to, and what."""

    source: Buffer
    target: Buffer
    patterns: Patterns
    full: bool

    def check(self, path: Path) -> str:
        """What is wrong, in words; "" when every piece of every pattern arrived, and nothing else was touched."""
        room = min(self.source.room, self.target.room)
        for kind in FULL if self.full else QUICK:
            for piece in pieces(room, full=self.full, words=path.words):
                if wrong := self._transfer(path, kind, piece):
                    return f"{wrong}; pattern {kind}, {piece}"
        return ""

    def _transfer(self, path: Path, kind: str, piece: Piece) -> str:
        want = self.patterns.get(kind, piece.size, piece.offset // _WORD)
        origin, to = self.source.at(piece.offset), self.target.at(piece.offset)
        self.source.gpu.write(origin, want)
        poison(self.target, piece)
        self.source.gpu.settle()
        self.target.gpu.settle()
        path.begin(to, origin, piece.size)
        path.engine.wait()
        return judge(self.source, self.target, piece, want)

    def speed(self, path: Path) -> float:
        """GB/s over this path, with nothing else going on."""

        def work() -> None:
            for _ in range(TIMED):
                path.begin(self.target.at(0), self.source.at(0), LARGE)

        return TIMED * LARGE / 1e9 / max(path.engine.timed(work), 1e-9)


def poison(target: Buffer, piece: Piece) -> None:
    target.gpu.fill(target.at(piece.offset) - GUARD, POISON, piece.size + 2 * GUARD)


def judge(source: Buffer, target: Buffer, piece: Piece, want: memoryview) -> str:
    """What the owners of both buffers see after a transfer that has ended; "" when all is as it should be."""
    got = target.gpu.read(target.at(piece.offset), piece.size)
    if got != want:  # a bytearray on the left compares as fast as memory goes; a memoryview would not
        return describe(want, memoryview(got))
    around = {"before": piece.offset - GUARD, "behind": piece.offset + piece.size}
    for where, offset in around.items():
        if target.gpu.read(target.at(offset), GUARD) != _UNTOUCHED:
            return f"bytes {where} the target overwritten"
    if source.gpu.read(source.at(piece.offset), piece.size) != want:
        return "source overwritten"
    return ""


def host_bounce(gpu: Gpu, buffer: Buffer, patterns: Patterns) -> str:
    """To this GPU's memory and back by the host alone; "" when what comes back is what went there."""
    for kind in QUICK:
        want = patterns.get(kind, LARGE)
        gpu.fill(buffer.at(0), POISON, LARGE)
        gpu.write(buffer.at(0), want)
        gpu.settle()
        got = gpu.read(buffer.at(0), LARGE)
        if got != want:
            return f"{describe(want, memoryview(got))}; pattern {kind}, {Piece(0, LARGE)}"
    return ""

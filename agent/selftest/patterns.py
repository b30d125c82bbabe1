"""Bytes to send, and words for what came instead of them. Pure."""

import hashlib
import random
from array import array
from collections.abc import Sequence

POISON = 0x5A  # what a target holds before; no pattern consists of it
QUICK = ("address", "random", "ones", "zeros")
FULL = (*QUICK, "walking-bit", "checker")
LINE = 64  # bytes
_WORD = 8
_SALT_BITS = 24
_CONSTANTS = {"ones": b"\xff", "zeros": b"\0", "checker": b"\x55\xaa"}


def salt_for(seed: int, source: str, destination: str) -> int:
    """24 bits that differ between ordered pairs, so that another pair's data is told from a pair's own."""
    digest = hashlib.sha256(f"{seed} {source} {destination}".encode()).digest()
    return int.from_bytes(digest[:3], "little")


def make(kind: str, size: int, salt: int, first_word: int = 0) -> bytes:
    """``size`` bytes of a pattern. ``address`` has each word's number, from ``first_word`` on, below the salt."""
    if kind == "address":
        words = -(-size // _WORD)
        begin = (salt << (64 - _SALT_BITS)) + first_word
        return array("Q", range(begin, begin + words)).tobytes()[:size]
    if kind == "random":
        return random.Random(salt << 40 | first_word).randbytes(size)
    if kind == "walking-bit":
        unit = b"".join((1 << (bit + salt) % 64).to_bytes(_WORD, "little") for bit in range(64))
        return (unit * (size // len(unit) + 1))[:size]
    unit = _CONSTANTS[kind]
    return (unit * (size // len(unit) + 1))[:size]


class Patterns:
    """The patterns of one ordered pair. ``keep``: remember those that begin at word 0, which takes their size each."""

    def __init__(self, salt: int, *, keep: bool) -> None:
        self._salt = salt
        self._keep = keep
        self._kept: dict[str, bytes] = {}

    def get(self, kind: str, size: int, first_word: int = 0) -> memoryview:
        if not self._keep or first_word:
            return memoryview(make(kind, size, self._salt, first_word))
        if len(self._kept.get(kind, b"")) < size:
            self._kept[kind] = make(kind, size, self._salt)
        return memoryview(self._kept[kind])[:size]


def describe(want: memoryview, got: memoryview) -> str:
    """What differs: its sort in words, the first wrong byte, how many lines of 64 bytes, and both words there."""
    lines = [at for at in range(0, len(want), LINE) if want[at : at + LINE] != got[at : at + LINE]]
    first = next(at for at in range(lines[0], len(want)) if want[at] != got[at])
    at = first - first % _WORD
    had, wanted = bytes(got[at : at + _WORD]), bytes(want[at : at + _WORD])
    count = f"{len(lines)} of {-(-len(want) // LINE)} lines of {LINE} bytes wrong"
    return f"{_sort(want, got, lines, first)}; first wrong byte {first}, {count}, got {had.hex()}, want {wanted.hex()}"


def _sort(want: memoryview, got: memoryview, lines: Sequence[int], first: int) -> str:
    """Of what is wrong, from its first byte on. What is not all of one sort has its own words."""
    starts = (first, *lines[1:])
    wrong = b"".join(bytes(got[at : at - at % LINE + LINE]) for at in starts)
    for value, said in ((0, "zeros"), (0xFF, "all ones"), (POISON, "dropped write")):
        if wrong.count(value) == len(wrong):
            return said
    right = b"".join(bytes(want[at : at - at % LINE + LINE]) for at in starts)
    bits = (int.from_bytes(wrong, "little") ^ int.from_bytes(right, "little")).bit_count()
    if bits <= 2 * len(lines):
        return f"flipped bits ({bits})"
    return _moved(want, got, lines[0]) or "wrong data"


def _moved(want: memoryview, got: memoryview, line: int) -> str:
    """Where the first wrong line's bytes belong, when they are of this pattern and can be found in one place only."""
    piece = bytes(got[line : line + LINE])
    whole = bytes(want)
    place = whole.find(piece)
    if len(piece) < LINE or place < 0 or whole.find(piece, place + 1) >= 0:
        return ""
    return f"shifted (what belongs at byte {place} is at {line})"

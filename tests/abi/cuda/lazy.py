"""Tests of peer-to-peer DMA as they are commonly written: each leaves something out, and says "fine" where that broke.

Run in a child, against the stand-in: ``python -m tests.abi.cuda.lazy NAME``. It prints "fine" or "broken".
"""

import hashlib
import struct
import sys
from collections.abc import Callable

from tests.abi.cuda.devices import Devices

KIB, MIB = 1 << 10, 1 << 20
SIZE = 4 * MIB
POISON = 0x5A


def numbered(size: int) -> bytes:
    return b"".join(struct.pack("<Q", 0xA5_0000_0000 + word) for word in range(size // 8))


def noise(size: int) -> bytes:
    return hashlib.shake_128(b"lazy").digest(size)


def arrives(devices: Devices, source: int, target: int, pattern: bytes, *, poison: bool = True) -> bool:
    """One copy by the copy engine of the source, read by the owner of the target."""
    origin, to = devices.allocate(source, len(pattern)), devices.allocate(target, len(pattern))
    devices.write(source, origin, pattern)
    if poison:
        devices.fill(target, to, POISON, len(pattern))
    devices.copy(source, (target, to), (source, origin), len(pattern))
    return devices.read(target, to, len(pattern)) == pattern


def constant_fill(devices: Devices) -> bool:
    return all(arrives(devices, 0, 1, value * SIZE) for value in (b"\xff", b"\0"))


def few_bytes(devices: Devices) -> bool:
    return all(arrives(devices, 0, 1, numbered(size)) for size in (8, KIB))


def copy_engine_only(devices: Devices) -> bool:
    return arrives(devices, 0, 1, numbered(SIZE)) and arrives(devices, 1, 0, numbered(SIZE))


def read_through_the_window(devices: Devices) -> bool:
    pattern = numbered(SIZE)
    origin, back, window = (devices.allocate(device, SIZE) for device in (0, 0, 1))
    devices.write(0, origin, pattern)
    devices.fill(1, window, POISON, SIZE)
    devices.kernel(0, window, origin, SIZE)
    devices.kernel(0, back, window, SIZE)
    return devices.read(0, back, SIZE) == pattern


def without_poison(devices: Devices) -> bool:
    """The same buffer and pattern twice, first with the host in between: as a warm-up leaves it."""
    pattern = numbered(SIZE)
    origin, to = devices.allocate(0, SIZE), devices.allocate(1, SIZE)
    devices.write(0, origin, pattern)
    devices.write(1, to, devices.read(0, origin, SIZE))
    devices.copy(0, (1, to), (0, origin), SIZE)
    return devices.read(1, to, SIZE) == pattern


def one_direction(devices: Devices) -> bool:
    return all(arrives(devices, 0, 1, make(SIZE)) for make in (numbered, noise))


def first_pair(devices: Devices) -> bool:
    return all(arrives(devices, *pair, numbered(SIZE)) for pair in ((0, 1), (1, 0)))


def without_deadline(devices: Devices) -> bool:
    return arrives(devices, 0, 1, numbered(SIZE))


def repeating_pattern(devices: Devices) -> bool:
    return arrives(devices, 0, 1, noise(2 * MIB) * 2)


def target_only(devices: Devices) -> bool:
    """Neither the bytes around the target nor the source are looked at afterwards."""
    return arrives(devices, 0, 1, numbered(SIZE)) and arrives(devices, 0, 1, noise(SIZE))


def one_pair_at_a_time(devices: Devices) -> bool:
    every = range(devices.count)
    return all(arrives(devices, a, b, numbered(SIZE)) for a in every for b in every if a != b)


def without_controls(devices: Devices) -> bool:
    return arrives(devices, 0, 1, numbered(SIZE))


LAZY: dict[str, Callable[[Devices], bool]] = {
    test.__name__: test
    for test in (
        constant_fill, few_bytes, copy_engine_only, read_through_the_window, without_poison, one_direction,
        first_pair, without_deadline, repeating_pattern, target_only, one_pair_at_a_time, without_controls,
    )
}  # fmt: skip


def main() -> None:
    devices = Devices()
    for a in range(devices.count):
        for b in range(a):
            devices.connect(a, b)
    print("fine" if LAZY[sys.argv[1]](devices) else "broken", flush=True)


if __name__ == "__main__":
    main()

"""Two registers from a PCIe function's extended configuration space (/sys/bus/pci/devices/ADDRESS/config).

Layout as in the PCI Express Base Specification: extended capabilities are a linked list from 0x100 on; each
header holds the capability's id in bits 0-15 and the next offset in bits 20-31. The list is walked by small
reads, since reading all 4096 bytes is known to upset some devices.
"""

import os
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.host.reading import unreadable

_FIRST = 0x100
_SERIAL_NUMBER = 0x0003
_ACS = 0x000D
_MAX_CAPABILITIES = 64


def read_serial(config: Path) -> Fact[str]:
    """The device serial number as 16 hex digits, high half first. Absent: no such capability."""
    payload = _capability(config, _SERIAL_NUMBER, 4, 8)
    if not isinstance(payload, Known):
        return payload
    low, high = payload.value[:4], payload.value[4:]
    return Known(f"{int.from_bytes(high, 'little'):08x}{int.from_bytes(low, 'little'):08x}")


def read_acs_ctl(config: Path) -> Fact[int]:
    """The ACS control register (capability + 6). Absent: no such capability."""
    payload = _capability(config, _ACS, 6, 2)
    return Known(int.from_bytes(payload.value, "little")) if isinstance(payload, Known) else payload


def _capability(config: Path, wanted: int, offset: int, length: int) -> Fact[bytes]:
    try:
        fd = os.open(config, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Absent(f"no {config}")
    except OSError as error:
        return unreadable(config, error)
    try:
        return _walk(fd, config, wanted, (offset, length))
    except OSError as error:
        return unreadable(config, error)
    finally:
        os.close(fd)


def _walk(fd: int, config: Path, wanted: int, field: tuple[int, int]) -> Fact[bytes]:
    if os.pread(fd, 2, 0) == b"\xff\xff":
        return Unknown(f"{config} reads all ones: the device does not answer", "DeviceNotAnswering")
    if len(os.pread(fd, 4, 252)) < 4:
        return Unknown(f"{config}: only the first 64 bytes are readable; need root", "NeedRoot")
    at = _FIRST
    for _ in range(_MAX_CAPABILITIES):
        header = int.from_bytes(os.pread(fd, 4, at), "little")
        if header in (0, 0xFFFFFFFF):
            break
        if header & 0xFFFF == wanted:
            payload = os.pread(fd, field[1], at + field[0])
            return (
                Known(payload) if len(payload) == field[1] else Unknown(f"{config} ends early", "Unreadable")
            )
        at = header >> 20
        if at < _FIRST:
            break
    return Absent(f"no extended capability {wanted:#06x}")

"""What kind of file something is, without waiting for the file system that it is on.

stat(2) asks the server of a network file system or of FUSE, and sleeps for as long as that does not answer. statx(2)
with AT_STATX_DONT_SYNC takes what the kernel has, and the kind of a file and a device's number never change.
"""

import ctypes
import os
import stat
import struct
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_DONT_SYNC, _NO_AUTOMOUNT = 0x4000, 0x800
_TYPE = 0x1  # STATX_TYPE
_SIZE = 256  # of struct statx, fixed by the kernel
_MODE = struct.Struct("=28xH")
_DEVICE = struct.Struct("=128xII")


class FileKind(NamedTuple):
    """``kind``: as stat.S_IFMT; 0 for an anonymous inode. ``major`` and ``minor``: of the device that it is."""

    kind: int
    major: int
    minor: int

    @property
    def is_character_device(self) -> bool:
        return self.kind == stat.S_IFCHR


class KindReader:
    """Reads into one buffer of its own: for one thread at a time."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(_SIZE)

    def read(self, name: str, directory: int) -> FileKind:
        """The file that ``name`` in the open ``directory`` leads to. Raises OSError."""
        if _libc.statx(directory, os.fsencode(name), _DONT_SYNC | _NO_AUTOMOUNT, _TYPE, self._buffer) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
        (mode,) = _MODE.unpack_from(self._buffer)
        return FileKind(stat.S_IFMT(mode), *_DEVICE.unpack_from(self._buffer))

"""Writes to attributes of the kernel, each by a child of its own that can be left behind.

Some attributes are written under their device's lock. An unbind, a probe or a reset that does not return keeps that
lock for ever, and whoever then writes waits with it, out of reach of signals. A thread that waits so keeps its process
from ending; a child keeps nobody (``driver_override`` until the kernels that guard it by a lock of its own).
"""

import asyncio
import errno
import os
import sys
from pathlib import Path

from agent.host.command import Finished, StuckError, run_command

# PATH TEXT [NOT_AFTER]: one write in one piece; ends with the kernel's errno. It imports nothing but what is built in.
# NOT_AFTER (seconds of CLOCK_BOOTTIME): who is started later than that was given up, and must not write any more.
_WRITER = """
import os, sys, time
try:
    if len(sys.argv) > 3 and time.clock_gettime(time.CLOCK_BOOTTIME) > float(sys.argv[3]):
        raise OSError(62, "started too late")
    os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC), sys.argv[2].encode())
except OSError as error:
    sys.exit(error.errno)
"""


def writer(path: Path, text: str, not_after: float | None = None) -> tuple[str, ...]:
    """The command that writes ``text``. Its status is an errno; ETIME: it was started after ``not_after``."""
    late = () if not_after is None else (f"{not_after:.3f}",)
    return (sys.executable, "-I", "-S", "-E", "-c", _WRITER, str(path), text, *late)


class AttributeWriter:
    """``key`` names what may be stuck: a PCI address, an IOMMU group, a module's parameter."""

    def __init__(self) -> None:
        self._stuck: dict[str, asyncio.subprocess.Process] = {}

    def is_stuck(self, key: str) -> bool:
        """An earlier write to it has not returned from the kernel, though it was killed."""
        process = self._stuck.get(key)
        return process is not None and process.returncode is None

    async def write(self, key: str, path: Path, text: str, deadline: float) -> None:
        """Write an existing attribute. Raises OSError with the kernel's errno and the path, TimeoutError after
        ``deadline`` seconds, and EBUSY from then on until that write has returned after all.
        """
        if self.is_stuck(key):
            raise OSError(errno.EBUSY, f"an earlier write to {key} has not returned", str(path))
        try:
            done = await run_command(writer(path, text), deadline)
        except TimeoutError as error:
            if isinstance(error, StuckError):
                self._stuck[key] = error.process
            raise TimeoutError(f"{key}: writing {path}: no answer within {deadline:g} s") from None
        if done.status != 0:
            raise _failure(done, path, text)


def _failure(done: Finished, path: Path, text: str) -> OSError:
    if done.status < 0 or done.stderr.strip():  # a signal, or the interpreter's own trouble: no errno
        last = (done.stderr.strip().splitlines() or [f"it ended by signal {-done.status}"])[-1]
        return OSError(errno.EIO, f"the child that writes failed: {last[:200]}", str(path))
    return OSError(done.status, f"{os.strerror(done.status)}: writing {text.strip()!r}", str(path))

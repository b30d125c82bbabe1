"""Reads and writes that the kernel answers only under somebody's lock, each where it can be abandoned.

An unbind, a probe or a reset that does not return keeps its device's lock for ever. Whoever then reads or writes an
attribute that needs the lock waits with it, out of reach of signals (``driver_override`` until the kernels that guard
it by a lock of its own, ``sriov_numvfs`` before 6.9). So no device is given more than one waiting thread.
"""

import asyncio
import errno
import os
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from agent.host.scan import start

T = TypeVar("T")

STALL = (
    1.0  # seconds without an answer after which a device is passed over; an attribute answers in microseconds
)


class KernelCalls:
    """``key`` names what may be stuck: a PCI address, an IOMMU group, a module's parameter."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stuck: dict[str, threading.Thread] = {}

    def is_stuck(self, key: str) -> bool:
        """An earlier call on it has not returned from the kernel."""
        thread = self._stuck.get(key)
        return thread is not None and thread.is_alive()

    async def run(self, key: str, call: Callable[[], T], deadline: float) -> T:
        """What ``call`` returns or raises. Raises TimeoutError after ``deadline`` seconds, and EBUSY from then on
        until that call has returned after all.
        """
        if self.is_stuck(key):
            raise OSError(errno.EBUSY, f"an earlier call on {key} has not returned from the kernel")
        thread, future = start(call, self._name)
        try:
            async with asyncio.timeout(deadline):
                return await future
        except TimeoutError:
            self._stuck[key] = thread
            raise TimeoutError(
                f"{self._name}: {key}: the kernel has not answered for {deadline:g} s"
            ) from None
        except asyncio.CancelledError:
            self._stuck[key] = thread
            raise

    def read_each(self, keys: Iterable[str], read: Callable[[str], T]) -> dict[str, T]:
        """``read`` of each key, one after the other; those that do not answer are left out. Blocks, but not for ever."""
        found: dict[str, T] = {}
        waiting = [key for key in keys if not self.is_stuck(key)]
        while waiting:
            done = self._read_until_stuck(waiting, read, found)
            waiting = waiting[done:]
        return found

    def _read_until_stuck(self, keys: list[str], read: Callable[[str], T], found: dict[str, T]) -> int:
        """How many keys were dealt with; the last of them is stuck unless they are all."""
        answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        abandoned = threading.Event()

        def work() -> None:
            for key in keys:
                if abandoned.is_set():
                    return
                try:
                    answers.put((read(key), None))
                except Exception as error:  # it belongs to the caller, not to this thread
                    answers.put((None, error))

        thread = threading.Thread(target=work, name=self._name, daemon=True)
        thread.start()
        for number, key in enumerate(keys, start=1):
            try:
                answer, error = answers.get(timeout=STALL)
            except queue.Empty:
                abandoned.set()
                self._stuck[key] = thread
                return number
            if error is not None:
                abandoned.set()
                raise error
            found[key] = answer  # type: ignore[assignment]  # None only where T allows it
        return len(keys)


def write_attribute(path: Path, text: str) -> None:
    """Write an existing attribute in one piece. Raises OSError with the kernel's errno and the path."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: writing {text.strip()!r}", str(path)) from error

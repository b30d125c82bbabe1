"""Reads that may wait for the kernel while a device is being reset, each where it can be abandoned.

A thread will do: a reset ends by its own time limits. No device is given more than one waiting thread.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

STALL = 1.0  # seconds without an answer after which a device is passed over


class KernelCalls:
    """``key`` names what may be stuck: a PCI address."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stuck: dict[str, threading.Thread] = {}

    def is_stuck(self, key: str) -> bool:
        """An earlier call on it has not returned from the kernel."""
        thread = self._stuck.get(key)
        return thread is not None and thread.is_alive()

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

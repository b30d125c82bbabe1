"""Calls on files that may never be answered, as of a network file system whose server is gone, each where it can be
left behind: such a wait ends with its process, so a daemon thread will do.
"""

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import TypeVar

from agent.host.scan import start

T = TypeVar("T")


class FileCalls:
    """``key`` names what may hang, a path for one: each has one call left behind at most, and holds up no other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hung: dict[str, threading.Thread] = {}

    async def run(self, key: str, call: Callable[[], T], deadline: float) -> T:
        """What ``call`` returns or raises. Raises TimeoutError after ``deadline`` seconds, and OSError (EBUSY) from
        then on until that call has returned after all.
        """
        self._hung = {k: thread for k, thread in self._hung.items() if thread.is_alive()}
        if key in self._hung:
            raise OSError(errno.EBUSY, "an earlier call has not returned; is its file system there?", key)
        thread, future = start(call, self._name)
        try:
            async with asyncio.timeout(deadline):
                return await future
        except TimeoutError:
            if not future.cancelled():
                raise  # that was the answer
            self._hung[key] = thread
            raise TimeoutError(
                errno.ETIMEDOUT, f"no answer for {deadline:g} s; is its file system there?", key
            ) from None
        except asyncio.CancelledError:
            self._hung[key] = thread
            raise

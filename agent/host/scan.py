"""Running a blocking read where it can be abandoned.

A read of a device's attributes can sleep in the kernel for as long as someone else holds that device.
``asyncio.to_thread`` would then keep the interpreter from exiting; a daemon thread does not.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_ABANDONED = 4


class Scan(Generic[T]):
    """Runs one kind of blocking read, each in a thread of its own, and stops piling them up when they hang."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []

    async def run(self, read: Callable[[], T]) -> T:
        """The result of ``read``, or what it raised. Raises TimeoutError while earlier reads still hang."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MAX_ABANDONED:
            raise TimeoutError(
                f"{self._name}: {MAX_ABANDONED} earlier reads have not returned from the kernel"
            )
        thread, future = start(read, self._name)
        self._threads.append(thread)
        return await future


def start(call: Callable[[], T], name: str) -> tuple[threading.Thread, asyncio.Future[T]]:
    """``call`` in a daemon thread of its own, and the future that gets its result or what it raised."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where T allows it

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except Exception as caught:  # whatever it is belongs to the caller, not to this thread
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop was closed while this call hung; nobody waits for it any more

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread, future

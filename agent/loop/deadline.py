"""Work under a deadline of the host's clock: it ends, and the caller learns which way."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agent.ports import Clock

T = TypeVar("T")
PULSE = 10.0  # real seconds between signs of life in silent work


class SupersededError(Exception):
    """What the work was for has changed while it ran."""


async def within(
    seconds: float,
    work: Coroutine[Any, Any, T],
    clock: Clock,
    alive: Callable[[], None],
    unless: asyncio.Event | None = None,
) -> T:
    """The work's result; raises TimeoutError after ``seconds``, SupersededError as soon as ``unless`` is set.

    Work may be long and silent: as long as its deadline runs, ``alive`` is called now and then.
    """
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    changed = asyncio.ensure_future((unless or asyncio.Event()).wait())
    pulse = asyncio.ensure_future(_pulse(alive))
    try:
        await asyncio.wait({task, timer, changed}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if changed.done():
            raise SupersededError
        raise TimeoutError
    finally:
        for other in (task, timer, changed, pulse):
            other.cancel()
        await asyncio.gather(task, timer, changed, pulse, return_exceptions=True)


async def showing_life(
    most: float, work: Coroutine[Any, Any, T], clock: Clock, alive: Callable[[], None]
) -> T:
    """The work's result. It has deadlines of its own, within ``most`` seconds, up to which ``alive`` is called.

    Work that is still not done by then hangs, and gives no more signs of life; it is not cancelled in the middle.
    """
    end = clock.monotonic() + most
    pulse = asyncio.ensure_future(_pulse(lambda: alive() if clock.monotonic() < end else None))
    try:
        return await work
    finally:
        pulse.cancel()
        await asyncio.gather(pulse, return_exceptions=True)


async def _pulse(alive: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(PULSE)
        alive()

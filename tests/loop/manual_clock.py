"""A clock that stands still until it is told to go on."""

import asyncio
import itertools


class ManualClock:
    """``Clock``: ``go_on`` lets time pass and wakes who has slept long enough."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._number = itertools.count()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self._now + seconds, next(self._number), woken))
        await woken.wait()

    def go_on(self, seconds: float) -> None:
        self._now += seconds
        due = sorted(s for s in self._sleepers if s[0] <= self._now)
        self._sleepers = [s for s in self._sleepers if s[0] > self._now]
        for _, _, woken in due:
            woken.set()

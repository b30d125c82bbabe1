"""A clock that runs ``factor`` times as fast as the real one, as on a simulated host."""

import asyncio
import time


class FastClock:
    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._began = time.monotonic()

    def now(self) -> float:
        return 1_700_000_000.0 + self.monotonic()

    def monotonic(self) -> float:
        return (time.monotonic() - self._began) * self._factor

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._factor)

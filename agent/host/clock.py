"""The machine's own clocks."""

import asyncio
import time


class SystemClock:
    """``ports.Clock`` on a real host."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

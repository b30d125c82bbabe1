"""The simulated host's clock: real wall time, compressed durations."""

import asyncio
import time


class SimClock:
    """``now()`` is the real wall clock, so that journals, logs and status files carry true times.

    ``monotonic()`` runs ``factor`` times faster than real time, and ``sleep`` takes ``seconds / factor``:
    a deadline of 30 minutes passes in 30 seconds under a factor of 60.
    """

    def __init__(self, factor: float = 1.0) -> None:
        if factor <= 0:
            raise ValueError(f"the time factor must be above 0, not {factor}")
        self.factor = factor

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() * self.factor

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self.factor)

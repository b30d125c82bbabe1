"""How fast the simulated inference server is: one speed, shared among all running requests."""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable

from agent.sim.server_completion import Completion
from agent.sim.server_config import Config

CHUNKS_PER_SECOND = (
    1200  # over all streams, in real time: more would keep a small machine busy, and the client late
)
# Real seconds for a client to send its next request after an answer, plus as much for each stream it serves.
TURNAROUND_SECONDS = 0.020
TURNAROUND_EACH = 0.002


class Slot:
    """Where a stream begins, or where one ended and the next one may go on."""

    __slots__ = ("at", "expires", "level")

    def __init__(self, level: float, at: float, expires: float) -> None:
        self.level = level
        self.at = at
        self.expires = expires


class Engine:
    """Shares the speed among the running completions, in real time.

    ``_level`` counts the tokens that a stream running from the very beginning would have by now. All streams are
    equally fast, so a stream of n tokens that began at level v ends when the level reaches v + n, whatever comes
    and goes meanwhile. Ends are computed, never summed up from ticks: lateness of this process does not add up.

    A machine's milliseconds become whole seconds under a high time factor. A client's next request therefore takes
    the slot of the answer before it as if it had come at once, if it comes within the client's turnaround; until
    then the slot counts as busy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Callable[[], Config]) -> None:
        self._loop = loop
        self._config = config
        self._level = 0.0
        self._at = loop.time()
        self._free: deque[Slot] = deque()
        self._ends: list[tuple[float, int, Completion]] = []  # by level
        self._chunks: list[tuple[float, int, Completion]] = []  # by real time
        self._timer: asyncio.TimerHandle | None = None
        self.running: set[Completion] = set()

    def add(self, work: Completion) -> None:
        self._advance(self._loop.time())
        slot = self._free.popleft() if self._free else Slot(self._level, self._at, 0.0)
        config = self._config()
        queue = 1 + len(self.running) / 32
        self.running.add(work)
        work.begin(slot.level, slot.at + config.real(config.ttft_seconds) * queue)
        heapq.heappush(self._ends, (work.end_level, work.number, work))
        heapq.heappush(self._chunks, (work.first_due, work.number, work))
        self._arm()

    def remove(self, work: Completion) -> None:
        """Its client has gone: it no longer slows the others."""
        self._advance(self._loop.time())
        self.running.discard(work)
        self._arm()

    def settle(self) -> None:
        """Account for the time up to now at the speed so far. Before the configuration changes."""
        self._advance(self._loop.time())

    def resume(self) -> None:
        """After the configuration has changed."""
        self._arm()

    def _rate(self) -> float:
        """Tokens per real second of one stream."""
        busy = len(self.running) + len(self._free)
        return self._config().throughput(busy) / busy if busy else 0.0

    def _advance(self, now: float) -> None:
        while self._free and self._free[0].expires <= now:
            self._move(self._free[0].expires)
            self._free.popleft()
        self._move(now)

    def _move(self, to: float) -> None:
        if to > self._at:
            self._level += self._rate() * (to - self._at)
            self._at = to

    def _arm(self) -> None:
        due = [self._chunks[0][0]] if self._chunks else []
        if self._free:
            due.append(self._free[0].expires)
        rate = self._rate()
        if self._ends and rate:
            due.append(self._at + max(0.0, self._ends[0][0] - self._level) / rate)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(due), self._run) if due else None

    def _run(self) -> None:
        now = self._loop.time()
        self._advance(now)
        while self._ends and self._ends[0][0] <= self._level + 1e-6:
            level, _, work = heapq.heappop(self._ends)
            if work not in self.running:
                continue
            if work.started or work.first_due <= now:
                self._end(work, level)
            else:
                work.overdue = True  # so short that it ends with its first token
        config = self._config()
        interval = max(config.real(config.chunk_seconds), len(self.running) / CHUNKS_PER_SECOND)
        while self._chunks and self._chunks[0][0] <= now:
            due, _, work = heapq.heappop(self._chunks)
            if work not in self.running:
                continue
            if work.overdue:
                self._end(work, self._level)
            else:
                work.show(self._level)
                heapq.heappush(self._chunks, (max(due + interval, now), work.number, work))
        self._arm()

    def _end(self, work: Completion, level: float) -> None:
        self.running.discard(work)
        busy = len(self.running) + len(self._free) + 1
        since = (self._level - level) * busy / (self._config().throughput(busy) or math.inf)
        patience = TURNAROUND_SECONDS + TURNAROUND_EACH * busy
        self._free.append(Slot(level, self._at - since, self._at + patience))
        work.end()

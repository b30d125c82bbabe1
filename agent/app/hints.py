"""Hints of the host that something changed, made into passes: soon, together, and never without end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

TOGETHER = 0.2  # seconds in which further hints join the pass of the first: a rebind is several events
FAST = 3  # passes in a row that come this soon
STORM = 1.0  # seconds before each one after these
CALM = 3.0  # seconds without a hint after which the row ends
RETRY = 10.0  # seconds before a source that broke is opened again

Source = Callable[[], AsyncGenerator[None, None]]


@dataclass(slots=True)
class Pacer:
    """Asks for passes by ``fire``. Hints of all sources share one pace."""

    fire: Callable[[str], None]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _row: int = 0
    _fired_at: float = float("-inf")

    async def hint(self, reason: str) -> None:
        """Returns when the pass was asked for; the source of the hint is not read meanwhile."""
        async with self._turn:
            loop = asyncio.get_running_loop()
            self._row = self._row + 1 if loop.time() - self._fired_at < CALM else 1
            await asyncio.sleep(TOGETHER if self._row <= FAST else STORM)
            self._fired_at = loop.time()
            self.fire(reason)


async def follow_hints(
    sources: Mapping[str, Source], fire: Callable[[str], None], log: Callable[..., None]
) -> None:
    """Until it is cancelled. A source that cannot be followed costs speed, not truth: the resync sees all drift."""
    pacer = Pacer(fire)
    async with asyncio.TaskGroup() as group:
        for reason, source in sources.items():
            group.create_task(_follow(reason, source, pacer, log))


async def _follow(reason: str, source: Source, pacer: Pacer, log: Callable[..., None]) -> None:
    told = ""
    while True:
        try:
            async with aclosing(source()) as hints:
                async for _ in hints:
                    told = ""
                    await pacer.hint(reason)
        except Exception as error:
            # An OSError is the source's trouble, and anything else a mistake of ours in it. Neither is worth the
            # daemon, which an exception in this task would end: passes go on, and see the same changes later.
            said = str(error) if isinstance(error, OSError) else repr(error)
            if said != told:
                told = said
                log("hints are not heard: changes are seen by the resync only", hints=reason, error=told)
        await asyncio.sleep(RETRY)

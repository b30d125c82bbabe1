"""A daemon for tests: the real loop and the real file watch over a simulated host, and what it told systemd."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agent.host.watch import watch
from agent.loop.run import Daemon
from tests.cases.operating import rig
from tests.rig import FACTOR, Rig

PATIENCE = 30.0  # real seconds: a test that waits longer has failed


@dataclass
class Told:
    """``NotifyPort``: everything that systemd was told, with the host's writes up to then."""

    messages: list[str] = field(default_factory=list)
    writes_at: list[int] = field(default_factory=list)
    count_writes: Callable[[], int] = lambda: 0

    def send(self, state: str) -> None:
        self.messages.append(state)
        self.writes_at.append(self.count_writes())

    def count(self, start: str) -> int:
        return sum(message.startswith(start) for message in self.messages)


@dataclass
class Running:
    agent: Rig
    daemon: Daemon
    told: Told
    log: list[str]
    task: "asyncio.Task[None]"

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for what the daemon is going to do; fails when it ends or takes far too long."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                assert not self.task.done(), "the daemon has ended"
                await asyncio.sleep(0.01)

    async def until_pass(self, word: str) -> None:
        """Until a pass has ended in a sentence with this word."""
        await self.until(lambda: any(word in line for line in self.log))

    def kick(self) -> None:
        self.agent.agent.triggers.fire("test")

    def reason(self, kind: str = "ServiceReady/qwen") -> str:
        path = self.agent.agent.paths.status
        if not path.exists():
            return ""
        return next((c.reason for c in self.agent.status().conditions if c.type == kind), "")


@asynccontextmanager
async def daemon(
    root: Path, *, spec: str | None = None, scenario: str | Path | None = None, factor: float | None = FACTOR
) -> AsyncIterator[Running]:
    """A running daemon; it is stopped at the end, and must then end by itself."""
    async with rig(root, spec=spec, scenario=scenario, factor=factor) as agent:
        running = start(agent)
        try:
            yield running
        finally:
            running.daemon.stop()
            async with asyncio.timeout(PATIENCE):
                await running.task


def start(agent: Rig) -> Running:
    assembly, told, log = agent.agent, Told(), list[str]()
    told.count_writes = lambda: len(agent.world.writes)

    async def follow(stop: asyncio.Event) -> AsyncIterator[None]:
        async for _ in watch((agent.spec, assembly.store.requests), stop):
            yield

    def note(event: str, **fields: object) -> None:
        log.append(
            f"{event}: {fields.get('trigger', '')}: {fields.get('sentence', '')}{fields.get('error', '')}"
        )

    assembly.reconciler.publisher.notify = told
    assembly.reconciler.log = note
    made = Daemon(assembly.reconciler, assembly.triggers, told, follow, assembly.edited, note)
    assembly.progress = made.progress
    return Running(agent, made, told, log, asyncio.create_task(made.run()))

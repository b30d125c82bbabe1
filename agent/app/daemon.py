"""``agent run``: the daemon's entry."""

import asyncio
from collections.abc import AsyncIterator

from agent.app.logs import start_logging
from agent.app.paths import Paths
from agent.app.wiring import Choice, assemble
from agent.host.lockfile import InstanceLock
from agent.host.notify import SystemdNotify, watchdog_seconds
from agent.host.watch import watch
from agent.loop.run import Daemon


async def daemon(choice: Choice, paths: Paths) -> int:
    """Runs until it is told to stop. Raises AgentError when another agent already runs here."""
    paths.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with InstanceLock(paths.lock):
        log = start_logging("sim" if choice.kind == "sim" else "")
        notify = SystemdNotify()
        assembly = assemble(choice, paths, notify=notify, log=log)

        async def follow(stop: asyncio.Event) -> AsyncIterator[None]:
            async for _ in watch((paths.spec, assembly.store.requests), stop):
                yield

        running = Daemon(
            assembly.reconciler, assembly.triggers, notify, follow, assembly.edited, log,
            watchdog=watchdog_seconds(),
        )  # fmt: skip
        assembly.progress = running.progress
        log(
            "agent started",
            pid_file=str(paths.lock),
            spec=str(paths.spec),
            simulated=assembly.ports.simulated,
        )
        try:
            await running.run()
        finally:
            await assembly.close()
            notify.close()
        log("agent stopped")
    return 0

"""``agent run``: the daemon's entry."""

import asyncio
from collections.abc import AsyncIterator, Callable

from agent.app.hints import follow_hints
from agent.app.logs import start_logging
from agent.app.only_agent import only_agent
from agent.app.paths import Paths
from agent.app.wiring import Assembly, Choice, assemble, require_root
from agent.core.spec import GpuHost, target_name
from agent.host.notify import SystemdNotify, watchdog_seconds
from agent.host.real import RealHost
from agent.host.watch import watch
from agent.loop.run import Daemon


async def daemon(choice: Choice, paths: Paths) -> int:
    """Runs until it is told to stop. Raises AgentError when another agent already runs here."""
    require_root(choice)
    with only_agent(choice.kind, paths):
        log = start_logging("sim" if choice.kind == "sim" else "")
        notify = SystemdNotify()
        assembly = assemble(choice, paths, notify=notify, log=log)

        async def follow(stop: asyncio.Event) -> AsyncIterator[None]:
            async for _ in watch((paths.spec, assembly.store.requests), stop):
                yield

        hints = asyncio.create_task(_follow_hints(assembly, log))
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
            hints.cancel()
            await asyncio.gather(hints, return_exceptions=True)
            await assembly.close()
            notify.close()
        log("agent stopped")
    return 0


async def _follow_hints(assembly: Assembly, log: Callable[..., None]) -> None:
    """Changes of a real host make a pass at once. A simulated one has no kernel and no bus that would tell."""
    host = assembly.host
    if not isinstance(host, RealHost):
        return
    sources = host.hints(lambda: watched_units(assembly.reconciler.specs.host))
    await follow_hints(sources, assembly.triggers.fire, log)


def watched_units(spec: GpuHost | None) -> frozenset[str]:
    """Units on this host that the spec names; those of other targets tell their own systemd only."""
    if spec is None:
        return frozenset()
    services = spec.spec.services.values()
    return frozenset(
        {s.unit for s in services if target_name(s.target) == "host"} | set(spec.spec.policy.quiesce)
    )

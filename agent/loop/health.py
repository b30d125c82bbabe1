"""Does a running service still answer? A token asked for and counted, in the background, once a minute.

/health alone proves little: it can say 200 while the scheduler is dead. The pass never waits for a slow server:
it uses the last answer, and a changed answer triggers a pass of its own.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Silence
from agent.core.redact import redact
from agent.core.render import served_name
from agent.core.spec import Service
from agent.ports import Ports

INTERVAL = 60.0  # seconds between probes of one service
TIMEOUT = 30.0


@dataclass(slots=True)
class _Probe:
    at: float
    fact: Fact[str]
    task: "asyncio.Task[None] | None" = None
    answered: bool = False
    failed: int = 0  # probes in a row, the last one included
    failed_since: float = 0.0
    timed_out: int = 0  # of those that failed

    def learn(self, fact: Fact[str], at: float) -> None:
        self.fact, self.at = fact, at
        if isinstance(fact, Known):
            self.answered, self.failed, self.timed_out = True, 0, 0
            return
        self.failed_since = self.failed_since if self.failed else at
        self.failed += 1
        self.timed_out += isinstance(fact, Unknown) and fact.code == "Timeout"


class HealthProbe:
    """The last known health of each service."""

    def __init__(self, ports: Ports, changed: Callable[[], None] = lambda: None) -> None:
        self._ports = ports
        self._changed = changed
        self._probes: dict[str, _Probe] = {}
        self.paused = False  # while a plan is carried out, services come and go because of it

    async def of(self, name: str, service: Service, url: str) -> Fact[str]:
        if self.paused:
            return Unknown("a plan is being carried out", "Working")
        now = self._ports.clock.monotonic()
        probe = self._probes.get(name)
        if probe is None:
            fact = await self._ask(service, url)
            probe = self._probes[name] = _Probe(now, fact)
            probe.learn(fact, now)
            return fact
        if now - probe.at >= INTERVAL and (probe.task is None or probe.task.done()):
            probe.task = asyncio.create_task(self._again(name, service, url))
        return probe.fact

    def silence(self, name: str) -> Silence | None:
        """How long it has not answered; None when its last answer was good, or nothing was asked yet."""
        probe = self._probes.get(name)
        if probe is None or not probe.failed or self.paused:
            return None
        return Silence(probe.failed, probe.at - probe.failed_since, probe.answered, probe.timed_out)

    def forget(self, name: str) -> None:
        """The service is not running (or was just proved): the next look asks anew."""
        probe = self._probes.pop(name, None)
        if probe is not None and probe.task is not None:
            probe.task.cancel()

    async def close(self) -> None:
        tasks = [p.task for p in self._probes.values() if p.task is not None]
        for name in list(self._probes):
            self.forget(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _again(self, name: str, service: Service, url: str) -> None:
        fact = await self._ask(service, url)
        probe = self._probes.get(name)
        if probe is None:
            return
        before = probe.fact
        probe.learn(fact, self._ports.clock.monotonic())
        if before != fact:
            self._changed()

    async def _ask(self, service: Service, url: str) -> Fact[str]:
        try:
            answer = await self._ports.inference.complete(
                url, served_name(service), "Say one word.", 1, TIMEOUT
            )
        except ConnectionRefusedError:
            return Absent("connection refused: it is still loading, or hung")
        except TimeoutError:
            return Unknown(f"no answer within {TIMEOUT:g} s", "Timeout")
        except OSError as error:
            return Unknown(redact(str(error), service.secrets), "HttpError")
        return (
            Known("ok") if answer.tokens > 0 else Unknown("it answers without generating a token", "NoTokens")
        )

"""The one place that chooses real or simulated, and puts the parts together."""

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.app.paths import ETC_SPEC, Paths
from agent.core.errors import TerminalError
from agent.core.spec import GpuHost
from agent.host.inference import HttpInference
from agent.host.real import RealHost, real_host
from agent.host.spec_file import FileSpecSource
from agent.kinds import ALL
from agent.loop.execute import Executor
from agent.loop.health import HealthProbe
from agent.loop.journal import Journal
from agent.loop.lifecycle import Lifecycle
from agent.loop.observe import DEADLINE, Observer
from agent.loop.prove import SelfTest
from agent.loop.publish import Publisher
from agent.loop.reconcile import Reconciler
from agent.loop.run import Triggers
from agent.loop.specs import Specs
from agent.loop.store import Store, remove_leftovers
from agent.loop.trial import Trials
from agent.ports import NotifyPort, Ports
from agent.sim.host import SimulatedHost, simulated_host
from agent.sim.scenario import Scenario, load_scenario
from agent.sim.spec_edit import spec_editor
from agent.sim.world import remembered_profile

TYPE_HOST = "esc8000a"


class SilentNotify:
    """``NotifyPort`` for one-shot commands: systemd is not told about them."""

    def send(self, state: str) -> None:
        pass


class GrantedPermit:
    """``Permit`` of a single host: always granted."""

    async def acquire(self, plan_id: str, disruption: str) -> str:  # noqa: ARG002 - the port's signature
        return ""

    async def release(self) -> None:
        pass


@dataclass(slots=True)
class Assembly:
    """One agent, put together. ``progress`` may be replaced before the first pass."""

    paths: Paths
    ports: Ports
    store: Store
    journal: Journal
    reconciler: Reconciler
    triggers: Triggers
    edited: asyncio.Event
    host: SimulatedHost | RealHost | None
    progress: Callable[[str], None] = field(default=lambda _text: None)

    async def close(self) -> None:
        await self.reconciler.observer.health.close()
        self.journal.close()
        if self.host is not None:
            await self.host.close()


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line chose."""

    kind: str  # real or sim
    profile: str = ""  # of a simulated host; "": the one that exists, the scenario's, or the type host's
    scenario: Path | None = None
    time_factor: float | None = None


def open_host(
    choice: Choice, paths: Paths, modules: Callable[[], Iterable[str]] = tuple
) -> SimulatedHost | RealHost:
    """``modules``: those whose options the spec has; on a real host their parameters are read, too."""
    if choice.kind == "real":
        return real_host(modules=modules)
    scenario = load_scenario(choice.scenario) if choice.scenario else None
    return simulated_host(
        _profile(choice, paths, scenario),
        state=paths.world,
        scenario=scenario,
        time_factor=choice.time_factor,
        inference=HttpInference,
        edit_spec=spec_editor(paths.spec),
    )


def _profile(choice: Choice, paths: Paths, scenario: Scenario | None) -> str:
    """Which profile is meant: what the command line and the scenario name must not contradict each other."""
    named = scenario.profile if scenario is not None and "profile" in scenario.model_fields_set else ""
    if choice.profile and named and choice.profile != named:
        raise TerminalError(
            f"--host names profile {choice.profile}, and the scenario names {named}",
            reason="ScenarioInvalid",
            next_step="leave one of them out",
        )
    return choice.profile or named or remembered_profile(paths.world) or TYPE_HOST


def assemble(
    choice: Choice,
    paths: Paths,
    *,
    notify: NotifyPort | None = None,
    log: Callable[..., None] = lambda *_args, **_fields: None,
    deadline: float = DEADLINE,
) -> Assembly:
    """An agent for this host. Raises AgentError when its directories cannot be used."""
    made: list[Assembly] = []  # the ports are made before what knows the spec
    host = open_host(choice, paths, lambda: _modules_of(made[0].reconciler.specs.host) if made else ())
    made.append(assemble_on(host.ports, paths, host=host, notify=notify, log=log, deadline=deadline))
    return made[0]


def require_root(choice: Choice) -> None:
    """Said before anything is opened: every write would fail, one by one. Raises TerminalError."""
    if choice.kind == "real" and os.geteuid() != 0:
        raise TerminalError(
            f"acting on this host needs root, and this is user {os.geteuid()}: sysfs, /etc and systemd would refuse it",
            reason="NeedRoot",
            next_step="run it as root, or only look: agent observe and agent plan need no root for most of what they show",
        )


def _modules_of(spec: GpuHost | None) -> Iterable[str]:
    return spec.spec.platform.modules if spec is not None else ()


def assemble_on(
    ports: Ports,
    paths: Paths,
    *,
    host: SimulatedHost | RealHost | None = None,
    notify: NotifyPort | None = None,
    log: Callable[..., None] = lambda *_args, **_fields: None,
    deadline: float = DEADLINE,
) -> Assembly:
    store, journal = _open_state(paths)
    triggers, edited = Triggers(), asyncio.Event()
    health = HealthProbe(ports, lambda: triggers.fire("health changed"))
    observer = Observer(ports, health, deadline, store.kernel_log)
    strict = not ports.simulated and paths.spec == ETC_SPEC
    specs = Specs(
        FileSpecSource(paths.spec, strict=strict), store, journal, ports.clock.now, path=str(paths.spec)
    )
    told = notify or SilentNotify()
    publisher = Publisher(paths.status, ports.clock, journal, told, ports.simulated, log=log)
    holder: dict[str, Any] = {}

    def progress(text: str) -> None:
        holder["assembly"].progress(text)

    async def look() -> Any:
        return await holder["reconciler"].look()

    async def refresh() -> None:
        await holder["reconciler"].refresh()

    trials = Trials(Lifecycle(ports, observer), store, journal, look, edited, progress, refresh)
    selftest = SelfTest(ports, store, look, progress)
    executor = Executor(ports, ALL, store, journal, trials, selftest, progress, refresh)
    reconciler = Reconciler(
        ports, ALL, store, journal, specs, observer, executor, publisher, GrantedPermit(), log=log,
    )  # fmt: skip
    assembly = Assembly(paths, ports, store, journal, reconciler, triggers, edited, host)
    holder.update(assembly=assembly, reconciler=reconciler)
    return assembly


def _open_state(paths: Paths) -> tuple[Store, Journal]:
    try:
        store = Store(paths.state)
        paths.run.mkdir(parents=True, exist_ok=True)
        for directory in (paths.state, paths.run):
            remove_leftovers(directory)
        return store, Journal(paths.state / "journal.jsonl")
    except OSError as error:
        raise TerminalError(
            f"{error.filename or paths.state}: {error.strerror or error}",
            reason="StateUnusable",
            next_step="run as root, or give a directory of your own with --root",
        ) from error


__all__ = ["Assembly", "Choice", "assemble", "assemble_on", "open_host"]

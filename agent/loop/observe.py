"""Observe: every edge read at once, each with a deadline; what fails is Unknown, never a guess."""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.former import former_units
from agent.core.inputs import Inputs
from agent.core.kernel_log import fold
from agent.core.kernel_log_state import KernelLogState
from agent.core.memory import Memory
from agent.core.observation import (
    Holder,
    KernelEvent,
    Nvml,
    Observation,
    Pci,
    Platform,
    Process,
    ServiceFacts,
    TargetFacts,
    Unit,
)  # fmt: skip
from agent.core.placing import as_run, at_place, other_places
from agent.core.redact import redact
from agent.core.render import DROP_IN, port_of
from agent.core.selection import select
from agent.core.spec import GpuHost, Service, Spec, target_name
from agent.kinds.platform import platform_files
from agent.kinds.rebind import UDEV_RULES
from agent.loop.absorb import learned
from agent.loop.health import HealthProbe
from agent.ports import KernelLines, Ports, TargetPort

P = ParamSpec("P")
T = TypeVar("T")
DEADLINE = 15.0  # real seconds for one edge
RUNNING = {"active", "activating", "reloading"}
MAX_READS = 10  # of the kernel log in one observation


@dataclass(slots=True)
class Observer:
    """Reads one whole observation. Errors of the outside world become Unknown; anything else is a bug and is raised."""

    ports: Ports
    health: HealthProbe
    deadline: float = DEADLINE
    kernel_log: KernelLogState = field(default_factory=KernelLogState)
    _unread: bool = False  # the last observation left lines of the kernel log unread
    _chosen: tuple[tuple[object, ...], list[str]] = ((), [])  # what was selected last, and from what

    async def observe(self, host: GpuHost, memory: Memory) -> Observation:
        platform, pci = await asyncio.gather(self._platform(), self._fact(self.ports.pci.read))
        nvml, events = await asyncio.gather(self._nvml(pci), self._kernel_events(pci))
        partial = Observation(platform=platform, pci=pci, nvml=nvml)
        addresses = self._selected(host, partial, memory)
        spec = host.spec
        holders, files, quiesced, targets, services = await asyncio.gather(
            self._holders(addresses),
            self._host_files(spec),
            self._units("host", (*spec.policy.quiesce, *memory.stopped_units)),
            self._targets(_places(spec, nvml, memory)),
            self._services(spec, memory),
        )
        gaps, unread = self.kernel_log.gaps, self._unread
        return Observation(
            platform, pci, nvml, holders, quiesced, targets, services, files, events, gaps,
            await self._unbinds(memory), await self._former(spec, memory), unread,
        )  # fmt: skip

    async def _fact(self, read: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Fact[T]:
        try:
            async with asyncio.timeout(self.deadline):
                return Known(await read(*args, **kwargs))
        except TimeoutError as error:
            return Unknown(redact(str(error)) or f"it did not answer within {self.deadline:g} s", "Timeout")
        except OSError as error:
            return Unknown(redact(str(error)), errno.errorcode.get(error.errno or 0, "OSError"))

    async def _platform(self) -> Platform:
        fact = await self._fact(self.ports.platform.read)
        return fact.value if isinstance(fact, Known) else Platform()

    async def _nvml(self, pci: Fact[Pci]) -> Fact[Nvml]:
        """NVML is not opened unless a GPU is on nvidia: opening it may load modules and holds devices."""
        if not isinstance(pci, Known):
            return Unknown("not opened while the PCI tree cannot be read", "NotObserved")
        if not any(f.is_gpu and f.driver == Known("nvidia") for f in pci.value.functions.values()):
            return Absent("no GPU is on nvidia, so NVML was not opened")
        fact = await self._fact(self.ports.nvml.read)
        return fact.value if isinstance(fact, Known) else fact

    async def _kernel_events(self, pci: Fact[Pci]) -> Fact[tuple[KernelEvent, ...]]:
        """Up to the log's present end, or as far as MAX_READS reach: what a flood leaves is said, and read later."""
        self._unread = False
        for _ in range(MAX_READS):
            lines = await self._fact(self.ports.kernel_log.read, self.kernel_log.cursor)
            if not isinstance(lines, Known):
                return lines
            self._take(lines.value, value_or(pci, None))
            self._unread = lines.value.more
            if not self._unread:
                break
        return Known(self.kernel_log.folded.events)

    def _take(self, lines: KernelLines, pci: Pci | None) -> None:
        """Another boot's events are void: its start has reset the devices.

        What has to outlast it, a revoked verdict for one, is in the memory.
        """
        before = KernelLogState() if lines.fresh else self.kernel_log
        folded = fold(before.folded, lines.lines, pci) if lines.lines else before.folded
        self.kernel_log = KernelLogState(lines.cursor, folded, before.gaps + lines.gap)

    def _selected(self, host: GpuHost, partial: Observation, memory: Memory) -> list[str]:
        """Every function of every selected slot: the devices whose holders matter.

        Selected by what the memory will know of the cards once it has learned from this observation, as the plan is.
        """
        if not isinstance(partial.pci, Known):
            return []
        made_from = (host, partial.pci, partial.nvml, memory.identities)
        if self._chosen[0] != made_from:
            self._chosen = (made_from, self._select(host, partial.pci.value, partial, memory))
        return self._chosen[1]

    def _select(self, host: GpuHost, pci: Pci, partial: Observation, memory: Memory) -> list[str]:
        knowing = memory.model_copy(update={"identities": learned(memory, partial)})
        selection = select(Inputs(host, 0, partial, knowing, 0.0))
        slots = {a.rpartition(".")[0] for members in selection.groups.values() for a in members}
        return [a for a, f in pci.functions.items() if f.slot_address in slots and not f.is_bridge]

    async def _holders(self, addresses: list[str]) -> Mapping[str, Fact[tuple[Holder, ...]]]:
        fact = await self._fact(self.ports.holders.read, addresses)
        if isinstance(fact, Known):
            return fact.value
        return dict.fromkeys(addresses, fact if isinstance(fact, Unknown) else Unknown("not looked for"))

    async def _unbinds(self, memory: Memory) -> Mapping[str, Fact[str]]:
        """What became of unbinds that an agent before this one may have begun."""
        left = sorted(memory.unbinding)
        facts = await asyncio.gather(*(self._fact(self.ports.pci.unbind_state, a) for a in left))
        return dict(zip(left, facts, strict=True))

    async def _former(self, spec: Spec, memory: Memory) -> Mapping[str, Fact[Unit]]:
        found = former_units(spec, memory)
        facts = await asyncio.gather(*(self._fact(self.ports.targets(f.target).unit, f.unit) for f in found))
        return {f.name: fact for f, fact in zip(found, facts, strict=True)}

    async def _host_files(self, spec: Spec) -> Mapping[str, Fact[str]]:
        host = self.ports.targets("host")
        paths = (UDEV_RULES, *platform_files(spec))
        facts = await asyncio.gather(*(self._fact(host.read_file, p) for p in paths))
        return {p: _text(f) for p, f in zip(paths, facts, strict=True)}

    async def _units(self, target: str, names: Iterable[str]) -> Mapping[str, Fact[Unit]]:
        port = self.ports.targets(target)
        wanted = sorted(set(names))
        facts = await asyncio.gather(*(self._fact(port.unit, n) for n in wanted))
        return dict(zip(wanted, facts, strict=True))

    async def _targets(self, names: set[str]) -> Mapping[str, TargetFacts]:
        wanted = sorted(names)
        facts = await asyncio.gather(*(self._fact(self.ports.targets(n).facts) for n in wanted))
        return {
            n: f.value
            if isinstance(f, Known)
            else TargetFacts(f if isinstance(f, Unknown) else Unknown("not read"))
            for n, f in zip(wanted, facts, strict=True)
        }

    async def _services(self, spec: Spec, memory: Memory) -> Mapping[str, ServiceFacts]:
        names = sorted(spec.services)
        facts = await asyncio.gather(*(self._wherever(n, spec, memory) for n in names))
        return dict(zip(names, facts, strict=True))

    async def _wherever(self, name: str, spec: Spec, memory: Memory) -> ServiceFacts:
        """At the spec's unit, or while nothing runs there, at one where the agent started it before."""
        service = spec.services[name]
        others = [at_place(service, p) for p in other_places(name, spec, memory)]
        for place in (service, *others) if others else ():
            unit = await self._fact(self.ports.targets(target_name(place.target)).unit, place.unit)
            if (isinstance(unit, Known) and unit.value.active_state in RUNNING) or (
                isinstance(unit, Unknown) and place is service
            ):
                return await self.service(name, place, meant=service)
        return await self.service(name, service)

    async def service(self, name: str, service: Service, meant: Service | None = None) -> ServiceFacts:
        """One service's unit, owned files, process, model path and health.

        ``meant``: as the spec has it, where ``service`` is at another place. Its model is needed where it is to run.
        """
        at = (target_name(service.target), service.unit)
        port = self.ports.targets(at[0])
        unit, files, model = await asyncio.gather(
            self._fact(port.unit, service.unit), self._files(port, service), self._model(meant or service)
        )
        if not isinstance(unit, Known):
            return ServiceFacts(unit, files, Unknown("its unit cannot be read"), model, at=at)
        process = await self._process(port, unit.value)
        health: Fact[str] = Absent("not running")
        if unit.value.active_state in RUNNING:
            asked = as_run(service, process.value.argv) if isinstance(process, Known) else service
            health = await self.health.of(name, asked, port.endpoint(port_of(asked)))
        else:
            self.health.forget(name)
        return ServiceFacts(unit, files, process, model, health, self.health.silence(name), at)

    async def _files(self, port: TargetPort, service: Service) -> Fact[Mapping[str, str]]:
        path = DROP_IN.format(unit=service.unit)
        fact = await self._fact(port.read_file, path)
        if isinstance(fact, Known):
            return Known({path: fact.value} if fact.value is not None else {})
        return fact if isinstance(fact, Unknown) else Known({})

    async def _model(self, service: Service) -> Fact[bool]:
        path = service.args.get("model-path")
        if not isinstance(path, str) or not path.startswith("/"):
            return Absent("the model is named, not a path")
        return await self._fact(self.ports.targets(target_name(service.target)).exists, path)

    async def _process(self, port: TargetPort, unit: Unit) -> Fact[Process]:
        if not unit.main_pid:
            return Absent("no main process")
        fact = await self._fact(port.process, unit.main_pid)
        if isinstance(fact, Known):
            return Known(fact.value) if fact.value is not None else Absent("its main process has gone")
        return fact if isinstance(fact, Unknown) else Absent()


def _places(spec: Spec, nvml: Fact[Nvml], memory: Memory) -> set[str]:
    """The services' targets; and the host's own user space when NVML fails there, for it may be its version."""
    places = {target_name(s.target) for s in spec.services.values()}
    places |= {target for n in spec.services for target, _ in other_places(n, spec, memory)}
    return places | {"host"} if isinstance(nvml, Unknown) else places


def _text(fact: Fact[str | None]) -> Fact[str]:
    if isinstance(fact, Known):
        return Known(fact.value) if fact.value is not None else Absent()
    return fact

"""Which scripted fault strikes now. How often each has matched is part of the host's state and survives processes."""

import builtins
import fnmatch
from collections.abc import Iterable
from typing import TYPE_CHECKING

from agent.sim.conditions import Started, holds
from agent.sim.scenario import Fault

if TYPE_CHECKING:
    from agent.sim.world import World


def broken(fault: Fault) -> Exception:
    """The exception that the fault names."""
    kind: type[Exception] = getattr(builtins, fault.raises or "RuntimeError")
    return kind(f"scripted fault at {fault.on}")


class Faults:
    """The scenario's faults and those that events have added, by the call they are about."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._added = -1
        self._by_call: dict[str, list[tuple[int, Fault]]] = {}

    def _of(self, call: str) -> list[tuple[int, Fault]]:
        added = self._world.state.added_faults
        if len(added) != self._added:
            self._added = len(added)
            self._by_call = {}
            every = (*self._world.scenario.faults, *(Fault.model_validate(fault) for fault in added))
            for index, fault in enumerate(every):
                self._by_call.setdefault(fault.on, []).append((index, fault))
        return self._by_call.get(call, [])

    def strike(self, call: str, about: Iterable[str] = (), started: Started | None = None) -> Fault | None:
        """The first fault for this call that is due; the match is counted against its ``after`` and ``times``."""
        candidates = self._of(call)
        if not candidates:
            return None
        names = {*about, " ".join(about)}
        for index, fault in candidates:
            if not _matches(fault, names) or not self._applies(fault, started):
                continue
            if self._count(index, fault):
                return fault
        return None

    def pair(self, source: str, destination: str, path: str, gpus: int) -> Fault | None:
        """The first rule for this ordered pair and path in a test of so many GPUs."""
        for index, fault in self._of("p2p.pair"):
            fits = (
                fnmatch.fnmatchcase(source, fault.source)
                and fnmatch.fnmatchcase(destination, fault.destination)
                and fnmatch.fnmatchcase(path, fault.path)
                and fault.gpus in (None, gpus)
            )
            if fits and self._count(index, fault):
                return fault
        return None

    def patches(self, call: str) -> list[Fault]:
        """Faults of a read call that change single items: those that name a target."""
        return [fault for index, fault in self._of(call) if fault.target and self._count(index, fault)]

    def _applies(self, fault: Fault, started: Started | None) -> bool:
        if started is not None:
            if fault.when is not None and not holds(fault.when, started):
                return False
            if fault.unless is not None and holds(fault.unless, started):
                return False
        if fault.while_exists is None:
            return True
        return any(fault.while_exists in target.files for target in self._world.state.targets.values())

    def _count(self, index: int, fault: Fault) -> bool:
        if fault.times is None and not fault.after:
            return True
        hits = self._world.state.fault_hits.get(index, 0) + 1
        if fault.times is not None and hits > fault.after + fault.times:
            return False
        with self._world.change() as state:
            state.fault_hits[index] = hits
        return hits > fault.after


def _matches(fault: Fault, names: set[str]) -> bool:
    return fault.target is None or any(fnmatch.fnmatchcase(name, fault.target) for name in names)

"""The simulated host: one mutable state, its clock, its file, the scenario's faults and events.

All work happens on one thread. Several processes may share a state file (a daemon and a CLI): every change is made
under a file lock on the newest state and saved by rename.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.sim import events, kernel, systemd
from agent.sim.clock import SimClock
from agent.sim.faults import Faults, broken
from agent.sim.initial import initial_state, renumber
from agent.sim.merge import patched
from agent.sim.profile import Profile
from agent.sim.scenario import Fault, Scenario, SpecEdit
from agent.sim.servers import Servers
from agent.sim.state import LogLine, WorldState
from agent.sim.yaml_text import ScenarioError

TICK = 0.05  # real seconds between looks at the scenario's events while nothing calls the ports
WRITES_KEPT = 10_000


def _as_data(scenario: Scenario) -> dict[str, Any]:
    return scenario.model_dump(mode="json", by_alias=True, exclude_unset=True)


class World:
    """State and machinery behind the simulated ports.

    ``reads`` counts reads by area since this process began ("nvml", "pci"...). ``writes`` lists every mutating
    port call of the host's whole life, oldest first, such as ``pci.set_override 0000:81:00.0 vfio-pci``.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        state: Path | None = None,
        scenario: Scenario | None = None,
        time_factor: float | None = None,
        edit_spec: Callable[[SpecEdit], None] | None = None,
    ) -> None:
        self.profile = profile
        self.scenario = scenario or Scenario(profile=profile.name)
        factor = time_factor or self.scenario.time_factor
        self.path = state
        self.reads: Counter[str] = Counter()
        self.edit_spec = edit_spec
        self.faults = Faults(self)
        self._file_id: tuple[int, int] | None = None
        self._depth = 0
        self._holds_lock = False
        self._due = 0.0
        self._ticker: asyncio.Task[None] | None = None
        with self._file_lock():
            self.state = self._load() or self._create(factor)
        self._take_scenario(scenario)
        if factor and factor != self.state.factor:
            with self.change() as changed:
                changed.epoch_sim, changed.epoch_real, changed.factor = self.sim_now(), time.time(), factor
        self.clock = SimClock(self.state.factor)
        self.servers = Servers(self)

    # -- time ---------------------------------------------------------------------------------------------------

    def sim_now(self) -> float:
        """Simulated seconds since the host was created; goes on while no process looks."""
        return self.state.epoch_sim + (time.time() - self.state.epoch_real) * self.state.factor

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def writes(self) -> list[str]:
        return self.state.writes

    def _create(self, factor: float | None) -> WorldState:
        self.state = initial_state(self.profile)
        self.state.factor = factor or self.profile.time_factor
        self.state.scenario = _as_data(self.scenario)
        if self.scenario.set:
            self.state = patched(self.state, self.scenario.set, "scenario")
        if self.scenario.renumber:
            renumber(self.state, self.scenario.renumber)
        systemd.settle(self)
        self._save()
        return self.state

    def _load(self) -> WorldState | None:
        if self.path is None or not self.path.exists():
            return None
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._file_id = (status.st_ino, status.st_mtime_ns)
            text = file.read()
        try:
            state = WorldState.model_validate_json(text)
        except ValidationError as error:
            raise ScenarioError(
                (f"{self.path} holds no simulated host of this version; remove it",)
            ) from error
        if state.profile != self.profile.name:
            message = f"{self.path} holds a host of profile {state.profile}, not {self.profile.name}: use another --root"
            raise ScenarioError((message,))
        return state

    def _take_scenario(self, given: Scenario | None) -> None:
        """A host keeps its scenario; another one replaces its faults and events, not what ``set`` once made."""
        if given is None:
            self.scenario = Scenario.model_validate(self.state.scenario)
        elif _as_data(given) != self.state.scenario:
            with self.change() as state:
                state.scenario = _as_data(given)
                state.calls, state.fault_hits, state.added_faults = {}, {}, []
                state.events_armed, state.events_done = {}, []

    def _save(self) -> None:
        self.state.version += 1
        self._due = 0.0
        if self.path is None:
            return
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        temporary.write_text(self.state.model_dump_json(by_alias=True), encoding="utf-8")
        status = temporary.stat()
        self._file_id = (status.st_ino, status.st_mtime_ns)
        temporary.replace(self.path)

    def _refresh(self) -> None:
        """Take over what another process has saved since; never in the middle of a change of our own."""
        if self.path is None or self._depth:
            return
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return
        if (status.st_ino, status.st_mtime_ns) != self._file_id:
            version = self.state.version
            self.state = self._load() or self.state
            self.state.version = max(self.state.version, version + 1)
            self._due = 0.0

    @contextlib.contextmanager
    def change(self) -> Iterator[WorldState]:
        """The newest state, to be changed in place; saved when the outermost change ends."""
        with self._locked():
            self._depth += 1
            try:
                yield self.state
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._save()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._depth:
            yield
            return
        with self._file_lock():
            self._refresh()
            yield

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Held by one process at a time; within a process everything is on one thread."""
        if self.path is None or self._holds_lock:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f"{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._holds_lock = True
            try:
                yield
            finally:
                self._holds_lock = False

    def log(self, text: str, count: int = 1, ago: float = 0.0) -> None:
        """One line to the kernel log, ``ago`` seconds in the past; call it inside ``change``."""
        self.state.kernel_log.append(LogLine(at=time.time() - ago, text=text, count=count))

    # -- port calls ---------------------------------------------------------------------------------------------

    async def enter(self, call: str, *about: str, write: str = "") -> Fault | None:
        """Every port call begins here: time passes, the call is counted, faults strike.

        Returns the fault that the caller must heed; delays, errnos and exceptions are dealt with here.
        """
        self._watch_events()
        self.tick()
        if write:
            with self.change() as state:
                state.writes.append(f"{call} {write}".rstrip())
                del state.writes[:-WRITES_KEPT]
        else:
            self.reads[call.partition(".")[0]] += 1
        events.count_call(self, call)
        fault = self.faults.strike(call, about)
        if fault is None:
            return None
        if fault.delay and call != "pci.unbind":
            await self.clock.sleep(fault.delay)
        if fault.block and call != "pci.unbind":
            await asyncio.Event().wait()
        if call != "pci.unbind":
            self.raise_fault(fault, about)
        elif fault.raises:
            raise broken(fault)
        return fault

    def raise_fault(self, fault: Fault, about: tuple[str, ...]) -> None:
        if fault.errno:
            number = getattr(errno, fault.errno)
            raise OSError(number, os.strerror(number), " ".join(about) or None)
        if fault.raises:
            raise broken(fault)

    def tick(self) -> None:
        """Let simulated time catch up: unbinds that return, processes that end, events that are due."""
        self._refresh()
        now = self.sim_now()
        died = self.servers.any_died()
        if now < self._due and not died:
            return
        due = self._next_due()
        if now >= due or died:
            with self.change():
                kernel.advance(self, now)
                systemd.advance(self, now)
                events.run_due(self, now)
            due = self._next_due()
        self.servers.end_strays()
        self._due = due

    def _next_due(self) -> float:
        return min(kernel.next_due(self.state), systemd.next_due(self.state), events.next_due(self))

    def _watch_events(self) -> None:
        """Events must come also while nothing calls the ports, such as during a benchmark."""
        if self._ticker is None and self.scenario.events:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_on())

    async def _tick_on(self) -> None:
        while events.pending(self):
            await asyncio.sleep(TICK)
            self.tick()

    async def close(self) -> None:
        """End what this process runs for the host: the ticker and the HTTP servers. The host itself goes on."""
        ticker, self._ticker = self._ticker, None
        self.servers.close()
        if ticker is not None:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticker


def remembered_profile(state: Path) -> str:
    """The profile of the host that a state file holds; "" when it holds none that can be read."""
    try:
        return WorldState.model_validate_json(state.read_bytes()).profile
    except (OSError, ValidationError):
        return ""

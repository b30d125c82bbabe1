"""The NVML port of a simulated host."""

import errno
import os

from agent.core.fact import Fact, Known, Unknown
from agent.core.observation import Gpu, Nvml
from agent.sim import kernel
from agent.sim.facts import patched, scripted
from agent.sim.holding import holders_by_function, missing_nodes, on_nvidia
from agent.sim.scenario import Fault
from agent.sim.state import GpuState, WorldState
from agent.sim.world import World

# NVML's numbers: a CamelCase reason, NVML's own words, and the errno that a failed write of ours carries.
CODES = {
    2: ("NvmlInvalidArgument", "Invalid Argument", errno.EINVAL),
    3: ("NvmlNotSupported", "Not Supported", errno.EOPNOTSUPP),
    4: ("NvmlNoPermission", "Insufficient Permissions", errno.EPERM),
    9: ("NvmlDriverNotLoaded", "Driver Not Loaded", errno.ENODEV),
    10: ("NvmlTimeout", "Timeout", errno.ETIMEDOUT),
    12: ("NvmlLibraryNotFound", "NVML Shared Library Not Found", errno.ENOENT),
    13: ("NvmlFunctionNotFound", "Function Not Found", errno.ENOSYS),
    15: ("GpuLost", "GPU is lost", errno.EIO),
    16: ("GpuResetRequired", "GPU requires reset", errno.EIO),
    18: ("NvmlVersionMismatch", "Driver/library version mismatch", errno.EPROTO),
    999: ("NvmlUnknownError", "Unknown Error", errno.EIO),
}
HUNG_MEMORY = 1500  # MiB on each GPU while the first collective hangs
SERVING_SHARE = 0.92


def unknown_of(code: int) -> Unknown:
    name, words, _ = CODES.get(code, (f"NvmlError{code}", "unknown code", errno.EIO))
    return Unknown(f"NVML: {words} (code {code})", name)


def error_of(code: int, about: str) -> OSError:
    number = CODES.get(code, ("", "", errno.EIO))[2]
    return OSError(number, f"{unknown_of(code).reason} ({os.strerror(number)})", about)


class SimNvml:
    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: tuple[int, Nvml] | None = None

    async def read(self) -> Fact[Nvml]:
        fault = await self._world.enter("nvml.read")
        if "nvidia" not in self._world.state.modules:
            with self._world.change():
                kernel.load_module(self._world, "nvidia")  # what opening NVML does, wanted or not
        state = self._world.state
        if fault is not None and fault.code:
            return unknown_of(fault.code)
        if (instead := scripted(fault)) is not None:
            return instead
        host = state.targets.get("host")
        if host is not None and host.user_driver not in (None, state.driver_version):
            return unknown_of(18)
        if "/dev/nvidiactl" in missing_nodes(state):
            return unknown_of(9)  # the library cannot tell it from a module that is not loaded
        if host is not None and host.nvml_code:
            return unknown_of(host.nvml_code)
        if self._seen is None or self._seen[0] != state.version:
            self._seen = (state.version, nvml_of(state))
        return Known(self._with_patches(self._seen[1]))

    def _with_patches(self, nvml: Nvml) -> Nvml:
        patches = [f for f in self._world.faults.patches("nvml.read") if f.target in nvml.gpus]
        if not patches:
            return nvml
        gpus = dict(nvml.gpus)
        for fault in patches:
            gpus[fault.target or ""] = _patched(gpus[fault.target or ""], fault)
        return Nvml(nvml.driver_version, nvml.nvml_version, nvml.cuda_version, gpus)

    async def set_persistence_mode(self, address: str, *, on: bool) -> None:
        write = f"{address} {'on' if on else 'off'}"
        fault = await self._world.enter("nvml.set_persistence_mode", address, write=write)
        with self._world.change():
            gpu = self._writable(address, fault)
            if fault is None or not fault.succeed_without_effect:
                gpu.persistence_mode = on

    async def set_power_limit(self, address: str, watts: int) -> None:
        fault = await self._world.enter("nvml.set_power_limit", address, write=f"{address} {watts}")
        with self._world.change():
            gpu = self._writable(address, fault)
            low, high = gpu.power_range
            if not low <= watts <= high:
                raise error_of(2, f"{address}: {watts} W is outside {low} to {high} W")
            if fault is None or not fault.succeed_without_effect:
                gpu.power_limit = watts

    def _writable(self, address: str, fault: Fault | None) -> GpuState:
        state = self._world.state
        if fault is not None and fault.code:
            raise error_of(fault.code, address)
        if address not in state.gpus or state.functions[address].driver != "nvidia":
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), address)
        if state.gpus[address].nvml_code:
            raise error_of(state.gpus[address].nvml_code, address)
        return state.gpus[address]


def _patched(gpu: Fact[Gpu], fault: Fault) -> Fact[Gpu]:
    if fault.code:
        return unknown_of(fault.code)
    if (instead := scripted(fault)) is not None:
        return instead
    return Known(patched(gpu.value, fault.value)) if isinstance(gpu, Known) and fault.value else gpu


def nvml_of(state: WorldState) -> Nvml:
    pids = _pids(state)
    gpus: dict[str, Fact[Gpu]] = {}
    for index, address in enumerate(on_nvidia(state)):
        gpu = state.gpus[address]
        if gpu.nvml_code:
            gpus[address] = unknown_of(gpu.nvml_code)
        else:
            gpus[address] = Known(_gpu(address, index, gpu, _load(state, address), pids.get(address, ())))
    return Nvml(
        driver_version=Known(state.driver_version),
        nvml_version=Known(state.driver_version),
        cuda_version=Known(state.cuda_version),
        gpus=gpus,
    )


def _pids(state: WorldState) -> dict[str, tuple[int, ...]]:
    """Compute processes: what holds a GPU's node, except daemons, which compute nothing."""
    daemons = {
        unit.main_pid
        for target in state.targets.values()
        for unit in target.units.values()
        if unit.holds is not None
    }
    found: dict[str, tuple[int, ...]] = {}
    for address, holders in holders_by_function(state).items():
        found[address] = tuple(
            sorted(
                h.pid for h in holders if h.kind == "process" and h.pid is not None and h.pid not in daemons
            )
        )
    return found


def _load(state: WorldState, address: str) -> tuple[int, int]:
    """Memory used (MiB) and utilisation (percent): a hung collective spins at 100 % and has loaded nothing."""
    gpu = state.gpus[address]
    memory, busy = gpu.memory_used, gpu.utilization
    for unit in (unit for target in state.targets.values() for unit in target.units.values()):
        if unit.holds is None and address in unit.gpus:
            memory += int(gpu.memory_total * SERVING_SHARE) if unit.ready else HUNG_MEMORY
            busy = max(busy, 100 if unit.hung else 0)
        memory += sum(orphan.memory for orphan in unit.orphans if address in orphan.gpus)
    return min(memory, gpu.memory_total), busy


def _gpu(address: str, index: int, gpu: GpuState, load: tuple[int, int], pids: tuple[int, ...]) -> Gpu:
    return Gpu(
        address=address,
        index=index,
        minor=Known(gpu.minor),
        uuid=Known(gpu.uuid),
        name=Known(gpu.name),
        serial=Known(gpu.serial),
        persistence_mode=Known(gpu.persistence_mode),
        power_limit=Known(gpu.power_limit),
        power_limit_range=Known(gpu.power_range),
        memory_total=Known(gpu.memory_total),
        memory_used=Known(load[0]),
        utilization=Known(load[1]),
        pids=Known(pids),
        recovery_action=Known(gpu.recovery_action),
        link_gen=Known(gpu.link_gen),
        max_link_gen=Known(gpu.max_link_gen),
        link_width=Known(gpu.link_width),
    )

"""The NVML port of a simulated host."""

import errno
import os
from dataclasses import replace

from agent.core.fact import Fact, Known
from agent.core.gpu_facts import P2PCapability, RemappedRows
from agent.core.locked_clocks import in_force
from agent.core.observation import NOT_READ, Gpu, Nvml
from agent.sim import kernel
from agent.sim.facts import patched, scripted
from agent.sim.gpu_settings import changed
from agent.sim.holding import holders_by_function, missing_nodes, on_nvidia
from agent.sim.nvml_codes import error_of, unknown_of
from agent.sim.scenario import Fault
from agent.sim.state import GpuState, WorldState
from agent.sim.world import World

HUNG_MEMORY = 1500  # MiB on each GPU while the first collective hangs
SERVING_SHARE = 0.92


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
        return replace(nvml, gpus=gpus)

    async def set(self, address: str, setting: str, value: str) -> None:
        call = f"nvml.set_{setting.replace('-', '_')}"
        fault = await self._world.enter(call, address, write=f"{address} {value}")
        with self._world.change() as state:
            gpu = self._writable(address, fault)
            busy = any(h.kind != "persistence" for h in holders_by_function(state).get(address, ()))
            changes = changed(gpu, setting, value, busy=busy)
            if fault is None or not fault.succeed_without_effect:
                for name, after in changes.items():
                    setattr(gpu, name, after)

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
            told = _gpu(address, index, gpu, _load(state, address), pids.get(address, ()))
            gpus[address] = Known(replace(told, p2p=Known(_p2p(address, state))))
    return Nvml(
        driver_version=Known(state.driver_version),
        nvml_version=Known(state.driver_version),
        cuda_version=Known(state.cuda_version),
        gpus=gpus,
        confidential_compute=Known("off"),
    )


def _p2p(address: str, state: WorldState) -> dict[str, P2PCapability]:
    status = Known(state.gpus[address].p2p_status)
    peers = (a for a in on_nvidia(state) if a != address and not state.gpus[a].nvml_code)
    return {peer: P2PCapability(status, status, status) for peer in peers}


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
    persistence = Known(gpu.persistence_mode)
    return Gpu(
        address=address,
        index=index,
        minor=Known(gpu.minor),
        uuid=Known(gpu.uuid),
        name=Known(gpu.name),
        serial=Known(gpu.serial),
        persistence_mode=persistence,
        power_limit=Known(gpu.power_limit),
        power_limit_range=Known(gpu.power_range),
        locked_graphics_clocks=in_force(gpu.locked_graphics_clocks, persistence, NOT_READ),
        locked_memory_clocks=in_force(gpu.locked_memory_clocks, persistence, NOT_READ),
        ecc_mode=Known(gpu.ecc),
        ecc_pending=Known(gpu.ecc_pending),
        mig_mode=Known(gpu.mig),
        mig_pending=Known(gpu.mig_pending),
        compute_mode=Known(gpu.compute_mode),
        memory_total=Known(gpu.memory_total),
        memory_used=Known(load[0]),
        utilization=Known(load[1]),
        pids=Known(pids),
        recovery_action=Known(gpu.recovery_action),
        link_gen=Known(gpu.link_gen),
        max_link_gen=Known(gpu.max_link_gen),
        link_width=Known(gpu.link_width),
        max_link_width=Known(gpu.max_link_width),
        bar1_total=Known(gpu.bar1_total),
        vbios=Known(gpu.vbios),
        replays=Known(gpu.replays),
        clock_reasons=Known(tuple(gpu.clock_reasons)),
        graphics_pids=Known(()),
        remapped_rows=Known(RemappedRows(0, 0, gpu.rows_pending, gpu.rows_failed)),
    )

"""What the kernel does: drivers, unbinding, probing, IOMMU groups, modules, virtual machines, page faults.

Measured on Linux 6.12 with emulated devices; what concerns the nvidia driver is from its source and public reports.
"""

import errno
import os
from typing import TYPE_CHECKING

from agent.sim.holding import holders_of
from agent.sim.initial import boot_domain, booted
from agent.sim.scenario import Fault, Reboot
from agent.sim.state import FunctionState, GpuState, GroupState, ModuleState, UnbindState, WorldState

if TYPE_CHECKING:
    from agent.sim.world import World

NVIDIA_UNBIND = 0.5  # simulated seconds
NVIDIA_PROBE = 2.0
QUICK = 0.08
NEVER = float("inf")
TRANSLATED = ("DMA", "DMA-FQ")
BURST = 10  # page faults logged before the kernel's rate limit


def fail(name: str, about: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), about)


def function_of(state: WorldState, address: str) -> FunctionState:
    if address not in state.functions:
        raise fail("ENOENT", address)
    return state.functions[address]


def module_of(driver: str) -> str:
    return driver.replace("-", "_")


def driver_loaded(state: WorldState, driver: str) -> bool:
    """A driver that is no installable module is built in, as pcieport is."""
    module = module_of(driver)
    known = module in state.installed_modules or driver in ("nvidia", "vfio-pci")
    builtin = any(f.native == driver for f in state.functions.values()) and not known
    return builtin or module in state.modules


# -- unbind -----------------------------------------------------------------------------------------------------------


def start_unbind(world: "World", address: str, driver: str, fault: Fault | None) -> None:
    state = world.state
    pending = state.unbinds.get(address)
    if pending is not None and running(pending):
        return  # a second write waits behind the first
    function = state.functions.get(address)
    if function is None or function.driver != driver:
        # A driver that is not loaded has no unbind file; one that is refuses a device that is not its own.
        failed = "ENODEV" if driver_loaded(state, driver) else "ENOENT"
        state.unbinds[address] = UnbindState(driver=driver, done_at=0.0, failed=failed)
    elif fault is not None and fault.errno:
        state.unbinds[address] = UnbindState(driver=driver, done_at=0.0, failed=fault.errno)
    elif fault is not None and fault.succeed_without_effect:
        state.unbinds[address] = UnbindState(driver=driver, done_at=0.0)
    else:
        delay = (fault.delay or 0.0) if fault is not None else 0.0
        state.unbinds[address] = _unbind(world, address, function, delay, bool(fault and fault.block))


def _unbind(world: "World", address: str, function: FunctionState, delay: float, block: bool) -> UnbindState:
    """The driver link goes first; whether remove() ever returns is another matter."""
    driver, state = function.driver, world.state
    pending = UnbindState(driver=driver, done_at=world.sim_now() + delay + QUICK)
    held = holders_of(state, address)
    if driver == "nvidia":
        pending.done_at = world.sim_now() + delay + NVIDIA_UNBIND
        if held or block:
            world.log(f"NVRM: Attempting to remove device {address} with non-zero usage count!")
            pending.done_at = None
    elif driver == "vfio-pci" and any(h.kind == "vm" for h in held):
        world.log(f"vfio-pci {address}: Relaying device request to user (#0)")
        pending.done_at, pending.waits_for = None, "vfio"
    if block:
        pending.done_at, pending.waits_for = None, ""
    function.driver = ""
    if address in state.gpus and pending.done_at is not None:
        _forget_settings(state.gpus[address])
    return pending


def _forget_settings(gpu: GpuState) -> None:
    """What the driver keeps and not the card; a pending mode becomes the mode when the driver lets go of the card."""
    gpu.persistence_mode = False
    gpu.power_limit = gpu.power_range[1]
    gpu.locked_graphics_clocks = gpu.locked_memory_clocks = None
    gpu.compute_mode = "default"
    gpu.mig = gpu.mig_pending


def running(pending: UnbindState) -> bool:
    return pending.done_at is None or pending.done_at > 0.0


def unbind_state(state: WorldState, address: str) -> str:
    pending = state.unbinds.get(address)
    if pending is None:
        return "none"
    if running(pending):
        return "running: state S in vfio_unregister_group_dev" if pending.waits_for == "vfio" else "running"
    return f"failed: {pending.failed}" if pending.failed else "done"


def next_due(state: WorldState) -> float:
    return min((p.done_at for p in state.unbinds.values() if p.done_at), default=NEVER)


def advance(world: "World", now: float) -> None:
    for pending in world.state.unbinds.values():
        if pending.done_at is not None and pending.done_at <= now:
            pending.done_at = 0.0  # done, for ever


# -- bind -------------------------------------------------------------------------------------------------------------


def probe(world: "World", address: str) -> float:
    """drivers_probe. Returns how long it takes; whether anything was bound only the driver link tells."""
    state = world.state
    function = state.functions.get(address)
    if function is None:
        raise fail("ENODEV", address)
    pending = state.unbinds.get(address)
    if function.driver or (pending is not None and running(pending)):
        return QUICK
    driver = function.override or function.native
    if not driver or not driver_loaded(state, driver):
        return QUICK
    return bind(world, address, function, driver)


def bind(world: "World", address: str, function: FunctionState, driver: str) -> float:
    """The driver's own probe(); its failure shows only in the log and in the missing link."""
    if not _fits(function, driver):
        return QUICK
    if function.power_state == "D3cold":
        world.log(f"{driver} {address}: Unable to change power state from D3cold to D0, device inaccessible")
        return QUICK
    if driver != "vfio-pci" and _group_open(world.state, function.group):
        world.log(f"{driver} {address}: probe with driver {driver} failed with error -16")
        return QUICK
    function.driver = driver
    return NVIDIA_PROBE if driver == "nvidia" else QUICK


def _fits(function: FunctionState, driver: str) -> bool:
    return driver in ("vfio-pci", function.native) or (driver == "nvidia" and function.is_gpu)


def _group_open(state: WorldState, group: int | None) -> bool:
    """A running VM has the group open: no host driver may bind in it."""
    members = {address for address, f in state.functions.items() if group is not None and f.group == group}
    return any(vm.running and members & set(vm.functions) for vm in state.vms.values())


def rescan(world: "World", slot: str) -> None:
    """Remove and rescan a slot: override and written group type are lost, the native driver takes it back."""
    state = world.state
    for address, function in state.functions.items():
        if address.startswith(slot.rpartition(".")[0] or slot):
            function.override, function.driver = "", ""
            state.unbinds.pop(address, None)
            if function.group is not None:
                state.groups[function.group] = GroupState(type=boot_domain(state.cmdline) or "DMA")
            if function.native and driver_loaded(state, function.native):
                bind(world, address, function, function.native)


# -- IOMMU groups -----------------------------------------------------------------------------------------------------


def set_group_type(state: WorldState, number: int, wanted: str) -> None:
    group = state.groups.get(number)
    if group is None:
        raise fail("ENOENT", f"/sys/kernel/iommu_groups/{number}/type")
    about = f"/sys/kernel/iommu_groups/{number}/type <- {wanted}"
    if wanted not in ("DMA", "DMA-FQ", "identity", "auto"):
        raise fail("EINVAL", about)
    drivers = {f.driver for f in state.functions.values() if f.group == number and f.driver}
    busy = bool(drivers - {"vfio-pci"}) or _group_open(state, number)
    if busy and not (group.type == "DMA" and wanted == "DMA-FQ"):
        raise fail("EPERM", about)
    target = (boot_domain(state.cmdline) or "DMA") if wanted == "auto" else wanted
    if target == "identity" and state.sev_snp:
        raise fail("EINVAL", about)  # with SNP on, AMD's driver refuses identity domains
    group.type = target


def translated(state: WorldState, address: str) -> bool:
    number = state.functions[address].group
    group = state.groups.get(number) if number is not None else None
    return group is not None and group.type in TRANSLATED


def page_faults(world: "World", pairs: list[tuple[str, str]], ago: float = 0.0) -> None:
    """Peer writes that the IOMMU refused: the line names the source; the address lies in the destination's BAR."""
    for number, (source, destination) in enumerate(_spread(pairs)[:BURST]):
        function = world.state.functions[source]
        bars = world.state.functions[destination].bars
        first = max(bars, key=lambda bar: bar[1] - bar[0])[0] if bars else 0
        world.log(
            f"{function.driver or 'pci'} {source}: AMD-Vi: Event logged [IO_PAGE_FAULT"
            f" domain=0x{function.group or 0:04x} address=0x{first + number * 0x1000:x} flags=0x0030]",
            ago=ago,
        )
    if len(pairs) > BURST:
        world.log(f"amd_iommu_report_page_fault: {len(pairs) - BURST} callbacks suppressed", ago=ago)


def _spread(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The sources in turn: all transfer at once, so the kernel's rate limit cuts all alike."""
    turns: dict[str, int] = {}
    ranked = []
    for pair in pairs:
        turns[pair[0]] = turns.get(pair[0], -1) + 1
        ranked.append((turns[pair[0]], pair))
    return [pair for _, pair in sorted(ranked, key=lambda item: item[0])]


# -- modules, machines, boots -----------------------------------------------------------------------------------------


def load_module(world: "World", name: str) -> None:
    state, module = world.state, module_of(name)
    if module not in state.installed_modules:
        raise fail("ENOENT", f"module {name}")
    if module in state.modules:
        return
    described = world.profile.modules.get(module)
    state.modules[module] = described.model_copy(deep=True) if described is not None else ModuleState()
    if module == "nvidia":
        state.modules[module].version = state.driver_version
    for address, function in state.functions.items():
        wanted = function.override or function.native
        pending = state.unbinds.get(address)
        free = not function.driver and not (pending is not None and running(pending))
        if free and wanted and module_of(wanted) == module:
            bind(world, address, function, wanted)


def set_module_parameter(state: WorldState, module: str, parameter: str, value: str) -> None:
    path = f"/sys/module/{module}/parameters/{parameter}"
    loaded = state.modules.get(module_of(module))
    if loaded is None or parameter not in loaded.parameters:
        raise fail("ENOENT", path)
    if parameter in loaded.read_only:
        raise fail("EACCES", path)
    if loaded.parameters[parameter] in ("Y", "N"):
        if value[:1].lower() not in ("1", "0", "y", "n"):
            raise fail("EINVAL", path)
        value = "Y" if value[:1].lower() in ("1", "y") else "N"
    loaded.parameters[parameter] = value


def vm_start(world: "World", name: str) -> None:
    """A VM starts only when every function of its groups is on vfio-pci; else it says so and stays off."""
    state = world.state
    vm = state.vms[name]
    groups = {state.functions[address].group for address in vm.functions}
    members = {a: f for a, f in state.functions.items() if f.group in groups and f.class_code >> 16 != 0x06}
    foreign = [address for address, function in members.items() if function.driver != "vfio-pci"]
    if foreign:
        world.log(
            f"vfio-pci {foreign[0]}: group {members[foreign[0]].group} is not viable, VM {name} not started"
        )
        return
    vm.running = True


def vm_stop(world: "World", name: str) -> None:
    state = world.state
    state.vms[name].running = False
    for address in state.vms[name].functions:
        pending = state.unbinds.get(address)
        if pending is not None and pending.waits_for == "vfio":
            pending.done_at = 0.0


def reboot(world: "World", how: Reboot, moved: dict[str, str]) -> WorldState:
    return booted(world.state, world.profile, list(how.cmdline) if how.cmdline is not None else None, moved)

"""Who holds which function: processes of units, orphans, persistence mode, virtual machines, scripted holders."""

from collections.abc import Iterator

from agent.core.observation import Holder
from agent.sim.state import TargetState, UnitState, WorldState


def holders_by_function(state: WorldState) -> dict[str, tuple[Holder, ...]]:
    """Every holder of every function that has one."""
    found: dict[str, list[Holder]] = {}
    for address, holder in _all(state):
        found.setdefault(address, []).append(holder)
    return {address: tuple(holders) for address, holders in found.items()}


def holders_of(state: WorldState, address: str) -> tuple[Holder, ...]:
    return holders_by_function(state).get(address, ())


def _all(state: WorldState) -> Iterator[tuple[str, Holder]]:
    for target_name, target in state.targets.items():
        container = target_name.removeprefix("lxc:") if target_name.startswith("lxc:") else ""
        for unit_name, unit in target.units.items():
            yield from _of_unit(state, unit_name, unit, container)
    for address, gpu in state.gpus.items():
        if gpu.persistence_mode and state.functions[address].driver == "nvidia":
            yield address, Holder("persistence", "persistence mode")
    for name, vm in state.vms.items():
        for address in vm.functions if vm.running else ():
            what = f"/dev/vfio/{state.functions[address].group}"
            yield address, Holder("vm", what, vm.pid, f"kvm (VM {name})", unit=f"{name}.scope")
    for held in state.holders:
        holder = Holder(held.kind, held.what, held.pid, held.command, held.unit, held.container)
        yield held.address, holder


def _of_unit(state: WorldState, name: str, unit: UnitState, container: str) -> Iterator[tuple[str, Holder]]:
    for rank, address in enumerate(unit.gpus):
        pid, command = worker(unit, rank)
        yield address, Holder("process", node(state, address), pid, command, name, container)
    for orphan in unit.orphans:
        for address in orphan.gpus:
            unit_name = name if orphan.in_cgroup else ""
            yield (
                address,
                Holder("process", node(state, address), orphan.pid, orphan.command, unit_name, container),
            )


def worker(unit: UnitState, rank: int) -> tuple[int, str]:
    """Process id and command of a unit's process on its GPU number ``rank``: SGLang has one scheduler per GPU."""
    if unit.holds is not None:
        return unit.main_pid, (unit.argv[0].rpartition("/")[2] if unit.argv else "")
    return unit.main_pid + 1 + rank, f"sglang::scheduler_TP{rank}"


def unit_pids(unit: UnitState) -> tuple[int, ...]:
    """Every process in the unit's cgroup."""
    own: list[int] = []
    if unit.main_pid:
        own = [unit.main_pid, *(worker(unit, rank)[0] for rank in range(len(unit.gpus)))]
    return tuple(sorted({*own, *(orphan.pid for orphan in unit.orphans if orphan.in_cgroup)}))


def node(state: WorldState, address: str) -> str:
    return f"/dev/nvidia{state.gpus[address].minor}" if address in state.gpus else "/dev/nvidiactl"


def on_nvidia(state: WorldState) -> list[str]:
    """GPUs that NVML sees, in its index order: by bus address."""
    return sorted(address for address in state.gpus if state.functions[address].driver == "nvidia")


def device_nodes(state: WorldState, target: TargetState) -> tuple[str, ...]:
    if target.device_nodes is not None:
        return tuple(target.device_nodes)
    made = state.made_nodes
    return tuple(sorted(n for n in _natural_nodes(state) if made is None or n in made))


def missing_nodes(state: WorldState) -> tuple[str, ...]:
    """Nodes that the loaded modules have, and that nobody has made."""
    made = state.made_nodes
    return () if made is None else tuple(sorted({n for n in _natural_nodes(state) if n not in made}))


def _natural_nodes(state: WorldState) -> list[str]:
    nodes = [node(state, address) for address in on_nvidia(state)]
    nodes += ["/dev/nvidiactl"] if "nvidia" in state.modules else []
    nodes += ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"] if "nvidia_uvm" in state.modules else []
    return nodes

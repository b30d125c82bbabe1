"""The PCI and holders ports of a simulated host."""

from collections.abc import Iterable, Mapping

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Holder, IommuGroup, Pci, PciFunction
from agent.ports import START_WITHIN
from agent.sim import kernel
from agent.sim.facts import known, patched, scripted
from agent.sim.holding import holders_by_function
from agent.sim.state import FunctionState, WorldState
from agent.sim.world import World


class SimPci:
    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: tuple[int, Pci] | None = None

    async def read(self) -> Pci:
        fault = await self._world.enter("pci.read")
        if (instead := scripted(fault)) is not None:
            raise OSError(instead.reason)
        state = self._world.state
        if self._seen is None or self._seen[0] != state.version:
            self._seen = (state.version, pci_of(state))
        return self._with_patches(self._seen[1])

    def _with_patches(self, pci: Pci) -> Pci:
        patches = [f for f in self._world.faults.patches("pci.read") if f.value and f.target in pci.functions]
        if not patches:
            return pci
        functions = dict(pci.functions)
        for fault in patches:
            functions[fault.target or ""] = patched(functions[fault.target or ""], fault.value or {})
        return Pci(functions, pci.groups, pci.pending_unbinds)

    async def read_driver(self, address: str) -> Fact[str]:
        fault = await self._world.enter("pci.read_driver", address)
        if (instead := scripted(fault)) is not None:
            return instead
        function = self._world.state.functions.get(address)
        return Absent("no such device") if function is None else known(function.driver, empty="")

    async def set_override(self, address: str, driver: str) -> None:
        fault = await self._world.enter("pci.set_override", address, write=f"{address} {driver}".rstrip())
        with self._world.change() as state:
            function = kernel.function_of(state, address)
            if fault is None or not fault.succeed_without_effect:
                function.override = driver

    async def start_unbind(self, address: str, driver: str, within: float = START_WITHIN) -> None:  # noqa: ARG002 - nothing is late here
        fault = await self._world.enter("pci.unbind", address, write=f"{address} {driver}")
        with self._world.change():
            kernel.start_unbind(self._world, address, driver, fault)

    async def unbind_state(self, address: str) -> str:
        await self._world.enter("pci.unbind_state", address)
        return kernel.unbind_state(self._world.state, address)

    async def probe(self, address: str) -> None:
        fault = await self._world.enter("pci.probe", address, write=address)
        if fault is not None and fault.succeed_without_effect:
            return
        with self._world.change():
            seconds = kernel.probe(self._world, address)
        await self._world.clock.sleep(seconds)

    async def set_group_type(self, group: int, group_type: str) -> None:
        fault = await self._world.enter("pci.set_group_type", str(group), write=f"{group} {group_type}")
        if fault is not None and fault.succeed_without_effect:
            return
        with self._world.change() as state:
            kernel.set_group_type(state, group, group_type)


class SimHolders:
    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: tuple[int, dict[str, Fact[tuple[Holder, ...]]]] | None = None

    async def read(self, addresses: Iterable[str]) -> Mapping[str, Fact[tuple[Holder, ...]]]:
        fault = await self._world.enter("holders.read")
        wanted = list(addresses)
        instead = scripted(fault)
        if isinstance(instead, Unknown):
            return dict.fromkeys(wanted, instead)
        state = self._world.state
        if self._seen is None or self._seen[0] != state.version:
            self._seen = (state.version, {a: Known(h) for a, h in holders_by_function(state).items()})
        none: Fact[tuple[Holder, ...]] = Known(())
        found = {address: self._seen[1].get(address, none) for address in wanted}
        for patch in self._world.faults.patches("holders.read"):
            unknown = scripted(patch)
            if patch.target in found and unknown is not None:
                found[patch.target] = unknown
        return found


def pci_of(state: WorldState) -> Pci:
    members: dict[int, list[str]] = {}
    for address, function in state.functions.items():
        if function.group is not None:
            members.setdefault(function.group, []).append(address)
    groups = {
        number: IommuGroup(number, Known(group.type), tuple(sorted(members.get(number, ()))))
        for number, group in sorted(state.groups.items())
    }
    running = tuple(sorted(a for a, pending in state.unbinds.items() if kernel.running(pending)))
    return Pci({a: _function(a, f) for a, f in sorted(state.functions.items())}, groups, running)


def _function(address: str, function: FunctionState) -> PciFunction:
    return PciFunction(
        address=address,
        vendor_id=function.vendor,
        device_id=function.device,
        class_code=function.class_code,
        driver=known(function.driver, empty=""),
        driver_override=known(function.override, empty="", absent="not set"),
        iommu_group=known(function.group),
        numa_node=known(function.numa_node),
        power_state=Known(function.power_state),
        boot_vga=known(function.boot_vga, absent="not a VGA controller"),
        slot=known(function.slot, empty=""),
        serial=known(function.serial, empty=""),
        bridges=tuple(function.bridges),
        acs_ctl=known(function.acs_ctl),
        bars=tuple(function.bars),
        link_speed=known(function.link_speed, empty=""),
        link_width=known(function.link_width),
        max_link_speed=known(function.max_link_speed, empty=""),
        max_link_width=known(function.max_link_width),
        reset_methods=Known(("flr", "bus")) if function.is_gpu else Known(("bus",)),
        power_control=Known("on"),
        virtual_functions=known(function.virtual_functions, absent="no SR-IOV"),
    )

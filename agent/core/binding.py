"""Driver binding, decided: which driver each function of a selected slot must have, and what forbids it.

Shared by the kinds: driver binding acts on it, P2P and services wait for it.
"""

from dataclasses import dataclass, replace

from agent.core.fact import Absent, Fact, Known, Unknown, say
from agent.core.immovable import immovable
from agent.core.inputs import Inputs
from agent.core.observation import Holder, IommuGroup, Pci, PciFunction
from agent.core.plan import Refusal
from agent.core.reach import out_of_reach
from agent.core.selection import Selection
from agent.core.spec import Service, target_name

# What a function beside the GPU goes back to when its card belongs to the host again.
HOST_DRIVERS = {0x0403: "snd_hda_intel", 0x0C03: "xhci_hcd"}


@dataclass(frozen=True, slots=True)
class FunctionBinding:
    """One function: what holds it now and what must. ``desired`` None: any host driver, or none."""

    address: str
    observed: Fact[str]
    desired: str | None
    override: Fact[str]

    @property
    def driver_wrong(self) -> bool:
        if self.desired is None:
            return self.observed == Known("vfio-pci")
        return self.observed != Known(self.desired)

    @property
    def override_wrong(self) -> bool:
        if self.desired == "vfio-pci":
            return self.override != Known("vfio-pci")
        return not isinstance(self.override, Absent)


@dataclass(frozen=True, slots=True)
class SlotBinding:
    """One card: all its functions, and what must be let go of first."""

    slot: str
    group: str
    gpu: str
    driver: str
    functions: tuple[FunctionBinding, ...]
    refusal: Refusal | None = None
    persistence: bool = False  # persistence mode must go off first
    quiesce: tuple[str, ...] = ()  # units of policy.quiesce that must stop first
    services: tuple[str, ...] = ()  # services of the spec whose processes must stop first

    @property
    def driver_wrong(self) -> bool:
        return any(f.driver_wrong for f in self.functions)

    @property
    def group_shared(self) -> bool:
        """Its IOMMU group also holds a device that is not the spec's to give away."""
        return self.refusal is not None and self.refusal.reason == "GroupShared"

    @property
    def wrong(self) -> bool:
        return self.driver_wrong or any(f.override_wrong for f in self.functions)

    @property
    def ready(self) -> bool:
        """The GPU is, or after this plan will be, where the spec wants it, and may be used."""
        return self.refusal is None or not (self.driver_wrong or self.refusal.terminal)


def bindings(inputs: Inputs, selection: Selection) -> tuple[SlotBinding, ...]:
    if not isinstance(inputs.obs.pci, Known):
        return ()
    result = [
        _slot_binding(name, address, inputs, selection, inputs.obs.pci.value)
        for name, members in selection.groups.items()
        for address in members
    ]
    return with_group_mates(tuple(sorted(result, key=lambda s: s.slot)), inputs.obs.pci.value)


def with_group_mates(slots: tuple[SlotBinding, ...], pci: Pci) -> tuple[SlotBinding, ...]:
    """Cards of one IOMMU group move together or not at all (law 3)."""
    while True:
        stuck = [s for s in slots if s.driver_wrong and s.refusal is not None]
        waiting = {
            s.gpu: mate
            for s in slots
            for mate in stuck
            if s.driver_wrong and s.refusal is None and _groups(s, pci) & _groups(mate, pci)
        }
        if not waiting:
            return slots
        slots = tuple(_waits_for(s, waiting[s.gpu]) if s.gpu in waiting else s for s in slots)


def _groups(slot: SlotBinding, pci: Pci) -> set[int]:
    found = [group_of(pci.functions[f.address], pci) for f in slot.functions]
    return {g.number for g in found if g is not None}


def _waits_for(slot: SlotBinding, mate: SlotBinding) -> SlotBinding:
    message = f"{slot.gpu} shares its IOMMU group with {mate.gpu}, which cannot change its driver now"
    step = f"see {mate.gpu}: {mate.refusal.message}" if mate.refusal else ""
    return stand_still(slot, Refusal("driver-binding", slot.gpu, "GroupWaits", message, step))


def stand_still(slot: SlotBinding, refusal: Refusal) -> SlotBinding:
    return replace(slot, refusal=refusal, persistence=False, quiesce=(), services=())


def _slot_binding(name: str, gpu: str, inputs: Inputs, selection: Selection, pci: Pci) -> SlotBinding:
    driver = inputs.spec.gpus[name].driver
    slot = gpu.rpartition(".")[0]
    members = [f for a, f in sorted(pci.functions.items()) if f.slot_address == slot and not f.is_bridge]
    functions = tuple(_function_binding(f, gpu, driver) for f in members)
    plain = SlotBinding(slot, name, gpu, driver, functions)
    changing = [f for f in functions if f.driver_wrong]
    forbidden = _forbidden if changing else _not_viable
    refusal = (
        out_of_reach(gpu, (f.address for f in functions), inputs)
        or _unreadable(plain)
        or forbidden(plain, inputs, selection, pci)
    )
    if refusal is not None or not changing:
        return SlotBinding(slot, name, gpu, driver, functions, refusal)
    return _with_holders(plain, inputs)


def _function_binding(function: PciFunction, gpu: str, driver: str) -> FunctionBinding:
    desired: str | None = driver
    if driver != "vfio-pci" and function.address != gpu:
        # Beside a GPU on nvidia, any host driver or none will do; only vfio-pci would split the slot.
        native = HOST_DRIVERS.get(function.class_code >> 8)
        desired = native if function.driver == Known("vfio-pci") else None
    return FunctionBinding(function.address, function.driver, desired, function.driver_override)


def _unreadable(slot: SlotBinding) -> Refusal | None:
    for function in slot.functions:
        if isinstance(function.observed, Unknown):
            message = f"the driver of {function.address} cannot be read: {function.observed.reason}"
            return Refusal("driver-binding", slot.gpu, "DriverUnknown", message, "wait for the next pass")
        if isinstance(function.override, Unknown):
            message = f"driver_override of {function.address} cannot be read: {function.override.reason}"
            return Refusal("driver-binding", slot.gpu, "OverrideUnknown", message, "wait for the next pass")
    return None


def _forbidden(slot: SlotBinding, inputs: Inputs, selection: Selection, pci: Pci) -> Refusal | None:
    """What stands against touching this slot at all, holders aside."""
    for binding in slot.functions:
        function = pci.functions[binding.address]
        if binding.driver_wrong and (refusal := immovable(slot.gpu, function)) is not None:
            return refusal
    if slot.driver == "vfio-pci":
        return _not_viable(slot, inputs, selection, pci)
    refusals = (_group_refusal(slot, f, inputs, selection, pci) for f in slot.functions if f.driver_wrong)
    return next((r for r in refusals if r is not None), None)


def _not_viable(slot: SlotBinding, inputs: Inputs, selection: Selection, pci: Pci) -> Refusal | None:
    """Why a VM could not open this slot's groups, whether it is on vfio-pci already or not."""
    if slot.driver != "vfio-pci":
        return None
    refusals = (_group_refusal(slot, f, inputs, selection, pci) for f in slot.functions)
    return next((r for r in refusals if r is not None), None)


def group_of(function: PciFunction, pci: Pci) -> IommuGroup | None:
    return pci.groups.get(function.iommu_group.value) if isinstance(function.iommu_group, Known) else None


def _group_refusal(
    slot: SlotBinding, binding: FunctionBinding, inputs: Inputs, selection: Selection, pci: Pci
) -> Refusal | None:
    """An IOMMU group is on vfio-pci whole or not at all: what the spec does not move along forbids the move."""
    function, to_vfio = pci.functions[binding.address], slot.driver == "vfio-pci"
    group = group_of(function, pci)
    if isinstance(function.iommu_group, Unknown):
        message = f"the IOMMU group of {function.address} cannot be read: {function.iommu_group.reason}"
        return Refusal("driver-binding", slot.gpu, "IommuGroupUnknown", message, "wait for the next pass")
    if group is None and to_vfio:
        message = (
            f"{binding.address} has no IOMMU group ({say(function.iommu_group)}): vfio-pci needs the IOMMU on"
        )
        step = "remove amd_iommu=off or iommu=off from the kernel command line and reboot"
        return Refusal("driver-binding", slot.gpu, "NoIommuGroup", message, step)
    if not to_vfio and isinstance(binding.observed, Known) and binding.observed != Known("vfio-pci"):
        return None  # from one host driver to another: the group is none the worse for it
    for member in group.members if group is not None else ():
        other = pci.functions.get(member)
        if other is None or other.is_bridge or other.slot_address == slot.slot:
            continue
        owner = selection.group_of(f"{other.slot_address}.0")
        at_vfio = inputs.spec.gpus[owner].driver == "vfio-pci" if owner else other.driver == Known("vfio-pci")
        unread = not owner and isinstance(other.driver, Unknown)
        if at_vfio == to_vfio and not unread:
            continue
        if unread:
            message = (
                f"the driver of {member}, in the IOMMU group of {binding.address}, is {say(other.driver)}"
            )
            return Refusal("driver-binding", slot.gpu, "IommuGroupUnknown", message, "wait for the next pass")
        stays = "the spec does not give to vfio-pci" if to_vfio else "stays with vfio-pci"
        message = f"IOMMU group {group.number if group else ''} of {binding.address} also holds {member} (driver {say(other.driver)}), which {stays}"
        step = "give the whole group to one driver, or put the card in a slot with a group of its own"
        return Refusal("driver-binding", slot.gpu, "GroupShared", message, step)
    return None


def _with_holders(slot: SlotBinding, inputs: Inputs) -> SlotBinding:
    """Law 1: sort every holder into what this plan lets go of, or refuse. Unknown means held."""
    persistence, quiesce, services = False, set[str](), set[str]()
    own = {(s.unit, target_name(s.target)): n for n, s in inputs.spec.services.items()}
    own |= {(f.at[1], f.at[0]): n for n, f in inputs.obs.services.items() if f.at is not None}
    for function in slot.functions:
        if not function.driver_wrong or (
            isinstance(function.observed, Absent) and not _held_known(function, inputs)
        ):
            continue
        holders = inputs.obs.holders_of(function.address)
        if not isinstance(holders, Known):
            return _refuse_holders(slot, "HoldersUnknown", f"who holds {function.address} is {say(holders)}")
        for holder in holders.value:
            if holder.kind == "persistence":
                persistence = True
            elif holder.unit in inputs.spec.policy.quiesce and not holder.container:
                quiesce.add(holder.unit)
            elif (service := own.get((holder.unit, holder_target(holder)))) is not None:
                services.add(service)
            else:
                return _refuse_holders(slot, "Held", f"{function.address}: {holder.describe()}")
        if function.observed == Known("nvidia"):
            state = _persistence(function.address, inputs)
            if isinstance(state, Unknown):
                return _refuse_holders(
                    slot,
                    "HoldersUnknown",
                    f"persistence mode of {function.address} is unknown: {state.reason}",
                )
            persistence = persistence or state == Known(value=True)
    return SlotBinding(
        slot.slot, slot.group, slot.gpu, slot.driver, slot.functions, None,
        persistence, tuple(sorted(quiesce)), tuple(sorted(services)),
    )  # fmt: skip


def _held_known(function: FunctionBinding, inputs: Inputs) -> bool:
    """A device without a driver may be in the middle of an unbind that waits for its holder."""
    return function.address in inputs.obs.holders and inputs.obs.holders_of(function.address) != Known(())


def holder_target(holder: Holder) -> str:
    return f"lxc:{holder.container}" if holder.container else "host"


def belongs_to(holder: Holder, service: Service) -> bool:
    """Units of one name may run in several containers: name and place together tell whose process it is."""
    return (holder.unit, holder_target(holder)) == (service.unit, target_name(service.target))


def _persistence(address: str, inputs: Inputs) -> Fact[bool]:
    if not isinstance(inputs.obs.nvml, Known):
        reason = inputs.obs.nvml.reason or "NVML was not read"
        return Unknown(reason)
    gpu = inputs.obs.nvml.value.gpus.get(address, Unknown("NVML does not list this GPU"))
    if isinstance(gpu, Known):
        return gpu.value.persistence_mode
    return Unknown(gpu.reason)


def _refuse_holders(slot: SlotBinding, reason: str, message: str) -> SlotBinding:
    step = "stop what holds the GPU, or declare its unit under policy.quiesce if the agent may stop it"
    if reason == "HoldersUnknown":
        step = f"wait for the next pass; if it stays unknown, look with: nvidia-smi -q -i {slot.gpu} and fuser -v /dev/nvidia*"
    refusal = Refusal("driver-binding", slot.gpu, reason, message, step)
    return SlotBinding(slot.slot, slot.group, slot.gpu, slot.driver, slot.functions, refusal)

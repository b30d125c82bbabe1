"""Driver binding, decided: which driver each function of a selected slot must have, and what forbids it.

Shared by the kinds: driver binding acts on it, P2P and services wait for it.
"""

from dataclasses import dataclass

from agent.core.fact import Absent, Fact, Known, Unknown, say
from agent.core.inputs import Inputs
from agent.core.observation import Holder, IommuGroup, Pci, PciFunction
from agent.core.plan import Refusal
from agent.core.selection import Selection
from agent.core.spec import target_name

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
        wanted = self.desired if self.desired == "vfio-pci" else None
        return self.override != (Known(wanted) if wanted else Absent())


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
    def ready(self) -> bool:
        """The GPU is, or after this plan will be, where the spec wants it."""
        return self.refusal is None


def bindings(inputs: Inputs, selection: Selection) -> tuple[SlotBinding, ...]:
    if not isinstance(inputs.obs.pci, Known):
        return ()
    result = [
        _slot_binding(name, address, inputs, selection, inputs.obs.pci.value)
        for name, members in selection.groups.items()
        for address in members
    ]
    return tuple(sorted(result, key=lambda s: s.slot))


def _slot_binding(name: str, gpu: str, inputs: Inputs, selection: Selection, pci: Pci) -> SlotBinding:
    driver = inputs.spec.gpus[name].driver
    slot = gpu.rpartition(".")[0]
    members = [f for a, f in sorted(pci.functions.items()) if f.slot_address == slot and not f.is_bridge]
    functions = tuple(_function_binding(f, gpu, driver) for f in members)
    plain = SlotBinding(slot, name, gpu, driver, functions)
    changing = [f for f in functions if f.driver_wrong]
    forbidden = _forbidden if changing else _not_viable
    refusal = _unreadable(plain) or forbidden(plain, inputs, selection, pci)
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
    return None


def _forbidden(slot: SlotBinding, inputs: Inputs, selection: Selection, pci: Pci) -> Refusal | None:
    """What stands against touching this slot at all, holders aside."""
    for function in slot.functions:
        if function.address in pci.pending_unbinds:
            return reboot_required(slot.gpu, f"an unbind of {function.address} has not returned")
        quarantine = inputs.memory.quarantine.get(function.address)
        if quarantine is not None and Known(quarantine.boot_id) == inputs.obs.platform.boot_id:
            return reboot_required(slot.gpu, quarantine.message, quarantine.reason)
    return _not_viable(slot, inputs, selection, pci)


def _not_viable(slot: SlotBinding, inputs: Inputs, selection: Selection, pci: Pci) -> Refusal | None:
    """Why a VM could not open this slot's groups, whether it is on vfio-pci already or not."""
    if slot.driver != "vfio-pci":
        return None
    refusals = (_group_refusal(slot, f, inputs, selection, pci) for f in slot.functions)
    return next((r for r in refusals if r is not None), None)


def reboot_required(gpu: str, message: str, reason: str = "RebootRequired") -> Refusal:
    return Refusal(
        "driver-binding", gpu, reason, message,
        "reboot the host when it suits you; until then this GPU is left alone", terminal=True,
    )  # fmt: skip


def group_of(function: PciFunction, pci: Pci) -> IommuGroup | None:
    return pci.groups.get(function.iommu_group.value) if isinstance(function.iommu_group, Known) else None


def _group_refusal(
    slot: SlotBinding, binding: FunctionBinding, inputs: Inputs, selection: Selection, pci: Pci
) -> Refusal | None:
    """vfio-pci takes whole IOMMU groups: every endpoint in it must go there too."""
    function = pci.functions[binding.address]
    group = group_of(function, pci)
    if group is None:
        message = (
            f"{binding.address} has no IOMMU group ({say(function.iommu_group)}): vfio-pci needs the IOMMU on"
        )
        step = "remove amd_iommu=off or iommu=off from the kernel command line and reboot"
        return Refusal("driver-binding", slot.gpu, "NoIommuGroup", message, step)
    for member in group.members:
        other = pci.functions.get(member)
        if (
            other is None
            or other.is_bridge
            or other.slot_address == slot.slot
            or other.driver == Known("vfio-pci")
        ):
            continue
        owner = selection.group_of(f"{other.slot_address}.0")
        if owner and inputs.spec.gpus[owner].driver == "vfio-pci":
            continue
        message = (
            f"IOMMU group {group.number} of {binding.address} also holds {member}"
            f" (driver {say(other.driver)}), which the spec does not give to vfio-pci"
        )
        step = "give the whole group to vfio-pci, or put the card in a slot with a group of its own"
        return Refusal("driver-binding", slot.gpu, "GroupShared", message, step)
    return None


def _with_holders(slot: SlotBinding, inputs: Inputs) -> SlotBinding:
    """Law 1: sort every holder into what this plan lets go of, or refuse. Unknown means held."""
    persistence, quiesce, services = False, set[str](), set[str]()
    own = {(s.unit, target_name(s.target)): n for n, s in inputs.spec.services.items()}
    for function in slot.functions:
        if (
            not function.driver_wrong
            or (isinstance(function.observed, Absent)
            and not _held_known(function, inputs))
        ):
            continue
        holders = inputs.obs.holders_of(function.address)
        if isinstance(holders, Unknown):
            return _refuse_holders(
                slot, "HoldersUnknown", f"who holds {function.address} is unknown: {holders.reason}"
            )
        for holder in holders.value if isinstance(holders, Known) else ():
            if holder.kind == "persistence":
                persistence = True
            elif holder.unit in inputs.spec.policy.quiesce and not holder.container:
                quiesce.add(holder.unit)
            elif (service := own.get((holder.unit, _holder_target(holder)))) is not None:
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


def _holder_target(holder: Holder) -> str:
    return f"lxc:{holder.container}" if holder.container else "host"


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

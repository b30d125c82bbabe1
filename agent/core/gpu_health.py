"""Are the selected GPUs well? By the kernel's own words, by NVML, and by what the memory has given up on."""

from agent.core.binding import SlotBinding
from agent.core.condition import Condition
from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.inputs import Inputs
from agent.core.kernel_log import is_fault, note
from agent.core.observation import Gpu
from agent.core.reach import WAITS, awaited, left_open, pending, quarantined
from agent.core.resolve import Resolved
from agent.core.unbind_state import REBOOT, detail_of, way_out

# Drivers that do not know the field say nothing about health by it.
_NO_RECOVERY_ACTION = {"NvmlFunctionNotFound", "NotObserved"}


def gpu_health(inputs: Inputs, resolved: Resolved) -> Condition:
    """Condition GpusHealthy: False on any known fault, Unknown on any gap, True else."""
    faults = [*_lost(inputs, resolved), *_reported(inputs, resolved)]
    unknown: list[str] = []
    for slot in resolved.slots:
        gpu = _seen_by_nvml(slot.gpu, inputs)
        if isinstance(gpu, Unknown) and gpu.code in {"GpuLost", "GpuResetRequired"}:
            faults.append(
                (
                    f"{slot.gpu}: {gpu.reason}",
                    "reset or replace the GPU, or reboot the host when it suits you",
                )
            )
        elif isinstance(gpu, Unknown):
            unknown.append(f"{slot.gpu}: {gpu.reason}")
        elif isinstance(gpu, Known):
            action = gpu.value.recovery_action
            if isinstance(action, Known) and action.value != "none":
                step = f"do what the GPU asks for when it suits you: {action.value} (nvidia-smi -q shows it)"
                faults.append((f"{slot.gpu}: recovery action pending: {action.value}", step))
            elif isinstance(action, Unknown) and action.code not in _NO_RECOVERY_ACTION:
                unknown.append(f"recovery action of {slot.gpu}: {action.reason}")
        elif slot.driver == "nvidia" and not slot.driver_wrong:
            unknown.append(f"NVML does not show {slot.gpu}")
    if faults:
        message = "; ".join(dict.fromkeys(text for text, _ in faults))
        return Condition(
            type="GpusHealthy", status="False", reason="GpuFault", message=message, next_step=faults[0][1]
        )
    if inputs.obs.kernel_unread:
        unknown.append("the kernel log grows faster than it can be read")
    if unknown:
        message = "; ".join(unknown)
        return Condition(type="GpusHealthy", status="Unknown", reason="NotObserved", message=message)
    lost = "; lines of this boot's kernel log were overwritten unread" if inputs.obs.kernel_gaps else ""
    return Condition(type="GpusHealthy", status="True", reason="NoFaults", message=f"no fault is known{lost}")


def _seen_by_nvml(gpu: str, inputs: Inputs) -> Fact[Gpu]:
    if not isinstance(inputs.obs.nvml, Known):
        return Absent()
    return inputs.obs.nvml.value.gpus.get(gpu, Absent())


def _lost(inputs: Inputs, resolved: Resolved) -> list[tuple[str, str]]:
    """Devices out of reach, and what ends that; those that are there and that no group names are nobody's concern."""
    named = {f.address for slot in resolved.slots for f in slot.functions}
    stuck = pending(inputs)
    found = [_pending(a, inputs) for a in stuck if a in named and a not in inputs.memory.quarantine]
    found += [
        (f"nothing tells whether an unbind of {a} returned", REBOOT)
        for a in sorted(inputs.memory.unbinding)
        if a in named and a not in stuck and left_open(a, inputs)
    ]
    for address, entry in sorted(inputs.memory.quarantine.items()):
        strange = inputs.obs.function(address) is not None and address not in named
        if strange or quarantined(address, inputs) is None:
            continue
        found.append((f"{address}: {entry.message}", way_out(entry.reason)))
    return found


def _pending(address: str, inputs: Inputs) -> tuple[str, str]:
    who = awaited(address, inputs)
    if not who:
        detail = detail_of(inputs.obs.unbinds.get(address))
        return f"an unbind of {address} has not returned{detail}", REBOOT
    return f"an unbind of {address} waits until it is let go: {who}", WAITS


def _reported(inputs: Inputs, resolved: Resolved) -> list[tuple[str, str]]:
    """Faults that the kernel logged since boot about a selected card or a bridge above it."""
    found = []
    for event in value_or(inputs.obs.kernel_events, ()):
        gpus = [slot.gpu for slot in resolved.slots if event.address in _path(slot, inputs)]
        if gpus and is_fault(event):
            where = gpus[0] if event.address == gpus[0] else f"{event.address} above {', '.join(gpus)}"
            count = f", {event.count} times" if event.count > 1 else ""
            found.append((f"{where}: {note(event).meaning}{count}: {event.sample}", note(event).next_step))
    return found


def _path(slot: SlotBinding, inputs: Inputs) -> set[str]:
    function = inputs.obs.function(slot.gpu)
    return {f.address for f in slot.functions} | set(function.bridges if function else ())

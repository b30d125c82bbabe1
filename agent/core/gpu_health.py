"""Are the selected GPUs well? By the kernel's own words, by NVML, and by what the memory has given up on."""

from dataclasses import fields

from agent.core import wedged
from agent.core.binding import SlotBinding
from agent.core.condition import Condition
from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.gpu_facts import SLOWED
from agent.core.inputs import Inputs
from agent.core.kernel_log import is_fault, note
from agent.core.observation import NOT_READ, Gpu
from agent.core.reach import WAITS, awaited, left_open, pending, quarantined
from agent.core.resolve import Resolved
from agent.core.unbind_state import REBOOT, detail_of, way_out

# Drivers that do not know the field say nothing about health by it.
_NO_RECOVERY_ACTION = {"NvmlFunctionNotFound", "NotObserved"}
_LOST = {"GpuLost", "GpuResetRequired"}
_RESET_OR_REPLACE = "reset or replace the GPU, or reboot the host when it suits you"


def gpu_health(inputs: Inputs, resolved: Resolved) -> Condition:
    """Condition GpusHealthy: False on any known fault, Unknown on any gap, True else."""
    faults = [*_lost(inputs, resolved), *_reported(inputs, resolved)]
    idle = _wedged(inputs, resolved)
    unknown: list[str] = []
    for slot in resolved.slots:
        gpu = _seen_by_nvml(slot.gpu, inputs)
        if isinstance(gpu, Known):
            faults += _told_by_nvml(gpu.value)
            action = gpu.value.recovery_action
            if isinstance(action, Unknown) and action.code not in {*_NO_RECOVERY_ACTION, *_LOST}:
                unknown.append(f"recovery action of {slot.gpu}: {action.reason}")
        elif isinstance(gpu, Unknown) and gpu.code in _LOST:
            faults.append((f"{slot.gpu}: {gpu.reason}", _RESET_OR_REPLACE))
        elif isinstance(gpu, Unknown):
            unknown.append(f"{slot.gpu}: {gpu.reason}")
        elif slot.driver == "nvidia" and not slot.driver_wrong:
            unknown.append(f"NVML does not show {slot.gpu}")
    if faults or idle:
        every, reason = [*faults, *idle], "GpuFault" if faults else "GpuWedged"
        message = "; ".join(dict.fromkeys(text for text, _ in every))
        return Condition(
            type="GpusHealthy", status="False", reason=reason, message=message, next_step=every[0][1]
        )
    if inputs.obs.kernel_unread:
        unknown.append("the kernel log grows faster than it can be read")
    if unknown:
        message = "; ".join(unknown)
        return Condition(type="GpusHealthy", status="Unknown", reason="NotObserved", message=message)
    lost = "; lines of this boot's kernel log were overwritten unread" if inputs.obs.kernel_gaps else ""
    return Condition(type="GpusHealthy", status="True", reason="NoFaults", message=f"no fault is known{lost}")


def _told_by_nvml(gpu: Gpu) -> list[tuple[str, str]]:
    """Faults that need a hand. What a card does in normal work, as a software power cap, is none."""
    facts = (getattr(gpu, field.name) for field in fields(gpu))
    lost = [fact.reason for fact in facts if isinstance(fact, Unknown) and fact.code in _LOST]
    found = [(reason, _RESET_OR_REPLACE) for reason in dict.fromkeys(lost)]
    action = value_or(gpu.recovery_action, "none")
    if action != "none":
        step = f"do what the GPU asks for when it suits you: {action} (nvidia-smi -q shows it)"
        found.append((f"recovery action pending: {action}", step))
    rows = value_or(gpu.remapped_rows, None)
    if rows is not None and rows.failed:
        found.append(("no spare row of memory is left for a bad one", "replace the GPU"))
    elif rows is not None and rows.pending:
        found.append(("a bad row of memory is in use until a reset", "reset the GPU when it suits you"))
    slowed = [reason for reason in value_or(gpu.clock_reasons, ()) if reason in SLOWED]
    found += [(f"the card slows itself down: {reason}", SLOWED[reason]) for reason in slowed]
    return [(f"{gpu.address}: {text}", step) for text, step in found]


def _wedged(inputs: Inputs, resolved: Resolved) -> list[tuple[str, str]]:
    found = []
    for gpu in (slot.gpu for slot in resolved.slots):
        if wedged.is_wedged(gpu, inputs.memory.busy_alone, inputs.now):
            function = inputs.obs.function(gpu)
            minutes = int((inputs.now - inputs.memory.busy_alone[gpu]) // 60)
            text = f"{gpu}: 100 % busy for {minutes} min with nothing on it; no service can be started there"
            found.append((text, wedged.way_out(function.reset_methods if function else NOT_READ)))
    return found


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

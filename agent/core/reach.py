"""Devices out of reach: an unbind of them has not returned, or they are lost (law 2)."""

from collections.abc import Iterable

from agent.core.fact import Known, value_or
from agent.core.inputs import Inputs
from agent.core.memory import Quarantine
from agent.core.observation import Holder
from agent.core.plan import Refusal
from agent.core.unbind_state import detail_of, way_out

WAITS = "stop what holds it, such as the virtual machine; the unbind then returns"


def quarantined(address: str, inputs: Inputs) -> Quarantine | None:
    """A quarantine holds for the boot that it was made in; an unknown boot may be that one."""
    entry = inputs.memory.quarantine.get(address)
    return entry if entry is not None and _may_be_now(entry.boot_id, inputs) else None


def left_open(address: str, inputs: Inputs) -> bool:
    """An unbind of it may have been written in this boot, and nothing proves that it has returned (law 2)."""
    entry = inputs.memory.unbinding.get(address)
    return entry is not None and _may_be_now(entry.boot_id, inputs)


def _may_be_now(boot_id: str, inputs: Inputs) -> bool:
    boot = inputs.obs.platform.boot_id
    return not isinstance(boot, Known) or boot_id in {"", boot.value}


def pending(inputs: Inputs) -> tuple[str, ...]:
    """Addresses of devices whose unbind has not returned, whoever wrote it."""
    return inputs.obs.pci.value.pending_unbinds if isinstance(inputs.obs.pci, Known) else ()


def is_out_of_reach(address: str, inputs: Inputs) -> bool:
    return (
        address in pending(inputs) or quarantined(address, inputs) is not None or left_open(address, inputs)
    )


def awaited(address: str, inputs: Inputs) -> str:
    """Who holds a device whose unbind, by the kernel's word, waits for its VFIO user; "" where that is not the case.

    The kernel does not name the user, so it is whoever is seen to hold the device now.
    """
    events = value_or(inputs.obs.kernel_events, ())
    if not any(e.sort == "vfio-blocked" and e.address == address for e in events):
        return ""
    holders: tuple[Holder, ...] = value_or(inputs.obs.holders_of(address), ())
    return " and ".join(dict.fromkeys(h.describe() for h in holders))


def out_of_reach(gpu: str, addresses: Iterable[str], inputs: Inputs) -> Refusal | None:
    """Why nothing may be written to a card's functions any more, whatever the spec says (law 2)."""
    for address in addresses:
        if (entry := quarantined(address, inputs)) is not None:
            return _left_alone(gpu, entry.message, entry.reason)
        if address in pending(inputs):
            return _waits(gpu, address, inputs)
        if left_open(address, inputs):
            return _left_alone(gpu, f"nothing tells whether an unbind of {address} returned")
    return None


def _waits(gpu: str, address: str, inputs: Inputs) -> Refusal:
    who = awaited(address, inputs)
    if who:
        message = f"an unbind of {address} waits until it is let go: {who}"
        return Refusal("driver-binding", gpu, "Held", message, WAITS, terminal=True)
    return _left_alone(
        gpu, f"an unbind of {address} has not returned{detail_of(inputs.obs.unbinds.get(address))}"
    )


def _left_alone(gpu: str, message: str, reason: str = "RebootRequired") -> Refusal:
    step = f"{way_out(reason)}; until then this GPU is left alone"
    return Refusal("driver-binding", gpu, reason, message, step, terminal=True)

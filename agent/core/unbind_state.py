"""The words in which the state of an unbind is told (``PciPort.unbind_state``)."""

from agent.core.fact import Fact, Known

# The kernel's way down asks every device to shut down, under the lock that a pending unbind has.
REBOOT = (
    "reboot the host when it suits you: sync, then SysRq-b (echo b > /proc/sysrq-trigger) or the BMC's power reset;"
    " systemctl reboot and even reboot -ff may wait for this device for ever"
)
POWER_CYCLE = (
    "power-cycle the host when it suits you; if it comes back, check power and slot, or replace the GPU"
)


def way_out(reason: str) -> str:
    """What ends a quarantine for this reason."""
    return REBOOT if reason == "RebootRequired" else POWER_CYCLE


def is_running(state: str) -> bool:
    """``running`` may be followed by what is known of the task: "running: state D in nv_pci_remove"."""
    return state.partition(":")[0] == "running"


def waits_for_user(state: str) -> bool:
    """It sleeps until whoever has the VFIO device open closes it, and then returns (vfio_main.c)."""
    return is_running(state) and state.endswith("in vfio_unregister_group_dev")


def blocked_in(state: str) -> str:
    """What is known of the task that the unbind keeps waiting, in brackets after a blank; "" where nothing is."""
    detail = state.partition(":")[2].strip() if is_running(state) else ""
    return f" ({detail})" if detail else ""


def detail_of(state: Fact[str] | None) -> str:
    """``blocked_in`` of an observed state."""
    return blocked_in(state.value) if isinstance(state, Known) else ""

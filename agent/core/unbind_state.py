"""The words in which the state of an unbind is told (``PciPort.unbind_state``)."""

from agent.core.fact import Fact, Known


def is_running(state: str) -> bool:
    """``running`` may be followed by what is known of the task: "running: state D in nv_pci_remove"."""
    return state.partition(":")[0] == "running"


def blocked_in(state: str) -> str:
    """What is known of the task that the unbind keeps waiting, in brackets after a blank; "" where nothing is."""
    detail = state.partition(":")[2].strip() if is_running(state) else ""
    return f" ({detail})" if detail else ""


def detail_of(state: Fact[str] | None) -> str:
    """``blocked_in`` of an observed state."""
    return blocked_in(state.value) if isinstance(state, Known) else ""

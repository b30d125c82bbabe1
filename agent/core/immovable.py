"""What keeps a function on its driver whoever holds it: it is the console, or virtual functions depend on it."""

from agent.core.fact import Absent, Known, Unknown, say
from agent.core.observation import PciFunction
from agent.core.plan import Refusal


def immovable(gpu: str, function: PciFunction) -> Refusal | None:
    """Why the driver of this function of ``gpu``'s card must not change."""
    return _console(gpu, function) or _virtual_functions(gpu, function)


def may_be_console(function: PciFunction) -> bool:
    """Only a VGA controller has the attribute: a 3D controller, which most GPUs of servers are, is no console."""
    return not isinstance(function.boot_vga, Absent) and function.boot_vga != Known(value=False)


def _console(gpu: str, function: PciFunction) -> Refusal | None:
    if isinstance(function.driver, Absent) or not may_be_console(function):
        return None
    if isinstance(function.boot_vga, Known):
        message = f"{function.address} is the console that the firmware set up"
        return Refusal(
            "driver-binding", gpu, "Held", message, "make another card the primary one in the firmware"
        )
    message = f"whether {function.address} is the console is {say(function.boot_vga)}"
    return Refusal("driver-binding", gpu, "HoldersUnknown", message, "wait for the next pass")


def _virtual_functions(gpu: str, function: PciFunction) -> Refusal | None:
    """A driver that lets go of its function ends the virtual ones, whether guests, containers or nobody uses them."""
    fact = function.virtual_functions
    if isinstance(fact, Unknown) and fact.code != "NotObserved":
        message = f"whether {function.address} has virtual functions is {say(fact)}"
        return Refusal("driver-binding", gpu, "HoldersUnknown", message, "wait for the next pass")
    if not isinstance(fact, Known) or fact.value == 0:
        return None
    count = f"{fact.value} virtual function{'s' if fact.value > 1 else ''}"
    message = f"{function.address} has {count}: unbinding it removes them from their users"
    step = f"when nobody uses them, set sriov_numvfs to 0: echo 0 > /sys/bus/pci/devices/{function.address}/sriov_numvfs"
    return Refusal("driver-binding", gpu, "VirtualFunctions", message, step)

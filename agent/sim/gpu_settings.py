"""What a write through NVML makes of a simulated GPU's settings."""

from typing import Any

from agent.core.quantity import parse_clocks
from agent.sim.nvml_codes import error_of
from agent.sim.state import GpuState

_COMPUTE_MODES = ("default", "exclusiveProcess", "prohibited")
_SWITCH = {"on": True, "off": False}


def changed(gpu: GpuState, setting: str, value: str, *, busy: bool) -> dict[str, Any]:
    """Fields and their values afterwards. Raises OSError for what NVML would refuse."""
    try:
        match setting:
            case "persistence-mode":
                return {"persistence_mode": _SWITCH[value]}
            case "power-limit":
                return {"power_limit": _within(gpu.power_range, int(value))}
            case "locked-graphics-clocks" | "locked-memory-clocks":
                return {setting.replace("-", "_"): parse_clocks(value)}
            case "ecc":
                return {"ecc_pending": _SWITCH[value]}
            case "compute-mode" if value in _COMPUTE_MODES:
                return {"compute_mode": value}
            case "mig":
                pending = {"mig_pending": _SWITCH[value]}
                return pending if busy else {**pending, "mig": _SWITCH[value]}
    except (KeyError, ValueError) as error:
        raise error_of(2, f"{setting} {value}") from error
    raise error_of(2, f"{setting} {value}")


def _within(allowed: tuple[int, int], watts: int) -> int:
    low, high = allowed
    if not low <= watts <= high:
        raise error_of(2, f"{watts} W is outside {low} to {high} W")
    return watts

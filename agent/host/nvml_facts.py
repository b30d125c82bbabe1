"""What NVML answered, as facts: codes become outcomes, numbers become words, units become the observation's."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.gpu_facts import P2PCapability, RemappedRows
from agent.core.locked_clocks import in_force
from agent.core.observation import NOT_READ, Gpu
from agent.host.clock_locks import ClockLocks
from agent.host.nvml_settings import CLOCKS, COMPUTE_MODES
from agent.host.nvml_wire import Cell, Fault, GpuAnswer, LastingAnswer

T = TypeVar("T")
U = TypeVar("U")

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
VERSION_MISMATCH = 18
# nvmlReturn_t -> the condition's reason. Not supported is no fault: the fact is Absent.
CODES: Mapping[int, str] = {
    4: "NvmlNoPermission",
    9: "NvmlDriverNotLoaded",
    10: "NvmlTimeout",
    12: "NvmlLibraryNotFound",
    FUNCTION_NOT_FOUND: "NvmlFunctionNotFound",
    15: "GpuLost",
    16: "GpuResetRequired",
    VERSION_MISMATCH: "NvmlVersionMismatch",
    999: "NvmlUnknownError",
}
# nvmlDeviceGpuRecoveryAction_t
_RECOVERY_ACTIONS = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain",
    4: "drain and reset",
    5: "recover IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
# nvmlClocksEventReasons
_CLOCK_REASONS = {
    0x1: "idle",
    0x2: "set by application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability",
}
# nvmlGpuP2PStatus_t
_P2P_UNKNOWN = 6
_P2P_STATUS = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
}
_CC_ENVIRONMENTS = {0: "", 1: "simulation", 2: "production"}


def fault_fact(fault: Fault) -> Unknown:
    """An NVML code as Unknown, with a reason of its own for each code that needs its own branch."""
    return Unknown(f"NVML: {fault.text} (code {fault.code})", CODES.get(fault.code, f"NvmlError{fault.code}"))


def _same(value: T) -> T:
    return value


def fact(cell: Cell[T], convert: Callable[[T], U] = _same) -> Fact[U]:  # type: ignore[assignment]  # T is U there
    if cell.fault is not None:
        if cell.fault.code == NOT_SUPPORTED:
            return Absent("not supported by this GPU")
        return fault_fact(cell.fault)
    if cell.value is None:
        return Unknown("the NVML child left this out", "NvmlChildFailed")
    return Known(convert(cell.value))


def field_fact(cell: Cell[T], convert: Callable[[T], U] = _same) -> Fact[U]:  # type: ignore[assignment]  # as above
    """A field value. A driver too old for the field calls its number an invalid argument."""
    if cell.fault is not None and cell.fault.code == INVALID_ARGUMENT:
        return Unknown("this driver does not know the field (NVML code 2)", CODES[FUNCTION_NOT_FOUND])
    return fact(cell, convert)


def confidential_compute(cell: Cell[tuple[int, int, int]]) -> Fact[str]:
    return fact(cell, _confidential_compute)


def gpu_facts(gpu: GpuAnswer, lasting: LastingAnswer | None, locks: ClockLocks) -> Gpu:
    persistence: Fact[bool] = fact(gpu.persistence_mode)
    graphics: Fact[int] = fact(gpu.graphics_clock)
    memory: Fact[int] = fact(gpu.memory_clock)
    locked_graphics, locked_memory = (locks.noted(gpu.address, setting) for setting in CLOCKS)
    return Gpu(
        address=gpu.address,
        index=gpu.index,
        minor=fact(gpu.minor),
        uuid=fact(gpu.uuid),
        name=fact(gpu.name),
        serial=fact(gpu.serial),
        persistence_mode=persistence,
        power_limit=fact(gpu.power_limit, _watts),
        power_limit_range=fact(gpu.power_limit_range, lambda pair: (_watts(pair[0]), _watts(pair[1]))),
        locked_graphics_clocks=in_force(locked_graphics, persistence, graphics),
        locked_memory_clocks=in_force(locked_memory, persistence, memory),
        graphics_clock=graphics,
        memory_clock=memory,
        ecc_mode=fact(gpu.ecc, lambda pair: pair[0]),
        ecc_pending=fact(gpu.ecc, lambda pair: pair[1]),
        mig_mode=fact(gpu.mig, lambda pair: pair[0]),
        mig_pending=fact(gpu.mig, lambda pair: pair[1]),
        compute_mode=fact(gpu.compute_mode, lambda n: COMPUTE_MODES.get(n, f"mode {n}")),
        memory_total=fact(gpu.memory_total, _mebibytes),
        memory_used=fact(gpu.memory_used, _mebibytes),
        utilization=fact(gpu.utilization),
        pids=fact(gpu.pids),
        graphics_pids=fact(gpu.graphics_pids),
        clock_reasons=fact(gpu.clock_reasons, _clock_reasons),
        recovery_action=field_fact(gpu.recovery_action, lambda n: _RECOVERY_ACTIONS.get(n, f"action {n}")),
        replays=field_fact(gpu.replays),
        remapped_rows=field_fact(gpu.remapped_rows, _remapped_rows),
        link_gen=fact(gpu.link_gen),
        max_link_gen=fact(gpu.max_link_gen),
        link_width=fact(gpu.link_width),
        max_link_width=fact(lasting.max_link_width) if lasting else NOT_READ,
        vbios=fact(lasting.vbios) if lasting else NOT_READ,
        bar1_total=fact(lasting.bar1_total, _mebibytes) if lasting else NOT_READ,
        p2p=Known(_p2p(lasting)) if lasting else NOT_READ,
    )


def _p2p(lasting: LastingAnswer) -> dict[str, P2PCapability]:
    return {
        peer: P2PCapability(_p2p_status(way.read), _p2p_status(way.write), _p2p_status(way.atomics))
        for peer, way in sorted(lasting.p2p.items())
    }


def _p2p_status(cell: Cell[int]) -> Fact[str]:
    if cell.value == _P2P_UNKNOWN:
        return Unknown("NVML does not know the P2P status (status 6)", "P2PStatusUnknown")
    return fact(cell, lambda n: _P2P_STATUS.get(n, f"status {n}"))


def _clock_reasons(mask: int) -> tuple[str, ...]:
    bits = (1 << place for place in range(mask.bit_length()) if mask >> place & 1)
    return tuple(_CLOCK_REASONS.get(bit, f"reason {bit:#x}") for bit in bits)


def _remapped_rows(rows: tuple[int, int, int, int]) -> RemappedRows:
    return RemappedRows(rows[0], rows[1], bool(rows[2]), bool(rows[3]))


def _confidential_compute(state: tuple[int, int, int]) -> str:
    feature, environment, tools = state
    if not feature:
        return "off"
    told = [
        _CC_ENVIRONMENTS.get(environment, f"environment {environment}"),
        "developer tools" if tools else "",
    ]
    words = ", ".join(word for word in told if word)
    return f"on ({words})" if words else "on"


def _watts(milliwatts: int) -> int:
    return round(milliwatts / 1000)


def _mebibytes(size: int) -> int:
    return size >> 20

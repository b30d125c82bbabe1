"""What the NVML child asks about GPUs. Each question is its own: one that fails hides no other.

Answers are plain data (``nvml_wire`` has their types), since this runs inside the child.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pynvml

Json = dict[str, Any]

_FUNCTION_NOT_FOUND = 13
# By number: the binding's own constant for read is a tuple, and older ones lack some fields.
P2P_USES = {"read": 0, "write": 1, "atomics": 3}
RECOVERY_ACTION, REPLAYS = 230, 94
REMAPPED_ROWS = (142, 143, 144, 145)  # correctable, uncorrectable, pending, failure
_FIELDS = (RECOVERY_ACTION, REPLAYS, *REMAPPED_ROWS)
# Forms of one question, the newest first. By version: where the driver lacks the one that an unversioned name stands
# for, that name raises what is no NVMLError. The older clock reasons are to leave the bindings with CUDA 14.
_CLOCK_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_COMPUTE_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)
_GRAPHICS_PROCESSES = (
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
)
# nvmlValueType_t -> the member of the union
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def ask_gpu(handle: Any, address: str, index: int) -> Json:
    return {
        "address": address,
        "index": index,
        "minor": cell(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle))),
        "uuid": cell(lambda: text(pynvml.nvmlDeviceGetUUID(handle))),
        "name": cell(lambda: text(pynvml.nvmlDeviceGetName(handle))),
        "serial": cell(lambda: text(pynvml.nvmlDeviceGetSerial(handle))),
        **_settings(handle),
        **_state(handle),
        **_fields(handle),
    }


def ask_lasting(address: str, handles: Mapping[str, Any]) -> Json:
    """What changes with its driver or its card only, and the way to each of the other GPUs."""
    handle = handles[address]
    return {
        "vbios": cell(lambda: text(pynvml.nvmlDeviceGetVbiosVersion(handle))),
        "bar1_total": cell(lambda: int(pynvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total)),
        "max_link_width": cell(lambda: int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
        "p2p": {peer: _p2p(handle, handles[peer]) for peer in handles if peer != address},
    }


def _p2p(source: Any, destination: Any) -> Json:
    def status(use: int) -> int:
        return int(pynvml.nvmlDeviceGetP2PStatus(source, destination, use))

    return {name: cell(partial(status, number)) for name, number in P2P_USES.items()}


def _settings(handle: Any) -> Json:
    return {
        "persistence_mode": cell(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
        "power_limit": cell(lambda: int(pynvml.nvmlDeviceGetPowerManagementLimit(handle))),
        "power_limit_range": cell(lambda: _pair(pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))),
        "ecc": cell(lambda: _pair(pynvml.nvmlDeviceGetEccMode(handle))),
        "mig": cell(lambda: _pair(pynvml.nvmlDeviceGetMigMode(handle))),
        "compute_mode": cell(lambda: int(pynvml.nvmlDeviceGetComputeMode(handle))),
    }


def _state(handle: Any) -> Json:
    memory = cell(lambda: _memory(handle))
    total, used = ({"value": size} for size in memory["value"]) if "value" in memory else (memory, memory)
    return {
        "graphics_clock": cell(lambda: _clock(handle, pynvml.NVML_CLOCK_GRAPHICS)),
        "memory_clock": cell(lambda: _clock(handle, pynvml.NVML_CLOCK_MEM)),
        "clock_reasons": cell(lambda: int(_newest(_CLOCK_REASONS, handle))),
        "memory_total": total,
        "memory_used": used,
        "utilization": cell(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "pids": cell(lambda: _pids(_newest(_COMPUTE_PROCESSES, handle))),
        "graphics_pids": cell(lambda: _pids(_newest(_GRAPHICS_PROCESSES, handle))),
        "link_gen": cell(lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
        "max_link_gen": cell(lambda: int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
        "link_width": cell(lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
    }


def _newest(forms: Sequence[str], handle: Any) -> Any:
    """The answer to the first of ``forms`` that both this driver and the binding have."""
    for name in forms:
        try:
            if form := getattr(pynvml, name, None):
                return form(handle)
        except pynvml.NVMLError as error:
            if error.value != _FUNCTION_NOT_FOUND:
                raise
    raise pynvml.NVMLError(_FUNCTION_NOT_FOUND)


def _clock(handle: Any, kind: int) -> int:
    return int(pynvml.nvmlDeviceGetClockInfo(handle, kind))


def _memory(handle: Any) -> tuple[int, int]:
    """Total and used bytes."""
    try:
        # This version leaves the driver's own reserve out of "used".
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value != _FUNCTION_NOT_FOUND:
            raise
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _pids(processes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(sorted({int(process.pid) for process in processes}))


def _fields(handle: Any) -> Json:
    """Field values cost one call for all of them."""
    asked = cell(lambda: pynvml.nvmlDeviceGetFieldValues(handle, list(_FIELDS)))
    if "fault" in asked:
        return dict.fromkeys(("recovery_action", "replays", "remapped_rows"), asked)
    values = {int(field.fieldId): field for field in asked["value"]}
    return {
        "recovery_action": cell(lambda: _number(values[RECOVERY_ACTION])),
        "replays": cell(lambda: _number(values[REPLAYS])),
        "remapped_rows": cell(lambda: tuple(_number(values[number]) for number in REMAPPED_ROWS)),
    }


def _number(field: Any) -> int:
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    return int(getattr(field.value, _MEMBERS.get(field.valueType, "ullVal")))


def cell(read: Callable[[], Any]) -> Json:
    try:
        return {"value": read()}
    except pynvml.NVMLError as error:
        return {"fault": fault(error)}


def fault(error: Any) -> Json:
    # By number only: NVMLError cannot be hashed, and comparing it with another exception raises.
    return {"code": int(error.value), "text": str(error)}


def text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])

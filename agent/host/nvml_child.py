"""A short-lived child that opens NVML once: ``python -m agent.host.nvml_child REQUEST NAME`` prints its answer.

A long-lived process would keep the old library mapped after a driver upgrade (error 18 for ever), and its open
session would hold the very devices that are to be unbound. REQUEST is a ``ReadRequest`` or a ``WriteRequest`` in
JSON, and the answer an ``Answer`` or an ``Outcome`` (``nvml_wire``). They are plain dictionaries here and validated
where they arrive: to make the models would take most of the child's time. A GPU that NVML cannot open is reported with
its code and hides no other. NAME is what the process calls itself, for an agent that finds it asleep in the kernel.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

Json = dict[str, Any]

_SETTERS: Mapping[str, Callable[..., None]] = {
    "persistence-mode": pynvml.nvmlDeviceSetPersistenceMode,
    "power-limit": pynvml.nvmlDeviceSetPowerManagementLimit,
}

_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, missing from older bindings
_NOT_FOUND = 6
_FUNCTION_NOT_FOUND = 13


def main(text: str) -> None:
    request = json.loads(text)
    answer = write(**request) if "setting" in request else ask(**request)
    sys.stdout.write(json.dumps(answer) + "\n")


def write(address: str, setting: str, values: Sequence[int]) -> Json:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"fault": _fault(error)}
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        opened = sysfs_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        if opened != address:
            return {"fault": {"code": _NOT_FOUND, "text": f"NVML opened {opened} instead"}}
        _SETTERS[setting](handle, *values)
    except pynvml.NVMLError as error:
        return {"fault": _fault(error)}
    finally:
        _cell(pynvml.nvmlShutdown)
    return {}


def ask(addresses: Sequence[str]) -> Json:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"fault": _fault(error)}
    try:
        gpus, closed = _ask_gpus(addresses)
        return {
            "driver_version": _cell(lambda: _text(pynvml.nvmlSystemGetDriverVersion())),
            "nvml_version": _cell(lambda: _text(pynvml.nvmlSystemGetNVMLVersion())),
            "cuda_version": _cell(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2())),
            "gpus": gpus,
            "closed": closed,
        }
    except pynvml.NVMLError as error:
        return {"fault": _fault(error)}
    finally:
        _cell(pynvml.nvmlShutdown)


def _ask_gpus(addresses: Sequence[str]) -> tuple[list[Json], list[Json]]:
    gpus: dict[str, Json] = {}
    nameless: list[Json] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = sysfs_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        except pynvml.NVMLError as error:
            nameless.append({"address": "", "index": index, "fault": _fault(error)})
        else:
            gpus[address] = _ask_gpu(handle, address, index)
    closed = []
    for address in sorted(set(addresses) - gpus.keys()):
        # Opened by address, so that a GPU which has lost its place in the index is still named.
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            gpus[address] = _ask_gpu(handle, address, int(pynvml.nvmlDeviceGetIndex(handle)))
        except pynvml.NVMLError as error:
            closed.append({"address": address, "index": None, "fault": _fault(error)})
    # Each index that could not be opened is one of the addresses that could not be either.
    return [gpus[a] for a in sorted(gpus)], [*closed, *nameless[len(closed) :]]


def _ask_gpu(handle: Any, address: str, index: int) -> Json:
    memory = _cell(lambda: _memory(handle))
    total, used = ({"value": size} for size in memory["value"]) if "value" in memory else (memory, memory)
    return {
        "address": address,
        "index": index,
        "minor": _cell(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle))),
        "uuid": _cell(lambda: _text(pynvml.nvmlDeviceGetUUID(handle))),
        "name": _cell(lambda: _text(pynvml.nvmlDeviceGetName(handle))),
        "serial": _cell(lambda: _text(pynvml.nvmlDeviceGetSerial(handle))),
        "persistence_mode": _cell(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
        "power_limit": _cell(lambda: int(pynvml.nvmlDeviceGetPowerManagementLimit(handle))),
        "power_limit_range": _cell(
            lambda: _pair(pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))
        ),
        "memory_total": total,
        "memory_used": used,
        "utilization": _cell(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        "pids": _cell(lambda: _pids(handle)),
        "recovery_action": _cell(lambda: _recovery_action(handle)),
        "link_gen": _cell(lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
        "max_link_gen": _cell(lambda: int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
        "link_width": _cell(lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
    }


def sysfs_address(bus_id: str) -> str:
    """``00000000:C1:00.0`` as sysfs writes it: ``0000:c1:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _memory(handle: Any) -> tuple[int, int]:
    """Total and used bytes. The second version leaves the driver's own reserve out of ``used``."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value != _FUNCTION_NOT_FOUND:
            raise
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _pids(handle: Any) -> tuple[int, ...]:
    # By version: where the driver lacks it, the unversioned name raises what is no NVMLError.
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except pynvml.NVMLError as error:
        if error.value != _FUNCTION_NOT_FOUND:
            raise
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    return tuple(sorted({int(process.pid) for process in processes}))


def _recovery_action(handle: Any) -> int:
    (field,) = pynvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])
    if field.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(field.nvmlReturn)
    return int(field.value.uiVal)


def _cell(read: Callable[[], Any]) -> Json:
    try:
        return {"value": read()}
    except pynvml.NVMLError as error:
        return {"fault": _fault(error)}


def _fault(error: Any) -> Json:
    # By number only: NVMLError cannot be hashed, and comparing it with another exception raises.
    return {"code": int(error.value), "text": str(error)}


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _take_name(name: str) -> None:
    """Before NVML is opened, for nothing that hangs later can be told its name."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    _take_name(sys.argv[2])
    main(sys.argv[1])

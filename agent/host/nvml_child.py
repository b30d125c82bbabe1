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

from agent.host.nvml_questions import Json, ask_gpu, ask_lasting, cell, fault, text

_SETTERS: Mapping[str, Callable[..., None]] = {
    "persistence-mode": pynvml.nvmlDeviceSetPersistenceMode,
    "power-limit": pynvml.nvmlDeviceSetPowerManagementLimit,
    "locked-graphics-clocks": pynvml.nvmlDeviceSetGpuLockedClocks,
    "locked-graphics-clocks-reset": pynvml.nvmlDeviceResetGpuLockedClocks,
    "locked-memory-clocks": pynvml.nvmlDeviceSetMemoryLockedClocks,
    "locked-memory-clocks-reset": pynvml.nvmlDeviceResetMemoryLockedClocks,
    "ecc": pynvml.nvmlDeviceSetEccMode,
    "compute-mode": pynvml.nvmlDeviceSetComputeMode,
    "mig": pynvml.nvmlDeviceSetMigMode,
}

_NOT_FOUND = 6


def main(argument: str) -> None:
    request = json.loads(argument)
    answer = write(**request) if "setting" in request else ask(**request)
    sys.stdout.write(json.dumps(answer) + "\n")


def write(address: str, setting: str, values: Sequence[int]) -> Json:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"fault": fault(error)}
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        opened = sysfs_address(text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        if opened != address:
            return {"fault": {"code": _NOT_FOUND, "text": f"NVML opened {opened} instead"}}
        _SETTERS[setting](handle, *values)
    except pynvml.NVMLError as error:
        return {"fault": fault(error)}
    finally:
        cell(pynvml.nvmlShutdown)
    return {}


def ask(addresses: Sequence[str], lasting: bool) -> Json:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"fault": fault(error)}
    try:
        opened, closed = _open(addresses)
        answers = [ask_gpu(handle, address, index) for address, (index, handle) in sorted(opened.items())]
        handles = {address: handle for address, (_, handle) in opened.items()}
        return {
            "driver_version": cell(lambda: text(pynvml.nvmlSystemGetDriverVersion())),
            "nvml_version": cell(lambda: text(pynvml.nvmlSystemGetNVMLVersion())),
            "cuda_version": cell(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2())),
            "confidential_compute": cell(_confidential_compute),
            "gpus": answers,
            "lasting": {a: ask_lasting(a, handles) for a in handles if lasting},
            "closed": closed,
        }
    except pynvml.NVMLError as error:
        return {"fault": fault(error)}
    finally:
        cell(pynvml.nvmlShutdown)


def _confidential_compute() -> tuple[int, int, int]:
    state = pynvml.nvmlSystemGetConfComputeState()
    return int(state.ccFeature), int(state.environment), int(state.devToolsMode)


def _open(addresses: Sequence[str]) -> tuple[dict[str, tuple[int, Any]], list[Json]]:
    """Index and handle of each GPU, and those that could not be opened."""
    gpus: dict[str, tuple[int, Any]] = {}
    nameless: list[Json] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = sysfs_address(text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        except pynvml.NVMLError as error:
            nameless.append({"address": "", "index": index, "fault": fault(error)})
        else:
            gpus[address] = index, handle
    closed = []
    for address in sorted(set(addresses) - gpus.keys()):
        # Opened by address, so that a GPU which has lost its place in the index is still named.
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            gpus[address] = int(pynvml.nvmlDeviceGetIndex(handle)), handle
        except pynvml.NVMLError as error:
            closed.append({"address": address, "index": None, "fault": fault(error)})
    # Each index that could not be opened is one of the addresses that could not be either.
    return gpus, [*closed, *nameless[len(closed) :]]


def sysfs_address(bus_id: str) -> str:
    """``00000000:C1:00.0`` as sysfs writes it: ``0000:c1:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _take_name(name: str) -> None:
    """Before NVML is opened, for nothing that hangs later can be told its name."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    _take_name(sys.argv[2])
    main(sys.argv[1])

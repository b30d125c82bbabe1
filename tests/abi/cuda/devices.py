"""NVIDIA's driver API as the programs of these tests use it. Only for children: the library stays in a process."""

import ctypes
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

KERNEL = (
    b".version 7.0\n.target sm_80\n.visible .entry p2p_copy()\n{ ret; }\n\0"  # the stand-in knows it by name
)
NON_BLOCKING = 1


class DriverError(RuntimeError):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {code}")
        self.code = code


def call(function: str, *arguments: Any) -> Any:
    code, *values = getattr(driver, function)(*arguments)
    if int(code) != 0:
        raise DriverError(function, int(code))
    return values[0] if len(values) == 1 else values


class Devices:
    """Contexts and one stream for each device. Addresses are plain numbers."""

    def __init__(self) -> None:
        call("cuInit", 0)
        self.count = int(call("cuDeviceGetCount"))
        self.contexts = [call("cuDevicePrimaryCtxRetain", device) for device in range(self.count)]
        self.streams = [self._on(device, "cuStreamCreate", NON_BLOCKING) for device in range(self.count)]

    def _on(self, device: int, function: str, *arguments: Any) -> Any:
        call("cuCtxSetCurrent", self.contexts[device])
        return call(function, *arguments)

    def connect(self, a: int, b: int) -> None:
        for one, other in ((a, b), (b, a)):
            self._on(one, "cuCtxEnablePeerAccess", self.contexts[other], 0)

    def allocate(self, device: int, size: int) -> int:
        return int(self._on(device, "cuMemAlloc", size))

    def write(self, device: int, to: int, data: bytes) -> None:
        self._on(device, "cuMemcpyHtoD", to, data, len(data))

    def read(self, device: int, start: int, size: int) -> bytes:
        into = bytearray(size)
        self._on(device, "cuMemcpyDtoH", into, start, size)
        return bytes(into)

    def fill(self, device: int, to: int, value: int, size: int) -> None:
        self._on(device, "cuMemsetD8", to, value, size)

    def start_copy(self, driver_device: int, to: tuple[int, int], origin: tuple[int, int], size: int) -> None:
        """``to`` and ``origin``: device and address. ``driver_device``: whose copy engine works."""
        target, source = self.contexts[to[0]], self.contexts[origin[0]]
        stream = self.streams[driver_device]
        self._on(driver_device, "cuMemcpyPeerAsync", to[1], target, origin[1], source, size, stream)

    def start_kernel(self, device: int, to: int, origin: int, size: int) -> None:
        module = self._on(device, "cuModuleLoadData", KERNEL)
        kernel = call("cuModuleGetFunction", module, b"p2p_copy")
        values = ((to, origin, size // 8), (ctypes.c_uint64,) * 3)
        call("cuLaunchKernel", kernel, 32, 1, 1, 256, 1, 1, 0, self.streams[device], values, 0)

    def finish(self, device: int) -> None:
        self._on(device, "cuStreamSynchronize", self.streams[device])

    def copy(self, driver_device: int, to: tuple[int, int], origin: tuple[int, int], size: int) -> None:
        self.start_copy(driver_device, to, origin, size)
        self.finish(driver_device)

    def kernel(self, device: int, to: int, origin: int, size: int) -> None:
        self.start_kernel(device, to, origin, size)
        self.finish(device)

    def timed(self, device: int, work: Callable[[], None]) -> float:
        """Milliseconds by the events around this work on the device's stream."""
        start, end = (self._on(device, "cuEventCreate", 0) for _ in range(2))
        call("cuEventRecord", start, self.streams[device])
        work()
        self._on(device, "cuEventRecord", end, self.streams[device])
        self.finish(device)
        return float(call("cuEventElapsedTime", start, end))

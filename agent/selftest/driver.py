"""NVIDIA's driver API as the self-test needs it, through cuda-bindings. One process, a few GPUs, one stream each."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent.selftest import kernel

try:
    from cuda.bindings import driver

    _why_no_bindings = ""
except ImportError as error:  # an answer, not a crash
    driver = None
    _why_no_bindings = str(error)

_ALREADY_ENABLED = 704
_NOT_READY = 600
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_WORD = 8


class StepError(Exception):
    """Why a step could not be carried out, in words."""


class DriverError(StepError):
    """A call that the driver answered with an error. The context that saw it is not used again."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function}: error {code} {name}".rstrip())
        self.function = function
        self.code = code


class MissingError(StepError):
    """Something to be installed. ``what``: bindings, library, function."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(detail)
        self.what = what


def call(function: str, *arguments: Any, accepted: tuple[int, ...] = (0,)) -> Any:
    """The call's first result, or None. Raises DriverError, or MissingError where the library or the function lacks."""
    code, value = _call(function, *arguments)
    if code not in accepted:
        raise DriverError(function, code, _name(code))
    return value


def _call(function: str, *arguments: Any) -> tuple[int, Any]:
    if driver is None:
        raise MissingError("bindings", _why_no_bindings)
    try:
        code, *values = getattr(driver, function)(*arguments)
    except AttributeError as error:
        raise MissingError("bindings", f"these bindings have no {function}") from error
    except RuntimeError as error:
        # The bindings look for the library at the first call, and for each function when it is called first.
        what = "function" if function in str(error) else "library"
        raise MissingError(what, str(error)) from error
    return int(code), values[0] if values else None


def _name(code: int) -> str:
    try:
        found, name = _call("cuGetErrorName", code)
    except (MissingError, ValueError):  # a code that is newer than the bindings
        return ""
    return name.decode() if found == 0 and name else ""


def start() -> None:
    call("cuInit", 0)


@dataclass(slots=True)
class Gpu:
    """One GPU, opened by its PCI address. Pointers are plain numbers."""

    address: str
    device: Any
    context: Any
    stream: Any
    _kernel: Any = field(default=None)

    def use(self) -> None:
        call("cuCtxSetCurrent", self.context)

    def free_memory(self) -> int:
        """Bytes."""
        self.use()
        return int(call("cuMemGetInfo"))

    def allocate(self, size: int) -> int:
        self.use()
        return int(call("cuMemAlloc", size))

    def write(self, at: int, data: memoryview) -> None:
        self.use()
        call("cuMemcpyHtoD", at, data, len(data))

    def read(self, at: int, size: int) -> bytearray:
        self.use()
        into = bytearray(size)
        call("cuMemcpyDtoH", into, at, size)
        return into

    def fill(self, at: int, value: int, size: int) -> None:
        self.use()
        call("cuMemsetD8", at, value, size)

    def settle(self) -> None:
        """Everything begun here has ended: streams of ours do not wait for writes and fills."""
        self.use()
        call("cuCtxSynchronize")

    def can_reach(self, other: "Gpu") -> bool:
        return bool(call("cuDeviceCanAccessPeer", self.device, other.device))

    def reach(self, other: "Gpu") -> None:
        self.use()
        call("cuCtxEnablePeerAccess", other.context, 0, accepted=(0, _ALREADY_ENABLED))

    def new_stream(self) -> Any:
        self.use()
        return call("cuStreamCreate", _NON_BLOCKING)

    def copy(self, to: tuple["Gpu", int], origin: tuple["Gpu", int], size: int, stream: Any = None) -> None:
        """Begin a copy by this GPU's copy engine."""
        self.use()
        call(
            "cuMemcpyPeerAsync", to[1], to[0].context, origin[1], origin[0].context, size, stream or self.stream,
        )  # fmt: skip

    def launch(self, to: int, origin: int, size: int, stream: Any = None) -> None:
        """Begin a copy by this GPU's multiprocessors; ``size`` is a multiple of 8."""
        self.use()
        if self._kernel is None:
            module = call("cuModuleLoadData", kernel.PTX)
            self._kernel = call("cuModuleGetFunction", module, kernel.NAME)
        values = ((to, origin, size // _WORD), (ctypes.c_uint64,) * 3)
        call(
            "cuLaunchKernel", self._kernel, kernel.BLOCKS, 1, 1, kernel.THREADS, 1, 1, 0, stream or self.stream, values, 0,
        )  # fmt: skip

    def wait(self) -> None:
        self.use()
        call("cuStreamSynchronize", self.stream)

    def is_done(self, stream: Any) -> bool:
        self.use()
        return self._code("cuStreamQuery", stream) == 0

    def _code(self, function: str, *arguments: Any) -> int:
        code, _ = _call(function, *arguments)
        if code not in (0, _NOT_READY):
            raise DriverError(function, code, _name(code))
        return code

    def mark(self, stream: Any = None) -> Any:
        """A point in time on a stream."""
        self.use()
        event = call("cuEventCreate", 0)
        call("cuEventRecord", event, stream or self.stream)
        return event

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds of this work on the GPU's own stream, by its own clock."""
        begin = self.mark()
        work()
        end = self.mark()
        self.wait()
        return seconds_between(begin, end)


def seconds_between(begin: Any, end: Any) -> float:
    return float(call("cuEventElapsedTime", begin, end)) / 1e3


def open_gpu(address: str) -> Gpu:
    device = call("cuDeviceGetByPCIBusId", address.encode())
    opened = call("cuDeviceGetPCIBusId", 32, device).split(b"\0")[0].decode().lower()
    if _numbers(opened) != _numbers(address):
        raise StepError(f"the driver opened {opened} instead of {address}")
    context = call("cuDevicePrimaryCtxRetain", device)
    gpu = Gpu(address, device, context, None)
    gpu.stream = gpu.new_stream()
    return gpu


def _numbers(address: str) -> list[int]:
    """Domain, bus, device and function: drivers write the domain with four digits or with eight."""
    return [int(part, 16) for part in address.replace(".", ":").split(":")]

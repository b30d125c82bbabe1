"""What the stand-in does, seen through the bindings. In a child: ``python -m tests.abi.cuda.probes NAME [ARGUMENT]``.

Each prints one JSON value.
"""

import json
import sys
from typing import Any

from cuda.bindings import driver

from tests.abi.cuda.devices import NON_BLOCKING, Devices, DriverError, call
from tests.abi.cuda.lazy import POISON, numbered

SIZE = 64 << 10
GUARD = 4 << 10


def facts() -> Any:
    call("cuInit", 0)
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    supported = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
    every = range(int(call("cuDeviceGetCount")))
    return {
        "version": int(call("cuDriverGetVersion")),
        "addresses": [call("cuDeviceGetPCIBusId", 16, one).split(b"\0")[0].decode() for one in every],
        "uuids": [bytes(call("cuDeviceGetUuid", one).bytes).hex() for one in every],
        "memory": [int(call("cuDeviceTotalMem", one)) for one in every],
        "major": [int(call("cuDeviceGetAttribute", major, one)) for one in every],
        "reaches": [[bool(call("cuDeviceCanAccessPeer", a, b)) for b in every] for a in every],
        "supported": int(call("cuDeviceGetP2PAttribute", supported, 0, 1)),
    }


def codes() -> Any:
    """The codes that the library can name, and the bindings' names for the same codes."""
    ours, theirs = {}, {}
    for code in driver.CUresult:
        result, name = driver.cuGetErrorName(code)
        if int(result) == 0:
            ours[int(code)] = name.decode()
            theirs[int(code)] = code.name
    return [ours, theirs]


def flags() -> Any:
    return [NON_BLOCKING, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)]


def init() -> Any:
    return outcome("cuInit", 0)


def outcome(function: str, *arguments: Any) -> str:
    """ "0", the code, or what the bindings raise for a function that the driver lacks."""
    try:
        call(function, *arguments)
    except DriverError as error:
        return str(error.code)
    except RuntimeError as error:
        return str(error)
    return "0"


def copied(*paths: str) -> Any:
    """For each path a transfer of 64 KiB from device 0 to 1, and all that can be seen of it afterwards.

    The staged path comes first: it is the one without access between the two.
    """
    devices = Devices()
    found = {}
    for path in paths:
        if path == "staged":
            found[path] = transfer(devices, path)
    devices.connect(0, 1)
    return found | {path: transfer(devices, path) for path in paths if path != "staged"}


def transfer(devices: Devices, path: str) -> dict[str, Any]:
    pattern = numbered(SIZE)
    origin, window = devices.allocate(0, SIZE), devices.allocate(1, SIZE + 2 * GUARD)
    target = window + GUARD
    devices.write(0, origin, pattern)
    devices.fill(1, window, POISON, SIZE + 2 * GUARD)
    engine = 1 if path in {"pull", "load"} else 0
    if path in {"store", "load"}:
        devices.kernel(engine, target, origin, SIZE)
    else:
        devices.copy(engine, (1, target), (0, origin), SIZE)
    got = devices.read(1, target, SIZE)
    guards = devices.read(1, window, GUARD) + devices.read(1, target + SIZE, GUARD)
    wrong = [at for at in range(0, SIZE, 8) if got[at : at + 8] != pattern[at : at + 8]]
    return {
        "first": wrong[0] if wrong else None,
        "wrong": len(wrong),
        "got": got[wrong[0] : wrong[0] + 8].hex() if wrong else "",
        "at": pattern.find(got[wrong[0] : wrong[0] + 8]) if wrong else None,  # where that word belongs
        "guards": guards == bytes([POISON]) * len(guards),
        "source": devices.read(0, origin, SIZE) == pattern,
    }


def seen_through_window() -> Any:
    """Device 0 stores into device 1's memory and loads it again; then the owner looks."""
    devices = Devices()
    devices.connect(0, 1)
    pattern = numbered(SIZE)
    origin, back, window = devices.allocate(0, SIZE), devices.allocate(0, SIZE), devices.allocate(1, SIZE)
    devices.write(0, origin, pattern)
    devices.kernel(0, window, origin, SIZE)
    devices.kernel(0, back, window, SIZE)
    return [devices.read(0, back, SIZE) == pattern, devices.read(1, window, SIZE) == pattern]


def unreachable() -> Any:
    """A kernel that stores where it has no access: what launching, waiting and going on say."""
    devices = Devices()
    origin, window = devices.allocate(0, SIZE), devices.allocate(1, SIZE)
    devices.start_kernel(0, window, origin, SIZE)
    told = []
    for device in (0, 0, 1):
        try:
            devices.finish(device)
            told.append(0)
        except DriverError as error:
            told.append(error.code)
    return told


def waited_for() -> Any:
    """Whether a copy on a stream of its own has arrived before and after it was waited for."""
    devices = Devices()
    pattern = numbered(SIZE)
    origin, target = devices.allocate(0, SIZE), devices.allocate(1, SIZE)
    devices.write(0, origin, pattern)
    devices.start_copy(0, (1, target), (0, origin), SIZE)
    before = devices.read(1, target, SIZE) == pattern
    devices.finish(0)
    return [before, devices.read(1, target, SIZE) == pattern]


def query() -> Any:
    """What cuStreamQuery says while a copy is under way, with the result that waiting brings in the end."""
    devices = Devices()
    devices.connect(0, 1)
    origin, target = devices.allocate(0, SIZE), devices.allocate(1, SIZE)
    devices.start_copy(0, (1, target), (0, origin), SIZE)
    return [outcome("cuStreamQuery", devices.streams[0]), outcome("cuStreamSynchronize", devices.streams[0])]


def together() -> Any:
    """Both directions, one after the other and then at once: which copies arrived whole, and GB/s of 0 to 1."""
    devices = Devices()
    devices.connect(0, 1)
    pattern = numbered(SIZE)
    at = {(a, b): (devices.allocate(a, SIZE), devices.allocate(b, SIZE)) for a, b in ((0, 1), (1, 0))}
    for (source, _), (origin, _) in at.items():
        devices.write(source, origin, pattern)

    def start(a: int, b: int) -> None:
        origin, target = at[a, b]
        devices.fill(b, target, POISON, SIZE)
        devices.start_copy(a, (b, target), (a, origin), SIZE)

    alone = devices.timed(0, lambda: start(0, 1))
    first = devices.read(1, at[0, 1][1], SIZE) == pattern
    start(1, 0)
    both = devices.timed(0, lambda: start(0, 1))
    devices.finish(1)
    second = [devices.read(b, target, SIZE) == pattern for (_, b), (_, target) in at.items()]
    return [first, *second, round(SIZE / 1e6 / alone), round(SIZE / 1e6 / both)]


def memory() -> Any:
    """What is free before and after taking 6 of 8 GiB, what 3 more say, and a word beyond 4 GiB."""
    devices = Devices()
    before, _ = call("cuMemGetInfo")
    start = devices.allocate(1, 6 << 30)
    devices.write(1, start + (5 << 30), numbered(64))
    after, _ = call("cuMemGetInfo")
    return [
        before,
        after,
        outcome("cuMemAlloc", 3 << 30),
        devices.read(1, start + (5 << 30), 64) == numbered(64),
    ]


def elapsed() -> Any:
    devices = Devices()
    return devices.timed(0, lambda: None)


def copy_again() -> Any:
    """A copy whose function may be missing in the library."""
    try:
        return copied("push")["push"]["wrong"]
    except RuntimeError as error:
        return str(error)


def main() -> None:
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[name](*arguments)))


if __name__ == "__main__":
    main()

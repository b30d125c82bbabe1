"""NVML's return codes as a simulated host gives them: as facts, and as errors of writes."""

import errno
import os

from agent.core.fact import Unknown

# NVML's numbers: a CamelCase reason, NVML's own words, and the errno that a failed write of ours carries.
CODES = {
    2: ("NvmlInvalidArgument", "Invalid Argument", errno.EINVAL),
    3: ("NvmlNotSupported", "Not Supported", errno.EOPNOTSUPP),
    4: ("NvmlNoPermission", "Insufficient Permissions", errno.EPERM),
    9: ("NvmlDriverNotLoaded", "Driver Not Loaded", errno.ENODEV),
    10: ("NvmlTimeout", "Timeout", errno.ETIMEDOUT),
    12: ("NvmlLibraryNotFound", "NVML Shared Library Not Found", errno.ENOENT),
    13: ("NvmlFunctionNotFound", "Function Not Found", errno.ENOSYS),
    15: ("GpuLost", "GPU is lost", errno.EIO),
    16: ("GpuResetRequired", "GPU requires reset", errno.EIO),
    18: ("NvmlVersionMismatch", "Driver/library version mismatch", errno.EPROTO),
    999: ("NvmlUnknownError", "Unknown Error", errno.EIO),
}


def unknown_of(code: int) -> Unknown:
    name, words, _ = CODES.get(code, (f"NvmlError{code}", "unknown code", errno.EIO))
    return Unknown(f"NVML: {words} (code {code})", name)


def error_of(code: int, about: str) -> OSError:
    number = CODES.get(code, ("", "", errno.EIO))[2]
    return OSError(number, f"{unknown_of(code).reason} ({os.strerror(number)})", about)

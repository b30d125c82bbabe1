"""The words of ``NvmlPort.set`` in NVML's: a setter of the child and its arguments."""

import errno
import os
from collections.abc import Callable, Mapping

from agent.core.quantity import UNLOCKED, parse_clocks
from agent.host.nvml_wire import WriteRequest

COMPUTE_MODES = {0: "default", 1: "exclusiveThread", 2: "prohibited", 3: "exclusiveProcess"}
UNITS = {"power-limit": " W"}  # of values that do not carry theirs
CLOCKS = ("locked-graphics-clocks", "locked-memory-clocks")


def _switch(value: str) -> tuple[int, ...]:
    return (("off", "on").index(value),)


def _milliwatts(value: str) -> tuple[int, ...]:
    return (int(value) * 1000,)


def _compute_mode(value: str) -> tuple[int, ...]:
    return ({word: number for number, word in COMPUTE_MODES.items()}[value],)


_ARGUMENTS: Mapping[str, Callable[[str], tuple[int, ...]]] = {
    "persistence-mode": _switch,
    "ecc": _switch,
    "mig": _switch,
    "power-limit": _milliwatts,
    "compute-mode": _compute_mode,
    **dict.fromkeys(CLOCKS, parse_clocks),
}


def write_request(address: str, setting: str, value: str) -> WriteRequest:
    """Raises OSError for what is no setting or no value of it."""
    try:
        values = _ARGUMENTS[setting](value)
    except (KeyError, ValueError) as error:
        raise OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)}: {setting} {value}", address) from error
    if setting in CLOCKS and values == UNLOCKED:
        return WriteRequest(address=address, setting=f"{setting}-reset", values=())
    return WriteRequest(address=address, setting=setting, values=values)

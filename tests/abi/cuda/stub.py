"""A stand-in CUDA driver for one test: its library, its state that can change while a test runs, and its trace."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.abi.cuda.build import CUDA
from tests.abi.shared_library import compiler

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="no gcc to build the stand-in CUDA library with"
)
_TRACING = Path("/proc/sys/kernel/yama/ptrace_scope")
needs_tracing = pytest.mark.skipif(
    _TRACING.exists() and _TRACING.read_text().strip() == "3",
    reason="this kernel lets nobody trace (yama ptrace_scope is 3), and so no child can be made unkillable",
)
# Sixteen, and of no other process of tests: a self-test looks through /proc for what earlier ones have left on its GPUs.
_DOMAIN = os.getpid() % 0xFFFF + 1
ADDRESSES = tuple(f"{_DOMAIN:04x}:{bus:02x}:00.0" for bus in range(0x01, 0x101, 0x10))
GIB = 1 << 30
Value = str | int | float | None


class CudaStub:
    """The keys are those of cuda.h. No test loads the library into its own process: it stays there for good."""

    def __init__(self, folder: Path, without: Sequence[str] = ()) -> None:
        self.state = folder / "cuda.state"
        self.trace = folder / "cuda.trace"
        self.env = {
            "LD_LIBRARY_PATH": str(CUDA.cached(without)),
            "CUDA_STUB_STATE": str(self.state),
            "CUDA_STUB_TRACE": str(self.trace),
        }
        self.set({"version": 13000})

    def add(self, index: int, address: str, memory: int = 8 * GIB) -> None:
        """One more device; ``index`` is its ordinal, without gaps from 0 on."""
        self.set(
            {
                f"gpu{index}.address": address,
                f"gpu{index}.uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000",
                f"gpu{index}.memory": memory,
            }
        )

    def set(self, values: dict[str, Value]) -> None:
        """None takes a key away. The file is replaced as a whole."""
        lines = self.state.read_text().splitlines() if self.state.exists() else []
        before = dict(line.split("=", 1) for line in lines)
        after: dict[str, Value] = {**before, **values}
        scratch = self.state.with_suffix(".new")
        scratch.write_text("".join(f"{key}={value}\n" for key, value in after.items() if value is not None))
        scratch.replace(self.state)

    def calls(self, name: str = "") -> list[str]:
        """The traced calls, or those of one function with its devices, as "cuMemcpyPeerAsync 0 1".

        What moves bytes has a second line: "copy 0>1 by 0: 4096 direct" (or staged, or local), "kernel 0>1 by 0: 4096",
        "write 1 by 1: 4096" and "read 1 by 1: 4096", where the last device is the one of the current context. Memory has "allocated 1: 4096".
        """
        return [call for calls in self.calls_by_process().values() for call in calls if _is(call, name)]

    def calls_by_process(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for line in self.trace.read_text().splitlines() if self.trace.exists() else []:
            pid, call = line.split(" ", 1)
            found.setdefault(int(pid), []).append(call)
        return found


def _is(call: str, name: str) -> bool:
    return not name or call.split(maxsplit=1)[0] == name

"""A stand-in NVML for one test: its library, its state that can change while a test runs, and its trace."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.abi.nvml.build import cached, compiler

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="no gcc to build the stand-in NVML library with"
)
DRIVER = "590.48.01"
EVERY_GPU: dict[str, str | int] = {
    "name": "Stub",
    "persistence": 0,
    "power_limit": 600_000,
    "power_min": 300_000,
    "power_max": 600_000,
}


class NvmlStub:
    """The keys are those of nvml.h."""

    def __init__(self, folder: Path, without: Sequence[str] = ()) -> None:
        self.state = folder / "nvml.state"
        self.trace = folder / "nvml.trace"
        self.env = {
            "LD_LIBRARY_PATH": str(cached(without)),
            "NVML_STUB_STATE": str(self.state),
            "NVML_STUB_TRACE": str(self.trace),
        }
        self.set({"driver": DRIVER, "nvml": f"13.{DRIVER}", **{f"gpu.{k}": v for k, v in EVERY_GPU.items()}})

    def add(self, index: int, address: str, minor: int) -> None:
        self.set(
            {
                f"gpu{index}.address": address,
                f"gpu{index}.minor": minor,
                f"gpu{index}.uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000",
            }
        )

    def get(self, key: str) -> str | None:
        return self._values().get(key)

    def set(self, values: dict[str, str | int | None]) -> None:
        """None takes a key away. The file is replaced as a whole."""
        after: dict[str, str | int | None] = {**self._values(), **values}
        text = "".join(f"{key}={value}\n" for key, value in after.items() if value is not None)
        scratch = self.state.with_suffix(".new")
        scratch.write_text(text)
        scratch.replace(self.state)

    def calls(self, name: str = "") -> list[str]:
        """The traced calls, or those of one function: "nvmlDeviceSetPersistenceMode 0000:01:00.0 1"."""
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        return [line for line in lines if not name or line.split()[0] == name]

    def _values(self) -> dict[str, str]:
        lines = self.state.read_text().splitlines() if self.state.exists() else []
        return dict(line.split("=", 1) for line in lines)

"""The stand-in library and the Python bindings must agree about every structure that passes between them."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.abi.nvml.build import LIBRARY, cached
from tests.abi.nvml.stub import needs_compiler

BINDINGS: dict[str, Any] = {
    "PciInfo": pynvml.nvmlPciInfo_t,
    "Memory": pynvml.c_nvmlMemory_t,
    "Memory2": pynvml.c_nvmlMemory_v2_t,
    "Bar1Memory": pynvml.c_nvmlBAR1Memory_t,
    "Utilization": pynvml.c_nvmlUtilization_t,
    "ProcessInfo": pynvml.c_nvmlProcessInfo_v3_t,
    "FieldValue": pynvml.c_nvmlFieldValue_t,
    "Value": pynvml.c_nvmlValue_t,
    "ConfComputeState": pynvml.c_nvmlConfComputeSystemState_t,
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(cached() / LIBRARY))


@needs_compiler
def test_structures_have_the_sizes_and_offsets_that_the_bindings_expect(library: ctypes.CDLL):
    library.stub_layout.restype = ctypes.c_char_p
    ours: dict[str, dict[str, int]] = {}
    for line in library.stub_layout().decode().splitlines():
        structure, field, number = line.split()
        ours.setdefault(structure, {})[field] = int(number)
    theirs = {
        name: {
            "size": ctypes.sizeof(kind),
            **{field: getattr(kind, field).offset for field, *_ in kind._fields_},
        }
        for name, kind in BINDINGS.items()
    }
    assert ours == theirs


@needs_compiler
def test_every_function_of_the_library_is_one_that_the_bindings_call():
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(cached() / LIBRARY)],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    exported = [name for name in names if name.startswith("nvml")]
    bindings = Path(pynvml.__file__).read_text(encoding="utf-8")
    assert "nvmlDeviceGetHandleByPciBusId_v2" in exported
    assert [name for name in exported if f'"{name}"' not in bindings] == []

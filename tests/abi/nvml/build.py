"""The stand-in libnvidia-ml.so.1: ``python -m tests.abi.nvml.build FOLDER``."""

import sys
from pathlib import Path

from tests.abi.shared_library import SharedLibrary, compiler

__all__ = ["LIBRARY", "build", "cached", "compiler"]

LIBRARY = "libnvidia-ml.so.1"
_NVML = SharedLibrary(Path(__file__).parent, LIBRARY)
build, cached = _NVML.build, _NVML.cached

if __name__ == "__main__":
    print(build(Path(sys.argv[1])))

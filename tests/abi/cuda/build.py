"""The stand-in libcuda.so.1: ``python -m tests.abi.cuda.build FOLDER``."""

import sys
from pathlib import Path

from tests.abi.shared_library import SharedLibrary

CUDA = SharedLibrary(Path(__file__).parent, "libcuda.so.1")

if __name__ == "__main__":
    print(CUDA.build(Path(sys.argv[1])))

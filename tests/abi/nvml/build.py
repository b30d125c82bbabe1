"""Builds the stand-in libnvidia-ml.so.1. It needs gcc and nothing else: ``python -m tests.abi.nvml.build FOLDER``."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parent
LIBRARY = "libnvidia-ml.so.1"
FLAGS = ("-std=gnu17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_DEADLINE = 120.0  # seconds; it takes one


def compiler() -> str | None:
    return shutil.which("gcc")


def build(destination: Path, without: Sequence[str] = ()) -> Path:
    """The library, made anew as ``destination``/libnvidia-ml.so.1.

    ``without`` names functions that it lacks, as an older driver's does. Raises OSError without a compiler and
    CalledProcessError where it fails.
    """
    gcc = compiler()
    if gcc is None:
        raise FileNotFoundError("gcc is needed to build the stand-in NVML library; install it (Debian: gcc)")
    destination.mkdir(parents=True, exist_ok=True)
    # Made in a folder of its own and renamed, so that two builds at once do not meet in one file.
    with tempfile.TemporaryDirectory(dir=destination, prefix=".build-") as scratch:
        script = Path(scratch, "exports")
        script.write_text(f"{{ local: {' '.join(f'{name};' for name in without)} }};\n")
        hiding = [f"-Wl,--version-script={script}"] if without else []
        made = Path(scratch, LIBRARY)
        sources = sorted(str(path) for path in SOURCE.glob("*.c"))
        argv = [gcc, *FLAGS, f"-Wl,-soname,{LIBRARY}", *hiding, "-o", str(made), *sources]
        subprocess.run(argv, check=True, timeout=_DEADLINE)
        return made.rename(destination / LIBRARY)


def cached(without: Sequence[str] = ()) -> Path:
    """The folder of such a library, built only when its sources have changed."""
    key = hashlib.sha256(repr((FLAGS, sorted(without))).encode())
    for path in sorted((*SOURCE.glob("*.[ch]"), Path(__file__))):
        key.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "gpu-host-agent-tests" / f"nvml-{key.hexdigest()[:16]}"
    if not (folder / LIBRARY).exists():
        build(folder, without)
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))

"""Builds stand-ins of NVIDIA's libraries from C. It needs gcc and nothing else."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FLAGS = ("-std=gnu17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_DEADLINE = 120.0  # seconds; it takes one


def compiler() -> str | None:
    return shutil.which("gcc")


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """``source`` is a folder, whose C files all go into it; ``name`` is what programs load, as libcuda.so.1."""

    source: Path
    name: str

    def build(self, destination: Path, without: Sequence[str] = ()) -> Path:
        """The library, made anew in ``destination``.

        ``without`` names functions that it lacks, as an older driver's does. Raises OSError without a compiler and
        CalledProcessError where it fails.
        """
        gcc = compiler()
        if gcc is None:
            raise FileNotFoundError(
                f"gcc is needed to build a stand-in {self.name}; install it (Debian: gcc)"
            )
        destination.mkdir(parents=True, exist_ok=True)
        # Made in a folder of its own and renamed, so that two builds at once do not meet in one file.
        with tempfile.TemporaryDirectory(dir=destination, prefix=".build-") as scratch:
            script = Path(scratch, "exports")
            script.write_text(f"{{ local: {' '.join(f'{name};' for name in without)} }};\n")
            hiding = [f"-Wl,--version-script={script}"] if without else []
            made = Path(scratch, self.name)
            sources = sorted(str(path) for path in self.source.glob("*.c"))
            argv = [gcc, *FLAGS, f"-Wl,-soname,{self.name}", *hiding, "-o", str(made), *sources]
            subprocess.run(argv, check=True, timeout=_DEADLINE)
            return made.rename(destination / self.name)

    def cached(self, without: Sequence[str] = ()) -> Path:
        """The folder of such a library, built only when its sources have changed."""
        key = hashlib.sha256(repr((FLAGS, sorted(without))).encode())
        for path in sorted((*self.source.glob("*.[ch]"), Path(__file__))):
            key.update(path.read_bytes())
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "gpu-host-agent-tests" / f"{self.name.partition('.')[0]}-{key.hexdigest()[:16]}"
        if not (folder / self.name).exists():
            self.build(folder, without)
        return folder

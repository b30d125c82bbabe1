"""Where an NVIDIA driver says its version: the kernel module, and the user-space libraries beside it."""

import re
from collections.abc import Iterable
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.host.reading import convert, read_text

_VERSION = re.compile(r"\b(\d{3,4}\.\d+(?:\.\d+)?)\b")
_LIBRARY = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.(\d{3,4}\.\d+(?:\.\d+)?)")
_LOADED_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")
# Where Debian, Red Hat, SUSE, the .run installer and the container toolkit put them.
LIBRARY_DIRECTORIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib64",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "usr/local/nvidia/lib64",
)


def module_version(root: Path) -> Fact[str]:
    """The loaded kernel module's version. Absent: not loaded."""
    banner = read_text(root / "proc/driver/nvidia/version")
    if not isinstance(banner, Absent):
        return convert(banner, _version_in)
    version = read_text(root / "sys/module/nvidia/version")
    return Absent("the nvidia module is not loaded") if isinstance(version, Absent) else version


def library_version(root: Path) -> Fact[str]:
    """The version that libcuda and libnvidia-ml have by their file names. Absent: neither is installed.

    What ``.so.1`` leads to is what the dynamic loader takes; other files count only where there is no such link.
    """
    paths = (p for d in LIBRARY_DIRECTORIES for p in sorted((root / d).glob("lib*.so.*")))
    return version_among((str(path), path.resolve().name) for path in paths)


def version_among(libraries: Iterable[tuple[str, str]]) -> Fact[str]:
    """``library_version`` from (path, name of what it leads to), wherever they were listed."""
    links, files = {}, {}
    for path, leads_to in libraries:
        name = path.rpartition("/")[2]
        if name in _LOADED_NAMES:
            links[_LIBRARY.fullmatch(leads_to)] = path
        else:
            files[_LIBRARY.fullmatch(name)] = path
    found = {m[1]: path for m, path in links.items() if m} or {m[1]: path for m, path in files.items() if m}
    if not found:
        return Absent("no libcuda or libnvidia-ml with a version in its name in the library directories")
    if len(found) > 1:
        places = ", ".join(f"{version} at {path}" for version, path in sorted(found.items()))
        return Unknown(f"libraries of different versions are installed: {places}", "UserDriverMixed")
    return Known(next(iter(found)))


def _version_in(banner: str) -> Fact[str]:
    match = _VERSION.search(banner)
    return Known(match[1]) if match else Unknown(f"no version in {banner[:80]!r}", "Unparsable")

"""Debian packages for the guest: downloaded by apt, unpacked into private folders. Nothing is installed here."""

import lzma
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.system.vm.cache import cached, key_of

# Newest first; the plain flavour: the cloud one has no AMD IOMMU.
_KERNELS = (r"^linux-image-6\.12\.[0-9]+\+deb12-amd64$", r"^linux-image-6\.1\.[0-9]+-[0-9]+-amd64$")
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
_BASE = "systemd,systemd-sysv,udev,dbus,kmod,python3,pciutils,iproute2,procps"
_UNWANTED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
_DEADLINE = 600.0  # seconds for one command


class BuildError(Exception):
    """A part of the guest cannot be made; the message says which command failed, and what it said."""


def command(argv: Sequence[str], cwd: Path | None = None, data: bytes | None = None) -> bytes:
    """Run to its end at low priority; its standard output. Raises ``BuildError``."""
    try:
        done = subprocess.run(
            ["nice", *argv], check=False, cwd=cwd, input=data, capture_output=True, timeout=_DEADLINE
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{' '.join(argv)[:300]} did not end within {_DEADLINE:g}s") from error
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace")[-2000:]
        raise BuildError(f"{' '.join(argv)[:300]} ended with status {done.returncode}:\n{tail}")
    return done.stdout


def kernel_package() -> str | None:
    """The newest kernel of the configured suites: 6.12, else 6.1. None: apt knows neither."""
    for pattern in _KERNELS:
        found = command(["apt-cache", "search", "--names-only", pattern]).decode().split("\n")
        names = [line.split()[0] for line in found if line.strip()]
        if names:
            return max(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    return None


def _unpack(packages: Sequence[str], into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    command(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *packages], cwd=into)
    for package in sorted(into.glob("*.deb")):
        command(["dpkg-deb", "-x", str(package), str(into)])
        package.unlink()


def kernel(package: str) -> Path:
    """``vmlinux``, ``lib/modules/VERSION``, ``headers`` with which modules can be built, and ``version``."""
    return cached("kernel", key_of(package, files=[Path(__file__)]), lambda made: _fill_kernel(package, made))


def _fill_kernel(package: str, made: Path) -> None:
    version = package.removeprefix("linux-image-")
    abi = version.removesuffix("-amd64")
    scratch = made / "scratch"
    _unpack([package], scratch)
    (scratch / "lib").rename(made / "lib")
    (made / "vmlinux").write_bytes(uncompressed((scratch / "boot" / f"vmlinuz-{version}").read_bytes()))
    command(["rm", "-rf", str(scratch)])
    command(["depmod", "-b", str(made), version])
    headers = [f"linux-headers-{version}", f"linux-headers-{abi}-common", f"linux-kbuild-{abi}"]
    _unpack(headers, made / "headers")
    makefile = made / f"headers/usr/src/linux-headers-{version}/Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/", "../"))
    (made / "version").write_text(version)


def uncompressed(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage (Documentation/arch/x86/boot.rst): the guest is spared decompressing it."""
    setup_sectors = image[0x1F1] or 4
    start = (setup_sectors + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")
    payload = image[start : start + int.from_bytes(image[0x24C:0x250], "little")]
    if payload.startswith(b"\xfd7zXZ"):
        elf = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x28\xb5\x2f\xfd"):
        elf = command(["zstd", "-dcq"], data=payload[:-4])  # the size of the kernel follows the stream
    else:
        raise BuildError(f"the kernel's compression is unknown: it begins with {payload[:4].hex()}")
    if not elf.startswith(b"\x7fELF"):
        raise BuildError("what was unpacked from the kernel image is no ELF file")
    return elf


def base_root() -> Path:
    """``root.tar``: Debian 12 with systemd, udev and Python, as unpacked and configured by its own packages."""
    return cached("base", key_of(_BASE, files=[Path(__file__), SOURCES]), _fill_base)


def _fill_base(made: Path) -> None:
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in _UNWANTED]
    bootstrap = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--components=main"]
    quiet = '--aptopt=Acquire::Languages "none"'
    what = ["bookworm", str(made / "root.tar"), str(SOURCES)]
    # In a mount namespace of its own: whatever is mounted for the packages' scripts is nobody else's.
    namespace = ["unshare", "--mount", "--propagation", "private"]
    command([*namespace, *bootstrap, f"--include={_BASE}", quiet, *excluded, *what])

"""What the kernel ring needs of the machine it runs on: root, Debian's packages, a Python of the guest's kind."""

import functools
import os
import shutil
import sys
from pathlib import Path

from tests.system.requirements import need, need_root
from tests.system.vm.debian import SOURCES, BuildError, kernel_package
from tests.system.vm.image import GUEST_PYTHON, Image, image
from tests.system.vm.qemu import Hardware, program

# Program: the Debian package that has it. .ci/vm-packages names the same packages.
_PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "zstd": "zstd",
    "mke2fs": "e2fsprogs",
    "modprobe": "kmod",
    "gcc": "gcc",
    "make": "make",
    "strip": "binutils",
    "setpriv": "util-linux",
    "dpkg-deb": "dpkg",
}


def need_hardware(hardware: Hardware) -> None:
    """Skip (in CI: fail) where no QEMU here can be such a machine."""
    try:
        program(hardware)
    except FileNotFoundError as error:
        need(False, str(error))


@functools.cache
def needed_image() -> Image:
    """The guest, built where it is not in the cache; skips (in CI: fails) where this machine cannot."""
    need_root()
    for name, package in _PROGRAMS.items():
        need(
            shutil.which(name, path=f"{os.defpath}:/usr/sbin:/sbin"),
            f"needs {name}: apt-get install {package}",
        )
    busybox = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    need(b"/ld-linux" not in busybox[:4096], "needs a static busybox: apt-get install busybox-static")
    need(SOURCES.is_file(), f"needs {SOURCES}: the guest is made from this machine's Debian 12 suites")
    fits = sys.version_info[:2] == GUEST_PYTHON and sys.implementation.name == "cpython"
    need(fits, f"needs CPython 3.11, as the guest has: this is {sys.version.split()[0]}")
    try:
        newest = kernel_package()
        need(newest, "apt knows no kernel 6.12 or 6.1 of Debian 12: run apt-get update")
        return image(str(newest))
    except BuildError as error:
        need(False, f"the guest cannot be built (old package lists? run apt-get update): {error}")
        raise

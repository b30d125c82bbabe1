"""A GPU for a ring, which has none: files where the kernel would show one, and the stand-in NVML beside them.

It is enough for services to be given a GPU and started. Nothing can be bound or measured on it.
"""

import base64
import io
import tarfile
import tempfile
from pathlib import Path

from tests.abi.nvml.stub import DRIVER, NvmlStub
from tests.host.trees import config_space
from tests.system.booted_systemd import BootedSystemd

CARD = "0000:01:00.0"
_DEVICE, _DRIVER = f"/sys/bus/pci/devices/{CARD}", "/sys/bus/pci/drivers/nvidia"
_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
STATE = "/run/ring-card/nvml.state"
ENVIRONMENT = f"[Service]\nEnvironment=NVML_STUB_STATE={STATE}\n"  # for the agent's unit
_FILES: dict[str, str | bytes] = {
    "vendor": "0x10de\n",
    "device": "0x2bb5\n",
    "class": "0x030200\n",
    "driver_override": "(null)\n",
    "numa_node": "-1\n",
    "power_state": "D0\n",
    "config": config_space(),
}


def insert_card(ring: BootedSystemd) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stub = NvmlStub(Path(folder))
        stub.add(0, CARD, 0)
        library = Path(stub.env["LD_LIBRARY_PATH"], "libnvidia-ml.so.1").read_bytes()
        files: dict[str, str | bytes] = {f"{_DEVICE}/{name}": text for name, text in _FILES.items()}
        files |= {STATE: stub.state.read_text(), f"{_LIBRARIES}/libnvidia-ml.so.{DRIVER}": library}
    # Of the modules the agent reads that they are loaded, which no ring can bring about.
    ring.do("mount", "-t", "tmpfs", "ring-card", "/sys/module")
    files |= {f"/sys/module/{name}/initstate": "live\n" for name in ("nvidia", "nvidia_uvm", "vfio_pci")}
    files["/sys/module/nvidia/version"] = f"{DRIVER}\n"
    links = {
        f"{_DEVICE}/driver": _DRIVER,
        f"{_DRIVER}/{CARD}": _DEVICE,
        f"{_LIBRARIES}/libnvidia-ml.so.1": f"libnvidia-ml.so.{DRIVER}",
    }
    ring.do("sh", "-c", "base64 -d | tar -xf - -C /", stdin=base64.b64encode(_archive(files, links)).decode())


def remove_card(ring: BootedSystemd) -> None:
    ring.do("rm", "-rf", _DEVICE, _DRIVER, str(Path(STATE).parent))
    ring.do("sh", "-c", f"rm {_LIBRARIES}/libnvidia-ml.so.*")
    ring.do("umount", "/sys/module")


def _archive(files: dict[str, str | bytes], links: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
        for path, target in links.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return packed.getvalue()

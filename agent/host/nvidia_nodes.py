"""The character devices of NVIDIA's driver. Its modules make none: udev rules of a distribution do, or nvidia-modprobe.

Whatever uses the driver as root starts that program where a node is missing. Out of the agent's sandbox it cannot make
one, so systemd runs it here. Sources: nvidia-modprobe(1); NVIDIA driver README, "How and when are the NVIDIA device
files created"; procfs(5), /proc/devices.
"""

import errno
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.nvidia_nodes import arguments
from agent.core.observation import NvidiaNodes
from agent.host.manager import ServiceManager, TransientCommand
from agent.host.modprobe import is_there
from agent.host.nvidia_minors import NvidiaMinors
from agent.host.reading import unreadable
from agent.host.transient_end import succeeded

UNIT = "gpu-host-agent-device-nodes{}.service"
DEADLINE = 30.0  # seconds
_POLL = 0.1
_MAKER = "usr/bin/nvidia-modprobe"
_UVM = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def read_nvidia_nodes(root: Path, gpus: NvidiaMinors) -> Fact[NvidiaNodes]:
    """Absent: the nvidia module has no GPU, and so needs no node."""
    minors: list[int] = []
    try:
        for minor in gpus.read().values():
            if not isinstance(minor, Known):
                return Unknown(minor.reason)
            minors.append(minor.value)
        wanted = _wanted(root, sorted(minors))
        missing = tuple(node for node in wanted if not (root / node.lstrip("/")).exists())
    except OSError as error:
        return unreadable(root / "proc/driver/nvidia", error)
    if not wanted:
        return Absent("the nvidia module is not loaded, or has no GPU")
    return Known(NvidiaNodes(missing, f"/{_MAKER}" if (root / _MAKER).is_file() else ""))


def _wanted(root: Path, minors: list[int]) -> tuple[str, ...]:
    if not minors:
        return ()
    uvm = _UVM if is_there("nvidia_uvm", root) else ()
    return ("/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in minors), *uvm)


async def make_nvidia_nodes(nodes: Fact[NvidiaNodes], root: Path, manager: ServiceManager | None) -> None:
    """Make those of ``nodes`` that are missing; nothing where none is.

    Raises OSError: ENOENT without nvidia-modprobe, EIO where it fails, EBUSY while an earlier one runs; TimeoutError.
    """
    if not isinstance(nodes, Known) or not nodes.value.missing:
        return
    if not nodes.value.maker:
        raise OSError(errno.ENOENT, f"no /{_MAKER} on this host to make {', '.join(nodes.value.missing)}")
    if manager is None:
        raise OSError(errno.EOPNOTSUPP, "making device nodes needs systemd, and there is no way to it")
    for words in arguments(nodes.value.missing):
        unit = UNIT.format("-uvm" if "-u" in words else "")
        said = f"nvidia-modprobe {' '.join(words)}"
        argv, settings = (str(root / _MAKER), *words), {"TimeoutStartSec": "60s"}
        await manager.run(TransientCommand(unit, argv, f"Make device nodes: {said}", settings))
        await succeeded(unit, said, DEADLINE, manager)

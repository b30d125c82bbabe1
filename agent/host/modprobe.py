"""modprobe by systemd: loading a module needs a capability that the agent's own sandbox does not have."""

import errno
import re
from pathlib import Path

from agent.core.fact import Known
from agent.host.manager import ServiceManager, TransientCommand
from agent.host.reading import read_text
from agent.host.transient_end import succeeded

DEADLINE = 120.0  # seconds; a driver with many GPUs initialises them one after the other
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_PLACES = ("usr/sbin/modprobe", "sbin/modprobe", "usr/bin/modprobe", "bin/modprobe")
_PROPERTIES = {"TimeoutStartSec": "infinity", "TimeoutStopSec": "1s", "SendSIGKILL": "no"}


async def load(name: str, root: Path, manager: ServiceManager | None) -> None:
    """Nothing where it is loaded or built in.

    Raises OSError: EINVAL for what is no module's name, EBUSY while an earlier modprobe of it still runs, EIO where
    modprobe fails; TimeoutError where it does not end in time.
    """
    if not _NAME.fullmatch(name):
        raise OSError(errno.EINVAL, f"{name!r} is no module's name")
    if is_there(name, root):
        return
    if manager is None:
        raise OSError(errno.EOPNOTSUPP, f"loading {name} needs systemd, and there is no way to it")
    unit = f"gpu-host-agent-modprobe-{name}.service"
    argv = (str(_modprobe(root)), "--", name)
    await manager.run(TransientCommand(unit, argv, f"Load kernel module {name}", _PROPERTIES))
    await succeeded(unit, f"modprobe {name}", DEADLINE, manager)


def is_there(name: str, root: Path) -> bool:
    """Loaded and initialised, or built in. A built-in module has no initstate."""
    directory = root / "sys/module" / name.replace("-", "_")
    state = read_text(directory / "initstate")
    return state == Known("live") if isinstance(state, Known) else directory.is_dir()


def _modprobe(root: Path) -> Path:
    for place in _PLACES:
        if (root / place).is_file():
            return root / place
    raise OSError(errno.ENOENT, "no modprobe on this host: install kmod")

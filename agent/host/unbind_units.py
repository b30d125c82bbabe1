"""Unbinds as transient units of their own: outside the agent's cgroup, and still to be found by the agent after it.

An unbind of a GPU in use sleeps in the kernel out of reach of any signal, and whoever waits for that process waits
with it. So nobody does: the unit has no start timeout, and a stop gives it up after two seconds. A reboot ends the
units along with what they waited for.
"""

import errno
import re
import time
from pathlib import Path

from agent.core.fact import value_or
from agent.core.observation import Unit
from agent.core.unbind_unit import CGROUP, SLICE, unit_name
from agent.host.attribute_write import writer
from agent.host.manager import ServiceManager, TransientCommand
from agent.host.reading import PCI_ADDRESS, names_in, read_text
from agent.host.systemctl_show import cgroup_directory, cgroup_pids

_UNIT = re.compile(rf"gpu-host-agent-unbind-({PCI_ADDRESS.pattern})\.service")
_DRIVER = re.compile(r"[\w-][\w .+-]*")

PROPERTIES = {
    "Slice": SLICE,
    "TimeoutStartSec": "infinity",
    # A stop waits this long for SIGTERM and once more at the end. SIGKILL would add two more waits, for nothing: a
    # process that sleeps in the driver's remove() dies of neither, and one that can die does so of SIGTERM.
    "TimeoutStopSec": "1s",
    "SendSIGKILL": "no",
}


class UnbindUnits:
    """The unbinds that this agent, or one before it in this boot, has begun."""

    def __init__(self, root: Path, manager: ServiceManager | None) -> None:
        self._root = root
        self._manager = manager

    def pending(self) -> tuple[str, ...]:
        """Addresses whose unbind has not returned, by the cgroups alone. Raises OSError where those cannot be read."""
        self._assert_cgroups()
        found = (_UNIT.fullmatch(name) for name in names_in(cgroup_directory(self._root, CGROUP)))
        return tuple(match[1] for match in found if match and self._pids(match[1]))

    def is_pending(self, address: str) -> bool:
        return bool(self._pids(address))

    async def start(self, address: str, driver: str, within: float) -> None:
        """As ``PciPort.start_unbind``.

        Raises OSError: EBUSY while an unbind of it has not returned, and whatever keeps systemd from starting one.
        """
        # That clock is the whole machine's, and PID 1's child reads the same.
        not_after = time.clock_gettime(time.CLOCK_BOOTTIME) + within
        if self._manager is None:
            raise OSError(errno.EOPNOTSUPP, f"unbinding {address} needs systemd, and there is no way to it")
        if not PCI_ADDRESS.fullmatch(address) or not _DRIVER.fullmatch(driver):
            raise OSError(errno.EINVAL, f"no PCI address or no driver: {address!r}, {driver!r}")
        if self.is_pending(address):
            raise OSError(errno.EBUSY, f"an unbind of {address} has not returned")
        path = self._root / "sys/bus/pci/drivers" / driver / "unbind"
        argv = writer(path, address, not_after)
        await self._manager.run(
            TransientCommand(unit_name(address), argv, f"Unbind {address} from {driver}", PROPERTIES)
        )

    async def state(self, address: str) -> str:
        """As ``PciPort.unbind_state``."""
        pids = self._pids(address)
        if pids:
            return self._running(pids[0])
        if self._manager is None:
            return "none"
        unit = await self._manager.unit(unit_name(address))
        if unit.load_state == "not-found":
            return "none"
        if unit.active_state == "active" and unit.sub_state == "exited":
            return "done"
        if unit.active_state == "failed":
            return f"failed: {_how_it_failed(unit)}"
        # Loaded and inactive is a start that systemd has not come to yet: one that has ended is active or unloaded.
        return self._running(unit.main_pid)

    def _running(self, pid: int) -> str:
        stat = value_or(read_text(self._root / "proc" / str(pid) / "stat"), "") if pid else ""
        letter = stat.rpartition(")")[2].split()[:1]
        if not letter:
            return "running"
        where = value_or(read_text(self._root / "proc" / str(pid) / "wchan"), "0")
        return f"running: state {letter[0]}" + (f" in {where}" if where not in ("", "0") else "")

    def _pids(self, address: str) -> tuple[int, ...]:
        # Not what the unit says of its cgroup: systemd forgets that of a unit it gave up, with the process still there.
        self._assert_cgroups()
        return cgroup_pids(self._root, f"{CGROUP}/{unit_name(address)}")

    def _assert_cgroups(self) -> None:
        """Where systemd runs it has cgroups: not to see them is not to know, and not "none"."""
        hierarchy = cgroup_directory(self._root, "")
        if (self._root / "run/systemd/system").is_dir() and not (
            (hierarchy / "cgroup.controllers").exists() or hierarchy.name == "systemd"
        ):
            text = f"no cgroups at {hierarchy}, where systemd keeps the unbinds that have not returned; mount them"
            raise OSError(errno.ENOENT, text)


def _how_it_failed(unit: Unit) -> str:
    if unit.result != "exit-code":
        return unit.result
    return errno.errorcode.get(unit.exit_status, f"status {unit.exit_status}")

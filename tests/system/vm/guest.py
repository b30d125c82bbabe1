"""What can be asked of a running guest: commands, files, PCI devices, processes, logs."""

import base64
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.system.vm.channel import Channel, GuestDeadError

PCI = "/sys/bus/pci/devices"
GROUPS = "/sys/kernel/iommu_groups"
# Buses are numbered by the kernel's order of root ports, from 1 on.
GPUS = tuple(f"0000:{bus:02x}:00.0" for bus in range(1, 9))
AUDIO = tuple(f"0000:{bus:02x}:00.1" for bus in range(1, 9))
EDU_ROOT = "0000:00:09.0"  # an edu device on pcie.0: the one whose AMD faults name it
EDU_PORT = "0000:09:00.0"  # one behind a root port, with eight cards


_CODE = Path(__file__).parent / "guest_code"
_MARGIN = 60.0  # added to a command's own limit before the guest counts as dead


class Result(NamedTuple):
    """A command's exit status (negative: by that signal; 124: did not end in time) and all that it wrote."""

    status: int
    out: str


class Guest:
    """A running guest. Every method raises ``GuestDeadError`` with the serial console's tail where it does not answer."""

    def __init__(self) -> None:
        self._channel: Channel | None = None

    def serial_tail(self, characters: int = 3000) -> str:
        raise NotImplementedError

    # Commands

    def run(self, command: str, timeout: float = 60) -> Result:
        """A bash command, as root. What does not end in time is killed, and left behind if that does not help."""
        return self._run(["/bin/bash", "-c", command], timeout)

    def check(self, command: str, timeout: float = 60) -> str:
        """``run`` with an asserted status of 0; what it wrote."""
        status, out = self.run(command, timeout)
        assert status == 0, f"in the guest: {command}\nended with status {status}:\n{out}\n{self.log_tail()}"
        return out

    def python(self, code: str, *argv: str, timeout: float = 60) -> str:
        """A Python program with an asserted status of 0; what it wrote."""
        status, out = self._run(["/usr/bin/python3", "-c", code, *argv], timeout)
        assert status == 0, f"in the guest: python with {argv} ended with status {status}:\n{out}"
        return out

    def spawn(self, argv: list[str], *, ready: str = "", timeout: float = 60) -> int:
        """Start a program (absolute path) and leave it running: its pid. With ``ready``: once it has written that."""
        answer = self._ask("spawn", timeout, argv=argv, ready=ready, timeout=timeout)
        assert "pid" in answer, (
            f"in the guest: {argv[:2]} was not ready within {timeout:g}s: {answer['error']}"
        )
        return int(answer["pid"])

    def spawn_code(self, name: str, *argv: str, timeout: float = 60) -> int:
        """Start ``guest_code/NAME.py``, which writes "ready" once it holds what it shall hold: its pid."""
        code = (_CODE / f"{name}.py").read_text()
        return self.spawn(["/usr/bin/python3", "-SE", "-c", code, *argv], ready="ready", timeout=timeout)

    def output(self, pid: int) -> tuple[int | None, str]:
        """Status (None: it lives) and output of a spawned program."""
        answer = self._ask("output", 10, pid=pid)
        return answer["status"], answer["out"]

    def _run(self, argv: list[str], timeout: float) -> Result:
        answer = self._ask("run", timeout, argv=argv, timeout=timeout)
        return Result(int(answer["status"]), str(answer["out"]))

    def _ask(self, action: str, limit: float, **request: Any) -> dict[str, Any]:
        assert self._channel is not None, "the virtual machine is not running"
        with self._dead(f"{action} {request}"[:500]):
            return self._channel.ask(action, limit + _MARGIN, **request)

    def _dead(self, doing: str) -> "_Dead":
        return _Dead(self, doing)

    # Files

    def put(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        """Write a whole file, its parents made."""
        data = content.encode() if isinstance(content, str) else content
        self._ask("put", 30, path=path, data=base64.b64encode(data).decode(), mode=mode)

    def get(self, path: str) -> bytes:
        """A whole file. Raises the guest's OSError."""
        return base64.b64decode(self._ask("get", 30, path=path)["data"])

    def read(self, path: str) -> str:
        """A text without its last newline, as of sysfs. Raises the guest's OSError."""
        return self.get(path).decode().rstrip("\n")

    def write(self, path: str, text: str, timeout: float = 30) -> None:
        """One write to an existing file, as sysfs wants it. Raises the guest's OSError, or TimeoutError (still writing)."""
        answer = self._ask("write", timeout, path=path, text=text, timeout=timeout)
        if answer["status"] == 124:
            raise TimeoutError(f"writing {text!r} to {path}: {answer['out']}")
        if answer["status"] != 0:
            number = int(answer["out"].split()[-1])
            raise OSError(number, os.strerror(number), path)

    def names(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern."""
        return [str(name) for name in self._ask("names", 30, pattern=pattern)["names"]]

    # PCI

    def links(self, addresses: Iterable[str] = (*GPUS, *AUDIO)) -> dict[str, str | None]:
        """The driver of each function, by one request."""
        paths = {f"{PCI}/{address}/driver": address for address in addresses}
        found: Mapping[str, str | None] = self._ask("links", 30, paths=list(paths))["links"]
        return {paths[path]: name for path, name in found.items()}

    def driver(self, address: str) -> str | None:
        return self.links([address])[address]

    def override(self, address: str) -> str:
        """driver_override; "" when unset."""
        return self.read(f"{PCI}/{address}/driver_override").replace("(null)", "")

    def group(self, address: str) -> str | None:
        """Its IOMMU group's number; None without IOMMU."""
        path = f"{PCI}/{address}/iommu_group"
        number: str | None = self._ask("links", 30, paths=[path])["links"][path]
        return number

    def group_type(self, address: str) -> str:
        return self.read(f"{GROUPS}/{self.group(address)}/type")

    def bind(self, address: str, driver: str) -> None:
        """Override, unbind, probe: as an operator's script would, without any of the agent's care."""
        self.write(f"{PCI}/{address}/driver_override", driver)
        if self.driver(address) is not None:
            self.write(f"{PCI}/{address}/driver/unbind", address)
        self.write("/sys/bus/pci/drivers_probe", address)

    def start_unbind(self, address: str) -> int:
        """Write its driver's unbind file in a process of its own: the pid."""
        line = f"echo {address} > {PCI}/{address}/driver/unbind"
        return self.spawn(["/bin/bash", "-c", line])

    def module_parameter(self, name: str, value: str, module: str = "nvidia") -> None:
        self.write(f"/sys/module/{module}/parameters/{name}", value)

    def forge_kernel_line(self, line: str) -> None:
        """A line of the kernel log that the kernel had no reason to write: say so where it is used."""
        self.module_parameter("say", f"{line}\n")

    def dma(self, address: str, bus_address: int, direction: str = "read", times: int = 1) -> None:
        """Let an edu device read or write memory at ``bus_address``; one that is not mapped makes a page fault.

        The kernel limits how often it tells of them: leave 5 s between faults.
        """
        self.python((_CODE / "dma.py").read_text(), address, hex(bus_address), direction, str(times))

    # Processes and logs

    def hold(self, *paths: str) -> int:
        """A process that keeps these files open: its pid."""
        return self.spawn_code("hold_path", *paths)

    def hold_vfio(self, address: str, level: str = "device") -> int:
        """A process that has a function on vfio-pci open as a group, a container or a device: its pid."""
        return self.spawn_code("hold_vfio", address, level)

    def release(self, pid: int) -> None:
        """SIGKILL a holder and wait for its end."""
        self.check(f"kill -KILL {pid}")
        self.wait_for(lambda: self.output(pid)[0] is not None, f"pid {pid} to end")

    def task_state(self, pid: int) -> tuple[str, str]:
        """Its state letter (proc(5)) and the kernel function in which it sleeps; ("", "") where it is gone."""
        try:
            state = self.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
            return state, self.read(f"/proc/{pid}/wchan")
        except OSError:
            return "", ""

    def kernel_log(self) -> list[str]:
        """The kernel log of this boot, without times."""
        return self.check("dmesg --notime").splitlines()

    def log_tail(self, lines: int = 30) -> str:
        """The end of the guest's journal, for a failure's message."""
        return self.run(f"journalctl --no-pager -n {lines}").out

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Ask until it is so. Fails with the guest's journal after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"waited {timeout:g}s for {what}\n{self.log_tail()}"
            time.sleep(0.2)


class _Dead:
    """Turns silence and broken connections into ``GuestDeadError`` with the serial console's tail."""

    def __init__(self, guest: Guest, doing: str) -> None:
        self._guest, self._doing = guest, doing

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, EOFError | TimeoutError | ConnectionError):
            raise GuestDeadError(f"{self._doing}: {error}\n{self._guest.serial_tail()}") from error

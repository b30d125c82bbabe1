"""A virtual machine with a real Linux, a real systemd and stand-in GPUs.

    with VirtualMachine(iommu="amd") as vm:
        status, out = vm.run("agent plan --host real")     # bash; bounded; never raises for a status
        out = vm.check("agent observe --host real -o json") # the same, and the status must be 0
        vm.write(f"{PCI}/{GPUS[0]}/driver_override", "vfio-pci")
        pid = vm.hold("/dev/nvidia0")                       # a process that keeps it open
        vm.reboot(append="iommu=pt")                        # the disk is kept with persist=True only

The cards are emulated and so is the driver "nvidia" (``kernel/nvidia.c``); PCI, IOMMU, VFIO, udev and systemd are the
real ones. It runs without hardware acceleration: a process start takes about 0.1 s, Python's 1 s, a boot 10 s.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from tests.system.vm.channel import Channel, GuestDeadError, ask_qemu
from tests.system.vm.guest import AUDIO, EDU_PORT, EDU_ROOT, GPUS, GROUPS, PCI, Guest, Result
from tests.system.vm.image import payload
from tests.system.vm.needed import need_hardware, needed_image
from tests.system.vm.qemu import (
    Hardware,
    HardwareOptions,
    arguments,
    card_functions,
    kernel_command_line,
    program,
)

__all__ = ["AUDIO", "EDU_PORT", "EDU_ROOT", "GPUS", "GROUPS", "PCI", "Result", "VirtualMachine"]

_BOOT = 300.0  # seconds; 10 are usual, more where other work has the processors


class VirtualMachine(Guest):
    """One guest. Not started by its making: ``start``, or use it as a context manager, which also removes it.

    ``append`` is added to the kernel's command line. ``persist``: the disk lives as long as this object, through
    ``reboot`` and ``stop``/``start``; else each start has a fresh one. ``edu_cards``: edu devices have the cards'
    identity, too, and can be told to do DMA. ``over``: a tar archive for the guest's root, in place of ``image.payload``'s.
    The rest is ``Hardware``'s.

    Its making skips the test (in CI: fails it) where this machine cannot run one.
    Every method that talks to the guest raises ``GuestDeadError`` with the serial console's tail where it is dead.
    """

    def __init__(
        self,
        *,
        append: str = "",
        persist: bool = False,
        edu_cards: bool = False,
        over: Path | None = None,
        **hardware: Unpack[HardwareOptions],
    ) -> None:
        super().__init__()
        self.hardware = Hardware(**hardware)
        self.append = append
        self.boot_seconds = 0.0  # the last boot: from QEMU's start until systemd had nothing left to do
        self._image = image = needed_image()
        need_hardware(self.hardware)
        self._over = over
        self._always = "gpu_tests.edu_cards" if edu_cards else ""
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-host-agent-vm-"))
        self._root = image.root
        if persist:
            self._root = self._folder / "root.ext4"
            subprocess.run(
                ["cp", "--sparse=always", "--reflink=auto", str(image.root), str(self._root)], check=True
            )
        self._qemu: subprocess.Popen[bytes] | None = None

    # Life

    def start(self) -> Self:
        """Boot, and wait until systemd and udev have settled."""
        begun = time.monotonic()
        for leftover in ("serial.log", "channel", "qmp"):
            (self._folder / leftover).unlink(missing_ok=True)
        begin, environment = program(self.hardware)
        rest = arguments(self.hardware, self._image, self._root, self._over or payload(), self._folder)
        line = kernel_command_line(f"{self._always} {self.append}")
        # It must not outlive the tests, however they end.
        guarded = ["nice", "setpriv", "--pdeathsig", "KILL"]
        with (self._folder / "qemu.log").open("wb") as log:
            self._qemu = subprocess.Popen(
                [*guarded, *begin, *rest, "-append", line],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        with self._dead("boot"):
            self._channel = Channel(self._folder / "channel", _BOOT, self.alive)
        self.run("systemctl is-system-running --wait; udevadm settle", _BOOT)
        self.boot_seconds = time.monotonic() - begun
        return self

    def alive(self) -> bool:
        """QEMU runs; of the guest inside this says nothing."""
        return self._qemu is not None and self._qemu.poll() is None

    def stop(self) -> None:
        """End QEMU at once, as a power cut would."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
            self._qemu = None

    def reboot(
        self, command: str = "systemctl reboot", *, append: str | None = None, timeout: float = 120
    ) -> Self:
        """Have the guest reboot itself by ``command``, and boot it again, with another ``append`` if one is given."""
        if append is not None:
            self.append = append
        if not self.leave(command, timeout):
            raise GuestDeadError(f"{command} did not end the guest within {timeout:g}s\n{self.serial_tail()}")
        return self.start()

    def leave(self, command: str, timeout: float) -> bool:
        """Run a ``command`` that reboots or powers off; whether the machine then went down in time."""
        assert self._qemu is not None, "the virtual machine is not running"
        with contextlib.suppress(GuestDeadError):  # it may be gone before it has answered
            self.spawn(["/bin/bash", "-c", command])
        try:
            self._qemu.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self.stop()
        return True

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it and remove its files."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def serial_tail(self, characters: int = 3000) -> str:
        """The end of the serial console, and what QEMU itself said."""
        said = ""
        for name in ("qemu.log", "serial.log"):
            path = self._folder / name
            if path.exists():
                said += f"--- {name}\n{path.read_text(errors='replace')[-characters:]}\n"
        return said

    # Hot plug

    def unplug(self, number: int) -> None:
        """Press the slot's button: the kernel lets go of card ``number``, powers the slot off, and it is gone. Takes 5 s."""
        self.qmp("device_del", id=f"gpu{number}")
        # The slot is powered off, and QEMU's device gone, some time after the kernel's.
        self.wait_for(lambda: not self._plugged(number), f"card {number} to be gone")

    def _plugged(self, number: int) -> bool:
        devices = {device["name"] for device in self.qmp("qom-list", path="/machine/peripheral")}
        return bool(devices & {f"gpu{number}", f"audio{number}"})

    def plug(self, number: int) -> None:
        """Push card ``number`` in again and wait until the kernel has found it."""
        for function in reversed(card_functions(number)):
            self.qmp("device_add", **function)
        self.wait_for(lambda: bool(self.names(f"{PCI}/{GPUS[number]}")), f"card {number} to be found")

    def qmp(self, execute: str, **arguments: Any) -> Any:
        """One command of QEMU's own protocol. Raises ValueError where QEMU refuses."""
        with self._dead(execute):
            return ask_qemu(self._folder / "qmp", execute, arguments)

"""What the kernel itself holds of a function's driver: consoles, and modules that are used on top of it."""

from pathlib import Path
from typing import TypeVar

from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.observation import Holder
from agent.host.reading import names_in, read_int, read_link_name

T = TypeVar("T")

# nvidia's own parts hold its use count merely by being loaded; only their users tell something.
_HARMLESS_USERS = ("nvidia_uvm", "nvidia_modeset")


class KernelHolders:
    """Of one function. ``unseen``: why there may be more; "" where there are not."""

    def __init__(self, root: Path, address: str, *, on_nvidia: bool) -> None:
        """Raises OSError."""
        self._root = root
        self._device = root / "sys/bus/pci/devices" / address
        self._address = address
        self.unseen = ""
        self.found = [*self._consoles(), *(self._module_users() if on_nvidia else ())]

    def _consoles(self) -> list[Holder]:
        driver = read_link_name(self._device / "driver")
        if isinstance(driver, Absent) or driver == Known("vfio-pci"):
            return []
        if on := self._framebuffers():
            return [Holder("console", f"the console on {fb}") for fb in on]
        is_boot_display = self._seen(read_int(self._device / "boot_vga"), 0) == 1
        return [Holder("console", "the boot console (boot_vga)")] if is_boot_display else []

    def _framebuffers(self) -> list[str]:
        graphics = self._root / "sys/class/graphics"
        owners = {
            name: self._seen(read_link_name(graphics / name / "device"), "") for name in names_in(graphics)
        }
        return [name for name, owner in owners.items() if owner == self._address]

    def _module_users(self) -> list[Holder]:
        """Modules on top of nvidia that are themselves in use: nvidia_drm by a console, nvidia_peermem by a transfer."""
        modules = self._root / "sys/module"
        names = {"nvidia_drm", *names_in(modules / "nvidia/holders")} - set(_HARMLESS_USERS)
        uses = {name: self._seen(read_int(modules / name / "refcnt"), 0) for name in sorted(names)}
        return [Holder("module", f"{name} (use count {count})") for name, count in uses.items() if count > 0]

    def _seen(self, fact: Fact[T], otherwise: T) -> T:
        if isinstance(fact, Unknown):
            self.unseen = self.unseen or f"what the kernel holds cannot be seen: {fact.reason}"
            return otherwise
        return value_or(fact, otherwise)

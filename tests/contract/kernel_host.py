"""A guest's card, unit and files as every test of the contract finds them, made so by the kernel's and systemd's own means."""

import shutil
import subprocess
from pathlib import Path

from tests.contract.target_contract import FOLDER, UNIT_FILE

GPU = "0000:01:00.0"
_PCI = Path("/sys/bus/pci")
_UNITS = Path("/etc/systemd/system")
_OVERRIDE = _PCI / "devices" / GPU / "driver_override"
_DRIVER = _PCI / "devices" / GPU / "driver"


def log_line(line: str) -> None:
    """Forged: the kernel writes it, by the stand-in driver, and had no reason to."""
    Path("/sys/module/nvidia/parameters/say").write_text(f"{line}\n")


def put_back(unit: str) -> None:
    """The card is on nvidia without an override; the unit is as it was written, and does not run."""
    _OVERRIDE.write_text("\n")
    if not _DRIVER.exists() or _DRIVER.readlink().name != "nvidia":
        if _DRIVER.exists():
            (_DRIVER / "unbind").write_text(GPU)
        (_PCI / "drivers_probe").write_text(GPU)
    Path(f"/proc/driver/nvidia/gpus/{GPU}/persistence").write_text("0")
    shutil.rmtree(FOLDER, ignore_errors=True)
    # An unbind's unit stays, so that its outcome can be read.
    for verb in ("stop", "reset-failed"):
        _systemctl(verb, "gpu-host-agent-unbind-*", unit)
    written, drop_ins = _UNITS / unit, _UNITS / f"{unit}.d"
    if drop_ins.exists() or not written.exists():
        shutil.rmtree(drop_ins, ignore_errors=True)
        written.write_text(UNIT_FILE)
        wanted = _UNITS / "multi-user.target.wants" / unit
        wanted.unlink(missing_ok=True)
        wanted.symlink_to(written)
        subprocess.run(["systemctl", "daemon-reload"], check=True, timeout=60)


def _systemctl(verb: str, *names: str) -> None:
    """Of what is not there systemctl complains, and that is fine here."""
    subprocess.run(["systemctl", verb, *names], capture_output=True, check=False, timeout=60)

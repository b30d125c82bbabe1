"""Where everything lives. ``--root DIR`` moves all of it under DIR. Only the standard library: ``status`` is fast."""

import os
from dataclasses import dataclass
from pathlib import Path

ETC_SPEC = Path("/etc/gpu-host-agent/spec.yaml")
# The RuntimeDirectory of the unit, which outlives the agent: a lock file that came and went would lock nothing.
HOST_LOCK = Path("/run/gpu-host-agent/host.lock")
NVIDIA_VENDOR = "0x10de"


@dataclass(frozen=True, slots=True)
class Paths:
    root: Path
    spec: Path

    @property
    def state(self) -> Path:
        return self.root / "var/lib/gpu-host-agent"

    @property
    def run(self) -> Path:
        return self.root / "run/gpu-host-agent"

    @property
    def status(self) -> Path:
        return self.run / "status.json"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def world(self) -> Path:
        """The simulated host's own state: it goes on between commands as a machine would."""
        return self.root / "sim/world.json"


def choose_host(choice: str) -> tuple[str, str]:
    """("real", "") or ("sim", profile or ""). ``auto`` is simulated only where nothing could be mistaken for a GPU host.

    Without a profile, a simulated host that exists already stays what it is.
    """
    kind, _, profile = choice.partition(":")
    if kind == "real":
        return "real", ""
    if kind == "sim":
        return "sim", profile
    if ETC_SPEC.exists() or has_nvidia_device():
        return "real", ""
    return "sim", ""


def has_nvidia_device(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Any PCI function by NVIDIA. What cannot be read might be one, so it counts."""
    try:
        entries = list(devices.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    for entry in entries:
        try:
            if (entry / "vendor").read_text().strip() == NVIDIA_VENDOR:
                return True
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def paths_for(root: str | None, spec: str | None, kind: str) -> Paths:
    where = Path(root) if root else (_simulated_root() if kind == "sim" else Path("/"))
    return Paths(where, Path(spec) if spec else where / ETC_SPEC.relative_to("/"))


def _simulated_root() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "gpu-host-agent/simulated"

"""Golden cases of the settings through NVML."""

from typing import Any

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.observation import Holder
from agent.core.quantity import UNLOCKED
from tests.core import build
from tests.core.build import FIRST, Change, audio_of, spec, type_host

GPU = FIRST[0]


def one(settings: dict[str, Any], *changes: Change) -> Inputs:
    """One idle card that stays on nvidia."""
    host = spec(gpus={"inference": {"select": [GPU], "driver": "nvidia", "settings": settings}})
    return type_host(host, build.idle(GPU, audio_of(GPU)), *changes)


BOTH = {"persistenceMode": True, "powerLimit": "450W"}
LOCK = {
    "persistenceMode": True,
    "lockedGraphicsClocks": "300-2000MHz",
    "lockedMemoryClocks": "9001MHz",
}
USED = build.held(GPU, Holder("process", "/dev/nvidia0", pid=42, command="python3"))


def locked(graphics: Fact[tuple[int, int]], memory: Fact[tuple[int, int]] = Known((9001, 9001))) -> Change:
    on = Known(value=True)
    return build.gpu_with(
        GPU, persistence_mode=on, locked_graphics_clocks=graphics, locked_memory_clocks=memory
    )


KEPT = locked(Known((300, 2000)))


def switched(name: str, *, now: bool, pending: bool) -> Change:
    return build.gpu_with(GPU, **{f"{name}_mode": Known(now), f"{name}_pending": Known(pending)})


CASES: dict[str, Inputs] = {
    "nothing-to-do": one(
        BOTH, build.gpu_with(GPU, persistence_mode=Known(value=True), power_limit=Known(450))
    ),
    "nothing-is-asked": one({}),
    "both-wrong": one(BOTH),
    "persistence-mode-to-be-off": one(
        {"persistenceMode": False}, build.gpu_with(GPU, persistence_mode=Known(value=True))
    ),
    "power-limit-out-of-range": one({"powerLimit": "700W"}),
    "power-limit-not-supported": one(
        {"powerLimit": "450W"}, build.gpu_with(GPU, power_limit=Absent("not supported"))
    ),
    "power-limit-unreadable": one(
        {"powerLimit": "450W"}, build.gpu_with(GPU, power_limit=Unknown("timeout"))
    ),
    "power-range-unreadable": one(
        {"powerLimit": "700W"}, build.gpu_with(GPU, power_limit_range=Unknown("timeout"))
    ),
    "gpu-lost": one(BOTH, build.nvml_of(GPU, Unknown("GPU is lost", "GpuLost"))),
    "nvml-fails": one(BOTH, lambda i: build.with_obs(i, nvml=Unknown("driver/library version mismatch"))),
    "not-yet-on-nvidia": one(BOTH, build.on("vfio-pci", GPU)),
    "out-of-reach": one(BOTH, build.pending(GPU)),
    "clocks-as-locked": one(LOCK, KEPT),
    "clocks-to-be-locked-once-persistence-mode-is-on": one(LOCK),
    "clocks-locked-otherwise": one({**LOCK, "lockedGraphicsClocks": "1500MHz"}, KEPT),
    "clocks-to-be-unlocked": one({"lockedGraphicsClocks": "unlocked"}, KEPT),
    "clocks-unlocked": one({"lockedGraphicsClocks": "unlocked"}, locked(Known(UNLOCKED))),
    "clocks-unreadable": one(LOCK, locked(Unknown("timeout", "NvmlTimeout"))),
    "ecc-to-be-on": one({"ecc": True}, switched("ecc", now=False, pending=False)),
    "ecc-waits-for-a-reset": one({"ecc": True}, switched("ecc", now=False, pending=True)),
    "ecc-to-be-taken-back-before-the-reset": one({"ecc": False}, switched("ecc", now=False, pending=True)),
    "ecc-as-specified": one({"ecc": False}, switched("ecc", now=False, pending=False)),
    "ecc-not-supported": one(
        {"ecc": True}, build.gpu_with(GPU, ecc_mode=Absent("no ECC"), ecc_pending=Absent("no ECC"))
    ),
    "compute-mode-wrong": one(
        {"computeMode": "exclusiveProcess"}, build.gpu_with(GPU, compute_mode=Known("default"))
    ),
    "mig-of-an-idle-card": one({"mig": True}, switched("mig", now=False, pending=False)),
    "mig-of-a-card-in-use": one({"mig": False}, switched("mig", now=True, pending=True), USED),
    "mig-where-nobody-can-tell-who-holds-it": one(
        {"mig": False},
        switched("mig", now=True, pending=True),
        build.holders_are(GPU, Unknown("/proc cannot be read", "HoldersUnknown")),
    ),
    "mig-waits-for-a-reset": one({"mig": False}, switched("mig", now=True, pending=False)),
    "failed-before-and-waiting": one(
        BOTH, build.with_memory(retry_after={f"gpu-settings/power-limit/{GPU}": build.NOW + 40})
    ),
}

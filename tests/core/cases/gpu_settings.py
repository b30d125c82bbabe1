"""Golden cases of the settings through NVML."""

from typing import Any

from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from tests.core import build
from tests.core.build import FIRST, Change, audio_of, spec, type_host

GPU = FIRST[0]


def one(settings: dict[str, Any], *changes: Change) -> Inputs:
    """One idle card that stays on nvidia."""
    host = spec(gpus={"inference": {"select": [GPU], "driver": "nvidia", "settings": settings}})
    return type_host(host, build.idle(GPU, audio_of(GPU)), *changes)


BOTH = {"persistenceMode": True, "powerLimit": "450W"}
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
    "failed-before-and-waiting": one(
        BOTH, build.with_memory(retry_after={f"gpu-settings/power-limit/{GPU}": build.NOW + 40})
    ),
}

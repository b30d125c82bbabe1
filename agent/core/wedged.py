"""A GPU that computes for nobody: what a hung kernel leaves behind when its process is gone.

NVML then says 100 % busy, no process and hardly any memory. One such reading is nothing: the figure is an average that
outlives a process by up to a second. It counts once it has been so for a while, over at least two observations.
"""

from collections.abc import Mapping

from agent.core.fact import Absent, Fact, Known, value_or
from agent.core.observation import Gpu, Observation

WEDGED_AFTER = 60.0  # seconds
# Daemons that keep a GPU open and compute nothing on it, as /proc/PID/comm has them.
_ONLY_WATCH = {"nvidia-persiste", "nv-hostengine"}
IDLE_MEMORY_MIB = 2048  # a GPU without processes holds less than this


def computes_for_nobody(gpu: Gpu) -> bool:
    """What is not known speaks for work, and never for a fault."""
    used = value_or(gpu.memory_used, IDLE_MEMORY_MIB + 1)
    on_it = [pids for pids in (gpu.pids, gpu.graphics_pids) if value_or(pids, ())]
    return (
        gpu.pids == Known(())
        and not on_it
        and used <= IDLE_MEMORY_MIB
        and value_or(gpu.utilization, 0) >= 100
    )


def busy_alone(known: Mapping[str, float], obs: Observation, now: float) -> dict[str, float]:
    """Since when each GPU has been so; a GPU that cannot be read now keeps what is known of it."""
    if not isinstance(obs.nvml, Known):
        return dict(known)
    since = {}
    for address, gpu in obs.nvml.value.gpus.items():
        if not isinstance(gpu, Known):
            if address in known:
                since[address] = known[address]
        elif computes_for_nobody(gpu.value) and not _held(address, obs):
            since[address] = known.get(address, now)
    return since


def _held(address: str, obs: Observation) -> bool:
    """By a process that NVML does not show: of another container, or of the driver's own library as it ends."""
    holders = obs.holders.get(address)
    return isinstance(holders, Known) and any(
        h.kind in {"process", "vm"} and h.command not in _ONLY_WATCH for h in holders.value
    )


def is_wedged(address: str, since: Mapping[str, float], now: float) -> bool:
    return address in since and now - since[address] >= WEDGED_AFTER


def way_out(resets: Fact[tuple[str, ...]]) -> str:
    """What ends it, by what this card can do. ``resets``: the reset methods of its PCI function."""
    if isinstance(resets, Absent) or resets == Known(()):
        return "reboot the host when it suits you: this card offers no reset"
    return (
        "reset it when it suits you: stop everything that has this GPU open, then nvidia-smi --gpu-reset -i with its "
        "address; where that is refused or does not help, reboot the host. Then agent retry SERVICE"
    )

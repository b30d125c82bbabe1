"""What NVML says, for people: a few lines for each GPU."""

from collections.abc import Mapping
from typing import Any

from agent.app.observe_text import Row, tell
from agent.app.terminal import Style, escape
from agent.core.fact import Fact, Known, Unknown
from agent.core.gpu_facts import P2PCapability
from agent.core.observation import NOT_TOLD, Gpu, Nvml
from agent.core.quantity import say_clocks


def nvml_rows(seen: Nvml, style: Style) -> list[Row]:
    facts: dict[str, Fact[Any]] = {
        "driver": seen.driver_version, "NVML": seen.nvml_version, "CUDA": seen.cuda_version,
        "CC mode": seen.confidential_compute,
    }  # fmt: skip
    rows = [(name, tell(fact, style)) for name, fact in facts.items()]
    for address, gpu in sorted(seen.gpus.items()):
        rows += _gpu(gpu.value, style) if isinstance(gpu, Known) else [(address, tell(gpu, style))]
    return rows


def _gpu(gpu: Gpu, style: Style) -> list[Row]:
    first = (
        f"{tell(gpu.name, style)}, {tell(gpu.uuid, style)}, index {gpu.index}, minor {tell(gpu.minor, style)}"
    )
    power, limits = tell(gpu.power_limit, style, "{} W".format), tell(gpu.power_limit_range, style, _range)
    bar1, busy = tell(gpu.bar1_total, style, "{} MiB".format), tell(gpu.utilization, style, "{} %".format)
    ecc, mig = _pending(gpu.ecc_mode, gpu.ecc_pending, style), _pending(gpu.mig_mode, gpu.mig_pending, style)
    lines = [
        f"serial {tell(gpu.serial, style)}, VBIOS {tell(gpu.vbios, style)}",
        f"power limit {power} (range {limits}), persistence mode {tell(gpu.persistence_mode, style)}",
        f"clocks held down by: {tell(gpu.clock_reasons, style, _reasons)}",
        f"graphics clock {_clock(gpu.graphics_clock, gpu.locked_graphics_clocks, style)}",
        f"memory clock {_clock(gpu.memory_clock, gpu.locked_memory_clocks, style)}",
        f"ECC {ecc}, MIG {mig}, compute mode {tell(gpu.compute_mode, style)}",
        f"memory {tell(gpu.memory_used, style)} of {tell(gpu.memory_total, style)} MiB, BAR1 {bar1}, busy {busy}",
        f"recovery action {tell(gpu.recovery_action, style)}, remapped rows: {tell(gpu.remapped_rows, style)}",
        f"processes {tell(gpu.pids, style)}, graphics processes {tell(gpu.graphics_pids, style)}",
        f"{_link(gpu, style)}, packets sent again {tell(gpu.replays, style)}",
        *_peers(gpu.p2p, style),
    ]
    return [(gpu.address, first), *(("", line) for line in lines)]


def _clock(now: Fact[int], locked: Fact[tuple[int, int]], style: Style) -> str:
    untold = isinstance(locked, Unknown) and locked.code == NOT_TOLD
    return f"{tell(now, style, '{} MHz'.format)}, locked: {'not told' if untold else tell(locked, style, say_clocks)}"


def _link(gpu: Gpu, style: Style) -> str:
    now, most = (f"{tell(gpu.link_gen, style)}", f"{tell(gpu.max_link_gen, style)}")
    return f"link gen {now} of {most}, x{tell(gpu.link_width, style)} of x{tell(gpu.max_link_width, style)}"


def _reasons(reasons: tuple[str, ...]) -> str:
    return ", ".join(reasons) or "nothing"


def _range(limits: tuple[int, int]) -> str:
    return f"{limits[0]} to {limits[1]} W"


def _pending(now: Fact[bool], after: Fact[bool], style: Style) -> str:
    told = tell(now, style, _switch)
    return told if now == after else f"{told} ({tell(after, style, _switch)} after the next reset)"


def _switch(on: bool) -> str:
    return "on" if on else "off"


def _peers(p2p: Fact[Mapping[str, P2PCapability]], style: Style) -> list[str]:
    """Peers of which NVML says the same stand together. It is its opinion, not a measurement."""
    if not isinstance(p2p, Known):
        return [f"P2P by NVML: {tell(p2p, style)}"]
    alike: dict[str, list[str]] = {}
    for peer, way in sorted(p2p.value.items()):
        told = ", ".join(f"{use} {tell(getattr(way, use), style)}" for use in ("read", "write", "atomics"))
        alike.setdefault(told, []).append(peer)
    return [f"P2P by NVML, not proved: {told}: to {escape(' '.join(peers))}" for told, peers in alike.items()]

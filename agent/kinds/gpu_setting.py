"""The settings of a GPU that a spec can name: one entry of ``SETTINGS`` each."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.core.fact import Fact, Known, say, value_or
from agent.core.inputs import Inputs
from agent.core.observation import Gpu
from agent.core.plan import Disruption
from agent.core.quantity import parse_clocks, say_clocks
from agent.core.spec import GpuSettings


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a setting cannot be made now."""

    reason: str
    message: str
    next_step: str
    terminal: bool = False


def _none(_address: str, _value: str, _gpu: Gpu, _inputs: Inputs) -> Obstacle | None:
    return None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, in words: ``name`` and the values are those of ``NvmlPort.set``.

    ``read`` tells what was accepted. Where that works only from the next reset of the GPU on, ``works`` tells what
    does so already. ``obstacle`` says why a value cannot be set now.
    """

    name: str
    wanted: Callable[[GpuSettings], str | None]
    read: Callable[[Gpu], Fact[str]]
    predict: Callable[[Gpu, str], Gpu]
    unit: str = ""
    note: str = ""  # what else the action's description says
    works: Callable[[Gpu], Fact[str]] | None = None
    disruption: Disruption = Disruption.LIVE
    obstacle: Callable[[str, str, Gpu, Inputs], Obstacle | None] = _none
    needs_persistence: str = ""  # what is forgotten without it


def _in_range(address: str, value: str, gpu: Gpu, _inputs: Inputs) -> Obstacle | None:
    low, high = value_or(gpu.power_limit_range, (0, 1 << 30))
    if low <= int(value) <= high:
        return None
    message = f"power limit {value} W of {address} is outside what the card allows, {low} to {high} W"
    return Obstacle("OutOfRange", message, "correct powerLimit in the spec", terminal=True)


def _idle(address: str, value: str, _gpu: Gpu, inputs: Inputs) -> Obstacle | None:
    """A change of MIG mode takes every context off the GPU: it waits until there is none."""
    holders = inputs.obs.holders_of(address)
    if not isinstance(holders, Known):
        message = (
            f"mig of {address} is set to {value} only while nothing holds it, and who does is {say(holders)}"
        )
        return Obstacle("HoldersUnknown", message, "wait for the next pass")
    users = [h for h in holders.value if h.kind != "persistence"]
    if not users:
        return None
    message = f"mig of {address} is set to {value} only while nothing holds it: {users[0].describe()}"
    return Obstacle("Held", message, "stop it when it suits you; the mode is then set by itself")


def _switch(wanted: bool | None) -> str | None:
    return None if wanted is None else "on" if wanted else "off"


def _switched(fact: Fact[bool]) -> Fact[str]:
    return Known("on" if fact.value else "off") if isinstance(fact, Known) else fact


def _clocks(wanted: tuple[int, int] | None) -> str | None:
    return None if wanted is None else say_clocks(wanted)


def _said_clocks(fact: Fact[tuple[int, int]]) -> Fact[str]:
    return Known(say_clocks(fact.value)) if isinstance(fact, Known) else fact


def _after_idle_change(gpu: Gpu, value: str) -> Gpu:
    on = Known(value=value == "on")
    return replace(gpu, mig_mode=on, mig_pending=on)


SETTINGS = (
    Setting(
        "persistence-mode",
        wanted=lambda s: _switch(s.persistence_mode),
        read=lambda g: _switched(g.persistence_mode),
        predict=lambda g, v: replace(g, persistence_mode=Known(value=v == "on")),
        disruption=Disruption.NONE,  # so it comes before what is forgotten without it
    ),
    Setting(
        "power-limit",
        wanted=lambda s: None if s.power_limit is None else str(s.power_limit),
        read=lambda g: Known(str(g.power_limit.value)) if isinstance(g.power_limit, Known) else g.power_limit,
        predict=lambda g, v: replace(g, power_limit=Known(int(v))),
        unit=" W",
        obstacle=_in_range,
        needs_persistence="limit",
    ),
    Setting(
        "locked-graphics-clocks",
        wanted=lambda s: _clocks(s.locked_graphics_clocks),
        read=lambda g: _said_clocks(g.locked_graphics_clocks),
        predict=lambda g, v: replace(g, locked_graphics_clocks=Known(parse_clocks(v))),
        needs_persistence="lock",
    ),
    Setting(
        "locked-memory-clocks",
        wanted=lambda s: _clocks(s.locked_memory_clocks),
        read=lambda g: _said_clocks(g.locked_memory_clocks),
        predict=lambda g, v: replace(g, locked_memory_clocks=Known(parse_clocks(v))),
        needs_persistence="lock",
    ),
    Setting(
        "ecc",
        wanted=lambda s: _switch(s.ecc),
        read=lambda g: _switched(g.ecc_pending),
        works=lambda g: _switched(g.ecc_mode),
        note=", from the next reset of the GPU on",
        predict=lambda g, v: replace(g, ecc_pending=Known(value=v == "on")),
    ),
    Setting(
        "compute-mode",
        wanted=lambda s: s.compute_mode,
        read=lambda g: g.compute_mode,
        predict=lambda g, v: replace(g, compute_mode=Known(v)),
    ),
    Setting(
        "mig",
        wanted=lambda s: _switch(s.mig),
        read=lambda g: _switched(g.mig_pending),
        works=lambda g: _switched(g.mig_mode),
        predict=_after_idle_change,
        disruption=Disruption.REBIND,
        obstacle=_idle,
    ),
)

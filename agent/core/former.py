"""Units that the agent started for a service and that the spec no longer has.

The agent never stops them by itself: the spec that named them is gone, and with it the leave to touch them. Nothing is
started that needs what they use, and they are never passed over in silence. A service that only moved to another unit
and is found running in its old one is no such case: it is restarted in order, like one whose command changed.
"""

import shlex
from dataclasses import dataclass

from agent.core.fact import Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Memory
from agent.core.plan import Refusal
from agent.core.revision import Revision
from agent.core.spec import Spec, target_name

STOPPED = {"inactive", "failed"}


@dataclass(frozen=True, slots=True)
class FormerUnit:
    """``gpus``: PCI addresses. ``service``: the name that the spec had for it; ``removed``: it has no such service now."""

    service: str
    target: str
    unit: str
    gpus: tuple[str, ...]
    port: int
    removed: bool

    @property
    def name(self) -> str:
        return f"{self.unit} in {self.target}"

    @property
    def stop_command(self) -> str:
        stop = f"systemctl disable --now {shlex.quote(self.unit)}"
        kind, _, rest = self.target.partition(":")
        if kind == "lxc":
            return f"pct exec {rest} -- {stop}"
        return f"ssh {rest} {stop}" if kind == "ssh" else stop


def former_units(spec: Spec, memory: Memory) -> tuple[FormerUnit, ...]:
    """Every unit that the memory knows a revision of, without those that the spec has now."""
    now = {(target_name(s.target), s.unit) for s in spec.services.values()}
    found: dict[tuple[str, str], FormerUnit] = {}
    for revision in _revisions(memory):
        place = (revision.target, revision.unit)
        if place not in now:
            removed = revision.service not in spec.services
            former = FormerUnit(revision.service, *place, revision.gpus, revision.port, removed)
            found.setdefault(place, former)
    return tuple(found[place] for place in sorted(found))


def _revisions(memory: Memory) -> list[Revision]:
    """The latest of each service first."""
    names = sorted({*memory.promoted, *memory.previous, *memory.trials})
    trials = [t.revision for n in names if (t := memory.trials.get(n)) is not None]
    kept = [p.revision for n in names for p in (memory.promoted.get(n), memory.previous.get(n)) if p]
    return [*(r for r in trials if r is not None), *kept]


def still_running(inputs: Inputs) -> tuple[FormerUnit, ...]:
    """Those that are not stopped, and that are not the place where a service of the spec was found to run.

    One that cannot be read is not counted where its target cannot be reached: a container that is gone runs nothing,
    and what holds GPUs on this host is found whoever it belongs to.
    """
    found_at = {facts.at for facts in inputs.obs.services.values()}
    return tuple(
        former
        for former in former_units(inputs.spec, inputs.memory)
        if (former.target, former.unit) not in found_at and _runs(former, inputs)
    )


def _runs(former: FormerUnit, inputs: Inputs) -> bool:
    unit = inputs.obs.former_units.get(former.name)
    return isinstance(unit, Known) and unit.value.active_state not in STOPPED


def unreadable(inputs: Inputs) -> tuple[tuple[FormerUnit, str], ...]:
    """Those that cannot be read although their target can be reached, and why."""
    found = []
    for former in former_units(inputs.spec, inputs.memory):
        unit, target = inputs.obs.former_units.get(former.name), inputs.obs.targets.get(former.target)
        reached = target is not None and target.reachable == Known(value=True)
        if isinstance(unit, Unknown) and reached:
            found.append((former, unit.reason))
    return tuple(found)


def former_refusal(former: FormerUnit, name: str) -> Refusal:
    """``name``: the service that cannot be started for it, or its own when it is in nobody's way."""
    uses = ", ".join(former.gpus) or "no GPU"
    message = (
        f"{former.name}, which the agent started for service {former.service} and the spec no longer has, still runs"
        f" and has {uses} and port {former.port}"
    )
    step = f"stop it: {former.stop_command}; or put it back into the spec"
    if former.removed:
        step += (
            f"; or, to keep it as a unit of your own, have the agent forget it: agent retry {former.service}"
        )
    return Refusal("service", name, "FormerUnitRuns", message, step)


def in_the_way(name: str, gpus: tuple[str, ...], target: str, port: int, inputs: Inputs) -> list[Refusal]:
    """Former units that use what this service needs."""
    return [
        former_refusal(former, name)
        for former in still_running(inputs)
        if set(gpus) & set(former.gpus) or (target, port) == (former.target, former.port)
    ]

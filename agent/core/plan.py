"""Drift, actions and plans: what differs, the smallest steps that mend it, and their order."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Disruption(IntEnum):
    """Who notices: nobody; users of a running service a little; a service restart; a driver change; a reboot."""

    NONE = 0
    LIVE = 1
    RESTART = 2
    REBIND = 3
    REBOOT = 4

    def __str__(self) -> str:
        return self.name.lower()


class Stage(IntEnum):
    """Where in a plan an action stands: take away before adding, prove before starting."""

    PREPARE = 0  # preflight, clean-up, rules: costs nobody anything
    STOP = 1  # services and units that stand in the way
    RELEASE = 2  # settings that hold a driver: persistence mode off
    BIND = 3  # drivers
    SET = 4  # settings of GPUs and platform
    PROVE = 5  # the P2P self-test
    START = 6  # trials; units that were stopped come back


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference between the resolved spec and the observation."""

    kind: str
    target: str  # what it is about: an address, a service, "host"
    field: str
    desired: str
    observed: str
    why: str = ""  # provenance of the desired value


@dataclass(frozen=True, slots=True)
class Action:
    """The smallest step that can be journalled, undone and read back.

    ``verb`` and ``params`` are all that ``act`` gets; ``description`` is what people read. ``touches`` are the
    PCI functions or units that it changes: laws and approvals are checked against them. ``hits`` names who
    notices; ``undo`` says how it is taken back.
    """

    kind: str
    verb: str
    target: str
    description: str
    stage: Stage
    disruption: Disruption
    params: Mapping[str, str] = field(default_factory=dict)
    touches: tuple[str, ...] = ()
    hits: tuple[str, ...] = ()
    undo: str = ""
    why: str = ""
    revert: "Action | None" = None  # run when a later action of the plan fails: puts back what only it needed
    optional: bool = (
        False  # later actions do without it: its failure neither ends the plan nor holds them back
    )

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.verb}/{self.target}"

    @property
    def sort_key(self) -> tuple[int, int, str, str, str]:
        return (self.stage, self.disruption, self.kind, self.target, self.verb)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something that drifts is not planned for: a held device, a law, a missing fact, a person's decision."""

    kind: str
    target: str
    reason: str  # CamelCase, for conditions
    message: str
    next_step: str = ""
    terminal: bool = False  # True: only a new spec, a reboot or the operator ends it
    touches: tuple[str, ...] = ()  # of the action that is held back; nothing for what was never an action


@dataclass(frozen=True, slots=True)
class Plan:
    """An ordered set of actions for one generation, what cannot be done, and the drift behind both."""

    generation: int
    actions: tuple[Action, ...] = ()
    drifts: tuple[Drift, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @property
    def disruption(self) -> Disruption:
        return max((a.disruption for a in self.actions), default=Disruption.NONE)

    @property
    def id(self) -> str:
        """Ten hex digits that stand for exactly these actions of this generation."""
        body = [
            [a.kind, a.verb, a.target, sorted(a.params.items()), a.stage, a.disruption] for a in self.actions
        ]
        return hashlib.sha256(json.dumps([self.generation, body]).encode()).hexdigest()[:10]

    def __bool__(self) -> bool:
        return bool(self.actions)


def make_plan(generation: int, actions: list[Action], drifts: list[Drift], refusals: list[Refusal]) -> Plan:
    """A plan in its one order, so that the same input gives the same plan byte for byte."""
    return Plan(
        generation,
        tuple(sorted(actions, key=lambda a: a.sort_key)),
        tuple(sorted(drifts, key=lambda d: (d.kind, d.target, d.field))),
        tuple(sorted(refusals, key=lambda r: (r.kind, r.target, r.reason, r.message))),
    )


def render_plan(plan: Plan) -> str:
    """The plan as people read it; golden files hold this text."""
    lines = [f"plan {plan.id} generation {plan.generation}: " + _headline(plan)]
    lines += [
        f"  drift   {d.kind} {d.target} {d.field}: {d.observed} -> {d.desired}"
        + (f"  ({d.why})" if d.why else "")
        for d in plan.drifts
    ]
    for number, action in enumerate(plan.actions, 1):
        lines.append(f"  {number:>2}. [{action.disruption}] {action.description}")
        lines += [f"      why: {action.why}"] if action.why else []
        lines += [f"      hits: {', '.join(action.hits)}"] if action.hits else []
        lines += [f"      undo: {action.undo}"] if action.undo else []
    lines += [
        f"  refused {r.kind} {r.target}: {r.reason}: {r.message}"
        + (f" Next: {r.next_step}" if r.next_step else "")
        for r in plan.refusals
    ]
    return "\n".join(lines) + "\n"


def _headline(plan: Plan) -> str:
    if not plan.actions and not plan.refusals:
        return "nothing to do"
    count = len(plan.actions)
    parts = [f"{count} action{'s' * (count != 1)}, disruption {plan.disruption}"] if count else []
    refused = len(plan.refusals)
    parts += [f"{refused} refused"] if refused else []
    return ", ".join(parts)

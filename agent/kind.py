"""The Kind protocol, and the pure functions over all kinds.

A kind is one area of desired state with its own file under ``agent/kinds``. Its decisions are pure; ``act`` alone
touches ports, and only the executor calls it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from agent.core.condition import Condition
from agent.core.inputs import Inputs
from agent.core.plan import Action, Drift, Plan, Refusal, make_plan
from agent.core.resolve import Resolved, resolve
from agent.ports import Ports

MODEL_STEPS = 12  # more than any chain of passes a spec can need


class Kind(Protocol):
    """One area of desired state."""

    name: str

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        """Every difference between what is wanted and what is."""
        ...

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        """The actions that mend it now, and what cannot be mended and why."""
        ...

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        """The world after an action of this kind has succeeded: the model that laws and tests walk through."""
        ...

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        """What is true of this area, for status."""
        ...

    async def act(self, action: Action, ports: Ports) -> None:
        """Do it and read it back. Raises TransientError or TerminalError; success is the state, not the exit code."""
        ...


def diff_all(kinds: Sequence[Kind], inputs: Inputs, resolved: Resolved) -> list[Drift]:
    return [drift for kind in kinds for drift in kind.diff(inputs, resolved)]


def plan_all(kinds: Sequence[Kind], inputs: Inputs, resolved: Resolved | None = None) -> Plan:
    """The plan for these inputs: same inputs, same plan, byte for byte."""
    resolved = resolved or resolve(inputs)
    actions: list[Action] = []
    refusals: list[Refusal] = list(resolved.selection.refusals)
    for kind in kinds:
        more, refused = kind.plan(inputs, resolved)
        actions += more
        refusals += refused
    ready, waiting = _hold_back(actions, inputs)
    return make_plan(inputs.generation, ready, diff_all(kinds, inputs, resolved), [*refusals, *waiting])


def _hold_back(actions: Iterable[Action], inputs: Inputs) -> tuple[list[Action], list[Refusal]]:
    """Take out actions that failed and must wait, with everything that shares a device or unit with them.

    Half of such a set must not run: stopping a service for a driver change that is not going to happen helps nobody.
    What only gives back a unit that is stopped already is nobody's half.
    """
    rest = list(actions)
    refusals = [r for a in rest if (r := _waiting(a, inputs)) is not None]
    held = [a for a in rest if must_wait(a, inputs)]
    free = [
        a for a in rest if a not in held and set(a.touches) <= set(inputs.memory.stopped_units) and a.touches
    ]
    touched = {t for a in held for t in a.touches}
    grew = bool(held)
    while grew:
        joined = [a for a in rest if a not in held and a not in free and touched.intersection(a.touches)]
        held += joined
        touched |= {t for a in joined for t in a.touches}
        grew = bool(joined)
    said = {(r.kind, r.target) for r in refusals}
    cause = refusals[0].message if refusals else ""
    refusals += [
        Refusal(a.kind, a.target, "Waiting", f"{a.description}: waits with what it belongs to: {cause}")
        for a in {(a.kind, a.target): a for a in held}.values()
        if (a.kind, a.target) not in said
    ]
    return [a for a in rest if a not in held], refusals


def must_wait(action: Action, inputs: Inputs) -> bool:
    """It failed before, and its time has not come: what only it needs need not be done either."""
    return _waiting(action, inputs) is not None


def _waiting(action: Action, inputs: Inputs) -> Refusal | None:
    terminal = inputs.memory.terminal.get(action.key)
    if terminal is not None:
        step = "mend the cause, then change the spec or run: agent retry " + action.target
        return Refusal(action.kind, action.target, "Failed", terminal, step, terminal=True)
    after = inputs.memory.retry_after.get(action.key, 0.0)
    if inputs.now < after:
        count = inputs.memory.failures.get(action.key, 1)
        why = inputs.memory.errors.get(action.key, "")
        message = (
            f"{action.description}: failed {count} time{'s' * (count != 1)}{f' ({why})' if why else ''},"
            f" tried again in {after - inputs.now:.0f} s"
        )
        step = f"mend the cause, or wait; to try at once: agent retry {action.target}"
        return Refusal(action.kind, action.target, "Backoff", message, step)
    return None


def kind_of(kinds: Sequence[Kind], action: Action) -> Kind:
    return next(kind for kind in kinds if kind.name == action.kind)


def trajectory(kinds: Sequence[Kind], plan: Plan, inputs: Inputs) -> Iterator[tuple[Inputs, Action]]:
    """Each action with the model's state just before it."""
    for action in plan.actions:
        yield inputs, action
        inputs = kind_of(kinds, action).predict(action, inputs)


def converge(kinds: Sequence[Kind], inputs: Inputs) -> tuple[Inputs, Plan]:
    """Apply plans to the model until one has nothing to do (or too many were needed); the last plan tells which."""
    plan = plan_all(kinds, inputs)
    for _ in range(MODEL_STEPS):
        if not plan.actions:
            break
        for action in plan.actions:
            inputs = kind_of(kinds, action).predict(action, inputs)
        inputs = replace(inputs, now=inputs.now + 1.0)
        plan = plan_all(kinds, inputs)
    return inputs, plan

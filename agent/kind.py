"""The Kind protocol, and the pure functions over all kinds.

A kind is one area of desired state with its own file under ``agent/kinds``. Its decisions are pure; ``act`` alone
touches ports, and only the executor calls it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from agent.core.condition import Condition, Truth
from agent.core.inputs import Inputs
from agent.core.plan import Action, Drift, Plan, Refusal, Stage, make_plan
from agent.core.redact import redacted_plan, secret_names
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
    plan = make_plan(inputs.generation, ready, diff_all(kinds, inputs, resolved), [*refusals, *waiting])
    return redacted_plan(plan, secret_names(inputs.spec))


def conditions_all(
    kinds: Sequence[Kind], inputs: Inputs, resolved: Resolved, plan: Plan, blocked: Sequence[Condition] = ()
) -> list[Condition]:
    """What every kind says is true, and ``blocked``, or else one more for what none of them says is amiss."""
    found = {kind.name: kind.conditions(inputs, resolved, plan) for kind in kinds}
    content = {name for name, said in found.items() if all(c.status == "True" for c in said)}
    unsaid = [*blocked] or _unsaid(plan, content)
    return [*(c for said in found.values() for c in said), *unsaid]


def _unsaid(plan: Plan, content: set[str]) -> list[Condition]:
    """A host with a drift or a refusal has not converged, also where the conditions of that area are all True."""
    refusals = [r for r in plan.refusals if r.kind in content]
    drifts = [d for d in plan.drifts if d.kind in content]
    if refusals:
        first = min(refusals, key=_cannot_be_known)
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        status: Truth = "Unknown" if _cannot_be_known(first) else "False"
        return [_converged(status, first.reason, first.message + more, first.next_step)]
    if drifts:
        differs = "; ".join(f"{d.field} of {d.target} is {d.observed}, wanted {d.desired}" for d in drifts)
        return [_converged("False", "Converging", differs, "wait for the next pass; see: agent plan")]
    return []


def _cannot_be_known(refusal: Refusal) -> bool:
    return refusal.reason.endswith("Unknown") or refusal.reason == "NotObserved"


def _converged(status: Truth, reason: str, message: str, step: str) -> Condition:
    return Condition(type="Converged", status=status, reason=reason, message=message, next_step=step)


def _hold_back(actions: Iterable[Action], inputs: Inputs) -> tuple[list[Action], list[Refusal]]:
    """Take out actions that failed and must wait, with everything that shares a device or unit with them.

    Half of such a set must not run: stopping a service for a driver change that is not going to happen helps nobody.
    What only gives back a unit that is stopped already is nobody's half, and neither is a setting: it holds back
    nothing but itself, and waits for nothing else.
    """
    rest = list(actions)
    refusals = [r for a in rest if (r := _waiting(a, inputs)) is not None]
    held = [a for a in rest if must_wait(a, inputs)]
    free = [a for a in rest if a not in held and (_apart(a) or _only_gives_back(a, inputs))]
    touched = {t for a in held for t in a.touches if not a.optional}
    grew = bool(touched)
    while grew:
        joined = [a for a in rest if a not in held and a not in free and touched.intersection(a.touches)]
        held += joined
        touched |= {t for a in joined for t in a.touches}
        grew = bool(joined)
    said = {(r.kind, r.target) for r in refusals}
    cause = refusals[0].message if refusals else ""
    refusals += [
        Refusal(
            a.kind, a.target, "Waiting", f"{a.description}: waits with what it belongs to: {cause}",
            touches=a.touches,
        )
        for a in {(a.kind, a.target): a for a in held}.values()
        if (a.kind, a.target) not in said
    ]  # fmt: skip
    return [a for a in rest if a not in held], refusals


def _apart(action: Action) -> bool:
    """Later actions do without it, and it needs no service stopped: the self-test does need that."""
    return action.optional and action.stage < Stage.PROVE


def _only_gives_back(action: Action, inputs: Inputs) -> bool:
    return bool(action.touches) and set(action.touches) <= set(inputs.memory.stopped_units)


def must_wait(action: Action, inputs: Inputs) -> bool:
    """It failed before, and its time has not come: what only it needs need not be done either."""
    return _waiting(action, inputs) is not None


def _waiting(action: Action, inputs: Inputs) -> Refusal | None:
    terminal = inputs.memory.terminal.get(action.key)
    if terminal is not None:
        step = "mend the cause, then change the spec or run: agent retry " + action.target
        return Refusal(
            action.kind, action.target, "Failed", terminal, step, terminal=True, touches=action.touches
        )
    after = inputs.memory.retry_after.get(action.key, 0.0)
    if inputs.now < after:
        count = inputs.memory.failures.get(action.key, 1)
        why = inputs.memory.errors.get(action.key, "")
        message = (
            f"{action.description}: failed {count} time{'s' * (count != 1)}{f' ({why})' if why else ''},"
            f" tried again in {after - inputs.now:.0f} s"
        )
        step = f"mend the cause, or wait; to try at once: agent retry {action.target}"
        return Refusal(action.kind, action.target, "Backoff", message, step, touches=action.touches)
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

"""What a pass settles in the memory: approvals that begin, cover or lapse, and failures that nobody waits for. Pure."""

from collections.abc import Sequence

from agent.core.inputs import Inputs
from agent.core.laws import Violation
from agent.core.memory import Grant, Memory
from agent.core.plan import Disruption, Plan

GRANT_LIFE = 24 * 3600.0  # seconds: what is not done a day after it was approved is asked for again


def barred(plan: Plan, inputs: Inputs, violations: Sequence[Violation]) -> tuple[str, bool]:
    """Why a plan is not executed ("" when it may be), and whether an approval would let it."""
    if violations:
        return "; ".join(f"law {v.law}: {v.action} {v.message}" for v in violations[:3]), False
    policy = inputs.spec.policy
    if not plan.actions:
        return "", False
    if policy.mode == "observe":
        return "policy.mode is observe: the agent plans and does not act", False
    allowed = {Disruption.NONE, *(Disruption[name.upper()] for name in policy.allow)}
    beyond = sorted({str(a.disruption) for a in plan.actions if a.disruption not in allowed})
    if not beyond or granted(inputs.memory, plan, inputs.now):
        return "", False
    return f"plan {plan.id} needs {', '.join(beyond)}, and policy.allow does not have it", True


def granted(memory: Memory, plan: Plan, now: float) -> bool:
    """An operator approved exactly this plan, or one whose rest this is."""
    if memory.approved == plan.id:
        return True
    grant = memory.grant
    return (
        grant is not None
        and grant.generation == plan.generation
        and now - grant.at < GRANT_LIFE
        and plan.disruption <= grant.disruption
        and _touches(plan) <= set(grant.touches)
    )


def begun(memory: Memory, plan: Plan, now: float) -> Memory:
    """The approved plan begins: its approval is used up, and the grant covers what is left of it if it is cut short."""
    grant = Grant(
        plan_id=plan.id, generation=plan.generation, disruption=int(plan.disruption),
        touches=tuple(sorted(_touches(plan))), at=now,
    )  # fmt: skip
    return memory.model_copy(update={"approved": "", "grant": grant})


def unused(memory: Memory, plan: Plan | None, blocked: str) -> str:
    """Why an approval lapses in a pass that carries out ``plan`` unless ``blocked``; "" when it does not lapse.

    It is about the host as the operator saw it: kept for later it would fire on a day that nobody thinks of it.
    """
    if not memory.approved:
        return ""
    said = f"the approval of plan {memory.approved} lapses"
    if plan is None or not plan.actions:
        return f"{said}: nothing can be done now, or nothing is needed"
    if plan.id != memory.approved:
        return f"{said}: what is needed now is plan {plan.id}"
    return f"{said}: {blocked}" if blocked else ""


def settled(memory: Memory, plan: Plan, now: float) -> Memory:
    """The memory after a pass with this plan: the same object when nothing is settled.

    A grant lasts while something that it covers is still to be done or waits after a failure: what is refused for
    another reason, or concerns something else, is no part of what was approved. A failure of an action that is neither
    planned nor refused is nobody's: it is forgotten once its waiting time is over, and at once on a converged host.
    """
    changes: dict[str, object] = {}
    converged = not plan.actions and not plan.refusals
    grant = memory.grant
    if grant is not None and (not _open(grant, plan) or now - grant.at >= GRANT_LIFE):
        changes["grant"] = None
    wanted = {(a.kind, a.target) for a in plan.actions} | {(r.kind, r.target) for r in plan.refusals}
    gone = {
        key
        for key in (*memory.failures, *memory.retry_after, *memory.errors)
        if converged or (_subject(key) not in wanted and memory.retry_after.get(key, 0.0) <= now)
    }
    if gone:
        changes["failures"] = {k: v for k, v in memory.failures.items() if k not in gone}
        changes["retry_after"] = {k: v for k, v in memory.retry_after.items() if k not in gone}
        changes["errors"] = {k: v for k, v in memory.errors.items() if k not in gone}
    return memory.model_copy(update=changes) if changes else memory


def _open(grant: Grant, plan: Plan) -> bool:
    """Something of the approved plan is left: planned, or held back after a failure."""
    left = [set(a.touches) for a in plan.actions] + [set(r.touches) for r in plan.refusals]
    return any(touches and touches <= set(grant.touches) for touches in left)


def _touches(plan: Plan) -> set[str]:
    return {t for a in plan.actions for t in a.touches}


def _subject(key: str) -> tuple[str, str]:
    """(kind, target) of an action's key."""
    kind, _, rest = key.partition("/")
    return kind, rest.partition("/")[2]

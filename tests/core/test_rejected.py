"""A rejected revision that still runs, and no last good one: it is stopped for good, and the condition says so."""

from agent.core.inputs import Inputs
from agent.core.memory import Rejected
from agent.core.resolve import resolve, trial_key
from agent.kind import conditions_all, plan_all
from agent.kinds import ALL
from tests.core import build
from tests.core.build import NOW, made, type_host
from tests.core.verdicts import split


def rejected(inputs: Inputs) -> Inputs:
    key = trial_key(build.desired(inputs), inputs.spec.services["qwen"].gate)
    entry = Rejected(revision=key, generation=1, reason="SmokeFailed", message="a wrong answer", at=NOW)
    return build.with_memory(rejected={"qwen": entry})(inputs)


def test_a_rejected_revision_that_runs_is_stopped_and_the_condition_says_that_nothing_may_run() -> None:
    inputs = made(type_host(None, split()), build.running(), rejected)
    resolved, plan = resolve(inputs), plan_all(ALL, inputs)
    assert [a.key for a in plan.actions if a.kind == "service"] == ["service/stop/qwen"]
    (stop,) = (a for a in plan.actions if a.kind == "service")
    assert "rejected" in stop.why
    found = {c.type: c for c in conditions_all(ALL, inputs, resolved, plan)}
    condition = found["ServiceReady/qwen"]
    assert (condition.status, condition.reason) == ("False", "RevisionRejected")
    assert condition.message.startswith("nothing may run: ")
    assert "agent retry qwen" in condition.next_step


def test_what_the_agent_did_not_start_is_not_stopped_because_something_else_was_rejected() -> None:
    inputs = made(type_host(None, split()), build.running_by_hand("qwen"), rejected)
    assert [a.key for a in plan_all(ALL, inputs).actions if a.kind == "service"] == []

"""Execution: intent, act, outcome; the first failure ends the plan, and what it says decides what comes next."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent.core.condition import Condition
from agent.core.errors import TerminalError, TransientError
from agent.core.fact import Known
from agent.core.inputs import Inputs
from agent.core.observation import Observation, Platform
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage, make_plan
from agent.core.resolve import Resolved
from agent.kinds.rebind import UnbindStuckError
from agent.loop.execute import BACKOFF_FIRST, BACKOFF_MOST, Executor, backoff
from agent.loop.journal import read
from agent.ports import Ports
from tests.core import build
from tests.rig import Rig, rig

OBS = Observation(platform=Platform(boot_id=Known("this-boot")))


@dataclass
class Steps:
    """A kind whose actions do what the test has put down for their target, and are remembered."""

    name: str = "steps"
    script: dict[str, Callable[[], None]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        return []

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        return [], []

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        return inputs

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        return []

    async def act(self, action: Action, ports: Ports) -> None:
        self.script.get(action.target, lambda: None)()
        self.done.append(f"{action.verb} {action.target}")


def step(target: str, stage: Stage = Stage.SET, **changes: Any) -> Action:
    made = Action("steps", "set", target, f"set {target}", stage, Disruption.LIVE, touches=(target,))
    return replace(made, **changes)


def plan_of(*actions: Action) -> Plan:
    return make_plan(1, list(actions), [], [])


def failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@dataclass
class Bench:
    """A real executor with its store and journal, and the scripted kind in place of the host's."""

    agent: Rig
    steps: Steps

    @property
    def executor(self) -> Executor:
        return self.agent.agent.reconciler.executor

    def records(self) -> list[tuple[str, str, str]]:
        path = self.agent.root / "var/lib/gpu-host-agent/journal.jsonl"
        return [(r["event"], r["action"], r.get("result", "")) for r in read(path)]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with rig(tmp_path) as agent:
        steps = Steps()
        agent.agent.reconciler.executor.kinds = (steps,)
        yield Bench(agent, steps)


async def test_actions_are_done_in_the_plans_order_and_each_has_an_intent_and_an_outcome(
    bench: Bench,
) -> None:
    result = await bench.executor.execute(plan_of(step("b"), step("a", Stage.STOP), step("c")), OBS, "pass")
    assert bench.steps.done == ["set a", "set b", "set c"]
    assert (result.done, result.failed) == (3, None)
    assert bench.records() == [
        (event, f"steps/set/{name}", result)
        for name in "abc" for event, result in (("intent", ""), ("outcome", "done"))
    ]  # fmt: skip


async def test_the_intent_is_on_disk_before_the_effect_begins(bench: Bench) -> None:
    seen: list[list[tuple[str, str, str]]] = []
    bench.steps.script["a"] = lambda: seen.append(bench.records())
    await bench.executor.execute(plan_of(step("a")), OBS, "pass")
    assert seen == [[("intent", "steps/set/a", "")]]


async def test_the_first_failure_ends_the_plan(bench: Bench) -> None:
    bench.steps.script["b"] = failing(TransientError("b is busy"))
    result = await bench.executor.execute(plan_of(step("a"), step("b"), step("c")), OBS, "pass")
    assert bench.steps.done == ["set a"]
    assert (result.done, result.message) == (1, "b is busy")
    assert result.failed is not None
    assert result.failed.target == "b"
    assert bench.records()[-1] == ("outcome", "steps/set/b", "failed")


@pytest.mark.parametrize(
    "error", [TransientError("b is busy"), TerminalError("b cannot"), OSError("b broke")]
)
async def test_what_later_actions_do_without_fails_alone(bench: Bench, error: Exception) -> None:
    bench.steps.script["b"] = failing(error)
    plan = plan_of(revertible("a", Stage.STOP), step("b", optional=True), step("c"))
    result = await bench.executor.execute(plan, OBS, "pass")
    assert bench.steps.done == ["set a", "set c"]
    assert (result.done, result.failed, result.passed_over) == (2, None, 1)
    assert result.notes == (f"set b: {error}",)
    assert "steps/set/b" in {**bench.agent.memory.failures, **bench.agent.memory.terminal}


@pytest.mark.parametrize(
    "error", [TransientError("busy"), OSError(5, "Input/output error"), TimeoutError("late")]
)
async def test_a_passing_failure_is_tried_again_later_and_later(bench: Bench, error: Exception) -> None:
    bench.steps.script["a"] = failing(error)
    waits = []
    for count in range(1, 4):
        await bench.executor.execute(plan_of(step("a")), OBS, "pass")
        memory = bench.agent.memory
        assert memory.failures["steps/set/a"] == count
        assert memory.errors["steps/set/a"] == str(error)
        assert not memory.terminal
        waits.append(memory.retry_after["steps/set/a"])
    assert waits == sorted(waits)


def test_the_wait_doubles_up_to_its_bound_with_jitter_around_it() -> None:
    for failures in range(1, 40):
        middle = min(BACKOFF_MOST, BACKOFF_FIRST * 2 ** (failures - 1))
        found = [backoff(failures) for _ in range(50)]
        assert all(0.8 * middle <= wait <= 1.2 * middle for wait in found)
        assert len(set(found)) > 1


async def test_success_forgets_earlier_failures(bench: Bench) -> None:
    bench.steps.script["a"] = failing(TransientError("busy"))
    await bench.executor.execute(plan_of(step("a")), OBS, "pass")
    bench.steps.script.clear()
    await bench.executor.execute(plan_of(step("a")), OBS, "pass")
    memory = bench.agent.memory
    assert (memory.failures, memory.retry_after, memory.errors) == ({}, {}, {})


async def test_a_terminal_failure_waits_for_a_person_and_not_for_time(bench: Bench) -> None:
    bench.steps.script["a"] = failing(TerminalError("the card says no"))
    await bench.executor.execute(plan_of(step("a")), OBS, "pass")
    memory = bench.agent.memory
    assert memory.terminal == {"steps/set/a": "the card says no"}
    assert memory.retry_after == {}
    assert bench.records()[-1] == ("outcome", "steps/set/a", "terminal")


async def test_law_2_an_unbind_that_did_not_return_quarantines_the_device_for_this_boot(bench: Bench) -> None:
    bench.steps.script["a"] = failing(UnbindStuckError("0000:81:00.0", 60.0))
    await bench.executor.execute(plan_of(step("a")), OBS, "pass")
    entry = bench.agent.memory.quarantine["0000:81:00.0"]
    assert entry.boot_id == "this-boot"
    assert "0000:81:00.0" in entry.message


@pytest.mark.parametrize(
    ("error", "stays_open"),
    [
        (TimeoutError("systemd did not answer"), True),
        (ConnectionResetError(104, "the connection to systemd was lost"), True),
        (OSError(16, "another runs"), False),
        (TransientError("held"), False),
    ],
)
async def test_law_2_an_unbind_of_which_nothing_tells_whether_it_began_stays_open(
    bench: Bench, error: Exception, stays_open: bool
) -> None:
    bench.steps.name = "driver-binding"
    bench.steps.script["a"] = failing(error)
    bind = step("a", kind="driver-binding", verb="bind", params={"0000:81:00.0": "vfio-pci"})
    await bench.executor.execute(plan_of(bind), OBS, "pass")
    assert ("0000:81:00.0" in bench.agent.memory.unbinding) == stays_open


async def test_a_defect_of_ours_is_recorded_and_not_swallowed(bench: Bench) -> None:
    bench.steps.script["a"] = failing(KeyError("oops"))
    with pytest.raises(KeyError):
        await bench.executor.execute(plan_of(step("a"), step("b")), OBS, "pass")
    assert bench.steps.done == []
    assert bench.records()[-1] == ("outcome", "steps/set/a", "crashed")
    assert bench.agent.memory.failures == {}


def revertible(target: str, stage: Stage) -> Action:
    back = step(target, verb="put-back", description=f"put {target} back")
    return step(target, stage, revert=back)


async def test_what_only_the_failed_part_needed_is_put_back_in_reverse_order(bench: Bench) -> None:
    bench.steps.script["last"] = failing(TransientError("no"))
    plan = plan_of(
        revertible("a", Stage.STOP),
        revertible("b", Stage.RELEASE),
        revertible("c", Stage.PREPARE),
        step("last"),
    )
    await bench.executor.execute(plan, OBS, "pass")
    assert bench.steps.done == ["set c", "set a", "set b", "put-back b", "put-back a"]
    assert [r for r in bench.records() if "put-back" in r[1]] == [
        (event, f"steps/put-back/{name}", result)
        for name in "ba" for event, result in (("intent", ""), ("outcome", "done"))
    ]  # fmt: skip


@pytest.mark.parametrize("error", [TransientError("no"), TerminalError("never"), OSError(5, "I/O error")])
async def test_what_cannot_be_put_back_keeps_nothing_else_from_being_put_back(
    bench: Bench, error: Exception
) -> None:
    def fail_to_put_back() -> None:
        if "set b" in bench.steps.done:
            raise error

    bench.steps.script |= {"last": failing(TransientError("no")), "b": fail_to_put_back}
    plan = plan_of(revertible("a", Stage.STOP), revertible("b", Stage.RELEASE), step("last"))
    result = await bench.executor.execute(plan, OBS, "pass")
    assert result.message == "no"
    assert bench.steps.done[-1] == "put-back a"
    assert ("outcome", "steps/put-back/b", "failed") in bench.records()


async def test_a_quarantined_device_is_not_touched_again_to_put_it_back(bench: Bench) -> None:
    bench.steps.script["last"] = failing(UnbindStuckError("a", 60.0))
    await bench.executor.execute(plan_of(revertible("a", Stage.RELEASE), step("last")), OBS, "pass")
    assert bench.steps.done == ["set a"]


async def test_told_to_stop_the_plan_ends_after_the_action_in_hand(bench: Bench) -> None:
    bench.steps.script["a"] = lambda: setattr(bench.executor, "stopping", True)
    result = await bench.executor.execute(plan_of(step("a"), step("b"), step("c")), OBS, "pass")
    assert bench.steps.done == ["set a"]
    assert result.failed is None
    assert result.notes == ("stopping: 2 of 3 actions are left for the next start",)
    assert bench.records()[-1] == ("outcome", "steps/set/a", "done")


async def test_a_unit_is_remembered_before_it_is_stopped_and_forgotten_once_it_is_back(bench: Bench) -> None:
    known: list[dict[str, str]] = []
    bench.steps.script["x.service"] = lambda: known.append(dict(bench.agent.memory.stopped_units))
    quiesce = step("x.service", verb="quiesce", why="it holds 0000:81:00.0")
    await bench.executor.execute(plan_of(quiesce), OBS, "pass")
    assert known == [{"x.service": "it holds 0000:81:00.0"}]
    assert "x.service" in bench.agent.memory.stopped_units
    await bench.executor.execute(plan_of(step("x.service", verb="restore-unit")), OBS, "pass")
    assert bench.agent.memory.stopped_units == {}


async def test_an_edit_of_the_spec_ends_the_old_plan_after_the_action_in_hand(bench: Bench) -> None:
    bench.steps.script["b"] = bench.executor.trials.edited.set
    plan = plan_of(revertible("a", Stage.RELEASE), step("b"), step("c"))
    result = await bench.executor.execute(plan, OBS, "pass")
    assert bench.steps.done == ["set a", "set b", "put-back a"]
    assert result.superseded
    assert result.failed is None
    assert result.notes == ("the spec was edited: 1 of 3 actions of the old plan are not done",)
    assert bench.agent.memory.failures == {}


async def test_law_3_an_edit_of_the_spec_does_not_part_the_cards_of_one_iommu_group(bench: Bench) -> None:
    host = build.made(build.type_host(), build.in_group(99, *build.GPUS[:2]))
    bench.steps.script[build.GPUS[0]] = bench.executor.trials.edited.set
    plan = plan_of(*(step(gpu, Stage.BIND) for gpu in build.GPUS[:3]))
    result = await bench.executor.execute(plan, host.obs, "pass")
    assert bench.steps.done == [f"set {gpu}" for gpu in build.GPUS[:2]]
    assert result.superseded

"""One pass: observe, resolve, diff, plan, check, execute, publish. Every trigger runs the same one."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agent.core.condition import Condition, merge
from agent.core.inputs import Inputs
from agent.core.laws import check_plan
from agent.core.memory import Memory
from agent.core.observation import Observation
from agent.core.plan import Plan
from agent.core.redact import redacted_condition, secret_names
from agent.core.report import agent_conditions, sentence, with_generation
from agent.core.requests import retried
from agent.core.resolve import Resolved, resolve
from agent.core.settle import barred, begun, settled, unused
from agent.core.spec import GpuHost
from agent.core.status import ready_of
from agent.kind import Kind, conditions_all, plan_all, trajectory
from agent.loop.absorb import absorb
from agent.loop.execute import Executed, Executor, backoff
from agent.loop.journal import Journal
from agent.loop.observe import Observer
from agent.loop.publish import Publisher, View
from agent.loop.specs import Specs
from agent.loop.store import Store
from agent.ports import Permit, Ports


@dataclass(frozen=True, slots=True)
class PassResult:
    """How a pass ended. ``again`` asks for another at once; ``retry_in`` is when a failed action may be tried again."""

    sentence: str
    plan: Plan | None = None
    blocked: str = ""
    executed: Executed | None = None
    again: bool = False
    retry_in: float | None = None
    ready: str = "Unknown"


@dataclass(frozen=True, slots=True)
class Decision:
    """The pure half of a pass."""

    inputs: Inputs
    resolved: Resolved
    plan: Plan
    blocked: str
    approvable: bool


@dataclass(slots=True)
class Reconciler:
    ports: Ports
    kinds: Sequence[Kind]
    store: Store
    journal: Journal
    specs: Specs
    observer: Observer
    executor: Executor
    publisher: Publisher
    permit: Permit
    log: Callable[..., None] = lambda *_args, **_fields: None
    _conditions: tuple[Condition, ...] = ()
    _last: Decision | None = field(default=None)
    _conditions_of: tuple[object, ...] | None = None  # what the conditions were made from
    _working: tuple[Decision, View] | None = None  # the plan that is being carried out
    _learned: tuple[Observation, Memory] | None = None  # what the memory has already learned from
    _done_before: str = ""  # id of the plan that the pass before this one carried out

    async def run_pass(self, trigger: str) -> PassResult:
        pass_id, started = uuid.uuid4().hex[:8], self.ports.clock.now()
        started_at = asyncio.get_running_loop().time()
        self.executor.trials.edited.clear()  # an edit from here on is another pass's
        await self.specs.refresh()
        self._take_requests()  # under the spec in force: a retry means something else for what the spec does not have
        host = self.specs.host
        if host is None:
            result = PassResult(
                sentence="No spec is in force: " + (self.specs.problems or ("none was found",))[0]
            )
            self._drop_unused_approval(None, "")
            self._publish_without_spec(result, pass_id, trigger, started)
            return result
        inputs = await self.look(host)
        decision = self.decide(inputs)
        self._drop_unused_approval(decision.plan, decision.blocked)
        executed = None
        if decision.plan.actions and not decision.blocked:
            executed = await self._execute(decision, pass_id, trigger)
        result = self._result(decision.plan, decision.blocked, executed, inputs.now)
        if result.again or (executed is not None and executed.done):
            # Status shows what is true now, not what was before it was changed.
            decision = self.decide(await self.look(host))
        seconds = asyncio.get_running_loop().time() - started_at
        self._publish(decision, result, View(pass_id, trigger, started, seconds))
        self.store.save_kernel_log(self.observer.kernel_log)
        return result

    def _drop_unused_approval(self, plan: Plan | None, blocked: str) -> None:
        why = unused(self.store.memory, plan, blocked)
        if why:
            self.journal.append(self.ports.clock.now(), "note", text=why)
            self.store.update(approved="")

    async def look(self, host: GpuHost | None = None) -> Inputs:
        """Observe, and let the memory learn from it."""
        host = host or self.specs.host
        if host is None:
            raise RuntimeError("no spec is in force")
        obs = await self.observer.observe(host, self.store.memory)
        now = self.ports.clock.now()
        if (obs, self.store.memory) != self._learned:
            self.store.save(absorb(self.store.memory, obs, now))
            self._learned = (obs, self.store.memory)
        return Inputs(
            host, self.store.memory.generation, obs, self.store.memory, now, bool(self.ports.simulated)
        )

    def decide(self, inputs: Inputs) -> Decision:
        """Resolve, diff, plan and check. The same inputs give the same decision, so an unchanged world is not re-decided."""
        last = self._last
        if last is not None and _same(last, inputs):
            return last
        resolved = resolve(inputs)
        plan = plan_all(self.kinds, inputs, resolved)
        violations = check_plan(plan, inputs, trajectory(self.kinds, plan, inputs))
        blocked, approvable = barred(plan, inputs, violations)
        self._last = Decision(inputs, resolved, plan, blocked, approvable)
        return self._last

    async def _execute(self, decision: Decision, pass_id: str, trigger: str) -> Executed:
        plan, memory = decision.plan, self.store.memory
        if memory.approved == plan.id:
            self.store.save(begun(memory, plan, decision.inputs.now))
        refused = await self.permit.acquire(plan.id, str(plan.disruption))
        if refused:
            return Executed(0, notes=(f"waiting for a permit: {refused}",))
        self._publish(
            decision,
            PassResult(sentence="Working: " + plan.actions[0].description),
            View(pass_id, trigger, decision.inputs.now, 0.0),
        )
        self._working = (decision, View(pass_id, trigger, decision.inputs.now, 0.0))
        self.observer.health.paused = True
        try:
            return await self.executor.execute(plan, decision.inputs.obs, pass_id)
        finally:
            self._working = None
            self.observer.health.paused = False
            await self.permit.release()

    async def refresh(self) -> None:
        """Publish what the host is like in the middle of a plan: old facts must not look like today's (law 9)."""
        if self._working is None:
            return
        decision, view = self._working
        inputs = await self.look()
        now = replace(decision, inputs=inputs, resolved=resolve(inputs))
        self.publisher.publish(
            now, self.specs, self.conditions(now), f"Working on plan {decision.plan.id}.", view,
            activity=self.publisher.doing,
        )  # fmt: skip

    def _result(self, plan: Plan, blocked: str, executed: Executed | None, looked_at: float) -> PassResult:
        failed = executed.message if executed and executed.failed else ""
        idle = _idle_sentence(plan)
        text = sentence(
            blocked=blocked, done=executed.done if executed else 0, failed=failed,
            notes=executed.notes if executed else (), pending=len(plan.actions), facts={"idle": idle},
        )  # fmt: skip
        superseded = executed is not None and executed.superseded
        begun_on = executed is not None and executed.done + executed.passed_over > 0
        again = begun_on or bool(failed) or superseded
        cut_short = bool(failed) or superseded or (executed is not None and executed.passed_over > 0)
        carried_out = executed is not None and executed.done > 0 and not cut_short
        if carried_out and self._done_before == plan.id:
            # Carried out twice, and the same drift is there again: something undoes it. Trying for ever would be a
            # loop of our own making, so it waits like a failure.
            text = "The same plan was carried out twice and did not hold: something else changes it back."
            self._hold(plan)
            again = False
        self._done_before = plan.id if carried_out else ""
        self.store.save(settled(self.store.memory, plan, looked_at))
        # What was due when this pass looked was done; what came due since then is for the next one.
        waits = [t for t in self.store.memory.retry_after.values() if t > looked_at]
        retry = max(0.5, min(waits) - self.ports.clock.now()) if waits else None
        return PassResult(text, plan, blocked, executed, again=again, retry_in=retry)

    def _hold(self, plan: Plan) -> None:
        memory, now = self.store.memory, self.ports.clock.now()
        failures, after, errors = dict(memory.failures), dict(memory.retry_after), dict(memory.errors)
        for action in plan.actions:
            failures[action.key] = failures.get(action.key, 0) + 1
            after[action.key] = now + backoff(failures[action.key])
            errors[action.key] = "it was done twice and did not hold: something else changes it back"
        self.store.update(failures=failures, retry_after=after, errors=errors)

    def _take_requests(self) -> None:
        """What operators asked for by ``agent approve`` and ``agent retry``."""
        for verb, argument in self.store.take_requests():
            self.journal.append(self.ports.clock.now(), "request", verb=verb, argument=argument)
            memory = self.store.memory
            if verb == "approve":
                self.store.update(approved=argument)
            elif verb == "retry":
                host = self.specs.host
                removed = host is not None and argument not in host.spec.services
                self.store.save(retried(memory, argument, removed=removed))
        self._last = None if self._last and self._last.inputs.memory is not self.store.memory else self._last

    def conditions(self, decision: Decision) -> tuple[Condition, ...]:
        made_from = (decision, self.specs.accepted, self.specs.problems)
        if self._conditions_of is not None and all(
            a is b for a, b in zip(made_from, self._conditions_of, strict=True)
        ):
            return self._conditions
        self._conditions_of = made_from
        blocked = [_blocked_condition(decision)] if decision.blocked else []
        found = conditions_all(self.kinds, decision.inputs, decision.resolved, decision.plan, blocked)
        found += agent_conditions(
            accepted=self.specs.accepted, problems=self.specs.problems, generation=decision.inputs.generation,
            simulated=self.ports.simulated,
        )  # fmt: skip
        if self.store.problem:
            found.append(_memory_condition(self.store.problem))
        names = secret_names(decision.inputs.spec)
        found = [redacted_condition(c, names) for c in found]
        self._conditions = merge(
            self._conditions, with_generation(found, decision.inputs.generation), decision.inputs.now
        )
        return self._conditions

    def _publish(self, decision: Decision, result: PassResult, view: View) -> None:
        conditions = self.conditions(decision)
        self.publisher.publish(decision, self.specs, conditions, result.sentence, view)
        plan = result.plan or decision.plan
        self.log(
            "pass", pass_id=view.pass_id, trigger=view.trigger, sentence=result.sentence, plan=plan.id,
            actions=len(plan.actions), ready=ready_of(conditions), seconds=round(view.seconds, 3),
        )  # fmt: skip

    def _publish_without_spec(self, result: PassResult, pass_id: str, trigger: str, started: float) -> None:
        conditions = agent_conditions(
            accepted=False,
            problems=self.specs.problems,
            generation=0,
            simulated=self.ports.simulated,
        )
        self._conditions, self._conditions_of = merge(self._conditions, tuple(conditions), started), None
        self.publisher.publish_without_spec(
            self.specs, self._conditions, result.sentence, View(pass_id, trigger, started, 0.0)
        )
        self.log("pass", pass_id=pass_id, trigger=trigger, sentence=result.sentence)


def _same(last: Decision, inputs: Inputs) -> bool:
    """Only an empty, unrefused plan may be reused: budgets and backoffs are decided by the clock too."""
    quiet = not last.plan.actions and not last.plan.refusals
    before = last.inputs
    return (
        quiet and before.host is inputs.host and before.memory is inputs.memory and before.obs == inputs.obs
    )


def _idle_sentence(plan: Plan) -> str:
    if plan.refusals:
        first = plan.refusals[0]
        more = f" (and {len(plan.refusals) - 1} more)" if len(plan.refusals) > 1 else ""
        return f"Waiting: {first.message}{more}."
    return "Converged: nothing to do."


def _memory_condition(problem: str) -> Condition:
    """Until the next start: a person should look at what happened to the state directory."""
    step = "look at the kept file and the disk, then restart the agent: systemctl restart gpu-host-agent"
    return Condition(
        type="MemoryIntact", status="False", reason="MemoryUnreadable", message=problem, next_step=step
    )


def _blocked_condition(decision: Decision) -> Condition:
    step = f"agent approve {decision.plan.id}" if decision.approvable else ""
    return Condition(
        type="Converged", status="False", reason="Blocked", message=decision.blocked, next_step=step
    )

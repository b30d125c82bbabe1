"""Services: a revision runs, proved. Starting is the prover's (loop/trial.py); stopping in order is here."""

from dataclasses import replace

from agent.core.binding import belongs_to
from agent.core.condition import Condition, Truth
from agent.core.errors import TerminalError
from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.former import former_refusal, still_running, unreadable
from agent.core.inputs import Inputs
from agent.core.memory import Promoted, TrialRecord
from agent.core.model import with_memory, with_service, without_holders
from agent.core.observation import Holder, Process, ServiceFacts, Unit
from agent.core.placing import as_found, placed
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.resolve import SILENCE, Resolved, ResolvedService, resolve
from agent.core.revision import Revision
from agent.core.spec import LxcTarget, Service, target_name
from agent.ports import Ports


class ServiceKind:
    name = "service"

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        return [
            Drift(self.name, s.name, "runs", _revision(s.effective), s.reason, _because(s))
            for s in resolved.services.values()
            if s.need in {"trial", "prove", "stop"} or (s.need == "wait" and s.effective is not None)
        ]

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        actions: list[Action] = []
        refusals: list[Refusal] = []
        for service in resolved.services.values():
            refusals += service.refusals
            if service.must_stop:
                actions.append(_stop(service, inputs))
            if service.need == "trial":
                actions += [_preflight(service), _trial(service)]
            elif service.need == "prove" and not service.must_stop:
                actions.append(_prove(service))
            elif service.need == "nothing":
                refusals += _not_answering(service, inputs)
        refusals += [former_refusal(f, f.service) for f in still_running(inputs)]
        return actions, list(dict.fromkeys(refusals))

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        """The model assumes that starts succeed and proofs pass."""
        name = action.target
        if action.verb == "stop":
            service = as_found(inputs.spec.services[name], inputs.obs.services.get(name, ServiceFacts()))
            stopped = with_service(inputs, name, _stopped)
            return without_holders(stopped, lambda h: belongs_to(h, service))
        if action.verb in {"trial", "prove"}:
            return _proved(name, inputs)
        return inputs

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        found = [_condition(s, inputs, _waiting(s.name, plan)) for s in resolved.services.values()]
        return [*found, *_former_units(inputs)]

    async def act(self, action: Action, ports: Ports) -> None:
        raise TerminalError(f"{action.verb} is run by the prover", reason="WrongDoor")


def _former_units(inputs: Inputs) -> list[Condition]:
    """Only where there is something to say: most hosts never had any."""
    refusals = [former_refusal(f, f.service) for f in still_running(inputs)]
    unread = unreadable(inputs)
    if not refusals and not unread:
        return []
    reason = "FormerUnitRuns" if refusals else "UnitUnknown"
    message = "; ".join([*(r.message for r in refusals), *(f"{f.name}: {why}" for f, why in unread)])
    step = refusals[0].next_step if refusals else "wait for the next pass"
    status: Truth = "False" if refusals else "Unknown"
    return [
        Condition(type="FormerUnitsStopped", status=status, reason=reason, message=message, next_step=step)
    ]


def _not_answering(service: ResolvedService, inputs: Inputs) -> list[Refusal]:
    """Nothing is planned for it yet, and nothing to do is not the same as all well."""
    health = inputs.obs.services.get(service.name, ServiceFacts()).health
    if not service.running or isinstance(health, Known) or _working(health):
        return []
    message = f"it runs and does not answer: {health.reason}"
    return [Refusal("service", service.name, "NotAnswering", message, _until_it_answers(service))]


def _working(health: Fact[str]) -> bool:
    return isinstance(health, Unknown) and health.code == "Working"


def _until_it_answers(service: ResolvedService) -> str:
    return (
        f"look at its log; it is started anew when this has lasted {SILENCE / 60:.0f} min, or the start timeout while"
        f" it may still be loading, and at once with: agent retry {service.name}"
    )


def _degraded(trial: TrialRecord | None, service: ResolvedService) -> bool:
    """The trial found the revision that should run too slow. Where its values came from is not part of it."""
    found = trial.revision if trial is not None and trial.outcome == "degraded" else None
    return found is not None and service.effective is not None and found.id == service.effective.id


def _revision(revision: Revision | None) -> str:
    return f"revision {revision.id}" if revision else "nothing"


def _because(service: ResolvedService) -> str:
    if service.fallback:
        return "the last good revision: the one the spec means was rejected"
    if service.need == "stop":
        return "the revision that the spec means was rejected"
    if service.effective is None or service.effective.p2p:
        return "the spec"
    return "; ".join(filter(None, (service.p2p.reason, service.p2p.host_memory)))


def _touches(service: ResolvedService, inputs: Inputs) -> tuple[str, ...]:
    """The unit, its GPUs, and every function that its processes hold now."""
    held = [
        address for address, fact in sorted(inputs.obs.holders.items())
        if isinstance(fact, Known) and any(belongs_to(h, service.found) for h in fact.value)
    ]  # fmt: skip
    return (service.found.unit, *dict.fromkeys([*service.gpus, *held]))


def _place(service: ResolvedService) -> tuple[str, str]:
    """Target and unit of what is to run; of the spec, while nothing is."""
    revision = service.effective
    return (revision.target, revision.unit) if revision else (service.target, service.service.unit)


def _stop(service: ResolvedService, inputs: Inputs) -> Action:
    undo = "start it again" if service.effective else f"change the spec, or run: agent retry {service.name}"
    return Action(
        "service", "stop", service.name, f"drain and stop {service.found.unit} in {target_name(service.found.target)}, and prove it stopped",
        Stage.STOP, Disruption.RESTART, touches=_touches(service, inputs), hits=(f"users of {service.name}",),
        undo=undo, why=service.reason,
    )  # fmt: skip


def _preflight(service: ResolvedService) -> Action:
    target, unit = _place(service)
    return Action(
        "service", "preflight", service.name, f"check in {target} that {service.name} can start",
        Stage.PREPARE, Disruption.NONE, touches=(unit,), why="a failed check costs no downtime",
    )  # fmt: skip


def _trial(service: ResolvedService) -> Action:
    what = "restore the last good revision" if service.fallback else f"start {_revision(service.effective)}"
    decided = not service.untested or service.fallback or service.p2p_obstacle
    note = "" if decided else ", with the P2P setting that the self-test decides"
    revision = service.effective
    p2p = "on" if revision and revision.p2p else "off"
    gpus = dict.fromkeys([*service.gpus, *(revision.gpus if revision else ())])
    return Action(
        "service", "trial", service.name, f"{what} of {service.name} on trial: ready, effective, smoke, benchmark{note}",
        Stage.START, Disruption.RESTART if service.running else Disruption.LIVE,
        params={"revision": revision.id if revision else "", "p2p": p2p if decided else "as tested"},
        touches=(_place(service)[1], *gpus), hits=(f"users of {service.name}",),
        undo="the last good revision comes back" if service.service.gate.on_failure == "rollback" else "stop and wait",
        why=_because(service),
    )  # fmt: skip


def _prove(service: ResolvedService) -> Action:
    return Action(
        "service", "prove", service.name, f"smoke-test and benchmark {service.name} as it runs",
        Stage.START, Disruption.LIVE, touches=(service.found.unit, *service.gpus), hits=(f"users of {service.name}",),
        undo="the last good revision comes back", why=service.reason,
    )  # fmt: skip


def _stopped(facts: ServiceFacts) -> ServiceFacts:
    if not isinstance(facts.unit, Known):
        return facts
    unit = replace(facts.unit.value, active_state="inactive", sub_state="dead", main_pid=0, pids=())
    gone = Absent("not running")
    return replace(facts, unit=Known(unit), process=gone, health=gone, silence=None)


def _proved(name: str, inputs: Inputs) -> Inputs:
    resolved = resolve(inputs).services[name]
    revision = resolved.effective
    if revision is None or resolved.need == "wait":
        return inputs  # what the self-test found forbids the start
    unit = Unit(revision.unit, "loaded", "active", "running", main_pid=1)
    process = Known(Process(1, revision.argv, revision.env))
    after = with_service(
        inputs,
        name,
        lambda f: replace(
            f,
            unit=Known(unit),
            files=Known(revision.files),
            process=process,
            health=Known("ok"),
            silence=None,
            at=(revision.target, revision.unit),
        ),
    )
    after = _held_by(placed(resolved.service, revision), revision.gpus, after)
    promoted = Promoted(revision=revision, generation=inputs.generation, at=inputs.now, benchmark=None)
    trials = {n: t for n, t in inputs.memory.trials.items() if n != name}
    return with_memory(after, promoted={**inputs.memory.promoted, name: promoted}, trials=trials)


def _held_by(service: Service, gpus: tuple[str, ...], inputs: Inputs) -> Inputs:
    container = str(service.target.lxc) if isinstance(service.target, LxcTarget) else ""
    holder = Holder("process", "/dev/nvidia*", 1, "python3", service.unit, container)
    holders = {
        a: Known((*f.value, holder)) if a in gpus and isinstance(f, Known) else f
        for a, f in inputs.obs.holders.items()
    }
    return replace(inputs, obs=replace(inputs.obs, holders=holders))


def _waiting(name: str, plan: Plan) -> Refusal | None:
    """What failed before and waits for its next try."""
    held = (r for r in plan.refusals if (r.kind, r.target) == (ServiceKind.name, name))
    return next((r for r in held if r.reason in {"Failed", "Backoff", "Waiting"}), None)


def _condition(service: ResolvedService, inputs: Inputs, waiting: Refusal | None) -> Condition:
    kind = f"ServiceReady/{service.name}"
    facts = inputs.obs.services.get(service.name, ServiceFacts())
    rejected = next((r for r in service.refusals if r.reason == "RevisionRejected"), None)
    blocking = next((r for r in service.refusals if r is not rejected), None) or waiting
    if isinstance(facts.unit, Unknown):
        return Condition(type=kind, status="Unknown", reason="UnitUnknown", message=facts.unit.reason)
    if not service.running:
        trial = inputs.memory.trials.get(service.name)
        why = blocking or rejected
        message = why.message if why else (trial.message if trial and trial.message else "it is not running")
        reason = why.reason if why else "NotRunning"
        return Condition(
            type=kind, status="False", reason=reason, message=message, next_step=why.next_step if why else ""
        )
    if isinstance(facts.health, Unknown) and _working(facts.health):
        return Condition(type=kind, status="Unknown", reason="Working", message=facts.health.reason)
    if rejected is not None and service.effective is None and blocking is None:
        message = f"nothing may run: {rejected.message}"
        return Condition(
            type=kind, status="False", reason=rejected.reason, message=message, next_step=rejected.next_step
        )
    if isinstance(facts.health, Unknown):
        return _silent_condition(service, facts.health, blocking)
    if blocking is not None:
        return Condition(
            type=kind,
            status="Unknown" if blocking.reason.endswith("Unknown") else "False",
            reason=blocking.reason,
            message=blocking.message,
            next_step=blocking.next_step,
        )
    if service.need != "nothing":
        return Condition(type=kind, status="Unknown", reason="NotProved", message=service.reason)
    if isinstance(facts.health, Absent):
        return _silent_condition(service, facts.health, None)
    if rejected is not None:
        message = f"the last good {_revision(service.effective)} runs; {rejected.message}"
        return Condition(
            type=kind, status="False", reason="RolledBack", message=message, next_step=rejected.next_step
        )
    trial = inputs.memory.trials.get(service.name)
    if trial is not None and _degraded(trial, service):
        step = f"look for what changed (clocks, links, neighbours), then run: agent retry {service.name}"
        return Condition(type=kind, status="False", reason="Degraded", message=trial.message, next_step=step)
    message = f"{_revision(service.effective)} runs and is promoted"
    return Condition(type=kind, status="True", reason="Promoted", message=message)


def _silent_condition(
    service: ResolvedService, health: Absent | Unknown, blocking: Refusal | None
) -> Condition:
    """It runs and generates nothing; and what stands against starting it anew, where something does."""
    message = f"it runs and does not answer: {health.reason or 'connection refused'}"
    step = _until_it_answers(service)
    if blocking is not None and blocking.reason != "NotAnswering":
        message, step = f"{message}; {blocking.message}", blocking.next_step or step
    return Condition(
        type=f"ServiceReady/{service.name}",
        status="False",
        reason="NotAnswering",
        message=message,
        next_step=step,
    )

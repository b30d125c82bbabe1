"""The resolved spec: policies decided with facts, each value with its provenance."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent.core.binding import SlotBinding, bindings
from agent.core.errors import TerminalError
from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Promoted
from agent.core.observation import ServiceFacts
from agent.core.p2p_decision import P2PDecision, decide, standing
from agent.core.plan import Refusal
from agent.core.preflight import preflight
from agent.core.render import render
from agent.core.revision import Revision, comparable
from agent.core.selection import Selection, identify, select
from agent.core.spec import Gate, Service, SshTarget, target_name
from agent.core.verdict import usable

Need = Literal["nothing", "prove", "trial", "wait"]


@dataclass(frozen=True, slots=True)
class ResolvedService:
    """One service: what the spec means now, what should run, and what must happen for it.

    ``effective`` is ``desired``, or the last good revision while ``desired`` stands rejected.
    """

    name: str
    service: Service
    gpus: tuple[str, ...]
    p2p: P2PDecision
    desired: Revision | None
    effective: Revision | None
    need: Need
    reason: str
    refusals: tuple[Refusal, ...] = ()
    running: bool = False  # its unit is active or on the way there
    must_stop: bool = False  # it stands in the way of a driver change or of its own new revision

    @property
    def fallback(self) -> bool:
        return (
            self.desired is not None and self.effective is not None and self.desired.id != self.effective.id
        )

    @property
    def target(self) -> str:
        return target_name(self.service.target)


@dataclass(frozen=True, slots=True)
class Resolved:
    selection: Selection
    slots: tuple[SlotBinding, ...] = ()
    services: Mapping[str, ResolvedService] = field(default_factory=dict)

    def slot_of(self, gpu: str) -> SlotBinding | None:
        return next((s for s in self.slots if s.gpu == gpu), None)


def trial_key(revision: Revision, gate: Gate) -> str:
    """What a rejection is about: this revision under this gate. Lower the floor, and it may be tried again."""
    return f"{revision.id}-{hashlib.sha256(gate.model_dump_json().encode()).hexdigest()[:6]}"


def resolve(inputs: Inputs) -> Resolved:
    selection = select(inputs)
    slots = bindings(inputs, selection)
    services = {
        name: resolve_service(name, service, inputs, selection, slots)
        for name, service in sorted(inputs.spec.services.items())
    }
    return Resolved(selection, slots, services)


def resolve_service(
    name: str, service: Service, inputs: Inputs, selection: Selection, slots: tuple[SlotBinding, ...]
) -> ResolvedService:
    gpus = selection.groups.get(service.gpus, ())
    p2p = decide(service, gpus, inputs)
    facts = inputs.obs.services.get(name, ServiceFacts())
    running = isinstance(facts.unit, Known) and facts.unit.value.active_state in {
        "active",
        "activating",
        "reloading",
    }
    blockers = _gpu_refusals(name, service, gpus, inputs, slots)
    desired, problem = _render(name, service, gpus, inputs, p2p)
    effective = _effective(name, desired, service, inputs)
    need, reason = _need(effective, facts, inputs, running=running)
    refusals = [*blockers, *([problem] if problem else [])]
    in_the_way = running and any(name in s.services and s.driver_wrong and s.refusal is None for s in slots)
    if in_the_way and effective is not None and need != "wait":
        need, reason = "trial", "its processes hold GPUs that change drivers"
    if need == "trial" and effective is not None:
        refusals += _start_refusals(name, service, effective, inputs, p2p)
    forbidden = bool(refusals)
    if desired is not None and (rejected := _rejected(name, desired, service, inputs)):
        refusals.append(rejected)
    if need == "trial" and forbidden:
        need = "wait"
    return ResolvedService(
        name, service, gpus, p2p, desired, effective, need, reason, tuple(refusals), running,
        must_stop=running and need == "trial",
    )  # fmt: skip


def _gpu_refusals(
    name: str, service: Service, gpus: tuple[str, ...], inputs: Inputs, slots: tuple[SlotBinding, ...]
) -> list[Refusal]:
    """GPUs that are not, and will not after this plan be, fit for the service."""
    if not isinstance(inputs.obs.pci, Known):
        reason = inputs.obs.pci.reason or "not there"
        return [
            Refusal(
                "service",
                name,
                "PciUnknown",
                f"the PCI tree cannot be read: {reason}",
                "wait for the next pass",
            )
        ]
    wanted = inputs.spec.gpus[service.gpus].select
    count = len(wanted) if isinstance(wanted, tuple) else wanted.count
    refusals = []
    if len(gpus) < count:
        message = f"group {service.gpus} has {len(gpus)} of its {count} GPUs"
        refusals.append(
            Refusal("service", name, "GpusMissing", message, "see the driver binding's condition")
        )
    for slot in slots:
        if slot.gpu in gpus and slot.refusal is not None and slot.driver_wrong:
            message = f"{slot.gpu} cannot be given to it: {slot.refusal.message}"
            refusals.append(Refusal("service", name, "GpusNotReady", message, slot.refusal.next_step))
    for gpu in gpus:
        quarantine = inputs.memory.quarantine.get(gpu)
        if quarantine is not None and Known(quarantine.boot_id) == inputs.obs.platform.boot_id:
            refusals.append(
                Refusal(
                    "service",
                    name,
                    quarantine.reason,
                    f"{gpu}: {quarantine.message}",
                    "reboot or replace it",
                    terminal=True,
                )
            )
    return refusals


def _render(
    name: str, service: Service, gpus: tuple[str, ...], inputs: Inputs, p2p: P2PDecision
) -> tuple[Revision | None, Refusal | None]:
    uuids = []
    for gpu in gpus:
        function = inputs.obs.function(gpu)
        seen = identify(gpu, function, inputs.obs, inputs.memory.identities) if function else None
        if seen is None or not seen.uuid:
            message = f"the UUID of {gpu} is not known yet: NVML has not shown it"
            return None, Refusal(
                "service", name, "GpuIdentityUnknown", message, "wait until the GPU is on nvidia"
            )
        uuids.append(seen.uuid)
    if not gpus:
        return None, Refusal(
            "service", name, "GpusMissing", f"group {service.gpus} has no GPU", "correct the spec"
        )
    try:
        return render(name, service, gpus, tuple(uuids), p2p), None
    except TerminalError as error:
        return None, Refusal("service", name, error.reason, str(error), error.next_step, terminal=True)


def _rejected(name: str, desired: Revision, service: Service, inputs: Inputs) -> Refusal | None:
    rejected = inputs.memory.rejected.get(name)
    if rejected is None or rejected.revision != trial_key(desired, service.gate):
        return None
    message = f"revision {desired.id} was tried and rejected: {rejected.message}"
    return Refusal(
        "service",
        name,
        "RevisionRejected",
        message,
        f"change the spec, or run: agent retry {name}",
        terminal=True,
    )


def _effective(name: str, desired: Revision | None, service: Service, inputs: Inputs) -> Revision | None:
    if desired is None or _rejected(name, desired, service, inputs) is None:
        return desired
    if service.gate.on_failure == "hold":
        return None
    good = last_good(name, inputs, besides=desired)
    return good.revision if good is not None else None


def last_good(name: str, inputs: Inputs, *, besides: Revision) -> Promoted | None:
    """The promoted revision that may run here now: other than the failed one, law 4 kept, its GPUs on nvidia."""
    for promoted in (inputs.memory.promoted.get(name), inputs.memory.previous.get(name)):
        if (
            promoted is not None
            and promoted.revision.id != besides.id
            and admissible(promoted.revision, inputs)
        ):
            return promoted
    return None


def admissible(revision: Revision, inputs: Inputs) -> bool:
    verdict = standing(inputs.memory.verdict_for(revision.gpus), inputs.obs, revision.gpus)
    if revision.p2p and not usable(verdict, inputs.obs, revision.gpus):
        return False
    functions = [inputs.obs.function(gpu) for gpu in revision.gpus]
    return all(f is not None and f.driver == Known("nvidia") for f in functions)


def matches(revision: Revision, facts: ServiceFacts) -> bool | None:
    """Whether exactly this revision runs; None when that cannot be known."""
    if isinstance(facts.process, Unknown) or isinstance(facts.files, Unknown):
        return None
    if isinstance(facts.process, Absent) or isinstance(facts.files, Absent):
        return False
    process = facts.process.value
    return (
        facts.files.value == revision.files
        and process.argv == revision.argv
        and comparable(process.env, revision) == revision.env
    )


def _need(
    effective: Revision | None, facts: ServiceFacts, inputs: Inputs, *, running: bool
) -> tuple[Need, str]:
    if effective is None:
        return "nothing", "nothing may run"
    if isinstance(facts.unit, Unknown):
        return "wait", f"its unit cannot be read: {facts.unit.reason}"
    if not running:
        state = facts.unit.value.active_state if isinstance(facts.unit, Known) else "not there"
        return "trial", f"it is not running ({state})"
    same = matches(effective, facts)
    if same is None:
        return "wait", "what it runs cannot be read"
    if not same:
        return "trial", "it does not run what the spec means"
    if effective.id in _proved_ids(effective.service, inputs) and not _unfinished(effective, inputs):
        return "nothing", "it runs the promoted revision"
    return "prove", "it runs the right revision, which nothing has proved yet"


def _proved_ids(name: str, inputs: Inputs) -> set[str]:
    records = (inputs.memory.promoted.get(name), inputs.memory.previous.get(name))
    return {p.revision.id for p in records if p is not None}


def _unfinished(revision: Revision, inputs: Inputs) -> bool:
    """Its last start was never judged: the agent was killed or the spec edited meanwhile, or a person asks anew."""
    trial = inputs.memory.trials.get(revision.service)
    if trial is None or trial.revision is None or trial.revision.id != revision.id:
        return False
    return trial.outcome in {None, "superseded"}


def _start_refusals(
    name: str, service: Service, revision: Revision, inputs: Inputs, p2p: P2PDecision
) -> list[Refusal]:
    refusals = preflight(name, service, revision, inputs)
    if isinstance(service.target, SshTarget) and not inputs.simulated:
        message = "ssh targets cannot be changed by this version"
        refusals.append(
            Refusal("service", name, "TargetUnsupported", message, "use target: host or {lxc: ID}")
        )
    if p2p.refusal and p2p.current:
        refusals.append(
            Refusal("service", name, "P2PRequired", p2p.refusal, "see the P2P condition, or set p2p: auto")
        )
    budget = inputs.spec.policy.budget.restarts
    remediation = revision.id in _proved_ids(
        name, inputs
    )  # a spec edit is the operator's will, not remediation
    used = [t for t in inputs.memory.starts if inputs.now - t < budget.window]
    if remediation and len(used) >= budget.count:
        message = (
            f"{len(used)} service starts in the last {budget.window:g} s, and the budget is {budget.count}"
        )
        step = f"look at the service's log, then run: agent retry {name}"
        refusals.append(Refusal("service", name, "BudgetExhausted", message, step))
    terminal = inputs.memory.terminal.get(f"service/trial/{name}")
    if terminal:
        refusals.append(
            Refusal(
                "service",
                name,
                "TrialFailed",
                terminal,
                f"mend it, then run: agent retry {name}",
                terminal=True,
            )
        )
    return refusals

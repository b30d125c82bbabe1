"""The resolved spec: policies decided with facts, each value with its provenance."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent.core.binding import SlotBinding, bindings, stand_still, with_group_mates
from agent.core.errors import TerminalError
from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Promoted
from agent.core.observation import ServiceFacts
from agent.core.obstacles import (
    gpu_refusals,
    p2p_refusal,
    selftest_obstacle,
    selftest_waits,
    start_refusals,
    unasked,
)
from agent.core.p2p_decision import P2PDecision, decide, holds, standing
from agent.core.placing import as_found, taken
from agent.core.plan import Refusal
from agent.core.render import render, without_p2p
from agent.core.revision import Revision, comparable
from agent.core.selection import Selection, identify, select
from agent.core.spec import Gate, Service, target_name

Need = Literal["nothing", "prove", "stop", "trial", "wait"]
SILENCE = 180.0  # seconds without an answer, over so many probes, before a running service is started anew
SILENT_PROBES = 3


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
    must_stop: bool = (
        False  # it was rejected, or stands in the way of a driver change or of its own new revision
    )
    p2p_obstacle: str = ""  # why its GPUs cannot be tested now, where they should be
    facts: ServiceFacts = field(default_factory=ServiceFacts)

    @property
    def fallback(self) -> bool:
        return (
            self.desired is not None and self.effective is not None and self.desired.id != self.effective.id
        )

    @property
    def untested(self) -> bool:
        return len(self.gpus) > 1 and self.service.p2p != "off" and not self.p2p.current

    @property
    def found(self) -> Service:
        """The service where it runs now, which may not be where the spec has it."""
        return as_found(self.service, self.facts)

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
    """What a rejection is about: this revision, with P2P or without, under this gate.

    Lower the floor, and it may be tried again; a P2P verdict that comes or goes makes bad arguments no better.
    """
    return f"{without_p2p(revision).id}-{hashlib.sha256(gate.model_dump_json().encode()).hexdigest()[:6]}"


def resolve(inputs: Inputs) -> Resolved:
    """What a service cannot let go of keeps its card where it is, and that may keep other services where they are:
    repeated until nothing more has to stand still.
    """
    selection = select(inputs)
    slots = bindings(inputs, selection)
    obstacles: dict[str, str] = {}
    while True:
        services = {
            name: resolve_service(name, service, inputs, selection, slots, obstacles.get(name, ""))
            for name, service in sorted(inputs.spec.services.items())
        }
        standing = _held_by_services(slots, services, inputs)
        found = _obstacles(services, standing, inputs)
        if standing == slots and found == obstacles:
            return Resolved(selection, slots, services)
        slots, obstacles = standing, found


def _held_by_services(
    slots: tuple[SlotBinding, ...], services: Mapping[str, ResolvedService], inputs: Inputs
) -> tuple[SlotBinding, ...]:
    held = tuple(
        stand_still(slot, _service_stands(slot, stays))
        if slot.refusal is None and (stays := [s for s in slot.services if not services[s].must_stop])
        else slot
        for slot in slots
    )
    return with_group_mates(held, inputs.obs.pci.value) if isinstance(inputs.obs.pci, Known) else held


def _service_stands(slot: SlotBinding, services: list[str]) -> Refusal:
    names = ", ".join(services)
    message = f"{slot.gpu} is held by service {names}, which cannot be stopped and started again now"
    return Refusal(
        "driver-binding",
        slot.gpu,
        "HeldByService",
        message,
        f"see ServiceReady/{services[0]} and mend that first",
    )


def _obstacles(
    services: Mapping[str, ResolvedService], slots: tuple[SlotBinding, ...], inputs: Inputs
) -> dict[str, str]:
    stopping = [s.found for s in services.values() if s.must_stop]
    untested = {n: s for n, s in services.items() if s.untested}
    found = {
        n: selftest_waits(n, inputs) or selftest_obstacle(s.gpus, slots, stopping, inputs)
        for n, s in untested.items()
    }
    return {n: why for n, why in found.items() if why}


def resolve_service(
    name: str,
    service: Service,
    inputs: Inputs,
    selection: Selection,
    slots: tuple[SlotBinding, ...],
    obstacle: str,
) -> ResolvedService:
    gpus = selection.groups.get(service.gpus, ())
    p2p = decide(service, gpus, inputs)
    facts = inputs.obs.services.get(name, ServiceFacts())
    running = isinstance(facts.unit, Known) and facts.unit.value.active_state in {
        "active",
        "activating",
        "reloading",
    }
    blockers = gpu_refusals(name, service, gpus, inputs, slots)
    desired, problem = _render(name, service, gpus, inputs, p2p)
    effective = _effective(name, desired, service, inputs)
    need, reason = _need(effective, facts, inputs, running=running)
    if running and desired is not None and effective is None and _rejected_runs(desired, facts, inputs):
        need, reason = "stop", "it runs a revision that was rejected, and there is none to go back to"
    refusals = [*blockers, *([problem] if problem else [])]
    in_the_way = running and any(name in s.services and s.driver_wrong and s.refusal is None for s in slots)
    if in_the_way and effective is not None and need != "wait":
        need, reason = "trial", "its processes hold GPUs that change drivers"
    if need == "wait":
        refusals.append(Refusal("service", name, "ServiceUnknown", reason, "wait for the next pass"))
    if need == "trial" and running and p2p.unknown:
        # Not a reason to take a running service away: the next pass may be able to read it.
        refusals.append(Refusal("service", name, "P2PUnknown", p2p.reason, "wait for the next pass"))
    if need == "trial" and effective is not None:
        again = desired is None or desired.id != effective.id or unasked(name, effective, inputs.memory)
        refusals += start_refusals(name, service, effective, inputs, remedy=again)
    without = p2p_refusal(name, effective, p2p, obstacle, inputs) if effective is not None else None
    refusals += [without] if without is not None else []
    forbidden = bool(refusals)
    if desired is not None and (rejected := _rejected(name, desired, service, inputs)):
        refusals.append(rejected)
    if (need == "trial" and forbidden) or (need == "prove" and without is not None):
        need = "wait"
    return ResolvedService(
        name, service, gpus, p2p, desired, effective, need, reason, tuple(refusals), running,
        must_stop=running and need in {"trial", "stop"}, p2p_obstacle=obstacle, facts=facts,
    )  # fmt: skip


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
    promoted = inputs.memory.promoted.get(name)
    if promoted is not None and promoted.revision.id == desired.id:
        return None  # what was rejected is its variant: the same with P2P switched over
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


def _rejected_runs(desired: Revision, facts: ServiceFacts, inputs: Inputs) -> bool:
    """Also where a P2P verdict came or went since. A process that the agent did not start is none of its business."""
    trial = inputs.memory.trials.get(desired.service)
    tried = trial.revision if trial is not None else None
    variant = tried is not None and without_p2p(tried).id == without_p2p(desired).id
    return any(matches(r, facts) for r in (desired, tried if variant else None) if r is not None)


def last_good(name: str, inputs: Inputs, *, besides: Revision) -> Promoted | None:
    """The promoted revision that may run here now: other than the failed one, laws 3 and 4 kept, its GPUs on nvidia.

    The spec has the last word on where: GPUs that it no longer gives to this service, and a unit or port that it gives
    to another one, are not taken back.

    Where only the verdict for P2P is gone, it is the same revision without P2P: unless that is the failed one, or the
    spec requires P2P.
    """
    for promoted in (inputs.memory.promoted.get(name), inputs.memory.previous.get(name)):
        if (
            promoted is None
            or promoted.revision.id == besides.id
            or not _on_nvidia(promoted.revision, inputs)
            or not _given(promoted.revision, inputs)
            or taken(promoted.revision, inputs.spec)
        ):
            continue
        if p2p_allowed(promoted.revision, inputs):
            return promoted
        without = without_p2p(promoted.revision, "no good P2P verdict holds any more")
        required = inputs.spec.services[name].p2p == "required"
        if not required and without.id != without_p2p(besides).id:
            return promoted.model_copy(update={"revision": without})
    return None


def p2p_allowed(revision: Revision, inputs: Inputs) -> bool:
    """Law 4, for a start of this revision now."""
    verdict = standing(inputs.memory.verdict_for(revision.gpus), inputs.obs, revision.gpus)
    return not revision.p2p or holds(verdict, inputs.obs, revision.gpus)


def _on_nvidia(revision: Revision, inputs: Inputs) -> bool:
    functions = [inputs.obs.function(gpu) for gpu in revision.gpus]
    return all(f is not None and f.driver == Known("nvidia") for f in functions)


def _given(revision: Revision, inputs: Inputs) -> bool:
    group = inputs.spec.services[revision.service].gpus
    return set(revision.gpus) <= set(select(inputs).groups.get(group, ()))


def matches(revision: Revision, facts: ServiceFacts) -> bool | None:
    """Whether exactly this revision runs; None when that cannot be known."""
    if facts.at is not None and facts.at != (revision.target, revision.unit):
        return False
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
    if _judged(effective, inputs) and not _unfinished(effective, inputs):
        silent = _silent_too_long(effective.service, facts, inputs)
        return ("trial", silent) if silent else ("nothing", "it runs the promoted revision")
    return "prove", "it runs the right revision, which nothing has proved yet"


def _silent_too_long(name: str, facts: ServiceFacts, inputs: Inputs) -> str:
    """Why a promoted service that runs must be started anew: "" while it answers, or may still come to itself.

    Who refuses connections and has never answered may still be loading, and who only lets probes time out may be
    busy with its users: both have the time that a start has.
    """
    silence = facts.silence
    if silence is None:
        return ""
    if name in inputs.memory.asked:
        return "it does not answer, and an operator asked for another try"
    loading = isinstance(facts.health, Absent) and not silence.answered
    busy = silence.probes - silence.timed_out < SILENT_PROBES
    allowed = max(SILENCE, inputs.spec.services[name].gate.start_timeout) if loading or busy else SILENCE
    if silence.probes < SILENT_PROBES or silence.seconds < allowed:
        return ""
    return f"it has not answered {silence.probes} health probes over {silence.seconds / 60:.0f} min"


def _judged(revision: Revision, inputs: Inputs) -> bool:
    """Promoted, or restored in a rollback, or found slow with nothing better to go back to."""
    trial = inputs.memory.trials.get(revision.service)
    known = _proved_ids(revision.service, inputs)
    if trial is not None:
        known |= {trial.restored}
        known |= {trial.revision.id} if trial.outcome == "degraded" and trial.revision is not None else set()
    return revision.id in known


def _proved_ids(name: str, inputs: Inputs) -> set[str]:
    records = (inputs.memory.promoted.get(name), inputs.memory.previous.get(name))
    return {p.revision.id for p in records if p is not None}


def _unfinished(revision: Revision, inputs: Inputs) -> bool:
    """Its last start was never judged: the agent was killed or the spec edited meanwhile, or a person asks anew."""
    trial = inputs.memory.trials.get(revision.service)
    if trial is None or trial.revision is None or trial.revision.id != revision.id:
        return False
    return trial.outcome in {None, "superseded"}

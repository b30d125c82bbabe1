"""The status built: pure, from the same data as the plan."""

from collections.abc import Mapping

from agent.core.bench import BenchmarkResult
from agent.core.binding import group_of
from agent.core.condition import Condition
from agent.core.fact import Absent, Known, Unknown, say, value_or
from agent.core.inputs import Inputs
from agent.core.memory import TrialRecord
from agent.core.observation import Gpu, ServiceFacts
from agent.core.quantity import say_duration
from agent.core.reach import awaited, left_open, pending, quarantined
from agent.core.redact import redact
from agent.core.resolve import Resolved, ResolvedService, matches
from agent.core.revision import Revision
from agent.core.selection import identify
from agent.core.spec import target_name
from agent.core.status import GpuStatus, HostStatus, P2PStatus, ServiceStatus, TrialStatus
from agent.core.unbind_state import detail_of

PROOF_SIMULATED = (
    "everything here happened on a simulated host: decisions, journal and HTTP are real; devices, drivers, DMA, tokens and"
    " times are not"
)
PROOF_REAL = (
    "a real host: its kernel, systemd, NVML and services said this; the authors of this version have not run it"
    " on a GPU"
)


def host_status(inputs: Inputs, simulated: str) -> HostStatus:
    platform = inputs.obs.platform
    return HostStatus(
        name=inputs.host.metadata.name,
        simulated=simulated,
        kernel=say(platform.kernel_release),
        driver=say(platform.nvidia_driver),
        iommu=_group_types(inputs),
        sev_snp=_on_off(inputs),
    )


def _on_off(inputs: Inputs) -> str:
    fact = inputs.obs.platform.sev_snp
    return ("on" if fact.value else "off") if isinstance(fact, Known) else say(fact)


def _group_types(inputs: Inputs) -> str:
    if not isinstance(inputs.obs.pci, Known):
        return say(inputs.obs.pci) if isinstance(inputs.obs.pci, Unknown) else "none"
    pci = inputs.obs.pci.value
    found = [group_of(f, pci) for f in pci.functions.values() if f.is_gpu]
    types = sorted({say(g.type) for g in found if g is not None})
    return ", ".join(types) or "no groups"


def gpu_statuses(inputs: Inputs, resolved: Resolved) -> tuple[GpuStatus, ...]:
    if not isinstance(inputs.obs.pci, Known):
        return ()
    pci = inputs.obs.pci.value
    gpus = []
    for address, function in sorted(pci.functions.items()):
        if not function.is_gpu:
            continue
        group = group_of(function, pci)
        name = resolved.selection.group_of(address)
        seen = inputs.obs.nvml.value.gpus.get(address) if isinstance(inputs.obs.nvml, Known) else None
        gpu: Gpu | None = seen.value if isinstance(seen, Known) else None
        gpus.append(
            GpuStatus(
                address=address,
                group=name,
                driver=say(function.driver),
                desired_driver=inputs.spec.gpus[name].driver if name else "",
                name=say(gpu.name) if gpu else "",
                uuid=identify(address, function, inputs.obs, inputs.memory.identities).uuid,
                numa_node=value_or(function.numa_node, None),
                iommu=say(group.type) if group else say(function.iommu_group),
                power_limit=value_or(gpu.power_limit, None) if gpu else None,
                note=_gpu_note(address, inputs, seen),
            )
        )
    return tuple(gpus)


def _gpu_note(address: str, inputs: Inputs, seen: object) -> str:
    quarantine = quarantined(address, inputs)
    if quarantine is not None:
        return f"{quarantine.reason}: {quarantine.message}"
    if address in pending(inputs):
        who = awaited(address, inputs)
        if who:
            return f"an unbind of it waits until it is let go: {who}"
        detail = detail_of(inputs.obs.unbinds.get(address))
        return f"RebootRequired: an unbind of it has not returned{detail}"
    if left_open(address, inputs):
        return "RebootRequired: nothing tells whether an unbind of it returned"
    return f"NVML: {redact(seen.reason)}" if isinstance(seen, Unknown) else ""


def p2p_statuses(resolved: Resolved) -> tuple[P2PStatus, ...]:
    found: dict[tuple[str, ...], P2PStatus] = {}
    for service in resolved.services.values():
        verdict = service.p2p.verdict
        if len(service.gpus) < 2:
            continue
        if verdict is None:
            found[service.gpus] = P2PStatus(gpus=service.gpus, verdict="not run", summary=service.p2p.reason)
            continue
        found[service.gpus] = P2PStatus(
            gpus=service.gpus,
            verdict=_verdict_word(service),
            summary=verdict.summary() if service.p2p.current and not verdict.revoked else service.p2p.reason,
            explanation=verdict.explanation,
            bad_pairs=verdict.bad_pairs(),
            tested_at=verdict.tested_at,
            current=service.p2p.current,
        )
    return tuple(found.values())


def _verdict_word(service: ResolvedService) -> str:
    verdict = service.p2p.verdict
    if verdict is None or not service.p2p.current:
        return "unknown"
    return "revoked" if verdict.revoked else verdict.result


def service_statuses(inputs: Inputs, resolved: Resolved) -> tuple[ServiceStatus, ...]:
    return tuple(_service(s, inputs) for s in resolved.services.values())


def _service(service: ResolvedService, inputs: Inputs) -> ServiceStatus:
    facts = inputs.obs.services.get(service.name, ServiceFacts())
    running = _running(service, facts, inputs)
    shown = running or service.effective or service.desired
    promoted = inputs.memory.promoted.get(service.name)
    measured, at = _figures(running, inputs, service.name)
    return ServiceStatus(
        name=service.name,
        unit=service.found.unit,
        target=target_name(service.found.target),
        state=facts.unit.value.active_state if isinstance(facts.unit, Known) else say(facts.unit),
        health=_health(facts),
        revision=running.id if running else "",
        promoted=promoted.revision.id if promoted else "",
        gpus=service.gpus,
        p2p="on" if shown and shown.p2p else "off",
        p2p_reason=service.p2p.reason,
        argv=shown.argv if shown else (),
        env=shown.env if shown else {},
        why=shown.provenance if shown else {},
        benchmark=measured,
        measured_at=at,
        trial=_trial(inputs.memory.trials.get(service.name)),
    )


def _running(service: ResolvedService, facts: ServiceFacts, inputs: Inputs) -> Revision | None:
    """Which known revision runs: by its process and files, not by what was planned."""
    promoted, previous = inputs.memory.promoted.get(service.name), inputs.memory.previous.get(service.name)
    known = [service.effective, service.desired, *(p.revision for p in (promoted, previous) if p is not None)]
    return next((r for r in known if r is not None and matches(r, facts)), None)


def _figures(
    running: Revision | None, inputs: Inputs, name: str
) -> tuple[BenchmarkResult | None, float | None]:
    """Figures belong to the revision they were measured on, never to another."""
    for record in (inputs.memory.promoted.get(name), inputs.memory.previous.get(name)):
        if record is not None and running is not None and record.revision.id == running.id:
            return record.benchmark, record.at
    return None, None


def _health(facts: ServiceFacts) -> str:
    if isinstance(facts.health, Absent):
        return facts.health.reason or "not running"
    return say(facts.health)


def _trial(record: TrialRecord | None) -> TrialStatus | None:
    if record is None:
        return None
    return TrialStatus(
        outcome=record.outcome or "running",
        phase=record.phase,
        revision=record.revision.id if record.revision else "",
        attempt=record.attempt,
        reason=record.reason,
        message=record.message,
        started_at=record.started_at,
        finished_at=record.finished_at,
        restored=record.restored,
    )


def budget_text(inputs: Inputs) -> str:
    rate = inputs.spec.policy.budget.restarts
    used = sum(inputs.now - t < rate.window for t in inputs.memory.starts)
    return f"{used} of {rate.count} unasked starts used in the last {say_duration(rate.window)}"


def agent_conditions(
    *, accepted: bool, problems: tuple[str, ...], generation: int, simulated: str
) -> list[Condition]:
    """What is true of the agent itself."""
    message = f"generation {generation} is in force" if generation else "no spec was ever accepted"
    spec = Condition(
        type="SpecAccepted",
        status="True" if accepted else "False",
        reason="Accepted" if accepted else "Invalid",
        message=message if accepted else "; ".join([*problems[:3], message]),
        next_step="" if accepted else "correct the spec file and save it",
    )
    conditions = [spec]
    if simulated:
        conditions.append(
            Condition(type="Simulated", status="True", reason="SimulatedHost", message=f"profile {simulated}")
        )
    return conditions


def with_generation(conditions: list[Condition], generation: int) -> tuple[Condition, ...]:
    return tuple(c.model_copy(update={"observed_generation": generation}) for c in conditions)


def sentence(
    *, blocked: str, done: int, failed: str, notes: tuple[str, ...], pending: int, facts: Mapping[str, str]
) -> str:
    """The one plain sentence in which a pass ends; systemd, the log and status share it."""
    if blocked:
        return f"Blocked: {blocked}."
    if failed:
        return f"Stopped after {done} of {pending} actions: {failed}."
    if notes:
        return "; ".join(notes) + "."
    if done:
        return f"Done: {done} action{'s' * (done != 1)}."
    return facts.get("idle", "Converged: nothing to do.")

"""P2P on or off for one service: the one decision that drives every consumer (law 4)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agent.core.binding import group_of
from agent.core.fact import Fact, Known, Unknown, value_or
from agent.core.inputs import Inputs
from agent.core.observation import KernelEvent, Observation
from agent.core.spec import Service, target_name
from agent.core.verdict import P2PVerdict, PathVerdict, current, fingerprint, usable

SNP_REFUSAL = "SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported"


@dataclass(frozen=True, slots=True)
class P2PDecision:
    """``on`` decides; ``reason`` says why in one sentence; ``refusal`` forbids a start altogether."""

    on: bool
    source: str  # spec, verdict, rule
    reason: str
    verdict: P2PVerdict | None = None
    current: bool = False  # the verdict speaks about the host as it is
    refusal: str = ""
    host_memory: str = ""  # why NCCL must share host memory without cuMem; "" where it need not
    unknown: str = ""  # a good verdict may still hold, and the host cannot be read well enough to tell


def decide(service: Service, gpus: tuple[str, ...], inputs: Inputs) -> P2PDecision:
    if len(gpus) < 2:
        reason = "one GPU has no peer" if gpus else "no GPU of its group was found"
        return P2PDecision(on=False, source="rule", reason=reason, current=True)
    verdict = standing(inputs.memory.verdict_for(gpus), inputs.obs, gpus)
    now = settled(verdict, inputs.obs, gpus)
    host_memory = inputs.memory.host_memory.get(target_name(service.target), "")
    if service.p2p == "off":
        said = "the spec says p2p: off"
        return P2PDecision(
            on=False, source="spec", reason=said, verdict=verdict, current=now, host_memory=host_memory
        )
    good = holds(verdict, inputs.obs, gpus)
    unread = unreadable(inputs.obs, gpus) if verdict is not None and not verdict.revoked else ""
    why = _why(verdict, unread, now=now)
    if good:
        return P2PDecision(on=True, source="verdict", reason=why, verdict=verdict, current=True)
    refusal = (
        f"the spec requires P2P, and {why}{_no_cure(verdict, inputs)}" if service.p2p == "required" else ""
    )
    may_hold = unread if verdict is not None and verdict.result == "good" and verdict.controls_ok else ""
    return P2PDecision(
        on=False,
        source="verdict",
        reason=why,
        verdict=verdict,
        current=now,
        refusal=refusal,
        host_memory=host_memory,
        unknown=may_hold,
    )


def _no_cure(verdict: P2PVerdict | None, inputs: Inputs) -> str:
    """Where the spec itself forbids what usually mends peer transfers, that is said with the kernel's own reason."""
    failed = verdict is not None and (verdict.revoked or verdict.result != "good")
    if not failed or inputs.spec.platform.sev_snp != "enabled":
        return ""
    return (
        "; sevSnp: enabled keeps the IOMMU translated and ACS on"
        f' (else the kernel says "{SNP_REFUSAL}"), so p2p: required and sevSnp: enabled cannot both be had here'
    )


def holds(verdict: P2PVerdict | None, obs: Observation, gpus: tuple[str, ...]) -> bool:
    """Law 4, and law 9 with it: two unknown boots are not the same boot."""
    return usable(verdict, obs, gpus) and not unreadable(obs, gpus)


def unreadable(obs: Observation, gpus: tuple[str, ...]) -> str:
    """What of a verdict's fingerprint cannot be read now, in words; "" when all of it can."""
    host = obs.platform
    facts: dict[str, Fact[Any]] = {
        "the boot id": host.boot_id,
        "the kernel command line": host.cmdline,
        "the driver version": host.nvidia_driver,
    }
    pci = obs.pci.value if isinstance(obs.pci, Known) else None
    for gpu in gpus:
        function = pci.functions.get(gpu) if pci else None
        if pci is None or function is None:
            facts[gpu] = Unknown("it is not seen on the PCI bus")
            continue
        group = group_of(function, pci)
        facts[f"the IOMMU group of {gpu}"] = group.type if group is not None else function.iommu_group
        facts |= {f"ACSCtl of {b}": pci.functions[b].acs_ctl for b in function.bridges if b in pci.functions}
        if function.driver == Known("nvidia"):
            facts[f"the UUID of {gpu}"] = _uuid(obs, gpu)
    return "; ".join(f"{name}: {fact.reason}" for name, fact in facts.items() if isinstance(fact, Unknown))


def _uuid(obs: Observation, gpu: str) -> Fact[str]:
    if not isinstance(obs.nvml, Known):
        return Unknown(obs.nvml.reason or "NVML was not read")
    seen = obs.nvml.value.gpus.get(gpu, Unknown("NVML does not list this GPU"))
    return seen.value.uuid if isinstance(seen, Known) else Unknown(seen.reason)


def standing(verdict: P2PVerdict | None, obs: Observation, gpus: tuple[str, ...]) -> P2PVerdict | None:
    """The verdict as it stands: a page fault on one of its GPUs since the test revokes it at once."""
    if verdict is None or verdict.revoked or verdict.result != "good":
        return verdict
    faults = [e for e in page_faults(obs, gpus) if e.last > verdict.tested_at]
    if not faults:
        return verdict
    where = ", ".join(dict.fromkeys(_path(e) for e in faults))
    text = f"{sum(e.count for e in faults)} page faults on {where} since the test"
    return verdict.model_copy(update={"revoked": text})


def settled(verdict: P2PVerdict | None, obs: Observation, gpus: tuple[str, ...]) -> bool:
    """The verdict, revoked or not, answers the question for this host as it is: there is nothing to test.

    A fault in service outweighs every later test under the same circumstances, else a service would go to and fro
    between a good test and the next fault. A change of the host, or the operator's retry, opens the question again.
    """
    if unreadable(obs, gpus):
        return False
    if verdict is None or not verdict.revoked:
        return current(verdict, obs, gpus)
    return verdict.gpus == tuple(sorted(gpus)) and verdict.fingerprint == fingerprint(obs, gpus)


def page_faults(obs: Observation, gpus: tuple[str, ...]) -> list[KernelEvent]:
    events = value_or(obs.kernel_events, ())
    return [e for e in events if e.sort == "page-fault" and e.address in gpus]


def _path(event: KernelEvent) -> str:
    return f"{event.address} to {event.peer}" if event.peer else event.address


def _why(verdict: P2PVerdict | None, unread: str, *, now: bool) -> str:
    if verdict is None:
        return "these GPUs have not been tested together, and untested is treated as off"
    if verdict.revoked:
        return f"the P2P verdict was revoked: {verdict.revoked}"
    if not verdict.controls_ok:
        return f"the self-test could not judge: {verdict.control_detail}"
    if unread:
        return f"whether the P2P verdict still holds is unknown ({unread}), and untested is treated as off"
    if not now:
        return "the host has changed since the P2P self-test, and untested is treated as off"
    tail = f" ({verdict.explanation})" if verdict.explanation and verdict.result != "good" else ""
    return f"the P2P self-test found {verdict.summary()}{tail}"


def likely_cause(paths: Iterable[PathVerdict], obs: Observation, gpus: tuple[str, ...]) -> str:
    """Why these paths are not all good, as far as the host shows it; "" when they are."""
    found = {p.result for p in paths} - {"good"}
    if not found:
        return ""
    if found == {"unsupported"}:
        return (
            "the driver offers no peer access between these GPUs: cards without P2P, or P2P switched off by an option of "
            "the module nvidia (NVreg_RegistryDwords)"
        )
    return explain(obs, gpus)


def explain(obs: Observation, gpus: tuple[str, ...]) -> str:
    """The layer that most likely spoils peer transfers between these GPUs, with the next step the host allows."""
    pci = obs.pci.value if isinstance(obs.pci, Known) else None
    if pci is None:
        return "the PCI tree could not be read"
    functions = [pci.functions[a] for a in gpus if a in pci.functions]
    types = {value_or(g.type, "unknown") for f in functions if (g := group_of(f, pci)) is not None}
    acs = sorted(
        {
            b
            for f in functions
            for b in f.bridges
            if b in pci.functions and _redirects(pci.functions[b].acs_ctl)
        }
    )
    isolated = value_or(obs.platform.sev_snp, default=True) or any(
        f.driver == Known("vfio-pci") for f in pci.functions.values() if f.is_gpu
    )
    parts = []
    if types & {"DMA", "DMA-FQ"}:
        parts.append(f"the IOMMU translates these GPUs' DMA (group type {', '.join(sorted(types))})")
    if acs:
        note = (
            "needed here by SNP or VFIO isolation, so leave it"
            if isolated
            else "nothing here needs that isolation: clearing ACSCtl there may help"
        )
        parts.append(f"ACS sends peer traffic through the root complex at {', '.join(acs)}; {note}")
    return "; ".join(parts) or "neither the IOMMU nor ACS explains it: suspect the driver or the card"


def _redirects(acs_ctl: object) -> bool:
    """Request redirect (bit 2) or completion redirect (bit 3) of the ACS control register."""
    return isinstance(acs_ctl, Known) and bool(acs_ctl.value & 0x0C)

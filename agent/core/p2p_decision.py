"""P2P on or off for one service: the one decision that drives every consumer (law 4)."""

from dataclasses import dataclass

from agent.core.binding import group_of
from agent.core.fact import Known, value_or
from agent.core.inputs import Inputs
from agent.core.observation import KernelEvent, Observation
from agent.core.spec import Service
from agent.core.verdict import P2PVerdict, current, fingerprint, usable


@dataclass(frozen=True, slots=True)
class P2PDecision:
    """``on`` decides; ``reason`` says why in one sentence; ``refusal`` forbids a start altogether."""

    on: bool
    source: str  # spec, verdict, rule
    reason: str
    verdict: P2PVerdict | None = None
    current: bool = False  # the verdict speaks about the host as it is
    refusal: str = ""


def decide(service: Service, gpus: tuple[str, ...], inputs: Inputs) -> P2PDecision:
    if len(gpus) < 2:
        return P2PDecision(on=False, source="rule", reason="one GPU has no peer", current=True)
    verdict = standing(inputs.memory.verdict_for(gpus), inputs.obs, gpus)
    now = settled(verdict, inputs.obs, gpus)
    if service.p2p == "off":
        return P2PDecision(
            on=False, source="spec", reason="the spec says p2p: off", verdict=verdict, current=now
        )
    good = usable(verdict, inputs.obs, gpus)
    why = _why(verdict, inputs.obs, gpus, now)
    if good:
        return P2PDecision(on=True, source="verdict", reason=why, verdict=verdict, current=True)
    refusal = f"the spec requires P2P, and {why}" if service.p2p == "required" else ""
    return P2PDecision(on=False, source="verdict", reason=why, verdict=verdict, current=now, refusal=refusal)


def standing(verdict: P2PVerdict | None, obs: Observation, gpus: tuple[str, ...]) -> P2PVerdict | None:
    """The verdict as it stands: a page fault on one of its GPUs since the test revokes it at once."""
    if verdict is None or verdict.revoked or verdict.result != "good":
        return verdict
    faults = [e for e in page_faults(obs, gpus) if e.last > verdict.tested_at]
    if not faults:
        return verdict
    text = (
        f"{sum(e.count for e in faults)} page faults on {', '.join(e.address for e in faults)} since the test"
    )
    return verdict.model_copy(update={"revoked": text})


def settled(verdict: P2PVerdict | None, obs: Observation, gpus: tuple[str, ...]) -> bool:
    """The verdict, revoked or not, answers the question for this host as it is: there is nothing to test.

    A fault in service outweighs every later test under the same circumstances, else a service would go to and fro
    between a good test and the next fault. A change of the host, or the operator's retry, opens the question again.
    """
    if verdict is None or not verdict.revoked:
        return current(verdict, obs, gpus)
    return verdict.gpus == tuple(sorted(gpus)) and verdict.fingerprint == fingerprint(obs, gpus)


def page_faults(obs: Observation, gpus: tuple[str, ...]) -> list[KernelEvent]:
    events = value_or(obs.kernel_events, ())
    return [e for e in events if e.sort == "page-fault" and e.address in gpus]


def _why(verdict: P2PVerdict | None, obs: Observation, gpus: tuple[str, ...], now: bool) -> str:
    if verdict is None:
        return "these GPUs have not been tested together, and untested is treated as off"
    if verdict.revoked:
        return f"the P2P verdict was revoked: {verdict.revoked}"
    if not verdict.controls_ok:
        return f"the self-test could not judge: {verdict.control_detail}"
    if not now:
        return "the host has changed since the P2P self-test, and untested is treated as off"
    tail = f" ({verdict.explanation})" if verdict.explanation and verdict.result != "good" else ""
    return f"the P2P self-test found {verdict.summary()}{tail}"


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

"""P2P: is GPU-to-GPU DMA right between a service's GPUs? Planned here, run by the prover, used by services."""

from agent.core.condition import Condition
from agent.core.errors import TerminalError
from agent.core.inputs import Inputs
from agent.core.model import with_memory
from agent.core.obstacles import selftest_waits
from agent.core.p2p_decision import page_faults
from agent.core.plan import Action, Disruption, Drift, Plan, Refusal, Stage
from agent.core.resolve import Resolved, ResolvedService
from agent.core.verdict import STAYS, P2PVerdict, PathVerdict, fingerprint
from agent.ports import Ports

NAMED = 3  # pairs, details or GPUs that a message names before it only counts


class P2PKind:
    name = "p2p"

    def diff(self, inputs: Inputs, resolved: Resolved) -> list[Drift]:
        return [
            Drift(
                self.name,
                ",".join(s.gpus),
                "verdict",
                "current",
                "none" if s.p2p.verdict is None else "stale",
                s.p2p.reason,
            )
            for s in resolved.services.values()
            if s.untested
        ]

    def plan(self, inputs: Inputs, resolved: Resolved) -> tuple[list[Action], list[Refusal]]:
        untested = [s for s in resolved.services.values() if s.untested]
        actions = [_action(s) for s in untested if not s.p2p_obstacle]
        return actions, [_cannot_test(s, inputs) for s in untested if s.p2p_obstacle]

    def predict(self, action: Action, inputs: Inputs) -> Inputs:
        """The model assumes the worst: whatever comes after must also be right with P2P off."""
        gpus = tuple(action.params["gpus"].split(","))
        pair = PathVerdict(source=gpus[0], destination=gpus[1], path="copy-push", result="corrupt")
        verdict = P2PVerdict(
            gpus=gpus, fingerprint=fingerprint(inputs.obs, gpus), result="corrupt", paths=(pair,),
            controls_ok=True, tested_at=inputs.now,
        )  # fmt: skip
        others = tuple(v for v in inputs.memory.verdicts if v.gpus != gpus)
        return with_memory(inputs, verdicts=(*others, verdict))

    def conditions(self, inputs: Inputs, resolved: Resolved, plan: Plan) -> list[Condition]:
        return [
            _condition(s, inputs)
            for s in resolved.services.values()
            if len(s.gpus) > 1 and s.service.p2p != "off"
        ]

    async def act(self, action: Action, ports: Ports) -> None:
        raise TerminalError(f"{action.verb} is run by the prover", reason="WrongDoor")


def _cannot_test(service: ResolvedService, inputs: Inputs) -> Refusal:
    message = f"its GPUs cannot be tested now: {service.p2p_obstacle}"
    step = "they are tested as soon as they are idle and the host can be read"
    held_back = service.gpus if selftest_waits(service.name, inputs) else ()
    return Refusal("p2p", service.name, "NotTestable", message, step, touches=held_back)


def _action(service: ResolvedService) -> Action:
    count = len(service.gpus) * (len(service.gpus) - 1)
    return Action(
        "p2p", "selftest", service.name, f"test peer DMA between {', '.join(service.gpus)} ({count} ordered pairs)",
        Stage.PROVE, Disruption.NONE, params={"gpus": ",".join(service.gpus)}, touches=service.gpus,
        why=service.p2p.reason, optional=True,  # a test that fails leaves P2P off
    )  # fmt: skip


def _condition(service: ResolvedService, inputs: Inputs) -> Condition:
    kind = f"P2PVerified/{service.name}"
    verdict = service.p2p.verdict
    seen = _faults_seen(inputs, service.gpus)
    if verdict is None or not service.p2p.current:
        return Condition(
            type=kind,
            status="Unknown",
            reason="NotTested" if verdict is None else "Stale",
            message=service.p2p.reason + seen,
        )
    if verdict.revoked:
        message = f"{verdict.revoked}, although the test found {verdict.summary()}{seen}"
        step = f"find the cause in the kernel log; agent retry {service.name} has it tested anew when its GPUs are next idle"
        return Condition(type=kind, status="False", reason="Revoked", message=message, next_step=step)
    if verdict.result == "good":
        return Condition(
            type=kind, status="True", reason="Good", message=verdict.summary() + _what_is_odd(verdict)
        )
    message = f"{verdict.summary()}{_what_was_found(verdict)}{_pairs(verdict)}; {verdict.explanation}{seen}"
    # With p2p: auto a bad verdict is handled (P2P is off), so it is a fact and not a fault of convergence.
    stays = any(STAYS in p.detail for p in verdict.paths)
    return Condition(
        type=kind, status="False", reason=verdict.result.title().replace("-", ""), message=message,
        next_step="only a reboot ends the named process; until then nothing tests its GPUs again" if stays else "",
    )  # fmt: skip


def _pairs(verdict: P2PVerdict) -> str:
    pairs = verdict.bad_pairs()
    more = f" and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
    return f" ({', '.join(f'{a} -> {b}' for a, b in pairs[:NAMED])}{more})" if pairs else ""


def _what_was_found(verdict: P2PVerdict) -> str:
    """``: zeros``, or with its paths where not all of them are bad: ``: dropped write over copy-pull, copy-push``."""
    every = {p.path for p in verdict.paths}
    paths: dict[str, set[str]] = {}
    details: dict[str, set[str]] = {}
    for path in verdict.paths:
        # What follows it, as an offset, differs from pair to pair; of what hung, each process is of interest.
        sort = path.detail if path.result == "hung" else path.detail.partition(";")[0]
        if path.result != "good" and sort:
            paths.setdefault(sort, set()).add(path.path)
            details.setdefault(sort, set()).add(path.detail)
    said = [
        (min(details[sort]) if len(details[sort]) == 1 else sort)
        + ("" if over == every else f" over {', '.join(sorted(over))}")
        for sort, over in sorted(paths.items())
    ]
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return ": " + "; ".join(said[:NAMED]) + more if said else ""


def _what_is_odd(verdict: P2PVerdict) -> str:
    """Right data at an odd speed, with how many pairs it is about and the figures of one."""
    odd: dict[str, dict[tuple[str, str], str]] = {}
    for path in verdict.paths:
        sort, _, figures = path.detail.partition("; ")
        if sort:
            odd.setdefault(sort, {}).setdefault((path.source, path.destination), figures)
    said = []
    for sort, pairs in sorted(odd.items()):
        (source, destination), figures = next(iter(pairs.items()))
        more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        said.append(f"{source} -> {destination}{more}: {sort}{f' ({figures})' if figures else ''}")
    return "; but " + "; ".join(said) if said else ""


def _faults_seen(inputs: Inputs, gpus: tuple[str, ...]) -> str:
    """Page faults by GPU with their peer, where the faulting address names one. The kernel leaves lines out."""
    counts: dict[str, int] = {}
    peers: dict[str, str] = {}
    for event in page_faults(inputs.obs, gpus):
        counts[event.address] = counts.get(event.address, 0) + event.count
        peers[event.address] = peers.get(event.address) or event.peer
    said = [f"{a}{f' into {peers[a]}' if peers[a] else ''} {count:,}" for a, count in sorted(counts.items())]
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return f"; IOMMU page faults at least: {', '.join(said[:NAMED])}{more}" if said else ""

"""The P2P self-test, run and remembered."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agent.core.fact import value_or
from agent.core.inputs import Inputs
from agent.core.observation import Observation
from agent.core.p2p_decision import explain, page_faults
from agent.core.verdict import P2PVerdict, fingerprint, worst
from agent.loop.store import Store
from agent.ports import P2PTestResult, Ports

KEEP_VERDICTS = 32


@dataclass(frozen=True, slots=True)
class SelfTest:
    ports: Ports
    store: Store
    look: Callable[[], Awaitable[Inputs]]
    progress: Callable[[str], None]

    async def run(self, gpus: tuple[str, ...]) -> P2PVerdict:
        """Test every ordered pair, then read the kernel log: a fault with right data is still bad."""
        before = (await self.look()).obs
        result = await self.ports.p2p_test.run(gpus, lambda text: self.progress(f"P2P self-test: {text}"))
        after = (await self.look()).obs
        verdict = judge_test(gpus, result, before, after, self.ports.clock.now())
        verdict = verdict.model_copy(update={"simulated": bool(self.ports.simulated)})
        others = tuple(v for v in self.store.memory.verdicts if v.gpus != verdict.gpus)
        self.store.update(verdicts=(*others, verdict)[-KEEP_VERDICTS:])
        return verdict


def judge_test(
    gpus: tuple[str, ...], result: P2PTestResult, before: Observation, after: Observation, now: float
) -> P2PVerdict:
    """What a finished test means. It is bound to the host as it was when the test began."""
    faults = _fault_count(after, gpus) - _fault_count(before, gpus)
    outcome = worst(p.result for p in result.paths)
    if outcome == "good" and faults > 0:
        outcome = "corrupt"
    untrusted = (
        not isinstance(after.kernel_events, type(before.kernel_events))
        or value_or(after.kernel_events, None) is None
    )
    detail = result.control_detail or (
        "the kernel log cannot be read, so faults cannot be ruled out" if untrusted else ""
    )
    return P2PVerdict(
        gpus=tuple(sorted(gpus)),
        fingerprint=fingerprint(before, gpus),
        result=outcome,
        paths=result.paths,
        controls_ok=result.controls_ok and not (untrusted and outcome == "good"),
        control_detail=detail,
        explanation="" if outcome == "good" else explain(before, gpus),
        faults=max(0, faults),
        tested_at=now,
    )


def _fault_count(obs: Observation, gpus: tuple[str, ...]) -> int:
    return sum(e.count for e in page_faults(obs, gpus))

"""The P2P self-test, run and remembered."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agent.core.errors import AgentError, TransientError
from agent.core.fact import Known, value_or
from agent.core.inputs import Inputs
from agent.core.observation import Observation
from agent.core.p2p_decision import explain, likely_cause, page_faults
from agent.core.p2p_speed import with_speeds
from agent.core.redact import redact
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
        """Test every ordered pair, then read the kernel log: a fault with right data is still bad.

        Raises TransientError when the test could not judge. That is remembered as a verdict too, and P2P is then off:
        a test that fails must not keep a service down that can do without P2P.
        """

        async def look() -> Observation:
            return (await self.look()).obs

        verdict, _ = await put_to_the_test(self.ports, look, gpus, self.progress)
        others = tuple(v for v in self.store.memory.verdicts if v.gpus != verdict.gpus)
        self.store.update(verdicts=(*others, verdict)[-KEEP_VERDICTS:])
        if not verdict.controls_ok:
            raise TransientError(f"the {verdict.summary()}")
        return verdict


async def put_to_the_test(
    ports: Ports,
    look: Callable[[], Awaitable[Observation]],
    gpus: tuple[str, ...],
    progress: Callable[[str], None],
    *,
    full: bool = False,
    seed: int | None = None,
) -> tuple[P2PVerdict, Observation]:
    """The verdict, and the host as it was when the test began. A test that cannot be run is a verdict too."""
    before = await look()
    try:
        result = await ports.p2p_test.run(
            gpus, lambda text: progress(f"P2P self-test: {text}"), full=full, seed=seed
        )
    except (AgentError, OSError) as error:
        result = P2PTestResult((), controls_ok=False, control_detail=str(error) or type(error).__name__)
    verdict = judge_test(gpus, result, before, await look(), ports.clock.now())
    return verdict.model_copy(update={"simulated": bool(ports.simulated)}), before


def judge_test(
    gpus: tuple[str, ...], result: P2PTestResult, before: Observation, after: Observation, now: float
) -> P2PVerdict:
    """What a finished test means. It is bound to the host as it was when the test began."""
    faults = _fault_count(after, gpus) - _fault_count(before, gpus)
    outcome = worst(p.result for p in result.paths)
    if outcome == "good" and faults > 0:
        outcome = "corrupt"
    untrusted = _why_untrusted(before, after)
    detail = redact(result.control_detail) + _elsewhere(result, before) or untrusted
    return P2PVerdict(
        gpus=tuple(sorted(gpus)),
        fingerprint=fingerprint(before, gpus),
        result=outcome,
        paths=with_speeds(result.paths, result.controls),
        controls_ok=result.controls_ok and not (untrusted and outcome == "good"),
        control_detail=detail,
        explanation=""
        if outcome == "good"
        else likely_cause(result.paths, before, gpus) or explain(before, gpus),
        faults=max(0, faults),
        tested_at=now,
        controls=result.controls,
        seed=result.seed,
    )


def _elsewhere(result: P2PTestResult, obs: Observation) -> str:
    """Where the library is only in a target, that is said: nothing is installed there to test for it."""
    if result.lacks != "libcuda":
        return ""
    having = [
        f"{name} (driver {facts.user_driver.value})"
        for name, facts in sorted(obs.targets.items())
        if name != "host" and isinstance(facts.user_driver, Known)
    ]
    return f"; it is in {', '.join(having)} only, and the test runs on the host" if having else ""


def _why_untrusted(before: Observation, after: Observation) -> str:
    """A kernel log that may hide page faults: then right data proves nothing."""
    if (
        not isinstance(after.kernel_events, type(before.kernel_events))
        or value_or(after.kernel_events, None) is None
    ):
        return "the kernel log cannot be read, so faults cannot be ruled out"
    if after.kernel_gaps > before.kernel_gaps:
        return "lines of the kernel log were lost during the test, so faults cannot be ruled out"
    if after.kernel_unread:
        return "the kernel log grows faster than it can be read, so faults cannot be ruled out"
    return ""


def _fault_count(obs: Observation, gpus: tuple[str, ...]) -> int:
    return sum(e.count for e in page_faults(obs, gpus))

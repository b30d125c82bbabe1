"""The P2P self-test port of a simulated host: what a test of real memory would have found."""

from collections.abc import Callable, Sequence
from itertools import permutations

from agent.core.verdict import PathVerdict
from agent.ports import P2PTestResult
from agent.sim import kernel
from agent.sim.world import World

PATHS = ("copy-push", "copy-pull", "store", "load", "concurrent")
TEST_SECONDS = 3.0  # simulated, for the whole test
STEP_DEADLINE = 30.0  # simulated: what a pair that hangs costs
GOOD_GBPS = 50.0  # illustrative, not measured


class SimP2PTest:
    """Peer data is corrupt where a group translates, and right over identity, unless a scenario says otherwise."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(
        self,
        gpus: Sequence[str],
        progress: Callable[[str], None],
        *,
        full: bool = False,  # noqa: ARG002 - a simulated fault is seen by the quick test, too
        seed: int | None = None,
    ) -> P2PTestResult:
        await self._world.enter("p2p.run", *gpus)
        control = self._world.faults.strike("p2p.control")
        if control is not None:
            progress(f"control failed: {control.detail}")
            return P2PTestResult(
                (), controls_ok=False, control_detail=control.detail or "scripted", seed=seed
            )
        pairs = list(permutations(gpus, 2))
        found: list[PathVerdict] = []
        for source, destination in pairs:
            verdicts = [self._test(source, destination, path, len(gpus)) for path in PATHS]
            for verdict in verdicts:
                progress(f"{source} -> {destination} {verdict.path} {verdict.result}")
            hung = sum(verdict.result == "hung" for verdict in verdicts)
            await self._world.clock.sleep(TEST_SECONDS / len(pairs) + hung * STEP_DEADLINE)
            found += verdicts
        self._log_faults(found)
        return P2PTestResult(tuple(found), controls_ok=True, seed=seed)

    def _test(self, source: str, destination: str, path: str, gpus: int) -> PathVerdict:
        state = self._world.state
        off = [
            a for a in (source, destination) if a not in state.gpus or state.functions[a].driver != "nvidia"
        ]
        if off:
            return self._verdict(source, destination, path, "error", f"{off[0]} is not on nvidia")
        if (rule := self._world.faults.pair(source, destination, path, gpus)) is not None:
            return self._verdict(source, destination, path, rule.result or "error", rule.detail)
        if kernel.translated(state, source) or kernel.translated(state, destination):
            return self._verdict(source, destination, path, "corrupt", "zeros")
        return self._verdict(source, destination, path, "good", "")

    def _verdict(self, source: str, destination: str, path: str, result: str, detail: str) -> PathVerdict:
        gbps = GOOD_GBPS if result == "good" else None
        return PathVerdict.model_validate(
            {
                "source": source,
                "destination": destination,
                "path": path,
                "result": result,
                "detail": detail,
                "gbps": gbps,
            }
        )

    def _log_faults(self, found: list[PathVerdict]) -> None:
        """Refused peer writes leave lines, once per ordered pair; data that is wrong by script leaves none."""
        state = self._world.state
        pairs = sorted(
            {
                (v.source, v.destination)
                for v in found
                if v.result == "corrupt"
                and (kernel.translated(state, v.source) or kernel.translated(state, v.destination))
            }
        )
        if pairs:
            with self._world.change():
                kernel.page_faults(self._world, pairs)

"""The P2P self-test of the host this runs on: controls first, then every ordered pair, then all of them at once.

Each control and each pair has a child of its own, which is replaced after an error and given up after a hang. Nothing
is judged here: what the children saw becomes path verdicts.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

from agent.core.fact import say
from agent.core.verdict import DIRECT_PATHS, PairResult, PathVerdict
from agent.host.nvidia_version import module_version
from agent.host.p2p_child import Deadlines, Ended, left_behind, run_child
from agent.host.p2p_wire import Begin, ConcurrentRequest, ControlRequest, End, PairRequest, Request
from agent.host.scan import Scan
from agent.ports import P2PTestResult

STAGED, CONCURRENT = "staged", "concurrent"
QUICK, FULL = Deadlines(), Deadlines(first=60.0, later=30.0)
_SCAN_WITHIN = 5.0  # seconds
_AT_LEAST, _QUICK_PAIR, _FULL_PAIR = (
    120.0,
    10.0,
    60.0,
)  # seconds: what the whole test may take, and more by pair
_NAMED = 3  # failed controls that are named before they are only counted
Pair = tuple[str, str]
Outcome = tuple[PairResult, str, float | None]  # result, detail, GB/s


class ChildP2PTest:
    """``P2PTestPort``. ``env`` is added to the children's environment.

    A child that outlives SIGKILL is left behind. No later test touches its GPUs while it lives, by an agent after this
    one either.
    """

    def __init__(
        self, root: Path = Path("/"), env: Mapping[str, str] | None = None, deadlines: Deadlines | None = None
    ) -> None:
        self._root = root
        self._env = dict(env or {})
        self._deadlines = deadlines
        self._scan = Scan[dict[str, str]]("children of earlier self-tests")

    async def run(
        self, gpus: Sequence[str], progress: Callable[[str], None], *, full: bool = False, seed: int | None = None
    ) -> P2PTestResult:  # fmt: skip
        """Raises OSError where no child can be started, TimeoutError where /proc cannot be read."""
        addresses = tuple(gpus)
        async with asyncio.timeout(_SCAN_WITHIN):
            left = await self._scan.run(lambda: left_behind(self._root, addresses))
        deadlines = self._deadlines or (FULL if full else QUICK)
        pairs = tuple(permutations(addresses, 2))
        most = _AT_LEAST + len(pairs) * (_FULL_PAIR if full else _QUICK_PAIR)
        test = _Test(
            pairs, self._env, deadlines, asyncio.get_running_loop().time() + most, progress,
            secrets.randbits(32) if seed is None else seed, full,
        )  # fmt: skip
        test.out = {gpu: ("hung", why) for gpu, why in left.items()}
        return await test.run(addresses, self._root)


@dataclass(slots=True)
class _Test:
    """One test under way."""

    pairs: tuple[Pair, ...]
    env: Mapping[str, str]
    deadlines: Deadlines
    until: float
    progress: Callable[[str], None]
    seed: int
    full: bool
    paths: dict[tuple[Pair, str], PathVerdict] = field(default_factory=dict)
    controls: list[PathVerdict] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # controls, in words
    # GPUs that are not touched any more: what that makes of their pairs, and why.
    out: dict[str, tuple[PairResult, str]] = field(default_factory=dict)

    async def run(self, gpus: Sequence[str], root: Path) -> P2PTestResult:
        for number, gpu in enumerate(gpus, 1):
            self.progress(f"controls {number}/{len(gpus)}")
            if gpu not in self.out and (lack := await self._host_bounce(gpu)):
                return P2PTestResult(
                    (), controls_ok=False, control_detail=_to_be_installed(lack, root), seed=self.seed,
                    lacks="cuda-bindings" if lack.missing == "bindings" else "libcuda",
                )  # fmt: skip
        for number, pair in enumerate(self.pairs, 1):
            await self._pair(pair, f"pair {number} of {len(self.pairs)}")
        await self._all_at_once()
        return P2PTestResult(
            tuple(self.paths[pair, path] for pair in self.pairs for path in (*DIRECT_PATHS, CONCURRENT)),
            controls_ok=not self.failed,
            control_detail="; ".join(self.failed[:_NAMED])
            + (f"; and {len(self.failed) - _NAMED} more" if len(self.failed) > _NAMED else ""),
            controls=tuple(self.controls),
            seed=self.seed,
        )

    async def _host_bounce(self, gpu: str) -> End | None:
        """What has to be installed before anything can be tested; None after any outcome of its own."""
        ended = await self._child(
            ControlRequest(gpu=gpu, seed=self.seed, full=self.full), lambda _begin: None
        )
        if ended.ends and ended.ends[0].missing in {"bindings", "library"}:
            return ended.ends[0]
        found = _outcomes(ended, ("host-bounce",))["host-bounce"]
        self._note_control((gpu, gpu), "host-bounce", found, stuck=ended.stuck)
        if ended.stuck:
            self.out[gpu] = ("hung", f"its host-bounce control hung, and {ended.stuck}")
        elif found[0] != "good":
            self.out[gpu] = ("not-run", f"the host-bounce control of {gpu} failed")
        return None

    async def _pair(self, pair: Pair, count: str) -> None:
        def told(begin: Begin) -> None:
            self.progress(f"{begin.source} -> {begin.destination} {begin.path}, {count}")

        left: tuple[str, ...] = (STAGED, *DIRECT_PATHS)
        while left:
            if (why := self._out(pair)) is not None:
                self._fill(pair, left, why)
                return
            request = PairRequest(
                source=pair[0], destination=pair[1], paths=left, seed=self.seed, full=self.full
            )
            ended = await self._child(request, told)
            found = _outcomes(ended, left)
            left = tuple(path for path in left if path not in found)
            self._note(pair, found, ended.stuck)
            if ended.stuck:
                self.out |= dict.fromkeys(pair, ("not-run", f"not tried any more: {ended.stuck}"))
            if (control := found.get(STAGED)) and control[0] != "good":
                result: PairResult = "hung" if ended.stuck else "not-run"
                self._fill(
                    pair, left, (result, f"its control, a copy through the host, failed: {control[0]}")
                )
                return
            if ended.hung:
                self._fill(pair, left, ("not-run", "not tried after the hang"))
                return

    def _note(self, pair: Pair, found: Mapping[str, Outcome], stuck: str) -> None:
        for path, outcome in found.items():
            if path == STAGED:
                self._note_control(pair, path, outcome, stuck=stuck)
            else:
                detail = f"{outcome[1]}; {stuck}" if stuck and outcome[0] == "hung" else outcome[1]
                self.paths[pair, path] = _verdict(pair, path, (outcome[0], detail, outcome[2]))

    def _note_control(self, pair: Pair, path: str, outcome: Outcome, *, stuck: str) -> None:
        """A control whose child cannot be ended speaks through its pairs: they are hung, and not tried again."""
        self.controls.append(_verdict(pair, path, outcome))
        if outcome[0] != "good" and not stuck:
            what = (
                f"host to {pair[0]} and back"
                if path == "host-bounce"
                else f"{pair[0]} -> {pair[1]} by way of the host"
            )
            self.failed.append(f"{what}: {outcome[0]}, {outcome[1]}")

    def _fill(self, pair: Pair, paths: Iterable[str], why: tuple[PairResult, str]) -> None:
        for path in paths:
            if path != STAGED:
                self.paths[pair, path] = _verdict(pair, path, (*why, None))

    def _out(self, pair: Pair) -> tuple[PairResult, str] | None:
        if asyncio.get_running_loop().time() >= self.until:
            return ("not-run", "the whole test's time was over")
        return next((self.out[gpu] for gpu in pair if gpu in self.out), None)

    async def _all_at_once(self) -> None:
        """Pairs whose paths all work alone, right or wrong. One that does not could end what the others share."""
        flying = []
        for pair in self.pairs:
            alone = {self.paths[pair, path].result for path in DIRECT_PATHS}
            if (why := self._out(pair)) is None and alone <= {"good", "corrupt"}:
                flying.append(pair)
            elif why is None and "unsupported" in alone:
                self._fill(pair, [CONCURRENT], ("unsupported", "not possible alone"))
            else:
                self._fill(pair, [CONCURRENT], ("not-run", why[1] if why else "it does not work alone"))
        if not flying:
            return
        self.progress("all pairs at once")
        request = ConcurrentRequest(pairs=tuple(flying), seed=self.seed, full=self.full)
        ended = await self._child(request, lambda _begin: None)
        own = {
            (end.source, end.destination): (end.result, end.detail, end.gbps)
            for end in ended.ends
            if end.source
        }
        whole = next(((e.result, e.detail, None) for e in ended.ends if not e.source), None)
        rest = whole if whole and whole[0] != "good" else _broken_off(ended)
        for pair in flying:
            self._note(pair, {CONCURRENT: own.get(pair, rest)}, ended.stuck)

    async def _child(self, request: Request, told: Callable[[Begin], None]) -> Ended:
        return await run_child(request, self.env, self.deadlines, self.until, told)


def _outcomes(ended: Ended, paths: Sequence[str]) -> dict[str, Outcome]:
    """By path, in order: what the child told, and what befell the step after that where it did not go on."""
    found: dict[str, Outcome] = {
        end.path: (end.result, end.detail, end.gbps) for end in ended.ends if end.path in paths
    }
    refused = any(outcome[0] != "good" for path, outcome in found.items() if path == STAGED)
    stopped = any(outcome[0] == "error" for outcome in found.values())
    left = [path for path in paths if path not in found]
    if left and not refused and not stopped:
        found[left[0]] = _broken_off(ended)
    return found


def _broken_off(ended: Ended) -> Outcome:
    why = ended.why or "the child ended without saying how it went"
    return ("hung" if ended.hung else "error", why, None)


def _verdict(pair: Pair, path: str, outcome: Outcome) -> PathVerdict:
    result, detail, gbps = outcome
    return PathVerdict(
        source=pair[0], destination=pair[1], path=path, result=result, detail=detail, gbps=gbps
    )


def _to_be_installed(lack: End, root: Path) -> str:
    if lack.missing == "bindings":
        return (
            f"the Python package cuda-bindings is not usable here ({lack.detail}): "
            "install it for the agent's Python, as by pip install 'gpu-host-agent[p2p]'"
        )
    return (
        f"NVIDIA's libcuda.so.1 is not usable on this host ({lack.detail}): "
        f"install the user-space part of the driver; the kernel module is {say(module_version(root))}"
    )

"""Health: a token asked for and counted, in the background; a pass never waits for it twice."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from agent.core.bench import LevelResult
from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Silence
from agent.core.spec import BenchmarkSpec, Service
from agent.core.spec_load import load
from agent.loop.health import INTERVAL, HealthProbe
from agent.ports import Completion, InferencePort
from agent.sim.host import simulated_host
from tests.loop.manual_clock import ManualClock
from tests.rig import RECIPE

Answer = int | Exception  # tokens, or what is raised


@dataclass
class Server:
    """``InferencePort`` with one answer; ``gate`` holds answers back while it is cleared."""

    answer: Answer = 1
    asked: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, url: str, path: str, timeout: float) -> tuple[int, str]:
        raise NotImplementedError

    async def complete(self, url: str, model: str, ask: str, max_tokens: int, timeout: float) -> Completion:
        self.asked += 1
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return Completion("word", self.answer, "length")

    async def benchmark_level(
        self,
        url: str,
        model: str,
        spec: BenchmarkSpec,
        concurrency: int,
        progress: Callable[[int, int], None],
    ) -> LevelResult:
        raise NotImplementedError


@dataclass
class Probed:
    server: Server
    clock: ManualClock
    probe: HealthProbe
    service: Service
    changes: list[str]

    async def of(self) -> Fact[str]:
        return await self.probe.of("qwen", self.service, "http://127.0.0.1:1")

    async def settle(self) -> None:
        """Let the background question come to its end."""
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def probed() -> AsyncIterator[Probed]:
    server, clock, changes = Server(), ManualClock(), list[str]()
    server.gate.set()

    def inference(_clock: object) -> InferencePort:
        return server

    host = simulated_host(inference=inference)
    ports = replace(host.ports, clock=clock)
    probe = HealthProbe(ports, lambda: changes.append("changed"))
    service = load(RECIPE.read_text(), "spec.yaml").spec.spec.services["qwen"]
    yield Probed(server, clock, probe, service, changes)
    await probe.close()
    await host.close()


async def test_the_first_look_asks_and_waits_for_the_answer(probed: Probed) -> None:
    assert await probed.of() == Known("ok")
    assert probed.server.asked == 1


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), Absent, "connection refused"),
        (TimeoutError(), Unknown, "no answer within"),
        (ConnectionResetError(104, "Connection reset by peer"), Unknown, "reset"),
        (OSError("HTTP 500"), Unknown, "HTTP 500"),
        (0, Unknown, "without generating a token"),
    ],
)
async def test_S1_only_a_token_counts_as_health(
    probed: Probed, answer: Answer, kind: type[Absent] | type[Unknown], words: str
) -> None:
    probed.server.answer = answer
    fact = await probed.of()
    assert isinstance(fact, kind)
    assert words in fact.reason


async def test_within_a_minute_the_last_answer_is_used(probed: Probed) -> None:
    await probed.of()
    probed.server.answer = TimeoutError()
    probed.clock.go_on(INTERVAL - 1)
    assert await probed.of() == Known("ok")
    assert probed.server.asked == 1


async def test_a_slow_server_is_asked_in_the_background_and_once_at_a_time(probed: Probed) -> None:
    await probed.of()
    probed.server.gate.clear()
    for _ in range(3):
        probed.clock.go_on(INTERVAL)
        assert await probed.of() == Known("ok")
        await probed.settle()
    assert probed.server.asked == 2


async def test_a_changed_answer_asks_for_a_pass_and_an_unchanged_one_does_not(probed: Probed) -> None:
    await probed.of()
    probed.clock.go_on(INTERVAL)
    await probed.of()
    await probed.settle()
    assert probed.changes == []
    probed.server.answer = 0
    probed.clock.go_on(INTERVAL)
    assert await probed.of() == Known("ok")
    await probed.settle()
    assert probed.changes == ["changed"]
    assert isinstance(await probed.of(), Unknown)


async def test_probes_without_an_answer_are_counted_and_timed_until_one_is_answered(probed: Probed) -> None:
    await probed.of()
    assert probed.probe.silence("qwen") is None
    probed.server.answer = TimeoutError()
    for probes in range(1, 5):
        probed.clock.go_on(INTERVAL)
        await probed.of()
        await probed.settle()
        assert probed.probe.silence("qwen") == Silence(
            probes, (probes - 1) * INTERVAL, answered=True, timed_out=probes
        )
    probed.server.answer = 1
    probed.clock.go_on(INTERVAL)
    await probed.of()
    await probed.settle()
    assert probed.probe.silence("qwen") is None


async def test_a_service_that_never_answered_may_still_be_loading_and_that_is_said(probed: Probed) -> None:
    probed.server.answer = ConnectionRefusedError()
    await probed.of()
    assert probed.probe.silence("qwen") == Silence(1, 0.0, answered=False)
    probed.probe.forget("qwen")
    assert probed.probe.silence("qwen") is None


async def test_while_a_plan_is_carried_out_no_silence_is_held_against_a_service(probed: Probed) -> None:
    probed.server.answer = TimeoutError()
    await probed.of()
    probed.probe.paused = True
    assert probed.probe.silence("qwen") is None


async def test_a_service_that_stopped_is_asked_anew_when_it_runs_again(probed: Probed) -> None:
    await probed.of()
    probed.server.answer = TimeoutError()
    probed.probe.forget("qwen")
    assert isinstance(await probed.of(), Unknown)
    assert probed.server.asked == 2


async def test_an_answer_that_comes_after_the_service_was_forgotten_is_nobodys(probed: Probed) -> None:
    await probed.of()
    probed.server.gate.clear()
    probed.clock.go_on(INTERVAL)
    await probed.of()
    await probed.settle()
    probed.probe.forget("qwen")
    probed.server.answer = 0
    probed.server.gate.set()
    await probed.settle()
    assert probed.changes == []
    probed.server.answer = 1
    assert await probed.of() == Known("ok")

"""How fast the simulated inference server is, mostly on a clock that stands still until told."""

import itertools
from typing import Any

import pytest

from agent.core.spec import BenchmarkSpec
from agent.host.inference import HttpInference
from agent.sim.clock import SimClock
from agent.sim.server_config import Config
from agent.sim.server_engine import Engine
from tests.sim.simulated_server import (
    SETTINGS,
    simulated_server,
)


def config(**more: Any) -> Config:
    return Config({**SETTINGS, "fd": 0, "time_factor": 1.0, **more})


def test_speed_is_interpolated_between_the_rows_and_scaled():
    rows = config(speeds=[[2, 100.0], [8, 300.0]])
    assert [round(rows.throughput(c), 6) for c in (1, 2, 4, 8, 64)] == [50.0, 100.0, 200.0, 300.0, 300.0]
    assert config(speeds=[[1, 100.0]], factor=0.5, time_factor=60.0).throughput(1) == pytest.approx(3000.0)


class ManualLoop:
    """Time that stands still until told, with every timer late by ``late``."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late
        self.timers: dict[int, tuple[float, Any]] = {}
        self.keys = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Any) -> Any:
        loop, key = self, next(self.keys)
        self.timers[key] = (when, call)

        class Handle:
            def cancel(self) -> None:
                loop.timers.pop(key, None)

        return Handle()

    def run_until(self, condition: Any) -> None:
        while not condition():
            key, (when, call) = min(self.timers.items(), key=lambda item: item[1][0])
            del self.timers[key]
            self.now = max(self.now, when + self.late)
            call()


class Work:
    """A completion that only knows its length."""

    numbers = itertools.count()

    def __init__(self, tokens: int) -> None:
        self.number, self.tokens = next(self.numbers), tokens
        self.started = self.overdue = self.ended = False
        self.end_level = self.first_due = 0.0

    def begin(self, level: float, first_due: float) -> None:
        self.end_level, self.first_due = level + self.tokens, first_due

    def show(self, _level: float) -> None:
        self.started = True

    def end(self) -> None:
        self.ended = True


def engine_on(loop: Any, **more: Any) -> Any:
    settings = config(**more)
    return Engine(loop, lambda: settings)


def test_streams_share_the_speed_as_others_come_and_go():
    loop = ManualLoop()
    engine = engine_on(loop, speeds=[[1, 100.0], [2, 120.0]], ttft_seconds=0.1)
    first, second = Work(200), Work(60)
    engine.add(first)
    loop.now += 1.0  # 100 tokens alone
    engine.add(second)
    loop.run_until(lambda: second.ended)
    assert loop.now == pytest.approx(102.0)  # 60 tokens each, at 60 a second
    loop.run_until(lambda: first.ended)
    assert loop.now == pytest.approx(102.4, abs=0.02)  # 40 left, alone again soon after


def test_lateness_of_the_process_and_of_its_client_does_not_add_up():
    loop = ManualLoop(late=0.004)
    engine = engine_on(loop, speeds=[[1, 100.0]])
    for _ in range(50):
        work = Work(100)
        engine.add(work)
        loop.run_until(lambda work=work: work.ended)
        loop.now += 0.005
    assert loop.now == pytest.approx(150.0, abs=0.02)


def test_a_slot_that_nobody_takes_is_free_again():
    loop = ManualLoop()
    engine = engine_on(loop, speeds=[[1, 100.0]])
    work = Work(100)
    engine.add(work)
    loop.run_until(lambda: work.ended)
    loop.now += 10.0
    late = Work(100)
    engine.add(late)
    loop.run_until(lambda: late.ended)
    assert loop.now == pytest.approx(112.0)


def test_an_answer_shorter_than_the_time_to_its_first_token_comes_with_it():
    loop = ManualLoop()
    engine = engine_on(loop, speeds=[[1, 100.0]], ttft_seconds=5.0)
    work = Work(1)
    engine.add(work)
    loop.run_until(lambda: work.ended)
    assert loop.now == pytest.approx(105.0)


def test_a_speed_of_nothing_stops_everything_until_it_changes():
    loop = ManualLoop()
    current = [config(speeds=[[1, 100.0]], factor=0.0)]
    typed: Any = loop
    engine = Engine(typed, lambda: current[0])
    work: Any = Work(100)
    engine.add(work)
    loop.now += 50.0
    engine.settle()
    current[0] = config(speeds=[[1, 100.0]])
    engine.resume()
    loop.run_until(lambda: work.ended)
    assert loop.now == pytest.approx(151.0)


@pytest.mark.parametrize(("concurrency", "expected"), [(1, 108.3), (16, 873.0)])
async def test_a_benchmark_measures_about_the_speed_in_the_table(tmp_path, concurrency, expected):
    with simulated_server(tmp_path, time_factor=30.0) as server:
        spec = BenchmarkSpec(output_tokens=300, requests_per_slot=2, repeats=1)
        level = await HttpInference(SimClock(30.0)).benchmark_level(
            f"http://127.0.0.1:{server.port}", "m", spec, concurrency, lambda _done, _total: None
        )
    assert level.errors == ()
    assert (level.ok, level.tokens) == (2 * concurrency, 600 * concurrency)
    assert level.throughput == pytest.approx(expected, rel=0.4)
    assert level.ttft.p50 < level.e2e.p50

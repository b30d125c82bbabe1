"""A benchmark level against servers with every habit of real ones, and against broken ones."""

import asyncio
import json
import statistics
import time

import pytest

from agent.core.bench import LevelResult
from agent.core.figures import Histogram, client_bottleneck
from agent.core.spec import BenchmarkSpec
from agent.host.clock import SystemClock
from agent.host.http_stream import BadReplyError, EventDecoder
from agent.host.inference import HttpInference
from agent.host.level_bench import make_prompt
from agent.ports import Clock
from tests.gate.fast_clock import FastClock
from tests.gate.truth_server import Habits, TruthServer, serving

SMALL = BenchmarkSpec(concurrency=(2,), input_tokens=16, output_tokens=20, requests_per_slot=2, repeats=1)


async def measure(
    habits: Habits, spec: BenchmarkSpec = SMALL, concurrency: int = 2, clock: Clock | None = None
) -> tuple[LevelResult, TruthServer]:
    async with serving(habits) as server:
        level = await HttpInference(clock or SystemClock()).benchmark_level(
            server.url, "tiny", spec, concurrency, lambda _done, _total: None
        )
    return level, server


@pytest.mark.parametrize(
    "habits",
    [
        Habits(),
        Habits(framing="close"),
        Habits(framing="length"),
        Habits(newline="\r\n"),
        Habits(comments=True),
        Habits(comments=True, newline="\r\n", multi_line=True, split=7),
        Habits(split=1),
        Habits(split=3, framing="close"),
        Habits(multi_line=True),
        Habits(done=False),
        Habits(done=False, framing="close"),
        Habits(done=False, end_chunk=False),
        Habits(linger=True),
        Habits(final_blank=False),
        Habits(usage="finish"),
        Habits(usage="finish", running_usage=False),
        Habits(running_usage=False),
        Habits(reasoning=True),
        Habits(per_chunk=3),
        Habits(per_chunk=50),
        Habits(finish="stop"),
        Habits(finish="", done=True),
    ],
    ids=str,
)
async def test_every_habit_of_a_sound_server_gives_exact_token_counts(habits):
    level, _ = await measure(habits)
    assert level.errors == ()
    assert (level.requests, level.ok) == (4, 4)
    assert (level.tokens, level.expected_tokens) == (80, 80)
    assert level.throughput == pytest.approx(80 / level.wall)


@pytest.mark.parametrize(
    ("habits", "said"),
    [
        (Habits(usage="none", running_usage=False), "server reported no usage"),
        (Habits(finish="abort"), "finish_reason abort"),
        (Habits(finish="", done=False), "without a finish_reason"),
        (Habits(die_after=3), "in the middle of its answer"),
        (Habits(die_after=3, framing="close"), "without a finish_reason"),
        (Habits(error_after=3), "CUDA error: illegal memory access"),
        (Habits(silent=True), "reported 5 tokens but sent no text"),
        (Habits(token_offset=4), "9 tokens where 5 were asked for"),
        (Habits(fail_from=1), "HTTP 500: out of memory"),
        (Habits(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine"), "holds no events"),
        (Habits(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: {nonsense\n\n"), "not JSON: {nonsense"),
        (Habits(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: 7\n\n"), "no object: 7"),
        (Habits(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\ndata: [DONE]\n\n"), "no usage"),
        (Habits(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"[" * 100_000 + b"\n\n"), "not JSON"),
        (Habits(raw=b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"x" * 2_000_000), "larger than"),
        (Habits(raw=b"\x00\x01\x02\x03"), "not HTTP"),
    ],
    ids=str,
)
async def test_S1_a_server_that_answers_nothing_usable_has_no_tokens_and_says_why(habits, said):
    level, server = await measure(habits)
    assert (level.ok, level.tokens, level.throughput) == (0, 0, 0.0)
    assert (level.requests, level.expected_tokens) == (4, 80)
    assert any(said in error for error in level.errors), level.errors
    assert len(server.bodies) == 2  # the warm-up wave was enough


async def test_a_dead_port_gives_a_level_without_tokens():
    async with serving() as server:
        pass
    level = await HttpInference(SystemClock()).benchmark_level(
        server.url, "tiny", SMALL, 2, lambda _d, _t: None
    )
    assert (level.ok, level.tokens) == (0, 0)
    assert "2 requests" in level.errors[0]


async def test_a_server_that_fails_later_is_not_hidden_by_the_median():
    spec = SMALL.model_copy(update={"repeats": 3})
    level, _ = await measure(Habits(fail_from=13), spec)  # 2 + 12 requests: the last repeat has the failures
    assert (level.requests, level.ok) == (4, 2)
    assert level.errors == ("HTTP 500: out of memory (2 requests)",)


async def test_short_answers_are_counted_and_named():
    level, _ = await measure(Habits(token_offset=-1))
    assert (level.ok, level.tokens, level.expected_tokens) == (4, 76, 80)
    assert level.errors == ("19 tokens instead of 20 (finish_reason length) (4 requests)",)


async def test_the_request_asks_for_fixed_length_usage_and_unique_prompts():
    level, server = await measure(Habits(), SMALL.model_copy(update={"repeats": 2}))
    assert level.ok == 4
    warm_up, measured = server.bodies[:2], server.bodies[2:]
    assert {b["max_tokens"] for b in warm_up} == {5}
    assert {b["max_tokens"] for b in measured} == {20}
    for body in server.bodies:
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert (body["stream"], body["ignore_eos"], body["temperature"], body["model"]) == (
            True,
            True,
            0,
            "tiny",
        )
    prompts = [b["messages"][0]["content"] for b in server.bodies]
    assert len(set(prompts)) == len(prompts) == 10


def test_prompts_repeat_for_a_seed_and_differ_between_runs_in_their_first_words():
    first, again, later = (make_prompt(run, "4-1-0", 50) for run in ("run 1", "run 1", "run 2"))
    assert first == again
    assert first.split()[2:] == later.split()[2:]
    assert first[:10] != later[:10]
    assert 45 <= len(first.split()) <= 55


async def test_the_loop_keeps_exactly_as_many_requests_in_flight_as_the_level_asks():
    spec = SMALL.model_copy(update={"requests_per_slot": 3})
    level, server = await measure(Habits(pace=0.001), spec, concurrency=5)
    assert server.peak == 5
    assert level.requests == 15


async def test_progress_counts_every_request_up_to_the_total():
    seen: list[tuple[int, int]] = []
    async with serving() as server:
        await HttpInference(SystemClock()).benchmark_level(
            server.url, "tiny", SMALL, 2, lambda done, total: seen.append((done, total))
        )
    assert seen == [(n, 6) for n in range(1, 7)]


@pytest.mark.parametrize(
    "habits",
    [
        Habits(first=0.05, pace=0.005),
        Habits(first=0.05, pace=0.005, per_chunk=4),
        Habits(first=0.05, pace=0.005, reasoning=True),
        Habits(first=0.05, pace=0.005, running_usage=False),
    ],
    ids=str,
)
async def test_figures_are_about_those_that_the_server_knows_to_be_true(habits):
    level, server = await measure(habits, SMALL.model_copy(update={"output_tokens": 40}), concurrency=4)
    truths = server.truths[4:]  # without the warm-up wave
    assert level.tokens == sum(t.tokens for t in truths) == 320
    wall = max(t.last_at for t in truths) - min(t.asked_at for t in truths)
    itl = statistics.median((t.last_at - t.first_at) / (t.tokens - habits.per_chunk) for t in truths)
    assert level.throughput == pytest.approx(320 / wall, rel=0.3)
    assert level.ttft.p50 == pytest.approx(
        statistics.median(t.first_at - t.asked_at for t in truths), rel=0.3
    )
    assert level.e2e.p50 == pytest.approx(statistics.median(t.last_at - t.asked_at for t in truths), rel=0.3)
    assert level.itl.p50 == pytest.approx(itl, rel=0.3)
    assert level.per_request == pytest.approx(40 / level.e2e.p50, rel=0.3)


async def test_S8_a_stalled_stream_is_given_up_on_the_given_clock():
    level, _ = await measure(Habits(stall_after=3), clock=FastClock(500.0))
    assert (level.ok, level.void) == (0, "")
    assert level.errors == ("no token for 120 s (2 requests)",)


async def test_S8_comments_do_not_keep_a_stalled_stream_alive():
    level, _ = await measure(Habits(stall_after=0, ping_forever=True), clock=FastClock(500.0))
    assert level.errors == ("no token for 600 s (2 requests)",)


async def test_S8_the_deadline_of_the_benchmark_voids_the_level():
    spec = SMALL.model_copy(update={"timeout": 60.0, "repeats": 50})
    level, _ = await measure(Habits(first=0.02), spec, clock=FastClock(300.0))
    assert level.void.startswith("not finished within 60 s: ")
    assert level.void.endswith(" of 202 requests")


async def test_a_cancelled_level_stops_at_once():
    async with serving(Habits(stall_after=1)) as server:
        bench = HttpInference(SystemClock()).benchmark_level(
            server.url, "tiny", SMALL, 2, lambda _d, _t: None
        )
        task = asyncio.create_task(bench)
        while server.flying < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_errors_are_bounded_to_five_distinct_messages():
    spec = SMALL.model_copy(update={"requests_per_slot": 20})
    seen = 0

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await reader.readuntil(b"\r\n\r\n")
        choice = {"delta": {"content": "a"}, "finish_reason": "stop"}
        chunk = json.dumps({"choices": [choice], "usage": {"completion_tokens": 1 + seen % 11}})
        writer.write(f"HTTP/1.1 200 OK\r\n\r\ndata: {chunk}\n\ndata: [DONE]\n\n".encode())
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        level = await HttpInference(SystemClock()).benchmark_level(url, "tiny", spec, 2, lambda _d, _t: None)
    assert len(level.errors) == 5
    assert level.requests == 40


async def test_a_client_that_is_itself_late_voids_the_level():
    spec = SMALL.model_copy(update={"requests_per_slot": 20})
    async with serving(Habits(first=0.001)) as server:
        level = await HttpInference(SystemClock()).benchmark_level(
            server.url, "tiny", spec, 2, lambda _d, _t: time.sleep(0.05)
        )
    assert level.void.startswith("the client was the bottleneck: it was ")
    assert level.tokens == 800


@pytest.mark.parametrize(
    ("cpu", "lag", "samples", "gap", "void"),
    [
        (0.5, 0.001, 100, 0.01, False),
        (0.86, 0.0, 100, 0.01, True),
        (0.5, 0.004, 100, 0.001, False),  # timers are never better than that
        (0.5, 0.006, 100, 0.01, True),
        (0.5, 0.006, 100, 0.1, False),
        (0.5, 0.030, 100, 0.1, True),
        (0.5, 0.030, 10, 0.1, False),  # too few samples to speak of a percentile
    ],
)
def test_the_client_is_the_bottleneck_when_it_is_busy_or_late(cpu, lag, samples, gap, void):
    histogram = Histogram()
    histogram.add(lag, samples)
    assert bool(client_bottleneck(cpu, histogram, gap)) is void


def test_a_histogram_knows_quantiles_to_half_a_percent_in_bounded_memory():
    histogram = Histogram()
    for n in range(1, 100_001):
        histogram.add(n / 1000)
    assert histogram.quantile(0.5) == pytest.approx(50, rel=0.006)
    assert histogram.quantile(0.99) == pytest.approx(99, rel=0.006)
    assert len(histogram._bins) < 1300
    assert Histogram().quantile(0.5) == 0.0


@pytest.mark.parametrize("size", range(1, 12))
def test_events_are_the_same_however_the_bytes_are_split(size):
    stream = "retry: 3\r\n: ping\r\ndata: é1\r\ndata: 2\r\n\r\nevent: x\n\n\ndata:3\n\nid: 7\ndata: \n\ndata: tail".encode()
    decoder = EventDecoder()
    events = [e for i in range(0, len(stream), size) for e in decoder.feed(stream[i : i + size])]
    assert events + decoder.finish() == ["é1\n2".encode(), b"3", b"", b"tail"]


def test_an_event_without_end_is_refused_before_it_fills_the_memory():
    decoder = EventDecoder()
    with pytest.raises(BadReplyError, match="larger than"):
        for _ in range(2_000_000):
            decoder.feed(b"data:\n" * 100)

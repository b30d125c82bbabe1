"""One concurrency level of a benchmark: a closed loop of workers, and the figures it gives."""

import asyncio
import errno
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agent.core.bench import LevelResult
from agent.core.figures import Histogram, Repeat, Samples, client_bottleneck, level_result
from agent.core.spec import BenchmarkSpec
from agent.host.chat_stream import ChatStream
from agent.host.http_stream import Endpoint, build_request, exchange
from agent.ports import Clock

FIRST_TOKEN_LIMIT = 600.0  # seconds a request may wait in the server's queue
STALL_LIMIT = 120.0  # seconds between two tokens; keep-alive comments do not count
_WATCH_EVERY = 5.0
_LAG_PERIOD = 0.02  # real seconds
_MAX_ERRORS = 5
# What this machine, not the server, ran out of.
_OUR_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem"
    " hand part place case week company system program question work number night point home water room mother"
    " area money story fact month lot right study book eye job word business issue side kind head house service"
    " friend father power hour game line end member law car city name team minute idea body back parent face"
)
_WORDS = tuple(_TEXT.split())


def make_prompt(run: str, seed: str, words: int) -> str:
    """About ``words`` words, the same for the same seed. ``run`` in front makes the prefix unique: no cache hits."""
    chosen = random.Random(seed)
    return " ".join([f"{run}-{seed}:", *(chosen.choice(_WORDS) for _ in range(max(0, words - 1)))])


@dataclass(slots=True)
class _Wave:
    """Requests that the workers share. ``last_at``: when the last token of the wave came."""

    number: int
    tokens: int  # per request
    pending: Iterator[int]
    samples: Samples
    ok: int = 0
    got: int = 0
    last_at: float = 0.0


@dataclass(slots=True)
class ClientLoad:
    """How busy and how late this client's event loop is, in real time."""

    cpu_share: float = 0.0
    seconds: float = 0.0
    lag: Histogram = field(default_factory=Histogram)

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        sampler = asyncio.create_task(self._sample(loop))
        began, cpu = loop.time(), time.thread_time()
        try:
            yield
        finally:
            sampler.cancel()
            self.seconds = loop.time() - began
            self.cpu_share = (time.thread_time() - cpu) / self.seconds if self.seconds > 0 else 0.0

    async def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            due = loop.time() + _LAG_PERIOD
            await asyncio.sleep(_LAG_PERIOD)
            late = loop.time() - due
            # Weighted by the time it covers, else the later the client, the fewer the samples that show it.
            self.lag.add(late, 1 + max(0, int(late / _LAG_PERIOD)))


class LevelBench:
    """Runs one level once.

    Each worker opens a connection, sends a request, reads the answer to its end and takes the next. The time of a
    request begins before the connection is opened, as a user's does.
    """

    def __init__(
        self,
        clock: Clock,
        endpoint: Endpoint,
        model: str,
        spec: BenchmarkSpec,
        concurrency: int,
    ) -> None:
        self._clock = clock
        self._endpoint = endpoint
        self._model = model
        self._spec = spec
        self._concurrency = concurrency
        self._progress: Callable[[int, int], None] = lambda _done, _total: None
        self._run_name = f"run {int(clock.now() * 1000)}"
        self._requests = concurrency * spec.requests_per_slot
        self._total = concurrency + self._requests * spec.repeats
        self._done = 0
        self._flying: dict[ChatStream, asyncio.Timeout] = {}
        self._gave_up: dict[ChatStream, str] = {}
        self._errors: dict[str, int] = {}
        self._late = False  # past the deadline of the benchmark
        self._void = ""

    async def run(self, progress: Callable[[int, int], None]) -> LevelResult:
        """The figures. ``progress(done, total)`` after every request, the warm-up's included."""
        self._progress = progress
        deadline = self._clock.monotonic() + self._spec.timeout
        watch = asyncio.create_task(self._watch(deadline))
        try:
            return await self._measure()
        finally:
            watch.cancel()

    async def _measure(self) -> LevelResult:
        warm_up = await self._wave(0, self._concurrency, max(1, self._spec.output_tokens // 4), Samples())
        if not warm_up.ok or self._late:
            # Nothing answers: measuring would only repeat it, each request up to its time limit.
            return self._result([self._nothing()], Samples(), "")
        samples, repeats, load = Samples(), list[Repeat](), ClientLoad()
        self._errors.clear()
        began = self._clock.monotonic()
        async with load.measured():
            for number in range(1, self._spec.repeats + 1):
                if not self._late:
                    repeats.append(
                        await self._wave(number, self._requests, self._spec.output_tokens, samples)
                    )
        pace = (self._clock.monotonic() - began) / load.seconds if load.seconds > 0 else 1.0
        slow_client = client_bottleneck(
            load.cpu_share, load.lag, samples.gap.quantile(0.5) / pace if pace else 0.0
        )
        return self._result(repeats, samples, slow_client)

    def _result(self, repeats: list[Repeat], samples: Samples, slow_client: str) -> LevelResult:
        void = self._void or slow_client
        if self._late:
            void = f"not finished within {self._spec.timeout:g} s: {self._done} of {self._total} requests"
        errors = [
            text if count == 1 else f"{text} ({count} requests)" for text, count in self._errors.items()
        ]
        return level_result(self._concurrency, repeats, samples, void=void, errors=errors)

    def _nothing(self) -> Repeat:
        return Repeat(self._requests, 0, 0, self._requests * self._spec.output_tokens, 0.0)

    async def _wave(self, number: int, requests: int, tokens: int, samples: Samples) -> Repeat:
        began = self._clock.monotonic()
        wave = _Wave(number, tokens, iter(range(requests)), samples, last_at=began)
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._concurrency, requests)):
                workers.create_task(self._work(wave))
        return Repeat(requests, wave.ok, wave.got, requests * tokens, wave.last_at - began)

    async def _work(self, wave: _Wave) -> None:
        for index in wave.pending:
            if self._late:
                return
            await self._request(wave, index)
            self._done += 1
            self._progress(self._done, self._total)

    async def _request(self, wave: _Wave, index: int) -> None:
        request = self._chat(wave, index)
        stream = ChatStream(wave.samples, self._clock.monotonic())
        try:
            async with asyncio.timeout(None) as limit:
                self._flying[stream] = limit
                await exchange(self._endpoint, request, stream, self._clock.monotonic)
            tokens = stream.close(wave.tokens)
        except OSError as error:
            if error.errno in _OUR_LIMITS:
                self._void = f"the client ran out of resources: {error.strerror}"
            self._note(self._gave_up.pop(stream, "") or str(error) or type(error).__name__)
            return
        finally:
            del self._flying[stream]
        stream.record()
        wave.ok += 1
        wave.got += tokens
        wave.last_at = max(wave.last_at, stream.last_at)
        if tokens != wave.tokens:
            self._note(
                f"{tokens} tokens instead of {wave.tokens} (finish_reason {stream.finish or 'missing'})"
            )

    def _chat(self, wave: _Wave, index: int) -> bytes:
        seed = f"{self._concurrency}-{wave.number}-{index}"
        body = {
            "model": self._model,
            "messages": [
                {"role": "user", "content": make_prompt(self._run_name, seed, self._spec.input_tokens)}
            ],
            "max_tokens": wave.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return build_request(self._endpoint, "POST", "/v1/chat/completions", json.dumps(body).encode())

    def _note(self, text: str) -> None:
        if text in self._errors or len(self._errors) < _MAX_ERRORS:
            self._errors[text] = self._errors.get(text, 0) + 1

    async def _watch(self, deadline: float) -> None:
        """End requests that stall, and all of them at the deadline of the benchmark."""
        loop = asyncio.get_running_loop()
        while not self._late:
            left = deadline - self._clock.monotonic()
            await self._clock.sleep(min(_WATCH_EVERY, max(left, 0.0)))
            now = self._clock.monotonic()
            self._late = now >= deadline
            for stream, limit in self._flying.items():
                if stream not in self._gave_up and (why := self._why_give_up(stream, now)):
                    self._gave_up[stream] = why
                    limit.reschedule(loop.time())

    def _why_give_up(self, stream: ChatStream, now: float) -> str:
        if self._late:
            return f"no complete answer by the benchmark's deadline of {self._spec.timeout:g} s"
        waited, limit = (
            now - stream.progress_at,
            STALL_LIMIT if stream.first_at is not None else FIRST_TOKEN_LIMIT,
        )
        return f"no token for {limit:g} s" if waited > limit else ""

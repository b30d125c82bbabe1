"""An OpenAI-compatible server over HTTP: ``ports.InferencePort`` on plain asyncio."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from agent.core.bench import LevelResult
from agent.core.spec import BenchmarkSpec
from agent.host.chat_stream import error_text, excerpt, usage_tokens
from agent.host.http_stream import BadReplyError, Body, Endpoint, build_request, exchange, parse_endpoint
from agent.host.level_bench import LevelBench
from agent.ports import Clock, Completion

T = TypeVar("T")


class HttpInference:
    """Every duration, timeouts included, is the given clock's: a compressed clock compresses them all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def get(self, url: str, path: str, timeout: float) -> tuple[int, str]:
        """Status and body. Raises ``OSError``, or ``TimeoutError`` after ``timeout`` seconds."""
        endpoint = parse_endpoint(url)
        body = await self._fetch(endpoint, build_request(endpoint, "GET", path), timeout, f"GET {url}{path}")
        return body.status, body.text

    async def complete(
        self,
        url: str,
        model: str,
        ask: str,
        max_tokens: int,
        timeout: float,
    ) -> Completion:
        """One chat completion at temperature 0; ``tokens`` is 0 where the server reports no usage.

        Raises ``OSError`` (also ``BadReplyError``: any status but 200, or no completion) or ``TimeoutError``.
        """
        endpoint = parse_endpoint(url)
        path = "/v1/chat/completions"
        question = {
            "model": model,
            "messages": [{"role": "user", "content": ask}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": False,
        }
        request = build_request(endpoint, "POST", path, json.dumps(question).encode())
        what = f"POST {url}{path}"
        return _completion(await self._fetch(endpoint, request, timeout, what), what)

    async def benchmark_level(
        self,
        url: str,
        model: str,
        spec: BenchmarkSpec,
        concurrency: int,
        progress: Callable[[int, int], None],
    ) -> LevelResult:
        """One level: a discarded warm-up wave, then ``repeats`` measured ones, in a closed loop.

        A request that fails is counted, not raised. A level in which no warm-up request succeeded is not measured:
        it has no tokens. ``spec.timeout`` ends a level with ``void`` set.
        """
        return await LevelBench(self._clock, parse_endpoint(url), model, spec, concurrency).run(progress)

    async def _fetch(self, endpoint: Endpoint, request: bytes, timeout: float, what: str) -> Body:
        body = Body()
        try:
            await self._within(timeout, exchange(endpoint, request, body, self._clock.monotonic))
        except TimeoutError as error:
            raise TimeoutError(f"{what}: no complete answer within {timeout:g} s") from error
        return body

    async def _within(self, seconds: float, work: Awaitable[T]) -> T:
        """``work``, or ``TimeoutError`` after so many seconds of the clock."""
        async with asyncio.timeout(None) as limit:
            alarm = asyncio.create_task(self._ring(seconds, limit))
            try:
                return await work
            finally:
                alarm.cancel()

    async def _ring(self, seconds: float, limit: asyncio.Timeout) -> None:
        await self._clock.sleep(seconds)
        limit.reschedule(asyncio.get_running_loop().time())


def _completion(reply: Body, what: str) -> Completion:
    try:
        document: Any = json.loads(reply.data)
    except (ValueError, RecursionError):
        document = None
    if reply.status != 200 or not isinstance(document, dict) or error_text(document):
        said = error_text(document) or excerpt(reply.text) or "no text"
        raise BadReplyError(f"{what}: HTTP {reply.status}: {said}")
    try:
        choice = document["choices"][0]
        message = choice["message"]
        parts = [message.get("reasoning_content") or message.get("reasoning"), message.get("content")]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadReplyError(f"{what}: the answer holds no completion: {excerpt(reply.text)}") from error
    text = "\n".join(part for part in parts if isinstance(part, str) and part)
    return Completion(text, usage_tokens(document.get("usage")) or 0, str(choice.get("finish_reason") or ""))

"""A small OpenAI-compatible server on a real socket that paces its tokens and knows the true figures.

Its ``Habits`` are those of real servers, and of broken ones.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Habits:
    first: float = 0.01  # real seconds to the first token
    pace: float = 0.0  # real seconds per token
    per_chunk: int = 1  # tokens in one chunk
    framing: str = "chunked"  # chunked, close, length
    newline: str = "\n"
    comments: bool = False  # ": ping" between events
    multi_line: bool = False  # the JSON of an event over several data lines
    split: int = 0  # write so many bytes at a time
    done: bool = True  # send [DONE]
    end_chunk: bool = True  # send the chunk of size zero that ends a chunked answer
    linger: bool = False  # keep the connection open after everything is sent
    final_blank: bool = True  # an empty line after the last event
    usage: str = "separate"  # separate (a chunk with empty choices), finish (on the finish chunk), none
    running_usage: bool = True
    finish: str = "length"  # "" sends none
    reasoning: bool = False
    silent: bool = False  # chunks without text
    token_offset: int = 0  # more or fewer tokens than asked for
    die_after: int = -1  # close the connection after so many tokens
    stall_after: int = -1  # say nothing more after so many tokens
    ping_forever: bool = False  # when stalled, go on sending comments
    error_after: int = -1  # send an error event after so many tokens
    raw: bytes = b""  # send exactly this instead of any answer
    fail_from: int = 1 << 30  # requests from this number on get ``fail_status``
    fail_status: int = 500
    answer: str = "7 * 13 = 91."  # of plain completions


@dataclass
class Truth:
    """What one streamed answer really was; times of the real monotonic clock."""

    asked_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0


@dataclass
class TruthServer:
    """``url`` to ask it; ``bodies``, ``peak`` and ``truths`` to know what was asked and sent."""

    habits: Habits
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    flying: int = 0
    peak: int = 0
    truths: list[Truth] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.flying += 1
        self.peak = max(self.peak, self.flying)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.flying -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next((int(h[15:]) for h in head.split("\r\n") if h.lower().startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        self.bodies.append(body)
        if self.habits.raw:
            writer.write(self.habits.raw)
            await writer.drain()
        elif len(self.bodies) >= self.habits.fail_from:
            await self._plain(
                writer, json.dumps({"error": {"message": "out of memory"}}), self.habits.fail_status
            )
        elif not body:
            await self._plain(writer, "fine", 200)
        elif body["stream"]:
            await self._stream(writer, body["max_tokens"] + self.habits.token_offset)
        else:
            await self._plain(writer, json.dumps(self._completion()), 200)

    def _completion(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.habits.answer}
        if self.habits.reasoning:
            message["reasoning_content"] = "Seven times thirteen."
        usage = {} if self.habits.usage == "none" else {"usage": {"completion_tokens": 9}}
        return {"choices": [{"message": message, "finish_reason": self.habits.finish}], **usage}

    async def _plain(self, writer: asyncio.StreamWriter, text: str, status: int) -> None:
        await asyncio.sleep(self.habits.first)
        body = text.encode()
        framing = f"Content-Length: {len(body)}\r\n" if self.habits.framing != "close" else ""
        writer.write(f"HTTP/1.1 {status} X\r\n{framing}\r\n".encode() + body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        parts = list(self._events(tokens))
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Connection: keep-alive"]
        if self.habits.framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
        if self.habits.framing == "length":
            lines.append(f"Content-Length: {sum(len(data) for _, data in parts)}")
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        truth = Truth(time.monotonic())
        self.truths.append(truth)
        for count, data in parts:
            if count > truth.tokens:
                due = truth.asked_at + self.habits.first + self.habits.pace * (count - self.habits.per_chunk)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                truth.tokens, truth.last_at = count, time.monotonic()
                truth.first_at = truth.first_at or truth.last_at
            await self._write(writer, data)
            if 0 <= self.habits.die_after <= count:
                return
            if 0 <= self.habits.stall_after <= count:
                await self._stall(writer)
        if self.habits.linger:
            await self._stall(writer)
        if self.habits.framing == "chunked" and self.habits.end_chunk:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _stall(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(0.01)
            if self.habits.ping_forever:
                await self._write(writer, b": ping\n\n")
            if writer.is_closing():
                return

    def _events(self, tokens: int) -> Iterator[tuple[int, bytes]]:
        """(tokens sent so far, bytes of one event)."""
        h = self.habits
        yield 0, self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0)
        count = 0
        while count < tokens:
            if h.error_after == count:
                yield count, self._event({"error": {"message": "CUDA error: illegal memory access"}}, None)
            count = min(tokens, count + h.per_chunk)
            name = "reasoning_content" if h.reasoning and count <= tokens // 2 else "content"
            delta = {} if h.silent else {name: "wort\u00e9 "}
            if h.comments:
                yield count, f": ping{h.newline}{h.newline}".encode()
            yield count, self._event({"choices": [{"delta": delta, "finish_reason": None}]}, count)
        if h.finish:
            usage = count if h.usage == "finish" or h.running_usage else None
            yield count, self._event({"choices": [{"delta": {}, "finish_reason": h.finish}]}, usage)
        if h.usage == "separate":
            yield count, self._event({"choices": [], "usage": {"completion_tokens": count}}, None)
        if h.done:
            yield count, f"data: [DONE]{h.newline}{h.newline if h.final_blank else ''}".encode()

    def _event(self, chunk: dict[str, Any], usage: int | None) -> bytes:
        h = self.habits
        if (
            usage is not None
            and h.usage != "none"
            and (h.running_usage or chunk["choices"][0].get("finish_reason"))
        ):
            chunk = {**chunk, "usage": {"completion_tokens": usage}}
        text = json.dumps(chunk, ensure_ascii=False, indent=1 if h.multi_line else None)
        return "".join(f"data: {line}{h.newline}" for line in text.split("\n")).encode() + h.newline.encode()

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = self.habits.split or len(data)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self.habits.framing == "chunked" else piece)
            if self.habits.split:
                await asyncio.sleep(0)
        await writer.drain()


@asynccontextmanager
async def serving(habits: Habits = Habits(), host: str = "127.0.0.1") -> AsyncIterator[TruthServer]:
    truth = TruthServer(habits)
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await truth.serve(reader, writer)

    server = await asyncio.start_server(accept, host, 0)
    port = server.sockets[0].getsockname()[1]
    truth.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        yield truth
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

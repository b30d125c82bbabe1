"""A simulated inference server: OpenAI's HTTP interface at a given speed, with faults, and no model.

Runs as ``python -I -S server.py CONFIG.json`` in a process of its own, by file path: it imports nothing but the
standard library. The parent binds the socket and leaves it without ``listen()``, so connections are refused until
the simulated model has loaded. Every answer says that it is simulated: the ``Server`` header, ``simulated`` or
``system_fingerprint`` in the body.

Durations in CONFIG.json are simulated seconds, ``time_factor`` of which pass in a real one. The file may be replaced
at any time; requests after that see the new content.
"""

import asyncio
import heapq
import json
import math
import os
import signal
import socket
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any

HEAD_LIMIT = 64 * 1024
BODY_LIMIT = 1024 * 1024
POLL_SECONDS = 0.05  # real seconds between two looks at the config, the parent and the drain
LINGER_SECONDS = 1.0  # real seconds for a refused client to read why, before the connection is closed
CHUNKS_PER_SECOND = 2500  # over all streams, in real time: more would keep a small machine busy
# Real seconds for a client to send its next request after an answer, plus as much for each stream it serves.
TURNAROUND_SECONDS = 0.010
TURNAROUND_EACH = 0.001
HEALTH_SECONDS = 1.0  # /health generates a token
DEFAULT_LENGTH = 128  # tokens of an ignore_eos request without max_tokens
BROKEN_LENGTH = 200  # most tokens of an answer that is one character over and over
NONSENSE_LENGTH = 40
ANSWER_FAULTS = frozenset(
    {"ok", "empty", "exclaim", "nonsense", "no-tokens", "error500", "hang", "die-half-way", "no-usage"}
)
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_WORDS = ["river", "amber", "lantern", "quiet", "meadow", "copper", "winter", "basket", "harbour", "velvet", "orchard", "thunder", "pebble", "market", "silver", "canyon", "feather", "morning", "engine", "cedar", "window", "marble", "garden", "compass", "island", "shadow", "ribbon", "valley", "hammer", "cotton", "bridge", "maple", "kettle", "prairie", "saddle", "mirror", "timber", "ocean", "candle", "granite", "willow", "tunnel", "beacon", "walnut", "summit", "anchor", "glacier", "tulip"]


def _filler(count: int) -> list[bytes]:
    """Varied words that no test for repeated text takes for a loop; the same ones at every start."""
    state, words = 1, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        words.append(b" " + _WORDS[(state >> 16) % len(_WORDS)].encode())
    return words


FILLER = _filler(4096)


def filler(start: int, count: int) -> list[bytes]:
    """``count`` tokens, different ones for each ``start``, the first of which says what this is."""
    skip = start * 977 % len(FILLER)
    words = (FILLER * (count // len(FILLER) + 2))[skip : skip + count]
    return [b"Simulated:", *words[1:]] if count else []


# -- configuration ---------------------------------------------------------------------------------------------------


class Config:
    """CONFIG.json. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for one that cannot be used."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.fd = int(data["fd"])
        self.time_factor = float(data["time_factor"])
        if not 0 < self.time_factor < math.inf:
            raise ValueError(f"time_factor: expected a number above 0, not {self.time_factor}")
        # Counted from when this value was first seen; None: it never gets there.
        self.load_seconds = None if data["load_seconds"] is None else float(data["load_seconds"])
        self.served_model = str(data["served_model"])
        self.model_path = str(data.get("model_path", ""))
        self.version = str(data.get("version", ""))
        self.argv = [str(word) for word in data.get("argv", ())]
        self.max_total_tokens = int(data["max_total_tokens"])
        self.factor = float(data.get("factor", 1.0))
        self.ttft_seconds = float(data.get("ttft_seconds", 0.25))
        self.chunk_seconds = float(data.get("chunk_seconds", 1.5))
        self.answers = [(str(pair["match"]), str(pair["answer"])) for pair in data.get("answers", ())]
        self.default_answer = str(data.get("default_answer", "This is a simulated answer."))
        self.server_info = dict(data.get("server_info", {}))
        drain = data.get("drain_seconds")  # like the real one's, a drain without a limit may last for ever
        self.drain_seconds = math.inf if drain is None else float(drain)
        self.ignore_sigterm = data.get("sigterm") == "ignore"
        self.parent_pid = data.get("parent_pid")
        self.speeds = sorted((int(c), float(speed)) for c, speed in data["speeds"])
        if not self.speeds or self.speeds[0][0] < 1:
            raise ValueError("speeds: expected rows of [concurrency from 1, tokens per second]")
        self.faults = dict(data.get("faults", {}))
        self.answer_fault = str(self.faults.get("answer", "ok"))
        if self.answer_fault not in ANSWER_FAULTS:
            raise ValueError(
                f"faults.answer: {self.answer_fault!r} is none of {', '.join(sorted(ANSWER_FAULTS))}"
            )
        health = str(self.faults.get("health", "ok"))  # "ok", "hang" or an HTTP status
        self.health_hangs = health == "hang"
        self.health_status = 200 if health in ("ok", "hang") else int(health)
        self.fault_after = int(self.faults.get("after_requests") or 0)
        count = self.faults.get("requests")
        self.fault_until = math.inf if count is None else self.fault_after + int(count)

    def real(self, simulated_seconds: float) -> float:
        return simulated_seconds / self.time_factor

    def throughput(self, concurrency: int) -> float:
        """Tokens per real second of all streams together: a straight line over log(concurrency) between two rows."""
        rows = self.speeds
        place = bisect_left(rows, (concurrency, 0.0))
        if place == len(rows):
            speed = rows[-1][1]
        elif place == 0:
            speed = rows[0][1] * concurrency / rows[0][0]
        else:
            (low, slow), (high, fast) = rows[place - 1], rows[place]
            share = math.log(concurrency / low) / math.log(high / low)
            speed = slow + share * (fast - slow)
        return speed * self.factor * self.time_factor


class ConfigFile:
    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.current = self._read()

    def changed(self) -> bool:
        """Whether ``current`` is a new one. A file that cannot be used leaves the old one in force."""
        try:
            if self._signature() == self._seen:
                return False
            self.current = self._read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{self._path}: not used: {error!r}", file=sys.stderr)  # noqa: T201 - a program's stderr
            return False
        return True

    def _signature(self) -> tuple[int, int, int]:
        status = os.stat(self._path)  # noqa: PTH116 - pathlib would cost start-up time
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> Config:
        # Before reading: a file replaced in between is then read once more, never missed.
        self._seen = self._signature()
        with open(self._path, encoding="utf-8") as file:  # noqa: PTH123 - as above
            data = json.load(file)
        if not isinstance(data, dict):
            raise TypeError("expected an object")
        return Config(data)


# -- speed -----------------------------------------------------------------------------------------------------------


class Slot:
    """Where a stream begins, or where one ended and the next one may go on."""

    __slots__ = ("at", "expires", "level")

    def __init__(self, level: float, at: float, expires: float) -> None:
        self.level = level
        self.at = at
        self.expires = expires


class Engine:
    """Shares the speed among the running completions, in real time.

    ``_level`` counts the tokens that a stream running from the very beginning would have by now. All streams are
    equally fast, so a stream of n tokens that began at level v ends when the level reaches v + n, whatever comes
    and goes meanwhile. Ends are computed, never summed up from ticks: lateness of this process does not add up.

    A machine's milliseconds become whole seconds under a high time factor. A client's next request therefore takes
    the slot of the answer before it as if it had come at once, if it comes within the client's turnaround; until
    then the slot counts as busy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Callable[[], Config]) -> None:
        self._loop = loop
        self._config = config
        self._level = 0.0
        self._at = loop.time()
        self._free: deque[Slot] = deque()
        self._ends: list[tuple[float, int, Completion]] = []  # by level
        self._chunks: list[tuple[float, int, Completion]] = []  # by real time
        self._timer: asyncio.TimerHandle | None = None
        self.running: set[Completion] = set()

    def add(self, work: "Completion") -> None:
        self._advance(self._loop.time())
        slot = self._free.popleft() if self._free else Slot(self._level, self._at, 0.0)
        config = self._config()
        queue = 1 + len(self.running) / 32
        self.running.add(work)
        work.begin(slot.level, slot.at + config.real(config.ttft_seconds) * queue)
        heapq.heappush(self._ends, (work.end_level, work.number, work))
        heapq.heappush(self._chunks, (work.first_due, work.number, work))
        self._arm()

    def remove(self, work: "Completion") -> None:
        """Its client has gone: it no longer slows the others."""
        self._advance(self._loop.time())
        self.running.discard(work)
        self._arm()

    def settle(self) -> None:
        """Account for the time up to now at the speed so far. Before the configuration changes."""
        self._advance(self._loop.time())

    def resume(self) -> None:
        """After the configuration has changed."""
        self._arm()

    def _rate(self) -> float:
        """Tokens per real second of one stream."""
        busy = len(self.running) + len(self._free)
        return self._config().throughput(busy) / busy if busy else 0.0

    def _advance(self, now: float) -> None:
        while self._free and self._free[0].expires <= now:
            self._move(self._free[0].expires)
            self._free.popleft()
        self._move(now)

    def _move(self, to: float) -> None:
        if to > self._at:
            self._level += self._rate() * (to - self._at)
            self._at = to

    def _arm(self) -> None:
        due = [self._chunks[0][0]] if self._chunks else []
        if self._free:
            due.append(self._free[0].expires)
        rate = self._rate()
        if self._ends and rate:
            due.append(self._at + max(0.0, self._ends[0][0] - self._level) / rate)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(due), self._run) if due else None

    def _run(self) -> None:
        now = self._loop.time()
        self._advance(now)
        while self._ends and self._ends[0][0] <= self._level + 1e-6:
            level, _, work = heapq.heappop(self._ends)
            if work not in self.running:
                continue
            if work.started or work.first_due <= now:
                self._end(work, level)
            else:
                work.overdue = True  # so short that it ends with its first token
        config = self._config()
        interval = max(config.real(config.chunk_seconds), len(self.running) / CHUNKS_PER_SECOND)
        while self._chunks and self._chunks[0][0] <= now:
            due, _, work = heapq.heappop(self._chunks)
            if work not in self.running:
                continue
            if work.overdue:
                self._end(work, self._level)
            else:
                work.show(self._level)
                heapq.heappush(self._chunks, (max(due + interval, now), work.number, work))
        self._arm()

    def _end(self, work: "Completion", level: float) -> None:
        self.running.discard(work)
        busy = len(self.running) + len(self._free) + 1
        since = (self._level - level) * busy / (self._config().throughput(busy) or math.inf)
        patience = TURNAROUND_SECONDS + TURNAROUND_EACH * busy
        self._free.append(Slot(level, self._at - since, self._at + patience))
        work.end()


# -- completions -----------------------------------------------------------------------------------------------------


class BadRequestError(Exception):
    """What is wrong with a request, for HTTP 400."""


class Asked:
    """The body of a completion request. Raises ``BadRequestError``."""

    def __init__(self, body: bytes, *, chat: bool) -> None:
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise BadRequestError("the body is not a JSON object")
        self.chat = chat
        self.prompt = _chat_text(data.get("messages")) if chat else _plain_text(data.get("prompt"))
        self.limit = data.get("max_tokens", data.get("max_completion_tokens"))
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise BadRequestError(f"max_tokens: expected an integer from 1, not {self.limit!r}")
        self.ignore_eos = data.get("ignore_eos") is True
        self.stream = data.get("stream") is True
        options = data.get("stream_options")
        options = options if isinstance(options, dict) else {}
        self.last_usage = options.get("include_usage") is True
        self.running_usage = options.get("continuous_usage_stats") is True

    @property
    def prompt_tokens(self) -> int:
        return max(1, len(self.prompt.split()))


def _chat_text(messages: object) -> str:
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequestError("messages: expected a list of objects with role and content")
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [
            part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
    return "\n".join(texts)


def _plain_text(prompt: object) -> str:
    if isinstance(prompt, list):
        return " ".join(map(str, prompt))
    if not isinstance(prompt, str):
        raise BadRequestError("prompt: expected a string or a list")
    return prompt


class Answer:
    """What a completion says: one piece of text, escaped for JSON, per token."""

    def __init__(self, pieces: list[bytes], finish: str, fault: str) -> None:
        self.pieces = pieces
        self.finish = finish
        self.usage = fault != "no-usage"
        self.dies = fault == "die-half-way"


def compose(config: Config, asked: Asked, fault: str, number: int) -> Answer:
    """The answer to a request under a fault. ``number`` varies the filler."""
    if fault == "no-tokens":
        return Answer([], "stop", fault)
    exact = asked.limit or DEFAULT_LENGTH
    if fault == "exclaim":
        return Answer([b"!"] * (exact if asked.ignore_eos else min(exact, BROKEN_LENGTH)), "length", fault)
    if asked.ignore_eos:
        pieces, finish = filler(number, exact), "length"
    elif fault == "nonsense":
        pieces, finish = _cut(filler(number, NONSENSE_LENGTH)[1:], asked.limit)
    else:
        text = next(
            (answer for match, answer in config.answers if match in asked.prompt), config.default_answer
        )
        words = [json.dumps(word)[1:-1].encode() for word in text.split(" ")]
        pieces, finish = _cut([words[0], *(b" " + word for word in words[1:])], asked.limit)
    return Answer([b""] * len(pieces) if fault == "empty" else pieces, finish, fault)


def _cut(pieces: list[bytes], limit: int | None) -> tuple[list[bytes], str]:
    return (pieces, "stop") if limit is None or len(pieces) <= limit else (pieces[:limit], "length")


class Completion:
    """One running request: what it says, how far it is, and how that is written to its client."""

    def __init__(self, number: int, asked: Asked, answer: Answer, model: str, client: "Connection") -> None:
        self.number = number
        self.end_level = self.first_due = 0.0
        self.started = self.overdue = False
        self._first_level = 0.0
        self._shown = 0
        self._asked = asked
        self._answer = answer
        self._client = client
        self._prompt_tokens = asked.prompt_tokens
        self._id = f"sim-{number}"
        self._created = int(time.time())
        self._model = model
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        about = {**self._about(kind), "choices": [{"index": 0}]}
        # A chunk is put together from bytes: one json.dumps for each would be most of this process's work.
        self._open = b"data: " + json.dumps(about).encode()[:-3] + b", "

    def begin(self, level: float, first_due: float) -> None:
        self.end_level = level + len(self._answer.pieces)
        self.first_due = first_due
        if self._asked.stream:
            self._client.begin_stream()

    def show(self, level: float) -> None:
        """Send what is due at this level, all but the last token.

        The speeds are those of whole requests, time to first token included. So the tokens are spread over the time
        that is left after the first one.
        """
        count = len(self._answer.pieces)
        if not self.started:
            self.started, self._first_level = True, level
            shown = min(1, count - 1)
        else:
            left = self.end_level - self._first_level
            share = min(1.0, (level - self._first_level) / left) if left > 0 else 1.0
            shown = min(1 + int((count - 1) * share), count - 1)
        if self._asked.stream and shown > self._shown:
            self._client.send_events(self._chunk(shown))
        self._shown = max(self._shown, shown)
        if self._answer.dies and self._shown * 2 >= count - 1:
            # As SGLang's launcher does when one of its processes crashes.
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        if self._answer.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._asked.stream:
            self._client.finish_stream(self._last_chunks())
        else:
            self._client.reply(200, self._whole())

    def _about(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": "simulated",
        }

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _event(self, choice: bytes, tokens: int) -> bytes:
        usage = b""
        if self._asked.running_usage and self._answer.usage:
            prompt = self._prompt_tokens
            usage = b', "usage": {"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}' % (
                prompt,
                tokens,
                prompt + tokens,
            )
        return b"%s%s}]%s}\n\n" % (self._open, choice, usage)

    def _chunk(self, shown: int) -> bytes:
        text = b"".join(self._answer.pieces[self._shown : shown])
        if not self._asked.chat:
            return self._event(b'"text": "%s", "finish_reason": null' % text, shown)
        role = b"" if self._shown else b'"role": "assistant", '
        return self._event(b'"delta": {%s"content": "%s"}, "finish_reason": null' % (role, text), shown)

    def _last_chunks(self) -> bytes:
        count = len(self._answer.pieces)
        nothing = b'"delta": {}' if self._asked.chat else b'"text": ""'
        events = [self._chunk(count)] if count else []
        events.append(
            self._event(b'%s, "finish_reason": "%s"' % (nothing, self._answer.finish.encode()), count)
        )
        if self._asked.last_usage and self._answer.usage:
            kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
            last = {**self._about(kind), "choices": [], "usage": self._usage(count)}
            events.append(b"data: " + json.dumps(last).encode() + b"\n\n")
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def _whole(self) -> dict[str, Any]:
        text = json.loads(b'"' + b"".join(self._answer.pieces) + b'"')
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._answer.finish}
        if self._asked.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        document = {
            **self._about("chat.completion" if self._asked.chat else "text_completion"),
            "choices": [choice],
        }
        if self._answer.usage:
            document["usage"] = self._usage(len(self._answer.pieces))
        return document


# -- HTTP ------------------------------------------------------------------------------------------------------------


class Request:
    __slots__ = ("body", "method", "path")

    def __init__(self, method: str, path: str, body: bytes) -> None:
        self.method = method
        self.path = path
        self.body = body


class RefusedError(Exception):
    """A request that is not read to its end: status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Head:
    """The head of a request. Raises ``RefusedError``."""

    def __init__(self, data: bytes) -> None:
        lines = data.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[0].isalpha() or not words[1].startswith("/"):
            raise RefusedError(400, "expected a request line such as GET /health HTTP/1.1")
        if words[2] != "HTTP/1.1":
            raise RefusedError(505, "expected HTTP/1.1")
        self.method, target = words[0], words[1]
        self.path = target.partition("?")[0]
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise RefusedError(400, "a header line is not NAME: VALUE")
            headers[name.lower()] = value.strip()
        if "transfer-encoding" in headers:
            raise RefusedError(501, "expected a body with Content-Length, not Transfer-Encoding")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise RefusedError(400, "Content-Length: expected a number")
        if len(length) > 12 or int(length) > BODY_LIMIT:
            raise RefusedError(413, f"the body is larger than {BODY_LIMIT} bytes")
        self.length = int(length)
        self.closes = headers.get("connection", "").lower() == "close"
        self.waits = headers.get("expect", "").lower() == "100-continue"


class Connection(asyncio.Protocol):
    """One client: HTTP/1.1 requests, one after the other."""

    def __init__(self, app: "Server") -> None:
        self._app = app
        self._buffer = bytearray()
        self._head: Head | None = None
        self._head_size = 0
        self._busy = False
        self._closing = False  # after the present answer
        self.transport: asyncio.Transport
        self.on_lost: Callable[[], None] | None = (
            None  # what the present request wants done when the client goes
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - tells the type checker
        self.transport = transport
        self._app.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - part of the protocol
        self._app.connections.discard(self)
        self._busy = self._closing = True
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._closing and not self._busy:
            return
        self._buffer += data
        if self._busy and len(self._buffer) > HEAD_LIMIT + BODY_LIMIT:
            self.transport.pause_reading()
        self._next()

    def _next(self) -> None:
        if self._busy or self._closing:
            return
        try:
            request = self._take()
        except RefusedError as error:
            self._closing = self._busy = True
            self.reply(error.status, error_document(error.status, str(error)))
            return
        if request is not None:
            self._busy = True
            self._app.handle(self, request)

    def _take(self) -> Request | None:
        """The next whole request of the buffer; None while more must come. Raises ``RefusedError``."""
        if self._head is None:
            size = self._buffer.find(b"\r\n\r\n")
            if size > HEAD_LIMIT or (size < 0 and len(self._buffer) > HEAD_LIMIT):
                raise RefusedError(431, f"no end of the headers within {HEAD_LIMIT} bytes")
            if size < 0:
                return None
            self._head = Head(bytes(self._buffer[:size]))
            del self._buffer[: size + 4]
            if self._head.waits and len(self._buffer) < self._head.length:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = self._head
        if len(self._buffer) < head.length:
            return None
        body = bytes(self._buffer[: head.length])
        del self._buffer[: head.length]
        self._head = None
        self._closing = head.closes
        return Request(head.method, head.path, body)

    def reply(self, status: int, document: dict[str, Any], headers: str = "") -> None:
        body = json.dumps(document).encode()
        head = self._start(
            status, f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}"
        )
        self.transport.write(head + body)
        self._answered()

    def begin_stream(self) -> None:
        kind = "Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n"
        self.transport.write(self._start(200, kind))

    def send_events(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def finish_stream(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        self._answered()

    def _start(self, status: int, headers: str) -> bytes:
        if self._app.draining:
            self._closing = True
        close = "Connection: close\r\n" if self._closing else ""
        reason = REASONS.get(status, "Simulated")
        return f"HTTP/1.1 {status} {reason}\r\nServer: simulated\r\n{headers}{close}\r\n".encode("latin-1")

    def _answered(self) -> None:
        self._busy = False
        self.on_lost = None
        if not self._closing:
            self.transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._next)
        elif self.transport.can_write_eof():
            # Closing with input unread would reset the connection, and the client might never see the answer.
            self._buffer.clear()
            self.transport.resume_reading()
            self.transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.close)
        self._app.look_for_end()


def error_document(status: int, message: str) -> dict[str, Any]:
    return {
        "object": "error",
        "message": message,
        "type": REASONS.get(status, ""),
        "code": status,
        "simulated": True,
    }


# -- the server ------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, file: ConfigFile, parent: int) -> None:
        self._file = file
        self._parent = parent
        self._loop = asyncio.get_running_loop()
        self._engine = Engine(self._loop, lambda: file.current)
        self._left = self._loop.create_future()
        self._listener: asyncio.Server | None = None
        self._load_seen = self._loop.time()
        self._drain_until = math.inf
        self._hung: set[Connection] = set()
        self._asked = 0  # completion requests since these faults are set
        self._number = 0
        self.connections: set[Connection] = set()
        self.draining = False

    async def run(self) -> None:
        """Until drained after SIGTERM, or until the parent is gone."""
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        sock = socket.socket(fileno=self._file.current.fd)
        # Not PR_SET_PDEATHSIG: that kills when the parent's *thread* ends which started this process.
        while not self._left.done() and os.getppid() == self._parent:
            self._refresh()
            pause = POLL_SECONDS
            if self._listener is None and self._file.current.load_seconds is not None:
                loaded = self._load_seen + self._file.current.real(self._file.current.load_seconds)
                if loaded <= self._loop.time():
                    self._listener = await self._loop.create_server(
                        lambda: Connection(self), sock=sock, backlog=1024
                    )
                else:
                    pause = min(pause, loaded - self._loop.time())
            self.look_for_end()
            await asyncio.wait((self._left,), timeout=pause)

    def _terminate(self) -> None:
        self._refresh()
        config = self._file.current
        if config.ignore_sigterm or self.draining:
            return
        self.draining = True
        self._drain_until = self._loop.time() + config.real(config.drain_seconds)
        self.look_for_end()

    def look_for_end(self) -> None:
        """When draining: leave if nothing runs any more and everything is sent, or the time is over."""
        if not self.draining or self._left.done():
            return
        busy = self._engine.running or self._hung
        unsent = any(c.transport.get_write_buffer_size() for c in self.connections)
        if self._listener is None or not (busy or unsent) or self._loop.time() >= self._drain_until:
            self._left.set_result(None)

    def _refresh(self) -> None:
        before = self._file.current
        self._engine.settle()
        if not self._file.changed():
            return
        now = self._file.current
        if now.faults != before.faults:
            self._asked = 0
        if now.load_seconds != before.load_seconds:
            self._load_seen = self._loop.time()
        self._engine.resume()

    def handle(self, client: Connection, request: Request) -> None:
        self._refresh()
        routes: dict[str, tuple[str, Callable[[Connection, Request], None]]] = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/server_info": ("GET", self._info),
            "/get_server_info": ("GET", self._info),
            "/v1/chat/completions": ("POST", self._complete),
            "/v1/completions": ("POST", self._complete),
        }
        if request.path not in routes:
            client.reply(
                404, error_document(404, f"{request.path}: not found; there are {', '.join(routes)}")
            )
            return
        method, handler = routes[request.path]
        if request.method == method:
            handler(client, request)
        else:
            message = f"{request.path}: expected {method}, not {request.method}"
            client.reply(405, error_document(405, message), f"Allow: {method}\r\n")

    def _faulty(self) -> bool:
        config = self._file.current
        return config.fault_after <= self._asked < config.fault_until

    def _hang(self, client: Connection) -> None:
        self._hung.add(client)

        def lost() -> None:
            self._hung.discard(client)
            self.look_for_end()

        client.on_lost = lost

    def _health(self, client: Connection, request: Request) -> None:  # noqa: ARG002 - a route
        config = self._file.current
        if self._faulty() and config.health_hangs:
            self._hang(client)
            return
        status = config.health_status if self._faulty() else 200
        timer = self._loop.call_later(config.real(HEALTH_SECONDS), self._say_health, client, status)
        client.on_lost = timer.cancel

    def _say_health(self, client: Connection, status: int) -> None:
        if self.draining:
            status = 503
        if status == 200:
            client.reply(200, {"status": "ok", "simulated": True})
        else:
            client.reply(status, error_document(status, "draining" if self.draining else "not healthy"))

    def _models(self, client: Connection, request: Request) -> None:  # noqa: ARG002 - a route
        config = self._file.current
        model = {"id": config.served_model, "object": "model", "created": 0, "owned_by": "simulated"}
        client.reply(
            200, {"object": "list", "data": [{**model, "root": config.model_path}], "simulated": True}
        )

    def _info(self, client: Connection, request: Request) -> None:  # noqa: ARG002 - a route
        config = self._file.current
        document = {
            **server_args(config.argv),
            "model_path": config.model_path,
            "served_model_name": config.served_model,
            "version": config.version,
            "max_total_num_tokens": config.max_total_tokens,
            "running_requests": len(self._engine.running) + len(self._hung),
            **config.server_info,
            "simulated": True,
        }
        client.reply(200, document)

    def _complete(self, client: Connection, request: Request) -> None:
        config = self._file.current
        if self.draining:
            client.reply(503, error_document(503, "draining: no new requests"))
            return
        try:
            asked = Asked(request.body, chat="/chat/" in request.path)
            if asked.prompt_tokens + (asked.limit or 0) > config.max_total_tokens:
                raise BadRequestError(
                    f"prompt and max_tokens exceed the {config.max_total_tokens} tokens of the cache"
                )
        except BadRequestError as error:
            client.reply(400, error_document(400, str(error)))
            return
        fault = config.answer_fault if self._faulty() else "ok"
        self._asked += 1
        self._number += 1
        if fault == "error500":
            client.reply(500, error_document(500, "simulated fault: internal error"))
        elif fault == "hang":
            self._hang(client)
        else:
            answer = compose(config, asked, fault, self._number)
            work = Completion(self._number, asked, answer, config.served_model, client)
            client.on_lost = lambda: self._gone(work)
            self._engine.add(work)

    def _gone(self, work: Completion) -> None:
        self._engine.remove(work)
        self.look_for_end()


def server_args(argv: list[str]) -> dict[str, Any]:
    """Flags as the server would report them: ``--tp-size 4`` is ``"tp_size": 4``."""
    flags: dict[str, Any] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = _typed(value) if given else True
        elif name:
            # Several values after one flag become a list.
            before = flags[name]
            flags[name] = _typed(word) if before is True else [*_listed(before), _typed(word)]
    return flags


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _typed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


async def serve(file: ConfigFile, parent: int) -> None:
    await Server(file, parent).run()


def main(arguments: list[str]) -> int:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, with which this process ends
    if len(arguments) != 1:
        print("usage: python -I -S server.py CONFIG.json", file=sys.stderr)  # noqa: T201 - a program's stderr
        return 2
    try:
        file = ConfigFile(arguments[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{arguments[0]}: {error!r}", file=sys.stderr)  # noqa: T201 - a program's stderr
        return 2
    asyncio.run(serve(file, file.current.parent_pid or parent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

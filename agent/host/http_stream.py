"""HTTP/1.1 as inference servers speak it: one request per connection, the answer handed over as it is read.

Only what is needed towards a loopback or container address: no TLS, no redirects, no compression.
"""

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httptools

_HEAD_LIMIT = 64 * 1024
_EVENT_LIMIT = 1024 * 1024
BODY_LIMIT = 8 * 1024 * 1024


class BadReplyError(OSError):
    """The server answered, but not with what was asked for."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    prefix: str  # path that comes before every path, without a final slash

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(url: str) -> Endpoint:
    """The endpoint of a base URL such as ``http://127.0.0.1:30000`` or ``http://[fd00::2]:30000/api``."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, 80 if parts.port is None else parts.port
    except ValueError as error:
        raise OSError(errno.EINVAL, f"{url!r}: not a URL: {error}") from error
    if parts.scheme != "http" or not host or port == 0 or parts.username is not None:
        raise OSError(errno.EINVAL, f"{url!r}: expected http://HOST:PORT")
    return Endpoint(host, port, parts.path.rstrip("/"))


def build_request(endpoint: Endpoint, method: str, path: str, body: bytes = b"") -> bytes:
    target = endpoint.prefix + path
    if not target.startswith("/") or not target.isascii() or any(c <= " " or c == "\x7f" for c in target):
        raise OSError(errno.EINVAL, f"{target!r}: expected a path such as /health")
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {endpoint.authority}",
        "User-Agent: gpu-host-agent",
        "Accept: text/event-stream, application/json, */*",
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body


class Sink(Protocol):
    """Takes an answer as it comes. ``body`` may raise ``OSError`` to end the exchange."""

    def head(self, status: int, content_type: str) -> None: ...

    def body(self, data: bytes) -> None: ...

    def read_done(self, at: float) -> bool:
        """After everything of one read, with its time; True when nothing more is needed."""
        ...

    def whole(self) -> bool:
        """The answer is complete although the connection ended without saying so."""
        ...


class Body:
    """A sink that keeps a whole body of bounded size."""

    def __init__(self, limit: int = BODY_LIMIT) -> None:
        self.status = 0
        self.data = bytearray()
        self._limit = limit

    def head(self, status: int, content_type: str) -> None:  # noqa: ARG002 - part of the Sink protocol
        self.status = status

    def body(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > self._limit:
            raise BadReplyError(f"the answer is larger than {self._limit} bytes")

    def read_done(self, at: float) -> bool:  # noqa: ARG002 - part of the Sink protocol
        return False

    def whole(self) -> bool:
        return False

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


async def exchange(endpoint: Endpoint, request: bytes, sink: Sink, now: Callable[[], float]) -> None:
    """Send one request over a new connection and feed the answer to ``sink``.

    Returns at the end of the answer, or when the sink needs no more. Raises ``OSError``.
    """
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(
        lambda: _Connection(request, sink, now), endpoint.host, endpoint.port
    )
    try:
        await connection.finished
    finally:
        transport.abort()
        await connection.closed


class _Connection(asyncio.Protocol):
    """One connection; also the callbacks of its parser."""

    def __init__(self, request: bytes, sink: Sink, now: Callable[[], float]) -> None:
        loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._request = request
        self._sink = sink
        self._now = now
        self._parser = httptools.HttpResponseParser(self)
        self._failure: OSError | None = None
        self._received = 0
        self._content_type = ""
        self._framed = False  # the answer says where it ends
        self._headed = False
        self._complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)  # noqa: S101 - tells the type checker
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.finished.done():
            return
        at = self._now()
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete and self._failure is None:
                self._failure = BadReplyError(f"the answer is not HTTP/1.1: {error}")
        if not self._headed and self._received > _HEAD_LIMIT:
            self._failure = BadReplyError(f"the answer has no end of headers within {_HEAD_LIMIT} bytes")
        self._settle(at)

    def _settle(self, at: float) -> None:
        enough = False
        if self._failure is None:
            try:
                enough = self._sink.read_done(at)
            except OSError as error:
                self._failure = error
        if self._failure is not None:
            self._fail(self._failure)
        elif enough or self._complete:
            self.finished.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)
        if self.finished.done():
            return
        if self._headed and (self._sink.whole() or (exc is None and not self._framed)):
            self.finished.set_result(None)
        elif exc is not None:
            self._fail(exc if isinstance(exc, OSError) else ConnectionError(str(exc)))
        else:
            when = "in the middle of its answer" if self._headed else "without an answer"
            self._fail(ConnectionError(f"the server closed the connection {when}"))

    def _fail(self, error: OSError) -> None:
        self.finished.set_exception(error)
        self.finished.exception()  # marks it as seen: nobody waits if connecting was cancelled

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._content_type = value.decode("latin-1")
            case b"content-length":
                self._framed = True
            case b"transfer-encoding":
                self._framed = self._framed or b"chunked" in value.lower()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._headed = True
            self._sink.head(status, self._content_type)

    def on_body(self, data: bytes) -> None:
        # An exception would come back from the parser as another one: it is kept here instead.
        if self._failure is None:
            try:
                self._sink.body(data)
            except OSError as error:
                self._failure = error

    def on_message_complete(self) -> None:
        self._complete = self._headed  # a 1xx answer is followed by the real one


class EventDecoder:
    """Server-sent events from any split of bytes: LF or CRLF, comments, data over several lines.

    Source: WHATWG HTML, section 9.2.6. Only the data of events is kept.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends in these bytes."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        events: list[bytes] = []
        for line in lines:
            self._line(line.removesuffix(b"\r"), events)
        if len(self._tail) + self._size > _EVENT_LIMIT:
            raise BadReplyError(f"one event of the stream is larger than {_EVENT_LIMIT} bytes")
        return events

    def finish(self) -> list[bytes]:
        """The last event of a stream that ends without the empty line after it."""
        return self.feed(b"\n\n")

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            value = line[5:].removeprefix(b" ")
            self._data.append(value)
            self._size += len(value) + 1
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data, self._size = [], 0

"""HTTP/1.1 as far as the simulated inference server needs it. Garbage gets an error status, never a crash."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Protocol

HEAD_LIMIT = 64 * 1024
BODY_LIMIT = 1024 * 1024
LINGER_SECONDS = 1.0  # real seconds for a refused client to read why, before the connection is closed
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


class App(Protocol):
    """Who answers the requests."""

    connections: set["Connection"]
    draining: bool

    def handle(self, client: "Connection", request: "Request") -> None: ...

    def look_for_end(self) -> None: ...


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

    def __init__(self, app: App) -> None:
        self._app = app
        self._buffer = bytearray()
        self._head: Head | None = None
        self._busy = False
        self._closing = False  # after the present answer
        self.transport: asyncio.Transport
        self.on_lost: Callable[[], None] | None = (
            None  # called when the client goes before its answer is whole
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

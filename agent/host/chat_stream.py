"""One streamed chat completion: what its events say, and when they came."""

import json
from typing import Any

from agent.core.figures import Samples
from agent.host.http_stream import BadReplyError, EventDecoder

_EXCERPT = 160
_REPLY_LIMIT = 64 * 1024
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


def excerpt(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[:_EXCERPT] + "..."


def usage_tokens(usage: object) -> int | None:
    """``completion_tokens`` of a usage object; None when the server reported none."""
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0 else None


def error_text(document: object) -> str:
    """The message of an OpenAI-style error object; "" when it is none."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error") or (document if document.get("object") == "error" else None)
    if not error:
        return ""
    return excerpt(str(error.get("message", error) if isinstance(error, dict) else error))


class ChatStream:
    """A sink for ``stream: true``. Tokens are those of ``usage``, never a count of chunks.

    Times are those of the read that brought an event, on the caller's clock. Between two reads that brought
    tokens, each token took (time between) / (tokens in the second): with speculative decoding a chunk holds
    several. The samples of a request go to ``samples`` as they come.
    """

    def __init__(self, samples: Samples, started: float) -> None:
        self.started = started
        self.progress_at = started
        self.first_at: float | None = None  # first text, reasoning included
        self.last_at = started  # last text, finish or usage
        self.finish = ""
        self.tokens: int | None = None
        self._samples = samples
        self._decoder = EventDecoder()
        self._status = 0
        self._content_type = ""
        self._reply = bytearray()  # what came instead of a stream
        self._done = False
        self._events = 0
        self._text_came = False
        self._news = False
        self._timed: tuple[float, int] | None = None  # time and tokens of the last read that brought tokens
        self._itl_known = False

    def head(self, status: int, content_type: str) -> None:
        self._status, self._content_type = status, content_type

    def body(self, data: bytes) -> None:
        if self._status != 200:
            self._reply += data[: _REPLY_LIMIT - len(self._reply)]
            return
        for event in self._decoder.feed(data):
            self._event(event)

    def read_done(self, at: float) -> bool:
        if self._news:
            self._news = False
            self.last_at = self.progress_at = at
            self._time(at)
        return self._done

    def whole(self) -> bool:
        return bool(self.finish) and self.tokens is not None

    def close(self, asked: int) -> int:
        """End of the answer: its tokens. Raises ``BadReplyError`` saying why it does not count."""
        if self._status != 200:
            raise BadReplyError(f"HTTP {self._status}: {self._reply_text() or 'no text'}")
        for event in self._decoder.finish():
            self._event(event)
        if not self._events:
            kind = self._content_type or "no content type"
            raise BadReplyError(f"the answer holds no events ({kind}); expected an event stream")
        if self.finish in ("abort", "error"):
            raise BadReplyError(f"the server ended the answer with finish_reason {self.finish}")
        if not self.finish and not self._done:
            raise BadReplyError("the stream ended without a finish_reason")
        if self.tokens is None:
            raise BadReplyError("server reported no usage")
        if self.first_at is None:
            raise BadReplyError(f"the server reported {self.tokens} tokens but sent no text")
        if self.tokens > asked:
            raise BadReplyError(f"the server generated {self.tokens} tokens where {asked} were asked for")
        return self.tokens

    def record(self) -> None:
        """Add the request's own figures to the samples; only for an answer that counts."""
        if self.first_at is None or not self.tokens:
            return
        whole = self.last_at - self.started
        self._samples.ttft.add(self.first_at - self.started)
        self._samples.e2e.add(whole)
        self._samples.rate.add(self.tokens / max(whole, 1e-9))
        if not self._itl_known and self.tokens > 1:
            # No running usage: all that is known is the mean.
            self._samples.itl.add((self.last_at - self.first_at) / (self.tokens - 1), self.tokens - 1)

    def _time(self, at: float) -> None:
        if self.first_at is None:
            if self._text_came:
                self.first_at = at
                self._timed = (at, self.tokens or 0)
            return
        if self.tokens is None or self._timed is None or self.tokens <= self._timed[1]:
            return
        before, counted = self._timed
        if counted:
            new, gap = self.tokens - counted, at - before
            self._samples.itl.add(gap / new, new)
            self._samples.gap.add(gap)
            self._itl_known = True
        self._timed = (at, self.tokens)

    def _event(self, data: bytes) -> None:
        self._events += 1
        if data.strip() == b"[DONE]":
            self._done = True
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            text = excerpt(data.decode("utf-8", "replace"))
            raise BadReplyError(f"an event of the stream is not JSON: {text}") from error
        if said := error_text(chunk):
            raise BadReplyError(f"the server reported an error: {said}")
        if not isinstance(chunk, dict):
            raise BadReplyError(f"an event of the stream is no object: {excerpt(str(chunk))}")
        tokens = usage_tokens(chunk.get("usage"))
        if tokens is not None and tokens != self.tokens:
            self.tokens, self._news = tokens, True
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0])

    def _choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta.get(name) for name in TEXT_FIELDS):
            self._text_came = self._news = True
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish:
            self.finish, self._news = finish, True

    def _reply_text(self) -> str:
        text = self._reply.decode("utf-8", "replace")
        try:
            return error_text(json.loads(text)) or excerpt(text)
        except (ValueError, RecursionError):
            return excerpt(text)
